"""Records that an asset sets aside become letters, each once, however often a batch is repeated."""

from __future__ import annotations

import os
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Message

from dagster_rebalance import (
    BrokerError,
    ConfigurationError,
    IllegalStateError,
    KafkaBatch,
    KafkaConsumerResource,
    OffsetRange,
    TooManyLettersError,
    plain_json,
)
from dagster_rebalance.core.model.letters import (
    Letter,
    LetterLimit,
    LetterStamp,
    LetterState,
    StateChange,
    parse_record,
)
from dagster_rebalance.core.model.offsets import Bounds, TopicPartition
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer
from dagster_rebalance.kafka.reading.range_reader import RangeReader
from dagster_rebalance.orchestration.batch.letters import (
    BatchLetters,
    LetterProducers,
    letter_of,
    letters_at,
)
from dagster_rebalance.orchestration.storage.run_tags import SET_ASIDE_TAG
from tests.kafka.fake_producer import FakeProducer
from tests.orchestration.parts import span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

KAFKA = KafkaConsumerResource(bootstrap_servers="x", group_id="g", topics=["orders"])
HOUR_MS = 3_600_000
AT_MS = 100 * HOUR_MS


def message(offset: int, topic: str = "orders", **more: Any) -> Message:  # noqa: ANN401 - of a message
    given = {"value": b"v", "key": b"k", "timestamp": (1, AT_MS), **more}
    return Message(topic=topic, partition=0, offset=offset, **given)


def batch(*offsets: int, until: int = 10) -> KafkaBatch:
    return KafkaBatch.for_testing(
        [OffsetRange("orders", 0, 0, until)], messages=map(message, offsets)
    )


def keys(of: KafkaBatch) -> list[str]:
    return [letter.key for letter in of.letters]


# What can be set aside


def test_message_becomes_a_letter_with_its_origin() -> None:
    given = batch(3)
    (one,) = given.messages()
    assert given.set_aside(one, ValueError("no price")) == 1
    (letter,) = given.letters
    assert (letter.key, letter.value, letter.record_key) == ("orders-0-3", b"v", b"k")
    assert (letter.reason, letter.timestamp_ms) == ("ValueError: no price", AT_MS)
    assert given.metadata()["set_aside"] == 1
    assert "set_aside" not in batch(3).metadata()


def test_reason_of_a_raised_error_has_its_place_and_no_secret() -> None:
    def parse() -> None:
        msg = "no price at kafka://ann:pw@host"
        raise ValueError(msg)

    given = batch(3)
    with pytest.raises(ValueError, match="no price") as raised:
        parse()
    given.set_aside(message(3), raised.value)
    (letter,) = given.letters
    assert letter.reason.startswith("ValueError: no price at kafka://***@host (test_set_aside.py:")


def test_iterables_of_messages_and_decoded_messages_are_set_aside() -> None:
    given = batch(0, 1, 2, 3)
    assert given.set_aside((one for one in given.messages()), "late") == 4
    again = batch(0, 1)
    schema = plain_json('{"type": "object"}')
    decoded = list(again.decoded_messages(value=schema, keep_undecodable=True))
    assert again.set_aside(decoded[0], "poison") == 1
    assert again.set_aside(decoded, "poison") == 2
    assert (keys(again), again.metadata()["set_aside"]) == (["orders-0-0", "orders-0-1"], 2)
    assert [letter.value for letter in again.letters] == [b"v", b"v"]
    assert again.set_aside([], "nothing") == 0


@pytest.mark.parametrize("kind", [pa.Table, pa.RecordBatch])
def test_rows_are_set_aside_with_the_bytes_of_their_records(kind: Any) -> None:  # noqa: ANN401
    given = batch(0, 1, 2)
    table = given.arrow().read_all()
    rows = pa.table(
        {
            "topic": table["topic"],
            "partition": table["partition"],
            "offset": table["offset"],
            "price": [1, 2, 3],
            "why": ["late", "late", "poison"],
        }
    )
    rows = rows if kind is pa.Table else rows.to_batches()[0]
    assert given.set_aside(rows, "why") == 3
    assert [(one.key, one.reason, one.value) for one in given.letters] == [
        ("orders-0-0", "late", b"v"),
        ("orders-0-1", "late", b"v"),
        ("orders-0-2", "poison", b"v"),
    ]
    other = batch(0, 1, 2)
    assert other.set_aside(rows.slice(1), ValueError("all of them")) == 2
    assert {letter.reason for letter in other.letters} == {"ValueError: all of them"}
    assert other.set_aside(rows.slice(0, 0), "why") == 0


