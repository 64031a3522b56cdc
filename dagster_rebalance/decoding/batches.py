"""Record batches of Kafka's records, with their keys and values decoded.

Owns what becomes of a record that cannot be decoded: it fails the work, stays with its reason, or
becomes a dead letter and is left out. Runs on Spark's executors and in a run without Spark alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.arrow import decoded_array, joined_reasons
from dagster_rebalance.decoding.record_letter import RecordLetter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dagster_rebalance.decoding.decoder import Decoder, OpenDecoder

OnUndecodable = Literal["fail", "keep", "drop"]
UNDECODABLE = "undecodable"
UNDECODABLE_DDL = "STRUCT<reason: STRING, key: BINARY, value: BINARY>"
UNDECODABLE_PARTS = (("reason", "string"), ("key", "binary"), ("value", "binary"))
LETTER_DDL = "key STRING, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"


def batch_decoder(
    decoders: Sequence[Decoder], on_undecodable: OnUndecodable
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """What decodes record batches with the columns of a read.

    Args:
        decoders: Of the key, of the value, or of both.
        on_undecodable: Whether a record that cannot be decoded fails the work, is kept (with its
            reason in one more column) or is dropped, because its dead letter is stored.
    """

    def decode(batches: Iterable[Any]) -> Iterator[Any]:
        opened = [decoder.open() for decoder in decoders]
        for batch in batches:
            columns, reasons = decoded_columns(batch, opened)
            yield judged(batch, columns, reasons, on_undecodable)

    return decode


def letter_maker(
    decoders: Sequence[Decoder],
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """What makes letters, as Spark's Kafka sink takes them, of the records of record batches."""

    def make(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        opened = [decoder.open() for decoder in decoders]
        for batch in batches:
            _, reasons = decoded_columns(batch, opened)
            letters = letters_of(batch, reasons)
            headers = [
                [{"key": name, "value": value} for name, value in letter.letter_headers]
                for letter in letters
            ]
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([letter.letter_key for letter in letters], pa.string()),
                    pa.array([letter.value for letter in letters], pa.binary()),
                    pa.array(headers, header),
                ],
                names=["key", "value", "headers"],
            )

    return make


def decoded_columns(
    batch: Any, decoders: Sequence[OpenDecoder]
) -> tuple[dict[str, Any], list[str | None]]:
    """The decoded columns of a batch, and why each record could not be decoded."""
    names = _header_names(batch)
    columns, reasons = {}, []
    for decoder in decoders:
        payloads = batch.column(decoder.part).to_pylist()
        columns[decoder.part], why = decoded_array(decoder, payloads, names)
        reasons.append(why)
    return columns, joined_reasons(reasons)


def judged(
    batch: Any,
    columns: dict[str, Any],
    reasons: Sequence[str | None],
    on_undecodable: OnUndecodable,
) -> Any:
    """A batch with its decoded columns, without or with what could not be decoded.

    Raises:
        UndecodableError: A record could not be decoded, and shall fail the work.
    """
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
        raise UndecodableError(cannot_be_decoded(*_place(batch, at), str(reasons[at])))
    return decoded.filter(pa.array([reason is None for reason in reasons]))


def cannot_be_decoded(topic: str, partition: int, offset: int, reason: str) -> str:
    """A sentence for people."""
    return (
        f"the record at {topic}-{partition} offset {offset} cannot be decoded: {reason}. To go on "
        "without such records, give dead_letters= a topic, or keep_undecodable=True"
    )


def letters_of(batch: Any, reasons: Sequence[str | None]) -> list[RecordLetter]:
    """The letters of the records that have a reason."""
    import pyarrow as pa

    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    headers = batch.column("headers")
    letters = []
    for at, reason in enumerate(reasons):
        if reason is not None:
            found = headers[at].as_py() or ()
            letters.append(
                RecordLetter(
                    *_place(batch, at),
                    timestamp_ms=None if times[at] is None else times[at] // 1000,
                    reason=reason,
                    key=batch.column("key")[at].as_py(),
                    value=batch.column("value")[at].as_py(),
                    headers=tuple((header["key"], header["value"]) for header in found),
                )
            )
    return letters


def _place(batch: Any, at: int) -> tuple[str, int, int]:
    topic, partition, offset = (
        batch.column(name)[at].as_py() for name in ("topic", "partition", "offset")
    )
    return topic, partition, offset


def _header_names(batch: Any) -> list[Sequence[str]]:
    headers = batch.column("headers")
    if headers.null_count == len(headers):
        return [()] * len(headers)
    return [[one["key"] for one in each or ()] for each in headers.to_pylist()]
