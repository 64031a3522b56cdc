"""The run ledger, on a real instance without a launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
import sqlalchemy

from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.orchestration.runs import run_ledger as runs_module
from dagster_rebalance.orchestration.runs.canceller import RunCanceller, at_once
from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.dynamic_partitions import JobName
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats
from dagster_rebalance.orchestration.storage.run_tags import (
    ATTEMPT_TAG,
    BATCH_TAG,
    GROUP_TAG,
    REFUSAL_TAG,
    REFUSED_TAG,
    RunEvent,
    record_run_event,
    run_events_of,
)
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.parts import (
    EACH_STORAGE,
    batch_request,
    give_sign,
    idle_job,
    make_run,
    span,
    status_of,
    tags_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.testing.postgres import Postgres

Status = dg.DagsterRunStatus


@pytest.fixture(params=EACH_STORAGE)
def instance(request: pytest.FixtureRequest) -> dg.DagsterInstance:
    found: dg.DagsterInstance = request.getfixturevalue(request.param)
    return found


def look(instance: dg.DagsterInstance, batch_id: str) -> RunSnapshot:
    (seen,) = RunLedger(instance, "etl").read([batch_id])
    return seen


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (Status.NOT_STARTED, RunState.CREATED),
        (Status.QUEUED, RunState.WAITING),
        (Status.MANAGED, RunState.WAITING),
        (Status.STARTING, RunState.STARTING),
        (Status.STARTED, RunState.STARTED),
        (Status.SUSPENDED, RunState.STARTED),
        (Status.CANCELING, RunState.CANCELING),
        (Status.SUCCESS, RunState.SUCCEEDED),
        (Status.FAILURE, RunState.FAILED),
        (Status.CANCELED, RunState.CANCELED),
    ],
)
def test_run_status_becomes_run_state(
    instance: dg.DagsterInstance, batch_id: str, status: dg.DagsterRunStatus, state: RunState
) -> None:
    run = make_run(instance, batch_request(batch_id), status)
    seen = look(instance, batch_id)
    assert (seen.run_id, seen.batch_id, seen.ranges, seen.state) == (
        run.run_id,
        batch_id,
        (span(0),),
        state,
    )


def test_all_run_statuses_are_mapped() -> None:
    assert set(runs_module._STATES) == set(Status)


def test_runs_are_returned_oldest_first(instance: dg.DagsterInstance, batch_id: str) -> None:
    made = [
        make_run(instance, batch_request(batch_id, attempt=number), Status.FAILURE).run_id
        for number in range(1, 5)
    ]
    assert [run.run_id for run in RunLedger(instance, "etl").read([batch_id])] == made


def test_many_batches_are_read_in_several_queries_in_order(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "_BATCHES_PER_QUERY", 2)
    ids = [f"{letter}-{unique_name('b')}" for letter in "ecadb"]
    made = [make_run(instance, batch_request(batch_id), Status.STARTED).run_id for batch_id in ids]
    assert [run.run_id for run in RunLedger(instance, "etl").read(ids)] == made


class WatchedInstance:
    """Records the filters of run queries, and delegates all calls."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.filters: list[dg.RunsFilter] = []

    def get_run_records(self, filters: dg.RunsFilter, **options: Any) -> object:  # noqa: ANN401 - passed on
        self.filters.append(filters)
        return self.instance.get_run_records(filters, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self.instance, name)


def test_queries_have_at_most_one_tag(instance: dg.DagsterInstance, batch_id: str) -> None:
    """Two tags in one filter took 11 s on SQLite with 10,000 runs."""
    watched = WatchedInstance(instance)
    RunLedger(watched, "etl").read([batch_id], with_live=True)  # type: ignore[arg-type]
    assert len(watched.filters) == 2
    assert [len(filters.tags) for filters in watched.filters] == [1, 0], (
        "the live ones by their status, whose number stays small"
    )


def test_live_too_adds_live_runs_of_the_group(instance: dg.DagsterInstance, batch_id: str) -> None:
    group = unique_name("group")
    old = make_run(instance, batch_request(unique_name("b")), Status.STARTED, group_id=group)
    make_run(instance, batch_request(unique_name("b")), Status.SUCCESS, group_id=group)
    make_run(
        instance, batch_request(unique_name("b")), Status.STARTED, group_id=unique_name("other")
    )
    mine = make_run(instance, batch_request(batch_id), Status.QUEUED, group_id=group)
    ledger = RunLedger(instance, group)
    assert [run.run_id for run in ledger.read([batch_id], with_live=True)] == [
        old.run_id,
        mine.run_id,
    ]
    assert [run.run_id for run in ledger.read([batch_id])] == [mine.run_id]
    assert [run.run_id for run in ledger.read([], with_live=True)] == [old.run_id, mine.run_id]


