"""Ranges in real tables from Arrow: no loss, no duplicates, and refused records."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from dagster_rebalance import BrokerError, IllegalStateError
from dagster_rebalance.arrow import range_records
from dagster_rebalance.arrow.output import write_delta
from tests.arrow.given import SCHEMA, expected, failing, records, span
from tests.arrow.sinks import READERS, TABLES, WRITERS, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dagster_rebalance import OffsetRange

WITH_SCHEMA = [kind for kind in TABLES if kind.values != ("postgres",)]


@pytest.mark.parametrize("kind", TABLES)
def test_rewritten_range_is_replaced(kind: str, place_for: Callable[[str], str]) -> None:
    place = place_for(kind)
    write = WRITERS[kind]
    write(records(span(0, 10), "a"), place, [span(0, 10)])
    others = [span(10, 20), span(0, 5, partition=1)]
    write(records(others, "a").to_reader(), place, others)
    beside = expected((0, 5, "a"), partition=1)
    assert rows(kind, place) == expected((0, 20, "a")) + beside
    write(records(span(0, 10), "b").slice(0, 8), place, [span(0, 10)])
    assert rows(kind, place) == expected((0, 8, "b"), (10, 20, "a")) + beside
    write(records(span(5, 15), "c"), place, [span(5, 15)])
    assert rows(kind, place) == expected((0, 5, "b"), (5, 15, "c"), (15, 20, "a")) + beside
    write(records([], "d"), place, [span(0, 5)])
    assert rows(kind, place) == expected((5, 15, "c"), (15, 20, "a")) + beside
    write(records([], "d"), place, [])
    assert rows(kind, place) == expected((5, 15, "c"), (15, 20, "a")) + beside


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    ("changed", "ranges", "reason"),
    [
        (lambda table: table, [span(0, 4)], r"orders-0 with offset 4 is in none of the ranges"),
        (lambda table: table, [span(0, 2), span(3, 5)], "orders-0 with offset 2"),
        (lambda table: table, [span(0, 5, topic="returns")], "orders-0 with offset 0"),
        (lambda table: table, [], "there are rows for .*, but no ranges"),
        (
            lambda table: table.set_column(2, "offset", pa.array([0, 1, None, 3, 4], pa.int64())),
            [span(0, 5)],
            "or its topic, partition or offset is NULL",
        ),
        (
            lambda table: table.drop(["offset"]),
            [span(0, 5)],
            r"offset are missing.*min\(offset\) AS offset",
        ),
        (
            lambda table: table.append_column("Value", [["x"] * 5]),
            [span(0, 5)],
            "'value' and 'Value'",
        ),
    ],
    ids=["after", "between", "topic", "no ranges", "empty", "no column", "capitals"],
)
def test_records_that_do_not_fit_the_ranges_are_refused(
    kind: str,
    place_for: Callable[[str], str],
    changed: Callable[[Any], Any],
    ranges: Sequence[OffsetRange],
    reason: str,
) -> None:
    place = place_for(kind)
    write = WRITERS[kind]
    write(records(span(0, 5), "a"), place, [span(0, 5)])
    with pytest.raises(IllegalStateError, match=reason):
        write(changed(records(span(0, 5), "b")), place, ranges)
    assert rows(kind, place) == expected((0, 5, "a"))


@pytest.mark.parametrize("kind", TABLES)
def test_failed_read_raises_its_error_and_changes_nothing(
    kind: str, place_for: Callable[[str], str]
) -> None:
    place = place_for(kind)
    write = WRITERS[kind]
    write(records(span(0, 5), "a"), place, [span(0, 5)])
    with pytest.raises(BrokerError, match="gone"):
        write(failing(records(span(0, 5), "b"), BrokerError("gone")), place, [span(0, 5)])
    assert rows(kind, place) == expected((0, 5, "a"))


@pytest.mark.parametrize("kind", WITH_SCHEMA)
def test_new_and_missing_columns_need_merge_schema(
    kind: str, place_for: Callable[[str], str]
) -> None:
    place = place_for(kind)
    write = WRITERS[kind]
    write(records(span(0, 5), "a"), place, [span(0, 5)])
    more = records(span(5, 10), "b").drop(["range_start"]).append_column("more", [[1] * 5])
    with pytest.raises(IllegalStateError, match=r"'range_start' is missing; column 'more' is new"):
        write(more, place, [span(5, 10)])
    for _ in range(2):
        write(more, place, [span(5, 10)], merge_schema=True)
    assert rows(kind, place) == expected((0, 5, "a"), (5, 10, "b"))
    table = READERS[kind](place).sort_by("offset")
    assert table["more"].to_pylist() == [None] * 5 + [1] * 5
    assert table["range_start"].to_pylist() == [0] * 5 + [None] * 5
    text = more.set_column(5, "more", [["x"] * 5])
    with pytest.raises(IllegalStateError, match="'more' is string, and int64 in the table"):
        write(text, place, [span(5, 10)], merge_schema=True)


@pytest.mark.parametrize("kind", WITH_SCHEMA)
def test_narrower_type_is_widened_and_a_wider_one_refused(
    kind: str, place_for: Callable[[str], str]
) -> None:
    place = place_for(kind)
    write = WRITERS[kind]

    def of_type(type_: Any) -> Any:  # noqa: ANN401
        return records(span(0, 5)).append_column("id", pa.array(range(5), type_))

    write(of_type(pa.int32()), place, [span(0, 5)])
    write(of_type(pa.int8()), place, [span(0, 5)])
    with pytest.raises(IllegalStateError, match="'id' is int64, and int32 in the table"):
        write(of_type(pa.int64()), place, [span(0, 5)])
    assert READERS[kind](place)["id"].type == pa.int32()


def test_delta_table_that_was_created_again_is_written_from_its_new_log(tmp_path: Path) -> None:
    place = str(tmp_path / "out")
    for start in (0, 5, 10):
        write_delta(records(span(start, start + 5), "a"), place, [span(start, start + 5)])
    shutil.rmtree(place)
    deltalake.write_deltalake(place, records(span(0, 5), "b"), partition_by=["topic", "partition"])
    write_delta(records(span(5, 10), "c"), place, [span(5, 10)])
    assert rows("delta", place) == expected((0, 5, "b"), (5, 10, "c"))


def test_commit_of_another_writer_between_two_calls_is_replaced(tmp_path: Path) -> None:
    place = str(tmp_path / "out")
    write_delta(records(span(0, 5), "a"), place, [span(0, 5)])
    deltalake.write_deltalake(place, records(span(5, 10), "b"), mode="append")
    write_delta(records(span(5, 10), "c"), place, [span(5, 10)])
    assert rows("delta", place) == expected((0, 5, "a"), (5, 10, "c"))


@pytest.mark.parametrize("kind", TABLES)
def test_records_beyond_the_memory_limit_are_written_once(
    kind: str, place_for: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_records, "_KEPT_BYTES", 500)
    place, ranges = place_for(kind), [span(0, 40)]
    batches = records(ranges, "a").to_batches(max_chunksize=4)
    WRITERS[kind](pa.RecordBatchReader.from_batches(SCHEMA, batches), place, ranges)
    assert rows(kind, place) == expected((0, 40, "a"))


def test_records_can_be_read_again_from_memory_and_from_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(range_records, "_KEPT_BYTES", 500)
    ranges = [span(0, 40)]
    batches = records(ranges, "a").to_batches(max_chunksize=4)
    source = pa.RecordBatchReader.from_batches(SCHEMA, batches)
    with range_records.RangeRecords.of(source, "orders", ranges) as given:
        assert given is not None
        for stops_after in (0, 1, 8):  # a failed attempt
            with given.reader() as reader:
                for _ in range(stops_after):
                    reader.read_next_batch()
        with given.reader() as reader:
            assert reader.read_all()["offset"].to_pylist() == list(range(40))


def test_compacted_range_is_replaced(tmp_path: Path) -> None:
    place = str(tmp_path / "out")
    write = WRITERS["delta"]
    for start in range(0, 20, 5):
        write(records(span(start, start + 5), "a"), place, [span(start, start + 5)])
    assert DeltaTable(place).optimize.compact()["numFilesRemoved"] == 4
    others = [span(5, 10), span(20, 25)]
    write(records(others, "b"), place, others)
    assert rows("delta", place) == expected((0, 5, "a"), (5, 10, "b"), (10, 20, "a"), (20, 25, "b"))
