"""The open dead letters of a group as members report them in Dagster, and the manual check."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka import TopicPartition as ConfluentPartition
from confluent_kafka.admin import AdminClient, NewTopic

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.letters import Letter, LetterKind, LetterState, StateChange
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.reporting.open_letters import LetterCount, OpenLetters
from dagster_rebalance.orchestration.reporting.letter_checks import (
    LETTERS_CHECK,
    build_letters_check,
)
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic, NewLetters
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until
from tests.orchestration.bench import SETTINGS, Bench
from tests.orchestration.reporting.test_lag_check import observed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

_STEP_S = 4.0
"""Below the time after which a member treats a pause as a standstill."""
NONE = OpenLetters("dead", 0, 0, 0)
ROW = LetterCount(TopicPartition("orders", 0), LetterKind.RECORD, "bad", 2)
SOME = OpenLetters("dead", 2, 1, 0, (ROW,))


class Topic:
    """A dead-letter topic with the given letters."""

    def __init__(self) -> None:
        self.letters = NONE
        self.error: Exception | None = None
        self.reads = 0

    def read(self) -> OpenLetters:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.letters


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def topic() -> Topic:
    return Topic()


def shown(bench: Bench) -> list[object]:
    """The observed numbers of open letters."""
    seen = observed(bench.instance, bench.assets.letters)
    return [one.metadata["open_letters"].value for one in seen]


def evaluations(bench: Bench) -> list[bool]:
    found = bench.instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(bench.assets.letters, LETTERS_CHECK), limit=100
    )
    return [record.evaluation.passed for record in reversed(found) if record.evaluation]


def after(bench: Bench, seconds: float) -> None:
    """Let time pass, and then two turns: one reads, the next one reports."""
    for _ in range(int(seconds / _STEP_S)):
        bench.group.clock.advance(_STEP_S)
        bench.turn()
    bench.turn(2)


def test_open_letters_are_observed_when_they_change(
    instance: dg.DagsterInstance, topic: Topic
) -> None:
    bench = Bench(instance, new_letters=topic)
    bench.until(lambda: shown(bench) == [0])
    assert evaluations(bench) == [True]
    after(bench, 120)
    assert topic.reads <= 6
    assert shown(bench) == [0]
    topic.letters = SOME
    after(bench, 40)
    assert shown(bench) == [0, 2]
    assert evaluations(bench) == [True, False]
    (*_, last) = observed(instance, bench.assets.letters)
    assert last.description == "2 open dead letters, 2 of orders-0: bad"
    table = last.metadata["largest"]
    assert isinstance(table, dg.TableMetadataValue)
    assert [record.data for record in table.records] == [
        {"partition": "orders-0", "kind": "record", "letters": 2, "reason": "bad"}
    ]
    topic.letters = replace(SOME, letters=3)
    after(bench, 100)
    assert shown(bench) == [0, 2], "a further letter is shown after five minutes"
    after(bench, 240)
    assert shown(bench) == [0, 2, 3]
    assert evaluations(bench) == [True, False]
    topic.letters = NONE
    after(bench, 40)
    assert shown(bench) == [0, 2, 3, 0]
    assert evaluations(bench) == [True, False, True]
    assert 2 in bench.engine.owed


def test_error_is_noted_once_and_the_next_read_reports(
    instance: dg.DagsterInstance, topic: Topic
) -> None:
    bench = Bench(instance, new_letters=topic)
    topic.error = BrokerError("no such topic")
    after(bench, 100)
    notes = [note for note in bench.mailbox.take_notes() if "dead letters are not known" in note]
    (note,) = notes
    assert note.endswith("the open dead letters are not known: no such topic")
    topic.error = None
    after(bench, 60)
    assert shown(bench) == [0]


def test_one_read_is_in_progress_at_most(instance: dg.DagsterInstance, topic: Topic) -> None:
    begun: list[Callable[[], None]] = []

    def start(name: str, work: Callable[[], None]) -> None:
        if name == "reading dead letters":
            begun.append(work)
        else:
            work()

    bench = Bench(instance, new_letters=topic, start=start)
    bench.until(lambda: begun)
    after(bench, 100)
    assert len(begun) == 1
    begun[0]()
    after(bench, 40)
    assert (shown(bench), len(begun)) == ([0], 2)


def test_member_without_the_first_partition_reads_no_letters(
    instance: dg.DagsterInstance, topic: Topic
) -> None:
    first = Bench(instance, partitions=2)
    first.turn()
    second = Bench(instance, partitions=2, group=first.group, new_letters=topic)

    def is_shared() -> bool:
        first.turn()
        return bool(second.engine.partitions)

    second.until(is_shared)
    after(second, 60)
    assert topic.reads == 0


def test_group_without_a_dead_letter_topic_has_no_check(instance: dg.DagsterInstance) -> None:
    bench = Bench(instance, settings=SETTINGS)
    after(bench, 60)
    assert shown(bench) == []


# A real topic


def with_letters(broker: KafkaCluster, kafka_topic: TopicFactory) -> KafkaConsumerResource:
    dead = kafka_topic(2, prefix="dead")
    return KafkaConsumerResource(
        bootstrap_servers=broker.bootstrap_servers,
        group_id=dead,
        topics=["orders"],
        on_failure="dead_letter",
        dead_letter_topic=dead,
    )


def store(kafka: KafkaConsumerResource, *found: Letter | StateChange) -> None:
    config = {"bootstrap.servers": kafka.bootstrap_servers, "partitioner": "murmur2_random"}
    producer = Producer(config)
    topic = kafka.dead_letter_topic or ""
    for one in found:
        headers: Any = one.record.headers
        producer.produce(topic, key=one.record.key, value=one.record.value, headers=headers)
    assert producer.flush(120) == 0


def four_letters() -> list[Letter]:
    return [Letter(OffsetRange("orders", 0, at, at + 1), f"row {at}", b"{}") for at in range(4)]


@pytest.mark.broker
def test_new_letters_are_read_incrementally_and_by_the_check(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = with_letters(kafka_broker, kafka_topic)
    dead = kafka.dead_letter_topic or ""

    letters = four_letters()
    key = GroupAssets.of(dead).letters
    check = dg.Definitions(
        asset_checks=[build_letters_check(key, "kafka")], resources={"kafka": kafka}
    )

    def passes() -> bool:
        job = check.resolve_implicit_global_asset_job_def()
        with dg.DagsterInstance.ephemeral() as instance:
            result = job.execute_in_process(instance=instance)
            (evaluation,) = result.get_asset_check_evaluations()
        return evaluation.passed

    assert passes()
    with NewLetters(kafka) as new:
        assert new.read() == OpenLetters(dead, 0, 0, 0)
        store(kafka, *letters)
        assert new.read().letters == 4
        read: list[object] = []
        real = new._reader.read_lists

        def watched(*given: Any) -> Any:  # noqa: ANN401 - of the reader
            for messages in real(*given):
                read.extend(messages)
                yield messages

        monkeypatch.setattr(new._reader, "read_lists", watched)
        store(kafka, StateChange(letters[0].key, LetterState.DISCARDED, "ada", "a test", 5))
        found = new.read()
        assert (found.letters, found.closed, len(read)) == (3, 1, 1)
        assert found.rows == (
            LetterCount(TopicPartition("orders", 0), LetterKind.RECORD, "row #", 3),
        )
        assert new.read() == found
        assert len(read) == 1
        assert not passes()

        admin = AdminClient({**kafka_broker.client_config()})
        admin.delete_topics([dead])[dead].result(120)

        def is_recreated() -> bool:
            try:
                admin.create_topics([NewTopic(dead, 2, 1)])[dead].result(120)
            except KafkaException:  # the deletion takes effect later
                return False
            return True

        wait_until(is_recreated, timeout_s=120, what="a new topic")
        again = [replace(one, reason="again") for one in letters]
        store(kafka, *again, letters[0])  # as many records as before

        def is_noticed() -> bool:
            try:
                found = new.read()
            except BrokerError:
                return False
            return [row.reason for row in found.rows] == ["again"]

        wait_until(is_noticed, timeout_s=120, what="the letters of the new topic")


@pytest.mark.broker
def test_letters_that_retention_has_deleted_are_not_open(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    kafka = with_letters(kafka_broker, kafka_topic)
    dead = kafka.dead_letter_topic or ""
    admin = AdminClient({**kafka_broker.client_config()})
    with NewLetters(kafka) as new:
        store(kafka, *four_letters())
        assert new.read().letters == 4
        _, log = new._reader.topic_log(dead)
        ends = [ConfluentPartition(*partition, bounds.until) for partition, bounds in log.items()]
        for done in admin.delete_records(ends).values():
            done.result(120)
        assert new.read().letters == 0
        store(kafka, *four_letters()[:3])
        assert new.read().letters == 3


@pytest.mark.broker
def test_open_transaction_of_another_program_hides_no_letters(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    kafka = with_letters(kafka_broker, kafka_topic)
    dead = kafka.dead_letter_topic or ""
    other = Producer({**kafka_broker.client_config(), "transactional.id": dead})
    other.init_transactions(120)
    other.begin_transaction()
    for number in (0, 1):
        other.produce(dead, b"of another program", partition=number)
    other.flush(120)
    store(kafka, *four_letters())
    with NewLetters(kafka) as new:
        found = new.read()
    assert (found.letters, found.malformed) == (4, 2)
    assert DeadLetterTopic(kafka).read().counts[LetterState.OPEN] == 4
    other.abort_transaction(120)
