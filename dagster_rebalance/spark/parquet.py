"""Parquet output by range: one file per range, which a replay replaces in one step.

The layout is `topic_partition=<topic>-p<partition>/<start>-<until>.parquet`. Spark writes to a
folder beside the output (`staged`), and `parquet_files` moves the complete files. A Spark task
reads one range of Kafka, so its file is that of the range unless user code moves records between
tasks. Gathering the records of a range takes a shuffle. If this process sees the files, records are
gathered only when a file is not exactly one range.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, unquote, urlsplit

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.spark import parquet_files
from dagster_rebalance.spark.parquet_files import COLUMNS, local_folder, ranges_by_file
from dagster_rebalance.spark.ranges import (
    IS_ONE_RANGE_A_TASK,
    READ_ID,
    explained_read_errors,
    functions_of,
    written_once,
)
from dagster_rebalance.spark.schemas import (
    fit_to_files,
    refuse_ambiguous_names,
    refuse_concurrent_schemas,
    stored_schema,
)
from dagster_rebalance.spark.spark_jobs import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import DataFrame

RANGE_KEY = COLUMNS

# The staging folder of an attempt, the output, and the place of each staged file: all as URIs.
_Moves: TypeAlias = "tuple[str, str, Mapping[str, str]]"

# Not `topic`: readers infer the type of a folder's value (007 is 7), and use it as the column.
FOLDER = "topic_partition"
_FILE = "dagster_rebalance_range"
# File systems may ignore case, and limit a name to 255 characters. No topic has a ~.
_FOLDER_OF_ROW = """
    concat(
        CASE WHEN `topic` RLIKE '^[a-z0-9._-]{1,150}$' THEN `topic`
        ELSE concat(substr(regexp_replace(lower(`topic`), '[^a-z0-9._-]', '_'), 1, 100),
                    '~', substr(sha2(`topic`, 256), 1, 16)) END,
        '-p', `partition`)
"""
_FILE_OF_ROW = """
    CASE WHEN `topic` IS NULL OR `partition` IS NULL OR range_start IS NULL OR range_until IS NULL
    THEN raise_error('a record has no topic, partition, range_start or range_until')
    ELSE concat(range_start, '-', range_until) END
