"""Parquet output by range from Arrow: its files, its readers, and refused writes."""

from __future__ import annotations

import random
import shutil
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.fs
import pytest
from pyarrow import parquet as files_of_parquet

from dagster_rebalance import BrokerError, ConfigurationError, IllegalStateError
from dagster_rebalance.arrow import parquet
from dagster_rebalance.arrow.output import write_parquet_by_range
from dagster_rebalance.outputs.publication import note_failed_ranges, publish_in_store
from tests.arrow.given import SCHEMA, failing, records, span
from tests.spark.readers import LIBRARIES
from tests.spark.two_writers import RANGES, TOPIC, play_writers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BOTH = (span(0, 5), span(5, 10))


def read_values(file: Path) -> list[Any]:
    with pa.OSFile(str(file)) as opened:
        return list(files_of_parquet.ParquetFile(opened).read()["value"].to_pylist())


def found(out: Path) -> dict[str, str]:
    """Return the values of each file by its path within the output, if they are one."""
    return {
        str(file.relative_to(out)): "".join(
            sorted(set(files_of_parquet.ParquetFile(file).read()["value"].to_pylist()))
        )
        for file in out.rglob("*.parquet")
    }


def test_rewritten_range_is_replaced_without_its_neighbour(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert write_parquet_by_range(records(BOTH), str(out)) == 10
    neighbour = (out / "topic_partition=orders-p0/5-10.parquet").stat()
    assert write_parquet_by_range(records(span(0, 5), "b").to_reader(), str(out)) == 5
    assert found(out) == {
        "topic_partition=orders-p0/0-5.parquet": "b",
        "topic_partition=orders-p0/5-10.parquet": "a",
    }
    after = (out / "topic_partition=orders-p0/5-10.parquet").stat()
    assert (after.st_ino, after.st_mtime_ns) == (neighbour.st_ino, neighbour.st_mtime_ns)
    assert list((tmp_path / ".out-staging").iterdir()) == []


@pytest.fixture
def failed_ranges() -> Iterator[None]:
    """Ranges of attempts that failed, of which the next batches are parts."""
    note_failed_ranges([span(0, 20), span(0, 10)])
    yield
    note_failed_ranges(())


@pytest.mark.usefixtures("failed_ranges")
def test_part_of_a_bisected_range_replaces_what_failed_attempts_wrote(tmp_path: Path) -> None:
    out = tmp_path / "out"
    note_failed_ranges(())
    write_parquet_by_range(records([span(0, 10), span(20, 30)]), str(out))
    note_failed_ranges([span(0, 20), span(0, 10)])
    assert write_parquet_by_range(records(span(0, 5), "b"), str(out)) == 5
    assert found(out) == {
        "topic_partition=orders-p0/0-5.parquet": "b",
        "topic_partition=orders-p0/20-30.parquet": "a",
    }


@pytest.mark.usefixtures("failed_ranges")
def test_part_replaces_what_failed_attempts_wrote_to_an_object_store() -> None:
    store = pyarrow.fs._MockFileSystem()
    folder = "bucket/out/topic_partition=orders-p0"
    store.create_dir(folder)
    store.create_dir("bucket/.out-staging/1")
    for name in (f"{folder}/0-20.parquet", "bucket/.out-staging/1/0-5.parquet"):
        with store.open_output_stream(name) as file:
            file.write(b"x")
    place = f"s3a://{folder}/0-5.parquet"
    moves = {"s3a://bucket/.out-staging/1/0-5.parquet": place}
    assert not publish_in_store(store, "s3a://bucket/out", moves, "s3a://bucket/.out-staging/1")
    files = store.get_file_info(pyarrow.fs.FileSelector(folder))
    assert [file.base_name for file in files] == ["0-5.parquet"]


def test_all_readers_see_the_names_of_topics(tmp_path: Path) -> None:
    topics = ["007", "1e3", "2024-01-01", "NULL", "_hidden", "Orders", "orders", "T" * 249]
    ranges = [span(0, 5, topic=topic) for topic in topics]
    write_parquet_by_range(records(ranges), str(tmp_path / "out"))
    wanted = sorted((topic, offset) for topic in topics for offset in range(5))
    seen = {name: sorted(read(tmp_path / "out")) for name, read in LIBRARIES.items()}
    assert seen == dict.fromkeys(seen, wanted)


def test_shuffled_records_are_routed_to_their_ranges_in_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "BUFFER_BYTES", 2000)
    ranges = [span(start, start + 50, partition) for start in (0, 50) for partition in range(3)]
    table = records(ranges)
    rows = list(range(table.num_rows))
    random.Random(1).shuffle(rows)  # noqa: S311 - no secret
    batches = table.take(rows).to_batches(max_chunksize=40)
    reader = pa.RecordBatchReader.from_batches(SCHEMA, batches)
    assert write_parquet_by_range(reader, str(tmp_path / "out")) == 300
    for range_ in ranges:
        folder = tmp_path / "out" / f"topic_partition=orders-p{range_.partition}"
        file = files_of_parquet.ParquetFile(folder / f"{range_.start}-{range_.until}.parquet")
        offsets = file.read()["offset"].to_pylist()
        assert sorted(offsets) == list(range(range_.start, range_.until))
        assert file.metadata.num_row_groups > 1


