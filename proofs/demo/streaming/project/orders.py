"""Orders arrive in Kafka; streaming runs write them to files of JSON lines, in plain Python.

`make demo` copies this file, runs it, and deploys a new version of it: it changes CODE.
"""

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import dagster as dg
from confluent_kafka import Consumer, TopicPartition

from dagster_rebalance import KafkaBatch, KafkaConsumerResource
from dagster_rebalance.core.partition import OffsetRange
from dagster_rebalance.orchestration.definitions import build_kafka_stream_defs

CODE = "v1"
OUTPUT = Path(os.environ["ORDERS_PATH"])


@dg.asset(kinds={"python", "json"})
def orders(kafka_batch: KafkaBatch) -> dg.MaterializeResult[None]:
    """Every order exactly once.

    Each range of offsets has a file of its own, so that doing it again replaces it.
    """
    orders_of = read(kafka_batch.offset_ranges)
    for range_, rows in orders_of.items():
        folder = OUTPUT / f"{range_.topic}-{range_.partition}"
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"{range_.start}-{range_.until}.{os.getpid()}"
        written.write_text("".join(json.dumps(row) + "\n" for row in rows))
        written.replace(folder / f"{range_.start}-{range_.until}.jsonl")
    row_count = sum(map(len, orders_of.values()))
    return dg.MaterializeResult(metadata={"code": CODE, "dagster/row_count": row_count})


def read(ranges: Sequence[OffsetRange]) -> dict[OffsetRange, list[dict[str, object]]]:
    """The orders of each range."""
    by_partition = {range_.partition: range_ for range_ in ranges}
    found: dict[OffsetRange, list[dict[str, object]]] = {range_: [] for range_ in ranges}
    left = sum(map(len, ranges))
    reader().assign([TopicPartition(one.topic, one.partition, one.start) for one in ranges])
    while left:
        messages = reader().consume(left, timeout=10)
        if not messages:
            problem = f"{left} records could not be read: Kafka gave none of them for 10 s"
            raise TimeoutError(problem)
        for message in messages:
            if (error := message.error()) is not None:
                raise RuntimeError(error.str())
            range_, offset = by_partition[message.partition() or 0], message.offset() or 0
            if offset < range_.until:
                order = json.loads(message.value() or b"{}")
                found[range_].append({"partition": range_.partition, "offset": offset, **order})
                left -= 1
    return found


@cache
def reader() -> Consumer:
    """One client for all batches of the run. It is in no group: it only reads."""
    return Consumer(
        {
            "bootstrap.servers": os.environ["KAFKA_BROKERS"],
            "group.id": "reader",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 50,  # the next batch waits for the end of this fetch
        }
    )


kafka = KafkaConsumerResource(
    bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
    group_id=dg.EnvVar("KAFKA_GROUP"),
    topics=[os.environ["KAFKA_TOPIC"]],
    group_protocol="classic" if os.environ["KAFKA_GROUP_PROTOCOL"] == "classic" else "consumer",
    client_config=json.loads(os.environ["KAFKA_CLIENT_CONFIG"]),
    # These two keep the demo short. What a killed run had in hand counts as a failed attempt.
    record_every_s=2.0,
    retry_delay_s=1.0,
)

defs = build_kafka_stream_defs(
    kafka=kafka,
    assets=[orders],
    # A text file beside this one: a person who scales out changes no code.
    runs=int(Path(__file__).with_name("runs").read_text()),
)
