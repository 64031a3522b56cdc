"""A streaming run that claims ahead, as a process: `python -m ... <folder> <brokers> <topic>`.

While the file `hold` exists, a batch stays at work; the file `fail` fails one batch. `output` gets
a line for each range that is done, `begun` one for each range that begins.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import dagster as dg

from dagster_rebalance import KafkaConsumerResource, build_kafka_stream_defs
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from tests.orchestration.streaming.stage import BY_THE_SENSOR

_NAP = threading.Event()


def _run(folder: Path, brokers: str, topic: str) -> None:
    kafka = KafkaConsumerResource(
        bootstrap_servers=brokers,
        group_id=topic,
        topics=[topic],
        max_records_per_range=5,
        max_wait_s=0,
        retry_delay_s=0.1,
        claim_ahead=True,
        client_config={"session.timeout.ms": "6000"},
        group_protocol="classic",
    )

    @dg.asset
    def orders(kafka_batch) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - Dagster evaluates it
        batch = StreamBatch.parse(kafka_batch.batch_id)
        attempt = 0 if batch is None else batch.attempt
        ranges = [
            f"{os.getpid()} {one.partition} {one.start} {one.until} {attempt}\n"
            for one in kafka_batch.offset_ranges
        ]
        with (folder / "begun").open("a") as begun:
            begun.writelines(ranges)
        while (folder / "hold").exists():
            _NAP.wait(0.05)
        if (folder / "fail").exists():
            (folder / "fail").unlink()
            msg = "the test wants it"
            raise ValueError(msg)
        with (folder / "output").open("a") as output:
            output.writelines(ranges)

    job = build_kafka_stream_defs(kafka=kafka, assets=[orders], name="stream")
    with dg.DagsterInstance.get() as instance:
        job.resolve_job_def("stream").execute_in_process(instance=instance, tags=BY_THE_SENSOR)


if __name__ == "__main__":
    _run(Path(sys.argv[1]), *sys.argv[2:])
