"""Holds on a real broker that last for several probes in both protocols, and survive them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as ClientPartition

from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.testing.fixtures import unique_name
from tests.kafka.readers import CommitOnRevoke, Reader, Readers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

pytestmark = [
    pytest.mark.broker,
    pytest.mark.parametrize("group", ["consumer", "classic"], indirect=True),
]

PROBES = 4


class Reads:
    """Counts the reads of a member's probes, and runs a function of the test after each."""

    def __init__(self, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
        member: Any = reader.consumer._state.member
        self.count = 0
        self.then: Callable[[], None] = lambda: None
        ask = member._session.commits.look_up

        def look_up(partitions: Collection[TopicPartition], timeout_s: float) -> object:
            found = ask(partitions, timeout_s)
            self.count += 1
            self.then()
            return found

        monkeypatch.setattr(member._session.commits, "look_up", look_up)


def hold(group: Readers, blue: Reader, green: Reader) -> frozenset[TopicPartition]:
    group.play(blue.consumer.get_to_be_revoked_partitions, blue, green, what="a revoke request")
    return blue.consumer.get_to_be_revoked_partitions()


def outlast(group: Readers, blue: Reader, green: Reader, reads: Reads) -> None:
    held = blue.consumer.get_to_be_revoked_partitions()
    assert blue.consumer.delay_revoke(held)

    def probed() -> bool:
        assert not blue.consumer.get_lost_partitions()
        assert blue.consumer.delay_revoke(held)
        return reads.count >= PROBES

    group.play(probed, blue, green, what="probes")
    blue.poll()
    assert not blue.consumer.get_lost_partitions()
    assert blue.consumer.assignment() >= held


def test_hold_ignores_a_commit_of_an_owner_in_between(
    group: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    blue = group.reader(CommitOnRevoke())
    group.produce(10)
    group.play(lambda: blue.count == 40, blue, what="all records")
    blue.consumer.commit_sync()
    green = group.reader(CommitOnRevoke())
    group.play(lambda: len(green.consumer.assignment()) == 2, blue, green, what="a share")
    group.produce(10)
    group.play(lambda: green.count == 20, blue, green, what="records for the other owner")
    green.consumer.close()
    group.play(lambda: len(blue.consumer.assignment()) == 4, blue, what="everything to be back")
    later = group.reader(CommitOnRevoke())
    hold(group, blue, later)
    outlast(group, blue, later, Reads(blue, monkeypatch))


class Transactions:
    """A producer that commits the positions of a reader's partitions in transactions."""

    def __init__(self, brokers: str, reader: Reader) -> None:
        config = {"bootstrap.servers": brokers, "transactional.id": unique_name("transactions")}
        self._producer = Producer(config)
        self._producer.init_transactions(120)
        metadata: Any = reader.consumer.group_metadata()
        self._metadata = metadata.client

    def commit(self, offsets: dict[TopicPartition, int]) -> None:
        theirs = [ClientPartition(tp.topic, tp.partition, at) for tp, at in offsets.items()]
        self._producer.begin_transaction()
        self._producer.send_offsets_to_transaction(theirs, self._metadata, 120)
        self._producer.commit_transaction(120)


def test_hold_survives_transactional_commits(
    group: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    blue = group.reader()
    group.produce(10)
    group.play(lambda: blue.count == 40, blue, what="all records")
    blue.consumer.commit_sync()
    green = group.reader()
    held = hold(group, blue, green)
    retained = blue.consumer.assignment() - held
    transactions = Transactions(group.config["bootstrap.servers"], blue)
    reads = Reads(blue, monkeypatch)
    reached = dict.fromkeys(retained | held, 0)

    def commit() -> None:
        reached.update({tp: at + 2 for tp, at in reached.items()})
        transactions.commit(reached)

    reads.then = commit
    outlast(group, blue, green, reads)
    reads.then = lambda: None
    committed = blue.consumer.committed(list(reached))
    assert committed == {tp: OffsetAndMetadata(at) for tp, at in reached.items()}
