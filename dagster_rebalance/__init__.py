"""Make a Dagster code location a member of a Kafka consumer group.

The member tracks which runs process which offsets, and drains only these runs in a rebalance. This
module lists the public names. Each loads on first use (PEP 562), so an import of the package, or of
its pure core, loads neither dagster, confluent_kafka nor pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_rebalance.components.component import KafkaBatchComponent
    from dagster_rebalance.core.model.errors import (
        BatchRefusedError,
        BrokerError,
        ClaimError,
        ConfigurationError,
        DagsterRebalanceError,
        IllegalStateError,
        PartitionLostError,
        RebalanceInProgressError,
        TooManyLettersError,
        UndecodableError,
        UnsupportedOperationError,
    )
    from dagster_rebalance.core.model.events import (
        LostReason,
        PartitionsAssigned,
        PartitionsLost,
        PartitionsRevoked,
        RevokeRequested,
    )
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
    from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer
    from dagster_rebalance.kafka.aio.async_operations import (
        AsyncRebalanceConsumer,
        AsyncRebalanceListener,
    )
    from dagster_rebalance.kafka.consumer.consumer import PollResult, RebalanceAwareConsumer
    from dagster_rebalance.kafka.consumer.listener import (
        CompositeRebalanceListener,
        ConsumerRebalanceListener,
        RebalanceListener,
    )
    from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer
    from dagster_rebalance.kafka.offset_tracker import OffsetTracker
    from dagster_rebalance.orchestration.batch.batch_values import values_by_batch
    from dagster_rebalance.orchestration.batch.resource import KafkaBatch
    from dagster_rebalance.orchestration.definitions import (
        build_kafka_batch_defs,
        build_kafka_stream_defs,
    )
    from dagster_rebalance.orchestration.operators.launchpad import (
        build_kafka_control_job,
        build_kafka_letters_job,
        build_kafka_rerun_job,
    )
    from dagster_rebalance.orchestration.per_batch.batch_sensor import build_kafka_batch_sensor
    from dagster_rebalance.orchestration.resources.client_settings import PinnedResource
    from dagster_rebalance.orchestration.resources.kafka import (
        KafkaConsumerResource,
        RecordFilter,
    )
    from dagster_rebalance.orchestration.resources.registry import (
        SchemaRegistryResource,
        plain_json,
    )
    from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
    from dagster_rebalance.orchestration.runs.external_jobs import ExternalJobs, ExternalWork
    from dagster_rebalance.outputs.scratch import redirect_outputs
    from dagster_rebalance.spark.pipes_batch import PipesBatch

    __version__: str

__all__ = [
    "AsyncRebalanceAwareConsumer",
    "AsyncRebalanceConsumer",
    "AsyncRebalanceListener",
    "BatchRefusedError",
    "BrokerError",
    "ClaimError",
    "CompositeRebalanceListener",
    "ConfigurationError",
    "ConsumerRebalanceListener",
    "DagsterRebalanceError",
    "ExternalJobs",
    "ExternalWork",
    "IllegalStateError",
    "KafkaBatch",
    "KafkaBatchComponent",
    "KafkaConsumerResource",
    "KafkaSparkResource",
    "LostReason",
    "OffsetAndMetadata",
    "OffsetRange",
    "OffsetTracker",
    "PartitionLostError",
    "PartitionsAssigned",
    "PartitionsLost",
    "PartitionsRevoked",
    "PinnedResource",
    "PipesBatch",
    "PollResult",
    "RebalanceAwareConsumer",
    "RebalanceConsumer",
    "RebalanceInProgressError",
    "RebalanceListener",
    "RecordFilter",
    "RevokeRequested",
    "SchemaRegistryResource",
    "TooManyLettersError",
    "TopicPartition",
    "UndecodableError",
    "UnsupportedOperationError",
    "__version__",
    "build_kafka_batch_defs",
    "build_kafka_batch_sensor",
    "build_kafka_control_job",
    "build_kafka_letters_job",
    "build_kafka_rerun_job",
    "build_kafka_stream_defs",
    "plain_json",
    "redirect_outputs",
    "values_by_batch",
]

_HOMES = {
    "AsyncRebalanceAwareConsumer": "kafka.aio.async_consumer",
    "AsyncRebalanceConsumer": "kafka.aio.async_operations",
    "AsyncRebalanceListener": "kafka.aio.async_operations",
    "BatchRefusedError": "core.model.errors",
    "BrokerError": "core.model.errors",
    "ClaimError": "core.model.errors",
    "CompositeRebalanceListener": "kafka.consumer.listener",
    "ConfigurationError": "core.model.errors",
    "ConsumerRebalanceListener": "kafka.consumer.listener",
    "DagsterRebalanceError": "core.model.errors",
    "ExternalJobs": "orchestration.runs.external_jobs",
    "ExternalWork": "orchestration.runs.external_jobs",
    "PinnedResource": "orchestration.resources.client_settings",
    "IllegalStateError": "core.model.errors",
    "KafkaBatch": "orchestration.batch.resource",
    "KafkaBatchComponent": "components.component",
    "KafkaConsumerResource": "orchestration.resources.kafka",
    "KafkaSparkResource": "orchestration.resources.spark",
    "LostReason": "core.model.events",
    "OffsetAndMetadata": "core.model.offsets",
    "OffsetRange": "core.model.offsets",
    "OffsetTracker": "kafka.offset_tracker",
    "PartitionLostError": "core.model.errors",
    "PartitionsAssigned": "core.model.events",
    "PartitionsLost": "core.model.events",
    "PartitionsRevoked": "core.model.events",
    "PipesBatch": "spark.pipes_batch",
    "PollResult": "kafka.consumer.consumer",
    "RebalanceAwareConsumer": "kafka.consumer.consumer",
    "RebalanceConsumer": "kafka.consumer.operations",
    "RebalanceInProgressError": "core.model.errors",
    "RebalanceListener": "kafka.consumer.listener",
    "RecordFilter": "orchestration.resources.kafka",
    "RevokeRequested": "core.model.events",
    "SchemaRegistryResource": "orchestration.resources.registry",
    "TopicPartition": "core.model.offsets",
    "TooManyLettersError": "core.model.errors",
    "UndecodableError": "core.model.errors",
    "UnsupportedOperationError": "core.model.errors",
    "build_kafka_batch_defs": "orchestration.definitions",
    "build_kafka_batch_sensor": "orchestration.per_batch.batch_sensor",
    "build_kafka_control_job": "orchestration.operators.launchpad",
    "build_kafka_letters_job": "orchestration.operators.launchpad",
    "build_kafka_rerun_job": "orchestration.operators.launchpad",
    "build_kafka_stream_defs": "orchestration.definitions",
    "plain_json": "orchestration.resources.registry",
    "redirect_outputs": "outputs.scratch",
    "values_by_batch": "orchestration.batch.batch_values",
}


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        value = import_module("importlib.metadata").version("dagster-rebalance")
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
