"""Records through `poll()` on a real broker, in both protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from dagster_rebalance.consumer.listener import RebalanceListener
from dagster_rebalance.consumer.rebalance_aware import RebalanceAwareConsumer
from dagster_rebalance.core.errors import BrokerError
from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from dagster_rebalance.consumer.view import RebalanceConsumer
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker


class Reader:
    """A consumer and every record that it returned."""

    def __init__(self, consumer: RebalanceAwareConsumer, topic: str) -> None:
        self.consumer = consumer
        self.topic = topic
        self.offsets: dict[int, list[int]] = {number: [] for number in range(4)}

    def poll(self, timeout_s: float = 0.1) -> None:
        """Take in what the consumer returns."""
        for message in self.consumer.poll(timeout_s):
            assert message.error() is None
            self.offsets[message.partition() or 0].append(message.offset() or 0)

    def tp(self, number: int) -> TopicPartition:
        """A partition of the topic."""
        return TopicPartition(self.topic, number)

    @property
    def count(self) -> int:
        """How many records were returned."""
        return sum(map(len, self.offsets.values()))


class Bench:
    """A topic of four partitions on a broker, and readers in one group."""

    def __init__(self, kafka: KafkaCluster, topic: str, protocol: str) -> None:
        self.topic = topic
        self.config: dict[str, Any] = {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": unique_name("group"),
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
        }
        if protocol == "classic":
            self.config.update({"session.timeout.ms": 6000, "heartbeat.interval.ms": 300})
        self.readers: list[Reader] = []
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 0})

    def reader(self, listener: RebalanceListener | None = None, **config: str) -> Reader:
        """A consumer that subscribed."""
        settings = {**self.config, **{name.replace("_", "."): value for name, value in config.items()}}
        reader = Reader(RebalanceAwareConsumer(settings, hold_limit_s=30, probe_interval_s=0.5), self.topic)
        reader.consumer.set_rebalance_listener(listener)
        reader.consumer.subscribe([self.topic])
        self.readers.append(reader)
        return reader

    def produce(self, each: int) -> None:
        """Append records to each partition."""
        for number in range(4):
            for _ in range(each):
                self._producer.produce(self.topic, b"record", partition=number)
        assert self._producer.flush(10) == 0

    def play(self, until: Callable[[], object], *readers: Reader, what: str) -> None:
        """Let all readers poll until something has come about."""

        def step() -> bool:
            for reader in readers:
                reader.poll()
            return bool(until())

        wait_until(step, timeout_s=12, what=what, interval_s=0)


@pytest.fixture(params=["consumer", "classic"])
def bench(request: pytest.FixtureRequest, kafka_broker: KafkaCluster, kafka_topic: TopicFactory) -> Iterator[Bench]:
    """A bench for each protocol."""
    made = Bench(kafka_broker, kafka_topic(4), request.param)
    yield made
    for reader in made.readers:
        reader.consumer.close(5.0)


def test_retained_partitions_deliver_during_a_hold_and_no_record_is_read_twice_or_never(bench: Bench) -> None:
    """The promise of KIP-983 on real parts: full speed for what stays, silence from what goes, a clean start for the next owner."""
    blue = bench.reader()
    bench.produce(100)
    bench.play(lambda: blue.count == 400, blue, what="all records")
    green = bench.reader()
    bench.play(blue.consumer.get_to_be_revoked_partitions, blue, green, what="a revoke request")
    held = blue.consumer.get_to_be_revoked_partitions()
    assert blue.consumer.delay_revoke(held)
    kept = blue.consumer.assignment() - held
    at_request = {tp: len(blue.offsets[tp.partition]) for tp in held}
    bench.produce(500)
    produced = 600

    def hold() -> bool:
        assert blue.consumer.delay_revoke(held)
        return all(len(blue.offsets[tp.partition]) == produced for tp in kept)

    bench.play(hold, blue, green, what="all records of the retained partitions during the hold")
    assert {tp: len(blue.offsets[tp.partition]) for tp in held} == at_request
    assert not green.consumer.assignment()
    blue.consumer.commit_sync()
    bench.play(lambda: green.count == 1000, blue, green, what="the rest for the next owner")
    for number in range(4):
        assert blue.offsets[number] + green.offsets[number] == list(range(produced))


class Chooser(RebalanceListener):
    """Starts one partition elsewhere, and keeps another one silent."""

    def on_partitions_assigned(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        """A choice for each partition but the first."""
        for tp in partitions:
            if tp.partition == 1:
                consumer.seek(tp, OffsetAndMetadata(60))
                assert consumer.position(tp) == 60
            if tp.partition == 2:
                consumer.pause([tp])
            if tp.partition == 3:
                consumer.seek_to_end([tp])

    def on_partitions_revoked(self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        """Nothing to do."""


def test_a_seek_or_pause_in_the_assignment_holds_before_the_first_record(bench: Bench) -> None:
    """KAFKA-20385: seek to external offsets, pause until caches are warm."""
    bench.produce(100)
    blue = bench.reader(Chooser())
    bench.play(lambda: len(blue.offsets[0]) == 100 and len(blue.offsets[1]) == 40, blue, what="the records that were chosen")
    blue.poll()
    assert blue.offsets[1] == list(range(60, 100))
    assert not blue.offsets[2]
    assert not blue.offsets[3]
    assert blue.consumer.position(blue.tp(3)) == 100
    blue.consumer.resume([blue.tp(2)])
    bench.play(lambda: len(blue.offsets[2]) == 100, blue, what="the records of the partition that was paused")


def test_a_pause_drops_what_is_buffered_and_a_resume_reads_it_again(bench: Bench) -> None:
    """None is lost and none is repeated, however much the client had fetched ahead."""
    bench.produce(2000)
    blue = bench.reader()

    def some() -> bool:
        return all(blue.offsets.values())

    def step() -> bool:
        for message in blue.consumer.poll(0.1, max_records=50):
            blue.offsets[message.partition() or 0].append(message.offset() or 0)
        return some()

    wait_until(step, timeout_s=12, what="some records of each partition", interval_s=0)
    quiet = [blue.tp(0), blue.tp(1)]
    blue.consumer.pause(quiet)
    before = [len(blue.offsets[tp.partition]) for tp in quiet]
    bench.play(lambda: len(blue.offsets[2]) == len(blue.offsets[3]) == 2000, blue, what="the records of the others")
    assert [len(blue.offsets[tp.partition]) for tp in quiet] == before
    blue.consumer.resume(quiet)
    bench.play(lambda: blue.count == 8000, blue, what="all records")
    assert all(offsets == list(range(2000)) for offsets in blue.offsets.values())


def test_an_offset_that_retention_removed_is_an_error_where_no_reset_is_allowed(bench: Bench) -> None:
    """Skipping records silently would lose them; the message says what to do."""
    bench.produce(10)
    blue = bench.reader(auto_offset_reset="error")
    with pytest.raises(BrokerError, match="forbids to choose one"):
        bench.play(lambda: False, blue, what="the error")
    blue.consumer.commit_sync({blue.tp(number): OffsetAndMetadata(4) for number in range(4)})
    for number in range(4):
        blue.consumer.seek(blue.tp(number), 4)
    bench.play(lambda: blue.count == 24, blue, what="the records after the offsets that were chosen")
