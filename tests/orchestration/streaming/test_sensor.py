"""The sensor of streaming runs: the runs that it counts, requests and asks to leave."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance import build_kafka_stream_defs
from dagster_rebalance.core.model.commands import Cause, ShowHold
from dagster_rebalance.core.model.directives import Action
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.run_snapshot import BatchRequest
from dagster_rebalance.core.reporting.lag import NO_LIMIT, GroupLag, GroupState, PartitionLag
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
from dagster_rebalance.orchestration.operators.requests import DirectiveRequest, issue_directive
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import (
    STOPPED_CHECK,
    as_evaluation,
    stopped_result,
)
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.dynamic_partitions import RerunStore
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats
from dagster_rebalance.orchestration.storage.key_values import KeyValues
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import (
    BATCH_TAG,
    GROUP_TAG,
    RERUN_TAG,
    SLOT_TAG,
    STREAM_TAG,
    VERSION_TAG,
    RunEvent,
    ranges_in,
    record_run_event,
    run_events_of,
)
from dagster_rebalance.orchestration.streaming import stream_sensor as sensor_module
from dagster_rebalance.orchestration.streaming.stream_sensor import streams_of
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.parts import kafka_in_memory, make_run, nothing, span, tp

if TYPE_CHECKING:
    from collections.abc import Sequence

Status = dg.DagsterRunStatus


@dg.asset
def orders(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
    """Never executed."""


class Sensor:
    def __init__(
        self, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, version: str = "v1"
    ) -> None:
        self.instance = instance
        self.monkeypatch = monkeypatch
        self.kafka = kafka_in_memory()
        self.name = unique_name("stream").replace("-", "_")
        self.stream = f"unknown:{self.name}_sensor"
        self.cursor: str | None = None
        self.deploy(version)

    def deploy(self, version: str) -> None:
        self.version = version
        self.defs = build_kafka_stream_defs(
            kafka=self.kafka, assets=[orders], name=self.name, version=version, runs=2
        )

    def tick(self, *, real: bool = True) -> Any:  # noqa: ANN401 - Dagster's class is private
        self.monkeypatch.setattr(sensor_module, "is_real_tick", lambda _context: real)
        made = self.defs.resolve_sensor_def(f"{self.name}_sensor")
        context = dg.build_sensor_context(
            instance=self.instance,
            definitions=self.defs,
            sensor_name=f"{self.name}_sensor",
            resources={"kafka": self.kafka, "spark": KafkaSparkResource()},
            cursor=self.cursor,
        )
        with context:
            result = made.evaluate_tick(context)
        self.cursor = result.cursor
        for request in result.run_requests or ():
            self.instance.create_run_for_job(
                _job, status=Status.NOT_STARTED, tags=dict(request.tags)
            )
        return result

    def runs(self) -> list[dg.DagsterRun]:
        found = self.instance.get_runs(dg.RunsFilter(tags={STREAM_TAG: self.stream}))
        return list(reversed(found))

    def begin(self, run: dg.DagsterRun) -> None:
        self.instance.report_dagster_event(
            dg.DagsterEvent(event_type_value="PIPELINE_START", job_name=run.job_name), run.run_id
        )
        record_run_event(self.instance, run, RunEvent.JOINED)


def test_tick_reports_why_partitions_are_stopped(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor = Sensor(instance, monkeypatch)
    sensor.tick()
    assert "failed" not in str(sensor.tick().skip_message)
    assets = GroupAssets.of(sensor.kafka.group_id)
    stops = {tp(n): f"orders-{n}: 3 attempts failed: ValueError: no price" for n in range(5)}
    instance.report_runless_asset_event(
        as_evaluation(stopped_result(GroupState(stops), {}), STOPPED_CHECK, assets.offsets)
    )
    said = str(sensor.tick().skip_message)
    assert "orders-0: 3 attempts failed: ValueError: no price" in said
    assert "orders-2: 3 attempts failed" in said
    assert "orders-3" not in said
    assert said.endswith("; 2 more stopped")


@dg.job(resource_defs={"kafka_batch": dg.ResourceDefinition.none_resource()})
def _job() -> None:
    nothing()


@pytest.fixture
def sensor(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Sensor:
    return Sensor(instance, monkeypatch)


def test_tick_starts_missing_runs(sensor: Sensor) -> None:
    requests = sensor.tick().run_requests
    assert [request.tags[SLOT_TAG] for request in requests] == ["0", "1"]
    assert {request.tags[VERSION_TAG] for request in requests} == {"v1"}
    assert not sensor.tick().run_requests
    sensor.instance.report_run_canceled(sensor.runs()[0])
    assert [request.tags[SLOT_TAG] for request in sensor.tick().run_requests] == ["0"]


def test_tick_reports_assignments_holds_and_lag(sensor: Sensor) -> None:
    sensor.tick()
    group_id = sensor.kafka.group_id
    assets = GroupAssets.of(group_id)
    member = Catalogue(sensor.instance, assets, MemberIdentity("shop/3f61351e", "s", "3f61351e-1"))
    member.add_partitions([tp(2)])
    member.record_assigned([tp(0), tp(1), tp(2)], "m")
    member.record_hold(ShowHold(Cause.REVOKE, (tp(1),), ("9a0f22c1-2",), 300.0))
    member.show_lag(GroupLag((PartitionLag(tp(0), 3, 7, 4),)), NO_LIMIT)
    issue_directive(
        sensor.instance, group_id, DirectiveRequest(Action.PAUSE, ["orders:2"], "ada", "a move")
    )
    said = str(sensor.tick().skip_message)
    assert "; shop/3f61351e owns orders-0..2; shop/3f61351e holds orders-1 since " in said
    assert " UTC, for run 9a0f22c1; as of " in said
    assert said.endswith(" s ago: lag 4 in 1 partition")
    runs = sorted(run.run_id[:8] for run in sensor.runs())
    assert said.startswith(f"0 of 2 streaming runs live; starting: runs {', '.join(runs)}; ")


def test_cursor_is_the_headline_and_heartbeats_are_key_values(
    sensor: Sensor, instance: dg.DagsterInstance
) -> None:
    sensor.tick()
    for run in sensor.runs():
        sensor.begin(run)
    sensor.tick()
    assert sensor.cursor is not None
    assert sensor.cursor.startswith("2 of 2 streaming runs live: runs ")
    assert len(sensor.cursor.splitlines()) == 1
    key = f"dagster_rebalance/sensor/{sensor.stream}"
    memory = json.loads(instance.run_storage.get_cursor_values({key})[key])
    assert {sign[0] for sign in memory["signs"]} == {run.run_id for run in sensor.runs()}


def test_cursor_has_the_heartbeats_without_key_values(
    sensor: Sensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cursor of an earlier version, which was JSON, is still read."""
    monkeypatch.setattr(KeyValues, "fetch", lambda *_: None)
    monkeypatch.setattr(KeyValues, "set", lambda *_: False)
    sensor.tick()
    for run in sensor.runs():
        sensor.begin(run)
    sensor.tick()
    assert sensor.cursor is not None
    shown, _, memory = sensor.cursor.partition("\n")
    assert set(json.loads(memory)) == {"observed_at", "signs"}
    sensor.cursor = memory
    sensor.tick()
    assert sensor.cursor.startswith(shown)


