"""A streaming run in this very process: a real Dagster run, on a group in memory."""

from __future__ import annotations

import asyncio
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
from dagster_rebalance.orchestration.runs import heartbeat as heartbeat_module
from dagster_rebalance.orchestration.runs import process as run_process
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats, partitions_in
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.range_owners import AbandonedClaims
from dagster_rebalance.orchestration.storage.run_tags import (
    SLOT_TAG,
    STREAM_TAG,
    RunEvent,
    run_events_of,
)
from dagster_rebalance.orchestration.streaming.asset_results import Results
from dagster_rebalance.orchestration.streaming.run import StreamCatalogue, StreamRun
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dagster_rebalance import ExternalWork
    from dagster_rebalance.core.model.events import LeaveRequested
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.kafka.group_ports import GroupEvent

BY_THE_SENSOR = {STREAM_TAG: "here:stream_sensor", SLOT_TAG: "0"}
"""The tags of a run that the sensor has started."""
MANY = 300
"""Batches: a run that has begun so many does not leave by itself."""


def leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _polls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll of the group in memory returns at once: its thread would leave the others no time."""
    real = FakeMember.poll

    def poll(member: FakeMember, timeout_s: float) -> list[GroupEvent]:
        threading.Event().wait(0.005)
        return real(member, timeout_s)

    monkeypatch.setattr(FakeMember, "poll", poll)


class Stage:
    def __init__(
        self,
        instance: dg.DagsterInstance,
        body: Callable[[Stage, KafkaBatch], object],
        external_work: Sequence[ExternalWork] = (),
        **kafka: Any,  # noqa: ANN401 - settings of all kinds
    ) -> None:
        self.instance = instance
        self.kafka = kafka_in_memory(**kafka)
        self.group = GROUPS[self.kafka.group_id]
        self.batches: list[tuple[OffsetRange, ...]] = []
        self.ids: list[str] = []

        @dg.asset
        def orders(kafka_batch) -> dg.MaterializeResult[Any] | None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
            self.batches.append(kafka_batch.offset_ranges)
            self.ids.append(kafka_batch.batch_id)
            return body(self, kafka_batch)  # type: ignore[return-value]

        self.job = build_kafka_stream_defs(
            kafka=self.kafka, assets=[orders], name="stream", external_work=external_work
        ).resolve_job_def("stream")

    def produce(self, number: int, records: int) -> None:
        self.group.produce(tp(number), records)

    def run(self) -> str:
        return self.job.execute_in_process(instance=self.instance, tags=BY_THE_SENSOR).run_id

    def committed(self, number: int) -> int:
        stored = self.group.committed[tp(number)]
        return stored.offset

    def shown(self, key: dg.AssetKey) -> Iterator[dict[str, object]]:
        wanted = dg.AssetRecordsFilter(key)
        for record in self.instance.fetch_materializations(
            wanted, limit=100, ascending=True
        ).records:
            assert record.asset_materialization is not None
            said = record.asset_materialization.metadata.items()
            yield {name: value.value for name, value in said}


def test_batch_follows_batch_in_one_run(instance: dg.DagsterInstance) -> None:
    """Each is committed at once and materialised, and each commit is recorded."""

    def body(stage: Stage, batch: KafkaBatch) -> dg.MaterializeResult[Any]:
        if len(stage.batches) < 3:
            stage.produce(0, 2)
        else:
            leave()
        return dg.MaterializeResult(metadata={"size": batch.records})

    stage = Stage(instance, body)
    stage.produce(0, 3)
    run_id = stage.run()
    assert stage.batches == [(span(0, 0, 3),), (span(0, 3, 5),), (span(0, 5, 7),)]
    assert stage.committed(0) == 7
    (first, *_) = made = [
        said for said in stage.shown(dg.AssetKey("orders")) if said.get("batch") in stage.ids
    ]
    assert [said["size"] for said in made] == [3, 2, 2]
    assert first["batch"] == f"s.{run_id}.1.1"
    recorded = list(stage.shown(GroupAssets.of(stage.kafka.group_id).offsets))
    assert sum(int(str(said["offsets"])) for said in recorded) == 7
    assert {said["run"] for said in recorded} == {run_id}
    assert RunEvent.FINISHED in run_events_of(instance, run_id)


def test_the_error_of_a_failed_batch_is_in_the_log_of_the_run_and_outlives_the_run(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person looks at the page of the run, and the next deploy replaces the run."""
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
    stage.produce(0, 3)
    run_id = stage.run()
    (shown,) = [
        entry.user_message
        for entry in instance.all_logs(run_id)
        if "failed on" in entry.user_message
    ]
    error = "LookupError: no price in \\x1b[31mkafka://***@host and login *** (test_run.py:"
    assert f"batch {stage.ids[0]} failed on orders-0 [0, 3) (attempt 1): {error}" in shown
    (seen,) = RunLedger(instance, stage.kafka.group_id).read(
        [stage.ids[0]], claims=[(stage.ids[0], span(0, 0, 3))]
    )
    assert (seen.state, seen.run_id) == (RunState.FAILED, run_id)
    assert seen.error.startswith(error)
    assert " in body" in seen.error


