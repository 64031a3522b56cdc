"""The records of a batch as Arrow or decoded, and the records that a test provides.

Arrow tables have the columns of Spark's Kafka source; pyarrow is optional. Each function that
decodes stores the dead letters of a chunk before it yields the other records of that chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Literal

from dagster_rebalance.core.model.errors import (
    ConfigurationError,
    IllegalStateError,
    UndecodableError,
)
from dagster_rebalance.core.model.letters import Letter
from dagster_rebalance.core.model.offsets import OffsetRange, is_topic_name, next_offset
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.decoding.batches import (
    UNDECODABLE,
    UNDECODABLE_PARTS,
    apply_policy,
    decode_columns,
    undecodable_text,
)
from dagster_rebalance.decoding.decoder import KnownSchemas
from dagster_rebalance.orchestration.batch.arrow_records import (
    MAX_CHUNK_BYTES,
    pyarrow,
    record_schema,
)
from dagster_rebalance.orchestration.batch.letters import as_bytes, letter_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.core.batches.record_filter import RecordPredicate
    from dagster_rebalance.decoding.batches import OnUndecodable
    from dagster_rebalance.decoding.decoder import Decoder, OpenDecoder
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
    from dagster_rebalance.orchestration.resources.registry import Encoding

_CHUNK = 500
"""Messages whose dead letters are stored together."""
_MAX_UNKNOWN = 100
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def decoded_schema(decoders: Iterable[Decoder], *, keeps_undecodable: bool) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the columns of records whose keys, values or both are decoded."""
    pa = pyarrow()
    schema = record_schema()
    for decoder in decoders:
        at = schema.get_field_index(decoder.part)
        schema = schema.set(at, pa.field(decoder.part, decoder.open().column.arrow()))
    if keeps_undecodable:
        kinds = [(name, getattr(pa, kind)()) for name, kind in UNDECODABLE_PARTS]
        schema = schema.append(pa.field(UNDECODABLE, pa.struct(kinds)))
    return schema


def chunks(messages: Iterable[Message], most: int) -> Iterator[list[Message]]:
    """Yield messages in chunks of up to `most`, or fewer if their values reach 64 MiB."""
    chunk: list[Message] = []
    size = 0
    for message in messages:
        chunk.append(message)
        size += len(message)
        if len(chunk) == most or size >= MAX_CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@dataclass(frozen=True)
class DecodedMessage:
    """A message with its key and its value decoded.

    Attributes:
        message: The message of confluent-kafka.
        key: The decoded key, or its bytes without an encoding.
        value: The decoded value, or its bytes without an encoding.
        undecodable: With `keep_undecodable`, why the message could not be decoded. A key or value
            that could not be decoded is None.
    """

    message: Message
    key: Any
    value: Any
    undecodable: str | None = None


@dataclass(frozen=True)
class Decoding:
    """The encodings of a batch, and the destination of undecodable records."""

    encodings: Mapping[Literal["key", "value"], Encoding]
    dead_letters: str | None
    keep_undecodable: bool

    @classmethod
    def of(
        cls,
        kafka: KafkaConsumerResource,
        key: Encoding | None,
        value: Encoding | None,
        dead_letters: str | None,
        *,
        keep_undecodable: bool,
    ) -> Decoding:
        """Return the decoding of a batch."""
        given: Mapping[Literal["key", "value"], Encoding | None] = {"key": key, "value": value}
        encodings = {part: encoding for part, encoding in given.items() if encoding is not None}
        problem = None
        if not encodings and (dead_letters is not None or keep_undecodable):
            problem = "there is nothing to decode: give value= or key= an encoding"
        elif dead_letters is not None and keep_undecodable:
            problem = "dead_letters and keep_undecodable exclude each other: give one of them"
        elif dead_letters is not None and not is_topic_name(dead_letters):
            problem = f"dead_letters={dead_letters[:249]!r} cannot be the name of a topic"
        elif dead_letters is not None and Topics.of(kafka.topics).have(dead_letters):
            problem = (
                f"dead_letters={dead_letters!r} is a topic of the group, which would read its own "
                "dead letters. Name another topic"
            )
        if problem is not None:
            raise ConfigurationError(problem)
        return cls(encodings, dead_letters, keep_undecodable)

    @property
    def on_undecodable(self) -> OnUndecodable:
        """The treatment of an undecodable record after its dead letter is stored."""
        if self.keep_undecodable:
            return "keep"
        return "fail" if self.dead_letters is None else "drop"

    def decoders(self, topics: frozenset[str]) -> list[Decoder]:
        """Return the decoders for the records of some topics."""
        return [encoding.decoder(part, topics) for part, encoding in self.encodings.items()]


