"""Streaming runs write orders from Kafka to files of JSON lines, in plain Python.

`make demo` copies this file, runs it, and deploys a version with another CODE.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, build_kafka_stream_defs

CODE = "v1"
OUTPUT = Path(os.environ["ORDERS_PATH"])


@dg.asset(kinds={"python", "json"})
def orders(kafka_batch: KafkaBatch) -> dg.MaterializeResult[None]:
    """Write every order exactly once: each range has its own file, which a repetition replaces."""
    rows = defaultdict(list)
    for message in kafka_batch.messages():
        place = {"partition": message.partition(), "offset": message.offset()}
        rows[message.partition()].append(place | json.loads(message.value() or b"{}"))
    for range_ in kafka_batch.offset_ranges:
        folder = OUTPUT / f"{range_.topic}-{range_.partition}"
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"{range_.start}-{range_.until}.{os.getpid()}"
        written.write_text("".join(json.dumps(row) + "\n" for row in rows[range_.partition]))
        written.replace(folder / f"{range_.start}-{range_.until}.jsonl")
    row_count = sum(map(len, rows.values()))
    return dg.MaterializeResult(metadata={"code": CODE, "dagster/row_count": row_count})


kafka = KafkaConsumerResource(
    bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
    group_id=dg.EnvVar("KAFKA_GROUP"),
    topics=[os.environ["KAFKA_TOPIC"]],
    group_protocol="classic" if os.environ["KAFKA_GROUP_PROTOCOL"] == "classic" else "consumer",
    client_config=json.loads(os.environ["KAFKA_CLIENT_CONFIG"]),
    # These two keep the demo short. The batch of a killed run counts as a failed attempt.
    record_every_s=2.0,
    records_per_minute=6_000.0,
    retry_delay_s=1.0,
)

defs = build_kafka_stream_defs(
    kafka=kafka,
    assets=[orders],
    # The number is in a text file beside this one, to scale out without a change of code.
    runs=int(Path(__file__).with_name("runs").read_text()),
)
