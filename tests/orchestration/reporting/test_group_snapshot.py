"""Snapshot of a whole group, without membership."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.directives import Action
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange
from dagster_rebalance.core.model.printable import Reason
from dagster_rebalance.core.reporting.group_status import GroupMember, Owners, RecordedAssignment
from dagster_rebalance.core.reporting.lag import GroupState
from dagster_rebalance.kafka.log_bounds import READ_LIMIT_S
from dagster_rebalance.orchestration.operators.requests import DirectiveRequest, issue_directive
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import build_stopped_check
from dagster_rebalance.orchestration.reporting.group_settings import GroupSettings, public_settings
from dagster_rebalance.orchestration.reporting.group_snapshot import (
    GroupSnapshot,
    scan_with_stops,
    take_snapshot,
)
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER, MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG, RunEvent, record_run_event
from tests.orchestration.parts import (
    GROUPS,
    KafkaInMemory,
    batch_request,
    claimed,
    give_sign,
    kafka_in_memory,
    make_run,
    tp,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.reporting.group_status import PartitionStatus

Status = dg.DagsterRunStatus
NOBODY_THERE = Owners(())


class Scene:
    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.kafka: KafkaInMemory = kafka_in_memory(max_attempts=1)
        self.assets = GroupAssets.of(self.kafka.group_id)
        self.group = GROUPS[self.kafka.group_id]
        self.catalogue = Catalogue(instance, self.assets, NO_MEMBER)
        self.catalogue.add_partitions([tp(0), tp(1)])
        for number in (0, 1):
            self.group.produce(tp(number), 20)
            self.group.committed[tp(number)] = OffsetAndMetadata(0)

    def look(self, owners: Owners = NOBODY_THERE, *topics: str) -> GroupSnapshot:
        with self.kafka.connect() as consumer:
            return take_snapshot(
                consumer,
                ["orders", *topics],
                RunLedger(self.instance, self.kafka.group_id),
                self.catalogue,
                settings=self.kafka.engine_settings(),
                owners=owners,
            )

    def row(self, number: int = 0, owners: Owners = NOBODY_THERE) -> PartitionStatus:
        return self.look(owners).statuses[tp(number)]

    def run(self, batch_id: str, status: Status) -> dg.DagsterRun:
        self.group.committed[tp(0)] = claimed(0, 10, batch_id)
        return make_run(
            self.instance, batch_request(batch_id), status, group_id=self.kafka.group_id
        )


@pytest.fixture
def scene(instance: dg.DagsterInstance) -> Scene:
    return Scene(instance)


def test_snapshot_writes_nothing(scene: Scene, batch_id: str) -> None:
    scene.run(batch_id, Status.SUCCESS)
    del scene.group.committed[tp(1)]
    before = dict(scene.group.committed)
    seen = scene.look().statuses
    assert scene.group.committed == before
    assert scene.group.members == ()
    assert seen[tp(0)].sentence == "orders-0: [0, 10) has succeeded and is committed in order"
    assert seen[tp(1)].committed is None
    assert seen[tp(1)].lag == 20


def test_run_at_work_is_named(scene: Scene, batch_id: str) -> None:
    run = scene.run(batch_id, Status.STARTED)
    assert scene.row().runs == (run.run_id,)
    said = f"orders-0: run {run.run_id[:8]} works on [0, 10) (for "
    assert scene.row().sentence.startswith(said)


def test_attempts_are_counted_with_the_settings_of_the_members(scene: Scene, batch_id: str) -> None:
    run = scene.run(batch_id, Status.FAILURE)
    record_run_event(scene.instance, run, RunEvent.BEGAN)
    record_run_event(scene.instance, run, RunEvent.OVER)
    assert run.run_id in scene.row().stopped
    assert scene.row(1).stopped == ""


def test_stop_that_only_its_owner_knows_is_shown(scene: Scene, batch_id: str) -> None:
    """The run has failed with an error of a record, and the member cannot store the letter."""
    scene.kafka = kafka_in_memory(
        max_attempts=1, on_failure="dead_letter", dead_letter_topic="orders-dead"
    )
    scene.group = GROUPS[scene.kafka.group_id]
    scene.group.produce(tp(0), 20)
    scene.group.produce(tp(1), 20)
    scene.group.committed[tp(1)] = OffsetAndMetadata(0)
    run = scene.run(batch_id, Status.FAILURE)
    record_run_event(scene.instance, run, RunEvent.BEGAN)
    record_run_event(scene.instance, run, RunEvent.OVER)
    owners = Owners((GroupMember("m1", "a@b", frozenset({tp(0)})),))
    assert scene.row(0, owners).stopped == ""
    why = Reason("orders-0: max_dead_letters allows 5", "Mend them")
    scene.catalogue.show_stopped(
        GroupState({tp(0): why, tp(1): "orders-1: old"}, reported=frozenset({tp(0), tp(1)})), {}
    )
    row = scene.row(0, owners)
    assert row.stopped == why
    assert row.sentence == "orders-0: stopped: max_dead_letters allows 5. Mend them"
    assert Reason.of(row.stopped).remedy == "Mend them"
    assert scene.row(0).stopped == scene.row(1, owners).stopped == ""  # the next owner retries
    ledger = RunLedger(scene.instance, scene.kafka.group_id)
    with scene.kafka.connect() as consumer:
        _, standing = scan_with_stops(
            consumer, ["orders"], ledger, scene.catalogue, scene.kafka.engine_settings()
        )
    assert standing.stopped[tp(0)] == why
    assert standing.reported == {tp(0), tp(1)}


def test_manual_check_keeps_the_stop_that_only_its_owner_knows(scene: Scene) -> None:
    """While a user evaluates the check, its newest record is the plan of that run."""
    why = Reason("orders-0: max_dead_letters allows 5", "Mend them")
    scene.catalogue.show_stopped(GroupState({tp(0): why}, reported=frozenset({tp(0)})), {})
    check = build_stopped_check(scene.assets.offsets, "kafka", lambda _: scene.catalogue)
    job = dg.Definitions(asset_checks=[check], resources={"kafka": scene.kafka})
    for _ in range(2):
        result = job.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=scene.instance
        )
        (evaluation,) = result.get_asset_check_evaluations()
        assert evaluation.description == "orders-0: max_dead_letters allows 5"
        shown = scene.catalogue.shown_stops()
        assert shown.by_owners == {tp(0): why}


def test_reported_stop_of_partition_at_work_is_left_out(scene: Scene, batch_id: str) -> None:
    scene.run(batch_id, Status.STARTED)
    scene.catalogue.show_stopped(
        GroupState({tp(0): "orders-0: old"}, reported=frozenset({tp(0)})), {}
    )
    owners = Owners((GroupMember("m1", "a@b", frozenset({tp(0)})),))
    assert scene.row(0, owners).stopped == ""


def test_directives_are_shown(scene: Scene) -> None:
    issue_directive(
        scene.instance,
        scene.kafka.group_id,
        DirectiveRequest(Action.PAUSE, ["orders:1"], "ada", "away"),
    )
    assert scene.row(1).paused.startswith("paused by ada since ")
    assert scene.row(0).paused == ""


def test_unreadable_directives_are_an_error(scene: Scene) -> None:
    scene.instance.add_dynamic_partitions(scene.assets.directives_name, ["1 nonsense"])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        scene.look()


def test_silent_leader_hides_only_its_own_partitions(scene: Scene) -> None:
    scene.group.silence(tp(1))
    seen = scene.look()
    assert seen.statuses[tp(0)].end == 20
    assert seen.statuses[tp(1)].end is None
    assert seen.statuses[tp(1)].committed == 0
    assert seen.notes


def test_snapshot_waits_longer_for_a_leader_than_a_member(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy broker takes more than 1.5 s."""
    log_ends, waits = scene.group.log_ends, []

    def slow(partitions: Collection[TopicPartition], timeout_s: float) -> object:
        waits.append(timeout_s)
        return log_ends(partitions, timeout_s)

    monkeypatch.setattr(scene.group, "log_ends", slow)
    scene.look()
    assert set(waits) == {READ_LIMIT_S}


