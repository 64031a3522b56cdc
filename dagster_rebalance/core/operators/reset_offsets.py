"""Reset of committed offsets: the possible moves, and the work that must not be running.

A reset must neither lose nor repeat work in flight. Claims lie beyond the committed offset and are
dropped with it, so no run may work on a claim. The group must have no member, because a member
would continue from its own state. The new offset is stored with the identity of its log, so a later
truncation or recreation is detected.

The note beside the committed offset may name commits that Dagster lacks, after a kill. The reset
removes the note, so it records them first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import StoredPartition, encode
from dagster_rebalance.core.model.errors import ClaimError, ConfigurationError
from dagster_rebalance.core.model.offsets import Log, names_of
from dagster_rebalance.core.model.run_snapshot import format_runs
from dagster_rebalance.core.partitions.recovery import read_stored, unrecorded_commits

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.commands import RecordCommit
    from dagster_rebalance.core.model.events import PartitionLookup
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.core.reporting.group_status import Owners

_TIMEOUTS_AFTER_END = 2
"""Heartbeat timeouts that must pass after the end of a run, which has another machine's clock."""


@dataclass(frozen=True, slots=True)
class Move:
    """A partition whose committed offset is moved.

    Attributes:
        shown: The committed offset when the move was planned.
        stored: The new offset with its metadata.
        claims: The number of claimed ranges that are dropped.
        unrecorded: The commits before the move that Dagster lacks; to be recorded before it.
    """

    partition: TopicPartition
    shown: OffsetAndMetadata | None
    stored: OffsetAndMetadata
    claims: int = 0
    unrecorded: tuple[RecordCommit, ...] = ()

    @property
    def before(self) -> int | None:
        """The committed offset before the move."""
        return None if self.shown is None else self.shown.offset

    @property
    def may_repeat(self) -> bool:
        """Whether offsets may be read again whose output has ranges with other bounds."""
        return self.before is None or self.stored.offset <= self.before or self.claims > 0

    def __str__(self) -> str:
        was = "nothing is committed" if self.before is None else str(self.before)
        parts = [f"{self.partition}: {was} -> {self.stored.offset}", self._consequence]
        if self.claims:
            parts.append(f"drops {self.claims} claim{'' if self.claims == 1 else 's'}")
        return ", ".join(filter(None, parts))

    @property
    def _consequence(self) -> str:
        if self.before is None:
            return ""
        by = self.stored.offset - self.before
        if by > 0:
            return f"skips {by} offsets"
        return f"{-by} offsets again" if by else "the same offset"


def plan_moves(
    wanted: Mapping[TopicPartition, int],
    found: Mapping[TopicPartition, PartitionLookup],
    claims: Mapping[TopicPartition, int],
) -> tuple[Move, ...]:
    """Plan the moves to the wanted offsets, given the number of claimed ranges of each partition.

    Raises:
        ConfigurationError: Kafka has no such offset, or a leader does not answer.
    """
    return tuple(
        _move(partition, offset, found.get(partition), claims.get(partition, 0))
        for partition, offset in sorted(wanted.items())
    )


def _move(
    partition: TopicPartition, offset: int, found: PartitionLookup | None, claims: int
) -> Move:
    if found is None or not found.bounds.is_known:
        msg = f"the leader of {partition} does not answer, so its offsets are unknown: try again"
        raise ConfigurationError(msg)
    bounds = found.bounds
    if not bounds.start <= offset <= bounds.until:
        msg = (
            f"{partition} has no offset {offset}: Kafka has {bounds.start} (--to-earliest) to "
            f"{bounds.until} (--to-latest)"
        )
        raise ConfigurationError(msg)
    log = Log(found.topic_id, bounds.leader_epoch)
    new = encode(StoredPartition(offset, log=log))
    return Move(partition, found.stored, new, claims, _unrecorded(partition, found))


def _unrecorded(partition: TopicPartition, found: PartitionLookup) -> tuple[RecordCommit, ...]:
    state = None if found.stored is None else read_stored(found.stored)
    if not isinstance(state, StoredPartition):
        return ()
    return unrecorded_commits(partition, state, found.recorded)


