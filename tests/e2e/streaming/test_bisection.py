"""A record that raises is found through a killed run, in both forms of runs at once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from pyarrow import parquet

from dagster_rebalance.core.model.letters import LetterKind
from dagster_rebalance.orchestration.storage.run_tags import BISECTED_TAG
from dagster_rebalance.testing.deadline import wait_until
from tests.e2e.streaming.groups import committed, letters_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.deployment import DagsterDeployment

pytestmark = [pytest.mark.e2e, pytest.mark.broker]
RECORDS, BAD = 8, 5
GROUPS = ("raising_batches", "raising_stream")


def produce(kafka: KafkaCluster) -> None:
    producer = Producer(kafka.client_config())
    for number in range(RECORDS):
        producer.produce("raising", f"{'bad' if number == BAD else ''}{number}", key=b"k")
    assert producer.flush(120) == 0


@pytest.mark.timeout(1200)
def test_record_that_raises_becomes_one_letter_through_a_killed_run(
    kafka_broker: KafkaCluster, dagster: DagsterDeployment, root: Path
) -> None:
    kafka_broker.create_topic("raising", partitions=1)
    for group in GROUPS:
        kafka_broker.create_topic(f"{group}-dead")
        (root / group).mkdir()
        (root / group / "calls").touch()
        (root / group / "hold").touch()
    produce(kafka_broker)

    def calls(group: str) -> list[list[str]]:
        return [line.split() for line in (root / group / "calls").read_text().splitlines()]

    with dagster.instance() as instance:

        def wait(what: str, condition: Callable[[str], object]) -> None:
            wait_until(
                lambda: all(map(condition, GROUPS)) or None,
                timeout_s=600,
                what=lambda: f"{what}; {[(group, calls(group)) for group in GROUPS]}",
                interval_s=0.5,
            )

        for group in GROUPS:
            dagster.ui.start_sensor("shop", f"{group}_sensor")
        whole = f"raising-0-0-{RECORDS}"
        wait("an attempt on a part", lambda group: calls(group) and calls(group)[-1][1] != whole)
        for group in GROUPS:
            os.kill(int(calls(group)[-1][0]), signal.SIGKILL)
            (root / group / "hold").unlink()
        wait("all commits", lambda group: committed(kafka_broker, group, "raising") == RECORDS)
        tagged = {run.tags.get(BISECTED_TAG) for run in instance.get_runs()}
        assert f"raising-0 [0, {RECORDS})" in tagged
    for group in GROUPS:
        (letter,) = letters_of(kafka_broker, group)
        assert (letter.kind, letter.key) == (LetterKind.RECORD, f"raising-0-{BAD}")
        assert (letter.value, letter.record_key) == (f"bad{BAD}".encode(), b"k")
        assert f"ValueError: bad{BAD} is no number" in letter.reason
        # The attempts wrote their output before they raised.
        offsets = [
            offset
            for file in (root / group / "output").rglob("*.parquet")
            for offset in parquet.read_table(file)["offset"].to_pylist()
        ]
        assert Counter(offsets) == Counter(range(RECORDS))
        assert len(calls(group)) <= 2 + 1 + 2 * RECORDS.bit_length() + 1
