"""A streaming run in the process of the test: a real Dagster run, on a group in memory."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg
import pytest
import sqlalchemy

from dagster_rebalance import KafkaBatch, build_kafka_stream_defs
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.runs import heartbeat as heartbeat_module
from dagster_rebalance.orchestration.runs import process as run_process
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats, partitions_in
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.range_owners import StreamingRunRecords
from dagster_rebalance.orchestration.storage.run_tags import RunEvent, run_events_of
from dagster_rebalance.orchestration.streaming.asset_calls import Results
from dagster_rebalance.orchestration.streaming.reports import BatchReports
from dagster_rebalance.orchestration.streaming.stream_run import (
    BatchInterruptedError,
    StreamCatalogue,
    StreamRun,
)
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fake_group import FakeMember
from tests.orchestration.parts import (
    GROUPS,
    LEAVES,
    batch_request,
    fork_and_leave,
    fork_pools,
    kafka_in_memory,
    make_run,
    span,
    tp,
)
from tests.orchestration.streaming.stage import (
    BY_THE_SENSOR,
    QUICK,
    Stage,
    attempts_of,
    leave,
    then_leave,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dagster_rebalance.core.model import events
    from dagster_rebalance.core.model.commands import OffsetWrite
    from dagster_rebalance.core.model.events import LeaveRequested
    from dagster_rebalance.core.model.offsets import TopicPartition

MANY = 300
"""Number of batches after which a run has to be asked to leave."""
FIRST = (span(0, 0, 3),)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_rebalance.orchestration.streaming.stream_run._WAIT_S", 0.01)
    monkeypatch.setattr("dagster_rebalance.orchestration.streaming.reports._RETRY_S", 0.01)


def test_batches_follow_each_other_in_one_run(instance: dg.DagsterInstance) -> None:
    def body(stage: Stage, batch: KafkaBatch) -> dg.MaterializeResult[Any]:
        if len(stage.batches) < 3:
            stage.group.produce(tp(0), 2)
        else:
            leave()
        return dg.MaterializeResult(metadata={"size": batch.records})

    stage = Stage(instance, body)
    run_id = stage.run()
    assert stage.batches == [FIRST, (span(0, 3, 5),), (span(0, 5, 7),)]
    assert stage.committed() == 7
    shown = stage.shown(dg.AssetKey("orders"))
    made = [said for said in shown if said.get("batch") in stage.ids]
    assert [(said["offsets"], said["size"]) for said in made] == [(3, 3), (4, 2)], "two are joined"
    assert made[0]["batch"] == f"s.{run_id}.1.1"
    assert made[1]["ranges"] == "- `orders-0` [3, 7) in 2 ranges"
    recorded = list(stage.shown(GroupAssets.of(stage.kafka.group_id).offsets))
    assert sum(int(str(said["offsets"])) for said in recorded) == 7
    assert {said["run"] for said in recorded} == {run_id}
    assert RunEvent.FINISHED in run_events_of(instance, run_id)


def test_batch_that_is_claimed_ahead_begins_before_the_commit(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, real = threading.Event(), MemberLoop._written

    def written(self: MemberLoop, writes: tuple[OffsetWrite, ...]) -> events.Event:
        if any(write.new.offset > 0 for write in writes):
            assert has_begun.wait(120), "the second batch waits for the commit of the first one"
        return real(self, writes)

    def body(stage: Stage, _batch: KafkaBatch) -> None:
        if len(stage.batches) == 1:
            known = stage.group.committed
            wait_until(
                lambda: len(decode(known[tp(0)]).claims) == 2, timeout_s=120, what="the next claim"
            )
        else:
            has_begun.set()
            leave()

    monkeypatch.setattr(MemberLoop, "_written", written)
    stage = Stage(instance, body, claim_ahead=True, max_records_per_range=3)
    stage.run(6)
    assert stage.batches == [FIRST, (span(0, 3, 6),)]
    assert stage.committed() == 6


def test_error_of_a_failed_batch_is_logged_and_outlives_the_run(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next deploy replaces the run."""
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter3-of-kafka")

    def body(_stage: Stage, _batch: KafkaBatch) -> None:
        leave()
        msg = "no price in \x1b[31mkafka://ada:hunter2@host\nand login hunter3-of-kafka"
        raise LookupError(msg)

    stage = Stage(
        instance,
        body,
        security_protocol="SASL_SSL",
        sasl_mechanism="PLAIN",
        sasl_username="ada",
        sasl_password=dg.EnvVar("KAFKA_PASSWORD"),
    )
    run_id = stage.run()
    (shown,) = [text for text in stage.messages(run_id) if "failed on" in text]
    error = "LookupError: no price in \\x1b[31mkafka://***@host and login *** (test_run.py:"
    assert f"batch {stage.ids[0]} failed on orders-0 [0, 3) (attempt 1): {error}" in shown
    ledger = RunLedger(instance, stage.kafka.group_id)
    (seen,) = ledger.read([stage.ids[0]], claims=[(stage.ids[0], FIRST[0])])
    assert (seen.state, seen.run_id) == (RunState.FAILED, run_id)
    assert seen.error.startswith(error)
    assert " in body" in seen.error


