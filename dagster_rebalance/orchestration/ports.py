"""What a member loop needs of whoever starts runs and shows what happened: ports, as protocols.

Dagster implements them in `runs.queries` and `reporting`, and the simulator in its own way.
Nothing here, and nothing that needs only a port, imports dagster. Any call may raise whatever its
library raises: the member loop asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from dagster_rebalance.core.model.commands import (
        Claimed,
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
    from dagster_rebalance.core.model.member_events import Occurrence
    from dagster_rebalance.core.model.offsets import Log, OffsetRange, TopicPartition
    from dagster_rebalance.core.model.receipt import Receipt
    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.core.reporting.lag import GroupLag, GroupState, LagLimit
    from dagster_rebalance.core.reporting.metrics import MemberState
    from dagster_rebalance.core.runs.batch_request import BatchRequest
    from dagster_rebalance.core.runs.stream_batch import Outcome


class RunError(NamedTuple):
    """What a run failed with."""

    run_id: str
    error: str


class ShownStops(NamedTuple):
    """What is shown as stopped.

    Attributes:
        reasons: The first of the partitions, with the reasons.
        partitions: How many there are.
        told: Those of the first whose owners have said so.
    """

    reasons: Mapping[TopicPartition, str]
    partitions: int
    told: frozenset[TopicPartition]

    def are(self, stopped: Mapping[TopicPartition, str]) -> bool:
        """Whether these partitions are shown, as far as one can tell."""
        return self.partitions == len(stopped) and self.reasons.keys() <= stopped.keys()


class RunsToEnd(Protocol):
    """Ends runs, and may wait for whoever launched them. Called by several threads."""

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        """Cancel a run, and mark it as taken back.

        With `only_unstarted`, leave a run alone that has started.
        """

    def end_dead(self, run_id: str, sign: str) -> bool:
        """Stop what a run whose process is gone has begun elsewhere, and mark it as over.

        Returns:
            False when it lives: it has given another sign of life than `sign`.
        """


class RunsPort(RunsToEnd, Protocol):
    """The runs of one group."""

    def read(
        self, batch_ids: Iterable[str], *, live_too: bool = False, claims: Iterable[Claimed] = ()
    ) -> tuple[RunSeen, ...]:
        """All runs of the batches, oldest first, and all live runs of the group if `live_too`.

        Args:
            batch_ids: The batches.
            live_too: Whether all live runs are wanted as well.
            claims: By these, runs that were deleted while they work are found.
        """

    def why_failed(self, run_id: str, batch_id: str) -> str:
        """What a run failed with on a batch, in a few words."""

    def tell(self, outcomes: Mapping[Claimed, Outcome]) -> None:
        """Tell whoever finds these claims how the work on them ended."""

    def tell_age(self, run_id: str, batch_id: str, seconds: float) -> None:
        """Tell for how long a streaming run has worked on a batch."""


class WorkPort(Protocol):
    """The worker of a streaming run: it works on batches in this process, one at a time.

    The thread of the member loop calls all of this, and none of it waits.
    """

    def begin(
        self,
        batch_requests: Iterable[BatchRequest],
        claimed: Collection[str],
        log_of: Callable[[TopicPartition], Log],
    ) -> RunsRead | None:
        """Begin a batch if none is at work; return what there is to know of it then.

        Args:
            batch_requests: The batches that may be begun.
            claimed: All batches that the member has claimed.
            log_of: Which log a partition has.
        """

    def watch(self) -> None:
        """Interrupt a batch that takes too long, and end the run where that does not help."""

    def stop(self, run_ids: Collection[str]) -> None:
        """Note that a person has stopped partitions that some runs work on.

        Args:
            run_ids: The runs. The batch at work is stopped if its run is one of them.
        """

    def ended(self) -> Iterator[RunsRead]:
        """Take what became of batches; each is told once."""

    def known(self, batch_ids: Collection[str], claims: Iterable[Claimed]) -> tuple[RunSeen, ...]:
        """What the worker knows of its own batches, without Dagster."""

    def says_all_but(self, partitions: Collection[TopicPartition]) -> bool:
        """Whether others have heard something else than on which partitions it may work."""

    def say(self, partitions: Collection[TopicPartition]) -> None:
        """Tell others how work ended, and then on what the worker may still work.

        It may work on these partitions, and on those of the batch at work. The thread of the
        storage calls this before anything of a partition is claimed.
        """

    def leave(self, claims: Iterable[Claimed]) -> None:
        """Note that others may find these claims: `say` tells how the work on them ended."""

    @property
    def untold(self) -> Mapping[Claimed, Outcome]:
        """What others have to be told of claims that they may find."""


class GroupRecords(Protocol):
    """What is recorded of a group."""

    def last_recorded(
        self, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, LastRecorded]:
        """The last recorded commit of each partition that has one."""

    def orders(self) -> tuple[Directive, ...]:
        """What people have ordered for the group, oldest first."""


class CataloguePort(GroupRecords, Protocol):
    """Where people see what a member did, and members find each other."""

    def add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Make partitions known, so that commits of them can be recorded."""

    def record_commit(self, commit: RecordCommit) -> None:
        """Record a commit, or what of it is not recorded yet."""

    def record_hold(self, hold: ShowHold) -> None:
        """Show that partitions are held, and what for."""

    def record_receipt(self, receipt: Receipt) -> None:
        """Show how a hold ended."""

    def show_stopped(self, standing: GroupState, errors: Mapping[TopicPartition, RunError]) -> None:
        """Show which partitions and topics of the group cannot go on, each with its reason.

        Args:
            standing: Those that are stopped or missing, and those that people have paused.
            errors: What the last runs failed with, of some of those that are stopped.
        """

    def shown_stops(self) -> ShownStops:
        """What the check of the group shows as stopped now, whoever has shown it."""

    def show_lag(self, lag: GroupLag, limit: LagLimit) -> None:
        """Show the lag of the group, and whether it is within the limit, if there is one."""

    def record_joined(self) -> None:
        """Show that this process has joined, to people and to the process that it succeeds."""

    def record_assigned(self, partitions: Iterable[TopicPartition], member_id: str) -> None:
        """Show what was assigned."""

    def record_left(self, reason: str) -> None:
        """Show that this process has left."""

    def keep_seat(self) -> None:
        """Show other processes of this code location that the member lives."""

    def give_seat_up(self) -> None:
        """Let another process of this code location begin at once."""

    def leave_wanted(self) -> LeaveRequested | None:
        """Why the member has to make way, if somebody wants that."""


class MeterPort(Protocol):
    """Where numbers of a member go. Waits for nobody, and raises nothing."""

    def add(self, occurrences: Iterable[Occurrence]) -> None:
        """Count what happened."""

    def show(self, state: MemberState, clock: Callable[[], float]) -> None:
        """Let gauges be read from a state, by anybody and at any time, until the next one.

        Args:
            state: How the member is.
            clock: The clock of the state.
        """

    def leave(self) -> None:
        """End the gauges of a member that has left, and hand its last numbers on."""


class DeadLettersPort(Protocol):
    """Where ranges whose attempts are exhausted are recorded. Waits for nobody."""

    def is_under_way(self, range_: OffsetRange) -> bool:
        """Whether the record of a range waits for its answer."""

    def store(self, letter: StoreDeadLetter, error: str) -> None:
        """Begin to record a range, with what its last run failed with."""

    def answers(self) -> Iterator[DeadLetterStored | DeadLetterFailed]:
        """Take what became of records; each is told once."""
