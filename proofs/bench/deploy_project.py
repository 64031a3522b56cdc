"""The code location of a deploy: both forms of runs, and a sensor that polls and commits.

The version of the code is read from a file at load, so a reload is a deploy.
"""

import time
from collections.abc import Iterator

import dagster as dg
from confluent_kafka import Consumer, Message

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from proofs.bench.deploy_work import POLLED, Work, ranges_of
from proofs.bench.streams import BATCHES, STREAM

WORK = Work.from_environment()
VERSION = WORK.version.read_text()
_POLL_S, _MOST_RECORDS = 5.0, 10_000


def _kafka(form: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=WORK.brokers,
        group_id=f"{WORK.topic}-{form}",
        topics=[WORK.topic],
        max_wait_s=0,
    )


def _asset(form: str) -> dg.AssetsDefinition:
    @dg.asset(name=f"{form}_orders")
    def orders(kafka_batch: KafkaBatch) -> None:
        ranges = [(one.partition, one.start, one.until) for one in kafka_batch.offset_ranges]
        WORK.process(ranges, VERSION)

    return orders


@dg.op(config_schema={"ranges": [[int]]})
def process(context: dg.OpExecutionContext) -> None:
    """The asset of the polling sensor."""
    WORK.process([(one[0], one[1], one[2]) for one in context.op_config["ranges"]], VERSION)


@dg.job(name=POLLED, executor_def=dg.in_process_executor)
def polled() -> None:
    """The job of the polling sensor."""
    process()


@dg.sensor(name=f"{POLLED}_sensor", job=polled, minimum_interval_seconds=5)
def polled_sensor() -> Iterator[dg.RunRequest | dg.SkipReason]:
    """Poll, commit and request a run, as examples on the web do."""
    consumer = Consumer(WORK.client_config(POLLED))
    try:
        consumer.subscribe([WORK.topic])
        messages: list[Message] = []
        until = time.monotonic() + _POLL_S
        while time.monotonic() < until and len(messages) < _MOST_RECORDS:
            messages += consumer.consume(500, 0.5)
        ranges = [list(one) for one in ranges_of(messages)]
        if not ranges:
            yield dg.SkipReason("no records")
            return
        consumer.commit(asynchronous=False)
        yield dg.RunRequest(
            run_key=str(ranges), run_config={"ops": {"process": {"config": {"ranges": ranges}}}}
        )
    finally:
        consumer.close()


defs = dg.Definitions.merge(
    build_kafka_stream_defs(
        kafka=_kafka(STREAM),
        assets=[_asset(STREAM)],
        name=STREAM,
        runs=2,
        version=VERSION,
        kafka_key="stream_kafka",
    ),
    build_kafka_batch_defs(
        kafka=_kafka(BATCHES), assets=[_asset(BATCHES)], name=BATCHES, kafka_key="batch_kafka"
    ),
    dg.Definitions(jobs=[polled], sensors=[polled_sensor]),
)