def with_known_schemas(
    decoders: Sequence[Decoder], ids: Mapping[str, Sequence[int]]
) -> list[Decoder]:
    """Return the decoders with all schemas that they need, so that they query no registry."""
    known = []
    for decoder in decoders:
        schemas, problems = {}, {}
        for schema_id in ids.get(decoder.part, ()):
            try:
                schemas[schema_id] = decoder.writer(schema_id)
            except UndecodableError as error:
                problems[schema_id] = str(error)
            if len(problems) > _MAX_UNKNOWN:
                msg = (
                    f"the {decoder.part}s of the batch name more than {_MAX_UNKNOWN} schemas that "
                    "the registry does not have: check that it is the registry of the producers, "
                    f"and that the {decoder.part}s are in its wire format"
                )
                raise ConfigurationError(msg)
        known.append(replace(decoder, writer=KnownSchemas(schemas, problems)))
    return known


def decoded_messages(
    messages: Iterator[Message],
    decoders: Iterable[Decoder],
    store: Callable[[list[Letter]], object] | None,
    *,
    keep_undecodable: bool,
) -> Iterator[DecodedMessage]:
    """Yield messages with their keys, their values, or both decoded.

    `store` stores the letters of undecodable records; without it, such a record raises.
    """
    opened = [decoder.open(as_python=True) for decoder in decoders]
    for chunk in chunks(messages, _CHUNK):
        good, bad = [], []
        for message in chunk:
            decoded = _decoded(message, opened)
            if decoded.undecodable is None or keep_undecodable:
                good.append(decoded)
            elif store is None:
                at = (message.topic() or "", message.partition() or 0, message.offset() or 0)
                raise UndecodableError(undecodable_text(*at, decoded.undecodable))
            else:
                bad.append(letter_of(message, decoded.undecodable))
        if store is not None:
            store(bad)
        yield from good


def decoded_batches(
    batches: Iterable[Any],
    decoders: Iterable[Decoder],
    store: Callable[[list[Letter]], object] | None,
    on_undecodable: OnUndecodable,
) -> Iterator[Any]:
    """Yield record batches with their keys, their values, or both decoded."""
    opened = [decoder.open() for decoder in decoders]
    for batch in batches:
        columns, reasons = decode_columns(batch, opened)
        if store is not None:
            store(_letters_of(batch, reasons))
        yield apply_policy(batch, columns, reasons, on_undecodable)


def _decoded(message: Message, opened: Iterable[OpenDecoder]) -> DecodedMessage:
    parts: dict[str, Any] = {"key": message.key(), "value": message.value()}
    headers: Any = message.headers() or ()
    names = [name for name, _ in headers]
    reasons = []
    for decoder in opened:
        payload = as_bytes(parts[decoder.part])
        parts[decoder.part], reason = decoder.try_decode(payload, names)
        reasons.append(reason)
    return DecodedMessage(message, **parts, undecodable="; ".join(filter(None, reasons)) or None)


def _letters_of(batch: Any, reasons: Sequence[str | None]) -> list[Letter]:  # noqa: ANN401 - pyarrow has no types
    """Return the letters of the undecodable records of a batch with undecoded columns."""
    bad = [at for at, reason in enumerate(reasons) if reason is not None]
    if not bad:
        return []
    rows = batch.take(pyarrow().array(bad))
    # As numbers: a timestamp may be after the last year that Python supports.
    times = rows.column("timestamp").cast("int64").to_pylist()
    names = ["topic", "partition", "offset", "key", "value", "headers"]
    return [
        Letter(
            OffsetRange(row["topic"], row["partition"], row["offset"], next_offset(row["offset"])),
            str(reasons[at]),
            row["value"],
            record_key=row["key"],
            headers=tuple((one["key"], one["value"]) for one in row["headers"] or ()),
            timestamp_ms=None if micros is None else micros // 1000,
        )
        for at, micros, row in zip(bad, times, rows.select(names).to_pylist(), strict=True)
    ]


