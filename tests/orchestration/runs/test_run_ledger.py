"""The run ledger, on a real instance without a launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
import sqlalchemy

from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.core.model.run_snapshot import FailureCause, RunState
from dagster_rebalance.orchestration.runs import run_ledger as runs_module
from dagster_rebalance.orchestration.runs.canceller import RunCanceller, at_once
from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.dynamic_partitions import JobName
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats
from dagster_rebalance.orchestration.storage.run_tags import (
    ATTEMPT_TAG,
    BATCH_TAG,
    CAUSE_TAG,
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
SIGN = "4/60.0 boot:ns:1000:17:2020"
WILL_RETRY = "dagster/will_retry"


class Runs:
    """The runs of one batch, and the ledger of its group."""

    def __init__(self, instance: dg.DagsterInstance, batch_id: str) -> None:
        self.instance = instance
        self.batch_id = batch_id
        self.stopped: list[str] = []
        self.ledger = self.new_ledger(self.stopped.append)

    def new_ledger(self, stop_work: Callable[[str], object] = str) -> RunLedger:
        def stop(run_id: str) -> None:
            stop_work(run_id)

        return RunLedger(self.instance, "etl", stop_work=stop)

    def make(
        self,
        status: dg.DagsterRunStatus,
        *marks: RunEvent,
        attempt: int = 1,
        **more: Any,  # noqa: ANN401 - arguments of all kinds
    ) -> dg.DagsterRun:
        """Create a run of the batch with run events."""
        run = make_run(self.instance, batch_request(self.batch_id, attempt=attempt), status, **more)
        self.mark(run, *marks)
        return run

    def mark(self, run: dg.DagsterRun, *marks: RunEvent) -> None:
        for mark in marks:
            record_run_event(self.instance, run, mark)

    def report(self, run: dg.DagsterRun, event: str) -> None:
        self.instance.report_dagster_event(dg.DagsterEvent(event, run.job_name), run.run_id)

    def read(self) -> tuple[RunSnapshot, ...]:
        """Read all runs of the batch with a new ledger."""
        return RunLedger(self.instance, "etl").read([self.batch_id])

    def look(self) -> RunSnapshot:
        (seen,) = self.read()
        return seen

    def status(self, run: dg.DagsterRun) -> dg.DagsterRunStatus:
        return status_of(self.instance, run)

    def events(self, run: dg.DagsterRun) -> frozenset[RunEvent]:
        return run_events_of(self.instance, run.run_id)


@pytest.fixture(params=EACH_STORAGE)
def instance(request: pytest.FixtureRequest) -> dg.DagsterInstance:
    found: dg.DagsterInstance = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def runs(instance: dg.DagsterInstance, batch_id: str) -> Runs:
    return Runs(instance, batch_id)


@pytest.fixture
def retrying(retrying_instance: dg.DagsterInstance, batch_id: str) -> Runs:
    """Runs of an instance that retries runs."""
    return Runs(retrying_instance, batch_id)


# Reading


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
    runs: Runs, status: dg.DagsterRunStatus, state: RunState
) -> None:
    run, seen = runs.make(status), runs.look()
    found = (seen.run_id, seen.batch_id, seen.ranges, seen.state)
    assert found == (run.run_id, runs.batch_id, (span(0),), state)


def test_all_run_statuses_are_mapped() -> None:
    assert set(runs_module._STATES) == set(Status)


def test_runs_are_returned_oldest_first(runs: Runs) -> None:
    made = [runs.make(Status.FAILURE, attempt=number).run_id for number in range(1, 5)]
    assert [run.run_id for run in runs.read()] == made


def test_many_batches_are_read_in_several_queries_in_order(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "_BATCHES_PER_QUERY", 2)
    ids = [f"{letter}-{unique_name('b')}" for letter in "ecadb"]
    made = [make_run(instance, batch_request(batch_id), Status.STARTED).run_id for batch_id in ids]
    assert [run.run_id for run in RunLedger(instance, "etl").read(ids)] == made


class WatchedInstance:
    """Records the filters and the results of run queries, and delegates all calls."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.filters: list[dg.RunsFilter] = []
        self.found: list[str] = []

    def get_run_records(self, filters: dg.RunsFilter, **options: Any) -> object:  # noqa: ANN401 - passed on
        self.filters.append(filters)
        records = self.instance.get_run_records(filters, **options)
        self.found += [record.dagster_run.run_id for record in records]
        return records

    def __getattr__(self, name: str) -> object:
        return getattr(self.instance, name)


