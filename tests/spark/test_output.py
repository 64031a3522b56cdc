"""Parquet output by range: its readers, and refused writes."""

from __future__ import annotations

import os
import shutil
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import polars as pl
import pytest

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.spark import parquet, parquet_files
from dagster_rebalance.spark.output import write_parquet_by_range
from dagster_rebalance.spark.ranges import IS_ONE_RANGE_A_TASK, READ_ID
from dagster_rebalance.spark.spark_jobs import is_connect
from tests.spark.readers import read_by_all

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def records(session: SparkSession, *topics: str, until: int = 10, value: str = "a") -> DataFrame:
    """Return records of partition 0 of some topics, in ranges of five."""
    names = ", ".join(f"'{topic}'" for topic in topics)
    return session.sql(
        f"SELECT topic, 0 AS partition, id AS offset, '{value}' AS value, "  # noqa: S608
        "id - id % 5 AS range_start, id - id % 5 + 5 AS range_until "
        f"FROM range({until}) CROSS JOIN (SELECT explode(array({names})) AS topic)"
    )


def expected(*topics: str, until: int = 10) -> list[tuple[str, int]]:
    return sorted((topic, offset) for topic in topics for offset in range(until))


def one_range_a_task(session: SparkSession, *topics: str, value: str = "a") -> DataFrame:
    """Return two ranges of five records per topic, each read by a separate task, as from Kafka."""
    frame, *others = (
        session.sql(
            f"SELECT '{topic}' AS topic, 3 AS partition, id AS offset, '{value}' AS value, "  # noqa: S608
            "id - id % 5 AS range_start, id - id % 5 + 5 AS range_until FROM range(0, 10, 1, 2)"
        )
        for topic in topics
    )
    for other in others:
        frame = frame.unionAll(other)
    return frame.withMetadata("range_start", {IS_ONE_RANGE_A_TASK: True})


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the folders into which records were gathered by range."""
    folders: list[str] = []
    stage = parquet._stage

    def noted(frame: DataFrame, staged: str) -> int:
        folders.append(staged)
        return stage(frame, staged)

    monkeypatch.setattr(parquet, "_stage", noted)
    return folders


def test_gathered_ranges_replace_the_files_of_a_write_as_read(
    session: SparkSession, tmp_path: Path, gathered: list[str]
) -> None:
    out, topics = tmp_path / "out", ("orders", "Orders", "007", "T" * 249, "a._-b")
    assert write_parquet_by_range(one_range_a_task(session, *topics), str(out)) == 50
    assert gathered == []
    files = {file.relative_to(out) for file in out.rglob("*.parquet")}
    assert len(files) == 10
    again = one_range_a_task(session, *topics, value="b").repartition(3, "offset")
    assert write_parquet_by_range(again, str(out)) == 50
    assert len(gathered) == 1
    assert {file.relative_to(out) for file in out.rglob("*.parquet")} == files
    found = read_by_all(session, out)
    assert found == dict.fromkeys(found, expected(*topics))
    assert {row["value"] for row in session.read.parquet(str(out)).collect()} == {"b"}
    assert list((tmp_path / ".out-staging").iterdir()) == []


def test_second_write_of_moved_records_gathers_immediately(
    session: SparkSession, tmp_path: Path, gathered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = parquet._write

    def noted(frame: DataFrame, folder: str, *by: str) -> int:
        written.append(folder.rpartition("/")[2])
        return write(frame, folder, *by)

    monkeypatch.setattr(parquet, "_write", noted)
    for _ in range(2):
        frame = one_range_a_task(session, "orders").repartition(3, "offset")
        assert write_parquet_by_range(frame, str(tmp_path / "out")) == 10
    assert written == ["as_read", "by_range", "by_range"]
    assert len(gathered) == 2


def test_task_with_two_ranges_is_gathered(
    session: SparkSession, tmp_path: Path, gathered: list[str]
) -> None:
    frame = one_range_a_task(session, "orders").coalesce(1)
    assert write_parquet_by_range(frame, str(tmp_path / "out")) == 10
    assert len(gathered) == 1
    names = {file.name for file in (tmp_path / "out").rglob("*.parquet")}
    assert names == {"0-5.parquet", "5-10.parquet"}


def test_unseen_files_are_gathered(
    session: SparkSession, tmp_path: Path, gathered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ranges_by_file", lambda _folder, _records: None)
    frame = one_range_a_task(session, "orders")
    assert write_parquet_by_range(frame, str(tmp_path / "out")) == 10
    assert len(gathered) == 1


def test_empty_write_as_read_replaces_nothing(session: SparkSession, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_parquet_by_range(one_range_a_task(session, "orders"), str(out))
    assert write_parquet_by_range(one_range_a_task(session, "orders").where("false"), str(out)) == 0
    assert session.read.parquet(str(out)).count() == 10
    assert list((tmp_path / ".out-staging").iterdir()) == []


@pytest.mark.parametrize("topics", [["orders", "returns"], []])
def test_records_are_counted_without_an_observation(
    session: SparkSession, tmp_path: Path, topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_counted", lambda frame: (frame, lambda _written: None))
    frame = records(session, "orders", "returns").where("true" if topics else "false")
    assert write_parquet_by_range(frame, str(tmp_path / "out")) == 10 * len(topics)


@pytest.fixture
def questions(session: SparkSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the questions about plans that a Connect server is asked."""
    if not is_connect(session):
        pytest.skip("a classic session has no server")
    connected: Any = session
    client = type(connected.client)
    asked: list[str] = []
    analyze = client._analyze

    def noted(self: object, method: str, **arguments: object) -> object:
        asked.append(method)
        return analyze(self, method, **arguments)

    monkeypatch.setattr(client, "_analyze", noted)
    return asked