@pytest.mark.parametrize(("how", "code"), LEAVES)
def test_process_that_a_body_forks_ends_where_it_leaves_the_body(
    instance: dg.DagsterInstance, how: Callable[[], object], code: int
) -> None:
    """It logged a failure of the batch beside its parent, which goes on, and hung."""
    codes: list[int] = []

    def body(_stage: Stage, _batch: KafkaBatch) -> None:
        leave()
        codes.append(fork_and_leave(how))

    stage = Stage(instance, body)
    run_id = stage.run()
    assert (codes, stage.committed()) == ([code], 3)
    assert not [text for text in stage.messages(run_id) if "failed" in text]
    made = [said.get("batch") for said in stage.shown(dg.AssetKey("orders"))]
    assert made.count(stage.ids[0]) == 1


def test_body_may_use_pools_of_forked_processes(instance: dg.DagsterInstance) -> None:
    """A worker must receive a signal right after its fork: the pool waits for it."""

    def body(_stage: Stage, _batch: KafkaBatch) -> None:
        fork_pools()
        leave()

    stage = Stage(instance, body)
    stage.run()
    assert stage.committed() == 3


@pytest.mark.parametrize(("usual", "within"), [(700, 10_000), (20_000, 20_000), (0, 0)])
def test_collections_are_rare_while_a_run_works(
    instance: dg.DagsterInstance, usual: int, within: int
) -> None:
    seen: list[int] = []

    def body(_stage: Stage, _batch: KafkaBatch) -> None:
        seen.extend([gc.get_threshold()[0], gc.get_freeze_count()])
        leave()

    before = gc.get_threshold()
    gc.set_threshold(usual, *before[1:])
    try:
        Stage(instance, body).run()
        assert (gc.get_threshold()[0], gc.get_freeze_count()) == (usual, 0)
    finally:
        gc.set_threshold(*before)
    threshold, frozen = seen
    assert threshold == within
    assert frozen > 0


def test_run_that_the_sensor_has_not_started_fails(instance: dg.DagsterInstance) -> None:
    """The sensor could not count, replace or end it."""
    stage = Stage(instance, lambda *_: leave())
    with pytest.raises(dg.Failure, match=r"not started by its sensor.*: turn it on") as refused:
        stage.job.execute_in_process(instance=instance)
    assert refused.value.allow_retries is False
    assert (stage.batches, stage.group.members) == ([], ())


def test_sigterm_lets_the_current_batch_finish(instance: dg.DagsterInstance) -> None:
    """It is a request to leave, and no failure: the next run must not wait for a delay."""

    def body(stage: Stage, _batch: KafkaBatch) -> None:
        leave()
        stage.group.produce(tp(0), 5)

    stage = Stage(instance, body)
    run_id = stage.run()
    assert (stage.committed(), len(stage.batches)) == (3, 1)
    (record,) = instance.get_run_records(dg.RunsFilter(run_ids=[run_id]))
    assert record.dagster_run.status is dg.DagsterRunStatus.SUCCESS
    group = GroupAssets.of(stage.kafka.group_id).group
    (left,) = instance.fetch_observations(group, limit=1).records
    assert left.asset_observation is not None
    assert str(left.asset_observation.description).endswith("its process was asked to end")