def unreadable(found: Mapping[TopicPartition, PartitionLookup]) -> tuple[TopicPartition, ...]:
    """Return the partitions whose offset metadata cannot be read."""
    return tuple(
        partition
        for partition, one in found.items()
        if one.stored is not None and isinstance(read_stored(one.stored), ClaimError)
    )


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The members and runs of a group whose offsets are to be moved.

    Attributes:
        written_off: Runs that ended in Dagster without a confirmation by their process.
        now_s: The time, in seconds since 1970.
        heartbeat_timeout_s: The time after which a run without a heartbeat counts as dead.
    """

    owners: Owners
    runs: Sequence[RunSnapshot]
    written_off: Sequence[RunSnapshot]
    now_s: float
    heartbeat_timeout_s: float

    def obstacles(self, partitions: Collection[TopicPartition]) -> Iterator[str]:
        """Return why the partitions cannot be moved now, each with what to do."""
        if self.owners.members:
            names = sorted({self.owners.name(member) for member in self.owners.members})
            count = len(self.owners.members)
            yield (
                f"the group has {count} member{'' if count == 1 else 's'} ({', '.join(names)}): "
                "turn its sensor off, and cancel its streaming runs, if it has any. Members leave "
                "when their work is done; a killed member counts for up to a session timeout"
            )
        for run, touched in _touching(partitions, (*self.runs, *self.written_off)):
            if self._is_dead(run):
                continue
            which = f"{format_runs([run.run_id])} may be working on {names_of(touched)}"
            if run.is_over or run.awaits_retry:
                yield f"{which}: wait for its end, or cancel it"
            elif run.ended_at is None:
                yield (
                    f"{which}: it was deleted from Dagster, and its process has not confirmed its "
                    "end. Turn the sensor on until its member has ended the run"
                )
            else:
                yield (
                    f"{which}: it has ended in Dagster, and its process has not confirmed that. It "
                    f"counts as dead in {self._dead_at(run) - self.now_s:.0f} s: try again then"
                )

    def doubts(self, partitions: Collection[TopicPartition]) -> Iterator[str]:
        """Return the checks that an operator must make for runs that count as dead."""
        dead = [
            run.run_id for run, _ in _touching(partitions, self.written_off) if self._is_dead(run)
        ]
        if dead:
            its = "its" if len(dead) == 1 else "their"
            yield (
                f"{format_runs(dead)} ended in Dagster, {its} process has not confirmed that, and "
                f"no member has stopped {its} external work. If you use a Spark Connect server, "
                f"make sure that none of {its} jobs is running."
            )

    def _is_dead(self, run: RunSnapshot) -> bool:
        """Whether a run counts as dead: only its external work may still be running."""
        return not (run.is_over or run.awaits_retry) and (
            run.is_gone or self.now_s >= self._dead_at(run)
        )

    def _dead_at(self, run: RunSnapshot) -> float:
        timeout_s = max(self.heartbeat_timeout_s, run.heartbeat_timeout_s)
        if run.ended_at is None:
            return float("inf")
        return run.ended_at + _TIMEOUTS_AFTER_END * timeout_s


def _touching(
    partitions: Collection[TopicPartition], runs: Iterable[RunSnapshot]
) -> Iterator[tuple[RunSnapshot, list[TopicPartition]]]:
    """The live runs that may work on the partitions, each once, with the partitions it works on."""
    wanted = set(partitions)
    by_run: dict[str, tuple[RunSnapshot, set[TopicPartition]]] = {}
    for run in runs:
        if run.is_live:
            _, touched = by_run.setdefault(run.run_id, (run, set()))
            touched |= {range_.topic_partition for range_ in run.ranges} & wanted
            touched |= (run.active_partitions or frozenset()) & wanted
            if not (run.is_over or run.ranges) and run.active_partitions is None:
                touched |= wanted  # a streaming run whose last heartbeat was lost
    for run, touched in by_run.values():
        if touched:
            yield run, sorted(touched)