def test_missing_topic_is_reported_beside_the_others(scene: Scene) -> None:
    seen = scene.look(NOBODY_THERE, "payments")
    assert seen.missing_topics == ("payments",)
    assert list(seen.statuses) == [tp(0), tp(1)]


def test_streaming_run_that_owns_a_partition_blocks_nothing(scene: Scene, batch_id: str) -> None:
    run = make_run(
        scene.instance,
        batch_request(batch_id, OffsetRange("none", 0, 0, 1)),
        Status.STARTED,
        group_id=scene.kafka.group_id,
        tags={STREAM_TAG: "blue:stream"},
    )
    give_sign(scene.instance, run, "1 orders:0,1 elsewhere:1:1")
    member = GroupMember("m1", "a@b", frozenset({tp(0)}))
    owners = Owners(
        (member,), (RecordedAssignment("m1", "blue/x", run.run_id, frozenset({tp(0)})),)
    )
    assert scene.row(0, owners).runs == ()
    assert scene.row(1, owners).runs == (run.run_id,)


def test_members_store_their_settings_without_secrets(scene: Scene) -> None:
    kafka = scene.kafka.model_copy(
        update={"sasl_username": "me", "sasl_password": "secret", "client_config": {"ssl.key": "k"}}
    )
    host = MemberIdentity("blue", "sensor", "p")
    for settings in ("an older text", public_settings(kafka), public_settings(kafka)):
        Catalogue(scene.instance, scene.assets, host, settings).record_joined()
    kept = scene.instance.get_dynamic_partitions(scene.assets.settings_name)
    assert list(kept) == [public_settings(kafka)]
    assert not {"secret", "me", "k"} & set(public_settings(kafka).replace('"', " ").split())
    read = GroupSettings(scene.instance, scene.assets.settings_name).read()
    assert (read["max_attempts"], read["bootstrap_servers"]) == (1, "memory:1")
    assert read["topics"] == ["orders"]