def test_queries_have_at_most_one_tag(runs: Runs) -> None:
    """Two tags in one filter took 11 s on SQLite with 10,000 runs."""
    watched = WatchedInstance(runs.instance)
    RunLedger(watched, "etl").read([runs.batch_id], with_live=True)  # type: ignore[arg-type]
    assert [len(filters.tags) for filters in watched.filters] == [1, 0], "live runs by their status"


def test_read_with_live_adds_live_runs_of_the_group(runs: Runs) -> None:
    group = unique_name("group")
    other = Runs(runs.instance, unique_name("b"))
    old = other.make(Status.STARTED, group_id=group).run_id
    other.make(Status.SUCCESS, group_id=group)
    other.make(Status.STARTED, group_id=unique_name("other"))
    mine = runs.make(Status.QUEUED, group_id=group).run_id
    ledger = RunLedger(runs.instance, group)
    for batch_ids, with_live, found in (
        ([runs.batch_id], True, [old, mine]),
        ([runs.batch_id], False, [mine]),
        ([], True, [old, mine]),
    ):
        assert [run.run_id for run in ledger.read(batch_ids, with_live=with_live)] == found


def test_read_with_live_omits_ended_runs(runs: Runs) -> None:
    ended = [runs.make(Status.SUCCESS).run_id for _ in range(5)]
    live = runs.make(Status.STARTED)
    give_sign(runs.instance, live, "0 ?another machine")
    watched = WatchedInstance(runs.instance)
    seen = RunLedger(watched, "etl").read([], with_live=True)  # type: ignore[arg-type]
    assert live.run_id in watched.found
    assert live.run_id in {run.run_id for run in seen}
    assert not set(ended) & set(watched.found)


def test_written_off_finds_runs_without_claims(runs: Runs) -> None:
    group, found = unique_name("group"), []
    for status, marks, is_found in (
        (Status.FAILURE, [RunEvent.BEGAN], True),
        (Status.CANCELED, [RunEvent.BEGAN, RunEvent.TAKEN_BACK], True),
        (Status.FAILURE, [RunEvent.BEGAN, RunEvent.FINISHED], False),
        (Status.FAILURE, [RunEvent.BEGAN, RunEvent.OVER], False),
        (Status.FAILURE, [RunEvent.BEGAN, RunEvent.REFUSED], False),
        (Status.FAILURE, [], False),
        (Status.STARTED, [RunEvent.BEGAN], False),
    ):
        found += [runs.make(status, *marks, group_id=group).run_id] * is_found
    runs.make(Status.FAILURE, RunEvent.BEGAN, group_id=unique_name("other"))
    seen = RunLedger(runs.instance, group).written_off()
    assert [run.run_id for run in seen] == found
    assert {run.ranges for run in seen} == {(span(0),)}


def test_run_with_unreadable_config_has_no_ranges(runs: Runs) -> None:
    config = {"batch_id": runs.batch_id, "ranges": ["orders:0:9:1"]}
    runs.instance.create_run_for_job(
        idle_job,
        tags={BATCH_TAG: runs.batch_id, GROUP_TAG: "etl"},
        run_config={"resources": {"kafka_batch": {"config": config}}},
    )
    good = runs.make(Status.STARTED)
    spoilt, read = runs.read()
    assert spoilt.ranges == ()
    assert (read.run_id, read.ranges) == (good.run_id, (span(0),))