def test_write_without_records_replaces_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_parquet_by_range(records(BOTH), str(out))
    assert write_parquet_by_range(records([], "b"), str(out)) == 0
    assert set(found(out).values()) == {"a"}


def test_failed_read_raises_its_error_and_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_parquet_by_range(records(BOTH), str(out))
    with pytest.raises(BrokerError, match="gone"):
        write_parquet_by_range(failing(records(BOTH, "b"), BrokerError("gone")), str(out))
    assert set(found(out).values()) == {"a"}
    assert list((tmp_path / ".out-staging").iterdir()) == []


def test_stream_of_another_library_is_written(tmp_path: Path) -> None:
    frame = pl.from_arrow(records(BOTH))
    for _ in range(2):
        assert write_parquet_by_range(frame, str(tmp_path / "out")) == 10
    assert write_parquet_by_range(records(BOTH), str(tmp_path / "out")) == 10
    file = files_of_parquet.ParquetFile(next((tmp_path / "out").rglob("*.parquet")))
    assert file.schema_arrow.field("value").type == pa.string()


def test_other_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"a list: give a pyarrow\.RecordBatchReader"):
        write_parquet_by_range([1], str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda table: table.drop(["range_start", "range_until"]), "range_start, range_until"),
        (lambda table: table.append_column("Topic_Partition", [[1] * 5]), "Topic_Partition"),
        (lambda table: table.append_column("Value", [[1] * 5]), "'value' and 'Value'"),
        (
            lambda table: table.set_column(4, "range_start", pa.array([0, 0, None, 0, 0])),
            "a record has no topic, partition, range_start or range_until",
        ),
    ],
    ids=["missing", "of the paths", "capitals", "empty"],
)
def test_columns_that_cannot_be_written_are_refused(
    tmp_path: Path, changed: Callable[[Any], Any], reason: str
) -> None:
    with pytest.raises(IllegalStateError, match=reason):
        write_parquet_by_range(changed(records(span(0, 5))), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_schema_that_does_not_fit_the_files_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def of_type(type_: Any) -> Any:  # noqa: ANN401
        return records(span(0, 5)).append_column("id", pa.array(range(5), type_))

    write_parquet_by_range(of_type(pa.int32()), str(out))
    more = of_type(pa.int32()).append_column("more", [[1] * 5])
    for table, reason in [
        (of_type(pa.int64()), "'id' is int64, and int32 in the files"),
        (more, "'more' is new"),
        (of_type(pa.int32()).drop(["value"]), "'value' is missing"),
    ]:
        with pytest.raises(IllegalStateError, match=reason):
            write_parquet_by_range(table, str(out))
    write_parquet_by_range(of_type(pa.int8()), str(out))
    file = files_of_parquet.ParquetFile(next(out.rglob("*.parquet")))
    assert file.schema_arrow.field("id").type == pa.int32()


@pytest.mark.parametrize(
    ("type_", "wider"),
    [
        (pa.decimal128(10, 2), pa.decimal128(12, 4)),
        (pa.list_(pa.struct([("a", pa.int32())])), pa.list_(pa.struct([("a", pa.int64())]))),
        (pa.map_(pa.string(), pa.float32()), pa.map_(pa.string(), pa.float64())),
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("us", "UTC")),
    ],
    ids=str,
)
def test_narrower_type_is_widened(tmp_path: Path, type_: Any, wider: Any) -> None:  # noqa: ANN401
    out = tmp_path / "out"
    for ranges, kind in ((span(0, 5), wider), (span(5, 10), type_)):
        table = records(ranges).append_column("more", pa.nulls(5, kind))
        assert write_parquet_by_range(table, str(out)) == 5
    types = [
        files_of_parquet.ParquetFile(file).schema_arrow.field("more").type
        for file in out.rglob("*.parquet")
    ]
    assert types == [wider, wider]


