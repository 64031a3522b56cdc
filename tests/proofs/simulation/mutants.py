"""Mutants: deliberately broken variants of the package, each against a rule of ARCHITECTURE.md."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.batches import planning as planning_module
from dagster_rebalance.core.engine import claimed_work as claimed_work_module
from dagster_rebalance.core.engine import dead_letter_policy as dead_letter_policy_module
from dagster_rebalance.core.engine import engine as driver_module
from dagster_rebalance.core.engine import run_requests as requests_module
from dagster_rebalance.core.engine import run_results as run_news_module
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.engine.run_requests import due_requests
from dagster_rebalance.core.model import directives as control_module
from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.commands import Cause
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.model.topics import StartFrom
from dagster_rebalance.core.partitions import bisected as bisected_module
from dagster_rebalance.core.partitions import owned as owned_module
from dagster_rebalance.core.partitions import recovery as restoring_module
from dagster_rebalance.core.partitions.ledger import OffsetLedger
from dagster_rebalance.core.partitions.owned import OwnedPartition
from dagster_rebalance.core.partitions.recovery import restore
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.partitions.unrecorded import Unrecorded
from dagster_rebalance.core.reporting import explain as explain_module
from dagster_rebalance.core.revokes import hold as holds_module
from dagster_rebalance.core.revokes.hold import HandoverBackoff, HeldPartitions, Hold
from dagster_rebalance.core.runs import progress as runs_module
from dagster_rebalance.core.runs import start_check as start_check_module
from dagster_rebalance.core.runs.liveness import Liveness, TrackedRun
from dagster_rebalance.core.runs.progress import FailureKind, InFlight, Succeeded, ToRequest
from dagster_rebalance.orchestration.member import loop as pump_module
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.member.storage_worker import StorageWorker
from dagster_rebalance.orchestration.runs.canceller import RunCanceller, at_once
from proofs.simulation import run_life, run_process
from proofs.simulation.dagster_runs import SimulatedDagster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pytest

    from dagster_rebalance.core.model import commands
    from dagster_rebalance.core.model.claims import LastCommit
    from dagster_rebalance.core.model.commands import OffsetWrite
    from dagster_rebalance.core.model.run_snapshot import BatchRequest


def _age(liveness: Liveness, run: RunSnapshot) -> float:
    return liveness.tracked[run.run_id].age_s if run.run_id in liveness.tracked else 0.0


def no_start_check(patch: pytest.MonkeyPatch) -> None:
    """A run works without looking at its claim and at other runs."""
    patch.setattr(run_life, "refusal", lambda *_: None)


def no_read_before_write(patch: pytest.MonkeyPatch) -> None:
    """The member loop writes without a compare."""

    def written(self: MemberLoop, writes: tuple[OffsetWrite, ...]) -> events.Event:
        result = self.dependencies.consumer.commit_offsets(
            {write.partition: write.new for write in writes}, 10.0
        )
        return events.OffsetsWritten(
            tuple(write for write in writes if write.partition in result.committed)
        )

    patch.setattr(MemberLoop, "_written", written)


def commit_of_a_failed_run(patch: pytest.MonkeyPatch) -> None:
    """A run that failed counts as done."""
    real = runs_module.progress_of

    def progress_of(range_, batch_id, runs, **said):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN202 - the signature of the replaced function
        for run in runs.of(batch_id, range_):
            if run.state is RunState.FAILED:
                return Succeeded(run.run_id)
        return real(range_, batch_id, runs, **said)

    patch.setattr(run_news_module, "progress_of", progress_of)


def drop_the_claims_on_a_commit(patch: pytest.MonkeyPatch) -> None:
    """A commit does not write the claims behind it again."""
    real = OwnedPartition._write

    def write(self: OwnedPartition, ledger: OffsetLedger, last: LastCommit | None) -> OffsetWrite:
        is_commit = self.ledger is not None and ledger.next_offset > self.ledger.next_offset
        return real(self, ledger._replace(entries=()) if is_commit else ledger, last)

    patch.setattr(OwnedPartition, "_write", write)


def forget_the_claims_of_the_former_owner(patch: pytest.MonkeyPatch) -> None:
    """On assignment only the committed offset is taken over."""
    real = restoring_module.restore

    def restore(*arguments, **options):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN003, ANN202 - as above
        taken = real(*arguments, **options)
        if not isinstance(taken, OwnedPartition) or taken.ledger is None:
            return taken
        return taken._replace(ledger=taken.ledger._replace(entries=()))

    patch.setattr(driver_module, "restore", restore)


def forget_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """A lost or superseded assignment continues."""
    patch.setattr(Engine, "_on_lost", lambda *_: ())


def release_before_commit(patch: pytest.MonkeyPatch) -> None:
    """The revoke is not delayed; the engine goes on draining and committing."""
    patch.setattr(Engine, "held", frozenset())


def fence_before_drain(patch: pytest.MonkeyPatch) -> None:
    """A partition counts as drained as soon as it is asked for."""
    patch.setattr(holds_module, "waits_of", lambda *_, **__: ())


def commit_out_of_order(patch: pytest.MonkeyPatch) -> None:
    """Any range that is done may be committed next."""

    def committable(self: OffsetLedger) -> object:
        return next((entry for entry in self.entries if entry.completed_by is not None), None)

    patch.setattr(OffsetLedger, "committable", property(committable))


def no_deadline(patch: pytest.MonkeyPatch) -> None:
    """A hold waits for as long as it takes."""
    patch.setattr(Hold, "limit_at", float("inf"))
    patch.setattr(Hold, "deadline_at", float("inf"))


def no_new_claims(patch: pytest.MonkeyPatch) -> None:
    """Planning stops after the first few batches."""
    real = planning_module.plan
    patch.setattr(
        driver_module,
        "plan",
        lambda backlogs, *rest, **options: real(
            [b for b in backlogs if b.start < 20], *rest, **options
        ),
    )


def deaf_pulse(patch: pytest.MonkeyPatch) -> None:
    """A run is taken for dead after a while, whatever signs it gives."""
    patch.setattr(
        Liveness,
        "_track",
        lambda self, run, step_s: replace(
            self.tracked.get(run.run_id, TrackedRun(run)), age_s=_age(self, run) + step_s
        ),
    )


def ask_again_while_it_works(patch: pytest.MonkeyPatch) -> None:
    """A dead run is never waited out: a run that lives does not count as work in flight."""
    real = runs_module.progress_of

    def progress_of(range_, batch_id, runs, **said):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN202 - the signature of the replaced function
        found = real(range_, batch_id, runs, **said)
        return found if isinstance(found, Succeeded) else ToRequest()

    patch.setattr(run_news_module, "progress_of", progress_of)


def no_pulse(patch: pytest.MonkeyPatch) -> None:
    """Dead runs are not detected."""
    patch.setattr(Liveness, "observe", lambda self, *_: (self, ()))


def stopped_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A stop is never checked again."""
    real = Engine._distrusted
    patch.setattr(
        Engine,
        "_distrusted",
        lambda self, owned: owned if owned.phase is Phase.STOPPED else real(self, owned),
    )