def test_good_rows_are_those_without_a_reason() -> None:
    given = batch(0, 1, 2)
    table = given.arrow().read_all()
    marked = table.append_column("why", pa.array([None, "late", None], pa.string()))
    good = given.good_rows(marked, error="why")
    assert (good.column_names, good["offset"].to_pylist()) == (table.column_names, [0, 2])
    assert [(one.key, one.reason) for one in given.letters] == [("orders-0-1", "late")]
    (part,) = marked.to_batches()
    assert given.good_rows(part, error="why").num_rows == 2


def test_no_row_of_a_record_that_is_set_aside_is_good() -> None:
    given = batch(0, 1, 2)
    table = given.arrow().read_all().take([0, 1, 1, 2])
    marked = table.append_column("why", pa.array([None, "late", None, None], pa.string()))
    assert given.good_rows(marked, error="why")["offset"].to_pylist() == [0, 2]
    place = table.schema.get_field_index("topic")
    topics = pa.array(["orders", "orders", "old", "orders"])
    other_topic = table.set_column(place, "topic", topics)
    marked = other_topic.append_column("why", pa.array([None, "late", None, None], pa.string()))
    assert given.good_rows(marked, error="why")["offset"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("records", "error", "problem"),
    [
        (message(10), "late", "orders-0 offset 10 is not in batch test"),
        (message(1, topic="others"), "late", "others-0 offset 1 is not in batch test"),
        ([message(1), message(11)], "late", "offset 11 is not in batch"),
        (b"payload", "late", "a bytes cannot be set aside"),
        ({"id": 1}, "late", "a dict cannot be set aside"),
        (None, "late", "a NoneType cannot be set aside"),
        (pa.table({"topic": ["orders"], "offset": [1]}), ValueError(), "the column 'partition'"),
        (
            pa.table({"topic": ["orders"], "partition": [0], "offset": [1]}),
            "why",
            "the column 'why'",
        ),
        (
            pa.table({"topic": ["orders"], "partition": [0], "offset": [1], "why": [None]}),
            "why",
            "offset 1 has no reason",
        ),
        (
            pa.table({"topic": ["orders"], "partition": [0], "offset": [77], "why": ["a"]}),
            "why",
            "offset 77 is not in batch",
        ),
    ],
)
def test_record_that_cannot_be_set_aside_is_refused(
    records: object,
    error: Any,  # noqa: ANN401 - either kind
    problem: str,
) -> None:
    given = batch(1)
    with pytest.raises(IllegalStateError, match=problem):
        given.set_aside(records, error)
    assert given.letters == ()


def test_good_rows_of_messages_are_refused() -> None:
    with pytest.raises(IllegalStateError, match="takes a DataFrame or an Arrow table"):
        batch(1).good_rows([message(1)], error="why")


def test_group_without_dead_letter_topic_is_refused() -> None:
    kafka = KafkaConsumerResource(bootstrap_servers="x", group_id="g", topics=["orders"])
    given = KafkaBatch(kafka=kafka, batch_id="b", ranges=["orders:0:0:10"])
    with pytest.raises(ConfigurationError, match="has no dead_letter_topic"):
        given.set_aside(message(1), "late")


def test_rows_that_are_far_apart_are_read_in_several_ranges() -> None:
    read: list[OffsetRange] = []

    def reading(ranges: Sequence[OffsetRange]) -> Iterator[Message]:
        read.extend(ranges)
        return (
            message(offset) for range_ in ranges for offset in range(range_.start, range_.until)
        )

    wanted = [("orders", 0, offset, "late") for offset in (5_000, 3, 1, 900)]
    letters = list(letters_at(wanted, reading))
    assert [letter.range.start for letter in letters] == [1, 3, 900, 5_000]
    assert read == [span(0, 1, 901), span(0, 5_000, 5_001)]
    assert list(letters_at([], reading)) == []


