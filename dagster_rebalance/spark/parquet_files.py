"""Parquet files of ranges: the range of each staged file, and its publication in one atomic step.

A file that Spark wrote without a shuffle is the file of a range if all of its records are of that
range, and no other file has records of the range. The statistics in the footers of the files show
this: records are never read, and the files must be visible to this process.

Each file is moved to its target by this process, by the JVM of a classic session, or, if this
process cannot read the files of a Spark Connect server, by a Python worker of that server. No file
of an output is deleted or truncated first, so a reader finds the old or the new file at any moment,
even if a writer is killed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.outputs.layout import (
    COLUMNS,
    STORES,
    RangeKey,
    is_data,
    output_files,
)
from dagster_rebalance.outputs.publication import (
    OLD_FOLDER,
    explained_publication,
    failed_files,
    mounted_publisher,
    old_output,
    publish_in_store,
    refuse_scheme,
    store_of,
)
from dagster_rebalance.spark.spark_jobs import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import SparkSession

_SCHEMA_NOTE = b"org.apache.spark.sql.parquet.row.metadata"
_WORKER_FUNCTION = "dagster_rebalance_publish"
_NO_PYTHON = ("PYTHON_VERSION_MISMATCH", "Cannot run program")


def ranges_by_file(folder: Path, records: int) -> dict[Path, RangeKey] | None:
    """Return the staged files, each with the range that it has as a whole.

    The result is None if a file has several ranges or part of a range, or if not all records that
    Spark counted are found: a mounted folder may show a file late, or files are encrypted.
    """
    from pyarrow import ArrowException, parquet

    ranges: dict[Path, RangeKey] = {}
    visible = 0
    for file in folder.glob("*.parquet"):
        if not is_data(file.name):
            continue
        try:
            footer = parquet.read_metadata(file)
        except (OSError, ArrowException):
            return None
        if not footer.num_rows:
            continue
        key = _only_range(footer)
        if key is None:
            return None
        visible += footer.num_rows
        ranges[file] = key
    has_all = visible == records and len({key.place for key in ranges.values()}) == len(ranges)
    return ranges if has_all else None


def stored_schemas(output: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the files of an output, and the schema that Spark has stored in each, as JSON.

    The schema is None if another program wrote the file, or if this process cannot read it.
    """
    for file in output_files(output):
        with suppress(FileNotFoundError):  # deleted since the folder was listed
            yield file, _noted_schema(file)


def schema_of_output(output: Path) -> str | None:
    """Return the schema that Spark has stored in one file of an output; None if there is none."""
    return next((noted for _, noted in stored_schemas(output)), None)


def schema_of_staged(folder: Path) -> str | None:
    """Return the schema that Spark has stored in the files of a folder; None if there is none."""
    for file in folder.glob("*.parquet"):
        if is_data(file.name):
            with suppress(FileNotFoundError):
                return _noted_schema(file)
    return None


def _noted_schema(file: Path) -> str | None:
    from pyarrow import ArrowException, parquet

    try:
        footer = parquet.read_metadata(file)
    except FileNotFoundError:
        raise
    except (OSError, ArrowException):
        return None  # Spark may have the keys of an encrypted file
    noted = (footer.metadata or {}).get(_SCHEMA_NOTE)
    return None if noted is None else noted.decode()


def _only_range(footer: Any) -> RangeKey | None:
    values: set[tuple[Any, ...]] = set()
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        columns = (group.column(index) for index in range(group.num_columns))
        known = {
            column.path_in_schema: _only_value(column.statistics)
            for column in columns
            if column.path_in_schema in COLUMNS
        }
        values.add(tuple(known.get(name) for name in COLUMNS))
    if len(values) != 1:
        return None
    topic, *numbers = values.pop()
    if not isinstance(topic, str) or not all(type(one) is int and one >= 0 for one in numbers):
        return None
    return RangeKey(topic, *numbers)


def _only_value(statistics: Any) -> Any:
    """Return the value that all records have; None if they differ, or some have no value."""
    if statistics is None or not statistics.has_min_max or not statistics.has_null_count:
        return None
    is_one = statistics.null_count == 0 and statistics.min == statistics.max
    return statistics.min if is_one else None


