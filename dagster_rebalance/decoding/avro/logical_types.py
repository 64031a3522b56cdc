"""Logical types of Avro, exactly: fastavro changes values that their schemas do not allow.

It rounds a decimal with too many digits, takes a time before midnight for one of the same day, and
writes a UUID in a form of its own. So it gets logical types of our own: it has its readers for the
whole process.
"""

from __future__ import annotations

from decimal import Context, Decimal
from math import log10
from typing import TYPE_CHECKING, Any

from dagster_rebalance.decoding.avro.columns import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable

_OURS = "dagster-rebalance-"
_DAYS = {("int", "time-millis"): 86_400_000, ("long", "time-micros"): 86_400_000_000}
"""The length of a day in the unit of each time."""
_MOST_DIGITS = 10_000
"""Of a decimal: with the 2,000,000,000 that a schema may ask for, one value takes hours."""
_EXACT = {"decimal", *(logical for _, logical in _DAYS)}


def register_exact() -> None:
    """Let fastavro read the logical types."""
    from fastavro.read import LOGICAL_READERS

    for kind in ("bytes", "fixed"):
        LOGICAL_READERS[f"{kind}-{_OURS}decimal"] = _decimal
    for (kind, logical), day in _DAYS.items():
        LOGICAL_READERS[f"{kind}-{_OURS}{logical}"] = _time(
            LOGICAL_READERS[f"{kind}-{logical}"], logical, day
        )


def check_precision(schema: Any) -> None:
    """Refuse a schema whose decimals may be too long to be read in reasonable time.

    Raises:
        ValueError: One has too large a precision.
    """
    if isinstance(schema, dict) and schema.get("logicalType") == "decimal":
        precision = schema.get("precision") or 0
        if precision > _MOST_DIGITS:
            msg = f"a decimal has a precision of {precision}, and {_MOST_DIGITS} is the most"
            raise ValueError(msg)
    for part in parts_of(schema):
        check_precision(part)


def without_invalid_decimal(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema without a decimal that is not as Avro has it, which is to be ignored."""
    if part.get("logicalType") == "decimal":
        precision, scale = part.get("precision"), part.get("scale", 0)
        is_valid = type(precision) is int and type(scale) is int and 0 <= scale <= precision
        if part.get("type") == "fixed" and is_valid:
            bits = 8 * part.get("size", 0) - 1
            is_valid = precision <= bits * log10(2)
        if not is_valid or precision == 0:
            del part["logicalType"]
    return part


def exact(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, with a logical type of our own where fastavro's is not exact.

    A UUID has none: it stays the text that its producer wrote, which a key may have to be.
    """
    logical = schema.get("logicalType")
    if logical == "uuid":
        return {name: one for name, one in schema.items() if name != "logicalType"}
    return schema | {"logicalType": f"{_OURS}{logical}"} if logical in _EXACT else schema


def _time(read: Callable[..., Any], logical: str, day: int) -> Callable[..., Any]:
    def of_a_day(data: int, *schemas: Any) -> Any:
        if not 0 <= data < day:
            msg = f"a {logical} lies outside of one day"
            raise ValueError(msg)
        return read(data, *schemas)

    return of_a_day


def _decimal(data: bytes, schema: Any, _: object = None) -> Decimal:
    """A decimal of a schema, as fastavro gives it.

    Raises:
        ValueError: It has more digits than the schema allows.
    """
    precision = schema["precision"]
    unscaled = int.from_bytes(data, "big", signed=True)
    if abs(unscaled) >= 10**precision:
        msg = f"a decimal has more digits than its precision of {precision} allows"
        raise ValueError(msg)
    return Decimal(unscaled).scaleb(-schema.get("scale", 0), Context(prec=precision))