def test_events_and_tags_of_run_do_not_count_for_its_retry(runs: Runs) -> None:
    """Dagster copies tags to retries."""
    first = runs.make(Status.FAILURE, RunEvent.TAKEN_BACK)
    runs.instance.add_run_tags(first.run_id, {REFUSED_TAG: first.run_id})
    runs.make(Status.FAILURE, parent=runs.instance.get_run_by_id(first.run_id))
    before, after = runs.read()
    assert (before.is_refused, before.is_cancelled_by_member) == (True, True)
    assert (after.is_refused, after.is_cancelled_by_member, after.is_retry) == (False, False, True)


def test_events_of_ended_run_are_read_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.make(Status.FAILURE, RunEvent.OVER)
    asked = []

    def watched(of: dg.DagsterInstance, run_id: str) -> frozenset[RunEvent]:
        asked.append(run_id)
        return run_events_of(of, run_id)

    monkeypatch.setattr(runs_module, "run_events_of", watched)
    for read in ([runs.batch_id], [], [runs.batch_id]):
        runs.ledger.read(read)
    assert asked == [run.run_id]


def test_run_events_survive_a_rewrite_of_the_tags(runs: Runs) -> None:
    """Dagster writes all tags of a run to add one."""
    run = runs.make(Status.QUEUED)
    storage: Any = runs.instance.run_storage
    read_before = runs.instance.get_run_by_id(run.run_id)
    runs.ledger.cancel(run.run_id)
    with storage.connect() as connection:
        written = sqlalchemy.text("UPDATE runs SET run_body = :body WHERE run_id = :run_id")
        connection.execute(written, {"body": dg.serialize_value(read_before), "run_id": run.run_id})
    assert runs.look().is_cancelled_by_member


def test_attempt_parent_and_start_are_read(runs: Runs) -> None:
    first = runs.make(Status.STARTED, attempt=3)
    runs.make(Status.QUEUED, parent=first, tags={ATTEMPT_TAG: "many"})
    runs.report(first, "PIPELINE_START")
    before, after = runs.read()
    assert (before.attempt, before.parent_id, before.has_started) == (3, "", True)
    assert (after.attempt, after.parent_id, after.has_started) == (0, first.run_id, False)


@pytest.mark.parametrize("spoilt", ["9" * 5_000, "9" * 4_300, "-1", "1_0", "x"])
def test_invalid_attempt_tag_is_read_as_zero(runs: Runs, spoilt: str) -> None:
    """Python parses no number of 5,000 digits, and prints none of 4,301."""
    runs.make(Status.FAILURE, tags={ATTEMPT_TAG: spoilt, REFUSAL_TAG: "\x1b[2J" + "x" * 999})
    seen = runs.look()
    assert (seen.attempt, seen.refusal) == (0, "[2J" + "x" * 397)


def test_refusal_is_read(runs: Runs) -> None:
    runs.make(Status.FAILURE, tags={REFUSAL_TAG: "Kafka could not be asked"})
    assert runs.look().refusal == "Kafka could not be asked"


def test_run_that_ended_before_its_start_check_has_not_started(runs: Runs) -> None:
    run = runs.make(Status.STARTED)
    assert runs.look().has_started
    runs.instance.report_run_failed(run)
    assert not runs.look().has_started
    runs.mark(run, RunEvent.BEGAN)
    assert runs.look().has_started


def test_automatic_retry_is_distinguished_from_re_execution(runs: Runs) -> None:
    first = runs.make(Status.FAILURE)
    runs.make(Status.QUEUED, parent=first)
    runs.make(Status.QUEUED, parent=first, tags={"dagster/retry_number": "1"})
    assert [run.is_automatic for run in runs.read()] == [False, False, True]


# Heartbeats


