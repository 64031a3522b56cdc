"""Decoding in Spark: the schema ids of a read, its decoded columns, and its dead letters.

The executors decode in Python, as a run without Spark does. They need pyarrow and the library of
the format, but not this package: the code and the schemas are pickled into the plan, without the
registry login. All functions work in classic and in Connect sessions.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import BrokerError, DagsterRebalanceError
from dagster_rebalance.decoding.batches import (
    LETTER_DDL,
    UNDECODABLE,
    UNDECODABLE_DDL,
    batch_decoder,
    letter_maker,
)
from dagster_rebalance.decoding.columns import TIMESTAMP, quoted
from dagster_rebalance.spark.kafka_options import (
    OPTIONS_REDACTION,
    hide_secrets,
    spark_kafka_options,
)
from dagster_rebalance.spark.ranges import explained_read_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.decoding.batches import OnUndecodable
    from dagster_rebalance.decoding.decoder import Decoder

logger = logging.getLogger(__name__)

_OPTIONS_REDACTION_SETTING = "spark.sql.redaction.options.regex"
_MAX_REQUEST_SIZE = "kafka.max.request.size"
_NO_LIMIT = str(2**31 - 1)
"""Record limit of the client (default: 1 MiB), so only the topic limits the size of a letter."""
_PICKLED = (
    "dagster_rebalance.core.model.errors",
    "dagster_rebalance.core.model.printable",
    "dagster_rebalance.decoding",
)
# A framed payload has five bytes or more, the first of them 0.
_SCHEMA_IDS = (
    "collect_set(CASE WHEN length({0}) >= 5 AND substring({0}, 1, 1) = X'00' "
    "THEN CAST(conv(hex(substring({0}, 2, 4)), 16, 10) AS BIGINT) END) AS {0}"
)


def schema_ids(frame: DataFrame, parts: Sequence[str]) -> dict[str, list[int]]:
    """Read all records of `read_ranges`, and return the schema ids in their keys or values."""
    if not parts:
        return {}
    with explained_read_errors():
        (row,) = frame.selectExpr(*(_SCHEMA_IDS.format(part) for part in parts)).collect()
    return {part: sorted(row[part]) for part in parts}


def decoded_frame(
    frame: DataFrame, decoders: Sequence[Decoder], on_undecodable: OnUndecodable
) -> DataFrame:
    """Return a DataFrame of `read_ranges` with decoded keys, values, or both, and with headers.

    The decoders must have all schemas of the records.
    """
    types = {field.name: field.dataType.simpleString() for field in frame.schema}
    types["timestamp"] = TIMESTAMP.ddl  # the meaning of `timestamp` alone depends on the session
    types |= {decoder.part: decoder.open().column.ddl for decoder in decoders}
    if on_undecodable == "keep":
        types[UNDECODABLE] = UNDECODABLE_DDL
    ddl = ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())
    pickle_by_value()
    decoded = frame.mapInArrow(batch_decoder(decoders, on_undecodable), ddl)
    # Writers by range use it to recognize two parts of one read.
    return decoded.withMetadata("range_start", frame.schema["range_start"].metadata)


def write_letters(
    frame: DataFrame, decoders: Sequence[Decoder], topic: str, kafka_options: Mapping[str, object]
) -> None:
    """Store a dead letter for each undecodable record of a frame of `read_ranges`.

    Return when Kafka has confirmed all letters. The topic must exist, and the decoders must have
    all schemas of the records.
    """
    pickle_by_value()
    letters = frame.mapInArrow(letter_maker(decoders), LETTER_DDL)
    producer_options = {
        name: value
        for name, value in spark_kafka_options(kafka_options).items()
        if name not in {"kafka.isolation.level", "kafka.client.rack"}
    }
    # Kafka's default acks; the user's option may be lower, for less important outputs.
    options = hide_secrets({_MAX_REQUEST_SIZE: _NO_LIMIT, **producer_options, "kafka.acks": "all"})
    _redact_keys(frame.sparkSession)
    try:
        with explained_read_errors():
            writer = letters.write.format("kafka").options(**options).option("topic", topic)
            writer.mode("append").save()  # with another mode, Spark's newer source refuses to write
    except DagsterRebalanceError:
        raise
    except Exception as problem:
        cause = next((line for line in str(problem).splitlines() if "Exception" in line), "")
        msg = (
            f"the dead letters of undecodable records could not be stored in topic {topic}, and "
            f"nothing was committed: {cause or type(problem).__name__}. Create the topic if it "
            "does not exist, and grant Spark's login WRITE on it"
        )
        raise BrokerError(msg) from problem


def _redact_keys(session: SparkSession) -> None:
    """Keep private keys out of the plans of this session's writes to Kafka.

    The setting is not restored, because that would expose the keys of another running write.
    """
    try:
        # Any value replaces Spark's default, which masks the url of JDBC.
        known = session.conf.get(_OPTIONS_REDACTION_SETTING) or ""
        if OPTIONS_REDACTION not in known:
            either = f"(?:{known})|{OPTIONS_REDACTION}" if known else OPTIONS_REDACTION
            session.conf.set(_OPTIONS_REDACTION_SETTING, either)
    except Exception:
        logger.warning(
            "Spark refused %s: its plans may show a private key of the Kafka login, unless "
            "spark.redaction.string.regex masks it (docs/security.md)",
            _OPTIONS_REDACTION_SETTING,
            exc_info=True,
        )


def pickle_by_value() -> None:
    """Let cloudpickle send the decoding modules with the plan, instead of references to them."""
    from pyspark.cloudpickle import cloudpickle

    for name in _PICKLED:
        import_module(name)
        cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call]
