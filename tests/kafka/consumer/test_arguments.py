"""Arguments of operations: types of confluent-kafka are accepted, wrong values are refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.group_ports import OffsetAndTimestamp
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.consumers import LATEST, P0, P1, P2, P3, Listener
from tests.kafka.consumers import consumer_of as new_consumer
from tests.kafka.fake_log import fake_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer


def client(
    number: int,
    offset: int = confluent_kafka.OFFSET_INVALID,
    **more: Any,  # noqa: ANN401
) -> confluent_kafka.TopicPartition:
    return confluent_kafka.TopicPartition("orders", number, offset, **more)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    """A group with records to read."""
    group = FakeGroup({"orders": 4})
    fake_log(group, monkeypatch, dict.fromkeys(range(4), 100))
    return group


def consumer_of(group: FakeGroup) -> RebalanceAwareConsumer:
    """A consumer that reads, and has joined the group."""
    consumer = new_consumer(group, fetch=True)
    consumer.poll(0, 1)
    return consumer


def test_delay_revoke_accepts_partitions_of_confluent_kafka(group: FakeGroup) -> None:
    blue, green = consumer_of(group), consumer_of(group)
    blue.poll(0.1)
    assert blue.get_to_be_revoked_partitions() == {P2, P3}
    assert blue.delay_revoke([client(2), client(3)])
    blue.poll(0)
    assert blue.get_to_be_revoked_partitions() == {P2, P3}
    assert not green.assignment()
    assert not blue.delay_revoke([client(2), client(9)])


def test_pause_accepts_partitions_of_confluent_kafka(group: FakeGroup) -> None:
    consumer = consumer_of(group)
    consumer.pause([client(0), P1])
    assert consumer.paused() == {P0, P1}
    assert {record.partition() for record in consumer.poll(0.1)} == {2, 3}
    consumer.resume(tp for tp in [client(1)])
    assert consumer.paused() == {P0}


@pytest.mark.parametrize(
    ("offset", "target"),
    [
        (client(1, 70), None),
        (client(1), 70),
        (P1, 70),
        (P1, OffsetAndMetadata(70)),
        (client(1, 5), 70),
    ],
)
def test_seek_accepts_each_form_of_an_offset(
    group: FakeGroup, offset: TopicPartition, target: int | None
) -> None:
    consumer = consumer_of(group)
    consumer.seek(offset, target) if target is not None else consumer.seek(offset)
    assert consumer.position(P1) == consumer.position(client(1)) == 70


@pytest.mark.parametrize("commit", ["commit_sync", "commit_async", "commit_offsets"])
@pytest.mark.parametrize(
    "offsets",
    [
        {P0: OffsetAndMetadata(5, "mine", 3)},
        {client(0): OffsetAndMetadata(5, "mine", 3)},
        [client(0, 5, metadata="mine", leader_epoch=3)],
        {P0: client(0, 5, metadata="mine", leader_epoch=3)},
    ],
)
def test_commit_accepts_each_form_of_offsets(group: FakeGroup, commit: str, offsets: Any) -> None:  # noqa: ANN401
    consumer = consumer_of(group)
    getattr(consumer, commit)(offsets)
    consumer.poll(0)
    assert group.committed == {P0: OffsetAndMetadata(5, "mine", 3)}
    assert consumer.committed([client(0)]) == group.committed


def test_queries_accept_partitions_of_confluent_kafka(group: FakeGroup) -> None:
    consumer = consumer_of(group)
    group.produce(P0, 3, timestamp=50)
    assert consumer.beginning_offsets([client(0)]) == {P0: 0}
    assert consumer.end_offsets([client(0)]) == {P0: 103}
    assert consumer.offsets_for_times([client(0, 40)]) == {P0: OffsetAndTimestamp(100, 50)}
    assert consumer.offsets_for_times({client(0): 40}) == {P0: OffsetAndTimestamp(100, 50)}
    consumer.seek_to_beginning([client(0)])
    consumer.seek_to_end([client(1)])


def test_reading_starts_at_the_position_returned_to_the_assignment_callback(
    group: FakeGroup,
) -> None:
    """The log grows between the look-up and the first fetch."""
    positions: list[int] = []

    def look_up(_partitions: object, view: RebalanceConsumer) -> None:
        positions.append(view.position(P0))
        group.produce(P0, 10)

    consumer = new_consumer(group, config=LATEST, fetch=True)
    consumer.set_rebalance_listener(Listener(assigned=look_up))
    read = [record.offset() for record in consumer.poll(0) if record.partition() == 0]
    assert positions == [100]
    assert read == list(range(100, 110))


WRONG: list[tuple[Callable[[RebalanceAwareConsumer], object], type[Exception], str]] = [
    (lambda c: c.delay_revoke(P0), TypeError, "delay_revoke expects a collection of partitions"),  # type: ignore[arg-type]
    (lambda c: c.delay_revoke([("orders", 0)]), TypeError, "delay_revoke expects a TopicPartition"),  # type: ignore[list-item]
    (lambda c: c.pause("orders"), TypeError, "pause expects a collection of partitions"),  # type: ignore[arg-type]
    (lambda c: c.resume(["orders"]), TypeError, "resume expects a TopicPartition"),  # type: ignore[list-item]
    (lambda c: c.seek("orders", 1), TypeError, "seek expects a TopicPartition"),  # type: ignore[arg-type]
    (lambda c: c.seek(P0), TypeError, "seek expects an offset"),
    (lambda c: c.seek(P0, "5"), TypeError, "seek expects an offset"),  # type: ignore[arg-type]
    (lambda c: c.seek(P0, -5), IllegalStateError, "to -5: an offset is a number from 0"),
    (
        lambda c: c.seek(client(0, confluent_kafka.OFFSET_END)),
        IllegalStateError,
        "use seek_to_beginning or seek_to_end",
    ),
    (
        lambda c: c.commit_sync({P0: 5}),  # type: ignore[arg-type]
        TypeError,
        r"commit_sync expects OffsetAndMetadata\(next_offset\)",
    ),
    (lambda c: c.commit_async({P0: 5}), TypeError, "commit_async expects OffsetAndMetadata"),  # type: ignore[arg-type]
    (lambda c: c.commit_sync({P0}), TypeError, "commit_sync expects a mapping"),  # type: ignore[arg-type]
    (lambda c: c.commit_sync({"orders": OffsetAndMetadata(5)}), TypeError, "a TopicPartition"),  # type: ignore[arg-type]
    (lambda c: c.commit_sync({P0: OffsetAndMetadata("5")}), TypeError, "a whole number as offset"),  # type: ignore[arg-type]
    (lambda c: c.commit_sync({P0: OffsetAndMetadata(-1)}), ValueError, "-1 is not an offset"),
    (lambda c: c.commit_sync({P0: OffsetAndMetadata(2**70)}), ValueError, "is not an offset"),
    (
        lambda c: c.commit_sync({P0: OffsetAndMetadata(5, b"x")}),  # type: ignore[arg-type]
        TypeError,
        "a text as metadata",
    ),
    (
        lambda c: c.commit_sync({P0: OffsetAndMetadata(5, leader_epoch="1")}),  # type: ignore[arg-type]
        TypeError,
        "a whole number as leader_epoch",
    ),
    (
        lambda c: c.commit_async({P0: OffsetAndMetadata(5, leader_epoch=2**40)}),
        ValueError,
        "commit_async: 1099511627776 is not a leader epoch",
    ),
    (
        lambda c: c.commit_sync({P0: OffsetAndMetadata(5, leader_epoch=-2)}),
        ValueError,
        "-2 is not a leader epoch",
    ),
    (lambda c: c.commit_sync([client(0)]), ValueError, "cannot be committed; pass the next offset"),
    (lambda c: c.offsets_for_times({P0: 0.5}), TypeError, "a time in whole milliseconds"),  # type: ignore[arg-type]
    (lambda c: c.offsets_for_times([P0]), TypeError, "a mapping of partitions to milliseconds"),  # type: ignore[list-item]
    (lambda c: c.subscribe([""]), ValueError, "not a valid topic name"),
    (lambda c: c.subscribe(["^x.*"]), ValueError, re.escape("re.compile('x.*')")),
    (lambda c: c.subscribe([5]), TypeError, "names of topics"),  # type: ignore[list-item]
    (lambda c: c.poll(0, 0), ValueError, "max_records must be at least 1"),
    (lambda c: c.poll(0, timeout=1), TypeError, "not both"),
    (lambda c: c.poll("1"), TypeError, "a number of seconds"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "kind", "message"), WRONG)
def test_wrong_value_is_refused_and_changes_nothing(
    group: FakeGroup,
    call: Callable[[RebalanceAwareConsumer], object],
    kind: type[Exception],
    message: str,
) -> None:
    consumer = consumer_of(group)
    with pytest.raises(kind, match=message):
        call(consumer)
    assert not group.committed
    consumer.commit_sync({P1: OffsetAndMetadata(2)})
    assert group.committed == {P1: OffsetAndMetadata(2)}
    assert consumer.poll(0.1)


def test_max_records_above_the_limit_of_the_client_is_allowed(group: FakeGroup) -> None:
    consumer = new_consumer(group, fetch=True)
    assert len(consumer.poll(0.1, 2_000_000)) == 400


def test_asyncio_consumer_has_the_methods_of_the_consumer() -> None:
    """Except `cluster`, whose queries block."""
    public = {name for name in dir(RebalanceAwareConsumer) if not name.startswith("_")} - {
        "cluster"
    }
    assert {name for name in dir(AsyncRebalanceAwareConsumer) if not name.startswith("_")} == public
