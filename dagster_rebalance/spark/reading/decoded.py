"""Decoding in Spark: which schemas a read names, its decoded columns, and its dead letters.

The executors decode, in Python, as a run without Spark does. They need the libraries of the formats
and pyarrow, but not this package: what they run travels with the plan, and so do the schemas. No
login of the registry does. Works on classic and Connect sessions alike.
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
from dagster_rebalance.spark.reading.options import OPTIONS_REDACTION, hidden, spark_kafka_options
from dagster_rebalance.spark.reading.ranges import explained_read_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.decoding.batches import OnUndecodable
    from dagster_rebalance.decoding.decoder import Decoder

logger = logging.getLogger(__name__)

_REDACTED_OPTIONS = "spark.sql.redaction.options.regex"
_LARGEST_RECORD = "kafka.max.request.size"
_NO_LIMIT = str(2**31 - 1)
"""How large a letter may be, its topic decides, and not the client, whose default is 1 MiB."""
_TRAVELLERS = (
    "dagster_rebalance.core.model.errors",
    "dagster_rebalance.decoding.record_letter",
    "dagster_rebalance.decoding.schema",
    "dagster_rebalance.core.model.printable",
    "dagster_rebalance.decoding.wire_format",
    "dagster_rebalance.decoding",
)
# A frame has five bytes; what begins otherwise names no schema.
_ID = (
    "collect_set(CASE WHEN length({0}) >= 5 AND substring({0}, 1, 1) = X'00' "
    "THEN CAST(conv(hex(substring({0}, 2, 4)), 16, 10) AS BIGINT) END) AS {0}"
)


def schema_ids(frame: DataFrame, parts: Sequence[str]) -> dict[str, list[int]]:
    """The ids of the schemas that the records of a read name. Reads them all.

    Args:
        frame: What `read_ranges` gives.
        parts: key, value, or both.

    Raises:
        BrokerError: Kafka no longer has some of the records.
    """
    if not parts:
        return {}
    with explained_read_errors():
        (row,) = frame.selectExpr(*(_ID.format(part) for part in parts)).collect()
    return {part: sorted(row[part]) for part in parts}


def decoded_frame(
    frame: DataFrame, decoders: Sequence[Decoder], on_undecodable: OnUndecodable
) -> DataFrame:
    """A read with its keys, its values, or both decoded.

    Args:
        frame: What `read_ranges` gives, with headers.
        decoders: What decodes, with all schemas that are needed.
        on_undecodable: What becomes of records that cannot be decoded.
    """
    types = {field.name: field.dataType.simpleString() for field in frame.schema}
    types["timestamp"] = TIMESTAMP.ddl  # a bare `timestamp` is what the session takes it for
    types |= {decoder.part: decoder.open().column.ddl for decoder in decoders}
    if on_undecodable == "keep":
        types[UNDECODABLE] = UNDECODABLE_DDL
    ddl = ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())
    let_travel()
    decoded = frame.mapInArrow(batch_decoder(decoders, on_undecodable), ddl)
    # Who writes by range knows by it that two parts are of one read.
    return decoded.withMetadata("range_start", frame.schema["range_start"].metadata)


def write_letters(
    frame: DataFrame,
    decoders: Sequence[Decoder],
    topic: str,
    kafka_options: Mapping[str, object],
) -> None:
    """Store a dead letter for each record of a read that cannot be decoded.

    Returns when all are stored.

    Args:
        frame: What `read_ranges` gives, with headers.
        decoders: What decodes, with all schemas that are needed.
        topic: Of the letters. It must exist.
        kafka_options: How to reach Kafka, as for `read_ranges`.

    Raises:
        BrokerError: One could not be stored, or Kafka no longer has some of the records.
    """
    let_travel()
    letters = frame.mapInArrow(letter_maker(decoders), LETTER_DDL)
    for_a_producer = {
        name: value
        for name, value in spark_kafka_options(kafka_options).items()
        if name not in {"kafka.isolation.level", "kafka.client.rack"}
    }
    # Kafka's own default of acks, which a team may have changed for outputs of less weight.
    options = hidden({_LARGEST_RECORD: _NO_LIMIT, **for_a_producer, "kafka.acks": "all"})
    _mask_keys(frame.sparkSession)
    try:
        with explained_read_errors():
            letters.write.format("kafka").options(**options).option("topic", topic).save()
    except DagsterRebalanceError:
        raise
    except Exception as problem:
        said = next((line for line in str(problem).splitlines() if "Exception" in line), "")
        msg = (
            f"the dead letters of records that cannot be decoded could not be stored in topic "
            f"{topic}, and nothing was committed: {said or type(problem).__name__}. The topic must "
            "exist, and Spark's login may have to be granted WRITE on it"
        )
        raise BrokerError(msg) from problem


def _mask_keys(session: SparkSession) -> None:
    """Keep private keys out of the plans of this session's writes to Kafka.

    For good: set back after one write, it would uncover another that runs beside it.
    """
    try:
        # Without a default of ours, Spark gives its own, which masks the url of JDBC.
        known = session.conf.get(_REDACTED_OPTIONS) or ""
        if OPTIONS_REDACTION not in known:
            either = f"(?:{known})|{OPTIONS_REDACTION}" if known else OPTIONS_REDACTION
            session.conf.set(_REDACTED_OPTIONS, either)
    except Exception:
        logger.warning(
            "Spark did not take %s: a private key of the Kafka login may be in its plans, unless "
            "spark.redaction.string.regex masks it (docs/security.md)",
            _REDACTED_OPTIONS,
            exc_info=True,
        )


def let_travel() -> None:
    """Let the modules that decode be pickled as they are, and not by their names."""
    from pyspark.cloudpickle import cloudpickle

    for name in _TRAVELLERS:
        import_module(name)
        cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call]
