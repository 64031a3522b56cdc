"""The ports of a member loop to Dagster, as protocols.

`runs.run_ledger`, `reporting` and the simulator implement them. Modules that need only a port do
not import dagster. Every method may raise any error of its library; the member loop retries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.commands import (
        Claimed,
        Receipt,
        RecordCommit,
        ShowHold,
        StoreDeadLetter,
    )
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.events import (
        DeadLetterFailed,
        DeadLetterStored,
        LastRecorded,
        LeaveRequested,
        RunsRead,
    )
    from dagster_rebalance.core.model.member_events import MemberEvent
    from dagster_rebalance.core.model.offsets import Log, OffsetRange, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunSnapshot
    from dagster_rebalance.core.reporting.lag import GroupLag, GroupState, LagLimit
    from dagster_rebalance.core.reporting.metrics import MemberState
    from dagster_rebalance.core.reporting.open_letters import OpenLetters
    from dagster_rebalance.core.runs.stream_batch import BatchOutcome


class RunError(NamedTuple):
    """The error of a run."""

    run_id: str
    error: str


class ShownStops(NamedTuple):
    """The stopped partitions that the check of the group shows.

    Attributes:
        reasons: The first stopped partitions, with reasons.
        partitions: The number of stopped partitions.
        told: The partitions in `reasons` that were reported by their owners.
    """

    reasons: Mapping[TopicPartition, str]
    partitions: int
    told: frozenset[TopicPartition]

    @property
    def by_owners(self) -> Mapping[TopicPartition, str]:
        """The reasons that owners have reported."""
        return {partition: why for partition, why in self.reasons.items() if partition in self.told}

    def are(self, stopped: Mapping[TopicPartition, str]) -> bool:
        """Whether the check shows these partitions, as far as its table has room."""
        return self.partitions == len(stopped) and self.reasons.keys() <= stopped.keys()


class RunsToEnd(Protocol):
    """Ends runs. A call may block on a launcher. Called by several threads."""

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        """Cancel a run, and mark it as TAKEN_BACK. If `only_unstarted`, skip a started run."""

    def end_dead(self, run_id: str, sign: str) -> bool:
        """Stop the external work of a run whose process is gone, and mark the run as over.

        Returns:
            False if the run is alive: its heartbeat is no longer `sign`.
        """


class RunsPort(RunsToEnd, Protocol):
    """The runs of one group."""

    def read(
        self, batch_ids: Iterable[str], *, with_live: bool = False, claims: Iterable[Claimed] = ()
    ) -> tuple[RunSnapshot, ...]:
        """Read all runs of the batches, oldest first; if `with_live`, also all live runs.

        Deleted runs that may still work on one of `claims` are included.
        """

    def why_failed(self, run_id: str, batch_id: str) -> str:
        """Return a short form of the error of a run on a batch."""

    def record_outcomes(self, outcomes: Mapping[Claimed, BatchOutcome]) -> None:
        """Record the outcomes of abandoned claims, for the next owner."""

    def record_age(self, run_id: str, batch_id: str, seconds: float) -> None:
        """Record for how long a streaming run has worked on a batch."""


class WorkPort(Protocol):
    """The worker of a streaming run: processes batches in this process, one at a time.

    The thread of the member loop calls all methods except `report`. No method but `report` waits.
    """

    def begin(
        self,
        batch_requests: Iterable[BatchRequest],
        claimed: Collection[str],
        log_of: Callable[[TopicPartition], Log],
    ) -> RunsRead | None:
        """Begin a batch if none is being processed, and return its run.

        Args:
            batch_requests: The batches that may be begun.
            claimed: All batches that the member has claimed.
            log_of: The log of a partition.
        """

    def watch(self) -> None:
        """Interrupt a batch that takes too long, and end the run if the batch does not end."""

    def hold(self, partitions: frozenset[TopicPartition]) -> None:
        """Note the partitions that are to be released: their results are reported before."""

    def stop(self, run_ids: Collection[str]) -> None:
        """Stop the current batch by directive, if its run is one of these."""

    def results(self) -> Iterator[RunsRead]:
        """Take the results of batches."""

    def known_runs(
        self, batch_ids: Collection[str], claims: Iterable[Claimed]
    ) -> tuple[RunSnapshot, ...]:
        """Return the runs of the worker's own batches, without Dagster."""

    def must_report(self, partitions: Collection[TopicPartition]) -> bool:
        """Whether the last report differs from these partitions and the current batch."""

    def report(self, partitions: Collection[TopicPartition]) -> None:
        """Report the outcomes of abandoned claims, and then the partitions of the worker.

        The worker may work on the given partitions, and on those of its current batch. The storage
        thread calls this before the member claims ranges of newly assigned partitions.
        """

    def abandon(self, claims: Iterable[Claimed]) -> None:
        """Record that other members may find these claims: `report` reports their outcomes."""

    @property
    def unreported(self) -> Mapping[Claimed, BatchOutcome]:
        """The abandoned claims that are not reported yet."""