def test_cancelled_run_leaves_without_a_signal(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may not reach the process; the heartbeat reads the status anyway."""
    monkeypatch.setattr(heartbeat_module, "_CHECKS_PER_TIMEOUT", 10_000)

    def body(stage: Stage, batch: KafkaBatch) -> None:
        if len(stage.batches) == 1:
            instance.report_run_canceling(instance.get_runs(limit=1)[0])
        if len(stage.batches) == MANY:
            leave()
        stage.group.produce(tp(0), batch.records)

    stage = Stage(instance, body)
    with pytest.raises(dg.DagsterExecutionInterruptedError):
        stage.run()
    assert len(stage.batches) < MANY
    assert stage.committed() == 3 * len(stage.batches)
    (run,) = instance.get_runs(limit=1)
    assert run.status is dg.DagsterRunStatus.CANCELED


def test_range_that_fails_is_retried_alone_and_then_stops(instance: dg.DagsterInstance) -> None:
    """The other ranges of its batch go on, and the next owner finds the outcome."""

    def body(stage: Stage, batch: KafkaBatch) -> None:
        if len(stage.batches) == 5:
            leave()
        if FIRST[0] in batch.offset_ranges:
            msg = "cannot read record 1"
            raise ValueError(msg)

    stage = Stage(instance, body, **QUICK)
    run_id = stage.run(3, 3)
    assert stage.batches[0] == (*FIRST, span(1, 0, 3))
    assert sorted(stage.batches[1:]) == [FIRST] * 3 + [(span(1, 0, 3),)]
    assert stage.committed(1) == 3
    ((range_, batch_id),) = decode(stage.group.committed[tp(0)]).ranges(tp(0))
    batch = StreamBatch.parse(batch_id)
    assert batch is not None
    assert (batch.run_id, batch.attempt) == (run_id, 4)
    claim = (batch_id, range_)
    assert StreamingRunRecords(instance).read([claim]) == {claim: BatchOutcome.FAILED}


def is_interrupted(stage: Stage, _batch: KafkaBatch) -> None:
    stage.lose_partitions()


def fails_in_its_clean_up(stage: Stage, _batch: KafkaBatch) -> None:
    try:
        stage.lose_partitions()
    except BaseException as end:
        msg = "the connection is closed"
        raise ConnectionError(msg) from end


def is_interrupted_twice(stage: Stage, _batch: KafkaBatch) -> None:
    """A hold cancels again each second, and the log may take longer."""
    try:
        stage.lose_partitions()
    finally:
        os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize(
    ("first", "ending"),
    [
        (is_interrupted, "was interrupted"),
        (fails_in_its_clean_up, "ended with ConnectionError: the connection is closed"),
        (is_interrupted_twice, "was interrupted"),
    ],
)
def test_batch_of_lost_partitions_is_interrupted_and_no_failed_attempt(
    instance: dg.DagsterInstance, first: Callable[[Stage, KafkaBatch], object], ending: str
) -> None:
    """No other run may begin it before. Its records are not at fault."""
    stage = Stage(instance, then_leave(first))
    run_id = stage.run()
    assert (stage.batches, stage.attempts, stage.committed()) == ([FIRST] * 2, [1, 1], 3)
    texts = stage.messages(run_id)
    assert any(text.startswith(f"batch {stage.ids[0]} {ending}") for text in texts)
    assert not any("failed on" in text for text in texts)


def test_batch_that_does_not_return_is_a_failed_attempt_after_its_limit(
    instance: dg.DagsterInstance,
) -> None:
    """Without a limit, each interruption counted as nothing."""

    def body(stage: Stage, batch: KafkaBatch) -> None:
        if len(stage.batches) > 1:
            leave()
        elif batch.records:
            threading.Event().wait(120)

    stage = Stage(instance, body, batch_timeout_s=1.0, retry_delay_s=0.0)
    stage.run()
    first, last = (StreamBatch.parse(batch_id) for batch_id in (stage.ids[0], stage.ids[-1]))
    assert first is not None
    assert last is not None
    assert (first.attempt, last.interruptions) == (1, 0)
    assert last.attempt > 1, "the first attempt has failed"
    assert stage.committed() == 3


def storage_fails(
    monkeypatch: pytest.MonkeyPatch, times: int, error: Exception | None = None
) -> list[int]:
    """Let Dagster's storage refuse this many reports; return an item for each that is left."""
    fails = list(range(times))
    refusal = error or OSError("database is locked")
    real = dg.AssetExecutionContext.log_event

    def log_event(context: dg.AssetExecutionContext, event: Any) -> None:  # noqa: ANN401 - of many kinds
        if fails:
            fails.pop()
            raise refusal
        real(context, event)

    monkeypatch.setattr(dg.AssetExecutionContext, "log_event", log_event)
    return fails


def lost(statement: str | None, *, is_invalidated: bool) -> Exception:
    """Return what SQLAlchemy raises for an error of the engine of a database."""
    closed = Exception("server closed the connection unexpectedly")
    return sqlalchemy.exc.OperationalError(
        statement, None, closed, connection_invalidated=is_invalidated
    )


def wrapped(error: Exception) -> Exception:
    outer = Exception("too many retries for DB connection")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("times", "error", "beats_at"),
    [
        pytest.param(2, None, None, id="away"),
        # The heartbeat is accepted right after a refused report: that is no refusal of the report.
        pytest.param(9, None, 4, id="away for long"),
        # The connections of the heartbeat may survive where those of the reports are dropped.
        pytest.param(12, lost("INSERT", is_invalidated=True), None, id="in a statement"),
        pytest.param(12, lost(None, is_invalidated=False), None, id="no connection"),
        pytest.param(12, wrapped(lost(None, is_invalidated=False)), None, id="after retries"),
        pytest.param(12, sqlalchemy.exc.TimeoutError("QueuePool limit"), None, id="full pool"),
    ],
)
def test_unavailable_storage_fails_no_batch(
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    error: Exception | None,
    beats_at: int | None,
) -> None:
    """The output exists: it is kept until Dagster takes the report."""
    fails = storage_fails(monkeypatch, times, error)
    if beats_at is not None:
        monkeypatch.setattr(BatchReports, "_try_beat", lambda _: len(fails) == beats_at)
    stage = Stage(instance, lambda *_: leave())
    stage.run()
    assert not fails
    assert (stage.batches, stage.committed()) == ([FIRST], 3)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a string literal cannot contain NUL characters"),
        # Postgres reports a row that is too large for an index as an OperationalError, too.
        lost("INSERT", is_invalidated=False),
    ],
    ids=["value", "open connection"],
)
def test_report_that_the_storage_refuses_is_a_failed_attempt(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The storage is not waited for: the lag would only grow."""
    storage_fails(monkeypatch, 5, error)
    stage = Stage(instance, then_leave(lambda *_: None), **QUICK)
    stage.run()
    assert (stage.attempts, stage.committed()) == ([1, 2], 3)


class NamelessError(Exception):
    def __str__(self) -> str:
        raise ConnectionError


class PanicError(BaseException):
    """Error of extensions in Rust: it is no `Exception`, so `except Exception` misses it."""


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        PanicError(),
        asyncio.CancelledError(),
        NamelessError(),
        dg.DagsterExecutionInterruptedError(),
    ],
)
def test_body_that_ends_the_process_or_panics_is_a_failed_attempt(
    instance: dg.DagsterInstance, error: BaseException
) -> None:
    """Otherwise one run after the other would try such a record forever."""

    def first(_stage: Stage, _batch: KafkaBatch) -> None:
        raise error

    stage = Stage(instance, then_leave(first), **QUICK)
    stage.run()
    assert (stage.attempts, stage.committed()) == ([1, 2], 3)


def test_interrupt_does_not_hit_the_report_of_a_failure(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch has failed, and the run goes on."""
    log = StreamRun._log

    def interrupted(run: StreamRun, write: Callable[..., None], text: str, *given: object) -> None:
        if "failed" in text:
            os.kill(os.getpid(), signal.SIGUSR2)
        log(run, write, text, *given)

    monkeypatch.setattr(StreamRun, "_log", interrupted)

    def first(_stage: Stage, _batch: KafkaBatch) -> None:
        message = "the test wants this batch to fail"
        raise ValueError(message)

    stage = Stage(instance, then_leave(first), **QUICK)
    stage.run()
    assert stage.committed() == 3


def test_batch_that_is_done_is_not_interrupted_while_its_results_are_joined(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated batch would be added to the sums twice."""
    succeed = BatchReports.succeed

    def interrupted(reports: BatchReports, held: Collection[TopicPartition]) -> None:
        succeed(reports, held)
        os.kill(os.getpid(), signal.SIGUSR2)

    monkeypatch.setattr(BatchReports, "succeed", interrupted)
    stage = Stage(instance, lambda *_: leave())
    run_id = stage.run()
    assert (stage.batches, stage.committed()) == ([FIRST], 3)
    assert not any("interrupted" in text for text in stage.messages(run_id))


def test_batch_that_is_done_is_committed_although_its_results_cannot_be_joined(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output exists: the records must not go into a dead letter."""

    def broken(*_: object) -> NoReturn:
        msg = "a fault of the reports"
        raise ArithmeticError(msg)

    monkeypatch.setattr(BatchReports, "succeed", broken)
    stage = Stage(instance, lambda *_: None)
    with pytest.raises(ArithmeticError):
        stage.run()
    assert (stage.batches, stage.committed()) == ([FIRST], 3)


def test_interrupt_waits_until_a_joined_result_is_stored() -> None:
    run = StreamRun.__new__(StreamRun)
    run._pid, run._is_in_body, run._is_interrupted = os.getpid(), True, False
    run._reports = SimpleNamespace(is_storing_joined=True)  # type: ignore[assignment]
    run._on_interrupt(signal.SIGUSR2, None)
    with pytest.raises(BatchInterruptedError):
        run._check_not_interrupted()
    run._reports.is_storing_joined = False
    with pytest.raises(BatchInterruptedError):
        run._on_interrupt(signal.SIGUSR2, None)
    run._on_interrupt(signal.SIGUSR2, None)  # does not hit the handler of the first


def test_process_that_a_body_forks_reports_no_results_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier asset of the batch may have returned some."""
    called: list[str] = []
    run = StreamRun.__new__(StreamRun)
    run._pid = os.getpid() + 1
    run._reports = SimpleNamespace(  # type: ignore[assignment]
        begin=lambda: called.append("begin"), fail=lambda: called.append("fail")
    )

    def call(*_: object) -> NoReturn:
        msg = "no number"
        raise ValueError(msg)

    def exit_(_: object) -> NoReturn:
        raise PanicError

    run._calls = [call]  # type: ignore[list-item]
    run._context = None  # type: ignore[assignment]
    monkeypatch.setattr("dagster_rebalance.orchestration.runs.signals._exit", exit_)
    with pytest.raises(PanicError):
        run._call(None)  # type: ignore[arg-type]
    assert called == ["begin"]


def test_end_of_the_member_is_no_failed_attempt(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(instance, lambda *_: None)

    def poll(*_: object) -> NoReturn:
        msg = "the principal may not read the topic"
        raise BrokerError(msg)

    monkeypatch.setattr(FakeMember, "poll", poll)
    with pytest.raises(BrokerError, match="the principal may not read"):
        stage.run()
    run_id = instance.get_runs(limit=1)[0].run_id
    assert run_events_of(instance, run_id) >= {RunEvent.TAKEN_BACK, RunEvent.FINISHED}


def test_heartbeat_of_a_run_that_has_left_names_no_partition(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives until its resources are torn down."""
    said: list[str] = []
    real = Heartbeats.record

    def give(signs: Heartbeats, run: dg.DagsterRun, number: int, text: str) -> None:
        said.append(text)
        real(signs, run, number, text)

    monkeypatch.setattr(Heartbeats, "record", give)
    stage = Stage(instance, lambda *_: leave())
    stage.run()
    assert partitions_in(said[-1]) == frozenset()
    assert any(partitions_in(text) for text in said)


def test_run_event_that_the_storage_refuses_is_recorded_later(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it no run of older code is asked to leave."""
    kafka = kafka_in_memory()
    run = make_run(instance, batch_request("b"), dg.DagsterRunStatus.STARTED)
    catalogue = StreamCatalogue(instance, kafka, run)
    with monkeypatch.context() as patched:
        patched.setattr(dg.DagsterInstance, "report_runless_asset_event", _away)
        for report in (catalogue.record_joined, lambda: catalogue.record_assigned([tp(0)], "m")):
            with pytest.raises(OSError, match="locked"):
                report()
    assert not run_events_of(instance, run.run_id)
    assert catalogue.leave_request() is None
    assert run_events_of(instance, run.run_id) == {RunEvent.READY, RunEvent.JOINED}


def _away(*_: object) -> NoReturn:
    msg = "database is locked"
    raise OSError(msg)


@pytest.mark.parametrize("is_late", [False, True])
def test_body_that_ignores_its_interruption_is_killed(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """It may wait for a thread that nothing interrupts."""
    run = StreamRun.__new__(StreamRun)
    is_killed, marks = threading.Event(), []
    told: list[LeaveRequested] = []

    def process(*_: object) -> None:
        if is_late:  # the worker was asked to give up, as on each turn of the member from then on
            run._give_up()
            run._give_up()
        member.start()
        is_killed.wait(120)

    parts = {
        "_run": SimpleNamespace(run_id="r"),
        "_context": SimpleNamespace(instance="instance"),
        "_kafka": SimpleNamespace(heartbeat_timeout_s=600.0 if is_late else 0.01),
        "_mailbox": SimpleNamespace(send=told.append),
        "_work": SimpleNamespace(next=lambda _: "a batch", is_late=is_late, held=()),
        "_reports": SimpleNamespace(write=lambda: None, write_due=lambda _: None),
        "_gives_up": False,
        "_has_left": threading.Event(),
        "_is_over": False,
        "_interrupt": lambda: None,
        "_process": process,
        "_log_progress": lambda progress: progress,
    }
    for name, part in parts.items():
        monkeypatch.setattr(run, name, part, raising=False)
    monkeypatch.setattr(run_process, "is_of_one_run", lambda: True)
    monkeypatch.setattr(run_process, "end_hard", is_killed.set)
    monkeypatch.setattr(
        "dagster_rebalance.orchestration.streaming.stream_run.record_run_event",
        lambda *said: marks.append((*said, is_killed.is_set())),
    )
    member = threading.Thread(target=run._end_body)
    works = SimpleNamespace(is_alive=lambda: not is_killed.is_set())
    run._process_batches(works)  # type: ignore[arg-type]
    assert is_killed.is_set()
    member.join(120)
    if is_late:
        assert not marks, "a batch that took too long is a failed attempt"
        assert [(one.reason, one.limit_s) for one in told] == [
            ("the running batch was interrupted and does not end", 0.0)
        ]
    else:
        taken_back = ("instance", run._run, RunEvent.TAKEN_BACK, False)
        assert marks[0] == taken_back, "it is no failed attempt"


def test_asset_may_take_a_resource_from_its_context(instance: dg.DagsterInstance) -> None:
    kafka = kafka_in_memory()
    seen: list[object] = []

    @dg.asset(required_resource_keys={"db"})
    def orders(context, kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, ARG001 - Dagster evaluates it
        seen.append(context.resources.db)
        leave()

    job = build_kafka_stream_defs(
        kafka=kafka, assets=[orders], name="stream", resources={"db": "a database"}
    ).resolve_job_def("stream")
    GROUPS[kafka.group_id].produce(tp(0), 3)
    job.execute_in_process(instance=instance, tags=BY_THE_SENSOR)
    assert seen == ["a database"]


@pytest.mark.parametrize("result", [5, dg.MaterializeResult(value=5)])
def test_asset_may_not_return_a_value(instance: dg.DagsterInstance, result: object) -> None:
    """There is no IO manager to keep one for each batch: the batch fails."""

    def body(_stage: Stage, _batch: KafkaBatch) -> object:
        leave()
        return result

    stage = Stage(instance, body)
    run_id = stage.run()
    assert stage.committed() == 0
    assert any("failed on orders-0 [0, 3)" in text for text in stage.messages(run_id))


def test_assets_of_a_batch_are_called_in_their_order(instance: dg.DagsterInstance) -> None:
    kafka = kafka_in_memory()
    called: list[str] = []

    @dg.asset(deps=["orders"])
    def customers(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, ARG001 - Dagster evaluates it
        called.append("customers")
        leave()

    @dg.asset
    def orders(context, kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, ARG001 - as above
        called.append("orders")
        context.log.info("a line of the body")

    job = build_kafka_stream_defs(
        kafka=kafka, assets=[customers, orders], name="stream"
    ).resolve_job_def("stream")
    GROUPS[kafka.group_id].produce(tp(0), 3)
    job.execute_in_process(instance=instance, tags=BY_THE_SENSOR)
    assert called == ["orders", "customers"]
    run_id = instance.get_runs(limit=1)[0].run_id
    assert any("a line of the body" in entry.user_message for entry in instance.all_logs(run_id))


class Checked:
    """An asset with checks in a streaming run that leaves at its second batch."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        *results: dg.AssetCheckResult,
        specs: Sequence[dg.AssetCheckSpec],
    ) -> None:
        self.instance = instance
        self.kafka = kafka_in_memory(**QUICK)
        self.ids: list[str] = []

        @dg.asset(check_specs=specs)
        def orders(kafka_batch):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - Dagster evaluates it
            self.ids.append(kafka_batch.batch_id)
            if len(self.ids) > 1:
                leave()
                passed = [dg.AssetCheckResult(passed=True, check_name=spec.name) for spec in specs]
                return dg.MaterializeResult(check_results=passed)
            GROUPS[self.kafka.group_id].produce(tp(0), 1)
            return dg.MaterializeResult(
                check_results=results, data_version=dg.DataVersion("seven"), tags={"team": "shop"}
            )

        @dg.asset_check(asset=orders)
        def not_empty() -> dg.AssetCheckResult:
            return dg.AssetCheckResult(passed=True)

        made = build_kafka_stream_defs(kafka=self.kafka, assets=[orders], name="stream")
        self.defs = dg.Definitions.merge(
            made,
            dg.Definitions(
                asset_checks=[not_empty],
                jobs=[dg.define_asset_job("alone", dg.AssetSelection.checks(not_empty))],
            ),
        )

    @property
    def committed(self) -> int:
        return GROUPS[self.kafka.group_id].committed[tp(0)].offset

    def run(self) -> None:
        GROUPS[self.kafka.group_id].produce(tp(0), 3)
        job = self.defs.resolve_job_def("stream")
        job.execute_in_process(instance=self.instance, tags=BY_THE_SENSOR)

    @property
    def attempts(self) -> list[int]:
        return attempts_of(self.ids)

    def said(self, name: str) -> list[bool]:
        key = dg.AssetCheckKey(dg.AssetKey("orders"), name)
        records = self.instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
        events = [record.event.dagster_event for record in records if record.event is not None]
        return [
            event.asset_check_evaluation_data.passed
            for event in events
            if event is not None and event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION
        ]


def test_check_result_without_a_name_belongs_to_the_only_check(
    instance: dg.DagsterInstance,
) -> None:
    stage = Checked(
        instance,
        dg.AssetCheckResult(passed=False),
        specs=[dg.AssetCheckSpec("good", asset="orders")],
    )
    stage.run()
    assert stage.said("good") == [True, False], "newest first"
    assert stage.committed == 4
    (run,) = instance.get_runs(limit=1)
    assert run.status is dg.DagsterRunStatus.SUCCESS
    _, first = instance.fetch_materializations(dg.AssetKey("orders"), limit=2).records
    assert first.asset_materialization is not None
    assert first.asset_materialization.tags is not None
    assert (
        first.asset_materialization.tags.items()
        >= {
            "team": "shop",
            "dagster/data_version": "seven",
        }.items()
    )


@pytest.mark.parametrize(
    ("specs", "name"),
    [((), None), (("good", "red"), None), (("good",), "other")],
)
def test_check_result_of_no_check_is_refused(specs: Sequence[str], name: str | None) -> None:
    @dg.asset(check_specs=[dg.AssetCheckSpec(one, asset="orders") for one in specs])
    def orders():  # type: ignore[no-untyped-def] # noqa: ANN202 - several outputs
        """Is never called."""

    found = dg.AssetCheckResult(passed=True, check_name=name)
    results = Results(orders, None)  # type: ignore[arg-type] # refused before it is looked at
    known = ", ".join(specs) or "none"
    why = rf"^orders .* {name or 'without a name'}, .* its check_specs \({known}\): declare"
    with pytest.raises(ConfigurationError, match=why):
        [*results.take([dg.MaterializeResult(check_results=[found])])]


@pytest.mark.parametrize(
    ("severity", "attempts"),
    [(dg.AssetCheckSeverity.ERROR, [1, 2]), (dg.AssetCheckSeverity.WARN, [1, 1])],
)
def test_failed_blocking_check_is_a_failed_attempt(
    instance: dg.DagsterInstance, severity: dg.AssetCheckSeverity, attempts: list[int]
) -> None:
    name = f"blocking_{severity.name}"
    stage = Checked(
        instance,
        dg.AssetCheckResult(passed=False, severity=severity),
        specs=[dg.AssetCheckSpec(name, asset="orders", blocking=True)],
    )
    stage.run()
    assert stage.said(name) == [True, False], "newest first"
    assert stage.attempts[:2] == attempts


def test_separate_check_is_no_part_of_a_streaming_run(instance: dg.DagsterInstance) -> None:
    stage = Checked(instance, specs=[dg.AssetCheckSpec("good", asset="orders")])
    nodes = stage.defs.resolve_job_def("stream").graph.node_defs
    assert [node.name for node in nodes] == ["process_stream"]
    assert stage.defs.resolve_job_def("alone").execute_in_process(instance=instance).success
    assert stage.said("not_empty") == [True]
