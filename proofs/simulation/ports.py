"""Dagster's ports for the member loop of a simulated process: runs, catalogue and dead letters.

Each call goes over the network of its process: it may fail, be slow, or succeed without an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.events import (
    DeadLetterFailed,
    DeadLetterStored,
    LastRecorded,
    LeaveRequested,
)
from dagster_rebalance.orchestration.ports import ShownStops
from proofs.simulation.clockwork import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.commands import (
        Claimed,
        Receipt,
        RecordCommit,
        ShowHold,
        StoreDeadLetter,
    )
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.reporting.lag import GroupLag, GroupState, LagLimit
    from dagster_rebalance.core.reporting.open_letters import OpenLetters
    from dagster_rebalance.core.runs.stream_batch import BatchOutcome
    from dagster_rebalance.orchestration.ports import RunError
    from proofs.simulation.dagster_runs import SimulatedDagster
    from proofs.simulation.process import Process


class SimulatedRuns:
    """Implements `RunsPort`."""

    def __init__(self, process: Process, dagster: SimulatedDagster) -> None:
        self._process = process
        self._dagster = dagster

    def read(
        self,
        batch_ids: Iterable[str],
        *,
        with_live: bool = False,
        claims: Iterable[Claimed] = (),
    ) -> tuple[RunSnapshot, ...]:
        """Return the runs of the batches, and optionally all live ones.

        The answer has their state before it was sent.
        """
        self._process.must_reach("dagster")
        found = self._dagster.seen(batch_ids, with_live=with_live, claims=claims)
        self._process.must_reach("dagster")
        return found

    def why_failed(self, run_id: str, batch_id: str) -> str:
        self._process.must_reach("dagster")
        return "it failed"

    def record_outcomes(self, outcomes: Mapping[Claimed, BatchOutcome]) -> None:
        """Store the outcome of the work on claims."""
        self._process.must_reach("dagster")
        self._dagster.left |= outcomes

    def record_age(self, run_id: str, batch_id: str, seconds: float) -> None:
        """Ignore the age, which is shown to operators only."""

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        self._process.ask_launcher()
        self._process.must_reach("dagster")
        if self._process.weather.torn:
            self._dagster.take_back(run_id, only_unstarted=only_unstarted)
            self._process.must_reach("dagster")
        self._dagster.cancel(run_id, only_unstarted=only_unstarted)

    def end_dead(self, run_id: str, sign: str) -> bool:
        """End a run, unless it gives another heartbeat."""
        self._process.ask_launcher()
        self._process.must_reach("dagster")
        if not self._dagster.end_dead(run_id, sign):
            return False
        self._process.must_reach("dagster")
        return self._dagster.call_over(run_id, sign)


class SimulatedCatalogue:
    """Implements `CataloguePort`."""

    def __init__(self, process: Process, dagster: SimulatedDagster) -> None:
        self._process = process
        self._dagster = dagster
        self.receipts = 0
        self.is_recording = False

    def add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Nothing to keep."""

    def last_recorded(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, LastRecorded]:
        self._process.must_reach("dagster")
        recorded = self._dagster.recorded
        last = {
            partition: recorded[partition][-1]
            for partition in partitions
            if recorded.get(partition)
        }
        return {
            partition: LastRecorded(commit.range.until, commit.run_id)
            for partition, commit in last.items()
        }

    def record_commits(
        self, commits: Sequence[RecordCommit], is_wanted: Callable[[RecordCommit], bool]
    ) -> tuple[RecordCommit, ...]:
        """Store one commit after the other, so a killed process may have stored a part of them."""
        self.is_recording, recorded = True, []
        try:
            for commit in filter(is_wanted, commits):
                self._process.must_reach("dagster")
                self._dagster.record(commit)
                self._process.must_reach("dagster")
                recorded.append(commit)
        finally:
            self.is_recording = False
        return tuple(recorded)

    def record_hold(self, hold: ShowHold, _at: float | None = None) -> None:
        self._process.tell(str(hold))

    def record_receipt(self, receipt: Receipt, _at: float | None = None) -> None:
        self._process.tell(str(receipt))
        self.receipts += 1

    def directives(self) -> tuple[Directive, ...]:
        """Return the directives, as of before the answer was sent."""
        if not self._process.has_orders:
            return ()
        self._process.must_reach("dagster")
        orders = self._dagster.orders
        self._process.must_reach("dagster")
        return orders

    def show_stopped(self, standing: GroupState, errors: Mapping[TopicPartition, RunError]) -> None:
        """Record stopped and paused partitions."""
        self._process.must_reach("dagster")
        self._dagster.stopped = {**standing.paused, **standing.stopped}
        stopped = standing.stopped
        self._dagster.shown_stops = ShownStops(stopped, len(stopped), standing.reported)
        self._dagster.stopped_said_by = self._process.incarnation

    def shown_stops(self) -> ShownStops:
        self._process.must_reach("dagster")
        return self._dagster.shown_stops

    def show_lag(self, lag: GroupLag, limit: LagLimit) -> None:
        self._process.must_reach("dagster")
        self._process.tell(str(lag))

    def show_letters(self, letters: OpenLetters) -> None:
        self._process.must_reach("dagster")
        self._process.tell(str(letters))

    def record_joined(self) -> None:
        self._dagster.joined.append(self._process.incarnation)

    def record_assigned(self, partitions: Iterable[TopicPartition], member_id: str) -> None:
        """Nothing to keep."""

    def record_left(self, reason: str) -> None:
        """Nothing to keep."""

    def renew_lease(self) -> None:
        """Renew the lease; without replicas there is no other holder."""
        if self._process.is_replica:
            self._process.must_reach("dagster")
            self._dagster.seats.keep(self._process.incarnation, self._process.clockwork.now)

    def release_lease(self) -> None:
        """Release the lease, unless another process holds it."""
        if self._process.is_replica:
            self._process.must_reach("dagster")
            self._dagster.seats.give_up(self._process.incarnation)

    def leave_request(self) -> LeaveRequested | None:
        """Return whether a newer process of the same code location has joined."""
        if self._process.work is not None:  # its sensor asks it, once another run has joined
            return None
        mine = self._process.incarnation
        side, _, number = mine.partition(".")
        newer = [
            other
            for other in self._dagster.joined
            if other.partition(".")[0] == side and int(other.partition(".")[2]) > int(number)
        ]
        if not newer:
            return None
        return LeaveRequested(
            f"a newer process of this code location has taken over ({newer[-1]})",
            has_successor=True,
        )


