"""Decoded parts of many records as Arrow.

Owns that one value which does not fit its column spoils no other: it has a reason instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster_rebalance.decoding.decoder import reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.decoding.decoder import OpenDecoder


def decoded_array(
    decoder: OpenDecoder,
    payloads: Iterable[bytes | None],
    header_names: Iterable[Sequence[str]],
) -> tuple[Any, list[str | None]]:
    """Decode a part of some records.

    Args:
        decoder: Of this part.
        payloads: One for each record.
        header_names: The names of the headers of each record.

    Returns:
        The array, and for each record why it could not be decoded, or None.
    """
    import pyarrow as pa

    values, reasons = decoder.decoded_of_each(payloads, header_names)
    kind = decoder.column.arrow()
    array, _ = _made(values, kind)
    if array is None:
        for at, value in enumerate(values):
            one, problem = _made([value], kind)
            if one is None:
                values[at] = None
                reasons[at] = reason(decoder.part, f"it does not fit its column: {problem}")
        array = pa.array(values, kind)
    return array, reasons


def _made(values: Sequence[Any], kind: Any) -> tuple[Any, Exception | None]:
    """An array, or why there is none."""
    import pyarrow as pa

    try:
        return pa.array(values, kind), None
    except MemoryError:  # one of Arrow's own is an ArrowException, too
        raise
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as problem:
        return None, problem


def joined_reasons(columns: Sequence[Sequence[str | None]]) -> list[str | None]:
    """The reasons of all parts of each record, as one text."""
    return ["; ".join(filter(None, each)) or None for each in zip(*columns, strict=True)]