def test_row_whose_record_is_gone_fails_the_batch() -> None:
    with pytest.raises(BrokerError, match="orders-0 offset 4 was to be set aside, and Kafka does"):
        list(letters_at([("orders", 0, 4, "late")], lambda _: []))


# What is stored


class Topic:
    """A dead-letter topic in memory, with its reader and its producer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.producer = FakeProducer({})
        produce = self.producer.produce
        self.error: KafkaError | None = None

        def produce_and_end(*given: Any, **more: Any) -> None:  # noqa: ANN401 - as of the producer
            produce(*given, **more)
            self.producer.end(self.error)

        monkeypatch.setattr(self.producer, "produce", produce_and_end)
        monkeypatch.setattr(
            DeadLetterProducer.__init__, "__kwdefaults__",
            {"make_producer": lambda _: self.producer},
        )  # fmt: skip
        self.reads: list[int | None] = []
        self.records_read = 0
        self.extra: list[Message] = []
        self.firsts = 0
        self.gone: set[int] = set()

    def topic_log(self, topic: str) -> tuple[str, dict[TopicPartition, Bounds]]:
        return "id", {TopicPartition(topic, 0): Bounds(0, len(self.producer.sent))}

    def read_topic(
        self,
        topic: str,
        *,
        since_ms: int | None,
        positions: Mapping[TopicPartition, int] | None = None,
    ) -> Iterator[list[Message]]:
        self.reads.append(since_ms)
        start = (positions or {}).get(TopicPartition(topic, 0), 0)
        stored = [
            Message(
                topic=topic, partition=0, offset=at, key=key.encode(), value=value, headers=headers
            )
            for at, ((_, key, value), headers) in enumerate(
                zip(self.producer.sent, self.producer.headers, strict=True)
            )
            if at >= start
        ]
        self.records_read += len(stored)
        return iter([stored, self.extra])

    def read(self, ranges: Iterable[OffsetRange], _timeout_s: float = 0.0) -> Iterator[Message]:
        return (message(range_.start) for range_ in ranges if range_.start not in self.gone)

    def attempt(
        self,
        number: int = 1,
        *,
        start: int = 0,
        until: int = 10,
        limit: str = "",
        group: str = "g",
        producers: LetterProducers | None = None,
        bisected: OffsetRange | None = None,
        batch_id: str = "b-1",
    ) -> BatchLetters:
        kafka = KafkaConsumerResource(bootstrap_servers="x", group_id="g", topics=["orders"])
        reader: Any = self
        return BatchLetters(
            producers or LetterProducers(kafka),
            reader,
            [OffsetRange("orders", 0, start, until)],
            partial(LetterStamp, group, batch_id, "run1", number),
            is_repeat=number > 1,
            bisected=bisected,
            limit=LetterLimit.parse(limit) if limit else None,
            on_first=self._count,
        )

    def _count(self) -> None:
        self.firsts += 1

    @property
    def letters(self) -> list[Letter]:
        parsed = [
            parse_record(key, value, headers)
            for (_, key, value), headers in zip(
                self.producer.sent, self.producer.headers, strict=True
            )
        ]
        return [one for one in parsed if isinstance(one, Letter)]

    def change(self, key: str, state: LetterState) -> None:
        change = StateChange(key, state, "ann", "test data", 0).record
        self.producer.sent.append(("dead", change.key, change.value))
        self.producer.headers.append(change.headers)


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    return Topic(monkeypatch)


def letters(*offsets: int, **more: Any) -> Iterable[Letter]:  # noqa: ANN401 - of a message
    return (letter_of(message(offset, **more), "late") for offset in offsets)


def test_letter_has_the_attempt_that_stored_it(topic: Topic) -> None:
    own = topic.attempt(2)
    assert (own.store(letters(3), "dead"), own.count) == (1, 1)
    (letter,) = topic.letters
    assert (letter.group_id, letter.batch_id, letter.run_id, letter.attempt) == (
        "g",
        "b-1",
        "run1",
        2,
    )
    assert (letter.time_ms or 0) > AT_MS


def test_first_attempt_reads_nothing_and_stores_a_record_once(topic: Topic) -> None:
    own = topic.attempt()
    own.store(letters(3, 3), "dead")
    own.store(letters(3, 4), "dead")
    assert [letter.key for letter in topic.letters] == ["orders-0-3", "orders-0-4"]
    assert (own.count, topic.reads, topic.firsts) == (2, [], 1)


def test_thousands_of_letters_are_stored_in_parts(topic: Topic) -> None:
    own = topic.attempt()
    assert own.store(letters(*range(1_201)), "dead") == 1_201
    assert len(topic.letters) == own.count == 1_201


def test_large_letters_are_stored_in_smaller_parts(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer's queue limits the bytes in flight."""
    monkeypatch.setattr("dagster_rebalance.orchestration.batch.letters._CHUNK_BYTES", 100)
    parts: list[int] = []
    real = DeadLetterProducer.store

    def store(self: DeadLetterProducer, given: Iterable[Any]) -> None:
        records = list(given)
        parts.append(len(records))
        real(self, records)

    monkeypatch.setattr(DeadLetterProducer, "store", store)
    own = topic.attempt()
    assert own.store(letters(*range(5), value=b"v" * 30, headers=[("h", b"h" * 20)]), "dead") == 5
    assert parts == [2, 2, 1]
    assert own.store(letters(5, 6, value=b"v" * 900), "dead") == 2
    assert (parts[3:], own.count) == ([1, 1], 7)


