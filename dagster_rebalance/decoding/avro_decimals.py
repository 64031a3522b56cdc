"""Decimals of Avro, exactly: fastavro rounds one with more digits than its schema allows."""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Any

EXACT_DECIMAL = "dagster-rebalance-decimal"
"""A logical type of our own: fastavro has its readers for the whole process."""


def register() -> None:
    """Let fastavro read the logical type."""
    from fastavro.read import LOGICAL_READERS

    for kind in ("bytes", "fixed"):
        LOGICAL_READERS[f"{kind}-{EXACT_DECIMAL}"] = _read


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
