"""Parquet output by range: one file per range, which a retry or rerun replaces in one step.

The layout is `topic_partition=<topic>-p<partition>/<start>-<until>.parquet`. Spark writes to a
folder beside the output (`staged`), and `parquet_files` moves the complete files. A Spark task
reads one range of Kafka, so its file has exactly that range unless user code moves records between
tasks. A shuffle gathers the records of a range. If this process can read the files, it shuffles
only if a file does not have exactly one range.

A Connect server is asked once per write: to write. A question about the schema is asked only until
the frames of this process fit an output. From then on, the footers of the staged files must have
the schema that fitted, or they are removed and the schema is asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import quote, unquote, urlsplit

from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.outputs.layout import (
    COLUMNS,
    FILE,
    FOLDER,
    check_columns,
    file_of,
    local_folder,
    parent_and_name,
    place_of,
)
from dagster_rebalance.outputs.publication import check_duration, check_one_file_system
from dagster_rebalance.outputs.scratch import Scratch, current_scratch
from dagster_rebalance.spark import parquet_files
from dagster_rebalance.spark.parquet_files import ranges_by_file
from dagster_rebalance.spark.ranges import (
    IS_ONE_RANGE_A_TASK,
    READ_ID,
    content,
    explained_read_errors,
    functions_of,
    read_in_plan,
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
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

RANGE_KEY = COLUMNS
_FORM = "Parquet"

# The staging folder of an attempt, the output, and the target of each staged file: all as URIs.
_Moves: TypeAlias = "tuple[str, str, Mapping[str, str]]"

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
_STAGED = re.compile(rf"{_BY_RANGE}/{FOLDER}=([^/]+)/{FILE}=(\d+-\d+)/[^/]+")

# The staging folder is private, and its footers prove that it is complete. Each file, folder and
# checksum that Hadoop creates on a mounted file system costs the JVM a process (chmod).
_STAGING_OPTIONS = {
    "mapreduce.fileoutputcommitter.algorithm.version": "2",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}

_gathered: set[str] = set()
"""Outputs of which a file did not have exactly one range: their writes shuffle at once."""
_fitting: dict[tuple[str, str], str] = {}
"""For an output and the schema of a file in it, the schema of staged files that fit without a cast.
"""
_MAX_FITTING = 1000
_asked: set[str] = set()
"""Outputs to which a frame was written that did not have such a schema: Spark is always asked."""


class _Attempt(NamedTuple):
    """A staged write: its records, the moves, the metadata of its read, and a new schema.

    `new_schema` is the schema of the first files of an output.
    """

    written: int
    plan: _Moves | None
    read: Mapping[str, Any]
    new_schema: StructType | None = None


def write_parquet_by_range(frame: DataFrame, path: str) -> int:
    """Write records to Parquet, one file per range, replacing ranges that were written before.

    Each file is replaced in one step: a reader sees the old or the new file. Concurrent runs may
    write to the same path, also the same range. If all records of a range are filtered out, no file
    is replaced: let the filter depend on the record alone, so a retry keeps the same records. If a
    rerun filters more than the previous run, delete the file of such a range manually.

    Write all records of a read to a path in one call: a second call would replace the files of the
    first, and is refused. Filter into several paths, not into several calls for one path.

    Args:
        frame: A DataFrame derived from `read_ranges`, with the columns `topic`, `partition`,
            `range_start` and `range_until`.
        path: A folder of a mounted file system, of HDFS (not with Spark Connect), or of S3 or
            Google Cloud Storage, which this process must reach through pyarrow, too. Spark first
            writes to `.<name>-staging` beside the folder.

    Returns:
        The number of records written.

    Raises:
        IllegalStateError: One of these columns is missing or empty; names differ only in capitals;
            the columns do not fit the existing files; records of the same read were written to this
            path before; or the output was written by version 0.1.0.
        ConfigurationError: The file system cannot replace a file in one step, or is unreachable.
        BrokerError: Kafka no longer has all of the offsets.
    """
    parent, name = parent_and_name(path)
    session = frame.sparkSession
    if urlsplit(path).scheme:
        parquet_files.check_scheme(session, urlsplit(path).scheme)
    scratch = current_scratch()
    if scratch is not None:
        return _write_scratch(frame, f"{parent}{name}", path, scratch)
    return _write_to(frame, parent, name)


def _write_scratch(frame: DataFrame, output: str, path: str, scratch: Scratch) -> int:
    """Write to a scratch folder a frame that fits the output."""
    parent, name = parent_and_name(scratch.place_of(_FORM, path))
    written = _write_to(frame, parent, name, fits=output)
    place, session = f"{parent}{name}", frame.sparkSession
    has_rows = written or any(one.place == place and one.rows for one in scratch.outputs)
    found = content(session.read.parquet(place).drop(FOLDER)) if has_rows else (0, [])
    scratch.add(_FORM, path, *found, place)
    return written


def _write_to(frame: DataFrame, parent: str, name: str, *, fits: str | None = None) -> int:
    """Write to a folder; `fits` is another output whose columns the frame must have."""
    session = frame.sparkSession
    output, staged = f"{parent}{name}", f"{parent}.{name}-staging/{uuid.uuid4().hex}"
    started_at = time.time()
    seen = local_folder(output) if _is_seen(parent) else None
    if seen is not None:
        check_one_file_system(seen)
    attempt = _write_as_before(frame, output, staged, seen) if fits is None else None
    if attempt is None:
        attempt = _write_checked(frame, output, staged, seen, fits=fits)
    if attempt.plan is None:
        return 0
    staging, root, moves = attempt.plan
    check_duration(staging, time.time() - started_at)
    places = {place_of(uri) for uri in moves.values()}
    with written_once(attempt.read.get(READ_ID), places):
        parquet_files.publish(session, root, moves, staging)
    if attempt.new_schema is not None and seen is not None:
        own_files = {seen / place.removeprefix(root).lstrip("/") for place in moves.values()}
        refuse_concurrent_schemas(session, attempt.new_schema, seen, own_files)
    return attempt.written


def _write_as_before(
    frame: DataFrame, output: str, staged: str, seen: Path | None
) -> _Attempt | None:
    """Write a frame whose schema probably fits the output, as earlier frames did.

    Returns:
        None, with nothing staged, if the schema of the frame has to be checked.
    """
    if seen is None or not is_connect(frame.sparkSession) or output in _gathered | _asked:
        return None
    fitting = _fitting.get((output, parquet_files.schema_of_output(seen) or ""))
    read = read_in_plan(frame) if fitting is not None else {}
    staging = local_folder(staged)
    if staging is None or not read.get(IS_ONE_RANGE_A_TASK):
        return None
    from pyspark.errors import AnalysisException

    try:
        written = _write(frame, f"{staged}/{_AS_READ}")
    except AnalysisException:  # perhaps of a missing column, which the checks explain
        _asked.add(output)
        return None
    if parquet_files.schema_of_staged(staging / _AS_READ) == fitting:
        plan = _moves_as_read(output, staged, written)
        if plan is not None:
            return _Attempt(written, plan, read)
    _asked.add(output)
    shutil.rmtree(staging, ignore_errors=True)
    return None


def _write_checked(
    frame: DataFrame, output: str, staged: str, seen: Path | None, *, fits: str | None = None
) -> _Attempt:
    """Write a frame whose schema Spark has described, and which fits the output."""
    check_columns(frame.columns)
    schema = frame.schema
    refuse_ambiguous_names(schema)
    read = schema["range_start"].metadata
    noted = parquet_files.schema_of_output(seen) if seen is not None else None
    known = output if fits is None else fits
    folder = seen if fits is None else local_folder(fits)
    stored = stored_schema(frame.sparkSession, known, folder, FOLDER)
    fitted = frame if stored is None else fit_to_files(frame, stored, known)
    may_write_as_read = bool(read.get(IS_ONE_RANGE_A_TASK)) and seen is not None
    written, plan = _write_staged(fitted, output, staged, may_write_as_read=may_write_as_read)
    staging = local_folder(staged)
    if may_write_as_read and staging is not None and fitted is frame:
        own = parquet_files.schema_of_staged(staging / _AS_READ)
        if own is not None and is_connect(frame.sparkSession) and read == read_in_plan(frame):
            _note_fitting(output, noted, own)
    return _Attempt(written, plan, read, schema if stored is None else None)


def _note_fitting(output: str, noted: str | None, own: str) -> None:
    """Note that files with the schema `own` fit an output with a file of the schema `noted`."""
    if len(_fitting) > _MAX_FITTING:
        _fitting.clear()
    for stored in filter(None, {noted, own}):
        _fitting[output, stored] = own


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


def _is_seen(parent: str) -> bool:
    """Return whether this process can probably read an output in this folder."""
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
    moves = {file.as_uri(): f"{root.as_uri()}/{file_of(key)}" for file, key in ranges.items()}
    return staging.as_uri(), root.as_uri(), moves


def _no_moves(output: str, staged: str) -> _Moves | None:
    """Return no moves for a write without records; None if the staging folder is not visible."""
    root, staging = local_folder(output), local_folder(staged)
    if root is not None and staging is not None and staging.is_dir():
        return staging.as_uri(), root.as_uri(), {}
    if urlsplit(staged).scheme in {"", "file"}:
        return None  # a later write that has records removes it there
    return quote(staged, safe="/:@"), quote(output, safe="/:@"), {}


def _stage(frame: DataFrame, staged: str) -> int:
    """Write one complete file per range into the folder of this attempt."""
    named = frame.selectExpr("*", f"{_FOLDER_OF_ROW} AS {FOLDER}", f"{_FILE_OF_ROW} AS {FILE}")
    # One task per range: no file system replaces several files at once.
    whole = named.repartition(FOLDER, FILE)
    return _write(whole, f"{staged}/{_BY_RANGE}", FOLDER, FILE)


def _write(frame: DataFrame, folder: str, *by: str) -> int:
    """Write records, and return their number."""
    # A new value has no metadata of the read. withMetadata would request the schema from a Connect
    # server, which ignores empty metadata.
    start = functions_of(frame.sparkSession).expr("greatest(range_start, range_start)")
    plain = frame.withColumn("range_start", start)
    counted, count_of = _counted(plain)
    writer = counted.write.mode("error").option("maxRecordsPerFile", "0")
    if not by:
        writer = writer.options(**_STAGING_OPTIONS)
    with explained_read_errors():
        (writer.partitionBy(*by) if by else writer).parquet(folder)
    records = count_of(counted)
    # A busy Spark Connect server sometimes ends a command without its observations.
    if records is None:
        return int(frame.sparkSession.read.schema(frame.schema).parquet(folder).count())
    return records


def _counted(frame: Any) -> tuple[DataFrame, Callable[[Any], int | None]]:
    """Return a frame that counts its records, and a function that returns their number.

    The function takes the frame that was written.
    """
    count = functions_of(frame.sparkSession).expr("count(1) AS records")
    if is_connect(frame.sparkSession):
        # By name: an `Observation` first asks the server whether the frame is a stream.
        name = uuid.uuid4().hex
        return frame.observe(name, count), lambda written: _observed_records(
            dict(written.executionInfo.flows).get(name, {})
        )
    # pyspark's own choice between the two kinds depends on the process, not on the session.
    from pyspark.sql.observation import Observation

    counted = Observation()
    return frame.observe(counted, count), lambda _: _observed_records(counted.get)


def _observed_records(observed: Mapping[str, Any]) -> int | None:
    records = observed.get("records")
    return None if records is None else int(records)


def _files_in(session: Any, folder: str) -> list[str]:
    """Return the URIs of the Parquet files in a folder that may be visible only to Spark."""
    reader = session.read.format("binaryFile").option("recursiveFileLookup", "true")
    files: list[str] = reader.option("pathGlobFilter", "*.parquet").load(folder).inputFiles()
    return files


def _moves(files: Iterable[str], attempt: str) -> _Moves:
    """Return the staging folder of this attempt, the output, and the target of each staged file."""
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
