"""Life of simulated runs: launch, start check, work, and all ways to end.

The module has the processes and their output, and raises a `Violation` as soon as two work on the
same offset. A process reports to Dagster only while it reaches the storage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.run_snapshot import LIVE, RunSnapshot, RunState
from dagster_rebalance.core.runs.bisection import Part, whole_batch
from dagster_rebalance.core.runs.start_check import refusal
from proofs.simulation.clockwork import Violation
from proofs.simulation.outputs import Outputs
from proofs.simulation.run_process import BEAT_S, LEASE_S, LOOK_S, STOPPING_S, RunProcess
from proofs.simulation.torn import Torn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.core.runs.retry import FailedAttempt
    from dagster_rebalance.core.runs.stream_batch import BatchOutcome
    from dagster_rebalance.core.streaming.batch_tracker import BegunBatch
    from proofs.simulation.clockwork import Clockwork
    from proofs.simulation.coordinator import Coordinator
    from proofs.simulation.weather import Weather

_AGAIN_S = 0.5


class RunLife:
    """The runs of one Dagster instance and their processes."""

    def __init__(self, clockwork: Clockwork, group: Coordinator, weather: Weather) -> None:
        self.runs: dict[str, RunSnapshot] = {}
        self.processes: dict[str, RunProcess] = {}
        self.deleted: set[str] = set()
        self.notes: dict[Claimed, str] = {}
        self.bereft: set[str] = set()
        self.outputs = Outputs(self.deleted)
        self.at_work: dict[str, BegunBatch] = {}
        self.left: dict[Claimed, BatchOutcome] = {}
        self.said: dict[str, frozenset[TopicPartition]] = {}
        self.succeeded: set[Claimed] = set()
        self.begun: set[tuple[str, OffsetRange]] = set()
        self.early: set[tuple[str, OffsetRange]] = set()
        self.late: set[tuple[str, OffsetRange]] = set()
        self.tried: dict[OffsetRange, set[OffsetRange]] = {}
        self.failures: dict[OffsetRange, FailedAttempt] = {}
        self.orders: tuple[Directive, ...] = ()
        self.on_gone: dict[str, Callable[[], None]] = {}
        self.on_cancel: dict[str, Callable[[], None]] = {}
        self.on_freeze: dict[str, Callable[[float], None]] = {}
        self.on_cut_off: dict[str, Callable[[float], None]] = {}
        self._clockwork = clockwork
        self._group = group
        self._weather = weather
        self._torn = Torn(self, clockwork, weather)

    def seen(
        self, batch_ids: Iterable[str], *, with_live: bool, claims: Iterable[Claimed] = ()
    ) -> tuple[RunSnapshot, ...]:
        raise NotImplementedError

    def retry(self, run: RunSnapshot, assets: tuple[str, ...]) -> None:
        """Re-execute some assets of a run by Dagster's retries."""
        raise NotImplementedError

    def mark_ended(self, run_id: str, state: RunState) -> None:
        raise NotImplementedError

    def working(self) -> list[RunSnapshot]:
        """Return the working runs."""
        return [
            self._at_work(run_id)
            for run_id, process in self.processes.items()
            if process.is_working
        ]

    def _at_work(self, run_id: str) -> RunSnapshot:
        """Return a run, with the batch of a streaming run."""
        run, batch = self.runs[run_id], self.at_work.get(run_id)
        return run if batch is None else replace(run, batch_id=batch.batch_id, ranges=batch.ranges)

    def works_on(self, run_id: str, partition: TopicPartition) -> bool:
        return self.processes[run_id].is_working and any(
            range_.topic_partition == partition for range_ in self._at_work(run_id).ranges
        )

    def is_busy(self, partition: TopicPartition) -> bool:
        """Return whether any run may still work on a partition.

        A run that was never submitted refuses itself if it starts.
        """
        return any(self.works_on(run_id, partition) for run_id in self.at_work) or any(
            (
                process.is_working
                or (
                    run.is_live
                    and run.state is not RunState.CREATED
                    and not process.is_gone
                    and run_id not in self.deleted
                )
            )
            and any(range_.topic_partition == partition for range_ in run.ranges)
            for (run_id, run), process in zip(
                self.runs.items(), self.processes.values(), strict=True
            )
        )

    def gives_signs(self, run_id: str) -> bool:
        """Return whether a run has a living process with heartbeats, or will get one.

        From the queue, or by a retry.
        """
        run = self.runs[run_id]
        is_coming = (
            run.state in LIVE
            and run.state is not RunState.CREATED
            and self.processes[run_id].is_heard
        )
        return run_id not in self.deleted and (run.awaits_retry or is_coming)

    def forget(self, partition: TopicPartition, at: int) -> None:
        """Drop the records from an offset on, and the work of runs on them.

        The claim of such a run may be lost, too.
        """
        begun = [
            run_id
            for run_id, process in self.processes.items()
            if process.has_begun and not process.has_finished
        ]
        # A streaming run goes on: of it, only the batch at work and those that wait for their
        # commit had begun with the old records.
        works = [
            self.at_work[run_id].batch_id if run_id in self.at_work else run_id
            for run_id in begun
            if run_id in self.at_work or self.runs[run_id].ranges
        ] + [batch_id for batch_id, _ in self.succeeded]
        self.bereft |= {
            run_id
            for run_id in begun
            if any(
                range_.topic_partition == partition and range_.until > at
                for range_ in self._at_work(run_id).ranges
            )
        }
        self.outputs.forget(partition, at, works)

    def is_in_doubt(self, run_id: str) -> bool:
        """Return whether a run may count as working, until its member has ended it."""
        run, process = self.runs[run_id], self.processes[run_id]
        return (
            run.state is not RunState.SUCCEEDED
            and not process.is_over
            and (run.state in LIVE or process.has_begun)
        )

    # What breaks processes

    def die(self, run_id: str) -> None:
        """Kill the process of a run.

        With Spark Connect its work continues; the code server may notice the end.
        """
        process = self.processes[run_id]
        if process.is_gone:
            return
        self._clockwork.tell(run_id, "its process is killed")
        self._silence(run_id)
        process.is_gone = True
        self._end_member(run_id)
        process.is_working = process.is_working and self._weather.spark_outlives
        self._clockwork.after(self._clockwork.within(60, 120), None, partial(self._gone, run_id))
        self._may_be_noticed(run_id)

    def cut_off(self, run_id: str, seconds: float) -> None:
        """Disconnect the process from Dagster's storage for a while."""
        self._lose(run_id, "is cut off from the storage", seconds)

    def freeze(self, run_id: str, seconds: float) -> None:
        """Suspend the process for a while, but not its Spark work."""
        if self.processes[run_id].has_begun and self.processes[run_id].is_heard:
            self.processes[run_id].is_frozen = True
            self._lose(run_id, "is frozen", seconds)

    def _lose(self, run_id: str, what: str, seconds: float) -> None:
        process = self.processes[run_id]
        if not process.has_begun or not process.is_heard:
            return
        self._clockwork.tell(run_id, f"{what} for {seconds:.0f} s")
        self._silence(run_id)
        lease_left_s = process.beat(self._clockwork.now) * BEAT_S + LEASE_S - self._clockwork.now
        # Not with the run as the actor: its lease ends in time, whatever its step waits for.
        self._clockwork.after(
            lease_left_s, None, partial(self._end_of_lease, run_id, process.silent_since)
        )
        self._clockwork.after(
            seconds, None, partial(self._found_again, run_id, process.silent_since)
        )

    def _silence(self, run_id: str) -> None:
        if self.processes[run_id].silent_since is None:
            self.processes[run_id].silent_since = self._clockwork.now

    def _found_again(self, run_id: str, since: float | None) -> None:
        process = self.processes[run_id]
        if process.is_gone or process.silent_since != since:
            return
        is_leased, process.is_frozen = process.is_leased(self._clockwork.now), False
        process.silent_since = None
        if not is_leased:
            self._stops_itself(run_id, 0.0)
        elif self.runs[run_id].state not in LIVE or run_id in self.deleted:
            self._notice(run_id)

    def _end_of_lease(self, run_id: str, since: float | None) -> None:
        process = self.processes[run_id]
        if not process.is_gone and process.silent_since == since and not process.is_frozen:
            self._stops_itself(run_id, self._clockwork.within(*STOPPING_S))

    def _stops_itself(self, run_id: str, within_s: float) -> None:
        self._clockwork.tell(run_id, "could give no sign of life, and stops itself")
        self._clockwork.after(within_s, None, partial(self._ended_by_itself, run_id))

    def _ended_by_itself(self, run_id: str) -> None:
        process, run = self.processes[run_id], self.runs[run_id]
        if process.is_gone:
            return
        heard = process.is_heard
        self._gone(run_id)
        if heard:
            process.has_finished = True
            if run.state in LIVE:
                self._move(run_id, RunState.FAILED, is_cancelled_by_member=True)
        else:
            self._silence(run_id)
            self._may_be_noticed(run_id)

    def _may_be_noticed(self, run_id: str) -> None:
        if self._clockwork.happens(self._weather.deaths_noticed):
            self._clockwork.after(
                self._clockwork.within(0.5, 3.0),
                None,
                partial(self.mark_ended, run_id, RunState.FAILED),
            )

    def _notice(self, run_id: str) -> None:
        """A process detects that its run has ended or was deleted, and stops.

        Before its first heartbeat it detects that in the start check.
        """
        process = self.processes[run_id]
        if process.has_begun and process.is_heard:
            seconds = self._clockwork.within(0.0, LOOK_S) + self._clockwork.within(*STOPPING_S)
            self._clockwork.after(seconds, run_id, partial(self._stop, run_id))

    # The life of a run

    def _launch(self, run_id: str) -> None:
        if self.runs[run_id].state is not RunState.WAITING or run_id in self.deleted:
            return
        self._move(run_id, RunState.STARTING)
        if self._clockwork.happens(self._weather.launches_fail):
            self._gone(run_id)
            self._move(run_id, RunState.FAILED)
            return
        if self._clockwork.happens(self._weather.runs_die / 2):
            self.die(run_id)
        self._clockwork.after(self._weather.launching(), run_id, partial(self._started, run_id))

    def _started(self, run_id: str) -> None:
        if self.processes[run_id].is_gone:
            return
        if self.runs[run_id].state is RunState.STARTING:
            self._move(run_id, RunState.STARTED)
        self._clockwork.after(
            self._weather.reaching_its_check(), run_id, partial(self._make_check, run_id)
        )

    def _make_check(self, run_id: str) -> None:
        process = self.processes[run_id]
        if process.is_gone:
            return
        if run_id in self.deleted:
            self._gone(run_id)
            return
        if self._torn.kills(run_id):
            process.has_signed = True
            self.die(run_id)
            return
        process.has_begun = True
        self.runs[run_id] = me = replace(self.runs[run_id], has_started=True)
        claims = [(me.batch_id, range_) for range_ in me.ranges]
        batch_ids = [*filter(None, [me.batch_id, whole_batch(me.batch_id)])]
        others = self.seen(batch_ids, with_live=True, claims=claims)
        self._clockwork.let_others(run_id, self._weather.latency())
        why_not = refusal(me, others, self._group.stored)
        why_not = why_not or self._paused(me)
        if why_not is None and self._clockwork.happens(self._weather.checks_fail):
            why_not = "Kafka could not be asked whether its claim stands"
        if process.is_gone:
            return
        if why_not is not None:
            self._refuse(run_id, why_not)
        elif run_id in self.deleted:
            self._gone(run_id)
        else:
            self.notes |= dict.fromkeys(claims, run_id)
            self._work(run_id)

    def _refuse(self, run_id: str, why_not: str) -> None:
        process = self.processes[run_id]
        process.has_refused = process.is_over = True
        if self._torn.kills(run_id):
            self._torn.refuse_in_part(run_id, why_not)
            self.die(run_id)
            return
        self._gone(run_id)
        ends = self.runs[run_id].state in LIVE
        self._move(
            run_id,
            RunState.FAILED if ends else self.runs[run_id].state,
            is_refused=True,
            refusal=why_not,
        )

    def _paused(self, run: RunSnapshot) -> str | None:
        orders = (in_force(self.orders, range_.topic_partition) for range_ in run.ranges)
        order = next((order for order in orders if order is not None), None)
        return None if order is None else f"it is {order}"

    def _note_part(self, run: RunSnapshot) -> None:
        """Note the attempts on the parts of a bisected range."""
        part = Part.parse(run.batch_id)
        if part is not None:
            (range_,) = run.ranges
            self.tried.setdefault(part.bisected(range_), set()).add(range_)

    def _work(self, run_id: str) -> None:
        self._must_be_alone(self.runs[run_id])
        self._note_part(self.runs[run_id])
        self.processes[run_id].is_working = True
        self._clockwork.tell(run_id, "works")
        takes_s = self._weather.working()
        if self._is_lost_within(run_id, takes_s):
            takes_s += self._clockwork.within(0, 30)
        self._clockwork.after(takes_s, run_id, partial(self._end, run_id))

    def _is_lost_within(self, run_id: str, seconds: float) -> bool:
        """Return whether the process gets cut off or suspended within the time, and schedule it."""
        is_lost = self._clockwork.happens(self._weather.runs_hang)
        if is_lost:
            lose = self._clockwork.chance.choice((self.cut_off, self.freeze))
            self._clockwork.after(
                self._clockwork.within(0, seconds),
                None,
                partial(lose, run_id, self._clockwork.within(1, 40)),
            )
        return is_lost

    def _must_be_alone(self, me: RunSnapshot) -> None:
        for other in self.working():
            if self._is_out_of_sight(other) and other.batch_id != me.batch_id:
                continue  # a documented limit, see docs/limits.md
            if any(mine.overlaps(theirs) for mine in me.ranges for theirs in other.ranges):
                msg = (
                    f"{me.run_id} works on what {other.run_id} works on: "
                    f"two live runs of {me.batch_id} and {other.batch_id}"
                )
                raise Violation(msg)

    def _is_out_of_sight(self, run: RunSnapshot) -> bool:
        """Return whether a run is known only by its claim, which may be lost with its records."""
        process = self.processes[run.run_id]
        has_ended = run.run_id in self.deleted or run.state not in LIVE
        return run.run_id in self.bereft and has_ended and not process.is_heard

    def _must_be_dead(self, run_id: str) -> None:
        process = self.processes[run_id]
        if process.is_working and not process.is_gone and not process.is_frozen:
            signs = (
                "gives signs of life"
                if process.silent_since is None
                else "cannot give a sign of life"
            )
            msg = f"{run_id} was ended as dead although it works and {signs}"
            raise Violation(msg)

    def _end(self, run_id: str) -> None:
        process = self.processes[run_id]
        if process.is_gone:
            return
        if process.is_frozen:
            self._again(run_id, self._end)
        elif self._torn.kills(run_id):
            self._torn.end_in_part(run_id)
            self.die(run_id)
        elif self._clockwork.happens(self._weather.runs_die):
            self.die(run_id)
        elif self._clockwork.happens(self._weather.runs_fail) or any(
            map(self._weather.bad_in, self.runs[run_id].ranges)
        ):
            process.is_working = False
            self._report(run_id, RunState.FAILED)
        else:
            process.is_working = False
            self._clockwork.after(
                self._weather.reporting(), run_id, partial(self._report, run_id, RunState.SUCCEEDED)
            )

    def _report(self, run_id: str, state: RunState) -> None:
        """Write the output or not; Dagster receives the result once the storage is reachable."""
        process = self.processes[run_id]
        if process.is_gone:
            return
        if not process.is_heard:
            self._clockwork.after(_AGAIN_S, run_id, partial(self._report, run_id, state))
            return
        self._gone(run_id)
        process.has_finished = not self._torn.loses_last_word(run_id)
        if state is RunState.SUCCEEDED:
            self._succeed(run_id)
        else:
            self._fail(run_id)

    def _succeed(self, run_id: str) -> None:
        if run_id in self.deleted:
            return
        run = self.runs[run_id]
        asked = [asset for asset in self._weather.assets if asset not in run.left_out]
        self._move(run_id, RunState.SUCCEEDED, done=frozenset(asked))
        self.outputs.succeed(run, asked, self._weather.assets)

    def _fail(self, run_id: str) -> None:
        run = self.runs[run_id]
        asked = [asset for asset in self._weather.assets if asset not in run.left_out]
        at = self._clockwork.chance.randrange(len(asked))
        if run_id not in self.deleted:
            self.outputs.fail(run, asked[:at], asked[at : at + 1], self._weather.assets)
        self._move(
            run_id, run.state, done=frozenset(asked[:at]), undone=frozenset(asked[at : at + 1])
        )
        if run.state is RunState.STARTED:
            self._move(
                run_id,
                RunState.FAILED,
                awaits_retry=self._will_retry(run_id),
                cause=self._weather.cause_of_failure(run.ranges),
            )
        elif run.state is RunState.CANCELING:
            self._move(run_id, RunState.CANCELED)

    def _will_retry(self, run_id: str) -> bool:
        """Return whether Dagster retries a run's failed and skipped assets."""
        retries = self._clockwork.happens(self._weather.runs_retry)
        if retries:
            self._clockwork.after(
                self._clockwork.within(0.1, 15), None, partial(self._retry, run_id)
            )
        return retries and not self._torn.loses_tag(run_id)

    def _retry(self, run_id: str) -> None:
        run = self.runs[run_id]
        if not self._clockwork.happens(self._weather.retries_lost) and run_id not in self.deleted:
            rest = tuple(
                asset
                for asset in self._weather.assets
                if asset not in (run.done | set(run.left_out))
            )
            if rest:  # Dagster has nothing to retry where all steps have succeeded
                self.retry(run, rest)
        self.runs[run_id] = replace(self.runs[run_id], awaits_retry=False)

    def _stop(self, run_id: str) -> None:
        process = self.processes[run_id]
        if process.is_gone:
            return
        if process.is_frozen:
            self._again(run_id, self._stop)
            return
        heard = process.is_heard
        self._gone(run_id)
        if not heard:
            self._may_be_noticed(run_id)
            return
        process.has_finished = process.has_begun
        if self.runs[run_id].state is RunState.CANCELING:
            self._move(run_id, RunState.CANCELED)

    def _again(self, run_id: str, action: Callable[[str], None]) -> None:
        self._clockwork.after(_AGAIN_S, run_id, partial(action, run_id))

    def _end_member(self, run_id: str) -> None:
        """End the member of a streaming run with its process."""
        for reaction in (self.on_cancel, self.on_freeze, self.on_cut_off):
            reaction.pop(run_id, None)
        end = self.on_gone.pop(run_id, None)
        if end is not None:
            end()

    def _gone(self, run_id: str) -> None:
        self._end_member(run_id)
        self.processes[run_id].is_gone = True
        self.processes[run_id].is_working = False
        self._silence(run_id)

    def _move(self, run_id: str, state: RunState, **marks: object) -> None:
        before = self.runs[run_id]
        self.runs[run_id] = replace(before, state=state, **marks)  # type: ignore[arg-type]  # fields of a run, by name
        refused = f" (refused itself: {marks['refusal']})" if "refusal" in marks else ""
        if state is not before.state or refused:
            self._clockwork.tell(run_id, f"{state.value}{refused}")
