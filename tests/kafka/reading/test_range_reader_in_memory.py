"""What a read makes of what its client tells, in orders that a broker seldom shows."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, Message, ThrottleEvent

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.kafka.client.errors import END_OF_PARTITION, OFFSET_RESET_FORBIDDEN
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.queries import Cluster
from dagster_rebalance.kafka.reading.range_reader import RangeReader

if TYPE_CHECKING:
    from collections.abc import Collection

CONFIG = {"bootstrap.servers": "memory:1", "group.id": "etl"}


def record(partition: int, offset: int) -> Message:
    """A record."""
    return Message(topic="orders", partition=partition, offset=offset)


def end(partition: int, offset: int) -> Message:
    """The end of a log."""
    return Message(
        topic="orders", partition=partition, offset=offset, error=KafkaError(END_OF_PARTITION)
    )


def trouble(code: int, text: str = "") -> Message:
    """An error of partition 0."""
    return Message(topic="orders", partition=0, error=KafkaError(code, text))


class ScriptedClient:
    """A client that returns given batches, and then nothing more."""

    def __init__(self, batches: list[list[Message]]) -> None:
        self.batches = deque(batches)
        self.assigned: list[confluent_kafka.TopicPartition] = []
        self.begun: list[int] = []
        self.is_closed = False

    def consume(self, _most: int, timeout: float) -> list[Message]:
        """The next batch, to who waits."""
        return self.batches.popleft() if timeout and self.batches else []

    def incremental_assign(self, partitions: list[confluent_kafka.TopicPartition]) -> None:
        """Note it."""
        self.assigned += partitions
        self.begun += [tp.offset for tp in partitions]

    def incremental_unassign(self, partitions: list[confluent_kafka.TopicPartition]) -> None:
        """Note it."""
        self.assigned = [tp for tp in self.assigned if tp not in partitions]

    def assignment(self) -> list[confluent_kafka.TopicPartition]:
        """What is assigned."""
        return list(self.assigned)

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


class Clock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        self.now += 1.0
        return self.now


class Script(Protocol):
    """Makes a reader whose client returns given batches; each log reaches from 0 to 100."""

    def __call__(self, *batches: list[Message]) -> tuple[RangeReader, ScriptedClient]:
        """Make one."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """No broker is asked."""

    def ends(_: Cluster, asked: Collection[TopicPartition], __: float) -> dict[TopicPartition, int]:
        return dict.fromkeys(asked, 100)

    def starts(
        _: Cluster, asked: Collection[TopicPartition], __: float
    ) -> dict[TopicPartition, int]:
        return dict.fromkeys(asked, 0)

    monkeypatch.setattr(Cluster, "high_watermarks", ends)
    monkeypatch.setattr(Cluster, "beginning_offsets", starts)
    monkeypatch.setattr(Cluster, "end_offsets", ends)

    def make(*batches: list[Message]) -> tuple[RangeReader, ScriptedClient]:
        client = ScriptedClient(list(batches))
        monkeypatch.setattr(
            "dagster_rebalance.kafka.reading.range_reader.confluent_kafka.Consumer",
            lambda _: client,
        )
        return RangeReader(validated(CONFIG, hold_limit_s=10), Clock()), client

    return make


def offsets(reader: RangeReader, *ranges: OffsetRange) -> list[tuple[int | None, int | None]]:
    """Partition and offset of what is read."""
    return [(message.partition(), message.offset()) for message in reader.read(ranges, 60.0)]


BOTH = OffsetRange("orders", 0, 0, 3), OffsetRange("orders", 1, 0, 3)


def test_the_end_of_a_log_is_heard_after_the_records_before_it(script: Script) -> None:
    """Both come in one batch: its records must not count as behind the end."""
    reader, client = script([record(0, 0), record(0, 1), end(0, 3), record(1, 1), end(1, 3)])
    assert offsets(reader, *BOTH) == [(0, 0), (0, 1), (1, 1)]
    assert not client.assigned
    assert not client.is_closed


def test_records_behind_a_range_end_it_and_are_left_out(script: Script) -> None:
    """Those of other partitions in the same batch are not."""
    reader, _ = script([record(0, 2), record(1, 0), record(0, 7)], [record(1, 9)])
    assert offsets(reader, *BOTH) == [(0, 2), (1, 0)]


def test_troubles_that_pass_do_not_keep_a_read_from_its_time_out(script: Script) -> None:
    """The last one is the reason."""
    away = [trouble(KafkaError._TRANSPORT, "connection refused")]
    reader, client = script([record(0, 0)], *[away] * 1000)
    with pytest.raises(
        BrokerError, match=r"orders-0 at offset 1 could be read for 60 s.*refused"
    ) as caught:
        offsets(reader, OffsetRange("orders", 0, 0, 3))
    assert caught.value.retriable
    assert client.is_closed


def test_a_transaction_is_the_reason_only_where_a_log_can_be_read_no_further(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it would be a guess."""
    reader, _ = script([record(0, 0)])
    with pytest.raises(BrokerError, match="the client reports no reason") as caught:
        offsets(reader, *BOTH)
    assert "transaction" not in str(caught.value)
    monkeypatch.setattr(Cluster, "end_offsets", lambda _, asked, __: dict.fromkeys(asked, 1))
    reader, _ = script([record(0, 0), record(1, 2)])
    with pytest.raises(
        BrokerError, match=r"orders-0 at offset 1 .*transaction is open: orders-0 .* to offset 1$"
    ):
        offsets(reader, *BOTH)


