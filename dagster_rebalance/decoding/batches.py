"""Record batches with decoded keys and values, and the reasons of undecodable records.

An undecodable record fails the batch, is kept with its reason, or is dropped after its dead letter
was stored. The code runs on Spark's executors and in runs without Spark.
"""

from __future__ import annotations

import base64
import json
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.decoder import reason_text
from dagster_rebalance.decoding.wire_format import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dagster_rebalance.decoding.decoder import Decoder, OpenDecoder

OnUndecodable = Literal["fail", "keep", "drop"]
UNDECODABLE = "undecodable"
UNDECODABLE_DDL = "STRUCT<reason: STRING, key: BINARY, value: BINARY>"
UNDECODABLE_PARTS = (("reason", "string"), ("key", "binary"), ("value", "binary"))
POSITION_DDL = "topic STRING, partition INT, offset BIGINT, reason STRING"


def batch_decoder(
    decoders: Sequence[Decoder], on_undecodable: OnUndecodable
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return a function that decodes record batches whose headers are JSON; see `apply_policy`."""

    def decode(batches: Iterable[Any]) -> Iterator[Any]:
        opened = [decoder.open() for decoder in decoders]
        for batch in map(_with_headers, batches):
            columns, reasons = decode_columns(batch, opened)
            yield apply_policy(batch, columns, reasons, on_undecodable)

    return decode


def undecodable_finder(decoders: Sequence[Decoder]) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return a function that finds the positions and the reasons of undecodable records.

    The headers of the record batches are JSON.
    """

    def find(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        opened = [decoder.open() for decoder in decoders]
        for batch in map(_with_headers, batches):
            _, reasons = decode_columns(batch, opened)
            given = pa.array(reasons, pa.string())
            columns = [batch.column(name) for name in ("topic", "partition", "offset")]
            names = ["topic", "partition", "offset", "reason"]
            found = pa.RecordBatch.from_arrays([*columns, given], names=names)
            yield found.filter(given.is_valid())

    return find


def _headers_type() -> Any:
    import pyarrow as pa

    return pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def _with_headers(batch: Any) -> Any:
    """Return a batch with lists of headers in place of their JSON."""
    import pyarrow as pa

    names, arrays = list(batch.schema.names), list(batch.columns)
    at = names.index("headers")
    if arrays[at].null_count == len(batch):
        arrays[at] = pa.nulls(len(batch), _headers_type())
    else:
        lists = [None if text is None else json.loads(text) for text in arrays[at].to_pylist()]
        for header in chain.from_iterable(filter(None, lists)):
            value = header.get("value")
            header["value"] = None if value is None else base64.b64decode(value)
        arrays[at] = pa.array(lists, _headers_type())
    return pa.RecordBatch.from_arrays(arrays, names=names)


def decode_columns(
    batch: Any, decoders: Sequence[OpenDecoder]
) -> tuple[dict[str, Any], list[str | None]]:
    """Return the decoded columns of a batch, and per record the reason for a failure, or None."""
    import pyarrow as pa

    header_names = _header_names(batch)
    columns, reasons = {}, []
    for decoder in decoders:
        payloads = batch.column(decoder.part).cast(pa.binary())  # Spark can send large_binary
        columns[decoder.part], of_part = decode_array(decoder, payloads, header_names)
        reasons.append(of_part)
    if len(reasons) == 1:
        return columns, reasons[0]
    joined = ["; ".join(filter(None, each)) or None for each in zip(*reasons, strict=True)]
    return columns, joined


def decode_array(
    decoder: OpenDecoder, payloads: Any, header_names: Sequence[Sequence[str]]
) -> tuple[Any, list[str | None]]:
    """Return the decoded payloads as an array, and per payload the reason for a failure, or None.

    `payloads` is a binary array of Arrow. Payloads of one schema are decoded together, except for
    those that need the decoder of single payloads, which also finds the reasons.
    """
    import pyarrow as pa

    arrays, rows, others = _decode_together(decoder, payloads, header_names)
    if not arrays:
        return _decode_each(decoder, payloads.to_pylist(), header_names)
    reasons: list[str | None] = [None] * len(payloads)
    if others:
        array, of_others = _decode_each(
            decoder,
            payloads.take(pa.array(others)).to_pylist(),
            [header_names[at] for at in others],
        )
        arrays.append(array)
        rows.append(others)
        for at, reason in zip(others, of_others, strict=True):
            reasons[at] = reason
    if len(arrays) == 1:
        return arrays[0], reasons
    places = [0] * len(payloads)
    for place, row in enumerate(chain.from_iterable(rows)):  # the last place of a row counts
        places[row] = place
    return pa.concat_arrays(arrays).take(pa.array(places, pa.int64())), reasons


def _decode_together(
    decoder: OpenDecoder, payloads: Any, header_names: Sequence[Sequence[str]]
) -> tuple[list[Any], list[Sequence[int]], list[int]]:
    """Return arrays of payloads that were decoded together, their rows, and the other rows."""
    import pyarrow as pa

    arrays: list[Any] = []
    rows: list[Sequence[int]] = []
    if decoder.decode_many is None:
        return arrays, rows, []
    groups, others = _groups(decoder, payloads, header_names)
    for group in groups:
        is_all = len(group) == len(payloads)
        try:
            decoded = decoder.decode_many(payloads if is_all else payloads.take(pa.array(group)))
        except UndecodableError:
            decoded = None
        if decoded is None:
            others += group
            continue
        array, doubtful = decoded
        arrays.append(array)
        rows.append(group)
        others += [group[at] for at in doubtful]
    return arrays, rows, others


def _groups(
    decoder: OpenDecoder, payloads: Any, header_names: Sequence[Sequence[str]]
) -> tuple[Iterable[Sequence[int]], list[int]]:
    """Return the rows of each schema id, and the rows without a payload or with a GUID."""
    import pyarrow.compute as pc

    guids = {at for at, names in enumerate(header_names) if names and decoder.has_guid(names)}
    frames = pc.binary_slice(payloads, 0, HEADER_BYTES if decoder.is_framed else 0)
    frames = frames.dictionary_encode()
    if len(frames.dictionary) == 1 and not frames.null_count and not guids:
        return [range(len(payloads))], []
    groups: dict[int, list[int]] = {}
    others = []
    for at, frame in enumerate(frames.indices.to_pylist()):
        if frame is None or at in guids:
            others.append(at)
        else:
            groups.setdefault(frame, []).append(at)
    return groups.values(), others


def _decode_each(
    decoder: OpenDecoder, payloads: Sequence[bytes | None], header_names: Sequence[Sequence[str]]
) -> tuple[Any, list[str | None]]:
    """Decode each payload. A value that does not fit its column affects no other value."""
    import pyarrow as pa

    decoded = [
        decoder.try_decode(payload, names)
        for payload, names in zip(payloads, header_names, strict=True)
    ]
    values, reasons = [value for value, _ in decoded], [reason for _, reason in decoded]
    kind = decoder.column.arrow()
    array, _ = _make_array(values, kind)
    if array is None:
        for at, value in enumerate(values):
            single, problem = _make_array([value], kind)
            if single is None:
                values[at] = None
                reasons[at] = reason_text(decoder.part, f"it does not fit its column: {problem}")
        array = pa.array(values, kind)
    return array, reasons


def _make_array(values: Sequence[Any], kind: Any) -> tuple[Any, Exception | None]:
    import pyarrow as pa

    try:
        return pa.array(values, kind), None
    except MemoryError:  # Arrow's own is an ArrowException, too
        raise
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as problem:
        return None, problem


def apply_policy(
    batch: Any,
    columns: dict[str, Any],
    reasons: Sequence[str | None],
    on_undecodable: OnUndecodable,
) -> Any:
    """Return a batch with decoded columns; undecodable records fail it, are kept or are dropped."""
    import pyarrow as pa

    names = list(batch.schema.names)
    arrays = [columns.get(name, batch.column(at)) for at, name in enumerate(names)]
    if on_undecodable == "keep":
        kept = [
            None if reason is None else {"reason": reason, "key": key, "value": value}
            for reason, key, value in zip(
                reasons,
                batch.column("key").to_pylist(),
                batch.column("value").to_pylist(),
                strict=True,
            )
        ]
        kind = pa.struct([(name, getattr(pa, kind)()) for name, kind in UNDECODABLE_PARTS])
        names, arrays = [*names, UNDECODABLE], [*arrays, pa.array(kept, kind)]
    decoded = pa.RecordBatch.from_arrays(arrays, names=names)
    if on_undecodable == "keep" or not any(reasons):
        return decoded
    if on_undecodable == "fail":
        at = next(number for number, reason in enumerate(reasons) if reason)
        raise UndecodableError(undecodable_text(*_position(batch, at), str(reasons[at])))
    return decoded.filter(pa.array([reason is None for reason in reasons]))


def undecodable_text(topic: str, partition: int, offset: int, reason: str) -> str:
    """Return the message of the error that fails a batch for an undecodable record."""
    return (
        f"the record at {topic}-{partition} offset {offset} cannot be decoded: {reason}. To "
        "continue without such records, set dead_letters= to a topic, or keep_undecodable=True"
    )


def _position(batch: Any, at: int) -> tuple[str, int, int]:
    topic, partition, offset = (
        batch.column(name)[at].as_py() for name in ("topic", "partition", "offset")
    )
    return topic, partition, offset


def _header_names(batch: Any) -> list[Sequence[str]]:
    headers = batch.column("headers")
    if headers.null_count == len(headers):
        return [()] * len(headers)
    return [[one["key"] for one in each or ()] for each in headers.to_pylist()]
