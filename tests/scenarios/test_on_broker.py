"""Scenarios that need a broker and its client: long holds, members that never poll, pauses."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Protocol

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from dagster_rebalance.core.model.errors import PartitionLostError
from dagster_rebalance.core.model.events import PartitionsLost, RevokeRequested
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.member.leave import leave
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.kafka.contract.stages import Actor, KafkaStage, pass_time, play
from tests.kafka.eviction import evict
from tests.kafka.leader import SlowLeader
from tests.kafka.readers import CommitOnRevoke

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory
    from tests.kafka.contract.stages import Stage
    from tests.kafka.readers import Readers

pytestmark = pytest.mark.broker

SESSION_S = 3.0
POLL_LIMIT_S = 2.0
PARTITIONS = 400
CLOSE_LIMIT_S = 60.0
QUICK_S = 10.0
"""Far less than any limit of a close, and enough for a busy machine."""


class NewActor(Protocol):
    """Creates members that are closed after the test: an unclosed client can block the process."""

    def __call__(self, stage: Stage) -> Actor: ...


@pytest.fixture
def actor() -> Iterator[NewActor]:
    """Makes members."""
    made: list[Actor] = []

    def make(stage: Stage) -> Actor:
        made.append(Actor(stage))
        return made[-1]

    yield make
    for each in made:
        each.member.close(5.0)


@pytest.fixture
def stage(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory, request: pytest.FixtureRequest
) -> KafkaStage:
    """A group of a topic with four partitions; tests say in which protocols (indirectly)."""
    return KafkaStage(kafka_broker.bootstrap_servers, kafka_topic(4), request.param)


IN_CLASSIC = pytest.mark.parametrize("stage", ["classic"], indirect=True)
IN_BOTH = pytest.mark.parametrize("stage", ["classic", "consumer"], indirect=True)


@pytest.fixture
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a close that waits for a limit take a minute."""
    monkeypatch.setattr("dagster_rebalance.kafka.member.leave._LEAVE_LIMIT_S", CLOSE_LIMIT_S)


def holding(stage: KafkaStage, actor: NewActor) -> tuple[Actor, Actor]:
    """A member that holds two of its four partitions for another one."""
    blue = actor(stage).subscribe()
    play(lambda: len(blue.owns) == 4, blue, what="the first member to own everything")
    green = actor(stage).subscribe()
    play(lambda: blue.member.held, blue, green, what="a revoke request")
    return blue, green


def shared(*actors: Actor, wanted: list[TopicPartition]) -> bool:
    """Whether every partition has one owner; holds on the way are released."""
    for each in actors:
        if each.member.held:
            each.member.release()
    return sorted(partition for each in actors for partition in each.owns) == wanted


@IN_CLASSIC
def test_hold_outlasts_the_session_timeout(stage: KafkaStage, actor: NewActor) -> None:
    """Heartbeats keep the membership during a hold; only the poll interval ends it."""
    stage.config["session.timeout.ms"] = f"{SESSION_S * 1000:.0f}"
    blue, green = holding(stage, actor)
    held, ends_at = blue.member.held, time.monotonic() + 2 * SESSION_S
    play(lambda: time.monotonic() > ends_at, blue, green, what="two session timeouts to pass")
    assert blue.member.held == held
    assert blue.member.commit(dict.fromkeys(held, OffsetAndMetadata(1))).committed == held
    blue.member.release()
    play(lambda: green.owns == held, blue, green, what="the handover")
    assert not blue.partitions_of(PartitionsLost)


@IN_BOTH
def test_hold_is_unaffected_by_a_third_member_that_joins(
    stage: KafkaStage, actor: NewActor
) -> None:
    """The client requests no other rebalance while it holds the first revoke."""
    blue, green = holding(stage, actor)
    held = blue.member.held
    red = actor(stage).subscribe()
    pass_time(blue, green, red, polls=12)
    assert [event.partitions for event in blue.events if isinstance(event, RevokeRequested)] == [
        tuple(sorted(held))
    ]
    assert blue.member.held == held
    assert not green.owns | red.owns
    assert blue.member.commit(dict.fromkeys(blue.owns, OffsetAndMetadata(1))).failed == {}
    wanted = [TopicPartition(stage.topic, number) for number in range(4)]
    play(
        lambda: shared(blue, green, red, wanted=wanted) and red.owns and green.owns,
        blue,
        green,
        red,
        what="all three to have a share",
    )
    assert not blue.partitions_of(PartitionsLost)


