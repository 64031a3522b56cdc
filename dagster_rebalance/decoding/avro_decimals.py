"""Decimals of Avro, exactly: fastavro rounds one with more digits than its schema allows."""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Any

_EXACT_DECIMAL = "dagster-rebalance-decimal"
"""A logical type of our own: fastavro has its readers for the whole process."""


def register_decimals() -> None:
    """Let fastavro read the logical type."""
    from fastavro.read import LOGICAL_READERS

    for kind in ("bytes", "fixed"):
        LOGICAL_READERS[f"{kind}-{_EXACT_DECIMAL}"] = _read


def exact(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, with the logical type of our own if it is a decimal."""
    is_decimal = schema.get("logicalType") == "decimal"
    return schema | {"logicalType": _EXACT_DECIMAL} if is_decimal else schema


def _read(data: bytes, schema: Any, _: object = None) -> Decimal:
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