class SimulatedDeadLetters:
    """Implements `DeadLettersPort`."""

    def __init__(self, process: Process, dagster: SimulatedDagster) -> None:
        self._process = process
        self._dagster = dagster
        self._under_way: dict[str, StoreDeadLetter] = {}
        self._ended: list[DeadLetterStored | DeadLetterFailed] = []

    @property
    def under_way(self) -> int:
        """Return the number of unanswered letters; a member that has left receives no answers."""
        return len(self._under_way) - len(self._ended)

    def is_under_way(self, range_: OffsetRange) -> bool:
        return range_.key in self._under_way

    def store(self, letter: StoreDeadLetter, error: str) -> None:
        self._process.check_may_begin("makes a dead letter of", letter.range.topic_partition)
        for run_id in letter.run_ids:
            self._must_be_an_attempt(letter, run_id)
        if letter.range.key not in self._under_way:
            self._under_way[letter.range.key] = letter
            clockwork = self._process.clockwork
            losses = self._dagster.outputs.losses
            clockwork.after(clockwork.within(0.0, 4.0), None, lambda: self._end(letter, losses))

    def _must_be_an_attempt(self, letter: StoreDeadLetter, run_id: str) -> None:
        process = self._dagster.processes[run_id]
        problem = "which refused itself" if process.has_refused else ""
        claim = (run_id, letter.range)
        is_early = claim in self._dagster.early - self._dagster.late - self._dagster.begun
        if not process.has_begun or is_early:
            problem = "which never began"
        if problem:
            msg = f"{letter.range} becomes a dead letter because of {run_id}, {problem}"
            raise Violation(msg)

    def answers(self) -> Iterator[DeadLetterStored | DeadLetterFailed]:
        while self._ended:  # the member takes a limited number in a turn
            answer = self._ended.pop(0)
            del self._under_way[answer.letter.range.key]
            yield answer

    def _end(self, letter: StoreDeadLetter, losses: int) -> None:
        lost = self._process.clockwork.happens(self._process.weather.lost_requests)
        stored = not lost or self._process.clockwork.happens(0.5)
        left = self._dagster.outputs.left_of(letter.range, losses)
        if stored and left is not None:
            self._dagster.letters[left] = letter
        self._ended.append(
            DeadLetterFailed(letter, "no answer") if lost else DeadLetterStored(letter)
        )