def test_heartbeat_of_run_is_read_and_adds_no_tag_and_no_event(runs: Runs) -> None:
    run = runs.make(Status.STARTED)
    assert not runs.look().has_begun
    before = len(runs.instance.all_logs(run.run_id))
    give_sign(runs.instance, run, "7 ?other")
    assert runs.look().heartbeat == "7 ?other"
    assert tags_of(runs.instance, run) == run.tags
    assert len(runs.instance.all_logs(run.run_id)) == before


def test_heartbeats_share_a_fixed_number_of_slots(runs: Runs) -> None:
    first, later = (runs.make(Status.STARTED) for _ in range(2))
    signs = Heartbeats(runs.instance)
    signs.record(first, 5, "1 ?a")
    assert signs.read({first.run_id: 5}) == {first.run_id: "1 ?a"}
    signs.record(later, 10_005, "1 ?b")
    assert signs.read({first.run_id: 5, later.run_id: 10_005}) == {later.run_id: "1 ?b"}


def test_heartbeats_are_events_without_key_values(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Dagster+ the storage returns an error instead of raising it."""
    refusal = NotImplementedError("not supported from the user cloud")
    for name in ("get_cursor_values", "set_cursor_values"):
        monkeypatch.setattr(type(runs.instance.run_storage), name, lambda *_: refusal)
    run = runs.make(Status.STARTED)
    for sign in ("1 ?a", "2 ?a"):
        give_sign(runs.instance, run, sign)
    assert runs.look().heartbeat == "2 ?a"


# The end of a run


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
    runs: Runs,
    status: dg.DagsterRunStatus,
    marks: list[RunEvent],
    *,
    is_gone: bool,
    is_over: bool,
) -> None:
    runs.make(status, *marks)
    for _ in range(2):
        (seen,) = runs.ledger.read([runs.batch_id])
        assert (seen.is_gone, seen.is_over, seen.is_live) == (is_gone, is_over, not is_over)


def begin(runs: Runs, run: dg.DagsterRun) -> None:
    Heartbeat(runs.instance, run, timeout_s=60).begin()


def test_end_of_dead_run_is_recorded(runs: Runs) -> None:
    run = runs.make(Status.FAILURE, RunEvent.BEGAN)
    runs.ledger.end_dead(run.run_id, "")
    assert runs.stopped == [run.run_id]
    assert runs.look().is_over


def test_spark_jobs_of_dead_run_are_stopped_before_it_is_ended(runs: Runs) -> None:
    run, seen = runs.make(Status.STARTED), list[Status]()
    runs.new_ledger(lambda _: seen.append(runs.status(run))).end_dead(run.run_id, "")
    assert seen == [Status.STARTED]
    assert runs.status(run) is Status.FAILURE
    messages = [entry.message for entry in runs.instance.all_logs(run.run_id)]
    assert any("sent no heartbeat; its batch is requested again" in message for message in messages)


def test_run_with_another_heartbeat_is_not_ended(runs: Runs) -> None:
    run = runs.make(Status.STARTED)
    begin(runs, run)
    assert not runs.ledger.end_dead(run.run_id, "")
    assert (runs.stopped, runs.status(run)) == ([], Status.STARTED)
    assert runs.ledger.end_dead(run.run_id, runs.look().heartbeat)
    assert runs.status(run) is Status.FAILURE


def test_run_that_begins_while_it_is_ended_is_not_over(runs: Runs) -> None:
    run = runs.make(Status.STARTED)
    assert not runs.new_ledger(lambda _: begin(runs, run)).end_dead(run.run_id, "")
    seen = runs.look()
    assert (seen.state, seen.is_over, seen.is_live) == (RunState.FAILED, False, True)


def test_run_that_succeeds_during_end_dead_stays_a_success(runs: Runs) -> None:
    run = runs.make(Status.STARTED)
    ledger = runs.new_ledger(lambda _: runs.report(run, "PIPELINE_SUCCESS"))
    ledger.end_dead(run.run_id, "")
    assert runs.status(run) is Status.SUCCESS


def test_ended_run_is_not_reported_as_failed(runs: Runs) -> None:
    run = runs.make(Status.SUCCESS)
    for run_id in (run.run_id, "no such run"):
        runs.ledger.end_dead(run_id, "")
    assert runs.status(run) is Status.SUCCESS


def test_spark_jobs_of_deleted_run_are_stopped(runs: Runs) -> None:
    run = runs.make(Status.STARTED)
    runs.instance.delete_run(run.run_id)
    runs.ledger.end_dead(run.run_id, "the last sign")
    assert runs.stopped == [run.run_id]


def test_success_after_run_was_written_off_does_not_count(runs: Runs) -> None:
    run = runs.make(Status.STARTED, RunEvent.BEGAN)
    runs.ledger.end_dead(run.run_id, "")
    assert runs.look().is_written_off
    runs.report(run, "PIPELINE_SUCCESS")
    assert runs.status(run) is Status.SUCCESS
    for _ in range(2):
        (seen,) = runs.ledger.read([runs.batch_id])
        assert (seen.state, seen.has_succeeded, seen.is_live) == (RunState.SUCCEEDED, False, False)


@pytest.mark.parametrize(
    "problem", [ConfigurationError("no server answers"), OSError("not an error of this package")]
)
def test_dead_run_that_cannot_be_ended_does_not_block_others(
    runs: Runs, problem: Exception
) -> None:
    stuck, other = (runs.make(Status.STARTED) for _ in range(2))

    def stop(run_id: str) -> None:
        if run_id == stuck.run_id:
            raise problem

    ledger = runs.new_ledger(stop)
    with pytest.raises(type(problem), match=str(problem)):
        ledger.end_dead(stuck.run_id, "")
    RunCanceller(ledger, lambda _text: None, lambda _run_id: None, at_once, lambda: 0.0).end_dead(
        dict.fromkeys([stuck.run_id, other.run_id], "")
    )
    assert (runs.status(stuck), runs.status(other)) == (Status.STARTED, Status.FAILURE)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_dead_run_frees_its_pool_slots(runs: Runs, *, is_deleted: bool) -> None:
    run, pool, storage = (
        runs.make(Status.STARTED),
        unique_name("pool"),
        runs.instance.event_log_storage,
    )
    storage.set_concurrency_slots(pool, 1)
    assert storage.claim_concurrency_slot(pool, run.run_id, "work").is_claimed
    assert not storage.claim_concurrency_slot(pool, "next", "work").is_claimed
    runs.ledger.read([runs.batch_id], claims=[(runs.batch_id, span(0))])
    if is_deleted:
        runs.instance.delete_run(run.run_id)
    runs.ledger.end_dead(run.run_id, "")
    assert storage.claim_concurrency_slot(pool, "next", "work").is_claimed


def test_dead_run_is_ended_on_storage_without_pools(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(runs.instance.event_log_storage)
    monkeypatch.setattr(kind, "supports_global_concurrency_limits", property(lambda _: False))
    monkeypatch.setattr(kind, "free_concurrency_slots_for_run", None)
    assert runs.ledger.end_dead(runs.make(Status.STARTED).run_id, "")


def test_process_of_dead_run_is_killed_before_its_external_work(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, done = runs.make(Status.STARTED), list[str]()
    monkeypatch.setattr(runs_module, "kill", done.append)
    give_sign(runs.instance, run, SIGN)
    ledger = runs.new_ledger(lambda _: done.append("work elsewhere"))
    assert ledger.end_dead(run.run_id, SIGN)
    assert done == ["boot:ns:1000:17:2020", "work elsewhere"]
    assert ledger.end_dead(run.run_id, SIGN)
    assert len(done) == 3, "a run that has ended in Dagster ends its own process"


# Retries


def make_failure(runs: Runs, tag: str | None = "true") -> dg.DagsterRun:
    """Create a run that has failed, without the events that Dagster reports afterwards."""
    run = runs.make(Status.STARTED, tags={WILL_RETRY: tag} if tag else None)
    failure = dg.DagsterEvent("PIPELINE_FAILURE", run.job_name)
    runs.instance.run_storage.handle_run_event(run.run_id, failure)
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
    request: pytest.FixtureRequest, runs: Runs, tag: str | None, *, retries: bool, awaited: bool
) -> None:
    if retries:
        runs = request.getfixturevalue("retrying")
    make_failure(runs, tag)
    seen = runs.look()
    assert (seen.awaits_retry, seen.is_live) == (awaited, awaited)


def test_failure_with_existing_retry_is_over(retrying: Runs) -> None:
    first = make_failure(retrying)
    retrying.make(Status.STARTED, parent=first)
    before, after = retrying.read()
    assert (before.awaits_retry, after.is_retry, after.is_live) == (False, True, True)


def test_missing_retry_is_not_awaited_forever(
    retrying: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_failure(retrying)
    monkeypatch.setattr(runs_module, "RETRY_PATIENCE_S", 0.0)
    assert not retrying.look().awaits_retry


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
        runs = Runs(instance, batch_id)
        make_failure(runs)
        assert runs.look().awaits_retry
        monkeypatch.setattr(runs_module, "RETRY_PATIENCE_S", -1.0)
        assert not runs.look().awaits_retry


@pytest.mark.parametrize("status", [Status.SUCCESS, Status.CANCELED, Status.STARTED])
def test_only_failures_await_retry(retrying: Runs, status: dg.DagsterRunStatus) -> None:
    retrying.make(status, tags={WILL_RETRY: "true"})
    assert not retrying.look().awaits_retry


# Cancels


@pytest.mark.parametrize(
    ("status", "only_unstarted", "is_cancelled"),
    [
        (Status.QUEUED, False, True),
        (Status.QUEUED, True, True),
        (Status.NOT_STARTED, False, True),
        (Status.NOT_STARTED, True, True),
        (Status.STARTED, True, False),
        (Status.STARTING, False, False),  # the default launcher has no process to interrupt yet
        (Status.SUCCESS, False, False),
        (Status.FAILURE, False, False),
        (Status.CANCELED, False, False),
    ],
)
def test_cancel_ends_a_run_that_has_not_started_and_changes_no_other(
    runs: Runs, status: dg.DagsterRunStatus, *, only_unstarted: bool, is_cancelled: bool
) -> None:
    run = runs.make(status)
    for run_id in (run.run_id, "no such run"):
        runs.ledger.cancel(run_id, only_unstarted=only_unstarted)
    assert runs.status(run) is (Status.CANCELED if is_cancelled else status)
    assert runs.look().is_cancelled_by_member is is_cancelled
    assert bool(runs.events(run)) is is_cancelled


@pytest.mark.parametrize(
    ("status", "at", "event", "after"),
    [
        # The run event is written while the run starts, as with a locked storage.
        (Status.NOT_STARTED, None, "PIPELINE_START", Status.STARTED),
        (Status.QUEUED, None, "PIPELINE_START", Status.STARTED),
        (Status.STARTED, RunEvent.STOP, "PIPELINE_SUCCESS", Status.SUCCESS),
    ],
)
def test_run_that_moves_during_cancel_is_not_cancelled(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    *,
    status: dg.DagsterRunStatus,
    at: RunEvent | None,
    event: str,
    after: dg.DagsterRunStatus,
) -> None:
    run = runs.make(status)

    def slow(within: dg.DagsterInstance, run: dg.DagsterRun, mark: RunEvent) -> None:
        record_run_event(within, run, mark)
        if at in (None, mark):
            runs.report(run, event)

    monkeypatch.setattr(runs_module, "record_run_event", slow)
    runs.ledger.cancel(run.run_id, only_unstarted=at is None)
    assert runs.status(run) is after


class LauncherOfPods:
    """A launcher that can stop runs, even during their launch, unless `may_stop` is False."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_stop = True
        self.shows_it: Callable[[str], object] = str

    def terminate(self, run_id: str) -> bool:
        self.asked.append(run_id)
        self.shows_it(run_id)
        return self.may_stop


@pytest.fixture
def launcher(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> LauncherOfPods:
    made = LauncherOfPods()
    monkeypatch.setattr(type(instance), "run_launcher", made)
    return made


def refused_cancel(runs: Runs, launcher: LauncherOfPods) -> dg.DagsterRun:
    """Cancel a run with a launcher that sets CANCELING and does not stop it."""
    run = runs.make(Status.STARTED)
    launcher.may_stop = False
    launcher.shows_it = lambda _: runs.instance.report_run_canceling(run)
    with pytest.raises(ConfigurationError, match="could not stop it"):
        runs.ledger.cancel(run.run_id)
    return run


def test_failed_cancel_of_canceling_run_is_repeated(
    runs: Runs, launcher: LauncherOfPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers set CANCELING before they ask the process."""
    monkeypatch.setattr(runs_module, "_REPEAT_STOP_S", 0.0)
    run = refused_cancel(runs, launcher)
    with pytest.raises(ConfigurationError, match="could not stop it"):
        runs.ledger.cancel(run.run_id)
    launcher.may_stop = True
    for _ in range(3):
        runs.ledger.cancel(run.run_id)
    assert len(launcher.asked) == 3, "a launcher that has agreed is not asked again"
    assert RunEvent.TAKEN_BACK in runs.events(run)


def test_failing_launcher_is_not_asked_each_second(runs: Runs, launcher: LauncherOfPods) -> None:
    run = refused_cancel(runs, launcher)
    runs.ledger.cancel(run.run_id)
    assert len(launcher.asked) == 1


class DagsterUserCodeProcessError(Exception):
    """An error of a code server, whose text has a stack trace in Dagster."""


def test_cancel_refused_by_code_server_has_reason_in_one_line(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.make(Status.QUEUED)
    text = f"Exception: Could not find a server for run {run.run_id}\n\nStack Trace:\n  File x"
    errors: list[Exception] = [OSError("away"), DagsterUserCodeProcessError(text)]
    coordinator = runs.instance.run_coordinator
    real = coordinator.cancel_run

    def cancel_run(run_id: str) -> bool:
        if errors:
            raise errors.pop()
        return real(run_id)

    monkeypatch.setattr(coordinator, "cancel_run", cancel_run)
    with pytest.raises(DagsterRebalanceError) as refused:
        runs.ledger.cancel(run.run_id, only_unstarted=True)
    assert str(refused.value) == (
        "its code server was reloaded, or does not answer in time; the member retries "
        f"(Exception: Could not find a server for run {run.run_id})"
    )
    with pytest.raises(OSError, match="away"):
        runs.ledger.cancel(run.run_id, only_unstarted=True)
    runs.ledger.cancel(run.run_id, only_unstarted=True)
    assert runs.status(run) is Status.CANCELED


def test_default_launcher_is_not_asked_to_terminate(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lock of its code server while it waits for the process."""
    run, asked = runs.make(Status.STARTED), list[str]()
    monkeypatch.setattr(dg.DefaultRunLauncher, "terminate", lambda _, one: asked.append(one))
    for _ in range(2):
        runs.ledger.cancel(run.run_id)
    assert runs.status(run) is Status.CANCELING
    runs.new_ledger().cancel(run.run_id)
    entries = runs.instance.all_logs(run.run_id)
    assert len([entry for entry in entries if f"[{RunEvent.STOP.value}]" in str(entry)]) == 1
    assert runs.ledger.end_dead(run.run_id, "")
    assert not asked
    assert runs.status(run) is Status.FAILURE


@pytest.mark.parametrize("fails", [False, True])
def test_other_launcher_terminates_dead_run(
    runs: Runs, launcher: LauncherOfPods, *, fails: bool
) -> None:
    def answer(_run_id: str) -> None:
        if fails:
            message = "no cluster answers"
            raise OSError(message)

    launcher.shows_it = answer
    run = runs.make(Status.STARTED)
    assert runs.ledger.end_dead(run.run_id, "")
    assert launcher.asked == [run.run_id]
    assert runs.status(run) is Status.FAILURE


def test_starting_run_is_cancelled_by_capable_launcher(
    runs: Runs, launcher: LauncherOfPods
) -> None:
    run = runs.make(Status.STARTING)
    runs.ledger.cancel(run.run_id)
    assert launcher.asked == [run.run_id]
    assert runs.events(run) == {RunEvent.TAKEN_BACK}


def test_taken_back_is_recorded_once(runs: Runs, launcher: LauncherOfPods) -> None:
    launcher.may_stop = False
    run = runs.make(Status.STARTING)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="needs the right to delete jobs"):
            runs.new_ledger().cancel(run.run_id)
    texts = [str(entry.dagster_event) for entry in runs.instance.all_logs(run.run_id)]
    marks = [text for text in texts if f"[{RunEvent.TAKEN_BACK.value}]" in text]
    assert (len(launcher.asked), len(marks)) == (2, 1)


# Errors


@dg.op
def fails() -> None:
    problem = "record 5\n cannot be read"
    raise ValueError(problem) from LookupError("no such customer: 17")


@dg.job(tags={BATCH_TAG: "b", GROUP_TAG: "failing"})
def failing() -> None:
    fails()


def test_failure_has_causes_and_no_stack_trace(instance: dg.DagsterInstance) -> None:
    run_id = failing.execute_in_process(instance=instance, raise_on_error=False).run_id
    ledger = RunLedger(instance, "failing", own_job=JobName("", "failing"))
    why = ledger.why_failed(run_id, "b")
    assert why.endswith(
        "caused by: ValueError: record 5\n cannot be read\n"
        "caused by: LookupError: no such customer: 17"
    )
    assert "Stack Trace" not in why
    seen = ledger.read(["b"])[-1]
    assert seen.error.startswith(
        "ValueError: record 5 cannot be read; caused by LookupError: no such customer: 17 "
        "(test_run_ledger.py:"
    )
    assert " in fails" in seen.error


def test_error_of_run_is_read_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.instance.report_run_failed(runs.make(Status.STARTED), "its node is gone")
    runs.make(Status.FAILURE)
    assert [one.error for one in runs.ledger.read([runs.batch_id])] == ["its node is gone", ""]
    monkeypatch.setattr(RunLedger, "_failure", None)
    assert [one.error for one in runs.ledger.read([runs.batch_id])] == ["its node is gone", ""]


def test_recorded_cause_overrides_that_of_the_failure_event(instance: dg.DagsterInstance) -> None:
    done = failing.execute_in_process(instance=instance, raise_on_error=False)
    recorded = f"{done.run_id} {FailureCause.ENVIRONMENT.value}"

    def cause() -> FailureCause:
        return RunLedger(instance, "failing", own_job=JobName("", "failing")).read(["b"])[-1].cause

    instance.add_run_tags(done.run_id, {CAUSE_TAG: f"another-run {FailureCause.UNKNOWN.value}"})
    assert cause() is FailureCause.RECORDS
    instance.add_run_tags(done.run_id, {CAUSE_TAG: recorded})
    assert cause() is FailureCause.ENVIRONMENT


def test_why_failed_has_message_of_reported_failure(runs: Runs) -> None:
    run = runs.make(Status.STARTED)
    why = runs.ledger.why_failed(run.run_id, runs.batch_id)
    assert why == "Dagster has no event of the failure"
    runs.ledger.end_dead(run.run_id, "")
    assert "sent no heartbeat" in runs.ledger.why_failed(run.run_id, runs.batch_id)