@pytest.mark.parametrize(("how", "code"), LEAVES)
def test_a_process_that_a_body_forks_ends_where_it_leaves_the_body(
    instance: dg.DagsterInstance, how: Callable[[], object], code: int
) -> None:
    """It logged a failure of the batch beside its parent, which works on, and hung."""
    codes: list[int] = []

    def body(_stage: Stage, _batch: KafkaBatch) -> None:
        leave()
        codes.append(fork_and_leave(how))

    stage = Stage(instance, body)
    stage.produce(0, 3)
    run_id = stage.run()
    assert (codes, stage.committed(0)) == ([code], 3)
    assert not [one for one in instance.all_logs(run_id) if "failed" in one.user_message]
    made = [said.get("batch") for said in stage.shown(dg.AssetKey("orders"))]
    assert made.count(stage.ids[0]) == 1


def test_a_body_may_work_in_pools_of_forked_processes(instance: dg.DagsterInstance) -> None:
    """A worker that is told to end right after its fork must hear it: the pool waits for it."""

    def body(_stage: Stage, _batch: KafkaBatch) -> None:
        fork_pools()
        leave()

    stage = Stage(instance, body)
    stage.produce(0, 3)
    stage.run()
    assert stage.committed(0) == 3


def test_a_run_that_the_sensor_has_not_started_fails_and_says_so(
    instance: dg.DagsterInstance,
) -> None:
    """Materialised by hand, say: nobody would count it, replace it or end it."""
    stage = Stage(instance, lambda *_: leave())
    stage.produce(0, 3)
    with pytest.raises(dg.Failure, match=r"not started by its sensor.*: turn it on") as refused:
        stage.job.execute_in_process(instance=instance)
    assert refused.value.allow_retries is False
    assert (stage.batches, stage.group.members) == ([], ())


def test_the_batch_at_work_is_finished_when_the_process_is_asked_to_end(
    instance: dg.DagsterInstance,
) -> None:
    """SIGTERM is a request to leave, and no failure: the next run must not wait for a delay."""

    def body(stage: Stage, _batch: KafkaBatch) -> None:
        leave()
        stage.produce(0, 5)

    stage = Stage(instance, body)
    stage.produce(0, 3)
    run_id = stage.run()
    assert stage.committed(0) == 3
    assert len(stage.batches) == 1
    (record,) = instance.get_run_records(dg.RunsFilter(run_ids=[run_id]))
    assert record.dagster_run.status is dg.DagsterRunStatus.SUCCESS
    group = GroupAssets.of(stage.kafka.group_id).group
    (left,) = instance.fetch_observations(group, limit=1).records
    assert left.asset_observation is not None
    assert str(left.asset_observation.description).endswith("its process was asked to end")