def read_of(session: SparkSession, *columns: str) -> DataFrame:
    """Return two ranges with the metadata of a read of Kafka."""
    metadata = {READ_ID: uuid4().hex, IS_ONE_RANGE_A_TASK: True}
    return (
        one_range_a_task(session, "orders")
        .selectExpr("*", *columns)
        .withMetadata("range_start", metadata)
    )


def test_schema_that_fitted_before_is_not_asked_for(
    session: SparkSession, tmp_path: Path, questions: list[str]
) -> None:
    out = str(tmp_path / "out")
    assert write_parquet_by_range(read_of(session), out) == 10
    fewer, none = read_of(session).where("offset <> 3"), read_of(session).where("false")
    questions.clear()
    assert write_parquet_by_range(fewer, out) == 9
    assert write_parquet_by_range(none, out) == 0
    assert questions == []
    assert session.read.parquet(out).count() == 9
    assert list((tmp_path / ".out-staging").iterdir()) == []


def test_other_schema_than_before_is_checked(
    session: SparkSession, tmp_path: Path, questions: list[str]
) -> None:
    out = tmp_path / "out"
    write_parquet_by_range(read_of(session, "offset AS id"), str(out))
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.parquet")}
    for frame, reason in [
        (read_of(session, "string(offset) AS id"), "'id' is string, and bigint in the files"),
        (read_of(session), "'id' is missing"),
        (read_of(session, "offset AS id").drop("topic"), "topic"),
        (read_of(session, "offset AS id", "1 AS ID"), "only in capitals"),
    ]:
        parquet._asked.clear()
        with pytest.raises(IllegalStateError, match=reason):
            write_parquet_by_range(frame, str(out))
        assert "schema" in questions
        assert list((tmp_path / ".out-staging").iterdir()) == []
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*.parquet")} == before
    parquet._asked.clear()
    for _ in range(2):
        assert write_parquet_by_range(read_of(session, "INT(offset) AS id"), str(out)) == 10
    assert dict(session.read.parquet(str(out)).dtypes)["id"] == "bigint"


