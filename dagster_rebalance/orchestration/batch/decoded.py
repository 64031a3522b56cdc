"""The decoded records of a batch: with Spark, as Arrow, and as messages.

Each function stores the dead letters of a chunk before it yields the other records of that chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError, UndecodableError
from dagster_rebalance.core.model.offsets import is_topic_name
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.decoding.batches import (
    RecordLetter,
    apply_policy,
    decode_columns,
    letters_of,
    undecodable_text,
)
from dagster_rebalance.decoding.decoder import KnownSchemas
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer
from dagster_rebalance.orchestration.batch.arrow import as_bytes, chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from confluent_kafka import Message
    from typing_extensions import Self

    from dagster_rebalance.decoding.batches import OnUndecodable
    from dagster_rebalance.decoding.decoder import Decoder, OpenDecoder
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
    from dagster_rebalance.orchestration.resources.registry import Encoding

_CHUNK = 500
"""Messages whose dead letters are stored together."""
_MAX_UNKNOWN = 100


@dataclass(frozen=True)
class DecodedMessage:
    """A message with its key and its value decoded.

    Attributes:
        message: The message of confluent-kafka.
        key: The decoded key, or its bytes without an encoding.
        value: The decoded value, or its bytes without an encoding.
        undecodable: Why it could not be decoded, with `keep_undecodable`. A key or value that could
            not be decoded is None.
    """

    message: Message
    key: Any
    value: Any
    undecodable: str | None = None


@dataclass(frozen=True)
class Decoding:
    """The encodings of a batch, and the destination of undecodable records.

    Attributes:
        encodings: The encoding of the key, the value, or both.
        dead_letters: The topic for records that cannot be decoded.
        keep_undecodable: Whether they are returned with their reason.
    """

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
        elif dead_letters is not None and dead_letters == kafka.dead_letter_topic:
            problem = (
                f"dead_letters={dead_letters!r} is the topic for failed ranges, whose records have "
                "another form. Name another topic"
            )
        if problem is not None:
            raise ConfigurationError(problem)
        return cls(encodings, dead_letters, keep_undecodable)

    @property
    def on_undecodable(self) -> OnUndecodable:
        """What to do with an undecodable record after its dead letter is stored."""
        if self.keep_undecodable:
            return "keep"
        return "fail" if self.dead_letters is None else "drop"

    def decoders(self, topics: frozenset[str]) -> list[Decoder]:
        """Return the decoders for the records of some topics."""
        return [encoding.decoder(part, topics) for part, encoding in self.encodings.items()]


def with_known_schemas(
    decoders: Sequence[Decoder], ids: Mapping[str, Sequence[int]]
) -> list[Decoder]:
    """Return the decoders with all schemas that they need, and query no registry."""
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
                    "the registry does not have: is it the registry of the producers, and are the "
                    f"{decoder.part}s in its wire format?"
                )
                raise ConfigurationError(msg)
        known.append(replace(decoder, writer=KnownSchemas(schemas, problems)))
    return known


def decoded_messages(
    messages: Iterator[Message],
    decoders: Iterable[Decoder],
    letters: Letters,
    *,
    keep_undecodable: bool,
) -> Iterator[DecodedMessage]:
    """Yield messages with their keys, their values, or both decoded."""
    opened = [decoder.open(as_python=True) for decoder in decoders]
    with letters:
        for chunk in chunks(messages, _CHUNK):
            good, bad = [], []
            for message in chunk:
                decoded = _decoded(message, opened)
                if decoded.undecodable is None or keep_undecodable:
                    good.append(decoded)
                else:
                    bad.append(_letter(message, decoded.undecodable))
            letters.store(bad)
            yield from good


def decoded_batches(
    batches: Iterable[Any],
    decoders: Iterable[Decoder],
    letters: Letters,
    on_undecodable: OnUndecodable,
) -> Iterator[Any]:
    """Yield record batches with their keys, their values, or both decoded."""
    opened = [decoder.open() for decoder in decoders]
    with letters:
        for batch in batches:
            columns, reasons = decode_columns(batch, opened)
            if on_undecodable == "drop":
                letters.store(letters_of(batch, reasons))
            yield apply_policy(batch, columns, reasons, on_undecodable)


class Letters:
    """Stores dead letters of undecodable records. It connects for the first of them.

    Without a `topic`, an undecodable record fails the batch. Without `kafka`, as in a test of an
    asset, nothing is stored.
    """

    def __init__(self, kafka: KafkaConsumerResource | None, topic: str | None) -> None:
        self._kafka = kafka
        self._topic = topic
        self._producer: DeadLetterProducer | None = None

    def store(self, letters: Sequence[RecordLetter]) -> None:
        """Store dead letters, and wait for their acknowledgement."""
        if not letters:
            return
        if self._topic is None:
            first = letters[0]
            msg = undecodable_text(first.topic, first.partition, first.offset, first.reason)
            raise UndecodableError(msg)
        if self._kafka is None:
            return
        if self._producer is None:
            self._producer = DeadLetterProducer(self._kafka.consumer_config(), self._topic)
        self._producer.store(letters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._producer is not None:
            self._producer.close()


def check_letter_topic(kafka: KafkaConsumerResource, topic: str) -> None:
    """Check that the dead-letter topic exists, before Spark waits for it."""
    with kafka.connect() as consumer:
        if not consumer.partitions_for(topic):
            msg = f"the topic {topic} for dead letters does not exist: create it"
            raise BrokerError(msg)


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


def _letter(message: Message, reason: str) -> RecordLetter:
    kind, at_ms = message.timestamp()
    headers: Any = message.headers() or ()
    return RecordLetter(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        timestamp_ms=at_ms if kind else None,
        reason=reason,
        key=as_bytes(message.key()),
        value=as_bytes(message.value()),
        headers=tuple((name, as_bytes(value)) for name, value in headers),
    )
