"""Decoding of JSON payloads by column: pyarrow's JSON reader reads many payloads in one call.

Only schemas whose rules the types of the columns decide are read by column: objects, lists and
scalar values, each of one type or null, required or not. A payload is never decoded partly. A row
is doubtful if pyarrow and the decoder of single payloads may differ: a number or a text in an
unusual notation, or a null where the schema may not allow it. If pyarrow refuses several payloads,
they are halved until the refused ones are found. Doubtful rows are decoded one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "default", "examples", "format"}
    | {"deprecated", "readOnly", "writeOnly", "definitions", "$defs"}
)
"""Keywords that refuse no value. Definitions are not referenced: `$ref` is not among them."""
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items"},
    "string": set(),
    "boolean": set(),
    "integer": set(),
    "number": set(),
}
"""Types, and the keywords that are read with each."""
_MAX_STEPS = 4_000
_MAX_BYTES = 100_000
"""A larger payload may take too many steps to validate."""
_LONG = 300
"""Payloads of so many bytes may nest too deeply, or have too many digits in a number."""
_FEW = 50
"""Payloads that are decoded one by one if pyarrow refuses them."""
_UNUSUAL = (
    r"\\u[dD][89a-fA-F]|[:,\[\s]-?[0-9][0-9.]*[eE]|[:,\[\s]-0[,\]}\s]|[:,\[\s]-?(?:NaN|Inf)|\n"
)
"""A surrogate; an exponent, because Python refuses more numbers than pyarrow; -0, an integer for
Python, which has no negative zero; NaN and infinities, which pyarrow reads; a line feed."""
_MANY_DIGITS = f"[0-9]{{{_LONG}}}"


class UnsupportedError(Exception):
    """A schema has a rule that is not decided by the types of columns."""


@dataclass(frozen=True)
class _Shape:
    """A type that is read by column.

    Attributes:
        fields: The shapes of an object's properties, by name.
        items: The shape of a list's items.
        is_nullable: Whether null is valid.
        is_required: Whether a property must be present.
        is_closed: Whether an object has no further properties.
    """

    fields: tuple[tuple[str, _Shape], ...] = ()
    items: _Shape | None = None
    is_nullable: bool = False
    is_required: bool = False
    is_closed: bool = False


class JsonColumnReader:
    """Reads many payloads into an array of a column.

    Raises UnsupportedError if it cannot read the schema. `steps` are those of its validation.
    """

    def __init__(self, schema: Any, kind: Any, steps: int) -> None:
        import pyarrow as pa
        from pyarrow import json

        if steps > _MAX_STEPS or not pa.types.is_struct(kind):
            raise UnsupportedError
        self._shape = _shape_of(schema)
        closed = {one.is_closed for one in _objects(self._shape)}
        if self._shape.is_nullable or len(closed) != 1:
            raise UnsupportedError
        self._kind = kind
        self._options = json.ParseOptions(
            explicit_schema=pa.schema(list(kind)),
            unexpected_field_behavior="error" if closed.pop() else "ignore",
        )

    def read(self, payloads: Any, starts_at: int) -> tuple[Any, list[int]]:
        """Return the values of a binary array, and its rows that have to be decoded otherwise."""
        import pyarrow as pa

        arrays, doubtful = [], []
        left = [(0, payloads)]
        while left:
            first, some = left.pop()
            try:
                array, rows = self._read_some(some, starts_at)
            except pa.ArrowInvalid:
                if len(some) > _FEW:
                    half = len(some) // 2
                    left += [(first + half, some.slice(half)), (first, some.slice(0, half))]
                    continue
                array, rows = pa.nulls(len(some), self._kind), range(len(some))
            arrays.append(array)
            doubtful += [first + row for row in rows]
        return (arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)), doubtful

    def _read_some(self, payloads: Any, starts_at: int) -> tuple[Any, Sequence[int]]:
        """Read payloads in one call; raise ArrowInvalid if pyarrow refuses one of them."""
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = pc.binary_replace_slice(payloads, 0, starts_at, b"").cast(pa.string())
        is_usual = _are_usual(texts)
        is_whole = pc.all(is_usual).as_py()
        read = self._read_usual(texts if is_whole else texts.filter(is_usual))
        if is_whole:
            return read
        array, doubtful = read
        rows = pc.indices_nonzero(is_usual)
        places = pc.if_else(
            is_usual, pc.subtract(pc.cumulative_sum(is_usual.cast("int64")), 1), None
        )
        return array.take(places), [
            *rows.take(pa.array(doubtful, pa.int64())).to_pylist(),
            *pc.indices_nonzero(pc.invert(is_usual)).to_pylist(),
        ]

    def _read_usual(self, texts: Any) -> tuple[Any, Sequence[int]]:
        """Read one object of each text.

        Each text is one line that begins with `{` and ends with `}`, and no string contains a line
        feed. An object therefore ends in the text in which it begins: after a `}` inside an object,
        pyarrow refuses the `{` of the next text. As many objects as texts are one of each.
        """
        import pyarrow as pa
        import pyarrow.compute as pc
        from pyarrow import json

        if not len(texts):
            return pa.nulls(0, self._kind), ()
        ends = pa.array([0, len(texts)], pa.int32())
        lines = pc.binary_join(pa.ListArray.from_arrays(ends, texts), "\n")[0].as_buffer()
        table = json.read_json(
            pa.BufferReader(lines),
            read_options=json.ReadOptions(use_threads=False, block_size=lines.size + 1),
            parse_options=self._options,
        )
        if len(table) != len(texts):
            msg = "a payload is not one object"
            raise pa.ArrowInvalid(msg)
        array = table.to_struct_array().combine_chunks().cast(self._kind)
        has_null = pc.match_substring(texts, "null")
        every = pa.array(range(len(texts)), pa.int64())
        rows = {row for part in _doubts(array, self._shape, every, has_null) for row in part}
        return array, sorted(rows)


def _are_usual(texts: Any) -> Any:
    import pyarrow.compute as pc

    is_usual = pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))
    is_usual = pc.and_not(is_usual, pc.match_substring_regex(texts, _UNUSUAL))
    lengths = pc.binary_length(texts)
    longest = pc.max(lengths).as_py()
    if longest > _LONG:
        nested = pc.add(pc.count_substring(texts, "{"), pc.count_substring(texts, "["))
        is_usual = pc.and_(is_usual, pc.less_equal(nested, _LONG))
        is_usual = pc.and_not(is_usual, pc.match_substring_regex(texts, _MANY_DIGITS))
    if longest > _MAX_BYTES:
        is_usual = pc.and_(is_usual, pc.less_equal(lengths, _MAX_BYTES))
    return is_usual


def _doubts(array: Any, shape: _Shape, rows: Any, has_null: Any) -> Iterator[list[int]]:
    """Yield the rows in which a part of an array without nulls may be missing or null wrongly.

    `rows` has the row of each value, `has_null` whether the text of a row contains `null`.
    """
    import pyarrow.compute as pc

    parts = [(array.field(number), rows, part) for number, (_, part) in enumerate(shape.fields)]
    if shape.items is not None:
        parts = [(array.flatten(), rows.take(pc.list_parent_indices(array)), shape.items)]
    for values, its_rows, part in parts:
        without = its_rows.filter(values.is_null())
        if part.is_required:
            yield without.to_pylist()
        elif not part.is_nullable:
            yield without.filter(has_null.take(without)).to_pylist()
        if part.fields or part.items is not None:
            present = its_rows.filter(values.is_valid())
            yield from _doubts(values.drop_null(), part, present, has_null)


def _objects(shape: _Shape) -> Iterator[_Shape]:
    if shape.fields:
        yield shape
    inner = [part for _, part in shape.fields] + ([shape.items] if shape.items else [])
    for part in inner:
        yield from _objects(part)


def _shape_of(schema: Any, *, is_required: bool = False) -> _Shape:
    if not isinstance(schema, dict):
        raise UnsupportedError
    choices = [schema[name] for name in ("oneOf", "anyOf") if name in schema]
    if choices:
        return _nullable_shape(schema, choices[0], is_required=is_required)
    given = schema.get("type")
    kinds = given if isinstance(given, list) else [given]
    types = [kind for kind in kinds if kind != "null"]
    if len(types) != 1 or types[0] not in _OF_TYPE:
        raise UnsupportedError
    kind = types[0]
    if schema.keys() - _ANNOTATIONS - _OF_TYPE[kind] - {"type"}:
        raise UnsupportedError
    fields: tuple[tuple[str, _Shape], ...] = ()
    if kind == "object":
        properties, required = schema.get("properties"), schema.get("required", [])
        if not properties or not set(required) <= properties.keys():
            raise UnsupportedError
        fields = tuple(
            (name, _shape_of(one, is_required=name in required)) for name, one in properties.items()
        )
    more = schema.get("additionalProperties", True)
    if not isinstance(more, bool):
        raise UnsupportedError
    items = _shape_of(schema.get("items")) if kind == "array" else None
    return _Shape(fields, items, len(types) < len(kinds), is_required, not more)


def _nullable_shape(schema: Any, choices: Any, *, is_required: bool) -> _Shape:
    """Return the shape of a choice between null and one other type."""
    others = [one for one in choices if one != {"type": "null"}]
    if schema.keys() - _ANNOTATIONS - {"oneOf", "anyOf"} or len(schema.keys() - _ANNOTATIONS) != 1:
        raise UnsupportedError
    if len(choices) != 2 or len(others) != 1:  # noqa: PLR2004 - null and the other one
        raise UnsupportedError
    shape = _shape_of(others[0], is_required=is_required)
    if shape.is_nullable:
        raise UnsupportedError
    return _Shape(shape.fields, shape.items, True, is_required, shape.is_closed)  # noqa: FBT003
