"""The external process of a Pipes client: it processes a batch slowly.

It writes a line per good record to the output of its group, sets the others aside, and writes its
events to a journal.
"""

import os
import sys
import time
from pathlib import Path

from confluent_kafka import Consumer, Message
from confluent_kafka import TopicPartition as Partition
from dagster_pipes import open_dagster_pipes

from dagster_rebalance import PipesBatch
from dagster_rebalance.core.model.offsets import OffsetRange

ROOT = Path(os.environ["E2E_ROOT"], "pipes")


def _note(event: str) -> None:
    with (ROOT / "journal").open("a") as journal:
        journal.write(f"{event} {os.environ['CHILD_OF']}\n")


def _read(consumer: Consumer, range_: OffsetRange) -> list[Message]:
    consumer.assign([Partition(range_.topic, range_.partition, range_.start)])
    found: list[Message] = []
    while len(found) < len(range_):
        found += consumer.consume(1, 1.0)
    return found[: len(range_)]


with open_dagster_pipes() as pipes:
    if "dagster" in sys.modules:
        sys.exit("Dagster was imported on the other side")
    batch = PipesBatch.from_extras(pipes.extras)
    _note("began")
    try:
        while (ROOT / f"{batch.group_id}_closed").exists():
            time.sleep(0.05)
    except KeyboardInterrupt:
        _note("interrupted")
        raise
    settings = {"bootstrap.servers": os.environ["KAFKA_BROKERS"], "group.id": "child"}
    client = Consumer(settings)
    records = [record for range_ in batch.offset_ranges for record in _read(client, range_)]
    client.close()
    with batch.letters(pipes) as letters:
        bad = [record for record in records if (record.value() or b"").startswith(b"bad")]
        letters.set_aside(bad, ValueError("it is bad"))
    written = [(record.value() or b"").decode() for record in records if record not in bad]
    with (ROOT / f"{batch.group_id}_output").open("a") as output:
        output.writelines(f"{value}\n" for value in written)
    _note("done")
    pipes.log.info("wrote %d records as %s", len(written), pipes.get_extra("asset"))
    pipes.report_asset_materialization(
        metadata=batch.metadata(row_count=len(written), set_aside=letters.count)
    )
