"""A process with a local Spark whose JVM is killed in the middle of a batch, in either form of run.

It prints what became of the run, as JSON. Argument: stream or batch.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of assets at run time.

import json
import os
import signal
import sys
import time

import dagster as dg
from pyspark import SparkContext

from dagster_rebalance import (
    KafkaBatch,
    KafkaSparkResource,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch
from dagster_rebalance.kafka.group_ports import GroupEvent
from dagster_rebalance.orchestration.storage.range_owners import StreamingRunRecords
from dagster_rebalance.orchestration.storage.run_tags import (
    SLOT_TAG,
    STREAM_TAG,
    run_config,
    run_events_of,
    run_tags,
)
from dagster_rebalance.testing.fake_group import FakeMember
from dagster_rebalance.testing.local.jars import fetch
from dagster_rebalance.testing.spark_connect import kafka_connector
from tests.orchestration.parts import GROUPS, batch_request, claimed, kafka_in_memory, span, tp

FORM = sys.argv[1]
RECORDS = 5
kafka = kafka_in_memory(retry_delay_s=0.0)
group = GROUPS[kafka.group_id]
batches: list[int] = []
poll = FakeMember.poll


def slow_poll(member: FakeMember, timeout_s: float) -> list[GroupEvent]:
    """Leave the JVM a processor: a poll of a group in memory returns immediately."""
    time.sleep(0.02)
    return poll(member, timeout_s)


def kill_the_jvm() -> None:
    """Kill it as the system does if memory is short."""
    gateway = SparkContext._gateway
    assert gateway is not None
    os.kill(gateway.proc.pid, signal.SIGKILL)


@dg.asset
def orders(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> None:
    """Use Spark. A streaming run stops its session in batch 1 and loses its JVM in batch 3."""
    batches.append(spark.spark_session.range(RECORDS).count())
    if FORM == "stream" and len(batches) < 3:
        group.produce(tp(0), RECORDS)
        if len(batches) == 1:
            spark.spark_session.stop()
    else:
        kill_the_jvm()
        spark.spark_session.range(kafka_batch.records).count()


spark = KafkaSparkResource(
    master="local[1]",
    spark_config={
        "spark.ui.enabled": "false",
        "spark.jars": ",".join(map(str, fetch(kafka_connector()))),
    },
)


def streamed(instance: dg.DagsterInstance) -> dict[str, object]:
    """Play a streaming run, which leaves when its JVM is dead."""
    group.produce(tp(0), RECORDS)
    defs = build_kafka_stream_defs(kafka=kafka, assets=[orders], spark=spark, name="stream")
    result = defs.resolve_job_def("stream").execute_in_process(
        instance=instance, tags={STREAM_TAG: "here:stream_sensor", SLOT_TAG: "0"}
    )
    stored = group.committed[tp(0)]
    left = [(batch_id, range_) for range_, batch_id in decode(stored).ranges(tp(0))]
    outcomes = StreamingRunRecords(instance).read(left)
    return {
        "succeeded": result.success,
        "batches": batches,
        "committed": stored.offset,
        "left": [_counts(claim[0], outcomes.get(claim)) for claim in left],
    }


def _counts(batch_id: str, outcome: BatchOutcome | None) -> dict[str, int]:
    """Return the failures and interruptions that the next owner counts."""
    batch = StreamBatch.parse(batch_id)
    assert batch is not None
    return {
        "failed": batch.attempt - 1 + (outcome is BatchOutcome.FAILED),
        "interrupted": batch.interruptions + (outcome is BatchOutcome.INTERRUPTED),
    }


def single(instance: dg.DagsterInstance) -> dict[str, object]:
    group.committed[tp(0)] = claimed(0, RECORDS, "b-1")
    wanted = batch_request("b-1", span(0, 0, RECORDS))
    defs = build_kafka_batch_defs(kafka=kafka, assets=[orders], spark=spark)
    result = defs.resolve_job_def("kafka_batches").execute_in_process(
        instance=instance,
        tags=run_tags(wanted, kafka.group_id),
        run_config=run_config(wanted, "kafka_batch"),
        raise_on_error=False,
    )
    marks = sorted(mark.name for mark in run_events_of(instance, result.run_id))
    return {"succeeded": result.success, "marks": marks}


if __name__ == "__main__":
    FakeMember.poll = slow_poll  # type: ignore[assignment, method-assign]
    with dg.instance_for_test() as made:
        print(json.dumps(single(made) if FORM == "batch" else streamed(made)))  # noqa: T201
