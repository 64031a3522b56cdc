"""Expected types of the public surface. Checked by `make types`, and never run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn

import confluent_kafka
from confluent_kafka import Message
from pyspark.sql import DataFrame
from typing_extensions import assert_type

from dagster_rebalance import (
    AsyncRebalanceAwareConsumer,
    AsyncRebalanceConsumer,
    AsyncRebalanceListener,
    BrokerError,
    CompositeRebalanceListener,
    ConsumerRebalanceListener,
    DagsterRebalanceError,
    ExternalJobs,
    ExternalWork,
    IllegalStateError,
    KafkaBatch,
    OffsetAndMetadata,
    OffsetRange,
    OffsetTracker,
    PartitionLostError,
    PipesBatch,
    PollResult,
    RebalanceAwareConsumer,
    RebalanceConsumer,
    RebalanceInProgressError,
    RebalanceListener,
    TopicPartition,
    UnsupportedOperationError,
    redirect_outputs,
)
from dagster_rebalance.kafka.consumer.operations import ConsumerGroupMetadata
from dagster_rebalance.kafka.group_ports import CommitResult, OffsetAndTimestamp, PartitionInfo

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pyspark.sql import SparkSession

TP = TopicPartition("orders", 0)
CLIENT = confluent_kafka.TopicPartition("orders", 0, 5)
OFFSETS = {TP: OffsetAndMetadata(5, metadata="mine", leader_epoch=None)}


class Aware(RebalanceListener):
    """The two methods that are asked for."""

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """All operations of the view."""
        use_operations(consumer, partitions)

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer
    ) -> None:
        """Nothing to do."""


class OneArgument(ConsumerRebalanceListener):
    """The older kind."""

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Nothing to do."""

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        """Nothing to do."""


class BothForms(ConsumerRebalanceListener):
    """The older kind, which takes the consumer where there is one."""

    def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer | None = None
    ) -> None:
        """Nothing to do."""

    def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: RebalanceConsumer | None = None
    ) -> None:
        """Nothing to do."""