@IN_BOTH
def test_commit_right_after_a_suspension_in_a_hold_is_refused(
    stage: KafkaStage, actor: NewActor
) -> None:
    """The member commits before a poll has reported the loss."""
    stage.hold_limit_s = 1.0
    stage.config["max.poll.interval.ms"] = f"{POLL_LIMIT_S * 1000:.0f}"
    if stage.protocol == "classic":
        stage.config["session.timeout.ms"] = stage.config["max.poll.interval.ms"]
    blue, green = holding(stage, actor)
    owned = blue.owns
    play(
        lambda: green.owns == owned,
        green,
        what="the next owner of everything, while the first one does not poll",
    )
    assert green.member.commit(dict.fromkeys(owned, OffsetAndMetadata(9))).committed == owned
    late = blue.member.commit(dict.fromkeys(owned, OffsetAndMetadata(5)))
    assert {type(error) for error in late.failed.values()} == {PartitionLostError}
    assert late.failed.keys() == owned
    play(lambda: blue.partitions_of(PartitionsLost), blue, green, what="the loss to be reported")
    assert set(green.member.committed(owned, 60.0).values()) == {OffsetAndMetadata(9)}


@IN_CLASSIC
@pytest.mark.usefixtures("long_limits")
def test_close_does_not_wait_for_a_member_that_never_polls(
    stage: KafkaStage, actor: NewActor
) -> None:
    blue = actor(stage).subscribe()
    play(lambda: len(blue.owns) == 4, blue, what="the first member to own everything")
    silent = Consumer({**stage.config, "partition.assignment.strategy": "cooperative-sticky"})
    try:
        silent.subscribe([stage.topic])
        play(
            lambda: blue.member.held, blue, what="a revoke request for the member that never polls"
        )
        begun = time.monotonic()
        blue.member.close(CLOSE_LIMIT_S)
        assert time.monotonic() - begun < QUICK_S
    finally:
        leave(silent)


@IN_CLASSIC
@pytest.mark.usefixtures("long_limits")
def test_close_does_not_wait_for_a_pending_assignment(stage: KafkaStage, actor: NewActor) -> None:
    """The member leaves before and during its first assignment, which the leader delays."""
    with SlowLeader(
        stage.config["bootstrap.servers"], stage.config["group.id"], stage.topic
    ) as leader:
        assert not leader.join()
        leader.assign({})
        blue = actor(stage).subscribe()

        def joined() -> bool:
            others = leader.join()
            if not others:
                leader.assign({}, may_be_late=True)
            return bool(others)

        play(joined, blue, what="the member to have joined")
        pass_time(blue, polls=3)
        begun = time.monotonic()
        blue.member.close(CLOSE_LIMIT_S)
        assert time.monotonic() - begun < QUICK_S


