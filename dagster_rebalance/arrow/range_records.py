"""Records for the rows of a table: checked, and read once more after a commit that conflicted."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from importlib import import_module
from io import SEEK_END
from itertools import chain
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any

from dagster_rebalance.arrow.records import (
    cast,
    check_key_types,
    merged,
    opened,
    refuse_types,
    shape,
    shapes,
)
from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.outputs.columns import differences, refuse_ambiguous_names
from dagster_rebalance.outputs.rows import COLUMNS, Rows, check_columns, rows_without_ranges
from dagster_rebalance.outputs.scratch import SHOWN_ROWS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.offsets import OffsetRange

_KEPT_BYTES = 64 << 20
"""The size of records that are kept in memory. Further ones are in a temporary file."""


class RangeRecords:
    """The records of ranges, which can be read several times.

    They are read and kept before a library of a table takes them: a library would read them in a
    thread that no signal interrupts, and would replace the error of a failed read by another one.

    Attributes:
        rows: The rows of the table that the records replace.
        schema: The columns of the records.
    """

    def __init__(self, rows: Rows, schema: Any, kept: Sequence[Any], spilled: Any) -> None:
        self.rows = rows
        self.schema = schema
        self._kept = kept
        self._spilled = spilled

    @classmethod
    @contextmanager
    def of(
        cls, records: Any, table: str, ranges: Sequence[OffsetRange]
    ) -> Iterator[RangeRecords | None]:
        """Read and yield the records of ranges; None if there are no ranges.

        Raises:
            IllegalStateError: Columns are missing or ambiguous, the ranges overlap, a record is in
                none of them, or there are records but no ranges.
        """
        reader = opened(records)
        check_columns(reader.schema.names)
        refuse_ambiguous_names(tuple((one.name, shape(one.type)) for one in reader.schema))
        check_key_types(reader.schema, COLUMNS)
        if not ranges:
            if any(batch.num_rows for batch in reader):
                raise rows_without_ranges(table)
            yield None
            return
        rows = Rows.of(ranges)
        with SpooledTemporaryFile(max_size=1) as spilled:  # a file once something is written
            yield cls(rows, reader.schema, _keep(reader, rows, spilled), spilled)

    def fitted(
        self,
        stored: Any,
        table: str,
        output: str,
        *,
        merges: bool,
        further: Collection[str] = (),
    ) -> Any:
        """Return the schema of records for a table: types of the table, then new columns.

        With `merges`, the records may have other columns and other fields of structs than the
        table. `further` has types that the format can store besides those of `refuse_types`.

        Raises:
            IllegalStateError: A column or its type does not fit the table.
        """
        pa = import_module("pyarrow")
        olds, news = pa.struct(list(stored)), pa.struct(list(self.schema))
        then = shapes(merged(olds, news, has_all=False) if merges else stored)
        if found := list(differences(shapes(self.schema), then, "the table")):
            advice = (
                "Cast these columns, or change the table."
                if merges
                else "Cast or keep these columns, or change the table. With merge_schema=True new "
                "columns are added to the table, and missing ones are NULL."
            )
            msg = (
                f"the records do not have the columns of {table}: {'; '.join(found)}. {advice} "
                "Nothing was written."
            )
            raise IllegalStateError(msg)
        every = merged(olds, news, has_all=True)
        if merges:
            refuse_ambiguous_names(shape(every))
        fields = [field for field in every if field.name in self.schema.names]
        known = {field.name: field.type for field in stored}
        new = (field for field in fields if field.type != known.get(field.name))
        refuse_types(new, output, further)
        return pa.schema(fields)

    def reader(self, schema: Any = None) -> Any:
        """Return a reader of all records, with the columns of a schema."""
        pa = import_module("pyarrow")
        schema = schema or self.schema
        batches = (cast(batch, schema) for batch in chain(self._kept, self._from_file()))
        return pa.RecordBatchReader.from_batches(schema, batches)

    def content(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of records, and the first of them."""
        rows, shown = 0, list[dict[str, Any]]()
        for batch in self.reader():
            rows += batch.num_rows
            shown += batch.slice(0, SHOWN_ROWS - len(shown)).to_pylist()
        return rows, shown

    def _from_file(self) -> Iterator[Any]:
        self._spilled.seek(0, SEEK_END)
        if self._spilled.tell():
            pa = import_module("pyarrow")
            self._spilled.seek(0)
            yield from pa.ipc.open_stream(pa.PythonFile(self._spilled, mode="r"))


def _keep(reader: Any, rows: Rows, spilled: Any) -> list[Any]:
    """Return the first records, and write the others to a file. Refuse a row in no range."""
    pa = import_module("pyarrow")
    kept: list[Any] = []
    size = 0
    spans_of: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for topic, partition, start, until in rows.spans:
        spans_of.setdefault((topic, partition), []).append((start, until))
    with ExitStack() as stack:
        stream = None
        for batch in filter(len, reader):
            _refuse_other_rows(batch, spans_of)
            size += batch.nbytes
            if size <= _KEPT_BYTES:
                kept.append(batch)
                continue
            if stream is None:
                file = pa.PythonFile(spilled, mode="w")
                stream = stack.enter_context(pa.ipc.new_stream(file, reader.schema))
            stream.write_batch(batch)
    return kept


def _refuse_other_rows(
    batch: Any, spans_of: Mapping[tuple[str, int], Sequence[tuple[int, int]]]
) -> None:
    pa, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    rows = pa.Table.from_batches([batch]).select(["topic", "partition", "offset"])
    ends = rows.group_by(["topic", "partition"], use_threads=False).aggregate(
        [("offset", "min"), ("offset", "max"), ("offset", "count")]
    )
    if sum(ends["offset_count"].to_pylist()) != batch.num_rows:
        _refuse(None, None, None)
    for end in ends.to_pylist():
        topic, partition = end["topic"], end["partition"]
        spans = spans_of.get((topic, partition), ())
        first, last = end["offset_min"], end["offset_max"]
        if any(start <= first and last < until for start, until in spans):
            continue
        is_here = compute.and_(
            compute.equal(rows["topic"], topic), compute.equal(rows["partition"], partition)
        )
        for offset in rows.filter(is_here)["offset"].to_pylist():
            if not any(start <= offset < until for start, until in spans):
                _refuse(topic, partition, offset)


def _refuse(topic: str | None, partition: int | None, offset: int | None) -> None:
    given = "NULL" if offset is None else offset
    of = f"{topic or 'no topic'}-{'no partition' if partition is None else partition}"
    msg = (
        f"a row of {of} with offset {given} is in none of the ranges that are written, or its "
        "topic, partition or offset is NULL: nothing was written"
    )
    raise IllegalStateError(msg)
