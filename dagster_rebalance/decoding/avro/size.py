"""How deeply a payload of Avro nests the types that refer to themselves, and how much is in it.

Owns that no payload ends the process: fastavro reads in C and does not look how deep it is, so a
few thousand levels run over the end of the stack, and take the run or Spark's executor along. Nor
does it look how many items take no byte, which a payload of 12 bytes may have without end: in an
array, or in records of records that double with each level.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.avro.columns import parts_of, type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


class SizeCheck:
    """Looks at the payloads of a schema before they are read.

    What it knows of a part it finds out once: a type may be named at very many places.

    Args:
        schema: As fastavro has parsed it.
        names: Its named types.
    """

    def __init__(self, schema: Any, names: Mapping[str, Any]) -> None:
        self._schema = schema
        self._names = names
        self._levels: dict[str | int, float] = {}
        self._empties: dict[str | int, int] = {}

    def is_needed(self) -> bool:
        """Whether a payload may be without end."""
        return self._levels_of(self._schema) > MOST_LEVELS or any(
            self._has_empties(one) for one in (self._schema, *self._names.values())
        )

    def __call__(self, payload: bytes, starts_at: int) -> None:
        """Refuse a payload without end. What else is wrong with it, fastavro says.

        Args:
            payload: With its frame.
            starts_at: Where its data begins.

        Raises:
            UndecodableError: It nests too deeply, has too many items that take no byte, or a number
                that no type can hold.
        """
        try:
            _Walk(payload, starts_at, self._names, self._empties_of).over(self._schema, 0)
        except IndexError:  # it ends too early, or has a branch that there is not
            return
        except RecursionError:
            raise UndecodableError(_TOO_DEEP) from None

    def _levels_of(self, schema: Any) -> float:
        """How deep a value may be: without end where a type is inside of itself."""
        at = _place(schema)
        if at not in self._levels:
            self._levels[at] = inf  # should it be inside of itself
            named = self._names.get(schema) if isinstance(schema, str) else None
            parts = parts_of(schema) if named is None else [named]
            self._levels[at] = 1 + max(map(self._levels_of, parts), default=0)
        return self._levels[at]

    def _has_empties(self, schema: Any) -> bool:
        if isinstance(schema, dict):
            items = [schema["items"]] if "items" in schema else []
            inner = items + [field["type"] for field in schema.get("fields", ())]
            if any(map(self._empties_of, inner)):
                return True
        return any(map(self._has_empties, parts_of(schema)))

    def _empties_of(self, schema: Any) -> int:
        """How many values a part has, itself among them, if it takes no byte; 0 if it takes one."""
        at = _place(schema)
        if at not in self._empties:
            self._empties[at] = 0  # should it be inside of itself, as no value that ends can be
            self._empties[at] = self._counted(schema)
        return self._empties[at]

    def _counted(self, schema: Any) -> int:
        if isinstance(schema, list):
            return 0
        if isinstance(schema, str) and schema in self._names:
            return self._empties_of(self._names[schema])
        if isinstance(schema, dict) and "fields" in schema:
            counts = [self._empties_of(field["type"]) for field in schema["fields"]]
            return 1 + sum(counts) if all(counts) else 0
        kind = type_of(schema)
        return int(kind == "null" or (kind == "fixed" and schema["size"] == 0))


def _place(schema: Any) -> str | int:
    return schema if isinstance(schema, str) else id(schema)


class _Walk:
    """Passes over the data of a payload, and reads what decides where the next part begins."""

    def __init__(
        self, payload: bytes, at: int, names: Mapping[str, Any], empties_of: Callable[[Any], int]
    ) -> None:
        self._payload = payload
        self._at = at
        self._names = names
        self._empties_of = empties_of
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
            if empties := self._empties_of(field["type"]):
                self._add(empties)
            else:
                self.over(field["type"], level + 1)

    def _blocks(self, inner: Any, level: int, *, has_keys: bool) -> None:
        empties = 0 if has_keys else self._empties_of(inner)
        while count := self._number():
            if count < 0:
                self._number()  # the bytes of the block
            if empties:
                self._add(abs(count) * empties)
                continue
            for _ in range(abs(count)):
                if has_keys:
                    self._pass(self._number())
                self.over(inner, level)

    def _add(self, empties: int) -> None:
        self._empty_items += empties
        # A large payload may have some beside each of its other values.
        if self._empty_items > max(MOST_EMPTY_ITEMS, len(self._payload)):
            msg = f"it has more than {MOST_EMPTY_ITEMS} items that take no byte"
            raise UndecodableError(msg)

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
