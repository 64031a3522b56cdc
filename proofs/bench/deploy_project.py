"""The code location of `deploy_duplicates`: streaming runs, and a sensor that polls.

The sensor polls and commits in its tick and gives the offsets to a run, as examples on the web do.
The version of the code is what a file says, so that a reload is a deploy.
"""

import time
from collections.abc import Iterator

import dagster as dg
from confluent_kafka import Consumer

from dagster_rebalance import KafkaBatch, KafkaConsumerResource
from dagster_rebalance.orchestration.definitions import build_kafka_stream_defs
from proofs.bench.deploy_work import OURS, POLLED, Work

WORK = Work.from_environment()
_POLL_S, _MOST_RECORDS = 5.0, 10_000


@dg.asset
def streamed(kafka_batch: KafkaBatch) -> None:
    """The work of a streaming run: each range replaces what was written of it."""
    WORK.wait()
    for one in kafka_batch.offset_ranges:
        range_ = (one.partition, one.start, one.until)
        WORK.write(OURS, "-".join(map(str, range_)), [range_])


@dg.op(config_schema={"ranges": [[int]]})
def work(context: dg.OpExecutionContext) -> None:
    """The work of a run that a polling sensor has requested."""
    ranges = [(one[0], one[1], one[2]) for one in context.op_config["ranges"]]
    WORK.wait()
    WORK.write(POLLED, context.run_id, ranges)


@dg.job(executor_def=dg.in_process_executor)
def polled() -> None:
    """A run for what a tick has polled."""
    work()


@dg.sensor(job=polled, minimum_interval_seconds=5)
def polled_sensor() -> Iterator[dg.RunRequest | dg.SkipReason]:
    """Poll for a while, commit, and request a run."""
    consumer = Consumer(WORK.client_config(f"{WORK.topic}-{POLLED}"))
    try:
        consumer.subscribe([WORK.topic])
        found: dict[int, list[int]] = {}
        until, records = time.monotonic() + _POLL_S, 0
        while time.monotonic() < until and records < _MOST_RECORDS:
            for message in consumer.consume(500, 0.5):
                if message.error() is None:
                    offset = int(message.offset() or 0)
                    bounds = found.setdefault(int(message.partition() or 0), [offset, offset])
                    bounds[1] = offset + 1
                    records += 1
        if not found:
            yield dg.SkipReason("no records")
            return
        consumer.commit(asynchronous=False)
        ranges = [[partition, *bounds] for partition, bounds in found.items()]
        yield dg.RunRequest(
            run_key=f"max_offsets_{ranges}",
            run_config={"ops": {"work": {"config": {"ranges": ranges}}}},
        )
    finally:
        consumer.close()


defs = dg.Definitions.merge(
    build_kafka_stream_defs(
        kafka=KafkaConsumerResource(
            bootstrap_servers=WORK.brokers,
            group_id=f"{WORK.topic}-{OURS}",
            topics=[WORK.topic],
            heartbeat_timeout_s=24.0,
        ),
        assets=[streamed],
        name="streamed_job",
        runs=2,
        version=WORK.version.read_text(),
    ),
    dg.Definitions(jobs=[polled], sensors=[polled_sensor]),
)