def ask_once(patch: pytest.MonkeyPatch) -> None:
    """A batch whose run failed is not requested again."""

    def offered(
        partitions: Iterable[OwnedPartition],
        now: float,
        **said: Any,  # noqa: ANN401 - it only passes them on
    ) -> tuple[BatchRequest, ...]:
        found = due_requests(partitions, now, **said)
        return tuple(batch_request for batch_request in found if batch_request.attempt == 1)

    patch.setattr(claimed_work_module, "due_requests", offered)


def without_a_word(patch: pytest.MonkeyPatch) -> None:
    """The explanation of a stopped partition omits the stop."""
    real = explain_module._state
    patch.setattr(
        explain_module,
        "_state",
        lambda owned, now: "" if owned.phase is Phase.STOPPED else real(owned, now),
    )


def begin_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """A new group skips existing records."""
    real = restore
    patch.setattr(
        driver_module,
        "restore",
        lambda *seen, **said: real(*seen, **{**said, "start_from": StartFrom.LATEST}),
    )


def leave_with_an_open_hold(patch: pytest.MonkeyPatch) -> None:
    """A member that leaves forgets to end the hold for it."""
    real = HeldPartitions._end

    def end(
        self: HeldPartitions, hold: Hold, held: list[OwnedPartition], now: float
    ) -> Iterable[commands.Command]:
        yield from real(self, hold, held, now)
        if hold.cause is Cause.LEAVE:
            self.holds = (*self.holds, hold)

    patch.setattr(HeldPartitions, "_end", end)


