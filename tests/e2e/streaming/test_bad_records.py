"""Bad records and their replay through killed runs, in both forms at once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance import ConfigurationError, KafkaConsumerResource
from dagster_rebalance.core.model.letters import LetterState
from dagster_rebalance.orchestration.operators.letters import (
    LetterRequest,
    plan_replay,
)
from dagster_rebalance.orchestration.operators.requests import Reruns
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.testing.deadline import wait_until
from tests.e2e.streaming.groups import committed, letters_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.deployment import DagsterDeployment

pytestmark = [pytest.mark.e2e, pytest.mark.broker]
PARTITIONS, RECORDS, BAD_EACH = 2, 2_000, 5
GROUPS = ("bad_batches", "bad_stream")
ONCE = 3
"""The offset of a record of each partition that only the first attempt sets aside."""


def produce(kafka: KafkaCluster) -> set[str]:
    """Produce numbers, some of them bad, and return the keys of the letters."""
    producer = Producer(kafka.client_config())
    bad = set()
    for number in range(RECORDS):
        partition, offset = number % PARTITIONS, number // PARTITIONS
        is_bad = offset % (RECORDS // PARTITIONS // BAD_EACH) == 7
        kind = "bad" if is_bad else "once" if offset == ONCE else ""
        producer.produce("bad", f"{kind}{number}", partition=partition)
        if is_bad:
            bad.add(f"bad-{partition}-{offset}")
    assert producer.flush(120) == 0
    return bad


def rows_of(folder: Path) -> list[str]:
    return [value for file in folder.iterdir() for value in file.read_text().split("\n") if value]


def resource(kafka: KafkaCluster, group: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=kafka.bootstrap_servers,
        group_id=group,
        topics=["bad"],
        dead_letter_topic=f"{group}-dead",
    )


def states(kafka: KafkaCluster, group: str) -> Counter[LetterState]:
    """Return the number of letters in each state."""
    return +DeadLetterTopic(resource(kafka, group)).read().counts


def begin(kafka: KafkaCluster, instance: dg.DagsterInstance, group: str) -> str:
    """Begin a replay of all open letters, and return its id."""
    own = resource(kafka, group)
    request = LetterRequest((), everything=True, containing="", by="ada", why="mended")
    plan = plan_replay(instance, own, request)
    Reruns(instance, own).begin(plan)
    return plan.rerun.rerun_id


@pytest.mark.timeout(1200)
def test_bad_records_become_one_letter_each_through_a_killed_run(
    kafka_broker: KafkaCluster, dagster: DagsterDeployment, root: Path
) -> None:
    kafka_broker.create_topic("bad", partitions=PARTITIONS)
    for group in GROUPS:
        kafka_broker.create_topic(f"{group}-dead")
        (root / group).mkdir(exist_ok=True)
        (root / f"{group}_hold").touch()
    bad = produce(kafka_broker)

    with dagster.instance() as instance:

        def wait(what: str, condition: Callable[[str], object]) -> None:
            wait_until(
                lambda: all(map(condition, GROUPS)) or None,
                timeout_s=400,
                what=lambda: (
                    f"{what}; {[(run.job_name, run.status) for run in instance.get_runs()]}"
                ),
                interval_s=0.5,
            )

        for group in GROUPS:
            dagster.ui.start_sensor("shop", f"{group}_sensor")
        wait("records to be set aside", lambda group: (root / f"{group}_at_work").exists())
        before = {group: letters_of(kafka_broker, group) for group in GROUPS}
        assert all(before.values())
        for group in GROUPS:
            os.kill(int((root / f"{group}_at_work").read_text()), signal.SIGKILL)
            (root / f"{group}_hold").unlink()
        wait(
            "all commits",
            lambda group: committed(kafka_broker, group, "bad", PARTITIONS) == RECORDS,
        )
        for group in GROUPS:
            letters = letters_of(kafka_broker, group)
            once = {letter.key for letter in letters if letter.range.start == ONCE}
            assert once, "of the killed run, and processed by the next one"
            assert states(kafka_broker, group) == {
                LetterState.OPEN: len(bad),
                LetterState.REPLAYED: len(once),
            }
            assert Counter(letter.key for letter in letters) == Counter(bad | once)
            assert {letter.group_id for letter in letters} == {group}
            assert letters[: len(before[group])] == before[group], "of the killed run"
            assert all("is no number" in letter.reason for letter in letters)
            rows = rows_of(root / group)
            assert len(rows) == len(set(rows)) == RECORDS - len(bad)
        wait(
            "materializations",
            lambda group: instance.get_latest_materialization_event(
                dg.AssetKey(f"{group}_numbers")
            ),
        )
        replay_through_a_kill(kafka_broker, instance, root, wait, bad)


def replay_through_a_kill(
    kafka: KafkaCluster,
    instance: dg.DagsterInstance,
    root: Path,
    wait: Callable[[str, Callable[[str], object]], None],
    bad: set[str],
) -> None:
    """Replay the letters with mended code: kill the runs after they have written, and repeat."""
    first = {}
    for group in GROUPS:
        (root / f"{group}_at_work").unlink()
        (root / f"{group}_mended").touch()
        (root / f"{group}_hold").touch()
        first[group] = begin(kafka, instance, group)
    wait("runs of replays", lambda group: (root / f"{group}_at_work").exists())
    for group in GROUPS:
        os.kill(int((root / f"{group}_at_work").read_text()), signal.SIGKILL)
        (root / f"{group}_hold").unlink()
    for group in GROUPS:
        assert states(kafka, group)[LetterState.OPEN] == len(bad)
        Reruns(instance, resource(kafka, group)).cancel(first[group])
    again: dict[str, str] = {}

    def is_begun(group: str) -> bool:
        if group not in again:
            with suppress(ConfigurationError):  # the killed run may still work
                again[group] = begin(kafka, instance, group)
        return group in again

    wait("the next replays to begin", is_begun)
    wait("the next replays to end", lambda group: not states(kafka, group)[LetterState.OPEN])
    for group in GROUPS:
        rows = rows_of(root / group)
        assert len(rows) == len(set(rows)) == RECORDS
        assert committed(kafka, group, "bad", PARTITIONS) == RECORDS