def test_concurrent_first_writers_of_two_schemas_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out")
    publish = parquet._Output.publish

    def other_first(self: Any, keys: Any) -> Any:  # noqa: ANN401
        monkeypatch.setattr(parquet._Output, "publish", publish)
        other = records(span(0, 5, topic="returns")).append_column("id", [[1] * 5])
        write_parquet_by_range(other, out)
        return publish(self, keys)

    monkeypatch.setattr(parquet._Output, "publish", other_first)
    with pytest.raises(IllegalStateError, match=r"at the same moment.*'id' is missing"):
        write_parquet_by_range(records(span(0, 5)), out)


def test_output_of_version_0_1_0_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out" / "topic=orders").mkdir(parents=True)
    with pytest.raises(IllegalStateError, match=r"version 0\.1\.0"):
        write_parquet_by_range(records(BOTH), str(tmp_path / "out"))
    assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["topic=orders"]


def test_output_on_another_file_system_is_refused(tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as elsewhere:
        (tmp_path / "out").symlink_to(elsewhere)
        with pytest.raises(ConfigurationError, match=r"out is on another file system.*real path"):
            write_parquet_by_range(records(BOTH), str(tmp_path / "out"))


@pytest.mark.parametrize("path", ["s3a://bucket", "/", "/data/{a,b}", "abfss://c@a.net/out"])
def test_path_without_atomic_replacement_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"path of an output|cannot be written to abfss"):
        write_parquet_by_range(records(BOTH), path)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a bucket, to which outputs in S3 are written."""
    store = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())

    class Store:
        """A store in which a folder exists with its first object."""

        def open_output_stream(self, key: str) -> Any:  # noqa: ANN401
            store.create_dir(key.rpartition("/")[0])
            return store.open_output_stream(key)

        def copy_file(self, source: str, target: str) -> None:
            store.create_dir(target.rpartition("/")[0])
            store.copy_file(source, target)

        get_file_info, delete_dir = store.get_file_info, store.delete_dir

    monkeypatch.setattr(parquet, "store_of", lambda _path: Store())
    opened = files_of_parquet.ParquetFile
    monkeypatch.setattr(
        files_of_parquet,
        "ParquetFile",
        lambda file, filesystem=None: opened(file, filesystem=store if filesystem else None),
    )
    return tmp_path / "bucket"


def test_output_in_an_object_store_is_replaced_by_copies(bucket: Path) -> None:
    for value in "ab":
        write_parquet_by_range(records(BOTH, value), "s3a://bucket/lake/out")
    with pytest.raises(BrokerError):
        write_parquet_by_range(
            failing(records(BOTH, "c"), BrokerError("gone")), "s3a://bucket/lake/out"
        )
    folder = bucket / "lake" / "out" / "topic_partition=orders-p0"
    files = {file.name: read_values(file) for file in folder.iterdir()}
    assert files == {"0-5.parquet": ["b"] * 5, "5-10.parquet": ["b"] * 5}
    assert list((bucket / "lake" / ".out-staging").iterdir()) == []


def test_output_in_an_object_store_that_was_begun_anew_has_its_new_columns(bucket: Path) -> None:
    for start in (0, 5):
        write_parquet_by_range(records(span(start, start + 5)), "s3a://bucket/lake/anew")
    shutil.rmtree(bucket / "lake" / "anew")
    file = bucket / "lake" / "anew" / "topic_partition=orders-p0" / "0-5.parquet"
    file.parent.mkdir(parents=True)
    another = records(span(0, 5)).append_column("more", [[1] * 5])
    files_of_parquet.write_table(another, file)
    with pytest.raises(IllegalStateError, match="column 'more' is missing"):
        write_parquet_by_range(records(span(10, 15)), "s3a://bucket/lake/anew")


def test_two_writers_at_any_interleaving_leave_each_record_once() -> None:
    ranges = [span(start, until, topic=TOPIC) for start, until in RANGES]

    def writes(root: Path) -> Callable[[str], object]:
        return lambda name: write_parquet_by_range(records(ranges, name), str(root))

    tally = play_writers(25, 1, writes, LIBRARIES)
    assert tally.wrong == []
    assert tally.overtaken, "the writers only took turns"
    assert tally.killed, "no writer was killed"
