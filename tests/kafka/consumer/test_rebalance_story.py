"""One story of a group on a real broker, for each protocol, checked against the proposals.

Blue reads four partitions; it seeks and pauses in its callback. Green joins: blue delays the
revoke, commits and releases, and its listener fails. Then the broker fences blue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance.core.model.errors import (
    BrokerError,
    IllegalStateError,
    PartitionLostError,
    UnsupportedOperationError,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.listener import RebalanceListener
from tests.kafka.eviction import evict
from tests.kafka.readers import Reader, Readers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer
    from dagster_rebalance.testing.broker import KafkaCluster

pytestmark = pytest.mark.broker

EACH = 100
SOUGHT = 30
COMMITTED_IN_ASSIGNED = OffsetAndMetadata(7, "in the callback of the assignment")


@dataclass
class Moment:
    """Partitions and assignment in a callback."""

    partitions: set[TopicPartition]
    assignment: set[TopicPartition]
    refused: list[type[Exception]] = field(default_factory=list)


class StoryListener(RebalanceListener):
    """Listener that calls the allowed operations in each callback and records the results."""

    def __init__(self, *, fails_on_revoke: bool = False) -> None:
        self.assigned: list[Moment] = []
        self.revoked: list[Moment] = []
        self.lost: list[Moment] = []
        self.order: list[str] = []
        self.answers: dict[str, Any] = {}
        self.fails_on_revoke = fails_on_revoke

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        self._note("assigned", partitions, consumer)
        if partitions and not self.answers:
            self._use_everything(sorted(partitions), consumer)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        self._note("revoked", partitions, consumer)
        consumer.commit_sync(
            {
                tp: OffsetAndMetadata(consumer.position(tp), "in the callback of the revoke")
                for tp in partitions
            }
        )
        if self.fails_on_revoke:
            msg = "a bug of the user's"
            raise ValueError(msg)

    def on_partitions_lost(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        moment = self._note("lost", partitions, consumer)
        tp = min(partitions)
        for attempt in (
            lambda: consumer.commit_sync({tp: OffsetAndMetadata(1)}),
            lambda: consumer.position(tp),
            lambda: consumer.seek(tp, 0),
        ):
            with pytest.raises((BrokerError, IllegalStateError)) as caught:
                attempt()
            moment.refused.append(caught.type)
        consumer.commit_sync()

    def _note(
        self, what: str, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> Moment:
        moment = Moment(set(partitions), set(consumer.assignment()))
        getattr(self, what).append(moment)
        self.order.append(what)
        return moment

    def _use_everything(
        self, partitions: list[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        p0, p1, p2, p3 = partitions
        answers = self.answers
        answers["position before a seek"] = consumer.position(p1)
        consumer.seek(p1, SOUGHT)
        consumer.seek(p2, OffsetAndMetadata(SOUGHT, "where it was"))
        answers["position after a seek"] = [consumer.position(p1), consumer.position(p2)]
        consumer.seek_to_end([p3])
        answers["position at the end"] = consumer.position(p3)
        consumer.seek_to_beginning([p3])
        answers["position at the beginning"] = consumer.position(p3)
        consumer.pause([p0, p3])
        consumer.resume([p0])
        answers["paused"] = consumer.paused()
        answers["beginning_offsets"] = consumer.beginning_offsets(partitions)
        answers["end_offsets"] = consumer.end_offsets(partitions)
        answers["offsets_for_times"] = [
            found and found.offset
            for found in consumer.offsets_for_times(dict.fromkeys(partitions, 0)).values()
        ]
        answers["partitions_for"] = [info.partition for info in consumer.partitions_for(p0.topic)]
        answers["list_topics"] = p0.topic in consumer.list_topics()
        answers["group_metadata"] = consumer.group_metadata()
        answers["metrics"] = set(consumer.metrics())
        answers["current_lag"] = consumer.current_lag(p0)
        with pytest.raises(UnsupportedOperationError):
            consumer.client_instance_id()
        consumer.commit_sync({p0: COMMITTED_IN_ASSIGNED}, timeout_s=10.0)
        answers["committed"] = consumer.committed([p0, p1])
        consumer.commit_async(
            {p1: COMMITTED_IN_ASSIGNED},
            lambda offsets, error: answers.update({"commit_async": (set(offsets), error)}),
        )


@dataclass
class Story:
    """Results of the story."""

    protocol: str
    everything: frozenset[TopicPartition]
    blue: Reader
    listener: StoryListener
    group_id: str
    read_alone: dict[int, list[int]] = field(default_factory=dict)
    lag_alone: int | None = None
    member_id: str = ""
    requested: frozenset[TopicPartition] = frozenset()
    at_request: Mapping[int, list[int]] = field(default_factory=dict)
    owned_by_green_in_hold: frozenset[TopicPartition] = frozenset()
    delays: list[bool] = field(default_factory=list)
    requested_again: list[frozenset[TopicPartition]] = field(default_factory=list)
    callbacks_in_hold: list[str] = field(default_factory=list)
    after_hold: Mapping[int, list[int]] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    green: dict[int, list[int]] = field(default_factory=dict)
    green_starts: Mapping[TopicPartition, OffsetAndMetadata | None] = field(default_factory=dict)
    paused_in_the_end: frozenset[TopicPartition] = frozenset()
    owned_before_loss: frozenset[TopicPartition] = frozenset()
    lost: frozenset[TopicPartition] = frozenset()
    delay_when_lost: bool = True
    came_back: bool = False

    @property
    def is_eager(self) -> bool:
        return self.protocol == "range"

    @property
    def retained(self) -> frozenset[TopicPartition]:
        return self.everything - self.requested


def snapshot(reader: Reader) -> dict[int, list[int]]:
    return {number: list(offsets) for number, offsets in reader.offsets.items()}


def play(readers: Readers, kafka: KafkaCluster) -> Story:
    readers.produce(EACH)
    listener = StoryListener(fails_on_revoke=True)
    blue = readers.reader(listener)
    everything = frozenset(TopicPartition(readers.topic, number) for number in range(4))
    story = Story(readers.protocol, everything, blue, listener, readers.config["group.id"])
    alone(story, readers)
    requested_and_held(story, readers)
    released(story, readers)
    lost(story, readers, kafka)
    return story


def alone(story: Story, readers: Readers) -> None:
    blue = story.blue
    expected = 3 * EACH - COMMITTED_IN_ASSIGNED.offset - 2 * SOUGHT
    readers.play(
        lambda: blue.count == expected and "commit_async" in story.listener.answers,
        blue,
        what="the records",
    )
    story.read_alone = snapshot(blue)
    story.lag_alone = blue.consumer.current_lag(blue.tp(0))
    story.member_id = blue.consumer.member_id


def requested_and_held(story: Story, readers: Readers) -> None:
    blue, green = story.blue, readers.reader()
    readers.play(blue.consumer.get_to_be_revoked_partitions, blue, green, what="a request")
    story.requested = blue.consumer.get_to_be_revoked_partitions()
    story.at_request = snapshot(blue)
    readers.produce(EACH)
    seen = len(story.listener.order)

    def hold() -> bool:
        story.delays.append(blue.consumer.delay_revoke(story.requested))
        blue.poll()
        story.requested_again.append(blue.consumer.get_to_be_revoked_partitions())
        arrived = all(
            len(blue.offsets[tp.partition]) > len(story.at_request[tp.partition])
            for tp in story.retained - {blue.tp(3)}
        )
        return len(story.delays) > 10 and arrived

    readers.play(hold, green, what="records during the hold")
    story.callbacks_in_hold = story.listener.order[seen:]
    story.owned_by_green_in_hold = green.consumer.assignment()
    story.after_hold = snapshot(blue)


def released(story: Story, readers: Readers) -> None:
    """Blue delays no more; its listener commits, and fails."""
    blue, green = story.blue, readers.readers[1]
    try:
        blue.poll()
    except ValueError as problem:
        story.errors.append(problem)
    story.listener.fails_on_revoke = False
    share = len(story.everything) // 2
    readers.play(
        lambda: len(blue.consumer.assignment()) == len(green.consumer.assignment()) == share,
        blue,
        green,
        what="the new assignment",
    )
    story.green_starts = green.consumer.committed(green.consumer.assignment())
    owned = green.consumer.assignment()
    last = 2 * EACH - 1
    readers.play(
        lambda: all(last in green.offsets[tp.partition] for tp in owned),
        blue,
        green,
        what="the rest of the records",
    )
    story.green = snapshot(green)
    story.paused_in_the_end = blue.consumer.paused()


def lost(story: Story, readers: Readers, kafka: KafkaCluster) -> None:
    blue = story.blue
    story.owned_before_loss = blue.consumer.assignment()
    evict(
        kafka.bootstrap_servers,
        story.group_id,
        blue.consumer.member_id,
        readers.config["group.protocol"],
    )
    readers.play(blue.consumer.get_lost_partitions, blue, what="the loss")
    story.lost = blue.consumer.get_lost_partitions()
    story.delay_when_lost = blue.consumer.delay_revoke(story.lost)
    readers.play(blue.consumer.assignment, blue, readers.readers[1], what="blue to be back")
    story.came_back = True


@pytest.fixture(scope="module", params=["consumer", "classic", "range"])
def story(request: pytest.FixtureRequest, kafka_broker: KafkaCluster) -> Iterator[Story]:
    topic = f"story-{request.param}"
    kafka_broker.create_topic(topic, 4)
    readers = Readers(kafka_broker, topic, request.param)
    try:
        yield play(readers, kafka_broker)
    finally:
        for reader in readers.readers:
            reader.consumer.set_rebalance_listener(None)
        readers.close()


def test_assignment_callback_sees_its_partitions_in_the_assignment(story: Story) -> None:
    first = next(moment for moment in story.listener.assigned if moment.partitions)
    assert first == Moment(set(story.everything), set(story.everything))


def test_seek_in_the_assignment_callback_applies_to_the_first_record(story: Story) -> None:
    """Without a seek, reading starts at the offset that was committed in the callback."""
    assert story.read_alone[0] == list(range(COMMITTED_IN_ASSIGNED.offset, EACH))
    assert story.read_alone[1] == story.read_alone[2] == list(range(SOUGHT, EACH))


def test_pause_in_the_assignment_callback_stays(story: Story) -> None:
    """KAFKA-20385: "the consumer does not automatically resume partitions"."""
    assert story.read_alone[3] == story.after_hold[3] == []
    assert TopicPartition(story.blue.topic, 3) in story.paused_in_the_end


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("position before a seek", 0),
        ("position after a seek", [SOUGHT, SOUGHT]),
        ("position at the end", EACH),
        ("position at the beginning", 0),
        ("offsets_for_times", [0, 0, 0, 0]),
        ("partitions_for", [0, 1, 2, 3]),
        ("list_topics", True),
        ("metrics", {"member", "fetcher"}),
        ("current_lag", None),
    ],
)
def test_operation_answers_in_the_callback(story: Story, operation: str, expected: object) -> None:
    assert story.listener.answers[operation] == expected


def test_operations_on_partitions_answer_in_the_callback(story: Story) -> None:
    answers, tps = story.listener.answers, sorted(story.everything)
    assert answers["paused"] == {tps[3]}
    assert answers["beginning_offsets"] == dict.fromkeys(tps, 0)
    assert answers["end_offsets"] == dict.fromkeys(tps, EACH)
    assert (answers["group_metadata"].group_id, bool(answers["group_metadata"].member_id)) == (
        story.group_id,
        True,
    )
    assert answers["group_metadata"].client is not None


def test_commits_in_the_assignment_callback_are_stored(story: Story) -> None:
    answers, tps = story.listener.answers, sorted(story.everything)
    assert answers["committed"] == {tps[0]: COMMITTED_IN_ASSIGNED, tps[1]: None}
    assert answers["commit_async"] == ({tps[1]}, None)


def test_lag_is_known_after_a_fetch(story: Story) -> None:
    assert story.lag_alone == 0


def test_revoke_is_requested_for_half_of_the_partitions_or_for_all_if_eager(story: Story) -> None:
    assert len(story.requested) == (4 if story.is_eager else 2)


def test_delay_lasts_poll_after_poll_and_releases_nothing(story: Story) -> None:
    """KIP-983: the partitions are on the list of the next poll again after each poll."""
    assert len(story.delays) > 10
    assert all(story.delays)
    assert set(story.requested_again) == {story.requested}
    assert not story.owned_by_green_in_hold


def test_no_record_of_a_partition_is_returned_after_its_revoke_request(story: Story) -> None:
    """KIP-983: "Consumer.poll should never return any records from revoked partitions"."""
    for tp in story.requested:
        assert story.after_hold[tp.partition] == story.at_request[tp.partition]


def test_retained_partitions_are_read_during_the_hold(story: Story) -> None:
    """KIP-429: they are not revoked at all. An eager member has none."""
    assert len(story.retained) == (0 if story.is_eager else 2)
    for tp in story.retained - {story.blue.tp(3)}:
        assert story.after_hold[tp.partition][-1] == 2 * EACH - 1
    assert not any(moment.partitions & story.retained for moment in story.listener.revoked[:1])


def test_revoke_callback_runs_at_completion_with_the_partitions_assigned(story: Story) -> None:
    assert story.callbacks_in_hold == []
    assert story.listener.revoked[0] == Moment(set(story.requested), set(story.everything))


def test_exception_of_the_listener_reaches_the_caller_of_poll_once(story: Story) -> None:
    """KAFKA-20385: "The exception propagates to the poll() caller"."""
    assert [str(problem) for problem in story.errors] == ["a bug of the user's"]


def test_rebalance_completes_after_an_exception_of_a_callback(story: Story) -> None:
    """KAFKA-20385: "completes regardless", "onPartitionsAssigned is still called"."""
    assert len(story.owned_before_loss) == 2
    after = story.listener.order[story.listener.order.index("revoked") + 1 :]
    assert after.count("lost") == 1
    assert "assigned" in after


def test_next_owner_starts_at_the_offset_committed_in_the_revoke_callback(story: Story) -> None:
    assert len(story.green_starts) == 2
    for tp, committed in story.green_starts.items():
        assert committed is not None
        assert committed.metadata == "in the callback of the revoke"
        read = story.after_hold[tp.partition]
        assert committed.offset == (read[-1] + 1 if read else 0)
        assert story.green[tp.partition] == list(range(committed.offset, 2 * EACH))


def test_loss_includes_all_partitions_of_the_member(story: Story) -> None:
    """KAFKA-20385: "all partitions that were previously assigned to the consumer"."""
    assert story.lost == story.owned_before_loss
    assert [moment.partitions for moment in story.listener.lost] == [set(story.lost)]


def test_lost_partitions_are_unassigned_before_the_callback(story: Story) -> None:
    """Commits, position and seek for them are refused."""
    (moment,) = story.listener.lost
    assert moment.assignment == set()
    assert moment.refused == [PartitionLostError, IllegalStateError, IllegalStateError]


def test_lost_partition_cannot_be_delayed(story: Story) -> None:
    """KIP-983: "Once the partition is lost, the delay request is denied"."""
    assert not story.delay_when_lost


def test_member_that_lost_all_partitions_rejoins(story: Story) -> None:
    """KAFKA-20385: "the consumer remains in a usable state"."""
    assert story.came_back