"""
# The two folders of an attempt: files as they were read, and files by range.
_AS_READ, _BY_RANGE = "as_read", "by_range"
_STAGED = re.compile(rf"{_BY_RANGE}/{FOLDER}=([^/]+)/{_FILE}=(\d+-\d+)/[^/]+")
# Longer than any write, and far below the age at which other writers remove staging folders.
_STAGING_LIMIT_S = parquet_files.LEFT_OVER_AFTER_S / 2

_gathered: set[str] = set()
"""Outputs of which a file was not exactly one range: their records are gathered immediately."""


def write_parquet_by_range(frame: DataFrame, path: str) -> int:
    """Write records to Parquet, one file per range, replacing ranges that were written before.

    Each file is replaced in one step: a reader sees the old one or the new one. Concurrent runs may
    write to the same path, also the same range. If all records of a range are filtered out, no file
    is replaced: let the filter depend on the record alone, so a replay returns the same records. If
    a rerun filters more than the previous run, delete the file of such a range manually.

    Write a read to one path in one call: a second call would replace the files of the first, and is
    refused. Filter into several paths, not into several calls for one path.

    Args:
        frame: A frame derived from that of `read_ranges`, with its columns `topic`, `partition`,
            `range_start` and `range_until`.
        path: A folder of a mounted file system, of HDFS (not with Spark Connect), or of S3 or
            Google Cloud Storage, which this process must reach through pyarrow, too. Spark first
            writes to `.<name>-staging` beside it.

    Returns:
        The number of records written.

    Raises:
        IllegalStateError: One of these columns is missing or empty; names differ only in capitals;
            the columns do not fit the existing files; the frame was written to this path already;
            or the output was written by version 0.1.0.
        ConfigurationError: The file system cannot replace a file in one step, or is unreachable.
        BrokerError: Kafka no longer has all of the offsets.
    """
    _prefetch(frame)
    _check_columns(frame.columns)
    schema = frame.schema
    refuse_ambiguous_names(schema)
    parent, name = _parent_and_name(path)
    session = frame.sparkSession
    if urlsplit(path).scheme:
        parquet_files.check_scheme(session, urlsplit(path).scheme)
    output, staged = f"{parent}{name}", f"{parent}.{name}-staging/{uuid.uuid4().hex}"
    started_at = time.time()
    read = schema["range_start"].metadata
    seen = local_folder(output) if _is_seen(parent) else None
    if seen is not None:
        parquet_files.check_one_file_system(seen)
    stored = stored_schema(session, output, seen, FOLDER)
    if stored is not None:
        frame = fit_to_files(frame, stored, output)
    may_write_as_read = bool(read.get(IS_ONE_RANGE_A_TASK)) and _is_seen(parent)
    written, plan = _write_staged(frame, output, staged, may_write_as_read=may_write_as_read)
    if plan is None:
        return 0
    staging, root, moves = plan
    if time.time() - started_at > _STAGING_LIMIT_S:
        msg = (
            f"the write took longer than a day, so other writers may remove {staging}. Nothing was "
            "changed in the output. Write smaller batches."
        )
        raise IllegalStateError(msg)
    places = {parquet_files.place_of(uri) for uri in moves.values()}
    with written_once(read.get(READ_ID), places):
        parquet_files.publish(session, root, moves, staging)
    if stored is None and seen is not None:
        own_files = {seen / place.removeprefix(root).lstrip("/") for place in moves.values()}
        refuse_concurrent_schemas(session, schema, seen, own_files)
    return written


def _write_staged(
    frame: DataFrame, output: str, staged: str, *, may_write_as_read: bool
) -> tuple[int, _Moves | None]:
    """Write one file per range to the staging folder; return the record count and the moves."""
    written = None
    if may_write_as_read and output not in _gathered:
        written = _write(frame, f"{staged}/{_AS_READ}")
        moves = _moves_as_read(output, staged, written)
        if moves is not None:
            return written, moves
        _gathered.add(output)
        frame = frame.sparkSession.read.schema(frame.schema).parquet(f"{staged}/{_AS_READ}")
    gathered = _stage(frame, staged)
    files = _files_in(frame.sparkSession, f"{staged}/{_BY_RANGE}")
    visible = frame.sparkSession.read.parquet(f"{staged}/{_BY_RANGE}").count() if files else 0
    written = gathered if written is None else written
    if not visible == gathered == written:
        msg = (
            f"Spark wrote {written} records to {staged}, and {visible} of them were found: the "
            "folder is not shared by all of Spark's workers and its driver. Nothing was changed in "
            "the output. Write to a file system that they share."
        )
        raise ConfigurationError(msg)
    attempt = staged.rpartition("/")[2]
    return written, _moves(files, attempt) if files else _no_moves(output, staged)


def _prefetch(frame: DataFrame) -> None:
    """Fetch the schema and the kind of a frame from a Connect server in parallel.

    A frame caches its schema, and whether it is a stream, which pyspark checks before it counts.
    """
    if is_connect(frame.sparkSession):
        with ThreadPoolExecutor(1) as pool:
            is_stream = pool.submit(lambda: frame.isStreaming)
            _ = frame.schema
            is_stream.result()


def _check_columns(columns: Iterable[str]) -> None:
    missing = [column for column in RANGE_KEY if column not in columns]
    if missing:
        msg = (
            f"the output cannot be keyed by range: the column(s) {', '.join(missing)} of "
            "read_ranges() are missing. Keep them in the DataFrame."
        )
        raise IllegalStateError(msg)
    taken = [column for column in columns if column.lower() in {FOLDER, _FILE}]
    if taken:
        msg = f"the column(s) {', '.join(taken)} are part of the output's paths. Rename them."
        raise IllegalStateError(msg)


def _parent_and_name(path: str) -> tuple[str, str]:
    parent, slash, name = path.rstrip("/").rpartition("/")
    if not name or name in {".", ".."} or parent.endswith(":/") or re.search(r"[*?\[\]{}\\]", path):
        msg = (
            f"{path!r} cannot be the path of an output: give a folder below the root of its file "
            "system or bucket, without the characters * ? [ ] { } and \\, which are a pattern in "
            "Spark."
        )
        raise ConfigurationError(msg)
    return f"{parent}{slash}", name


def _is_seen(parent: str) -> bool:
    """Return whether this process probably sees an output in this folder."""
    folder = local_folder(parent)
    return folder is not None and os.path.isdir(folder)  # noqa: PTH112 - Path raises if it has no permission


def _moves_as_read(output: str, staged: str, written: int) -> _Moves | None:
    """Return the moves of files written as they were read; None if ranges must be gathered."""
    root, staging = local_folder(output), local_folder(staged)
    if root is None or staging is None or not (staging / _AS_READ).is_dir():
        return None  # also if nothing was written, which an unseen folder does not prove
    ranges = ranges_by_file(staging / _AS_READ, written)
    if ranges is None:
        return None
    moves = {
        file.as_uri(): f"{root.as_uri()}/{FOLDER}={key.place[0]}/{key.place[1]}.parquet"
        for file, key in ranges.items()
    }
    return staging.as_uri(), root.as_uri(), moves


def _no_moves(output: str, staged: str) -> _Moves | None:
    """Return no moves for a write without records; None if the staging folder is not seen here."""
    root, staging = local_folder(output), local_folder(staged)
    if root is not None and staging is not None and staging.is_dir():
        return staging.as_uri(), root.as_uri(), {}
    if urlsplit(staged).scheme in {"", "file"}:
        return None  # a later write that has records removes it there
    return quote(staged, safe="/:@"), quote(output, safe="/:@"), {}


def _stage(frame: DataFrame, staged: str) -> int:
    """Write one complete file per range into the folder of this attempt."""
    named = frame.selectExpr("*", f"{_FOLDER_OF_ROW} AS {FOLDER}", f"{_FILE_OF_ROW} AS {_FILE}")
    # One task per range: no file system replaces several files at once.
    whole = named.repartition(FOLDER, _FILE)
    return _write(whole, f"{staged}/{_BY_RANGE}", FOLDER, _FILE)


def _write(frame: DataFrame, folder: str, *by: str) -> int:
    """Write records, and return their number."""
    counted, count = _observed(frame)
    plain = counted.withMetadata("range_start", {})
    writer = plain.write.mode("error").option("maxRecordsPerFile", "0")
    with explained_read_errors():
        (writer.partitionBy(*by) if by else writer).parquet(folder)
    counted_records = count.get.get("records")
    # A busy Spark Connect server sometimes ends a command without its observations.
    if counted_records is None:
        return int(frame.sparkSession.read.schema(frame.schema).parquet(folder).count())
    return int(counted_records)


def _observed(frame: Any) -> tuple[DataFrame, Any]:
    # pyspark's own choice between the two kinds depends on the process, not on the session.
    if is_connect(frame.sparkSession):
        from pyspark.sql.connect import observation
    else:
        from pyspark.sql import observation  # type: ignore[no-redef]
    counted = observation.Observation()
    count = functions_of(frame.sparkSession).expr("count(1) AS records")
    return frame.observe(counted, count), counted


def _files_in(session: Any, folder: str) -> list[str]:
    """Return the URIs of the Parquet files in a folder, which only Spark may see."""
    reader = session.read.format("binaryFile").option("recursiveFileLookup", "true")
    files: list[str] = reader.option("pathGlobFilter", "*.parquet").load(folder).inputFiles()
    return files


def _moves(files: Iterable[str], attempt: str) -> _Moves:
    """Return the staging folder of this attempt, the output, and the place of each staged file."""
    moves: dict[str, str] = {}
    staging = root = ""
    for file in files:
        beside, _, inside = file.partition(f"/{attempt}/")
        parent, _, hidden = beside.rpartition("/")
        staging, root = f"{beside}/{attempt}", f"{parent}/{hidden[1:].removesuffix('-staging')}"
        staged = _STAGED.fullmatch(unquote(inside))
        if staged is None:
            msg = (
                f"{inside} is not the file of a range: partition, range_start and range_until must "
                "be those of read_ranges()."
            )
            raise IllegalStateError(msg)
        moves[file] = f"{root}/{FOLDER}={staged[1]}/{staged[2]}.parquet"
    if len(set(moves.values())) != len(moves):
        msg = (
            "Spark wrote a range into several files, which cannot be replaced in one step. "
            "Nothing was changed in the output."
        )
        raise IllegalStateError(msg)
    return staging, root, moves