def test_preview_reports_actions_and_takes_none(sensor: Sensor) -> None:
    result = sensor.tick(real=False)
    assert not result.run_requests
    assert "a run for slot 0 would be started, a run for slot 1 would be started" in str(
        result.skip_message
    )


@pytest.mark.parametrize("table", ["members", "open_holds"])
def test_foreign_tables_on_the_group_asset_fail_no_tick(
    sensor: Sensor, instance: dg.DagsterInstance, table: str
) -> None:
    group = GroupAssets.of(sensor.kafka.group_id).group
    strange = dg.MetadataValue.table([dg.TableRecord({"name": "ada"})])
    known = dg.MetadataValue.table([dg.TableRecord({"member": "blue", "owns": "orders-0"})])
    metadata = {"members": known, table: strange}
    instance.report_runless_asset_event(dg.AssetObservation(group, metadata=metadata))
    assert len(sensor.tick().run_requests or ()) == 2


def test_new_code_replaces_the_runs_one_by_one(sensor: Sensor) -> None:
    """The new ones join first; each old one leaves when the one before it has left."""
    sensor.tick()
    old = sensor.runs()
    for run in old:
        sensor.begin(run)
    sensor.deploy("v2")
    sensor.tick()
    assert not sensor.tick().run_requests
    new = sensor.runs()[2:]
    assert [run.tags[VERSION_TAG] for run in new] == ["v2", "v2"]
    assert all(RunEvent.LEAVE not in run_events_of(sensor.instance, run.run_id) for run in old)
    waits = str(sensor.tick().skip_message)
    for run in new:
        sensor.begin(run)
    said = str(sensor.tick().skip_message)
    shown = ", ".join(sorted(run.run_id[:8] for run in new))
    replaced = ", ".join(sorted(run.run_id[:8] for run in old))
    assert waits.startswith(
        f"0 of 2 streaming runs live with the new code; starting: runs {shown}; "
        f"working until replaced: runs {replaced}"
    )
    assert said.startswith(
        f"2 of 2 streaming runs live with the new code: runs {shown}; "
        f"working until replaced: runs {replaced}"
    )
    assert [RunEvent.LEAVE in run_events_of(sensor.instance, run.run_id) for run in old] == [
        True,
        False,
    ]
    assert f"run {old[0].run_id[:8]} is leaving" in str(sensor.tick().skip_message)
    sensor.instance.report_run_canceled(old[0])
    sensor.tick()
    assert RunEvent.LEAVE in run_events_of(sensor.instance, old[1].run_id)
    logs = sensor.instance.all_logs(old[1].run_id)
    assert any(f"run {new[1].run_id[:8]} has newer code" in entry.message for entry in logs)