def test_hundreds_of_partitions_are_read_after_rapid_pauses_and_resumes(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(PARTITIONS)
    producer = Producer({"bootstrap.servers": kafka_broker.bootstrap_servers, "linger.ms": 5})
    for number in range(PARTITIONS):
        producer.produce(topic, b"record", partition=number)
    assert producer.flush(120) == 0
    consumer = RebalanceAwareConsumer(
        {
            "bootstrap.servers": kafka_broker.bootstrap_servers,
            "group.id": unique_name("group"),
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
        }
    )
    heard: list[int] = []

    def poll() -> int:
        heard.extend(message.partition() or 0 for message in consumer.poll(0.1))
        return len(heard)

    with consumer:
        consumer.subscribe([topic])
        wait_until(
            lambda: poll() >= 0 and len(consumer.assignment()) == PARTITIONS,
            timeout_s=120,
            what="the assignment",
            interval_s=0,
        )
        for _ in range(2):
            consumer.pause(consumer.assignment())
            poll()
            consumer.resume(consumer.assignment())
        wait_until(
            lambda: poll() == PARTITIONS,
            timeout_s=120,
            what=lambda: f"a record of each partition, not {len(heard)}",
            interval_s=0,
        )
    assert sorted(heard) == list(range(PARTITIONS))


@IN_BOTH
def test_hold_outlives_deleted_and_newly_matching_topics(
    stage: KafkaStage, actor: NewActor, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    prefix = unique_name("family")
    kept, deleted = (
        kafka_topic(4, prefix=f"{prefix}-kept"),
        kafka_topic(2, prefix=f"{prefix}-deleted"),
    )
    stage.discovery_interval_s = 0.5
    blue, green = actor(stage), actor(stage)
    blue.member.subscribe(re.compile(f"{prefix}-.*"))
    play(lambda: len(blue.owns) == 6, blue, what="the first member to own both topics")
    green.member.subscribe(re.compile(f"{prefix}-.*"))
    play(lambda: blue.member.held, blue, green, what="a revoke request")
    held = blue.member.held
    admin = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
    admin.delete_topics([deleted])[deleted].result(120)
    begun = kafka_topic(2, prefix=f"{prefix}-new")
    pass_time(blue, green, polls=12)  # two looks for new topics would fit in
    assert blue.member.held == held
    remaining = [tp for tp in held if tp.topic == kept]
    assert blue.member.commit(dict.fromkeys(remaining, OffsetAndMetadata(1))).failed == {}
    wanted = sorted(
        [TopicPartition(kept, number) for number in range(4)]
        + [TopicPartition(begun, number) for number in range(2)]
    )
    play(
        lambda: shared(blue, green, wanted=wanted),
        blue,
        green,
        what="every partition that exists to have one owner",
    )
    assert not blue.partitions_of(PartitionsLost)


@pytest.mark.parametrize("group", ["consumer", "classic"], indirect=True)
def test_prefetched_records_of_lost_partitions_are_not_returned(
    group: Readers, kafka_broker: KafkaCluster
) -> None:
    group.produce(500)
    blue = group.reader()
    protocol = "consumer" if group.protocol == "consumer" else "classic"

    def poll() -> list[int | None]:
        return [message.offset() for message in blue.consumer.poll(0.1, max_records=1)]

    def lost() -> bool:
        records = poll()
        gone = blue.consumer.get_lost_partitions()
        if gone:
            assert records == []
        return bool(gone)

    wait_until(
        lambda: poll() == [2],
        timeout_s=120,
        what="a third record, with about 2,000 behind it",
        interval_s=0,
    )
    evict(
        kafka_broker.bootstrap_servers, group.config["group.id"], blue.consumer.member_id, protocol
    )
    wait_until(lost, timeout_s=120, what="the loss", interval_s=0)
    assert wait_until(poll, timeout_s=120, what="a record of the next ownership", interval_s=0) == [
        0
    ]


@pytest.mark.parametrize("group", ["consumer", "classic"], indirect=True)
def test_holds_and_pauses_affect_only_their_own_partitions(group: Readers) -> None:
    """Covers held and retained partitions, each paused by the user or not."""
    group.produce(50)
    blue = group.reader(CommitOnRevoke())
    group.play(lambda: blue.count == 200, blue, what="the first records")
    green = group.reader(CommitOnRevoke())
    held: list[TopicPartition] = []

    def hold() -> bool:
        asked_for = blue.consumer.get_to_be_revoked_partitions()
        blue.consumer.delay_revoke(asked_for)
        held[:] = sorted(asked_for) or held
        return bool(held)

    group.play(hold, blue, green, what="a revoke request")
    paused_held, other_held = held
    paused_retained, other_retained = sorted(blue.consumer.assignment() - set(held))

    def read() -> list[int]:
        return [
            len(blue.offsets[each.partition])
            for each in (paused_held, other_held, paused_retained, other_retained)
        ]

    blue.consumer.pause([paused_held, paused_retained])
    blue.consumer.resume([other_held])
    group.produce(50)
    group.play(
        lambda: hold() and read()[3] == 100,
        blue,
        green,
        what="the records of the partition that is neither held nor paused",
    )
    blue.poll()
    assert read() == [50, 50, 50, 100]
    group.play(
        lambda: green.count == 100, green, blue, what="the next owner to read the held partitions"
    )
    green.consumer.close()
    group.produce(50)
    group.play(
        lambda: read()[1] == 100 and read()[3] == 150,
        blue,
        what="the held partitions to return and to be read again",
    )
    blue.poll()
    assert read() == [50, 100, 50, 150]
    assert blue.consumer.paused() == {paused_held, paused_retained}
    blue.consumer.resume([paused_held, paused_retained])
    group.play(
        lambda: read() == [100, 100, 150, 150], blue, what="the paused partitions to be read again"
    )


class BeginAndPause(CommitOnRevoke):
    """Says where each partition begins, and pauses it at once."""

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Seek in partition 0, and start the others at their committed offsets, if any."""
        consumer.seek(min(partitions), 60)
        consumer.pause(partitions)


@pytest.mark.parametrize("group", ["consumer"], indirect=True)
def test_partition_paused_at_assignment_resumes_at_its_start_position(
    group: Readers,
) -> None:
    group.produce(100)
    with group.reader().consumer as before:
        wait_until(lambda: before.poll(0.1), timeout_s=120, what="an assignment", interval_s=0)
        before.commit_sync({TopicPartition(group.topic, 1): OffsetAndMetadata(30)})
    blue = group.reader(BeginAndPause())
    group.play(lambda: len(blue.consumer.paused()) == 4, blue, what="the assignment")
    for _ in range(5):
        blue.poll()
    assert blue.count == 0
    blue.consumer.resume(blue.consumer.paused())
    group.play(lambda: blue.count == 310, blue, what="the rest of each partition")
    assert [offsets[0] for offsets in blue.offsets.values()] == [60, 30, 0, 0]