def test_settings_that_are_too_long_are_left_out(scene: Scene) -> None:
    """A key of a database has a limit."""
    many = scene.kafka.model_copy(update={"topics": [f"topic-{n}" for n in range(500)]})
    assert '"topics"' not in public_settings(many)
    assert '"bootstrap_servers"' in public_settings(many)


def test_settings_of_an_unknown_group_are_none(scene: Scene) -> None:
    settings = GroupSettings(scene.instance, scene.assets.settings_name)
    assert settings.read() == {}
    for nonsense in ("not json", "[1]"):
        settings.keep(nonsense)
        assert settings.read() == {}
    settings.keep('{"max_attempts": 2, "from_the_future": 1}')
    assert settings.read() == {"max_attempts": 2}


def test_assignments_are_read_newest_first(scene: Scene) -> None:
    blue = Catalogue(scene.instance, scene.assets, MemberIdentity("blue", "sensor", "p1"))
    blue.record_assigned([tp(0)], "m1")
    blue.record_left("it ends")
    Catalogue(
        scene.instance, scene.assets, MemberIdentity("green", "sensor", "p2")
    ).record_assigned([tp(0), tp(1)], "m2")
    for strange in (["shop"], ["orders-x", None, 1], ["orders-" + 5_000 * "9"], "orders-0"):
        event: dict[str, Any] = {
            "event": "assigned",
            "partitions": dg.MetadataValue.json(strange),
        }
        scene.instance.report_runless_asset_event(
            dg.AssetObservation(scene.assets.group, metadata=event)
        )
    assert [one for one in scene.catalogue.assigned() if one.partitions] == [
        RecordedAssignment("m2", "green", "p2", frozenset({tp(0), tp(1)})),
        RecordedAssignment("m1", "blue", "p1", frozenset({tp(0)})),
    ]