def test_changed_client_setting_replaces_the_runs(sensor: Sensor) -> None:
    versions = []
    for client, spark in (
        ({"isolation.level": "read_committed"}, {}),
        ({"isolation.level": "read_uncommitted"}, {}),
        ({"isolation.level": "read_uncommitted"}, {"spark_config": {"spark.ui.enabled": "true"}}),
        ({"isolation.level": "read_uncommitted"}, {"remote": "sc://other:15002"}),
    ):
        sensor.defs = build_kafka_stream_defs(
            kafka=sensor.kafka.model_copy(update={"client_config": client}),
            assets=[orders],
            spark=KafkaSparkResource(**spark),
            name=sensor.name,
        )
        versions += [request.tags[VERSION_TAG] for request in sensor.tick().run_requests or ()]
        assert not sensor.tick().run_requests, "the same settings are the same code"
    assert len(set(versions)) == 4


def test_re_execution_takes_the_slot_of_its_parent(sensor: Sensor) -> None:
    """Dagster copies its tags."""
    sensor.tick()
    first, other = sensor.runs()
    again = sensor.instance.create_run_for_job(
        _job, tags=first.tags, parent_run_id=first.run_id, root_run_id=first.run_id
    )
    for run in (first, other, again):
        sensor.begin(run)
    assert not sensor.tick().run_requests
    asked = [
        RunEvent.LEAVE in run_events_of(sensor.instance, run.run_id)
        for run in (first, other, again)
    ]
    assert asked == [True, False, False]