def test_written_off_finds_runs_without_claims(
    instance: dg.DagsterInstance,
) -> None:
    group = unique_name("group")
    found = []
    for status, marks, is_found in (
        (Status.FAILURE, [RunEvent.BEGAN], True),
        (Status.CANCELED, [RunEvent.BEGAN, RunEvent.TAKEN_BACK], True),
        (Status.FAILURE, [RunEvent.BEGAN, RunEvent.FINISHED], False),
        (Status.FAILURE, [RunEvent.BEGAN, RunEvent.OVER], False),
        (Status.FAILURE, [RunEvent.BEGAN, RunEvent.REFUSED], False),
        (Status.FAILURE, [], False),
        (Status.STARTED, [RunEvent.BEGAN], False),
    ):
        run = make_run(instance, batch_request(unique_name("b")), status, group_id=group)
        for mark in marks:
            record_run_event(instance, run, mark)
        found += [run.run_id] * is_found
    other = make_run(instance, batch_request("b"), Status.FAILURE, group_id=unique_name("other"))
    record_run_event(instance, other, RunEvent.BEGAN)
    seen = RunLedger(instance, group).written_off()
    assert [run.run_id for run in seen] == found
    assert {run.ranges for run in seen} == {(span(0),)}


def test_run_with_unreadable_config_has_no_ranges(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    instance.create_run_for_job(
        idle_job,
        tags={BATCH_TAG: batch_id, GROUP_TAG: "etl"},
        run_config={
            "resources": {
                "kafka_batch": {"config": {"batch_id": batch_id, "ranges": ["orders:0:9:1"]}}
            }
        },
    )
    good = make_run(instance, batch_request(batch_id), Status.STARTED)
    spoilt, read = RunLedger(instance, "etl").read([batch_id])
    assert spoilt.ranges == ()
    assert (read.run_id, read.ranges) == (good.run_id, (span(0),))


def test_events_and_tags_of_run_do_not_count_for_its_retry(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Dagster copies tags to retries."""
    first = make_run(instance, batch_request(batch_id), Status.FAILURE)
    instance.add_run_tags(first.run_id, {REFUSED_TAG: first.run_id})
    record_run_event(instance, first, RunEvent.TAKEN_BACK)
    found = instance.get_run_by_id(first.run_id)
    make_run(instance, batch_request(batch_id), Status.FAILURE, parent=found)
    before, after = RunLedger(instance, "etl").read([batch_id])
    assert (before.is_refused, before.is_cancelled_by_member) == (True, True)
    assert (after.is_refused, after.is_cancelled_by_member, after.is_retry) == (False, False, True)


def test_events_of_ended_run_are_read_once(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(instance, batch_request(batch_id), Status.FAILURE)
    record_run_event(instance, run, RunEvent.OVER)
    asked = []

    def watched(of: dg.DagsterInstance, run_id: str) -> frozenset[RunEvent]:
        asked.append(run_id)
        return run_events_of(of, run_id)

    monkeypatch.setattr(runs_module, "run_events_of", watched)
    ledger = RunLedger(instance, "etl")
    for read in ([batch_id], [], [batch_id]):
        ledger.read(read)
    assert asked == [run.run_id]


def test_run_events_survive_a_rewrite_of_the_tags(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    """Dagster writes all tags of a run to add one."""
    run = make_run(instance, batch_request(batch_id), Status.QUEUED)
    storage: Any = instance.run_storage
    read_before = instance.get_run_by_id(run.run_id)
    RunLedger(instance, "etl").cancel(run.run_id)
    with storage.connect() as connection:
        written = sqlalchemy.text("UPDATE runs SET run_body = :body WHERE run_id = :run_id")
        connection.execute(written, {"body": dg.serialize_value(read_before), "run_id": run.run_id})
    assert look(instance, batch_id).is_cancelled_by_member


def test_attempt_parent_and_start_are_read(instance: dg.DagsterInstance, batch_id: str) -> None:
    first = make_run(instance, batch_request(batch_id, attempt=3), Status.STARTED)
    make_run(
        instance, batch_request(batch_id), Status.QUEUED, parent=first, tags={ATTEMPT_TAG: "many"}
    )
    instance.report_dagster_event(
        dg.DagsterEvent(event_type_value="PIPELINE_START", job_name="idle_job"), first.run_id
    )
    before, after = RunLedger(instance, "etl").read([batch_id])
    assert (before.attempt, before.parent_id, before.has_started) == (3, "", True)
    assert (after.attempt, after.parent_id, after.has_started) == (0, first.run_id, False)


@pytest.mark.parametrize("spoilt", ["9" * 5_000, "9" * 4_300, "-1", "1_0", "x"])
def test_invalid_attempt_tag_is_read_as_zero(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun, spoilt: str
) -> None:
    """Python parses no number of 5,000 digits, and prints none of 4,301."""
    instance.add_run_tags(run.run_id, {ATTEMPT_TAG: spoilt, REFUSAL_TAG: "\x1b[2J" + "x" * 999})
    seen = look(instance, batch_id)
    assert seen.attempt == 0
    assert seen.refusal == "[2J" + "x" * 397


def test_run_that_ended_before_its_start_check_has_not_started(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    assert look(instance, batch_id).has_started
    instance.report_run_failed(run)
    assert not look(instance, batch_id).has_started
    record_run_event(instance, run, RunEvent.BEGAN)
    assert look(instance, batch_id).has_started


def test_automatic_retry_is_distinguished_from_re_execution(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    first = make_run(instance, batch_request(batch_id), Status.FAILURE)
    make_run(instance, batch_request(batch_id), Status.QUEUED, parent=first)
    make_run(
        instance,
        batch_request(batch_id),
        Status.QUEUED,
        parent=first,
        tags={"dagster/retry_number": "1"},
    )
    assert [run.is_automatic for run in RunLedger(instance, "etl").read([batch_id])] == [
        False,
        False,
        True,
    ]


def test_heartbeat_of_run_is_read(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    assert not look(instance, batch_id).has_begun
    give_sign(instance, run, "7 ?somebody")
    assert look(instance, batch_id).heartbeat == "7 ?somebody"


def test_heartbeat_adds_no_tag_and_no_event(
    instance: dg.DagsterInstance, run: dg.DagsterRun
) -> None:
    before = len(instance.all_logs(run.run_id))
    give_sign(instance, run, "1 ?somebody")
    assert tags_of(instance, run) == run.tags
    assert len(instance.all_logs(run.run_id)) == before


def test_heartbeats_share_a_fixed_number_of_slots(
    instance: dg.DagsterInstance, batch_id: str
) -> None:
    first, later = (make_run(instance, batch_request(batch_id), Status.STARTED) for _ in range(2))
    signs = Heartbeats(instance)
    signs.record(first, 5, "1 ?a")
    assert signs.read({first.run_id: 5}) == {first.run_id: "1 ?a"}
    signs.record(later, 10_005, "1 ?b")
    assert signs.read({first.run_id: 5, later.run_id: 10_005}) == {later.run_id: "1 ?b"}


def test_heartbeats_are_events_without_key_values(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Dagster+ the storage returns an error instead of raising it."""
    for name in ("get_cursor_values", "set_cursor_values"):
        monkeypatch.setattr(
            type(instance.run_storage),
            name,
            lambda *_: NotImplementedError("not supported from the user cloud"),
        )
    for sign in ("1 ?a", "2 ?a"):
        give_sign(instance, run, sign)
    assert look(instance, batch_id).heartbeat == "2 ?a"


@pytest.mark.parametrize("status", [Status.FAILURE, Status.CANCELED])
@pytest.mark.parametrize(
    ("marks", "is_gone", "is_over"),
    [
        ([], False, True),
        ([RunEvent.BEGAN], False, False),
        ([RunEvent.BEGAN, RunEvent.REFUSED], False, True),
        ([RunEvent.BEGAN, RunEvent.TAKEN_BACK], False, False),
        ([RunEvent.BEGAN, RunEvent.FINISHED], True, False),
        ([RunEvent.BEGAN, RunEvent.OVER], False, True),
    ],
)
def test_ended_run_is_over_only_with_proof(
    instance: dg.DagsterInstance,
    batch_id: str,
    status: dg.DagsterRunStatus,
    marks: list[RunEvent],
    *,
    is_gone: bool,
    is_over: bool,
) -> None:
    run = make_run(instance, batch_request(batch_id), status)
    for mark in marks:
        record_run_event(instance, run, mark)
    ledger = RunLedger(instance, "etl")
    for _ in range(2):
        (seen,) = ledger.read([batch_id])
        assert (seen.is_gone, seen.is_over, seen.is_live) == (is_gone, is_over, not is_over)


def test_end_of_dead_run_is_recorded(instance: dg.DagsterInstance, batch_id: str) -> None:
    run = make_run(instance, batch_request(batch_id), Status.FAILURE)
    record_run_event(instance, run, RunEvent.BEGAN)
    stopped: list[str] = []
    RunLedger(instance, "etl", stop_work=stopped.append).end_dead(run.run_id, "")
    assert stopped == [run.run_id]
    assert look(instance, batch_id).is_over


def begin(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    Heartbeat(instance, run, timeout_s=60).begin()


def test_run_with_another_heartbeat_is_not_ended(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    stopped: list[str] = []
    ledger = RunLedger(instance, "etl", stop_work=stopped.append)
    begin(instance, run)
    assert not ledger.end_dead(run.run_id, "")
    assert stopped == []
    assert status_of(instance, run) is Status.STARTED
    assert ledger.end_dead(run.run_id, look(instance, batch_id).heartbeat)
    assert status_of(instance, run) is Status.FAILURE


def test_run_that_begins_while_it_is_ended_is_not_over(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    ledger = RunLedger(instance, "etl", stop_work=lambda _run_id: begin(instance, run))
    assert not ledger.end_dead(run.run_id, "")
    seen = look(instance, batch_id)
    assert (seen.state, seen.is_over, seen.is_live) == (RunState.FAILED, False, True)


def test_spark_jobs_of_deleted_run_are_stopped(
    instance: dg.DagsterInstance, run: dg.DagsterRun
) -> None:
    instance.delete_run(run.run_id)
    stopped: list[str] = []
    RunLedger(instance, "etl", stop_work=stopped.append).end_dead(run.run_id, "the last sign")
    assert stopped == [run.run_id]


def test_success_after_run_was_written_off_does_not_count(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    ledger = RunLedger(instance, "etl")
    record_run_event(instance, run, RunEvent.BEGAN)
    ledger.end_dead(run.run_id, "")
    assert look(instance, batch_id).is_written_off
    instance.report_dagster_event(
        dg.DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name=run.job_name), run.run_id
    )
    assert status_of(instance, run) is Status.SUCCESS
    for _ in range(2):
        (seen,) = ledger.read([batch_id])
        assert (seen.state, seen.has_succeeded, seen.is_live) == (RunState.SUCCEEDED, False, False)


WILL_RETRY = "dagster/will_retry"


def make_failure(
    instance: dg.DagsterInstance, batch_id: str, tags: dict[str, str] | None = None
) -> dg.DagsterRun:
    run = make_run(instance, batch_request(batch_id), Status.STARTED, tags=tags)
    failure = dg.DagsterEvent(
        event_type_value=dg.DagsterEventType.RUN_FAILURE.value, job_name=run.job_name
    )
    instance.run_storage.handle_run_event(run.run_id, failure)
    return run


@pytest.mark.parametrize(
    ("retries", "tag", "awaited"),
    [
        (False, None, False),
        (True, None, True),  # Dagster sets its tag 20 to 30 ms after the failure
        (True, "true", True),
        (True, "false", False),
        (False, "true", True),  # as in Dagster+, where user code cannot read the setting
    ],
)
def test_failure_awaits_retry_by_setting_and_tag(
    request: pytest.FixtureRequest,
    instance: dg.DagsterInstance,
    batch_id: str,
    tag: str | None,
    *,
    retries: bool,
    awaited: bool,
) -> None:
    if retries:
        instance = request.getfixturevalue("retrying_instance")
    make_failure(instance, batch_id, {WILL_RETRY: tag} if tag else None)
    seen = look(instance, batch_id)
    assert (seen.awaits_retry, seen.is_live) == (awaited, awaited)


def test_failure_with_existing_retry_is_over(
    retrying_instance: dg.DagsterInstance, batch_id: str
) -> None:
    first = make_failure(retrying_instance, batch_id, {WILL_RETRY: "true"})
    make_run(retrying_instance, batch_request(batch_id), Status.STARTED, parent=first)
    before, after = RunLedger(retrying_instance, "etl").read([batch_id])
    assert not before.awaits_retry
    assert after.is_retry
    assert after.is_live


def test_retry_that_never_comes_is_not_awaited_forever(
    retrying_instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_failure(retrying_instance, batch_id, {WILL_RETRY: "true"})
    monkeypatch.setattr(runs_module, "RETRY_PATIENCE_S", 0.0)
    assert not look(retrying_instance, batch_id).awaits_retry


@pytest.mark.postgres
@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_retry_patience_is_the_same_in_all_time_zones_of_postgres(
    postgres: Postgres, batch_id: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres stores times of the zone of the session."""
    name = unique_name("zone")
    postgres.create_database(name)
    monkeypatch.setenv("PGTZ", zone)
    settings = {**postgres.dagster_settings(name), "run_retries": {"enabled": True}}
    with dg.instance_for_test(overrides=settings) as instance:
        make_failure(instance, batch_id, {WILL_RETRY: "true"})
        assert look(instance, batch_id).awaits_retry
        monkeypatch.setattr(runs_module, "RETRY_PATIENCE_S", -1.0)
        assert not look(instance, batch_id).awaits_retry


@pytest.mark.parametrize("status", [Status.SUCCESS, Status.CANCELED, Status.STARTED])
def test_only_failures_await_retry(
    retrying_instance: dg.DagsterInstance, batch_id: str, status: dg.DagsterRunStatus
) -> None:
    make_run(retrying_instance, batch_request(batch_id), status, tags={WILL_RETRY: "true"})
    assert not look(retrying_instance, batch_id).awaits_retry


@pytest.mark.parametrize("only_unstarted", [False, True])
@pytest.mark.parametrize("status", [Status.QUEUED, Status.NOT_STARTED])
def test_unstarted_run_is_cancelled_and_recorded_as_taken_back(
    instance: dg.DagsterInstance,
    batch_id: str,
    status: dg.DagsterRunStatus,
    *,
    only_unstarted: bool,
) -> None:
    run = make_run(instance, batch_request(batch_id), status)
    RunLedger(instance, "etl").cancel(run.run_id, only_unstarted=only_unstarted)
    assert status_of(instance, run) is Status.CANCELED
    assert look(instance, batch_id).is_cancelled_by_member


@pytest.mark.parametrize(
    ("status", "only_unstarted"),
    [
        (Status.STARTED, True),
        (Status.STARTING, False),  # the default launcher has no process to interrupt yet
        (Status.SUCCESS, False),
        (Status.FAILURE, False),
        (Status.CANCELED, False),
    ],
)
def test_run_that_cannot_be_cancelled_is_not_changed(
    instance: dg.DagsterInstance,
    batch_id: str,
    status: dg.DagsterRunStatus,
    *,
    only_unstarted: bool,
) -> None:
    run = make_run(instance, batch_request(batch_id), status)
    for run_id in (run.run_id, "no such run"):
        RunLedger(instance, "etl").cancel(run_id, only_unstarted=only_unstarted)
    assert status_of(instance, run) is status
    assert not run_events_of(instance, run.run_id)


def begin_once_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run start while its run event is written, as with a locked storage."""

    def slow(within: dg.DagsterInstance, run: dg.DagsterRun, mark: RunEvent) -> None:
        record_run_event(within, run, mark)
        within.report_dagster_event(dg.DagsterEvent("PIPELINE_START", run.job_name), run.run_id)

    monkeypatch.setattr(runs_module, "record_run_event", slow)


@pytest.mark.parametrize("status", [Status.NOT_STARTED, Status.QUEUED])
def test_run_that_starts_during_cancel_is_kept(
    instance: dg.DagsterInstance,
    batch_id: str,
    status: dg.DagsterRunStatus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(instance, batch_request(batch_id), status)
    begin_once_marked(monkeypatch)
    RunLedger(instance, "etl").cancel(run.run_id, only_unstarted=True)
    assert status_of(instance, run) is Status.STARTED


def test_run_that_succeeds_during_cancel_stays_a_success(
    instance: dg.DagsterInstance, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(within: dg.DagsterInstance, run: dg.DagsterRun, mark: RunEvent) -> None:
        record_run_event(within, run, mark)
        if mark is RunEvent.STOP:
            succeeded = dg.DagsterEvent("PIPELINE_SUCCESS", run.job_name)
            within.report_dagster_event(succeeded, run.run_id)

    monkeypatch.setattr(runs_module, "record_run_event", slow)
    RunLedger(instance, "etl").cancel(run.run_id)
    assert status_of(instance, run) is Status.SUCCESS


class LauncherOfPods:
    """A launcher that can stop runs, even during their launch, unless `may_stop` is False."""

    def __init__(self, *, may_stop: bool, shows_it: Callable[[str], object] = str) -> None:
        self.asked: list[str] = []
        self.may_stop = may_stop
        self._shows_it = shows_it

    def terminate(self, run_id: str) -> bool:
        self.asked.append(run_id)
        self._shows_it(run_id)
        return self.may_stop


def launcher_that_fails(
    instance: dg.DagsterInstance, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch
) -> LauncherOfPods:
    """Return a launcher that sets CANCELING, as Dagster's do, and then does not stop the run."""
    launcher = LauncherOfPods(may_stop=False, shows_it=lambda _: instance.report_run_canceling(run))
    with_launcher(instance, launcher, monkeypatch)
    return launcher


def test_failed_cancel_of_canceling_run_is_repeated(
    instance: dg.DagsterInstance, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers set CANCELING before they ask the process."""
    launcher = launcher_that_fails(instance, run, monkeypatch)
    monkeypatch.setattr(runs_module, "_REPEAT_STOP_S", 0.0)
    ledger = RunLedger(instance, "etl")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="could not stop it"):
            ledger.cancel(run.run_id)
    launcher.may_stop = True
    for _ in range(3):
        ledger.cancel(run.run_id)
    assert len(launcher.asked) == 3, "once it has said yes it is not asked again"
    assert (
        len([mark for mark in run_events_of(instance, run.run_id) if mark is RunEvent.TAKEN_BACK])
        == 1
    )


def test_failing_launcher_is_not_asked_each_second(
    instance: dg.DagsterInstance, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_that_fails(instance, run, monkeypatch)
    ledger = RunLedger(instance, "etl")
    with pytest.raises(ConfigurationError, match="could not stop it"):
        ledger.cancel(run.run_id)
    ledger.cancel(run.run_id)
    assert len(launcher.asked) == 1


class DagsterUserCodeProcessError(Exception):
    """An error of a code server, whose text has a stack trace in Dagster."""


def test_cancel_refused_by_code_server_has_reason_in_one_line(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(instance, batch_request(batch_id), Status.QUEUED)
    text = f"Exception: Could not find a server for run {run.run_id}\n\nStack Trace:\n  File x"
    errors: list[Exception] = [OSError("away"), DagsterUserCodeProcessError(text)]
    coordinator = instance.run_coordinator
    real = coordinator.cancel_run

    def cancel_run(run_id: str) -> bool:
        if errors:
            raise errors.pop()
        return real(run_id)

    monkeypatch.setattr(coordinator, "cancel_run", cancel_run)
    ledger = RunLedger(instance, "etl")
    with pytest.raises(DagsterRebalanceError) as refused:
        ledger.cancel(run.run_id, only_unstarted=True)
    assert str(refused.value) == (
        "its code server was reloaded, or does not answer in time; the member retries "
        f"(Exception: Could not find a server for run {run.run_id})"
    )
    with pytest.raises(OSError, match="away"):
        ledger.cancel(run.run_id, only_unstarted=True)
    ledger.cancel(run.run_id, only_unstarted=True)
    assert status_of(instance, run) is Status.CANCELED


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    runs: list[str] = []

    def terminate(_: object, run_id: str) -> bool:
        runs.append(run_id)
        return True

    monkeypatch.setattr(dg.DefaultRunLauncher, "terminate", terminate)
    return runs


def test_default_launcher_is_not_asked_to_terminate(
    instance: dg.DagsterInstance, run: dg.DagsterRun, asked: list[str]
) -> None:
    """It holds the lock of its code server while it waits for the process."""
    ledger = RunLedger(instance, "etl")
    for _ in range(2):
        ledger.cancel(run.run_id)
    assert status_of(instance, run) is Status.CANCELING
    RunLedger(instance, "etl").cancel(run.run_id)
    entries = instance.all_logs(run.run_id)
    assert len([entry for entry in entries if f"[{RunEvent.STOP.value}]" in str(entry)]) == 1
    assert ledger.end_dead(run.run_id, "")
    assert not asked
    assert status_of(instance, run) is Status.FAILURE


def test_process_of_dead_run_is_killed_before_its_external_work(
    instance: dg.DagsterInstance, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(runs_module, "kill", done.append)
    give_sign(instance, run, "4/60.0 boot:ns:1000:17:2020")
    ledger = RunLedger(instance, "etl", stop_work=lambda _: done.append("work elsewhere"))
    assert ledger.end_dead(run.run_id, "4/60.0 boot:ns:1000:17:2020")
    assert done == ["boot:ns:1000:17:2020", "work elsewhere"]
    assert ledger.end_dead(run.run_id, "4/60.0 boot:ns:1000:17:2020")
    assert len(done) == 3, "a run that has ended in Dagster ends its own process"


@pytest.mark.parametrize("fails", [False, True])
def test_other_launcher_terminates_dead_run(
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fails: bool,
) -> None:
    def answer(_run_id: str) -> None:
        if fails:
            message = "no cluster answers"
            raise OSError(message)

    launcher = LauncherOfPods(may_stop=True, shows_it=answer)
    with_launcher(instance, launcher, monkeypatch)
    assert RunLedger(instance, "etl").end_dead(run.run_id, "")
    assert launcher.asked == [run.run_id]
    assert status_of(instance, run) is Status.FAILURE


def with_launcher(
    instance: dg.DagsterInstance, launcher: LauncherOfPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(instance), "run_launcher", launcher)


def test_starting_run_is_cancelled_by_capable_launcher(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = LauncherOfPods(may_stop=True)
    with_launcher(instance, launcher, monkeypatch)
    run = make_run(instance, batch_request(batch_id), Status.STARTING)
    RunLedger(instance, "etl").cancel(run.run_id)
    assert launcher.asked == [run.run_id]
    assert run_events_of(instance, run.run_id) == {RunEvent.TAKEN_BACK}


def test_taken_back_is_recorded_once(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = LauncherOfPods(may_stop=False)
    with_launcher(instance, launcher, monkeypatch)
    run = make_run(instance, batch_request(batch_id), Status.STARTING)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="needs the right to delete jobs"):
            RunLedger(instance, "etl").cancel(run.run_id)
    marks = [
        text
        for entry in instance.all_logs(run.run_id)
        if f"[{RunEvent.TAKEN_BACK.value}]" in (text := str(entry.dagster_event))
    ]
    assert (len(launcher.asked), len(marks)) == (2, 1)


def test_spark_jobs_of_dead_run_are_stopped_before_it_is_ended(
    instance: dg.DagsterInstance, run: dg.DagsterRun
) -> None:
    seen: list[tuple[str, dg.DagsterRunStatus]] = []
    ledger = RunLedger(
        instance,
        "etl",
        stop_work=lambda run_id: seen.append((run_id, status_of(instance, run))),
    )
    ledger.end_dead(run.run_id, "")
    assert seen == [(run.run_id, Status.STARTED)]
    assert status_of(instance, run) is Status.FAILURE
    messages = [entry.message for entry in instance.all_logs(run.run_id)]
    assert any("sent no heartbeat; its batch is requested again" in message for message in messages)


def test_dead_run_with_unstoppable_spark_jobs_is_not_ended(
    instance: dg.DagsterInstance, run: dg.DagsterRun
) -> None:

    def stop(_run_id: str) -> None:
        message = "no server answers"
        raise ConfigurationError(message)

    with pytest.raises(ConfigurationError, match="no server answers"):
        RunLedger(instance, "etl", stop_work=stop).end_dead(run.run_id, "")
    assert status_of(instance, run) is Status.STARTED


@pytest.mark.parametrize(
    "problem", [ConfigurationError("no server answers"), OSError("not an error of this package")]
)
def test_dead_run_that_cannot_be_ended_does_not_block_others(
    instance: dg.DagsterInstance, batch_id: str, problem: Exception
) -> None:
    stuck, other = (make_run(instance, batch_request(batch_id), Status.STARTED) for _ in range(2))

    def stop(run_id: str) -> None:
        if run_id == stuck.run_id:
            raise problem

    ledger = RunLedger(instance, "etl", stop_work=stop)
    RunCanceller(ledger, lambda _text: None, lambda _run_id: None, at_once, lambda: 0.0).end_dead(
        dict.fromkeys([stuck.run_id, other.run_id], "")
    )
    assert status_of(instance, stuck) is Status.STARTED
    assert status_of(instance, other) is Status.FAILURE


def test_why_failed_has_causes_and_no_stack_trace(
    instance: dg.DagsterInstance,
) -> None:
    @dg.op
    def fails() -> None:
        problem = "record 5 cannot be read"
        raise ValueError(problem) from LookupError("no such customer: 17")

    @dg.job
    def failing() -> None:
        fails()

    run_id = failing.execute_in_process(instance=instance, raise_on_error=False).run_id
    why = RunLedger(instance, "etl").why_failed(run_id, "b")
    assert why.endswith(
        "caused by: ValueError: record 5 cannot be read\ncaused by: LookupError: no such customer: "
        "17"
    )
    assert "Stack Trace" not in why


def test_error_of_failed_run_is_one_line_with_places(
    instance: dg.DagsterInstance,
) -> None:
    @dg.op
    def fails() -> None:
        problem = "record 5\n cannot be read"
        raise ValueError(problem) from LookupError("no such customer: 17")

    @dg.job(tags={BATCH_TAG: "b", GROUP_TAG: "failing"})
    def failing() -> None:
        fails()

    failing.execute_in_process(instance=instance, raise_on_error=False)
    (seen,) = RunLedger(instance, "failing", own_job=JobName("", "failing")).read(["b"])
    assert seen.error.startswith(
        "ValueError: record 5 cannot be read; caused by LookupError: no such customer: 17 "
        "(test_run_ledger.py:"
    )
    assert " in fails" in seen.error


def test_error_of_run_is_read_once(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.report_run_failed(run, "its node is gone")
    make_run(instance, batch_request(batch_id), Status.FAILURE)
    ledger = RunLedger(instance, "etl")
    before, after = ledger.read([batch_id])
    assert (before.error, after.error) == ("its node is gone", "")
    monkeypatch.setattr(RunLedger, "_failure", None)
    assert [one.error for one in ledger.read([batch_id])] == ["its node is gone", ""]


def test_why_failed_has_message_of_reported_failure(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun
) -> None:
    ledger = RunLedger(instance, "etl")
    assert ledger.why_failed(run.run_id, batch_id) == "Dagster has no event of its failure"
    ledger.end_dead(run.run_id, "")
    assert "sent no heartbeat" in ledger.why_failed(run.run_id, batch_id)


def test_ended_run_is_not_reported_as_failed(instance: dg.DagsterInstance, batch_id: str) -> None:
    run = make_run(instance, batch_request(batch_id), Status.SUCCESS)
    for run_id in (run.run_id, "no such run"):
        RunLedger(instance, "etl").end_dead(run_id, "")
    assert status_of(instance, run) is Status.SUCCESS


def test_run_that_succeeds_during_end_dead_stays_a_success(
    instance: dg.DagsterInstance, run: dg.DagsterRun
) -> None:
    success = dg.DagsterEvent(
        event_type_value=dg.DagsterEventType.RUN_SUCCESS.value, job_name=run.job_name
    )
    RunLedger(
        instance,
        "etl",
        stop_work=lambda run_id: instance.report_dagster_event(success, run_id),
    ).end_dead(run.run_id, "")
    assert status_of(instance, run) is Status.SUCCESS


@pytest.mark.parametrize("is_deleted", [False, True])
def test_dead_run_frees_its_pool_slots(
    instance: dg.DagsterInstance, batch_id: str, run: dg.DagsterRun, *, is_deleted: bool
) -> None:
    pool, storage = unique_name("pool"), instance.event_log_storage
    storage.set_concurrency_slots(pool, 1)
    assert storage.claim_concurrency_slot(pool, run.run_id, "work").is_claimed
    assert not storage.claim_concurrency_slot(pool, "next", "work").is_claimed
    ledger = RunLedger(instance, "etl")
    ledger.read([batch_id], claims=[(batch_id, span(0))])
    if is_deleted:
        instance.delete_run(run.run_id)
    ledger.end_dead(run.run_id, "")
    assert storage.claim_concurrency_slot(pool, "next", "work").is_claimed


def test_dead_run_is_ended_on_storage_without_pools(
    instance: dg.DagsterInstance, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(instance.event_log_storage)
    monkeypatch.setattr(kind, "supports_global_concurrency_limits", property(lambda _: False))
    monkeypatch.setattr(kind, "free_concurrency_slots_for_run", None)
    assert RunLedger(instance, "etl").end_dead(run.run_id, "")


def test_refusal_is_read(instance: dg.DagsterInstance, batch_id: str) -> None:
    make_run(
        instance,
        batch_request(batch_id),
        Status.FAILURE,
        tags={REFUSAL_TAG: "Kafka could not be asked"},
    )
    assert look(instance, batch_id).refusal == "Kafka could not be asked"


def test_live_too_reads_no_ended_runs(
    instance: dg.DagsterInstance, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = [make_run(instance, batch_request(f"{batch_id}-{n}"), Status.SUCCESS) for n in range(5)]
    live = make_run(instance, batch_request(batch_id), Status.STARTED)
    give_sign(instance, live, "0 ?another machine")
    read: list[str] = []
    ask = instance.get_run_records

    def get_run_records(*asked: Any, **options: Any) -> list[dg.RunRecord]:  # noqa: ANN401
        found = list(ask(*asked, **options))
        read.extend(record.dagster_run.run_id for record in found)
        return found

    monkeypatch.setattr(instance, "get_run_records", get_run_records)
    seen = RunLedger(instance, "etl").read([], with_live=True)
    assert live.run_id in read
    assert live.run_id in {run.run_id for run in seen}
    assert not {run.run_id for run in ended} & set(read)