def test_repeat_stores_only_the_letters_that_the_topic_does_not_have(topic: Topic) -> None:
    topic.attempt().store(letters(3), "dead")
    again = topic.attempt(2)
    again.store(letters(3, 4), "dead")
    assert [letter.key for letter in topic.letters] == ["orders-0-3", "orders-0-4"]
    assert again.count == 2, "set aside in this attempt, too"
    again.store(letters(3, 5), "dead")
    assert topic.reads == [AT_MS - 2 * HOUR_MS], "one read, bounded by the time of the records"
    assert len(topic.letters) == 3


def test_letter_of_another_partition_or_program_does_not_count(topic: Topic) -> None:
    topic.extra = [
        Message(topic="dead", partition=0, offset=9, key=b"orders-0-3", value=b"of nobody"),
        Message(topic="dead", partition=0, offset=10, key=None, value=b"of nobody"),
        Message(topic="dead", partition=0, offset=11, key=b"orders-1-3", value=b"of nobody"),
    ]
    topic.attempt(2).store(letters(3), "dead")
    assert [letter.key for letter in topic.letters] == ["orders-0-3"]


def changes(topic: Topic) -> list[tuple[str, LetterState, str]]:
    parsed = (
        parse_record(key, value, headers)
        for (_, key, value), headers in zip(
            topic.producer.sent, topic.producer.headers, strict=True
        )
    )
    return [(one.key, one.state, one.run_id) for one in parsed if isinstance(one, StateChange)]


def test_letter_of_a_record_that_a_later_attempt_has_processed_is_closed(topic: Topic) -> None:
    topic.attempt().store(letters(3, 4, 12), "dead")
    topic.attempt(group="audit").store(letters(3), "dead")
    again = topic.attempt(2)
    again.store(letters(4), "dead")
    again.close_processed("dead")
    closed = [("orders-0-3", LetterState.REPLAYED, "run1")]
    assert changes(topic) == closed
    topic.attempt(3, start=2, until=4).close_processed("dead")
    assert changes(topic) == closed
    assert topic.reads[-1] == AT_MS - 2 * HOUR_MS, "not the whole topic"

    topic.gone = {0}  # compaction may have deleted the first record
    third = topic.attempt(3)
    third.store(letters(3), "dead")
    assert [letter.key for letter in topic.letters].count("orders-0-3") == 3, "it was processed"
    third.close_processed("dead")
    assert changes(topic)[1:] == [("orders-0-4", LetterState.REPLAYED, "run1")]
    assert topic.reads[-1] is None