class Awaited(AsyncRebalanceListener):
    """Coroutines."""

    async def on_partitions_assigned(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Operations of the view for asyncio."""
        assert_type(await consumer.assignment(), frozenset[TopicPartition])
        await consumer.commit_sync(timeout_s=1.0)
        await consumer.pause(partitions)

    async def on_partitions_revoked(
        self, partitions: Collection[TopicPartition], consumer: AsyncRebalanceConsumer
    ) -> None:
        """Nothing to do."""


def committed(
    offsets: Mapping[TopicPartition, OffsetAndMetadata], error: BrokerError | None
) -> None:
    """A callback of a commit."""


def use_operations(
    consumer: RebalanceConsumer | RebalanceAwareConsumer, partitions: Collection[TopicPartition]
) -> None:
    """Use the operations that the view and the consumer have in common."""
    consumer.commit_sync()
    consumer.commit_sync(OFFSETS)
    consumer.commit_sync(OFFSETS, timeout_s=5.0)
    consumer.commit_sync(timeout_s=5.0)
    consumer.commit_async()
    consumer.commit_async(callback=committed)
    consumer.commit_async(OFFSETS, committed)
    assert_type(
        consumer.committed(partitions, timeout_s=1.0),
        dict[TopicPartition, OffsetAndMetadata | None],
    )
    assert_type(consumer.position(TP), int)
    consumer.seek(TP, 5)
    consumer.seek(TP, OffsetAndMetadata(5))
    consumer.seek(CLIENT)
    consumer.commit_sync([CLIENT])
    consumer.commit_async({CLIENT: OffsetAndMetadata(5)})
    consumer.pause([CLIENT, TP])
    consumer.offsets_for_times([CLIENT])
    consumer.seek_to_beginning(partitions)
    consumer.seek_to_end(partitions)
    assert_type(consumer.assignment(), frozenset[TopicPartition])
    consumer.pause(partitions)
    consumer.resume(partitions)
    assert_type(consumer.paused(), frozenset[TopicPartition])
    assert_type(consumer.beginning_offsets(partitions, 1.0), dict[TopicPartition, int])
    assert_type(consumer.end_offsets(partitions), dict[TopicPartition, int])
    assert_type(
        consumer.offsets_for_times({TP: 0}), dict[TopicPartition, OffsetAndTimestamp | None]
    )
    assert_type(consumer.partitions_for("orders"), list[PartitionInfo])
    assert_type(consumer.list_topics(), dict[str, list[PartitionInfo]])
    assert_type(consumer.current_lag(TP), int | None)
    assert_type(consumer.metrics(), dict[str, dict[str, Any]])
    assert_type(consumer.group_metadata(), ConsumerGroupMetadata)


def use_consumer() -> None:
    """The loop of KIP-983."""
    with RebalanceAwareConsumer(
        {"bootstrap.servers": "localhost:9092", "group.id": "etl"}, pause_marks="carry"
    ) as consumer:
        consumer.subscribe(["orders"])
        consumer.subscribe(re.compile("orders-.*"), OneArgument())
        for listener in (
            Aware(),
            OneArgument(),
            BothForms(),
            CompositeRebalanceListener(Aware(), OneArgument()),
            None,
        ):
            consumer.set_rebalance_listener(listener)
        assert_type(consumer.poll(1.0), list[Message])
        assert_type(consumer.poll(), list[Message])
        assert_type(consumer.poll(timeout=1.0, max_records=10), list[Message])
        for record in consumer:
            assert_type(record, Message)
            consumer.wakeup()
        result = consumer.poll_with_rebalance(1.0, max_records=10)
        assert_type(result, PollResult)
        assert_type(result.records, list[Message])
        assert_type(result.to_be_revoked, frozenset[TopicPartition])
        assert_type(consumer.get_lost_partitions(), frozenset[TopicPartition])
        assert_type(consumer.delay_revoke(consumer.get_to_be_revoked_partitions()), bool)
        use_operations(consumer, [TP])
        consumer.pause_topics(["orders"])
        consumer.resume_pattern(re.compile("orders"))
        consumer.pause_all()
        tracker = OffsetTracker()
        tracker.track(result.records)
        assert_type(tracker.commit(consumer), dict[TopicPartition, BrokerError])
        assert_type(tracker.unfinished(result.to_be_revoked), frozenset[TopicPartition])


def use_batch(batch: KafkaBatch) -> None:
    """Use a batch as an asset does, without Spark."""
    for message in batch.messages():
        assert_type(message, Message)
    message = next(batch.messages(batch.offset_ranges[:2], timeout_s=5.0))
    ranges = [OffsetRange("orders", 0, 0, 5)]
    assert_type(KafkaBatch.for_testing(ranges, messages=[message]), KafkaBatch)


class Jobs(ExternalJobs):
    """Jobs of a platform by their names."""

    def active(self, run_id: str) -> list[str]:
        """Of any type."""
        return [run_id]

    def cancel(self, job: str) -> None:
        """What `active` lists."""


class Work:
    """Any object with the method will do."""

    def stop(self, run_id: str) -> None:
        """Wait until it is over."""


class Done:
    """The result of a client of Dagster Pipes."""

    def get_custom_messages(self) -> list[Any]:
        """Return the messages of the job."""
        return []


class Client:
    """A client of Dagster Pipes."""

    def run(self, *, extras: dict[str, Any], command: str) -> Done:
        """Run the job."""
        return Done()


def use_pipes(batch: KafkaBatch, session: SparkSession, pipes: Client) -> list[ExternalWork]:
    """Both sides."""
    extras = batch.pipes_extras({"table": "orders"})
    assert_type(extras, dict[str, Any])
    sent = PipesBatch.from_extras(extras)
    assert_type(sent, PipesBatch)
    assert_type(sent.offset_ranges, tuple[OffsetRange, ...])
    assert_type(sent.dataframe(session, {"bootstrap.servers": "localhost:9092"}), DataFrame)
    with sent.letters(pipes) as letters:
        assert_type(letters.set_aside(sent.dataframe(session, {}), ValueError()), int)
    assert_type(batch.run_pipes(pipes.run, command="etl"), Done)
    return [Jobs(), Work()]


def use_redirection() -> None:
    """Outputs of a test."""
    with redirect_outputs("/tmp/scratch") as scratch:  # noqa: S108 - nothing is executed
        assert_type(scratch.outputs[0].rows, int)


def what_librdkafka_does_not_tell(consumer: RebalanceAwareConsumer) -> NoReturn:
    """A type checker knows that nothing comes after it."""
    consumer.client_instance_id()


async def use_consumer_for_asyncio() -> None:
    """The same, awaited."""
    async with AsyncRebalanceAwareConsumer(
        {"bootstrap.servers": "localhost:9092", "group.id": "etl"}
    ) as consumer:
        await consumer.subscribe(["orders"])
        consumer.set_rebalance_listener(Awaited())
        consumer.set_rebalance_listener(Aware())
        assert_type(await consumer.poll(1.0), list[Message])
        assert_type(await consumer.poll(timeout=1.0), list[Message])
        async for record in consumer:
            assert_type(record, Message)
            await consumer.wakeup()
        assert_type(await consumer.poll_with_rebalance(1.0), PollResult)
        assert_type(
            await consumer.delay_revoke(await consumer.get_to_be_revoked_partitions()), bool
        )
        await consumer.commit_async(OFFSETS, committed)
        await consumer.commit_sync(OFFSETS, timeout_s=5.0)
        assert_type(
            await consumer.committed([TP], timeout_s=1.0),
            dict[TopicPartition, OffsetAndMetadata | None],
        )
        assert_type(await consumer.commit_offsets(OFFSETS), CommitResult)
        assert_type(await consumer.current_lag(TP), int | None)
        await consumer.pause_topics(["orders"])


def errors_by_who_must_act(problem: DagsterRebalanceError) -> str:
    """The classes that a caller tells apart."""
    match problem:
        case RebalanceInProgressError() | PartitionLostError():
            return ", ".join(map(str, problem.partitions))
        case BrokerError():
            return str(problem.retriable)
        case IllegalStateError() | UnsupportedOperationError():
            return "a bug"
        case _:
            return str(problem)