def test_a_run_that_is_cancelled_leaves_also_when_no_signal_reaches_it(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may not reach the process, and a code server that was replaced does not know it.

    Dagster shows what is wanted, and the run looks at that anyway.
    """
    monkeypatch.setattr(heartbeat_module, "_CHECKS_PER_TIMEOUT", 10_000)

    def body(stage: Stage, batch: KafkaBatch) -> None:
        if len(stage.batches) == 1:
            instance.report_run_canceling(instance.get_runs(limit=1)[0])
        if len(stage.batches) == MANY:
            leave()
        stage.produce(0, batch.records)

    stage = Stage(instance, body)
    stage.produce(0, 3)
    with pytest.raises(dg.DagsterExecutionInterruptedError):
        stage.run()
    assert len(stage.batches) < MANY
    assert stage.committed(0) == 3 * len(stage.batches)
    (run,) = instance.get_runs(limit=1)
    assert run.status is dg.DagsterRunStatus.CANCELED


def test_a_range_that_fails_is_tried_again_alone_and_then_stops(
    instance: dg.DagsterInstance,
) -> None:
    """The other ranges of its batch go on; whoever comes next finds how it ended."""

    def body(stage: Stage, batch: KafkaBatch) -> None:
        if len(stage.batches) == 5:
            leave()
        if span(0, 0, 3) in batch.offset_ranges:
            msg = "cannot read record 1"
            raise ValueError(msg)

    stage = Stage(instance, body, retry_delay_s=0.01, retry_delay_limit_s=0.05)
    stage.produce(0, 3)
    stage.produce(1, 3)
    run_id = stage.run()
    assert stage.batches[0] == (span(0, 0, 3), span(1, 0, 3))
    assert sorted(stage.batches[1:]) == [(span(0, 0, 3),)] * 3 + [(span(1, 0, 3),)]
    assert stage.committed(1) == 3
    claims = decode(stage.group.committed[tp(0)]).ranges(tp(0))
    ((range_, batch_id),) = claims
    batch = StreamBatch.parse(batch_id)
    assert batch is not None
    assert (batch.run_id, batch.attempt) == (run_id, 4)
    assert AbandonedClaims(instance).read([(batch_id, range_)]) == {
        (batch_id, range_): BatchOutcome.FAILED
    }


def test_a_batch_whose_partitions_are_lost_is_interrupted(instance: dg.DagsterInstance) -> None:
    """Nobody else may begin it before that; it was no attempt, and it is done again."""
    ends: list[str] = []

    def body(stage: Stage, _batch: KafkaBatch) -> None:
        if len(stage.batches) > 1:
            leave()
            return
        (member,) = stage.group.members
        stage.group.fence(member)
        try:
            threading.Event().wait(60)
        except BaseException as end:
            ends.append(type(end).__name__)
            raise

    stage = Stage(instance, body)
    stage.produce(0, 3)
    stage.run()
    assert ends == ["BatchInterruptedError"]
    assert stage.batches == [(span(0, 0, 3),)] * 2
    assert [StreamBatch.parse(batch_id).attempt for batch_id in stage.ids] == [1, 1]  # type: ignore[union-attr]
    assert stage.committed(0) == 3


def test_what_a_body_fails_with_after_its_interruption_is_no_attempt(
    instance: dg.DagsterInstance,
) -> None:
    """Its clean-up meets connections that the interruption has broken: the records are fine."""

    def body(stage: Stage, _batch: KafkaBatch) -> None:
        if len(stage.batches) > 1:
            leave()
            return
        (member,) = stage.group.members
        stage.group.fence(member)
        try:
            threading.Event().wait(60)
        except BaseException as end:
            msg = "the connection is closed"
            raise ConnectionError(msg) from end

    stage = Stage(instance, body)
    stage.produce(0, 3)
    run_id = stage.run()
    assert [StreamBatch.parse(batch_id).attempt for batch_id in stage.ids] == [1, 1]  # type: ignore[union-attr]
    assert stage.committed(0) == 3
    said = [entry.user_message for entry in instance.all_logs(run_id)]
    ended = f"batch {stage.ids[0]} ended with ConnectionError: the connection is closed"
    assert any(one.startswith(ended) for one in said)
    assert not any("failed on" in one for one in said)


def test_a_batch_that_does_not_return_is_a_failed_attempt_after_its_limit(
    instance: dg.DagsterInstance,
) -> None:
    """It had no limit, and each interruption counted as nothing."""

    def body(stage: Stage, batch: KafkaBatch) -> None:
        if len(stage.batches) > 1:
            leave()
        elif batch.records:
            threading.Event().wait(60)

    stage = Stage(instance, body, batch_timeout_s=1.0, retry_delay_s=0.0)
    stage.produce(0, 3)
    stage.run()
    first, last = (StreamBatch.parse(batch_id) for batch_id in (stage.ids[0], stage.ids[-1]))
    assert first is not None
    assert last is not None
    assert (first.attempt, last.interruptions) == (1, 0)
    assert last.attempt > 1, "the first attempt has failed"
    assert stage.committed(0) == 3


def storage_fails(
    monkeypatch: pytest.MonkeyPatch, times: int, error: Exception | None = None
) -> list[int]:
    """Let Dagster's storage refuse this many reports; returns one item for each that is left."""
    fails = list(range(times))
    refusal = error or OSError("database is locked")
    real = dg.AssetExecutionContext.log_event

    def log_event(context: dg.AssetExecutionContext, event: Any) -> None:  # noqa: ANN401 - of many kinds
        if fails:
            fails.pop()
            raise refusal
        real(context, event)

    monkeypatch.setattr(dg.AssetExecutionContext, "log_event", log_event)
    monkeypatch.setattr("dagster_rebalance.orchestration.streaming.run._WAIT_S", 0.01)
    return fails


def test_a_batch_is_not_failed_by_a_storage_that_is_away(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is there: it is kept until Dagster can be told."""
    fails = storage_fails(monkeypatch, 2)
    stage = Stage(instance, lambda *_: leave())
    stage.produce(0, 3)
    stage.run()
    assert not fails
    assert (stage.batches, stage.committed(0)) == ([(span(0, 0, 3),)], 3)


def test_a_report_that_dagster_refuses_is_a_failed_attempt(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that is there and refuses just this is not waited for: the lag would only grow."""
    real = dg.AssetExecutionContext.log_event

    def log_event(context: dg.AssetExecutionContext, event: Any) -> None:  # noqa: ANN401 - of many kinds
        if len(stage.batches) == 1:
            msg = "a string literal cannot contain NUL characters"
            raise ValueError(msg)
        real(context, event)

    monkeypatch.setattr(dg.AssetExecutionContext, "log_event", log_event)
    monkeypatch.setattr("dagster_rebalance.orchestration.streaming.run._WAIT_S", 0.01)
    stage = Stage(
        instance,
        lambda stage, _: leave() if len(stage.batches) > 1 else None,
        retry_delay_s=0.01,
        retry_delay_limit_s=0.05,
    )
    stage.produce(0, 3)
    stage.run()
    assert [StreamBatch.parse(batch_id).attempt for batch_id in stage.ids] == [1, 2]  # type: ignore[union-attr]
    assert stage.committed(0) == 3


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
    "error",
    [
        pytest.param(lost("INSERT", is_invalidated=True), id="in a statement"),
        pytest.param(lost(None, is_invalidated=False), id="no connection"),
        pytest.param(wrapped(lost(None, is_invalidated=False)), id="after retries of Dagster"),
        pytest.param(sqlalchemy.exc.TimeoutError("QueuePool limit"), id="no room in the pool"),
    ],
)
def test_lost_connections_to_the_storage_are_no_failed_attempt(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The connections of the heartbeat may survive where those of the reports are dropped."""
    fails = storage_fails(monkeypatch, 12, error)
    stage = Stage(instance, lambda *_: leave())
    stage.produce(0, 3)
    stage.run()
    assert not fails
    assert (stage.batches, stage.committed(0)) == ([(span(0, 0, 3),)], 3)


def test_refusals_over_an_open_connection_are_a_failed_attempt(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres reports a row that is too large for an index as an OperationalError, too."""
    storage_fails(monkeypatch, 5, lost("INSERT", is_invalidated=False))
    stage = Stage(
        instance, lambda stage, _: leave() if len(stage.batches) > 1 else None, retry_delay_s=0.01
    )
    stage.produce(0, 3)
    stage.run()
    assert [StreamBatch.parse(batch_id).attempt for batch_id in stage.ids] == [1, 2]  # type: ignore[union-attr]


class NamelessError(Exception):
    def __str__(self) -> str:
        raise ConnectionError


class PanicError(BaseException):
    """What extensions in Rust raise: they derive it so that nobody catches it by accident."""


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
def test_a_body_that_ends_the_process_or_panics_has_failed(
    instance: dg.DagsterInstance, error: BaseException
) -> None:
    """Else a record for which it does so would be tried for ever, by one run after the other."""

    def body(stage: Stage, _batch: KafkaBatch) -> None:
        if len(stage.batches) > 1:
            leave()
        else:
            raise error

    stage = Stage(instance, body, retry_delay_s=0.01, retry_delay_limit_s=0.05)
    stage.produce(0, 3)
    stage.run()
    assert [StreamBatch.parse(batch_id).attempt for batch_id in stage.ids] == [1, 2]  # type: ignore[union-attr]
    assert stage.committed(0) == 3


def test_the_end_of_the_member_is_no_failed_attempt(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka refuses it for good: the records are not at fault."""
    stage = Stage(instance, lambda *_: None)

    def poll(*_: object) -> NoReturn:
        msg = "the principal may not read the topic"
        raise BrokerError(msg)

    monkeypatch.setattr(FakeMember, "poll", poll)
    with pytest.raises(BrokerError, match="the principal may not read"):
        stage.job.execute_in_process(instance=instance, tags=BY_THE_SENSOR)
    run_id = instance.get_runs(limit=1)[0].run_id
    assert run_events_of(instance, run_id) >= {RunEvent.TAKEN_BACK, RunEvent.FINISHED}


def test_a_run_that_has_left_says_that_it_works_on_nothing(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on until its resources are torn down, and the next owner must not wait for that."""
    said: list[str] = []
    real = Heartbeats.record

    def give(signs: Heartbeats, run: dg.DagsterRun, number: int, text: str) -> None:
        said.append(text)
        real(signs, run, number, text)

    monkeypatch.setattr(Heartbeats, "record", give)
    stage = Stage(instance, lambda *_: leave())
    stage.produce(0, 3)
    stage.run()
    assert partitions_in(said[-1]) == frozenset()
    assert any(partitions_in(text) for text in said)


def test_a_mark_that_dagster_does_not_take_is_set_later(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it no run of older code is asked to leave, and both work on for an hour."""
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
def test_a_body_that_keeps_its_interruption_is_killed_when_nobody_can_commit_it(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """It may wait for a thread that nothing interrupts; others wait for the run all the while."""
    run = StreamRun.__new__(StreamRun)
    is_killed, marks = threading.Event(), []
    told: list[LeaveRequested] = []

    def process(*_: object) -> None:
        if is_late:  # the worker was asked to give up, as on each turn of the member from then on
            run._give_up()
            run._give_up()
        member.start()
        is_killed.wait(60)

    parts = {
        "_run": SimpleNamespace(run_id="r"),
        "_context": SimpleNamespace(instance="instance"),
        "_kafka": SimpleNamespace(heartbeat_timeout_s=600.0 if is_late else 0.01),
        "_mailbox": SimpleNamespace(send=told.append),
        "_work": SimpleNamespace(next=lambda _: "a batch", is_late=is_late),
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
        "dagster_rebalance.orchestration.streaming.run.record_run_event",
        lambda *said: marks.append((*said, is_killed.is_set())),
    )
    monkeypatch.setattr("dagster_rebalance.orchestration.streaming.run._WAIT_S", 0.01)
    member = threading.Thread(target=run._end_body)
    works = SimpleNamespace(is_alive=lambda: not is_killed.is_set())
    run._process_batches(works)  # type: ignore[arg-type]
    assert is_killed.is_set()
    member.join(60)
    if is_late:
        assert not marks, "a batch that took too long is a failed attempt"
        assert [(one.reason, one.limit_s) for one in told] == [
            ("the batch at work was interrupted and does not end", 0.0)
        ]
    else:
        taken_back = ("instance", run._run, RunEvent.TAKEN_BACK, False)
        assert marks[0] == taken_back, "it is no failed attempt"


def test_a_storage_that_is_away_for_long_fails_no_batch(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the sign of life right after it has refused a report: that is no refusal of it."""
    fails = storage_fails(monkeypatch, 9)
    stage = Stage(instance, lambda *_: leave())
    stage.produce(0, 3)
    monkeypatch.setattr(StreamRun, "_try_beat", lambda _: len(fails) == 4)
    stage.run()
    assert (stage.batches, stage.committed(0)) == ([(span(0, 0, 3),)], 3)


def test_a_second_interrupt_does_not_hit_what_handles_the_first(
    instance: dg.DagsterInstance,
) -> None:
    """A hold cancels again each second, and the log may take longer."""

    def body(stage: Stage, _batch: KafkaBatch) -> None:
        if len(stage.batches) > 1:
            leave()
            return
        (member,) = stage.group.members
        stage.group.fence(member)
        try:
            threading.Event().wait(60)
        finally:
            os.kill(os.getpid(), signal.SIGUSR2)

    stage = Stage(instance, body)
    stage.produce(0, 3)
    stage.run()
    assert stage.committed(0) == 3


def test_an_interrupt_does_not_hit_what_tells_of_a_failure(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch has failed by itself, and the run goes on."""
    tell = StreamRun._log

    def interrupted(run: StreamRun, write: Callable[..., None], text: str, *given: object) -> None:
        if "failed" in text:
            os.kill(os.getpid(), signal.SIGUSR2)
        tell(run, write, text, *given)

    monkeypatch.setattr(StreamRun, "_log", interrupted)

    def body(stage: Stage, _batch: KafkaBatch) -> None:
        if len(stage.batches) > 1:
            leave()
            return
        message = "the test wants this batch to fail"
        raise ValueError(message)

    stage = Stage(instance, body, retry_delay_s=0.01, retry_delay_limit_s=0.05)
    stage.produce(0, 3)
    stage.run()
    assert stage.committed(0) == 3


def test_an_asset_may_take_a_resource_from_its_context(instance: dg.DagsterInstance) -> None:
    """As in a run of its own."""
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


@pytest.mark.parametrize("said", [5, dg.MaterializeResult(value=5)])
def test_an_asset_may_not_return_a_value(instance: dg.DagsterInstance, said: object) -> None:
    """There is no IO manager to keep one for each batch: the batch fails, and says so."""
    seen = []

    def body(stage: Stage, _batch: KafkaBatch) -> object:
        seen.append(len(stage.batches))
        leave()
        return said

    stage = Stage(instance, body)
    stage.produce(0, 3)
    run_id = stage.run()
    assert stage.group.committed[tp(0)].offset == 0
    logs = " ".join(
        entry.user_message
        for entry in instance.all_logs(run_id)
        if "failed on" in entry.user_message
    )
    assert "orders-0 [0, 3)" in logs


def test_several_assets_of_a_batch_are_called_in_their_order(instance: dg.DagsterInstance) -> None:
    """What comes second may read what the first has written."""
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
        self.kafka = kafka_in_memory(retry_delay_s=0.01, retry_delay_limit_s=0.05)
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
        found = [StreamBatch.parse(batch_id) for batch_id in self.ids]
        return [batch.attempt for batch in found if batch is not None]

    def said(self, name: str) -> list[bool]:
        key = dg.AssetCheckKey(dg.AssetKey("orders"), name)
        records = self.instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
        events = [record.event.dagster_event for record in records if record.event is not None]
        return [
            event.asset_check_evaluation_data.passed
            for event in events
            if event is not None and event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION
        ]


@dg.asset
def whole(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
    """Fits."""


@dg.asset
def without_batch() -> None:
    """Takes no batch."""


@dg.asset
def with_value(kafka_batch, whole) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - as above
    """Takes the value of another asset."""


@dg.asset(pool="database")
def in_a_pool(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - as above
    """Waits for its turn."""


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=3))
def with_retries(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - as above
    """Is to be begun again in the same run."""


@dg.failure_hook
def _alert(_context: dg.HookContext) -> None:
    """Is to be called when the asset fails."""


@dg.asset(hooks={_alert})
def with_hooks(kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - as above
    """Has a hook, which Dagster calls at the end of a step."""


class Options(dg.Config):
    day: str = ""


def _with_config(kafka_batch, config) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - as above
    """Takes run config as a parameter."""


_with_config.__annotations__["config"] = Options  # Dagster reads no text there
with_config = dg.asset(name="with_config")(_with_config)


@dg.asset(config_schema={"day": str})
def with_schema(context, kafka_batch) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - as above
    """Takes run config from the context."""


@dg.op
def _nothing() -> None:
    """Does nothing."""


@dg.graph_asset
def of_ops() -> None:
    return _nothing()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("asset", "why"),
    [
        (without_batch, "without_batch does not take the batch"),
        (with_value, "with_value takes 'whole', which is neither a resource nor the batch"),
        (of_ops, "of_ops is not made by one decorated function"),
        (in_a_pool, "in_a_pool has a pool, .* by the argument `runs`"),
        (with_retries, "with_retries has a retry_policy, .* `max_attempts` of the group"),
        (with_hooks, "with_hooks has hooks, which no batch would call"),
        (with_config, "with_config takes run config, which no batch has: .* a resource"),
        (with_schema, "with_schema takes run config, which no batch has: .* a resource"),
    ],
)
def test_what_cannot_be_called_for_each_batch_is_refused_where_it_is_defined(
    asset: dg.AssetsDefinition, why: str
) -> None:
    """Not in a run, hours later."""
    with pytest.raises(ConfigurationError, match=why):
        build_kafka_stream_defs(kafka=kafka_in_memory(), assets=[asset])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"runs": -1}, "runs=-1 of kafka_stream must be at least 0"),
        ({"runs": 1.5}, r"runs=1\.5 of kafka_stream must be a whole number"),
        ({"runs": "2"}, "runs='2' of kafka_stream must be a whole number"),
        ({"max_run_s": "1h"}, "max_run_s='1h' of kafka_stream must be a number of seconds"),
        ({"max_run_s": float("nan")}, "max_run_s=nan of kafka_stream must be a number of seconds"),
        ({"resources": {"kafka_batch": object()}}, "the resource key 'kafka_batch' is used"),
        ({"max_run_s": 1.0}, "max_run_s=1 of kafka_stream must be at least 60"),
        ({"resources": {"kafka": object()}}, "the resource key 'kafka' is used"),
        ({"name": "whole"}, "whole is the name of an asset and of the job"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], why: str) -> None:
    """With what to do about it."""
    with pytest.raises(ConfigurationError, match=why):
        build_kafka_stream_defs(kafka=kafka_in_memory(), assets=[whole], **settings)


def test_a_check_result_without_a_name_is_that_of_the_only_check(
    instance: dg.DagsterInstance,
) -> None:
    """As in a run for each batch. So is what else a result says of its asset."""
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
def test_a_check_result_that_fits_no_check_is_refused(
    specs: Sequence[str], name: str | None
) -> None:
    """By Dagster, too. Stored under a check that does not exist, nobody would see it."""

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
def test_a_blocking_check_that_fails_makes_a_failed_attempt(
    instance: dg.DagsterInstance, severity: dg.AssetCheckSeverity, attempts: list[int]
) -> None:
    """A run for each batch fails, and commits nothing. The evaluation is kept."""
    name = f"blocking_{severity.name}"
    stage = Checked(
        instance,
        dg.AssetCheckResult(passed=False, severity=severity),
        specs=[dg.AssetCheckSpec(name, asset="orders", blocking=True)],
    )
    stage.run()
    assert stage.said(name) == [True, False], "newest first"
    assert stage.attempts[:2] == attempts


def test_a_check_of_its_own_is_no_part_of_a_streaming_run(instance: dg.DagsterInstance) -> None:
    """Dagster would plan it in each run and execute it in none; a job of its own may have it."""
    stage = Checked(instance, specs=[dg.AssetCheckSpec("good", asset="orders")])
    nodes = stage.defs.resolve_job_def("stream").graph.node_defs
    assert [node.name for node in nodes] == ["stream_batches"]
    assert stage.defs.resolve_job_def("alone").execute_in_process(instance=instance).success
    assert stage.said("not_empty") == [True]