def test_first_record_that_retention_has_deleted_does_not_keep_letters_open(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.attempt().store(letters(3), "dead")
    monkeypatch.setattr(topic, "read", unreadable)
    topic.attempt(2).close_processed("dead")
    assert changes(topic) == [("orders-0-3", LetterState.REPLAYED, "run1")]
    assert topic.reads == [None], "the whole topic"


def unreadable(_ranges: Iterable[OffsetRange], _timeout_s: float = 0.0) -> Iterator[Message]:
    message = "Kafka no longer has offset 0"
    raise BrokerError(message)


def test_letter_of_a_log_that_was_recreated_stays_open(topic: Topic) -> None:
    """Another record has its offset."""
    old = [letters(offset, timestamp=(1, AT_MS - 1)) for offset in (3, 5)]
    topic.attempt().store([*chain(*old), *letters(4, 6)], "dead")
    topic.attempt(2).close_processed("dead")
    assert [key for key, *_ in changes(topic)] == ["orders-0-4", "orders-0-6"]


def test_letters_of_a_forked_process_stay_open(topic: Topic) -> None:
    """Only that process knows which records it has set aside again."""
    topic.attempt().store(letters(3), "dead")
    again = topic.attempt(2)
    child = os.fork()
    if child == 0:
        again.store(letters(3), "dead")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(IllegalStateError, match="a worker process has set records aside"):
        again.close_processed("dead")
    assert changes(topic) == []


def test_letters_of_undecodable_records_are_closed(topic: Topic) -> None:
    given = KafkaBatch(kafka=KAFKA, batch_id="b-1", ranges=["orders:0:0:10"])
    given.store_letters_by(LetterProducers(KAFKA), attempt=2)
    given._letters = topic.attempt(2)
    topic.attempt().store(letters(3), "undecodable")
    given.decoded_messages(value=plain_json('{"type": "object"}'), dead_letters="undecodable")
    assert given.close_processed_letters() == ""
    assert [at for at, _, value in topic.producer.sent if value == b""] == ["undecodable"]


def test_letters_are_read_once_for_the_parts_of_a_bisected_range(topic: Topic) -> None:
    """A search has tens of parts."""
    kafka = KafkaConsumerResource(bootstrap_servers="x", group_id="g", topics=["orders"])
    producers, whole = LetterProducers(kafka), OffsetRange("orders", 0, 0, 10)
    topic.attempt().store(letters(3, 4, 7), "dead")

    def process(start: int, until: int, bisected: OffsetRange | None = whole) -> None:
        part = topic.attempt(2, start=start, until=until, producers=producers, bisected=bisected)
        part.close_processed("dead")

    process(0, 2)
    process(2, 3)
    assert len(topic.reads) == 1
    process(3, 4)
    process(4, 5)
    process(5, 10)
    assert [key for key, *_ in changes(topic)] == ["orders-0-3", "orders-0-4", "orders-0-7"]
    assert len(topic.reads) == 3, "again, because the topic has changed"
    topic.attempt(3).store(letters(8), "dead")
    process(8, 9)
    assert [key for key, *_ in changes(topic)][3:] == ["orders-0-8"], "of another process"
    reads = len(topic.reads)
    process(10, 11, OffsetRange("orders", 0, 10, 12))
    assert len(topic.reads) == reads + 1


def test_letters_that_cannot_be_closed_do_not_fail_the_batch(topic: Topic) -> None:
    kafka = KafkaConsumerResource(
        bootstrap_servers="x", group_id="g", topics=["orders"], dead_letter_topic="dead"
    )
    given = KafkaBatch(kafka=kafka, batch_id="b-1", ranges=["orders:0:0:10"])
    assert given.close_processed_letters() == "", "it stores no letters"
    given.store_letters_by(LetterProducers(kafka), attempt=2)
    given._letters = topic.attempt(2)
    topic.attempt().store(letters(3), "dead")
    topic.error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert "batch b-1 are not marked as replayed, so a replay" in given.close_processed_letters()
    topic.error = None
    assert given.close_processed_letters() == ""
    assert [state for _, state, _ in changes(topic)][-1] is LetterState.REPLAYED


def test_letter_of_another_group_does_not_count(topic: Topic) -> None:
    topic.attempt(group="orders").store(letters(3), "dead")
    for number in (2, 3):
        topic.attempt(number, group="audit").store(letters(3), "dead")
    assert [letter.group_id for letter in topic.letters] == ["orders", "audit"]


def test_record_of_a_recreated_topic_has_a_letter_of_its_own(topic: Topic) -> None:
    topic.attempt().store(letters(3), "dead")
    for number in (2, 3):
        topic.attempt(number).store(letters(3, timestamp=(1, AT_MS + 5)), "dead")
    assert [letter.timestamp_ms for letter in topic.letters] == [AT_MS, AT_MS + 5]


@pytest.mark.parametrize(
    ("state", "stored"), [(LetterState.DISCARDED, 1), (LetterState.REPLAYED, 2)]
)
def test_replayed_letter_is_stored_again_and_a_discarded_one_is_not(
    topic: Topic, state: LetterState, stored: int
) -> None:
    """A replayed record was processed, so a later rerun that sets it aside is news."""
    topic.attempt().store(letters(3), "dead")
    topic.change("orders-0-3", state)
    topic.attempt(2).store(letters(3), "dead")
    assert len(topic.letters) == stored


def test_letter_of_a_record_from_the_future_is_looked_up_in_the_whole_topic(topic: Topic) -> None:
    """A producer that writes microseconds."""
    for number in (1, 2):
        topic.attempt(number).store(letters(3, timestamp=(1, 10**15)), "dead")
    assert (topic.reads, len(topic.letters)) == ([None], 1)


def test_much_older_record_is_looked_up_in_the_whole_topic(topic: Topic) -> None:
    own = topic.attempt(2)
    own.store(letters(3), "dead")
    own.store(letters(4, timestamp=(1, AT_MS - 9 * HOUR_MS)), "dead")
    own.store(letters(5, timestamp=(0, 0)), "dead")
    assert topic.reads == [AT_MS - 2 * HOUR_MS, None]
    other = topic.attempt(2)
    other.store(letters(3, timestamp=(0, 0)), "dead")
    assert topic.reads[2:] == [None], "a record without a timestamp may be of any age"


def test_letter_that_cannot_be_stored_fails_the_batch_and_does_not_count(topic: Topic) -> None:
    own = topic.attempt()
    topic.error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    with pytest.raises(
        BrokerError, match=r"dead letter orders-0-3 could not be stored in topic dead: .* create"
    ):
        own.store(letters(3), "dead")
    assert own.count == 0
    topic.error = None
    own.store(letters(3), "dead")
    assert own.count == 1


# The limit


def test_letters_beyond_the_limit_fail_the_batch_and_are_not_stored(topic: Topic) -> None:
    own = topic.attempt(limit="2")
    own.store(letters(1, 2, 2), "dead")
    with pytest.raises(
        TooManyLettersError, match="orders-0 would have 3 dead letters within an hour, and max_dead"
    ):
        own.store(letters(3), "dead")
    assert [letter.key for letter in topic.letters] == ["orders-0-1", "orders-0-2"]


def test_repeat_counts_its_letters_once(topic: Topic) -> None:
    topic.attempt(limit="2").store(letters(1, 2), "dead")
    topic.attempt(2, limit="2").store(letters(1, 2), "dead")
    with pytest.raises(TooManyLettersError):
        topic.attempt(3, limit="2").store(letters(1, 2, 3), "dead")


def test_limit_counts_the_open_letters_of_the_last_hour_of_the_group(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.attempt(group="other").store(letters(0, 1, 2), "dead")
    with monkeypatch.context() as long_ago:
        long_ago.setattr("time.time", lambda: 0.0)
        topic.attempt().store(letters(3, 4, 5), "dead")
    topic.attempt(limit="2").store(letters(6, 7), "dead")


def test_letter_that_an_operator_closes_counts_no_longer(topic: Topic) -> None:
    own = topic.attempt(limit="2")
    own.store(letters(1, 2), "dead")
    with pytest.raises(TooManyLettersError):
        own.store(letters(3), "dead")
    topic.change("orders-0-1", LetterState.DISCARDED)
    own.store(letters(3), "dead")
    assert len(topic.reads) == 3, "the first letter, and one before each refusal"


def test_batches_of_one_run_read_each_letter_once(topic: Topic) -> None:
    producers = LetterProducers(KAFKA)
    for offset in range(5):
        own = topic.attempt(limit="15", producers=producers)
        own.store(letters(3 * offset, 3 * offset + 1), "dead")
        own.store(letters(3 * offset + 2), "dead")
    assert (len(topic.reads), topic.records_read) == (5, 12)


def test_limit_counts_the_letters_of_other_runs_and_of_the_member(topic: Topic) -> None:
    """Partitions move between runs, and bisection stores letters in the member."""
    one, other = LetterProducers(KAFKA), LetterProducers(KAFKA)
    topic.attempt(limit="3", producers=one).store(letters(0), "dead")
    topic.attempt(limit="3", producers=other).store(letters(1, 2), "dead")
    with pytest.raises(TooManyLettersError, match="would have 4 dead letters"):
        topic.attempt(limit="3", producers=one).store(letters(3), "dead")


def test_share_is_one_of_the_offsets_since_the_first_letter_of_the_hour(topic: Topic) -> None:
    own = topic.attempt(limit="1%", until=2_000)
    own.store(letters(*range(100, 120)), "dead")
    with pytest.raises(TooManyLettersError, match=r"21 dead letters .* allows 20"):
        own.store(letters(500), "dead")
    topic.attempt(limit="1%", until=2_100).store(letters(500), "dead")
    small = topic.attempt(limit="1%", until=2_100, group="small")
    small.store(letters(*range(10)), "dead")


def test_letter_of_a_rerun_of_old_offsets_does_not_raise_the_share(topic: Topic) -> None:
    topic.attempt(limit="1%", batch_id="r.again.1").store(letters(5), "dead")
    own = topic.attempt(limit="1%", start=1_000_000, until=1_000_100)
    with pytest.raises(TooManyLettersError, match=r"100 dead letters .* allows 10"):
        own.store(letters(*range(1_000_000, 1_000_100)), "dead")


def test_share_of_a_rerun_of_old_offsets_is_without_newer_letters(topic: Topic) -> None:
    own = topic.attempt(limit="1%", start=1_000_000, until=1_100_000)
    own.store(letters(*range(1_000_000, 1_000_500)), "dead")
    topic.attempt(limit="1%", batch_id="r.again.1").store(letters(5), "dead")
    numbered = topic.attempt(limit="501", batch_id="r.again.1")
    with pytest.raises(TooManyLettersError, match=r"502 dead letters .* allows 501"):
        numbered.store(letters(6), "dead")


# Reruns


@pytest.mark.parametrize(("batch_id", "marked"), [("r.again.1", ["run1"]), ("b-1", [])])
def test_rerun_that_sets_a_record_aside_is_marked(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, batch_id: str, marked: list[str]
) -> None:
    """Its record is not replayed, although its run succeeds and stores no second letter."""
    tagged: list[str] = []

    def add_run_tags(run_id: str, tags: dict[str, str]) -> None:
        assert tags == {SET_ASIDE_TAG: run_id}
        tagged.append(run_id)

    kafka = KafkaConsumerResource(
        bootstrap_servers="x", group_id="g", topics=["orders"], dead_letter_topic="dead"
    )
    instance: Any = SimpleNamespace(add_run_tags=add_run_tags)
    given = KafkaBatch(kafka=kafka, batch_id=batch_id, ranges=["orders:0:0:10"])
    monkeypatch.setattr(RangeReader, "read_topic", lambda *_, **__: iter([]))
    given.store_letters_by(
        LetterProducers(kafka), on_first=partial(given._mark_set_aside, instance, "run1")
    )
    for offset in (3, 4):
        given.set_aside(message(offset), "late")
    assert tagged == marked
    assert len(topic.letters) == 2
