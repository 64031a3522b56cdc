"""Publication on object stores and HDFS, through local stand-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.fs
import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.outputs.layout import place_of
from dagster_rebalance.outputs.publication import publish_in_store
from dagster_rebalance.spark.parquet import _no_moves
from dagster_rebalance.spark.parquet_files import _publish_on_hadoop, check_scheme
from dagster_rebalance.spark.spark_jobs import is_connect

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def staged(folder: Path) -> tuple[Path, Path]:
    """Return a staged file, and its place in an output with an old file."""
    place, source = folder / "out" / "p" / "0-5.parquet", folder / ".out-staging" / "1" / "new"
    for file, text in ((place, "old"), (source, "new")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return source, place


def test_object_is_replaced_by_a_copy_within_the_store(tmp_path: Path) -> None:
    source, place = staged(tmp_path / "bucket")
    store = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    moves = {"s3a://bucket/.out-staging/1/new": "s3a://bucket/out/p/0-5.parquet"}
    assert not publish_in_store(store, "s3a://bucket/out", moves, "s3a://bucket/.out-staging/1")
    assert place.read_text() == "new"
    assert not source.parent.exists()


def test_output_of_version_0_1_0_in_a_store_is_unchanged(tmp_path: Path) -> None:
    source, place = staged(tmp_path / "bucket")
    (tmp_path / "bucket" / "out" / "topic=orders").mkdir()
    store = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    assert publish_in_store(
        store, "gs://bucket/out", {"gs://bucket/x": "gs://bucket/y"}, "gs://bucket/.out-staging/1"
    )
    assert (source.read_text(), place.read_text()) == ("new", "old")


def test_place_depends_on_the_bucket_and_not_on_the_scheme() -> None:
    place = "topic_partition=orders-p0/0-5.parquet"
    assert place_of(f"s3a://lake-eu/orders/{place}") != place_of(f"s3a://lake-us/orders/{place}")
    assert place_of(f"s3a://lake/a%20b/{place}") == place_of(f"s3://lake/a b/{place}")
    assert place_of(f"file:/lake/{place}") == place_of(f"file:///lake/{place}")


def test_staging_folder_of_an_empty_write_is_removed_from_a_store(tmp_path: Path) -> None:
    moves = _no_moves("s3a://bucket/a b/out", "s3a://bucket/a b/.out-staging/1")
    assert moves is not None
    staging, root, files = moves
    folder = tmp_path / "bucket" / "a b" / ".out-staging" / "1"
    folder.mkdir(parents=True)
    store = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    for _ in ("with a mark of Spark's", "where Spark has left nothing"):
        assert not publish_in_store(store, root, files, staging)
        assert not folder.exists()


@pytest.mark.spark
def test_hadoop_replaces_a_file_by_an_overwriting_rename(
    session: SparkSession, tmp_path: Path
) -> None:
    if is_connect(session):
        with pytest.raises(ConfigurationError, match="Spark Connect"):
            check_scheme(session, "hdfs")
        return
    source, place = staged(tmp_path)
    new = tmp_path / "out" / "p2" / "5-9.parquet"
    other = source.with_name("other")
    other.write_text("other")
    moves = {source.as_uri(): place.as_uri(), other.as_uri(): new.as_uri()}
    assert not _publish_on_hadoop(
        session, (tmp_path / "out").as_uri(), moves, source.parent.as_uri()
    )
    assert (place.read_text(), new.read_text(), source.parent.exists()) == ("new", "other", False)
    (tmp_path / "out" / "topic=orders").mkdir()
    assert _publish_on_hadoop(session, (tmp_path / "out").as_uri(), moves, source.parent.as_uri())
