"""Exact readers of Avro's logical types, registered with fastavro for the whole process.

fastavro rounds a decimal with too many digits, wraps a time outside of a day, and normalises the
text of a UUID. Schemas given to fastavro therefore name logical types that are read here.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = "dagster-rebalance-"
BRANCH = f"{_PREFIX}branch"
"""The logical type of a record around a union branch; the record takes no byte of a payload."""
_DAYS = {("int", "time-millis"): 86_400_000, ("long", "time-micros"): 86_400_000_000}
"""The length of a day in the unit of each time type."""
_EXACT = {"decimal", *(logical for _, logical in _DAYS)}


def register() -> None:
    """Register the readers with fastavro."""
    from fastavro.read import LOGICAL_READERS

    LOGICAL_READERS[f"record-{BRANCH}"] = _read_branch
    for kind in ("bytes", "fixed"):
        LOGICAL_READERS[f"{kind}-{_PREFIX}decimal"] = _read_decimal
    for (kind, logical), day in _DAYS.items():
        LOGICAL_READERS[f"{kind}-{_PREFIX}{logical}"] = _time_reader(
            LOGICAL_READERS[f"{kind}-{logical}"], logical, day
        )


def exact(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the logical type that is read exactly.

    A UUID loses its logical type, because it may be a key: it remains the text that was written.
    """
    logical = schema.get("logicalType")
    if logical == "uuid":
        return {name: one for name, one in schema.items() if name != "logicalType"}
    return schema | {"logicalType": f"{_PREFIX}{logical}"} if logical in _EXACT else schema


def _read_branch(data: Any, schema: Any, _: object = None) -> Any:
    if "refused" in schema:
        raise ValueError(schema["refused"])
    return (schema["branch"], data["value"]) if "branch" in schema else data["value"]


def _time_reader(read: Callable[..., Any], logical: str, day: int) -> Callable[..., Any]:
    def read_checked(data: int, *schemas: Any) -> Any:
        if not 0 <= data < day:
            msg = f"a {logical} lies outside of one day"
            raise ValueError(msg)
        return read(data, *schemas)

    return read_checked


def _read_decimal(data: bytes, schema: Any, _: object = None) -> Decimal:
    precision = schema["precision"]
    unscaled = int.from_bytes(data, "big", signed=True)
    if abs(unscaled) >= 10**precision:
        msg = f"a decimal has more digits than its precision of {precision} allows"
        raise ValueError(msg)
    return Decimal(unscaled).scaleb(-schema.get("scale", 0), Context(prec=precision))
