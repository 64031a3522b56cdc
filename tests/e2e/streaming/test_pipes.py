"""Dagster Pipes with Kafka and Dagster in both forms of runs.

Like jobs on a cluster, the external processes outlive a killed run.
"""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance.testing.deadline import wait_until
from tests.e2e.streaming.groups import committed, letters_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.deployment import DagsterDeployment

pytestmark = [pytest.mark.e2e, pytest.mark.broker]
GROUPS = ("pipes_batch", "pipes_stream")
RECORDS, BAD = 5, 1
Status = dg.DagsterRunStatus


class Group:
    """One of the groups: its topic, its runs and their children."""

    def __init__(
        self, name: str, kafka: KafkaCluster, root: Path, instance: dg.DagsterInstance
    ) -> None:
        self.name = name
        self.kafka = kafka
        self.root = root
        self.instance = instance
        self.produced: list[str] = []

    def produce(self) -> None:
        """Write records that are all different; the last one is bad."""
        # Members see all of these records at once.
        producer = Producer({**self.kafka.client_config(), "linger.ms": 1_000})
        for number in range(RECORDS):
            kind = self.name if number < RECORDS - BAD else "bad"
            self.produced.append(f"{kind}-{len(self.produced)}")
            producer.produce(self.name, self.produced[-1].encode())
        producer.flush(120)

    def committed(self) -> int:
        """The committed offset."""
        return committed(self.kafka, self.name, self.name)

    def output(self) -> list[str]:
        """Return the records that its external processes have written."""
        file = self.root / f"{self.name}_output"
        return file.read_text().splitlines() if file.exists() else []

    def runs(self) -> list[dg.DagsterRun]:
        """Its runs, oldest first."""
        records = self.instance.get_run_records(dg.RunsFilter(job_name=self.name), ascending=True)
        return [record.dagster_run for record in records]

    def journal(self) -> list[tuple[str, str]]:
        """Return the events of its external processes, with their runs."""
        mine = {run.run_id for run in self.runs()}
        file = self.root / "journal"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(event, run_id) for event, run_id in lines if run_id in mine]

    def begun(self) -> list[str]:
        """The runs of its children, in the order in which these began."""
        return [run_id for event, run_id in self.journal() if event == "began"]

    def close(self) -> None:
        """Let children wait before they write."""
        (self.root / f"{self.name}_closed").touch()

    def open(self) -> None:
        """Let them go on."""
        (self.root / f"{self.name}_closed").unlink()

    def said(self, run_id: str) -> str:
        """All messages of a run in Dagster's event log."""
        return " ".join(entry.message for entry in self.instance.all_logs(run_id))

    def state(self) -> str:
        """Return the state for error messages."""
        runs = [f"{run.run_id[:8]} {run.status.value}" for run in self.runs()]
        return f"{self.name}: {runs}, committed {self.committed()}, {self.journal()}"


def _process(group: Group, run_id: str) -> int:
    found = re.search(r"Executing steps in process \(pid: (\d+)\)", group.said(run_id))
    assert found is not None
    return int(found[1])


def _each(groups: list[Group], what: str, condition: Callable[[Group], object]) -> None:
    for group in groups:
        wait_until(
            lambda group=group: condition(group) or None,  # type: ignore[misc]
            timeout_s=240,
            what=lambda group=group: f"{what}; {group.state()}",  # type: ignore[misc]
            interval_s=0.2,
        )


def _all_done_once(groups: list[Group]) -> None:
    _each(groups, "all to be committed", lambda group: group.committed() == len(group.produced))
    for group in groups:
        bad = [value for value in group.produced if value.startswith("bad")]
        assert group.output() == [value for value in group.produced if value not in bad]
        assert [letter.value for letter in letters_of(group.kafka, group.name)] == [
            value.encode() for value in bad
        ]


def test_pipes_write_records_once_through_a_kill_and_a_cancel(
    kafka_broker: KafkaCluster, dagster: DagsterDeployment, root: Path
) -> None:
    for name in GROUPS:
        kafka_broker.create_topic(name, 1)
        kafka_broker.create_topic(f"{name}-dead", 1)
    with dagster.instance() as instance:
        groups = [Group(name, kafka_broker, root / "pipes", instance) for name in GROUPS]
        for group in groups:
            group.produce()
            dagster.ui.start_sensor("shop", f"{group.name}_sensor")
        _all_done_once(groups)
        for group in groups:
            _is_shown(group)

        killed = _begin_another(groups)
        for group, run_id in zip(groups, killed, strict=True):
            os.kill(_process(group, run_id), signal.SIGKILL)
        _each(groups, "the next child", lambda group: group.begun()[-1] not in killed)
        for group, run_id in zip(groups, killed, strict=True):
            assert _ends(group, run_id)[:1] == ["stopped"], "it went on until it was stopped"
            group.open()
        _all_done_once(groups)

        cancelled = _begin_another(groups)
        for run_id in cancelled:
            dagster.ui.cancel(run_id)
        _each(groups, "the next child", lambda group: group.begun()[-1] not in cancelled)
        for group, run_id in zip(groups, cancelled, strict=True):
            assert _ends(group, run_id)[:2] == ["interrupted", "stopped"], group.state()
            assert instance.get_run_by_id(run_id).status is Status.CANCELED  # type: ignore[union-attr]
            group.open()
        _all_done_once(groups)


def _is_shown(group: Group) -> None:
    """The messages of the external process are in the log and the materialization."""
    (run_id,) = {run_id for event, run_id in group.journal() if event == "done"}
    assert f"wrote {RECORDS - BAD} records as {group.name}_orders" in group.said(run_id)
    wanted = dg.AssetKey(f"{group.name}_orders")
    (record,) = group.instance.fetch_materializations(wanted, limit=10).records
    assert record.asset_materialization is not None
    metadata = record.asset_materialization.metadata
    assert metadata["dagster/row_count"].value == RECORDS - BAD
    assert metadata["set_aside"].value == BAD
    assert metadata["offsets"].value == RECORDS
    assert f"- `{group.name}-0 [0, {RECORDS})`" in str(metadata["ranges"].value)


def _ends(group: Group, run_id: str) -> list[str]:
    """Return the events between the last process of a run and the first one after it."""
    journal = group.journal()
    last = max(number for number, line in enumerate(journal) if line == ("began", run_id))
    ends = []
    for event, of in journal[last + 1 :]:
        if event == "began":
            break
        assert of == run_id
        ends.append(event)
    return ends


def _begin_another(groups: list[Group]) -> list[str]:
    """Let a child begin on new records in each group, and wait; the runs of these."""
    before = {group.name: len(group.begun()) for group in groups}
    for group in groups:
        group.close()
        group.produce()
    _each(groups, "a child at work", lambda group: len(group.begun()) > before[group.name])
    return [group.begun()[-1] for group in groups]
