"""Decoding of Avro payloads by column: one step of numpy reads one field of all payloads.

A payload is never decoded partly. Its row is doubtful if any of its parts is unusual: a length or a
branch that its schema does not have, text that is not UTF-8, a number outside of its column, or
bytes that are left over. Doubtful rows are decoded by fastavro, which finds the value or the
reason. Schemas with other types than those here are decoded by fastavro altogether.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dagster_rebalance.decoding.avro_schemas import BRANCH, type_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.decoding.avro_schemas import Pair
    from dagster_rebalance.decoding.columns import Column

    Rows = Any
    """Indices of the payloads that have a part: an array of numpy, or a slice for all."""
    Read = Callable[["Cursor", Rows], Any]
    """Reads a part of some payloads, and returns an array of Arrow; None if it is skipped."""

_MAX_VARINT_BYTES = 10
_MAX_DECIMAL_BYTES = 8
_LONG_TEXT_BYTES = 32
"""Mean length of texts that are sliced one by one."""
_DECIMAL = re.compile(r"DECIMAL\((\d+),(\d+)\)")
_INT_ENDS = 1 << 31
_FIXED_SIZES = {"boolean": 1, "float": 4, "double": 8}
_NUMPY_TYPES = {"INT": "int32", "BIGINT": "int64", "FLOAT": "float32", "DOUBLE": "float64"}
_NUMBERS = {"int", "long"}
_TEXTS = {"string", "bytes"}


class UnsupportedError(Exception):
    """A schema has a type that is not read by column."""


class Cursor:
    """The payloads, the position in each of them, and the rows that are doubtful."""

    def __init__(self, payloads: Any, starts_at: int) -> None:
        import numpy as np

        self.np = np
        _, bounds, data = payloads.buffers()
        places = np.frombuffer(bounds, np.int32)[payloads.offset :][: len(payloads) + 1]
        self.raw = memoryview(data)
        self.data = np.frombuffer(data, np.uint8)
        self.ends = places[1:].astype(np.int64)
        self.at = places[:-1].astype(np.int64) + starts_at
        self.is_doubtful = np.zeros(len(payloads), np.bool_)

    def doubt(self, rows: Rows, mask: Any) -> None:
        """Mark some of the rows as doubtful."""
        self.is_doubtful[rows] |= mask

    def bytes_at(self, places: Any) -> Any:
        """Return bytes of the payloads; any bytes after their end, where a row is doubtful."""
        return self.data[self.np.minimum(places, len(self.data) - 1)]

    def skip(self, rows: Rows, size: Any) -> Any:
        """Move over a part of `size` bytes, and return its start."""
        starts = self.at[rows].copy()
        self.at[rows] += size
        return starts

    def numbers(self, rows: Rows) -> Any:
        """Read a number of each row."""
        np = self.np
        at = self.at[rows]
        byte = self.bytes_at(at)
        value = (byte & 0x7F).astype(np.uint64)
        at = at + 1
        longer = np.flatnonzero(byte >= 0x80)  # noqa: PLR2004 - the continuation bit
        for place in range(1, _MAX_VARINT_BYTES):
            if not longer.size:
                break
            byte = self.bytes_at(at[longer])
            value[longer] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
            at[longer] += 1
            longer = longer[byte >= 0x80]  # noqa: PLR2004 - the continuation bit
        self.at[rows] = at
        overlong = np.zeros(len(value), np.bool_)
        overlong[longer] = True
        self.doubt(rows, overlong)
        return (value >> np.uint64(1)).astype(np.int64) ^ -(value & np.uint64(1)).astype(np.int64)

    def choices(self, rows: Rows, count: int) -> Any:
        """Read the index of one of `count` choices; 0 for a doubtful one."""
        index = self.numbers(rows)
        is_wrong = (index < 0) | (index >= count)
        self.doubt(rows, is_wrong)
        return self.np.where(is_wrong, 0, index)

    def spans(self, rows: Rows) -> tuple[Any, Any]:
        """Read a length and move over as many bytes; return their starts and lengths."""
        lengths = self.numbers(rows)
        is_wrong = (lengths < 0) | (lengths > self.ends[rows] - self.at[rows])
        self.doubt(rows, is_wrong)
        lengths = self.np.where(is_wrong, 0, lengths)
        return self.skip(rows, lengths), lengths

    def within(self, rows: Rows, values: Any, first: int, last: int) -> Any:
        """Return numbers with 0 for those that are before `first` or after `last`."""
        is_wrong = (values < first) | (values > last)
        self.doubt(rows, is_wrong)
        return self.np.where(is_wrong, 0, values)

    def count(self, rows: Rows) -> int:
        """Return the number of rows."""
        return len(self.at[rows])

    def binary(self, starts: Any, lengths: Any) -> Any:
        """Return spans of the payloads as a binary array."""
        import pyarrow as pa

        np = self.np
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        if offsets[-1] > _LONG_TEXT_BYTES * len(lengths):  # an index for each byte takes more
            spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
            values = pa.py_buffer(b"".join([self.raw[start:end] for start, end in spans]))
        else:
            places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
            values = pa.py_buffer(self.data[places])
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), values]
        return pa.BinaryArray.from_buffers(pa.binary(), len(lengths), buffers)


class VectorReader:
    """Reads many payloads of one writer's schema into an array of a column.

    Raises UnsupportedError if it cannot read the schemas, which are in one form (`resolve_pair`).
    """

    def __init__(self, pair: Pair, column: Column) -> None:
        import numpy as np  # noqa: F401 - is it installed?

        self._column = column
        self._named: dict[str, Pair] = {}
        self._read = self._reader(*pair, column)

    def read(self, payloads: Any, starts_at: int) -> tuple[Any, list[int]]:
        """Return the values of a binary array, and its rows that have to be decoded otherwise."""
        cursor = Cursor(payloads, starts_at)
        array = self._read(cursor, slice(None))
        cursor.is_doubtful |= cursor.at != cursor.ends
        return array, cursor.np.flatnonzero(cursor.is_doubtful).tolist()

    def _reader(self, writer: Any, reader: Any, column: Column | None) -> Read:
        """Return a function that reads a part into a column, or skips it without a column."""
        writer, reader = self._look_up(writer, reader)
        if isinstance(writer, list):
            return self._union(writer, reader, column)
        kind = type_of(writer)
        if isinstance(writer, dict) and "logicalType" in writer:
            return _decimal(writer, column)
        if kind in {"record", "error"}:
            return self._record(writer, reader, column)
        if column is not None and (column.fields or (column.convert and column.numbers is None)):
            raise UnsupportedError
        if kind == "enum":
            return _enum(writer, reader, column)
        return _leaf(writer, reader, column)

    def _look_up(self, writer: Any, reader: Any) -> Pair:
        if isinstance(writer, str) and writer in self._named:
            return self._named[writer]
        if isinstance(writer, dict) and "name" in writer:
            self._named[writer["name"]] = writer, reader
        return writer, reader

    def _union(self, writer: list[Any], reader: Any, column: Column | None) -> Read:
        """Return the reader of a union of null and one type."""
        readers = reader if isinstance(reader, list) else [reader] * len(writer)
        refused = [number for number, one in enumerate(writer) if _is_refused(one)]
        typed = [
            number
            for number, one in enumerate(writer)
            if type_of(one) != "null" and number not in refused
        ]
        if len(typed) != 1:
            raise UnsupportedError
        inner = self._reader(writer[typed[0]], readers[typed[0]], column)

        def read(cursor: Cursor, rows: Rows) -> Any:
            import pyarrow as pa

            np = cursor.np
            index = cursor.choices(rows, len(writer))
            for number in refused:
                cursor.doubt(rows, index == number)
            places = np.flatnonzero(index == typed[0])
            if len(places) == len(index):
                return inner(cursor, rows)
            values = inner(cursor, places if isinstance(rows, slice) else rows[places])
            if values is None:
                return None
            taken = np.zeros(len(index), np.int64)
            taken[places] = np.arange(len(places))
            is_null = np.ones(len(index), np.bool_)
            is_null[places] = False
            return values.take(pa.array(taken, mask=is_null))

        return read

    def _record(self, writer: Any, reader: Any, column: Column | None) -> Read:
        if column is not None and not column.fields:
            raise UnsupportedError
        columns = dict(column.fields) if column else {}
        fields = {one["name"]: one for one in reader["fields"]} if column else {}
        parts = []
        for field in writer["fields"]:
            name = field["name"]
            of_reader = fields.pop(name)["type"] if name in fields else field["type"]
            parts.append((name, self._reader(field["type"], of_reader, columns.pop(name, None))))
        if not all("value" in one for one in fields.values()):  # has no default
            raise UnsupportedError
        defaults = {name: columns[name].array_of([one["value"]]) for name, one in fields.items()}

        def read(cursor: Cursor, rows: Rows) -> Any:
            import pyarrow as pa

            arrays = {name: of_part(cursor, rows) for name, of_part in parts}
            if column is None:
                return None
            first = pa.array(cursor.np.zeros(cursor.count(rows), cursor.np.int64))
            arrays |= {name: one.take(first) for name, one in defaults.items()}
            return pa.StructArray.from_arrays(
                [arrays[name] for name, _ in column.fields], fields=list(column.arrow())
            )

        return read


def _is_refused(writer: Any) -> bool:
    return isinstance(writer, dict) and writer.get("logicalType") == BRANCH and "refused" in writer


def _leaf(writer: Any, reader: Any, column: Column | None) -> Read:
    kind = type_of(writer)
    if kind == "fixed" and writer["size"] == reader["size"]:
        return _fixed(writer["size"], column)
    if kind in _NUMBERS:
        return _numbers(column)
    if kind in _TEXTS:
        return _texts(column, is_text="string" in {kind, type_of(reader)})
    if kind in _FIXED_SIZES:
        return _plain(kind, column)
    raise UnsupportedError


def _require(column: Column | None, *types: str) -> None:
    if column is not None and column.ddl not in types:
        raise UnsupportedError


def _enum(writer: Any, reader: Any, column: Column | None) -> Read:
    default = reader.get("default")
    known = [one if one in reader["symbols"] else default for one in writer["symbols"]]
    _require(column, "STRING")

    def read(cursor: Cursor, rows: Rows) -> Any:
        import pyarrow as pa

        index = cursor.choices(rows, len(known))
        if column is None:
            return None
        is_unknown = cursor.np.array([one is None for one in known])
        cursor.doubt(rows, is_unknown[index])
        return pa.array(known, pa.string()).take(pa.array(index))

    return read


def _decimal(writer: Any, column: Column | None) -> Read:
    """Return the reader of a decimal in bytes."""
    if writer["type"] != "bytes":
        raise UnsupportedError
    if column is None:
        return _texts(None, is_text=False)
    digits, scale = writer.get("precision"), writer.get("scale", 0)
    if column.ddl != f"DECIMAL({digits},{scale})" or column.convert is not None:
        raise UnsupportedError

    def read(cursor: Cursor, rows: Rows) -> Any:
        import pyarrow as pa

        np = cursor.np
        starts, lengths = cursor.spans(rows)
        cursor.doubt(rows, (lengths < 1) | (lengths > _MAX_DECIMAL_BYTES))
        lengths = np.clip(lengths, 1, _MAX_DECIMAL_BYTES)
        value = np.where(cursor.bytes_at(starts) >= 0x80, -1, 0)  # noqa: PLR2004 - the sign
        for place in range(_MAX_DECIMAL_BYTES):
            byte = cursor.bytes_at(starts + place).astype(np.int64)
            value = np.where(place < lengths, (value << 8) | byte, value)
        if digits < len(str(1 << 63)):
            limit = 10**digits - 1
            value = cursor.within(rows, value, -limit, limit)
        both = np.stack([value, value >> 63], axis=1)
        return pa.Array.from_buffers(column.arrow(), len(value), [None, pa.py_buffer(both)])

    return read


def _numbers(column: Column | None) -> Read:
    _require(column, *([column.ddl] if column and column.numbers else _NUMPY_TYPES))

    def read(cursor: Cursor, rows: Rows) -> Any:
        import pyarrow as pa

        values = cursor.numbers(rows)
        if column is None:
            return None
        if column.numbers is not None:
            first, last = column.numbers.first, column.numbers.last
            values = cursor.within(rows, values, first, last)
            return column.numbers.convert(pa.array(values).cast(column.numbers.kind))
        if column.ddl == "INT":
            values = cursor.within(rows, values, -_INT_ENDS, _INT_ENDS - 1)
        elif column.ddl in {"FLOAT", "DOUBLE"}:
            values = values.astype(cursor.np.float64)
        return _as_column(values, column)

    return read


def _as_column(values: Any, column: Column) -> Any:
    import pyarrow as pa

    return pa.array(values.astype(_NUMPY_TYPES[column.ddl]))


def _texts(column: Column | None, *, is_text: bool) -> Read:
    _require(column, "STRING" if is_text else "BINARY", "BINARY")

    def read(cursor: Cursor, rows: Rows) -> Any:
        import pyarrow as pa

        starts, lengths = cursor.spans(rows)
        if column is None:
            return None
        binary = cursor.binary(starts, lengths)
        if not is_text:
            return binary
        try:
            text = binary.cast(pa.string())
        except pa.ArrowInvalid:
            is_wrong = cursor.np.array([not _is_utf8(one) for one in binary.to_pylist()])
            cursor.doubt(rows, is_wrong)
            binary = cursor.binary(starts, cursor.np.where(is_wrong, 0, lengths))
            text = binary.cast(pa.string())
        return text if column.ddl == "STRING" else binary

    return read


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _fixed(size: int, column: Column | None) -> Read:
    _require(column, "BINARY")

    def read(cursor: Cursor, rows: Rows) -> Any:
        starts = cursor.skip(rows, size)
        is_wrong = starts + size > cursor.ends[rows]
        cursor.doubt(rows, is_wrong)
        if column is None:
            return None
        return cursor.binary(starts, cursor.np.where(is_wrong, 0, size))

    return read


def _plain(kind: str, column: Column | None) -> Read:
    """Return the reader of a type with a fixed number of bytes."""
    size = _FIXED_SIZES[kind]
    known = {"boolean": ["BOOLEAN"], "float": ["FLOAT", "DOUBLE"], "double": ["DOUBLE"]}
    _require(column, *known[kind])

    def read(cursor: Cursor, rows: Rows) -> Any:
        import pyarrow as pa

        starts = cursor.skip(rows, size)
        if column is None:
            return None
        np = cursor.np
        if kind == "boolean":
            return pa.array(cursor.bytes_at(starts) != 0)
        places = starts[:, None] + np.arange(size)
        values = np.ascontiguousarray(cursor.bytes_at(places)).view(f"<f{size}")[:, 0]
        return _as_column(values, column)

    return read
