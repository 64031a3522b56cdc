"""Parquet output by range from Arrow: one file per range, which a retry or rerun replaces.

The files and their publication are those of `spark.parquet`. Records are routed to the file of
their range as they are read. At most `BUFFER_BYTES` of them wait in memory for a row group.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from dagster_rebalance.arrow.records import (
    by_range,
    cast,
    check_key_types,
    library,
    opened,
    plain,
    refuse_types,
    shape,
    shapes,
)
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.outputs import columns
from dagster_rebalance.outputs.layout import (
    COLUMNS,
    STORES,
    RangeKey,
    check_columns,
    file_of,
    is_data,
    local_folder,
    output_files,
    parent_and_name,
)
from dagster_rebalance.outputs.publication import (
    check_duration,
    check_one_file_system,
    explained_publication,
    failed_files,
    mounted_publisher,
    old_output,
    publish_in_store,
    refuse_scheme,
    store_key,
    store_of,
)
from dagster_rebalance.outputs.scratch import SHOWN_ROWS, current_scratch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BUFFER_BYTES = 64 << 20
_FORM = "Parquet"
_FURTHER_TYPES = ("uint8", "uint16", "uint32", "uint64", "fixed_size_binary")
_INT96 = "INT96"
_known: dict[str, tuple[Any, tuple[Any, bool]]] = {}
"""A file of each output in an object store and its schema, because a listing takes requests."""


def write_parquet_by_range(records: Any, path: str | os.PathLike[str]) -> int:
    """Write records to Parquet, one file per range, replacing ranges that were written before.

    Files, guarantees and rules are those of `dagster_rebalance.spark.output.write_parquet_by_range`
    (docs/parquet.md), so a group may move from one to the other on the same path. The records are
    read and written batch by batch, in bounded memory.

    Each file is replaced in one step: a reader sees the old or the new file. Concurrent runs may
    write to the same path, also the same range. Write all records of a range in one call. A range
    without records replaces nothing: let a filter depend on the record alone.

    Example:
        ```python
        @dg.asset
        def orders(kafka_batch: KafkaBatch) -> None:
            write_parquet_by_range(kafka_batch.arrow(), "/data/orders")
        ```

    Args:
        records: A `pyarrow.RecordBatchReader` such as `kafka_batch.arrow()`, a `pyarrow.Table`, or
            another object with an Arrow stream (Polars, DuckDB), with the columns `topic`,
            `partition`, `range_start` and `range_until`.
        path: A folder of a mounted file system, of S3 (`s3a:`) or of Google Cloud Storage (`gs:`).
            Files are first written to `.<name>-staging` beside the folder.

    Returns:
        The number of records written.

    Raises:
        IllegalStateError: One of these columns is missing or empty; a column has a type that the
            output could not continue; names differ only in capitals;
            the columns do not fit the existing files; or the output was written by version 0.1.0.
        ConfigurationError: pyarrow is missing, or the file system cannot replace a file in one
            step.
        BrokerError: Kafka no longer has all of the offsets.
    """
    library("pyarrow.parquet", "arrow")
    path = os.fspath(path)
    parent, name = parent_and_name(path)
    output = _Output(parent, name)
    reader = opened(records)
    check_columns(reader.schema.names)
    columns.refuse_ambiguous_names(tuple((one.name, shape(one.type)) for one in reader.schema))
    check_key_types(reader.schema, COLUMNS)
    started_at = time.time()
    stored = output.stored()
    scratch = current_scratch()
    if scratch is not None:
        output = _Output(*parent_and_name(scratch.place_of(_FORM, path)))
    schema, has_int96 = stored or (reader.schema, False)
    if stored is None:
        refuse_types(schema, _FORM, _FURTHER_TYPES)
    else:
        columns.refuse_misfits(shapes(reader.schema), shapes(schema), path)
    files = _StagedFiles(output, schema, has_int96=has_int96)
    try:
        written = files.write(reader)
        check_duration(output.staging, time.time() - started_at)
        own = output.publish(files.keys) if written else set()
    except BaseException:
        files.discard()
        raise
    if stored is None:
        output.refuse_concurrent_schemas(schema, own)
    if scratch is not None:
        scratch.add(_FORM, path, *output.content(), output.path)
    return written


class _Output:
    """The files of an output, on a mounted file system or in an object store."""

    def __init__(self, parent: str, name: str) -> None:
        self.path = f"{parent}{name}"
        self.folder = local_folder(self.path)
        staged = f".{name}-staging/{uuid.uuid4().hex}"
        if self.folder is None:
            scheme = urlsplit(self.path).scheme
            if scheme not in STORES:
                raise refuse_scheme(scheme)
            self.store = store_of(self.path)
            self.root, self.staging = self.path, f"{parent}{staged}"
        else:
            check_one_file_system(self.folder)
            self.store = None
            self.root = self.folder.as_uri()
            self.staging = (self.folder.parent / staged).as_uri()

    def open(self, uri: str) -> Any:
        """Open a new file."""
        if self.store is not None:
            return self.store.open_output_stream(store_key(uri))
        file = Path(unquote(urlsplit(uri).path))
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("xb")

    def staged_file(self, key: RangeKey) -> str:
        return f"{self.staging}/{file_of(key)}"

    def stored(self) -> tuple[Any, bool] | None:
        """Return the schema of one file, and whether it has timestamps of Spark's old type."""
        if self.store is not None and self.path in _known:
            known, schema = _known[self.path]
            # The file is gone if the output was removed, and another one if it was begun anew.
            if self.store.get_file_info(known.path) == known:
                return schema
        found = next(self._schemas(), None)
        if found is None:
            return None
        if self.store is not None:
            _known[self.path] = self.store.get_file_info(found[0]), found[1:]
        return found[1:]

    def _schemas(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield each file with its schema, and whether it has timestamps of Spark's old type."""
        parquet = library("pyarrow.parquet", "arrow")
        pa = library("pyarrow", "arrow")
        for file in self._files():
            try:
                footer = parquet.ParquetFile(file, filesystem=self.store)
            except FileNotFoundError:
                continue  # deleted since the folder was listed
            types = (
                footer.schema.column(index).physical_type for index in range(len(footer.schema))
            )
            has_int96 = _INT96 in types
            schema = pa.schema(
                [(one.name, plain(one.type, has_int96=has_int96)) for one in footer.schema_arrow]
            )
            footer.close()
            yield file, schema, has_int96

    def _files(self) -> Iterator[str]:
        if self.folder is not None:
            yield from map(str, output_files(self.folder))
            return
        from pyarrow.fs import FileSelector, FileType

        def children(folder: str) -> Any:
            return self.store.get_file_info(FileSelector(folder, allow_not_found=True))

        for folder in children(store_key(self.root)):
            if folder.type == FileType.Directory and "=" in folder.base_name:
                for file in children(folder.path):
                    if is_data(file.base_name):
                        yield file.path

    def publish(self, keys: Iterable[RangeKey]) -> set[str]:
        """Move the files of ranges into the output. Return their paths."""
        moves = {self.staged_file(key): f"{self.root}/{file_of(key)}" for key in keys}
        with explained_publication(self.root):
            if self.store is not None:
                is_old = publish_in_store(self.store, self.root, moves, self.staging)
            else:
                publish = mounted_publisher()
                obsolete = "\n".join(failed_files(self.root))
                is_old = publish(
                    self.root, list(moves), list(moves.values()), self.staging, obsolete
                )
        if is_old:
            raise old_output(self.path)
        read = store_key if self.store is not None else lambda uri: unquote(urlsplit(uri).path)
        return {read(place) for place in moves.values()}

    def refuse_concurrent_schemas(self, schema: Any, own: set[str]) -> None:
        """Compare a schema with the files of writers that also found the output empty."""
        for file, other, _ in self._schemas():
            if file not in own:
                try:
                    columns.refuse_misfits(shapes(schema), shapes(other), self.path)
                except IllegalStateError as error:
                    raise columns.concurrent_schemas(self.path, error) from error

    def content(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of rows, and the first of them."""
        parquet = library("pyarrow.parquet", "arrow")
        rows, shown = 0, list[dict[str, Any]]()
        for file in self._files():
            with parquet.ParquetFile(file, filesystem=self.store) as read:
                rows += read.metadata.num_rows
                for batch in read.iter_batches(SHOWN_ROWS) if len(shown) < SHOWN_ROWS else ():
                    shown += batch.to_pylist()
                    break
        return rows, shown[:SHOWN_ROWS]

    def discard(self) -> None:
        """Remove the staging folder of a failed write."""
        if self.store is None:
            shutil.rmtree(unquote(urlsplit(self.staging).path), ignore_errors=True)
        else:
            with suppress(OSError):
                self.store.delete_dir(store_key(self.staging))


class _StagedFiles:
    """The staged files of a write: one per range."""

    def __init__(self, output: _Output, schema: Any, *, has_int96: bool) -> None:
        self.keys: dict[RangeKey, None] = {}
        self._output = output
        self._schema = schema
        self._has_int96 = has_int96
        self._writers: dict[RangeKey, tuple[Any, Any]] = {}
        self._waiting: dict[RangeKey, list[Any]] = {}
        self._bytes: dict[RangeKey, int] = {}

    def write(self, reader: Any) -> int:
        """Write all records; return their number."""
        written = 0
        for batch in reader:
            if not batch.num_rows:
                continue
            written += batch.num_rows
            for key, rows in by_range(cast(batch, self._schema)):
                self.keys[key] = None
                self._waiting.setdefault(key, []).append(rows)
                self._bytes[key] = self._bytes.get(key, 0) + rows.nbytes
            while sum(self._bytes.values()) > BUFFER_BYTES:
                self._write_rows(max(self._bytes, key=self._bytes.__getitem__))
        for key in self.keys:
            self._write_rows(key)
            self._close(key)
        return written

    def discard(self) -> None:
        """Close and remove all files."""
        for key in list(self._writers):
            with suppress(Exception):
                self._close(key)
        self._output.discard()

    def _write_rows(self, key: RangeKey) -> None:
        from pyarrow import Table, parquet

        rows = self._waiting.pop(key, None)
        if rows is None:
            return
        del self._bytes[key]
        if key not in self._writers:
            file = self._output.open(self._output.staged_file(key))
            writer = parquet.ParquetWriter(
                file,
                self._schema,
                store_schema=False,
                use_deprecated_int96_timestamps=self._has_int96,
            )
            self._writers[key] = writer, file
        self._writers[key][0].write_table(Table.from_batches(rows))

    def _close(self, key: RangeKey) -> None:
        writer, file = self._writers.pop(key)
        writer.close()
        file.close()
