"""The groups of the tests of streaming runs that share partitions.

A run writes a line per range into its file. The version of the code comes from a file, so a test
can deploy.
"""

import os
import time
from pathlib import Path
from typing import Literal

import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, build_kafka_stream_defs

ROOT = Path(os.environ["E2E_ROOT"])
BATCH_S = 0.2


def _defs(name: str) -> dg.Definitions:
    protocol: Literal["consumer", "classic"] = "classic" if name.endswith("classic") else "consumer"

    @dg.asset(name=f"{name}_orders")
    def orders(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch) -> None:
        time.sleep(BATCH_S)
        with (ROOT / name / context.run_id).open("a") as output:
            output.writelines(
                f"{range_.partition} {range_.start} {range_.until}\n"
                for range_ in kafka_batch.offset_ranges
            )

    kafka = KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id=name,
        topics=[name],
        group_protocol=protocol,
        heartbeat_timeout_s=24.0,
        client_config={"session.timeout.ms": "6000"} if protocol == "classic" else {},
    )
    return build_kafka_stream_defs(
        kafka=kafka,
        assets=[orders],
        name=name,
        runs=2,
        version=(ROOT / "version").read_text(),
        kafka_key=f"{name}_kafka",
    )


defs = dg.Definitions.merge(*map(_defs, ("stream_consumer", "stream_classic", "detached_consumer")))