def test_run_without_heartbeat_is_ended_and_replaced(
    sensor: Sensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor.tick()
    dead, alive = sensor.runs()
    signs, now = Heartbeats(sensor.instance), time.time()
    for run in (dead, alive):
        sensor.begin(run)
        signs.record(run, _number(sensor, run), "0 elsewhere:1:1")
    monkeypatch.setattr(time, "time", lambda: now)
    for beat in range(1, 6):
        assert not sensor.tick().run_requests, "the clock alone shows nothing"
        now += sensor.kafka.heartbeat_timeout_s / 4
        signs.record(alive, _number(sensor, alive), f"{beat} elsewhere:2:1")
    (request,) = sensor.tick().run_requests
    assert request.tags[SLOT_TAG] == dead.tags[SLOT_TAG]
    assert [run.status for run in sensor.runs()[:2]] == [Status.FAILURE, Status.STARTED]


def test_dead_run_that_cannot_be_ended_frees_its_slot(
    sensor: Sensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor.tick()
    dead, _ = sensor.runs()
    sensor.begin(dead)
    Heartbeats(sensor.instance).record(dead, _number(sensor, dead), "0 elsewhere:1:1")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)

    def end_dead(*_: object) -> bool:
        message = "Spark does not answer"
        raise OSError(message)

    monkeypatch.setattr(RunLedger, "end_dead", end_dead)
    requests: list[dg.RunRequest] = []
    for _ in range(8):
        now += sensor.kafka.heartbeat_timeout_s / 4
        requests += sensor.tick().run_requests or ()
    assert requests[0].tags[SLOT_TAG] == dead.tags[SLOT_TAG]


def _number(sensor: Sensor, run: dg.DagsterRun) -> int:
    record = sensor.instance.get_run_record_by_id(run.run_id)
    assert record is not None
    return record.storage_id


def test_same_name_in_another_code_location_is_another_stream(sensor: Sensor) -> None:
    sensor.instance.create_run_for_job(
        _job, status=Status.STARTED, tags={STREAM_TAG: f"green:{sensor.name}_sensor"}
    )
    assert streams_of(sensor.instance, sensor.stream, ()) == ()


def test_queue_time_does_not_depend_on_the_zone_of_the_database(
    sensor: Sensor,
) -> None:
    """Postgres stores the creation time in the zone of the connection."""
    tags = {STREAM_TAG: sensor.stream, SLOT_TAG: "0"}
    batch_request = BatchRequest("b", 1, (span(0, 0, 5),))
    run = make_run(sensor.instance, batch_request, Status.NOT_STARTED, tags=tags)
    began_at = time.time()
    enqueued = dg.DagsterEvent(event_type_value="PIPELINE_ENQUEUED", job_name=run.job_name)
    sensor.instance.report_dagster_event(enqueued, run.run_id)
    record = sensor.instance.get_run_record_by_id(run.run_id)
    assert record is not None
    ahead = record._replace(create_timestamp=record.create_timestamp + timedelta(hours=5))
    seen = {one.run_id: one for one in streams_of(sensor.instance, sensor.stream, [])}
    assert seen[run.run_id].queued_at == pytest.approx(began_at, abs=60)
    assert (
        sensor_module._streaming_run(sensor.instance, ahead).queued_at == seen[run.run_id].queued_at
    )
    sensor.begin(run)
    (begun,) = streams_of(sensor.instance, sensor.stream, ())
    assert begun.queued_at is None


def test_tick_reads_the_live_runs_once(sensor: Sensor, monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = sensor_module._live, []

    def counted(instance: dg.DagsterInstance, stream: str) -> Sequence[dg.RunRecord]:
        asked.append(stream)
        return read(instance, stream)

    monkeypatch.setattr(sensor_module, "_live", counted)
    sensor.tick()
    assert asked == [sensor.stream]


def test_sensor_starts_runs_of_reruns_beside_streaming_runs(sensor: Sensor) -> None:
    group = GroupAssets.of(sensor.kafka.group_id)
    ranges = (span(0, 0, 10), span(0, 10, 20))
    batch = RerunBatch(Rerun("abc", "ada", "the fix", 1.0), 1, ranges)
    RerunStore(sensor.instance, group.reruns_name).add([batch])
    assert not [r for r in sensor.tick(real=False).run_requests or () if RERUN_TAG in r.tags]
    *_, request = sensor.tick().run_requests
    assert request.tags[BATCH_TAG] == "r.abc.1"
    assert STREAM_TAG not in request.tags
    assert ranges_in(request.run_config, "r.abc.1") == ranges
    assert list(request.run_config["resources"]) == [f"{sensor.name}_rerun_batch"]
    assert len(sensor.runs()) == 2


def test_job_has_the_tag_of_its_group(sensor: Sensor) -> None:
    """A manual re-execution counts, too."""
    assert sensor.defs.resolve_job_def(sensor.name).tags[GROUP_TAG] == sensor.kafka.group_id


def test_runs_of_zero_ends_all_runs_one_by_one(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor = Sensor(instance, monkeypatch)
    sensor.tick()
    for run in sensor.runs():
        sensor.begin(run)
    sensor.defs = build_kafka_stream_defs(
        kafka=sensor.kafka, assets=[orders], name=sensor.name, version="v1", runs=0
    )
    assert not sensor.tick().run_requests
    asked = [RunEvent.LEAVE in run_events_of(instance, run.run_id) for run in sensor.runs()]
    assert asked == [True, False]


@dg.asset
def in_lake(kafka_batch, lake: dg.ResourceParam[object]) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
    """Never executed."""


def test_merged_resource_configured_at_launch_fails_the_tick(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor = Sensor(instance, monkeypatch)
    made = build_kafka_stream_defs(kafka=sensor.kafka, assets=[in_lake], name=sensor.name)
    waits = dg.ResourceDefinition(lambda _context: None, config_schema={"path": str})
    sensor.defs = dg.Definitions.merge(made, dg.Definitions(resources={"lake": waits}))
    with pytest.raises(ConfigurationError, match=r"the resource 'lake' of job .* is configured at"):
        sensor.tick()