def test_second_part_of_a_read_is_refused_without_a_question(
    session: SparkSession, tmp_path: Path, questions: list[str]
) -> None:
    out = str(tmp_path / "out")
    write_parquet_by_range(read_of(session), out)
    frame = read_of(session)
    questions.clear()
    write_parquet_by_range(frame.where("offset % 2 = 0"), out)
    with pytest.raises(IllegalStateError, match="one call"):
        write_parquet_by_range(frame.where("offset % 2 = 1"), out)
    assert questions == []
    assert session.read.parquet(out).count() == 5


def test_output_that_was_deleted_takes_another_schema(
    session: SparkSession, tmp_path: Path, questions: list[str]
) -> None:
    out = tmp_path / "out"
    write_parquet_by_range(read_of(session), str(out))
    shutil.rmtree(out)
    assert write_parquet_by_range(read_of(session, "1 AS more"), str(out)) == 10
    assert "schema" in questions


def test_moved_records_are_gathered_after_a_fitting_write(
    session: SparkSession, tmp_path: Path, gathered: list[str], questions: list[str]
) -> None:
    out = tmp_path / "out"
    write_parquet_by_range(read_of(session), str(out))
    for _ in range(2):
        assert write_parquet_by_range(read_of(session).repartition(3, "offset"), str(out)) == 10
    assert len(gathered) == 2
    assert questions[0] == "schema"
    assert {file.name for file in out.rglob("*.parquet")} == {"0-5.parquet", "5-10.parquet"}


def test_all_readers_see_the_names_of_topics(session: SparkSession, tmp_path: Path) -> None:
    topics = [
        "007",
        "7",
        "1e3",
        "1.0",
        "2024-01-01",
        "__HIVE_DEFAULT_PARTITION__",
        "NULL",
        "_hidden",
        "true",
    ]
    topics += ["Orders", "orders", "T" * 249]
    assert write_parquet_by_range(records(session, *topics), str(tmp_path / "out")) == 10 * len(
        topics
    )
    found = read_by_all(session, tmp_path / "out")
    assert found == dict.fromkeys(found, expected(*topics))


@pytest.mark.parametrize("topic", ["007", "2024-01-01", "__HIVE_DEFAULT_PARTITION__", "1e3"])
def test_single_topic_with_a_numeric_name_stays_text(
    session: SparkSession, tmp_path: Path, topic: str
) -> None:
    write_parquet_by_range(records(session, topic), str(tmp_path / "out"))
    found = read_by_all(session, tmp_path / "out")
    assert found == dict.fromkeys(found, expected(topic))


def test_topics_that_differ_in_capitals_have_distinct_folders(
    session: SparkSession, tmp_path: Path
) -> None:
    write_parquet_by_range(records(session, "Orders", "orders", "ORDERS"), str(tmp_path / "out"))
    folders = [folder.name for folder in (tmp_path / "out").iterdir()]
    assert len({folder.lower() for folder in folders}) == 3