def believe_dagster(patch: pytest.MonkeyPatch) -> None:
    """A run counts as over as soon as Dagster shows it as ended."""
    patch.setattr(RunSnapshot, "is_over", property(lambda _: True, lambda *_: None))


def no_lease(patch: pytest.MonkeyPatch) -> None:
    """A run that cannot reach Dagster's storage works on for as long as it likes."""
    patch.setattr(run_life, "LEASE_S", float("inf"))


def a_part_is_the_whole(patch: pytest.MonkeyPatch) -> None:
    """A run that succeeded counts for all assets, whatever it left out."""
    patch.setattr(runs_module, "missing_assets", lambda *_: ())


def keep_what_a_later_run_has_spoilt(patch: pytest.MonkeyPatch) -> None:
    """The output of a part of a job counts, even if a later run tried it again and failed."""
    real = runs_module.missing_assets

    def lacking(succeeded: RunSnapshot, runs: Sequence[RunSnapshot]) -> tuple[str, ...]:
        return tuple(asset for asset in real(succeeded, runs) if asset in succeeded.left_out)

    patch.setattr(runs_module, "missing_assets", lacking)
    patch.setattr(start_check_module, "missing_assets", lacking)


def begin_anew_where_offsets_vanished(patch: pytest.MonkeyPatch) -> None:
    """A group without a committed offset counts as new, whatever Dagster has recorded."""
    real = restoring_module.check_position
    patch.setattr(
        restoring_module,
        "check_position",
        lambda partition, found, foreign: real(partition, replace(found, recorded=None), foreign),
    )


def created_is_queued(patch: pytest.MonkeyPatch) -> None:
    """A run that was created and never submitted is waited for."""
    real = runs_module.progress_of

    def progress_of(range_, batch_id, runs, **said):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN202 - the signature of the replaced function
        found = real(range_, batch_id, runs, **said)
        return replace(found, unsubmitted=None) if isinstance(found, InFlight) else found

    patch.setattr(run_news_module, "progress_of", progress_of)


def never_record_late(patch: pytest.MonkeyPatch) -> None:
    """The commit of a member that went away before it recorded it is forgotten."""
    patch.setattr(restoring_module, "unrecorded_commits", lambda *_, **__: ())


def wait_for_ever_for_the_storage(patch: pytest.MonkeyPatch) -> None:
    """No other thread takes over where the storage hangs."""
    patch.setattr(StorageWorker, "replace_hung_thread", lambda _: None)


def believe_the_end_of_the_log(patch: pytest.MonkeyPatch) -> None:
    """A log that has grown again looks as if it had always been there."""
    real = restoring_module.check_position
    patch.setattr(
        restoring_module,
        "check_position",
        lambda partition, found, foreign: real(
            partition, replace(found, is_truncated=False), foreign
        ),
    )


def forget_deleted_runs(patch: pytest.MonkeyPatch) -> None:
    """A run that was deleted while it works is not known any more."""
    patch.setattr(Liveness, "with_deleted", lambda _self, runs, _batch_ids: tuple(runs))
    patch.setattr(
        SimulatedDagster,
        "_shown_deleted",
        lambda self, run_id, _: replace(self.runs[run_id], is_refused=True),
    )


def one_refused_partition_ends_the_member(patch: pytest.MonkeyPatch) -> None:
    """A right that is missing on one partition takes the others along."""
    real = MemberLoop._written

    def written(self: MemberLoop, writes: tuple[OffsetWrite, ...]) -> events.Event:
        event = real(self, writes)
        if isinstance(event, events.OffsetsWritten) and event.refused:
            message = "the right is missing"
            raise BrokerError(message, retriable=False)
        return event

    patch.setattr(MemberLoop, "_written", written)


