"""The runs of one code location: failures, previews, interrupted ticks, several assets."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.directives import Action
from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.orchestration.operators.requests import DirectiveRequest, issue_directive
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import BATCH_TAG
from tests.e2e.stage import PATIENCE_S, Group

if TYPE_CHECKING:
    from tests.e2e.stage import Stage

_STATUS = dg.DagsterRunStatus
pytestmark = [pytest.mark.e2e, pytest.mark.broker]


def test_run_that_fails_twice_is_retried_with_the_same_batch(stage: Stage) -> None:
    """Dagster ignores a known run key forever, so each attempt has its own key."""
    group = stage.group("failing", "consumer", partitions=1)
    group.fail_next(2)
    group.open()
    group.turn_on("blue")
    group.wait("all records to be committed", Group.is_done)
    assert [run.status.value for run in group.runs()] == ["FAILURE", "FAILURE", "SUCCESS"]
    assert len({run.tags["dagster_rebalance/batch"] for run in group.runs()}) == 1
    group.check_exactly_once()


def test_partition_with_failing_runs_is_stopped_until_a_re_execution(
    stage: Stage,
) -> None:
    group = stage.group("hopeless", "classic", partitions=1)
    group.fail_next(1)
    group.open()
    group.turn_on("blue")
    group.wait("the stop to be shown", lambda group: "failed on" in str(group.ticks("blue")[:1]))
    group.wait("the check to fail", lambda group: _check_state(stage, group.name) is False)
    stage.dagster.ui.re_execute(group.runs()[0].run_id)
    group.wait("all records to be committed", Group.is_done)
    group.wait("the check to pass again", lambda group: _check_state(stage, group.name))
    group.check_exactly_once()


def test_range_with_failing_runs_goes_to_the_dead_letter_topic(
    stage: Stage,
) -> None:
    """The dead letter is in the topic before the offset is committed."""
    stage.kafka.create_topic("dead_letters", 1)
    group = stage.group("poisoned", "consumer", partitions=1, records=20)
    group.fail_next(1)
    group.open()
    group.turn_on("blue")
    group.wait("all records to be committed", lambda group: group.is_done(20))
    assert group.output() == {f"{group.name}-0-10-20": 1}
    assert group.materialised() == [(f"{group.name}-0", 0, 10), (f"{group.name}-0", 10, 20)]
    ((key, letter),) = stage.dead_letters().items()
    assert (key, letter["run_ids"]) == (f"{group.name}-0-0-10", [group.runs()[0].run_id])
    assert "the test wants this run to fail" in letter["error"]
    assert [event["until"] for event in group.events("dead_letter")] == [10]


def _check_state(stage: Stage, group: str) -> bool | None:
    key = dg.AssetCheckKey(GroupAssets.of(group).offsets, STOPPED_CHECK)
    record = stage.instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(
        key
    )
    evaluation = record.evaluation if record else None
    return evaluation.passed if evaluation else None


def test_stopped_and_paused_partitions_continue_after_resume(stage: Stage) -> None:
    group = stage.group("ordered", "consumer", partitions=3)
    group.turn_on("blue")
    group.wait("all runs to work", lambda group: len(group.working()) == 3)
    for action, number in ((Action.STOP, 0), (Action.PAUSE, 1)):
        order = DirectiveRequest(action, (f"{group.name}:{number}",), "ada", "the table is moved")
        issue_directive(stage.instance, group.name, order)
    group.wait("its run to be cancelled", lambda group: group.in_state(_STATUS.CANCELED))
    group.open()
    group.wait("the others to go on", lambda group: group.committed() == {0: 0, 1: 10, 2: 10})
    group.produce([0, 1, 2], 5)
    group.wait("the free one to go on", lambda group: group.committed().get(2) == 15)
    assert group.committed() == {0: 0, 1: 10, 2: 15}
    assert len(group.in_state(_STATUS.CANCELED)) == 1
    group.wait("a tick to name it", lambda group: "stopped by ada" in str(group.ticks("blue")))
    group.wait("the check to warn", lambda group: _check_state(stage, group.name) is False)
    issue_directive(stage.instance, group.name, DirectiveRequest(Action.RESUME, ("*",), "ada"))
    group.wait("all records to be committed", lambda group: group.is_done(15))
    group.wait("the check to pass again", lambda group: _check_state(stage, group.name))
    group.check_exactly_once()


def test_preview_starts_no_run_and_uses_no_batch(stage: Stage) -> None:
    """A preview runs the same function in the same process."""
    group = stage.group("previewed", "classic", partitions=1)
    shown = stage.dagster.ui.preview("blue", group.sensor)
    assert "nothing is started" in shown["skipReason"]
    assert not group.events()
    group.turn_on("blue")
    group.wait("the batch to be requested", Group.working)
    shown = stage.dagster.ui.preview("blue", group.sensor)
    assert not shown["runRequests"]
    assert "preview" in shown["skipReason"]
    group.open()
    group.wait("all records to be committed", Group.is_done)
    assert len(group.runs()) == 1
    group.check_exactly_once()


def test_two_assets_of_one_run_get_the_same_batch(stage: Stage) -> None:
    group = stage.group("paired", "classic", partitions=2)
    group.open()
    group.turn_on("blue")
    group.wait("all records to be committed", Group.is_done)
    group.check_exactly_once("first", "second")
    assert group.output("first") == group.output("second")


def test_range_of_a_deleted_or_killed_run_waits_for_the_end_of_its_process(stage: Stage) -> None:
    """Users delete, force-terminate and kill runs in each state."""
    groups = stage.groups("ended", partitions=4)
    ended: dict[str, set[str]] = {}
    for group in groups:
        (group.folder / "lingers").touch()
        end = (
            stage.dagster.ui.delete_run
            if group.protocol == "consumer"
            else stage.dagster.ui.force_terminate
        )
        group.turn_on("blue")
        for status in (_STATUS.QUEUED, _STATUS.STARTING):
            end(_caught(group, status))
    for group in groups:
        group.wait("runs to be at work", lambda group: len(group.processes()) >= 3)
        (deleted, _), (terminated, _), (_, pid), *_ = group.processes().items()
        stage.dagster.ui.delete_run(deleted)
        stage.dagster.ui.force_terminate(terminated)
        os.kill(pid, signal.SIGKILL)
        ended[group.name] = {deleted, terminated}
    for group in groups:
        group.wait("the two to stop", lambda group: ended[group.name].isdisjoint(group.processes()))
        group.fail_next(1)
        group.open()
    for group in groups:
        group.wait("a run to fail", _failed_by_itself)
        failed = _failed_by_itself(group)[0]
        with pytest.raises(
            DagsterRebalanceError, match="could not be terminated due to having status FAILURE"
        ):
            stage.dagster.ui.force_terminate(failed)
        stage.dagster.ui.delete_run(failed)
    for group in groups:
        group.wait("all records to be committed", Group.is_done, 2 * PATIENCE_S)
        group.check_exactly_once()


def test_actions_in_the_ui_do_not_lose_or_double_records(
    stage: Stage,
) -> None:
    group = stage.group("handled", "classic")
    group.turn_on("blue")
    group.wait("runs to be at work", lambda group: len(group.processes()) == 1)
    cancelled = {_caught(group, _STATUS.QUEUED), next(iter(group.processes()))}
    for run_id in cancelled:
        stage.dagster.ui.cancel(run_id)
    launched = [stage.dagster.ui.launch("blue", group.name)]
    group.open()
    group.wait("all records to be committed", Group.is_done)
    group.check_exactly_once("first", "second")
    assert cancelled <= set(group.in_state(_STATUS.CANCELED))
    done = group.in_state(_STATUS.SUCCESS)[-1]
    launched += [
        stage.dagster.ui.re_execute(done),
        stage.dagster.ui.re_execute(done, [f"{group.name}_first"]),
        stage.dagster.ui.re_execute(done, tags={BATCH_TAG: "another"}),
    ]
    assets = GroupAssets.of(group.name)
    stage.dagster.ui.wipe(assets.offsets, assets.group, dg.AssetKey(f"{group.name}_first"))
    stage.dagster.ui.delete_partitions("blue", assets.partitions_name, f"{group.name}-0")
    stage.dagster.ui.report(assets.offsets)
    stage.dagster.ui.report(assets.offsets, f"{group.name}-1")
    group.produce(range(2), 10)
    group.wait("the new records to be committed", lambda group: group.is_done(20))
    assert sorted(group.materialised()) == [
        (f"{group.name}-{partition}", 10, 20) for partition in range(2)
    ]
    assert list(group.output("first").values()) == [1] * 4
    assert group.output("first") == group.output("second")
    for run_id, why in zip(
        launched, ("has no batch", "committed", "committed", "its tag"), strict=True
    ):
        run = stage.dagster.wait_for_run(run_id, timeout_s=PATIENCE_S)
        assert (run.status, why in _error_of(stage, run_id)) == (_STATUS.FAILURE, True), _error_of(
            stage, run_id
        )


def _error_of(stage: Stage, run_id: str) -> str:
    (failed,) = stage.instance.get_records_for_run(
        run_id, of_type=dg.DagsterEventType.RUN_FAILURE
    ).records
    return str(failed.event_log_entry)


def _caught(group: Group, status: dg.DagsterRunStatus) -> str:
    """The first run that is seen in a state, which may last for an instant."""
    found: list[str] = []

    def is_seen(group: Group) -> bool:
        found.extend(group.in_state(status))
        return bool(found)

    group.wait(f"a run to be {status.value}", is_seen, interval_s=0.1)
    return found[0]


def _failed_by_itself(group: Group) -> list[str]:
    logs = {
        run_id: group.stage.instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        for run_id in group.in_state(_STATUS.FAILURE)
    }
    return [run_id for run_id, entries in logs.items() if "the test wants" in str(entries)]


def test_assets_of_concurrent_runs_load_the_values_of_their_own_batch(stage: Stage) -> None:
    """The asset key alone would make two batches overwrite each other's values."""
    group = stage.group("valued", "consumer", partitions=2)
    group.turn_on("blue")
    group.wait("both runs to have stored a value", lambda group: len(group.working()) == 2)
    group.fail_next(1)
    group.open()
    group.wait("one to fail", lambda group: group.in_state(_STATUS.FAILURE))
    group.wait("one to be done", lambda group: group.in_state(_STATUS.SUCCESS))
    (failed,) = group.in_state(_STATUS.FAILURE)
    group.wait("the stop to be shown", lambda group: "failed on" in str(group.ticks("blue")[:1]))
    steps = [f"{group.name}_{name}" for name in ("work", "cleaned")]
    stage.dagster.ui.re_execute(failed, steps=steps)
    group.wait("all records to be committed", Group.is_done)
    for partition in (0, 1):
        file = group.folder / "output" / f"cleaned.{group.name}-{partition}-0-10"
        assert file.read_text().split() == [f"{partition}:{number}" for number in range(10)]
    group.check_exactly_once()
