"""How deeply a payload of Avro nests the types that refer to themselves, and how much is in it.

Owns that no payload ends the process: fastavro reads in C and does not look how deep it is, so a
few thousand levels run over the end of the stack, and take the run or Spark's executor along. Nor
does it look how many items an array has that take no byte, which a payload of 12 bytes may have
without end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.errors import UndecodableError
from dagster_rebalance.decoding.avro_columns import parts_of, type_of

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_LEVELS = 100
"""Of records in each other: as many as Protobuf allows messages."""
MOST_EMPTY_ITEMS = 10_000
"""That take no byte, in one payload."""
_MOST_BYTES = 10
"""Of a number of 64 bits."""
_TOO_DEEP = f"it nests more than {MOST_LEVELS} records in each other"
_FIXED_SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_NUMBERS = {"int", "long", "enum"}
_OF_A_LENGTH = {"bytes", "string"}


def is_recursive(
    schema: Any, names: Mapping[str, Any], inside: frozenset[str] = frozenset()
) -> bool:
    """Whether a schema, as fastavro has parsed it, has a record inside of itself."""
    if isinstance(schema, str):
        if schema in inside:
            return True
        return schema in names and is_recursive(names[schema], names, inside)
    is_record = isinstance(schema, dict) and "fields" in schema
    within = inside | {schema["name"]} if is_record else inside
    return any(is_recursive(part, names, within) for part in parts_of(schema))


def needs_check(schema: Any, names: Mapping[str, Any]) -> bool:
    """Whether payloads of a schema, as fastavro has parsed it, may be without end."""
    return is_recursive(schema, names) or any(
        _has_empty_items(one, names) for one in (schema, *names.values())
    )


def _has_empty_items(schema: Any, names: Mapping[str, Any]) -> bool:
    if isinstance(schema, dict) and "items" in schema and _takes_no_byte(schema["items"], names):
        return True
    return any(_has_empty_items(part, names) for part in parts_of(schema))


def _takes_no_byte(
    schema: Any, names: Mapping[str, Any], inside: frozenset[str] = frozenset()
) -> bool:
    if isinstance(schema, list) or (isinstance(schema, str) and schema in inside):
        return False
    if isinstance(schema, str) and schema in names:
        return _takes_no_byte(names[schema], names, inside | {schema})
    if isinstance(schema, dict) and "fields" in schema:
        return all(_takes_no_byte(field["type"], names, inside) for field in schema["fields"])
    kind = type_of(schema)
    return bool(kind == "null" or (kind == "fixed" and schema["size"] == 0))


def check_size(payload: bytes, starts_at: int, schema: Any, names: Mapping[str, Any]) -> None:
    """Refuse a payload without end. What else is wrong with it, fastavro says.

    Args:
        payload: With its frame.
        starts_at: Where its data begins.
        schema: That it was written with.
        names: The named types of the schema.

    Raises:
        UndecodableError: It nests too deeply, has too many items that take no byte, or a number
            that no type can hold.
    """
    try:
        _Walk(payload, starts_at, names).over(schema, 0)
    except IndexError:  # it ends too early, or has a branch that there is not
        return
    except RecursionError:
        raise UndecodableError(_TOO_DEEP) from None


class _Walk:
    """Passes over the data of a payload, and reads what decides where the next part begins."""

    def __init__(self, payload: bytes, at: int, names: Mapping[str, Any]) -> None:
        self._payload = payload
        self._at = at
        self._names = names
        self._empty_items = 0

    def over(self, schema: Any, level: int) -> None:
        """Pass over a part, `level` records deep."""
        kind = schema
        while not isinstance(kind, str) or kind in self._names:
            if isinstance(kind, list):
                schema = kind[self._number()]
            elif isinstance(kind, dict):
                schema, kind = kind, kind["type"]
                continue
            else:
                schema = self._names[kind]
            kind = schema
        if kind in _FIXED_SIZES:
            self._pass(_FIXED_SIZES[kind])
        elif kind in _NUMBERS:
            self._number()
        elif kind in _OF_A_LENGTH:
            self._pass(self._number())
        elif kind == "fixed":
            self._pass(schema["size"])
        elif kind == "array":
            self._blocks(schema["items"], level, has_keys=False)
        elif kind == "map":
            self._blocks(schema["values"], level, has_keys=True)
        else:
            self._record(schema, level)

    def _record(self, schema: Any, level: int) -> None:
        if level == MOST_LEVELS:
            raise UndecodableError(_TOO_DEEP)
        for field in schema["fields"]:
            self.over(field["type"], level + 1)

    def _blocks(self, inner: Any, level: int, *, has_keys: bool) -> None:
        is_empty = not has_keys and _takes_no_byte(inner, self._names)
        while count := self._number():
            if count < 0:
                self._number()  # the bytes of the block
            if is_empty:
                self._empty_items += abs(count)
                if self._empty_items > MOST_EMPTY_ITEMS:
                    msg = f"it has more than {MOST_EMPTY_ITEMS} items that take no byte"
                    raise UndecodableError(msg)
                continue
            for _ in range(abs(count)):
                if has_keys:
                    self._pass(self._number())
                self.over(inner, level)

    def _pass(self, length: int) -> None:
        if not 0 <= length <= len(self._payload) - self._at:
            raise IndexError
        self._at += length

    def _number(self) -> int:
        value = 0
        for place in range(_MOST_BYTES):
            byte = self._payload[self._at]
            self._at += 1
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:  # noqa: PLR2004 - the bit that says that another byte follows
                return (value >> 1) ^ -(value & 1)
        msg = f"it has a number of more than {_MOST_BYTES} bytes"
        raise UndecodableError(msg)