class GroupRecords(Protocol):
    """The records of a group."""

    def last_recorded(
        self, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, LastRecorded]:
        """Return the last recorded commit of each partition that has one."""

    def directives(self) -> tuple[Directive, ...]:
        """Return the directives of the group, oldest first."""

    def shown_stops(self) -> ShownStops:
        """Return the stops that the check of the group shows."""


class CataloguePort(GroupRecords, Protocol):
    """The catalogue: shows the member to operators, and the members to each other."""

    def add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions to the offsets asset, so that commits can be recorded."""

    def record_commits(
        self, commits: Sequence[RecordCommit], is_wanted: Callable[[RecordCommit], bool]
    ) -> tuple[RecordCommit, ...]:
        """Record the parts of commits that are not recorded yet; return the recorded commits.

        Commits that are not wanted any more when their turn comes are left out.
        """

    def record_hold(self, hold: ShowHold, at: float | None = None) -> None:
        """Record that partitions are held, and for which runs.

        `at`: since when, in seconds since 1970; None for now.
        """

    def record_receipt(self, receipt: Receipt, at: float | None = None) -> None:
        """Record how a hold ended, and when (`at`, as for `record_hold`)."""

    def show_stopped(self, standing: GroupState, errors: Mapping[TopicPartition, RunError]) -> None:
        """Report the stopped, paused and missing partitions of the group to the check.

        Args:
            standing: The partitions and topics, with reasons.
            errors: The errors of the last runs of some stopped partitions.
        """

    def show_lag(self, lag: GroupLag, limit: LagLimit) -> None:
        """Report the lag of the group, and whether it is within the limit."""

    def show_letters(self, letters: OpenLetters) -> None:
        """Report the open dead letters of the group."""

    def record_joined(self) -> None:
        """Record that this process has joined."""

    def record_assigned(self, partitions: Iterable[TopicPartition], member_id: str) -> None:
        """Record an assignment."""

    def record_left(self, reason: str) -> None:
        """Record that this process has left."""

    def renew_lease(self) -> None:
        """Renew the lease of this process on its sensor."""

    def release_lease(self) -> None:
        """Release the lease, so that another process can join at once."""

    def leave_request(self) -> LeaveRequested | None:
        """Return the request to leave if another process has joined, or None."""


class NewLettersPort(Protocol):
    """The dead-letter topic of a group, as the letter report reads it."""

    def read(self) -> OpenLetters:
        """Read the records since the last call, and return the open letters."""


class MeterPort(Protocol):
    """The meter of a member. Never waits or raises."""

    def add(self, member_events: Iterable[MemberEvent]) -> None:
        """Count member events."""

    def show(self, state: MemberState, clock: Callable[[], float]) -> None:
        """Set the state that the gauges are read from at any time; its times are of `clock`."""

    def leave(self) -> None:
        """Remove the gauges of a member that has left, and wait for its queued measurements."""


class DeadLettersPort(Protocol):
    """The dead letters of a member. Never waits."""

    def is_under_way(self, range_: OffsetRange) -> bool:
        """Whether the dead letter of a range is being sent."""

    def store(self, letter: StoreDeadLetter, error: str) -> None:
        """Send a dead letter with the error of the last run."""

    def answers(self) -> Iterator[DeadLetterStored | DeadLetterFailed]:
        """Take the results of dead letters."""
