"""Decoding in Spark: the schema ids of a read, its decoded columns, and undecodable records.

The executors decode in Python, as a run without Spark does. They need pyarrow and the library of
the format, but not this package: the code and the schemas are pickled into the plan, without the
registry login. All functions work in classic and in Connect sessions.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from dagster_rebalance.decoding.batches import (
    POSITION_DDL,
    UNDECODABLE,
    UNDECODABLE_DDL,
    batch_decoder,
    undecodable_finder,
)
from dagster_rebalance.decoding.columns import TIMESTAMP, quoted
from dagster_rebalance.spark.ranges import explained_read_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from dagster_rebalance.decoding.batches import OnUndecodable
    from dagster_rebalance.decoding.decoder import Decoder

_PICKLED = (
    "dagster_rebalance.core.model.errors",
    "dagster_rebalance.core.model.printable",
    "dagster_rebalance.decoding",
)
# A framed payload has five bytes or more, the first of them 0.
_SCHEMA_IDS = (
    "collect_set(CASE WHEN length({0}) >= 5 AND substring({0}, 1, 1) = X'00' "
    "THEN substring({0}, 2, 4) END) AS {0}"
)


def schema_ids(frame: DataFrame, parts: Sequence[str]) -> dict[str, list[int]]:
    """Read all records of `read_ranges`, and return the schema ids in their keys or values."""
    if not parts:
        return {}
    with explained_read_errors():
        (row,) = frame.selectExpr(*(_SCHEMA_IDS.format(part) for part in parts)).collect()
    return {part: sorted(int.from_bytes(one, "big") for one in row[part]) for part in parts}


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
    decoded = _for_python(frame).mapInArrow(batch_decoder(decoders, on_undecodable), ddl)
    # Writers by range use it to recognize two parts of one read.
    return decoded.withMetadata("range_start", frame.schema["range_start"].metadata)


def _for_python(frame: DataFrame) -> DataFrame:
    """Return a frame of `read_ranges` with the headers of a record as JSON.

    Spark computes the size of its Arrow batch after each row, which takes as long as the batch has
    rows if a column has lists. With lists of headers, decoding would take three times as long.
    """
    return frame.selectExpr(
        *(
            "to_json(headers) AS headers" if one == "headers" else quoted(one)
            for one in frame.columns
        )
    )


def undecodable_records(
    frame: DataFrame, decoders: Sequence[Decoder]
) -> list[tuple[str, int, int, str]]:
    """Return the topic, the partition, the offset and the reason of each undecodable record.

    The decoders must have all schemas of the records.
    """
    pickle_by_value()
    found = _for_python(frame).mapInArrow(undecodable_finder(decoders), POSITION_DDL)
    with explained_read_errors():
        return [tuple(row) for row in found.collect()]


def pickle_by_value() -> None:
    """Let cloudpickle send the decoding modules with the plan, instead of references to them."""
    from pyspark.cloudpickle import cloudpickle

    for name in _PICKLED:
        import_module(name)
        cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call]