def check_scheme(session: SparkSession, scheme: str) -> None:
    """Raise ConfigurationError for a file system that cannot replace a file in one step."""
    if scheme == "hdfs" and is_connect(session):
        msg = (
            "output by range on HDFS needs a classic session: the client of Spark Connect cannot "
            "replace a file there in one step. Set `master` instead of `remote`, or write to a "
            "file system that is mounted on the workers (file:) or to an object store (s3a:, gs:)."
        )
        raise ConfigurationError(msg)
    if scheme not in {"file", "hdfs", *STORES}:
        raise refuse_scheme(scheme)


def publish(session: SparkSession, root: str, moves: Mapping[str, str], staging: str) -> None:
    """Move staged files into an output, one after the other, and remove the staging folder.

    All paths are URIs; `moves` has the target of each staged file.
    """
    check_scheme(session, urlsplit(root).scheme)
    with explained_publication(root):
        is_old = _published(session, root, moves, staging)
    if is_old:
        raise old_output(root)


def _published(session: SparkSession, root: str, moves: Mapping[str, str], staging: str) -> bool:
    """Move the files, or return True if the output has the layout of version 0.1.0."""
    scheme = urlsplit(root).scheme
    if scheme == "hdfs":
        return _publish_on_hadoop(session, root, moves, staging)
    if scheme in STORES:
        return publish_in_store(store_of(root), root, moves, staging)
    if is_connect(session) and not _are_seen(moves):
        return _publish_in_worker(session, root, moves, staging)
    obsolete = "\n".join(failed_files(root))
    return mounted_publisher()(root, list(moves), list(moves.values()), staging, obsolete)


def _are_seen(uris: Iterable[str]) -> bool:
    """Return whether this process can read the files of the server, whose names are unique."""
    return all(Path(unquote(urlsplit(uri).path)).exists() for uri in uris)


def _publish_in_worker(session: Any, root: str, moves: Mapping[str, str], staging: str) -> bool:
    from pyspark.sql.types import BooleanType

    columns = ["root", "sources", "places", "staging", "obsolete"]
    obsolete = "\n".join(failed_files(root))
    arguments = (root, list(moves), list(moves.values()), staging, obsolete)
    session.udf.register(_WORKER_FUNCTION, mounted_publisher(), BooleanType())
    call = f"{_WORKER_FUNCTION}({', '.join(columns)}) AS is_old"
    try:
        (row,) = session.createDataFrame([arguments], columns).selectExpr(call).collect()
    except Exception as error:
        if not any(sign in str(error) for sign in _NO_PYTHON):
            raise
        msg = (
            "this process cannot access the files of the Spark Connect server, and the server's "
            "workers, which would move the files, do not have the Python version of this process. "
            "Give the workers that version (PYSPARK_PYTHON), mount the output in the run, or write "
            "to an object store."
        )
        raise ConfigurationError(msg) from error
    return bool(row["is_old"])


def _publish_on_hadoop(session: Any, root: str, moves: Mapping[str, str], staging: str) -> bool:
    jvm = session._jvm  # noqa: SLF001 - pyspark has no other way to Hadoop's file systems
    conf = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    hadoop = jvm.org.apache.hadoop.fs

    def path(uri: str) -> Any:
        return hadoop.Path(jvm.java.net.URI(uri))

    context = hadoop.FileContext.getFileContext(jvm.java.net.URI(root), conf)
    overwrite = session.sparkContext._gateway.new_array(hadoop.Options.Rename, 1)  # noqa: SLF001
    overwrite[0] = hadoop.Options.Rename.OVERWRITE
    if len(context.util().globStatus(hadoop.Path(path(root), f"{OLD_FOLDER}*")) or ()):
        return True
    for uri in failed_files(root):
        if context.util().exists(path(uri)):
            context.delete(path(uri), False)  # noqa: FBT003
    for source, place in moves.items():
        context.mkdir(path(place).getParent(), hadoop.permission.FsPermission.getDirDefault(), True)  # noqa: FBT003
        context.rename(path(source), path(place), overwrite)
    context.delete(path(staging), True)  # noqa: FBT003
    return False