def test_a_batch_behind_the_range_that_cannot_be_read_is_no_trouble_of_the_range(
    script: Script,
) -> None:
    """The leader answers with more than was asked for."""
    damaged = trouble(KafkaError._BAD_MSG, "failed CRC32C check")
    reader, _ = script([record(0, 0), record(0, 2), damaged])
    assert offsets(reader, OffsetRange("orders", 0, 0, 3)) == [(0, 0), (0, 2)]


def test_what_a_client_reports_in_its_callbacks_is_the_reason_of_a_silence(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callbacks of the user hear of it, too."""
    reader, client = script([record(0, 0)])
    heard: list[object] = []
    config = {**CONFIG, "throttle_cb": heard.append, "error_cb": heard.append}
    made: list[dict[str, Any]] = []

    def make(settings: dict[str, Any]) -> ScriptedClient:
        made.append(settings)
        return client

    monkeypatch.setattr(
        "dagster_rebalance.kafka.reading.range_reader.confluent_kafka.Consumer", make
    )
    reader = RangeReader(validated(config, hold_limit_s=10), Clock())
    records = reader.read([OffsetRange("orders", 0, 0, 3)], 60.0)
    assert next(records).offset() == 0
    throttled = ThrottleEvent("broker", 1, 11.0)
    made[0]["throttle_cb"](throttled)
    with pytest.raises(BrokerError, match="the broker throttles this client for 11 s"):
        next(records)
    too_large = KafkaError(KafkaError._BAD_MSG, "increase receive.message.max.bytes")
    client.batches.append([record(0, 0)])
    records = reader.read([OffsetRange("orders", 0, 0, 3)], 60.0)
    next(records)
    made[1]["error_cb"](too_large)
    made[1]["error_cb"](KafkaError(KafkaError._ALL_BROKERS_DOWN))
    with pytest.raises(BrokerError, match=r"increase receive.*orders-0 at offset 1"):
        next(records)
    assert heard == [throttled, too_large, KafkaError(KafkaError._ALL_BROKERS_DOWN)]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "grant the principal the ACL READ"),
        (OFFSET_RESET_FORBIDDEN, "no offset reset"),
    ],
)
def test_what_does_not_pass_is_raised_at_once(script: Script, code: int, said: str) -> None:
    """Also when the bounds of the log know no reason."""
    reader, client = script([trouble(code, "no offset reset")])
    with pytest.raises(BrokerError, match=said):
        offsets(reader, OffsetRange("orders", 0, 0, 3))
    assert client.is_closed


def test_a_log_that_was_cut_off_and_has_grown_again_is_not_read_on(script: Script) -> None:
    """Its bounds look as if nothing had happened: the leader's answer counts."""
    cut_off = trouble(OFFSET_RESET_FORBIDDEN, f"{KafkaError(KafkaError._LOG_TRUNCATION).str()}: x")
    reader, _ = script([record(0, 0), cut_off])
    with pytest.raises(
        BrokerError, match=r"reading records failed for orders-0.*truncat.*dagster-rebalance reset"
    ) as caught:
        offsets(reader, OffsetRange("orders", 0, 0, 3))
    assert "auto.offset.reset" not in str(caught.value), "a batch can neither set it nor seek"
    assert not caught.value.retriable


def test_an_offset_of_an_earlier_read_that_is_out_of_range_is_no_trouble_of_this_one(
    script: Script,
) -> None:
    """The client is used again where the caller wanted no more, and keeps what it has queued."""
    of_earlier = [
        Message(
            topic="orders",
            partition=partition,
            offset=70,
            error=KafkaError(OFFSET_RESET_FORBIDDEN, "offset out of range"),
        )
        for partition in (0, 5)
    ]
    reader, client = script([record(0, 0), *of_earlier], [record(0, 1)], [record(0, 2)])
    assert offsets(reader, OffsetRange("orders", 0, 0, 3)) == [(0, 0), (0, 1), (0, 2)]
    assert client.begun == [0, 1], "an error that is of this read comes again"


def test_a_forked_child_takes_no_client_of_its_parent(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client is its threads, which do not exist there: its calls would never return."""
    wanted = [OffsetRange("orders", 0, 0, 1)]
    reader, of_parent = script([record(0, 0)], [record(0, 0)])
    assert len(list(reader.read(wanted))) == 1
    own = ScriptedClient([[record(0, 0)]])
    monkeypatch.setattr(
        "dagster_rebalance.kafka.reading.range_reader.confluent_kafka.Consumer", lambda _: own
    )
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert len(list(reader.read(wanted))) == 1
    assert len(of_parent.batches) == 1
    reader.close()
    assert (own.is_closed, of_parent.is_closed) == (True, False)