def test_rewritten_range_is_replaced_without_its_neighbour(
    session: SparkSession, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_parquet_by_range(records(session, "orders"), str(out))
    neighbour = (out / "topic_partition=orders-p0/5-10.parquet").stat()
    write_parquet_by_range(records(session, "orders", until=5, value="b"), str(out))
    rows = session.read.parquet(str(out)).selectExpr("offset", "value").collect()
    assert sorted(map(tuple, rows)) == [
        (offset, "b" if offset < 5 else "a") for offset in range(10)
    ]
    after = (out / "topic_partition=orders-p0/5-10.parquet").stat()
    assert (after.st_ino, after.st_mtime_ns) == (neighbour.st_ino, neighbour.st_mtime_ns)


def test_write_removes_its_and_old_staging_folders(session: SparkSession, tmp_path: Path) -> None:
    killed, working = (tmp_path / ".out-staging" / name for name in ("killed", "working"))
    for folder in (killed, working):
        folder.mkdir(parents=True)
    os.utime(killed, (0, 0))
    ended = tmp_path / ".out-staging" / "ended"
    ended.symlink_to("gone between two looks")
    write_parquet_by_range(records(session, "orders"), str(tmp_path / "out"))
    assert set((tmp_path / ".out-staging").iterdir()) == {working, ended}


def test_empty_gathered_write_replaces_nothing(session: SparkSession, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    write_parquet_by_range(records(session, "orders"), out)
    assert write_parquet_by_range(records(session, "orders").where("offset < 0"), out) == 0
    assert session.read.parquet(out).count() == 10
    assert list((tmp_path / ".out-staging").iterdir()) == []


def test_path_with_special_characters_is_one_folder(session: SparkSession, tmp_path: Path) -> None:
    out = tmp_path / "a b%20" / "ö+#&=" / "out"
    write_parquet_by_range(records(session, "orders"), f"{out}/")
    found = read_by_all(session, out)
    assert found == dict.fromkeys(found, expected("orders"))


def test_second_part_of_a_read_is_refused(session: SparkSession, tmp_path: Path) -> None:
    frame = records(session, "orders").withMetadata("range_start", {READ_ID: str(tmp_path)})
    out = str(tmp_path / "out")
    write_parquet_by_range(frame.where("offset % 2 = 0").selectExpr("*"), out)
    with pytest.raises(IllegalStateError, match="one call"):
        write_parquet_by_range(frame.where("offset % 2 = 1"), out)
    assert session.read.parquet(out).count() == 5
    assert write_parquet_by_range(frame.where("offset % 2 = 1"), f"{out}-odd") == 5


def test_output_of_version_0_1_0_is_refused(session: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "out" / "topic=orders").mkdir(parents=True)
    with pytest.raises(IllegalStateError, match=r"version 0\.1\.0"):
        write_parquet_by_range(records(session, "orders"), str(tmp_path / "out"))
    assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["topic=orders"]


def test_record_without_a_range_is_refused(session: SparkSession, tmp_path: Path) -> None:
    frame = records(session, "orders").selectExpr(
        "topic", "partition", "nullif(range_start, 5) AS range_start", "range_until"
    )
    with pytest.raises(
        Exception, match="a record has no topic, partition, range_start or range_until"
    ):
        write_parquet_by_range(frame, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_column_named_like_the_folders_is_refused(session: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(IllegalStateError, match="topic_partition"):
        write_parquet_by_range(
            records(session, "a").selectExpr("*", "1 AS topic_partition"), str(tmp_path / "out")
        )


@pytest.mark.parametrize("name", ["Topic_Partition", "Value", "DAGSTER_REBALANCE_RANGE"])
def test_columns_that_differ_in_capitals_are_refused(
    session: SparkSession, tmp_path: Path, name: str
) -> None:
    frame = records(session, "a").selectExpr("*", f"1 AS {name}")
    with pytest.raises(IllegalStateError, match=name):
        write_parquet_by_range(frame, str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seen_by", ["this process", "Spark alone"])
def test_schema_that_does_not_fit_the_files_is_refused(
    session: SparkSession, tmp_path: Path, seen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def of_type(name: str, columns: str = "") -> DataFrame:
        frame = one_range_a_task(session, "orders")
        return frame.selectExpr("*", f"CAST(offset AS {name}) AS id", *filter(None, [columns]))

    if seen_by == "Spark alone":
        monkeypatch.setattr(parquet, "_is_seen", lambda _parent: False)
    write_parquet_by_range(of_type("INT"), str(out))
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.parquet")}
    for frame, reason in [
        (of_type("BIGINT"), "'id' is bigint, and int in the files"),
        (of_type("INT", "1 AS more"), "'more' is new"),
        (of_type("INT").drop("value"), "'value' is missing"),
    ]:
        with pytest.raises(IllegalStateError, match=reason):
            write_parquet_by_range(frame, str(out))
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*.parquet")} == before
    assert list((tmp_path / ".out-staging").iterdir()) == []


def test_narrower_type_is_widened(session: SparkSession, tmp_path: Path) -> None:
    out = tmp_path / "out"
    wide = one_range_a_task(session, "orders").selectExpr(
        "*", "offset AS id", "named_struct('a-b', offset) AS `o.x`"
    )
    write_parquet_by_range(wide.where("range_start = 0"), str(out))
    narrow = one_range_a_task(session, "orders").selectExpr(
        "named_struct('a-b', INT(offset)) AS `o.x`", "INT(offset) AS id", "*"
    )
    write_parquet_by_range(narrow.where("range_start = 5"), str(out))
    found = read_by_all(session, out)
    assert found == dict.fromkeys(found, expected("orders"))
    rows = session.read.parquet(str(out)).collect()
    assert sorted((row["id"], row["o.x"]["a-b"]) for row in rows) == [(n, n) for n in range(10)]


def test_concurrent_first_writers_of_two_schemas_are_reported(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    publish = parquet_files.publish

    def other_first(*arguments: Any) -> None:  # noqa: ANN401
        monkeypatch.setattr(parquet_files, "publish", publish)
        other = one_range_a_task(session, "returns").selectExpr("*", "1 AS id")
        write_parquet_by_range(other, str(out))
        publish(*arguments)

    monkeypatch.setattr(parquet_files, "publish", other_first)
    with pytest.raises(IllegalStateError, match=r"at the same moment.*'id' is missing"):
        write_parquet_by_range(one_range_a_task(session, "orders"), str(out))


def test_schema_of_foreign_files_counts(session: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "topic_partition=orders-p0"
    folder.mkdir(parents=True)
    pl.DataFrame({"topic": ["orders"], "id": [1]}).write_parquet(folder / "0-1.parquet")
    with pytest.raises(IllegalStateError, match="'id' is missing"):
        write_parquet_by_range(records(session, "orders"), str(tmp_path / "out"))


def test_output_on_another_file_system_is_refused(session: SparkSession, tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as elsewhere:
        (tmp_path / "out").symlink_to(elsewhere)
        unread = records(session, "orders").where("isnull(raise_error('read'))")
        with pytest.raises(ConfigurationError, match=r"out is on another file system.*real path"):
            write_parquet_by_range(unread, str(tmp_path / "out"))


def test_partition_on_another_file_system_is_reported(
    session: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with TemporaryDirectory(dir="/dev/shm") as elsewhere:
        (tmp_path / "out" / "topic_partition=orders-p0").symlink_to(elsewhere)
        with pytest.raises(ConfigurationError, match=r"out is on another file system"):
            write_parquet_by_range(records(session, "orders"), str(tmp_path / "out"))


def test_frame_without_range_columns_is_refused(session: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(IllegalStateError, match=r"range_start, range_until"):
        write_parquet_by_range(
            session.sql("SELECT 't' AS topic, 0 AS partition"), str(tmp_path / "out")
        )


@pytest.mark.parametrize(
    "path", ["s3a://bucket", "/", "/data/{a,b}", "abfss://c@account.dfs.core.windows.net/out"]
)
def test_path_without_atomic_replacement_is_refused(session: SparkSession, path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"path of an output|cannot be written to abfss"):
        write_parquet_by_range(records(session, "orders"), path)


def test_workers_of_a_connect_server_publish_unseen_files(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_connect(session):
        pytest.skip("a classic session works in this process")

    def not_here(*_paths: str) -> None:
        msg = "this process must not move anything"
        raise AssertionError(msg)

    monkeypatch.setattr(parquet_files, "_are_seen", lambda _uris: False)
    monkeypatch.setattr(os, "replace", not_here)
    write_parquet_by_range(records(session, "orders"), str(tmp_path / "out"))
    found = read_by_all(session, tmp_path / "out")
    assert found == dict.fromkeys(found, expected("orders"))
