"""Loops without delayed revokes, and commits in the middle of a rebalance, on a real broker."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import BrokerError, RebalanceInProgressError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from tests.kafka.leader import SlowLeader
from tests.kafka.readers import CommitOnRevoke, Readers

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker


@pytest.mark.parametrize(
    ("protocol", "same_poll"),
    [("consumer", False), ("consumer", True), ("classic", True), ("range", False), ("range", True)],
)
def test_plain_loop_reads_each_record_once_with_both_completions(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory, protocol: str, *, same_poll: bool
) -> None:
    """KIP-983: "existing users need no changes"."""
    with Readers(kafka_broker, kafka_topic(4), protocol) as group:
        group.produce(100)
        blue = group.reader(CommitOnRevoke(), same_poll=same_poll)
        group.play(lambda: blue.count == 400, blue, what="the records")
        green = group.reader(CommitOnRevoke(), same_poll=same_poll)

        def shared() -> bool:
            for reader in (blue, green):
                with suppress(RebalanceInProgressError):
                    reader.consumer.commit_sync()
            return len(green.consumer.assignment()) == len(blue.consumer.assignment()) == 2

        group.play(shared, blue, green, what="both to have a share")
        group.produce(100)
        group.play(lambda: blue.count + green.count == 800, blue, green, what="all records")
        for number in range(4):
            assert blue.offsets[number] + green.offsets[number] == list(range(200))


@pytest.mark.parametrize("group", ["consumer", "classic", "range"], indirect=True)
def test_consumer_dropped_without_close_leaves_its_group(group: Readers) -> None:
    """A re-run notebook cell would otherwise keep its partitions for `max.poll.interval.ms`."""

    def join_and_drop() -> None:
        reader = group.reader()
        group.play(lambda: len(reader.consumer.assignment()) == 4, reader, what="the assignment")
        group.readers.clear()

    join_and_drop()
    heir = group.reader()
    group.play(lambda: len(heir.consumer.assignment()) == 4, heir, what="the partitions")


def test_commit_during_a_join_is_refused_and_accepted_later(
    kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> None:
    """KIP-429: "you still own the partition, so keep processing and try again".

    The broker reads nothing from a member whose join it has not answered.
    """
    outcomes: list[type[BrokerError] | None] = []
    with (
        Readers(kafka_broker, kafka_topic(4), "classic") as group,
        SlowLeader(kafka_broker.bootstrap_servers, group.config["group.id"], group.topic) as leader,
    ):
        assert not leader.join()
        leader.assign({})
        blue = group.reader()

        def joined() -> bool:
            others = leader.join()
            leader.assign({member: [0, 1, 2, 3] for member in others})
            return bool(others)

        group.play(joined, blue, what="the second member to join")
        group.play(
            lambda: len(blue.consumer.assignment()) == 4, blue, what="everything to be assigned"
        )
        everything, green = blue.consumer.assignment(), group.reader()
        sent = 0

        def commit() -> bool:
            nonlocal sent
            blue.consumer.commit_async(
                {blue.tp(0): OffsetAndMetadata(5)},
                lambda _, error: outcomes.append(type(error) if error else None),
            )
            sent += 1
            return sent - len(outcomes) > 10

        group.play(
            commit,
            blue,
            green,
            what="commits that are not answered, since the third member has joined",
        )
        others = leader.join()
        while len(others) < 2:  # a slow broker gets the join of the third member later
            leader.assign({blue.consumer.member_id: [0, 1, 2, 3]}, may_be_late=True)
            others = leader.join()
        assert blue.consumer.member_id in others
        group.play(
            lambda: RebalanceInProgressError in outcomes,
            blue,
            green,
            what="the commit to be refused",
        )
        assert blue.consumer.assignment() == everything
        leader.assign({blue.consumer.member_id: [0, 1, 2, 3]})
        outcomes.clear()
        group.play(
            lambda: outcomes[-1:] == [None], blue, green, what="the same commit to be accepted"
        )
        assert blue.consumer.assignment() == everything
        assert set(outcomes) <= {RebalanceInProgressError, None}