class PassedRecords:
    """The records of a batch that its group processes, and the number of the others.

    A record is counted once, however often it is read.

    Args:
        only: The filter of the group; None for all records.
        ranges: The ranges of the batch.
    """

    def __init__(self, only: RecordPredicate | None, ranges: Iterable[OffsetRange]) -> None:
        self._only = only
        self._counted_until: dict[tuple[str, int], dict[OffsetRange, int]] = {}
        for range_ in ranges:
            by_range = self._counted_until.setdefault((range_.topic, range_.partition), {})
            by_range[range_] = range_.start
        self.left_out = 0

    def of(self, lists: Iterator[list[Message]]) -> Iterator[list[Message]]:
        """Return the lists with the records that are processed."""
        if self._only is None:
            return lists
        return (self._passing(messages, self._only) for messages in lists)

    def _passing(self, messages: list[Message], only: RecordPredicate) -> list[Message]:
        passed = []
        for message in messages:
            if only.passes(message):
                passed.append(message)
            else:
                self._count(message)
        return passed

    def _count(self, message: Message) -> None:
        offset = message.offset() or 0
        counted = self._counted_until[message.topic() or "", message.partition() or 0]
        for range_, until in counted.items():
            if until <= offset < range_.until:
                counted[range_] = next_offset(offset)
                self.left_out += 1


class GivenMessages:
    """The messages that a test gives to its batch."""

    def __init__(self, ranges: Iterable[OffsetRange], messages: Iterable[Message] | None) -> None:
        own = tuple(ranges)
        self._messages = None if messages is None else tuple(messages)
        for message in self._messages or ():
            _check_parts(message)
            if not any(_holds(range_, message) for range_ in own):
                msg = (
                    f"the message at {message.topic()}-{message.partition()} offset "
                    f"{message.offset()} is in none of the ranges {', '.join(map(str, own))}: a "
                    "real batch would not contain it"
                )
                raise IllegalStateError(msg)

    def read(self, ranges: Iterable[OffsetRange]) -> Iterator[Message]:
        """Return the messages of some ranges."""
        if self._messages is None:
            msg = "this batch has no messages: pass them to KafkaBatch.for_testing(messages=)"
            raise IllegalStateError(msg)
        wanted = tuple(ranges)
        return (one for one in self._messages if any(_holds(range_, one) for range_ in wanted))

    def dataframe(
        self,
        session: SparkSession,
        ranges: Iterable[OffsetRange],
        options: Mapping[str, str] | None,
    ) -> DataFrame:
        """Return the messages of some ranges in the columns of Spark's Kafka source."""
        from dagster_rebalance.spark.ranges import given_records

        wanted = tuple(ranges)
        rows = [
            (*_columns(message), range_.start, range_.until)
            for range_ in wanted
            for message in self.read([range_])
        ]
        return given_records(session, rows, wanted, options)


def _check_parts(message: Message) -> None:
    headers: Any = message.headers()
    is_text = all(_is_bytes(part) for part in (message.key(), message.value()))
    if is_text and (
        headers is None or (isinstance(headers, list) and all(map(_is_header, headers)))
    ):
        return
    msg = (
        f"the message at {message.topic()}-{message.partition()} offset {message.offset()} has a "
        "form that Kafka's client never returns: its key and its value must be bytes or None, and "
        "its headers a list of pairs of a name and bytes or None"
    )
    raise IllegalStateError(msg)


def _is_header(header: Any) -> bool:  # noqa: ANN401 - what a test gives
    if not isinstance(header, tuple) or len(header) != 2:  # noqa: PLR2004 - name and value
        return False
    name, value = header
    return isinstance(name, str) and _is_bytes(name) and _is_bytes(value)


def _is_bytes(part: object) -> bool:
    if isinstance(part, str):  # the client encodes it
        return part.encode(errors="ignore").decode() == part
    return part is None or isinstance(part, bytes)


def _time(at_ms: int) -> datetime | None:
    """Return a time, or None after the year 9999, the last year that Python supports."""
    try:
        return _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return None


def _holds(range_: OffsetRange, message: Message) -> bool:
    return (message.topic(), message.partition()) == (
        range_.topic,
        range_.partition,
    ) and range_.start <= (message.offset() or 0) < range_.until


def _columns(message: Message) -> tuple[object, ...]:
    kind, at_ms = message.timestamp()
    at = _time(at_ms) if kind else None
    return (
        *(message.key(), message.value(), message.topic(), message.partition(), message.offset()),
        # Kafka's client numbers the types from 1, Spark from 0.
        *(at, kind - 1, message.headers()),
    )