def a_refusal_is_an_attempt(patch: pytest.MonkeyPatch) -> None:
    """A run that could not ask whether it may begin counts as one that failed."""
    real = runs_module.failure_kind
    patch.setattr(
        runs_module,
        "failure_kind",
        lambda run: (
            FailureKind.FAILED if run.is_refused and not run.is_cancelled_by_member else real(run)
        ),
    )


def keep_every_hold(patch: pytest.MonkeyPatch) -> None:
    """Holds that have ended are not forgotten."""
    real, kept = HeldPartitions._end, []

    def end(
        self: HeldPartitions, hold: Hold, held: list[OwnedPartition], now: float
    ) -> Iterable[commands.Command]:
        kept.append(hold)
        self.kept = kept  # type: ignore[attr-defined]
        return real(self, hold, held, now)

    patch.setattr(HeldPartitions, "_end", end)


def ignore_people(patch: pytest.MonkeyPatch) -> None:
    """The engine ignores directives."""
    patch.setattr(driver_module, "in_force", lambda *_: None)


def begin_before_orders_are_known(patch: pytest.MonkeyPatch) -> None:
    """A new owner does not wait until it knows the paused partitions."""
    patch.setattr(Engine, "_knows_directives", lambda *_: True)


def paused_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A partition that was paused does not go on."""
    real = OwnedPartition.with_directive
    patch.setattr(
        OwnedPartition, "with_directive", lambda owned, order: real(owned, order or owned.directive)
    )


def a_launch_that_fails_is_an_attempt(patch: pytest.MonkeyPatch) -> None:
    """A run that never came to its process counts as one that failed at the records."""
    real = runs_module.failure_kind
    patch.setattr(
        runs_module,
        "failure_kind",
        lambda run: FailureKind.FAILED if real(run) is FailureKind.NOT_STARTED else real(run),
    )


def hear_only_what_a_poll_tells_first(patch: pytest.MonkeyPatch) -> None:
    """Later events of the same poll are lost."""
    real = MemberLoop._poll
    patch.setattr(MemberLoop, "_poll", lambda self, timeout_s: real(self, timeout_s)[:1])


def all_assets_are_a_success(patch: pytest.MonkeyPatch) -> None:
    """A run whose steps have all succeeded counts, whatever became of the run."""
    real = runs_module.progress_of

    def progress_of(range_, batch_id, runs, **said):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN202 - the signature of the replaced function
        for run in runs.of(batch_id, range_):
            if run.done and not run.undone:
                return Succeeded(run.run_id)
        return real(range_, batch_id, runs, **said)

    patch.setattr(run_news_module, "progress_of", progress_of)


def a_sign_is_a_beginning(patch: pytest.MonkeyPatch) -> None:
    """A run that was killed between its first sign and its mark has worked, and failed."""
    real = SimulatedDagster._shown
    patch.setattr(
        SimulatedDagster,
        "_shown",
        lambda self, run_id: replace(
            real(self, run_id), has_started=self.processes[run_id].is_seen
        ),
    )


def end_runs_on_the_thread_of_the_member(patch: pytest.MonkeyPatch) -> None:
    """A launcher that does not answer keeps the member from its group."""
    patch.setattr(
        pump_module,
        "RunCanceller",
        lambda runs, note, ended, _start, clock: RunCanceller(runs, note, ended, at_once, clock),
    )


def wait_for_ever_for_a_launcher(patch: pytest.MonkeyPatch) -> None:
    """No other thread takes over where a launcher never answers."""
    patch.setattr(RunCanceller, "_replace_hung", lambda *_: [])


def join_whenever_a_tick_comes(patch: pytest.MonkeyPatch) -> None:
    """A replica that made way joins again."""
    patch.setattr(HandoverBackoff, "may_join", lambda *_: True)


def the_latest_clock_decides(patch: pytest.MonkeyPatch) -> None:
    """Of the orders that cover a partition the one with the latest time counts."""
    real = control_module.in_force
    patch.setattr(
        driver_module,
        "in_force",
        lambda orders, partition: real(sorted(orders, key=lambda order: order.at), partition),
    )


def believe_the_clock_of_a_run(patch: pytest.MonkeyPatch) -> None:
    """The age of a sign is taken from the time in it, by the clock of the member."""
    real = Liveness.observe

    def observe(self: Liveness, runs: Iterable[RunSnapshot], now: float) -> object:
        known = list(runs)
        aged = {
            run.run_id: TrackedRun(run, age_s=now - int(run.heartbeat) * run_process.BEAT_S)
            for run in known
            if run.heartbeat
        }
        return real(replace(self, tracked={**self.tracked, **aged}), known, now)

    patch.setattr(Liveness, "observe", observe)


def commits_wait_for_records(patch: pytest.MonkeyPatch) -> None:
    """Nothing is committed while a record is issued."""
    real = OwnedPartition.commit_write
    patch.setattr(
        OwnedPartition,
        "commit_write",
        lambda self, now: None if self.unrecorded.issued else real(self, now),
    )


def issued_records_grow(patch: pytest.MonkeyPatch) -> None:
    """A commit joins a record that Dagster may already have."""

    def growing(self: Unrecorded) -> commands.RecordCommit | None:
        last = self.parts[-1] if self.parts else None
        return None if last is None or last.is_late or last.is_dead_letter else last

    patch.setattr(Unrecorded, "growing", property(growing))


def note_only_the_last_record(patch: pytest.MonkeyPatch) -> None:
    """The note of a commit omits the record that is issued."""
    patch.setattr(Unrecorded, "noted", lambda *_, **__: ())


def begin_behind_a_failed_range(patch: pytest.MonkeyPatch) -> None:
    """A streaming run processes any of the ranges that it has claimed."""
    real = requests_module._requestable
    patch.setattr(requests_module, "_requestable", lambda owned, now, _="": real(owned, now))


def blame_a_death_on_what_waited(patch: pytest.MonkeyPatch) -> None:
    """The death of a streaming run is an attempt on each of its claims."""
    real = runs_module.progress_of
    patch.setattr(
        run_news_module,
        "progress_of",
        lambda *seen, **said: real(*seen, **{**said, "is_early": False}),
    )


def blame_the_whole_range(patch: pytest.MonkeyPatch) -> None:
    """A range with a bad record becomes a letter as a whole."""
    patch.setattr(dead_letter_policy_module, "_is_halved", lambda *_: False)


def take_a_half_for_the_whole(patch: pytest.MonkeyPatch) -> None:
    """The rest of a bisected range is dropped with its failed half."""
    real = bisected_module.after_failure

    def after_failure(ledger: OffsetLedger, now: float) -> OffsetLedger:
        halved = real(ledger, now)
        return halved._replace(
            entries=tuple(e for e in halved.entries if e.batch_id.rpartition(".")[2][0] != "r")
        )

    patch.setattr(owned_module, "after_failure", after_failure)


MUTANTS = {
    no_start_check: (5, "was materialized by"),
    no_read_before_write: (101, "overwrites what another application has stored"),
    commit_of_a_failed_run: (3, "is committed, but no run has succeeded on it: it is lost"),
    drop_the_claims_on_a_commit: (2, "a claim is dropped without a commit"),
    forget_the_claims_of_the_former_owner: (3, "a claim is dropped without a commit"),
    forget_the_epoch: (3, "was assigned twice without a revoke in between"),
    release_before_commit: (3, "works on it"),
    fence_before_drain: (3, "works on it"),
    commit_out_of_order: (3, "refusing to store"),
    no_deadline: (52, "behind the limit"),
    no_new_claims: (1, "does nothing about orders-0"),
    deaf_pulse: (4, "does nothing about"),
    ask_again_while_it_works: (3, "does nothing about"),
    no_pulse: (5, "does nothing about"),
    stopped_for_ever: (10, "does nothing about"),
    ask_once: (3, "does nothing about"),
    without_a_word: (5, "but nothing of 'stopped"),
    begin_at_the_end: (1, "is in no successful run"),
    leave_with_an_open_hold: (1, "has left with holds above zero"),
    believe_dagster: (41, "two live runs"),
    no_lease: (65, "although it works and cannot give a sign of life"),
    a_part_is_the_whole: (304, "but no run has succeeded on it"),
    keep_what_a_later_run_has_spoilt: (135, "but no run has succeeded on it"),
    begin_anew_where_offsets_vanished: (145, "goes back"),
    created_is_queued: (47, "does nothing about"),
    never_record_late: (9, "is recorded 0 times"),
    wait_for_ever_for_the_storage: (153, "does nothing about"),
    believe_the_end_of_the_log: (256, "is in no successful run"),
    forget_deleted_runs: (110, "does nothing about"),
    one_refused_partition_ends_the_member: (7, "ended with BrokerError"),
    a_refusal_is_an_attempt: (150, "which refused itself"),
    ignore_people: (6, ", which was "),
    begin_before_orders_are_known: (477, ", which was "),
    paused_for_ever: (8, "does nothing about"),
    a_launch_that_fails_is_an_attempt: (60, "which never began"),
    hear_only_what_a_poll_tells_first: (59, "nothing was committed for"),
    all_assets_are_a_success: (8, "but no run has succeeded on it"),
    a_sign_is_a_beginning: (43, "which never began"),
    end_runs_on_the_thread_of_the_member: (1, "behind the limit"),
    wait_for_ever_for_a_launcher: (1, "does nothing about"),
    join_whenever_a_tick_comes: (1, "joins again although"),
    the_latest_clock_decides: (6, ", which was "),
    believe_the_clock_of_a_run: (2, "although it works and gives signs of life"),
    commits_wait_for_records: (2, "does not commit"),
    issued_records_grow: (43, "is recorded 2 times"),
    note_only_the_last_record: (59, "is recorded 0 times"),
    begin_behind_a_failed_range: (16, "works on orders-1 [10, 20) before orders-1 [0, 10)"),
    blame_a_death_on_what_waited: (1731, "which never began"),
    blame_the_whole_range: (1, "and the bad records are"),
    take_a_half_for_the_whole: (1, "a claim is dropped"),
}
"""Each mutant with the seed that finds it, and words of the violation."""
OF_ORDERS = frozenset(
    {ignore_people, begin_before_orders_are_known, paused_for_ever, the_latest_clock_decides}
)
"""Mutants that are found in schedules with paused partitions."""
OF_PARTS = frozenset({keep_what_a_later_run_has_spoilt})
"""Mutants that are found in schedules with many partial re-executions."""
OF_TORN = frozenset(
    {
        all_assets_are_a_success,
        a_sign_is_a_beginning,
        end_runs_on_the_thread_of_the_member,
        wait_for_ever_for_a_launcher,
    }
)
"""They are found where writes are torn and launchers hang."""
OF_SLOW = frozenset({commits_wait_for_records, issued_records_grow, note_only_the_last_record})
"""They are found where the storage is slow while commits go on."""
OF_STREAMS = frozenset({note_only_the_last_record})
"""They are found where streaming runs commit many batches."""
OF_AHEAD = frozenset({begin_behind_a_failed_range, blame_a_death_on_what_waited})
"""They are found where streaming runs claim their next batch ahead."""
OF_BAD = frozenset({blame_the_whole_range, take_a_half_for_the_whole})
"""They are found where some records always raise."""
OF_REPLICAS = frozenset({join_whenever_a_tick_comes})
"""They are found where code servers have two replicas."""


def where(mutant: Callable[[pytest.MonkeyPatch], None]) -> dict[str, bool]:
    """Return the features of the schedules that find a mutant."""
    return {
        "orders": mutant in OF_ORDERS,
        "parts": mutant in OF_PARTS,
        "torn": mutant in OF_TORN,
        "replicas": mutant in OF_REPLICAS,
        "slow": mutant in OF_SLOW,
        "streams": mutant in OF_STREAMS | OF_AHEAD,
        "ahead": mutant in OF_AHEAD,
        "bad": mutant in OF_BAD,
    }
