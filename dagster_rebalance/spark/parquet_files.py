"""Parquet files of ranges: the range of each staged file, and its publication in one atomic step.

A file that Spark wrote without gathering ranges is the file of one range if all of its records are
of that range, and no other file has any of them. The statistics in the footers of the files show
that: records are never read, and the files must be visible to this process.

Each file is moved to its place by this process, by the JVM of a classic session, or, if this
process does not see the files of a Spark Connect server, by a Python worker of that server. No file
of an output is deleted or truncated first, so a reader finds the old file or the new one at any
moment, even if a writer is killed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.spark.spark_jobs import is_connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pyspark.sql import SparkSession

COLUMNS = ("topic", "partition", "range_start", "range_until")
_SCHEMA_NOTE = b"org.apache.spark.sql.parquet.row.metadata"
_PLAIN_TOPIC = re.compile(r"[a-z0-9._-]{1,150}")
_UNSAFE = re.compile(r"[^a-z0-9._-]")
# A copy within these stores is one request; the new object appears when it is complete.
_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs"}
_OLD_FOLDER = "topic="
_WORKER_FUNCTION = "dagster_rebalance_publish"
_NO_PYTHON = ("PYTHON_VERSION_MISMATCH", "Cannot run program")
_CROSS_DEVICE = f"[Errno {errno.EXDEV}]"
LEFT_OVER_AFTER_S = 2 * 24 * 3600.0


class RangeKey(NamedTuple):
    """The columns of a record that name its range."""

    topic: str
    partition: int
    start: int
    until: int

    @property
    def place(self) -> tuple[str, str]:
        """The value of its folder and the name of its file, as `parquet` has Spark name them."""
        topic = self.topic
        if not _PLAIN_TOPIC.fullmatch(topic):
            digest = hashlib.sha256(topic.encode()).hexdigest()
            topic = f"{_UNSAFE.sub('_', topic.lower())[:100]}~{digest[:16]}"
        return f"{topic}-p{self.partition}", f"{self.start}-{self.until}"


def local_folder(path: str) -> Path | None:
    """Return the local folder of a path in Spark; None if only Spark can reach it."""
    name = path.removeprefix("file:")
    if name.startswith("//"):
        name = name.removeprefix("//")
        if not name.startswith("/"):  # it begins with a host
            return None
    elif urlsplit(name).scheme:
        return None
    # Hadoop removes `..` from a name without resolving links, and so does normpath.
    return Path(os.path.normpath(Path(name).absolute()))


def ranges_by_file(folder: Path, records: int) -> dict[Path, RangeKey] | None:
    """Return the staged files, and the range that each one holds as a whole.

    The result is None if a file holds several ranges or part of one, or if not all of the records
    that Spark counted are seen here: a mounted folder may show a file late, or files are encrypted.
    """
    from pyarrow import ArrowException, parquet

    ranges: dict[Path, RangeKey] = {}
    visible = 0
    for file in folder.glob("*.parquet"):
        if not _is_data(file.name):
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
    from pyarrow import ArrowException, parquet

    for file in _output_files(output):
        try:
            footer = parquet.read_metadata(file)
        except FileNotFoundError:
            continue  # deleted since the folder was listed
        except (OSError, ArrowException):
            yield file, None  # Spark may have the keys of an encrypted file
            continue
        noted = (footer.metadata or {}).get(_SCHEMA_NOTE)
        yield file, None if noted is None else noted.decode()


def _output_files(output: Path) -> Iterator[Path]:
    # Lazily, because an output may have a folder per partition, with many files in each.
    try:
        with os.scandir(output) as folders:
            for folder in folders:
                if "=" in folder.name and folder.is_dir():
                    with os.scandir(folder) as files:
                        yield from (Path(file) for file in files if _is_data(file.name))
    except FileNotFoundError:
        return


def _is_data(name: str) -> bool:
    """Return whether Spark treats a file as data, and not as metadata or work in progress."""
    return name.endswith(".parquet") and not name.startswith(("_", "."))


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
    """Return the value that all records have; None if there are several, or some have none."""
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
    if scheme not in {"file", "hdfs", *_STORES}:
        msg = (
            f"output by range cannot be written to {scheme}: it cannot replace a file in one step, "
            "so two writers of a range could duplicate or lose its records. Write to a "
            "mounted file system (file:), HDFS (hdfs:), S3 (s3a:) or Google Cloud Storage (gs:)."
        )
        raise ConfigurationError(msg)


def check_one_file_system(output: Path) -> None:
    """Raise ConfigurationError if an output is on another file system than its staging folder."""
    with suppress(FileNotFoundError):
        if output.stat().st_dev != output.parent.stat().st_dev:
            raise ConfigurationError(_other_file_system(str(output)))


def _other_file_system(output: str) -> str:
    return (
        f"{output} is on another file system than its staging folder beside it, because it, or a "
        "folder in it, is a link or a mounted volume. A file cannot be moved there in one step: "
        "give a folder within the volume, by its real path."
    )


def place_of(uri: str) -> str:
    """Return one name for a file, whichever scheme Spark uses for its file system."""
    parts = urlsplit(uri)
    scheme = _STORES.get(parts.scheme, parts.scheme)
    return f"{scheme}://{parts.netloc}{unquote(parts.path)}"


def publish(session: SparkSession, root: str, moves: Mapping[str, str], staging: str) -> None:
    """Move staged files into an output, one after the other, and remove the staging folder.

    All paths are URIs; `moves` has the place of each staged file.
    """
    check_scheme(session, urlsplit(root).scheme)
    try:
        is_old = _published(session, root, moves, staging)
    except Exception as error:
        # By its text, because the error may come from a worker of Spark.
        if _CROSS_DEVICE not in str(error):
            raise
        raise ConfigurationError(_other_file_system(root)) from error
    if is_old:
        msg = (
            f"the output {root} was written by version 0.1.0, as topic=/partition=/...: a range "
            "that is written again would not replace its old file. Write to a new path, and copy "
            "the old output there once by reading it and writing it with this function."
        )
        raise IllegalStateError(msg)


def _published(session: SparkSession, root: str, moves: Mapping[str, str], staging: str) -> bool:
    """Move the files, or return True if the output has the layout of version 0.1.0."""
    scheme = urlsplit(root).scheme
    if scheme == "hdfs":
        return _publish_on_hadoop(session, root, moves, staging)
    if scheme in _STORES:
        return _publish_in_store(_store(root), root, moves, staging)
    if is_connect(session) and not _are_seen(moves):
        return _publish_in_worker(session, root, moves, staging)
    return mounted_publisher()(root, list(moves), list(moves.values()), staging)


def mounted_publisher() -> Callable[[str, list[str], list[str], str], bool]:
    """Return a function that publishes on a mounted file system.

    It returns True if it refused an output of version 0.1.0. It is a closure with its own imports,
    so a worker without this package can run it.
    """

    def publish_mounted(root: str, sources: list[str], places: list[str], staging: str) -> bool:
        import contextlib
        import os
        import shutil
        import time
        from urllib.parse import unquote, urlsplit

        def path_of(uri: str) -> str:
            return unquote(urlsplit(uri).path)

        folder = path_of(root)
        names = os.listdir(folder) if os.path.isdir(folder) else []  # noqa: PTH112, PTH208
        if any(name.startswith(_OLD_FOLDER) for name in names):
            return True
        for source, place in zip(sources, places, strict=True):
            os.makedirs(os.path.dirname(path_of(place)), exist_ok=True)  # noqa: PTH103, PTH120
            os.replace(path_of(source), path_of(place))  # noqa: PTH105
        attempt = path_of(staging)
        shutil.rmtree(attempt, ignore_errors=True)
        with os.scandir(os.path.dirname(attempt)) as others:  # noqa: PTH120
            for other in others:
                with contextlib.suppress(FileNotFoundError):  # its writer has just ended
                    if time.time() - other.stat().st_mtime > LEFT_OVER_AFTER_S:
                        shutil.rmtree(other.path, ignore_errors=True)
        return False

    return publish_mounted


def _are_seen(uris: Iterable[str]) -> bool:
    """Return whether this process sees the files of the server, whose names are unique."""
    return all(Path(unquote(urlsplit(uri).path)).exists() for uri in uris)


def _publish_in_worker(session: Any, root: str, moves: Mapping[str, str], staging: str) -> bool:
    from pyspark.sql.types import BooleanType

    columns = ["root", "sources", "places", "staging"]
    arguments = (root, list(moves), list(moves.values()), staging)
    session.udf.register(_WORKER_FUNCTION, mounted_publisher(), BooleanType())
    call = f"{_WORKER_FUNCTION}({', '.join(columns)}) AS is_old"
    try:
        (row,) = session.createDataFrame([arguments], columns).selectExpr(call).collect()
    except Exception as error:
        if not any(sign in str(error) for sign in _NO_PYTHON):
            raise
        msg = (
            "this process does not see the files of the Spark Connect server, and the server's "
            "workers, which would move them to their places, have another Python. Give the workers "
            "the same Python (PYSPARK_PYTHON), mount the output in the run, or write to an object "
            "store."
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
    if len(context.util().globStatus(hadoop.Path(path(root), f"{_OLD_FOLDER}*")) or ()):
        return True
    for source, place in moves.items():
        context.mkdir(path(place).getParent(), hadoop.permission.FsPermission.getDirDefault(), True)  # noqa: FBT003
        context.rename(path(source), path(place), overwrite)
    context.delete(path(staging), True)  # noqa: FBT003
    return False


def _store(root: str) -> Any:
    try:
        from pyarrow.fs import FileSystem
    except ImportError as error:
        msg = "output by range in an object store needs pyarrow: install it."
        raise ConfigurationError(msg) from error
    parts = urlsplit(root)
    store, _ = FileSystem.from_uri(f"{_STORES[parts.scheme]}://{parts.netloc}")
    return store


def _publish_in_store(store: Any, root: str, moves: Mapping[str, str], staging: str) -> bool:
    from pyarrow.fs import FileSelector

    def key(uri: str) -> str:
        parts = urlsplit(uri)
        return f"{parts.netloc}{unquote(parts.path)}"

    children = store.get_file_info(FileSelector(key(root), allow_not_found=True))
    if any(child.base_name.startswith(_OLD_FOLDER) for child in children):
        return True
    for source, place in moves.items():
        store.copy_file(key(source), key(place))
    with suppress(FileNotFoundError):  # nothing was staged, and a store has no empty folders
        store.delete_dir(key(staging))
    return False
