"""A person moves committed offsets: which moves can be, and what must not be under way meanwhile.

Owns that nothing in flight is lost or done twice by a move. A claim names offsets behind the
committed one, and goes with it. So nobody may be at work on a claim, and no member may be there: it
would go on from what it has read. What is stored names the log that the offset belongs to, as the
commit of a member does, so that a later cut or a topic made anew is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import StoredPartition, encode
from dagster_rebalance.core.model.errors import ClaimError, ConfigurationError
from dagster_rebalance.core.model.offsets import Log, named
from dagster_rebalance.core.model.run import named_runs
from dagster_rebalance.core.partitions.recovery import read_stored

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.events import Found
    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.core.model.run import RunSeen
    from dagster_rebalance.core.reporting.group_status import Owners

_TIMEOUTS_WAITED = 2
"""How often the time-out of a run must have passed since its end, which another machine's clock
has told."""


@dataclass(frozen=True, slots=True)
class Move:
    """One partition whose committed offset is moved.

    Attributes:
        partition: The partition.
        shown: What was committed when the move was planned; None where nothing was.
        stored: What is stored instead.
        claims: How many claimed ranges are dropped with the old one.
    """

    partition: TopicPartition
    shown: OffsetAndMetadata | None
    stored: OffsetAndMetadata
    claims: int = 0

    @property
    def before(self) -> int | None:
        """The committed offset; None where there is none."""
        return None if self.shown is None else self.shown.offset

    @property
    def may_repeat(self) -> bool:
        """Whether the output may have offsets that are read now, in ranges with other bounds."""
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


def moves(
    wanted: Mapping[TopicPartition, int],
    found: Mapping[TopicPartition, Found],
    claims: Mapping[TopicPartition, int],
) -> tuple[Move, ...]:
    """The moves to the wanted offsets.

    Args:
        wanted: The partitions, each with the next offset to be read.
        found: What Kafka says of them.
        claims: How many ranges are claimed of each.

    Raises:
        ConfigurationError: Kafka has no such offset, or a leader does not answer.
    """
    return tuple(
        _move(partition, offset, found.get(partition), claims.get(partition, 0))
        for partition, offset in sorted(wanted.items())
    )


def _move(partition: TopicPartition, offset: int, found: Found | None, claims: int) -> Move:
    if found is None or not found.bounds.is_known:
        msg = f"the leader of {partition} does not answer, so nobody knows its offsets: try again"
        raise ConfigurationError(msg)
    bounds = found.bounds
    if not bounds.start <= offset <= bounds.until:
        msg = (
            f"{partition} has no offset {offset}: Kafka has {bounds.start} (--to-earliest) to "
            f"{bounds.until} (--to-latest)"
        )
        raise ConfigurationError(msg)
    log = Log(found.topic_id, bounds.leader_epoch)
    return Move(partition, found.stored, encode(StoredPartition(offset, log=log)), claims)


def unreadable(found: Mapping[TopicPartition, Found]) -> tuple[TopicPartition, ...]:
    """The partitions beside whose offset stands a text that cannot be read."""
    return tuple(
        partition
        for partition, one in found.items()
        if one.stored is not None and isinstance(read_stored(one.stored), ClaimError)
    )


@dataclass(frozen=True, slots=True)
class AtWork:
    """What is known of the work of a group that is about to be moved.

    Attributes:
        owners: The members of the group.
        runs: Its runs.
        written_off: Those that ended in Dagster, and whose process has not said so.
        now_s: The time, in seconds since 1970.
        heartbeat_timeout_s: When a run counts as dead that does not say so itself.
    """

    owners: Owners
    runs: Sequence[RunSeen]
    written_off: Sequence[RunSeen]
    now_s: float
    heartbeat_timeout_s: float

    def obstacles(self, partitions: Collection[TopicPartition]) -> Iterator[str]:
        """Why nothing may be moved now, each with what to do.

        Args:
            partitions: What is to be moved.
        """
        if self.owners.members:
            names = sorted({self.owners.name(member) for member in self.owners.members})
            count = len(self.owners.members)
            yield (
                f"the group has {count} member{'' if count == 1 else 's'} ({', '.join(names)}): "
                "turn its sensor off, and cancel its streaming runs, if it has these. Members "
                "leave when their work is done; one that was killed counts for up to a session "
                "time-out"
            )
        for run, those in _touching(partitions, (*self.runs, *self.written_off)):
            if self._is_dead(run):
                continue
            which = f"{named_runs([run.run_id])} may be at work on {named(those)}"
            if run.is_over or run.awaits_retry:
                yield f"{which}: wait for its end, or cancel it"
            elif run.ended_at is None:
                yield (
                    f"{which}: it is not in Dagster any more, and its process has not said that it "
                    "is finished. Turn the sensor on until its member has seen to that"
                )
            else:
                yield (
                    f"{which}: it has ended in Dagster, and its process has not said so. It counts "
                    f"as dead in {self._dead_at(run) - self.now_s:.0f} s: try again then"
                )

    def doubts(self, partitions: Collection[TopicPartition]) -> Iterator[str]:
        """What nobody knows of runs that count as dead, and a person has to see to."""
        dead = [
            run.run_id for run, _ in _touching(partitions, self.written_off) if self._is_dead(run)
        ]
        if dead:
            yield (
                f"{named_runs(dead)} ended in Dagster without a word of {_its(dead)} process, and "
                "no member has looked after what is left. If you use a Spark Connect server, make "
                f"sure that it does no work of {_its(dead)} any more."
            )

    def _is_dead(self, run: RunSeen) -> bool:
        """Tell whether nothing but Spark work can be left of a run that is not known to be over."""
        return not (run.is_over or run.awaits_retry) and (
            run.is_gone or self.now_s >= self._dead_at(run)
        )

    def _dead_at(self, run: RunSeen) -> float:
        timeout_s = max(self.heartbeat_timeout_s, run.heartbeat_timeout_s)
        return float("inf") if run.ended_at is None else run.ended_at + _TIMEOUTS_WAITED * timeout_s


def _touching(
    partitions: Collection[TopicPartition], runs: Iterable[RunSeen]
) -> Iterator[tuple[RunSeen, list[TopicPartition]]]:
    """The live runs that may work on any of the partitions, each once, with these."""
    wanted = set(partitions)
    touched: dict[str, tuple[RunSeen, set[TopicPartition]]] = {}
    for run in runs:
        if run.is_live:
            _, those = touched.setdefault(run.run_id, (run, set()))
            those |= {range_.topic_partition for range_ in run.ranges} & wanted
            those |= (run.may_work_on or frozenset()) & wanted
            if not (run.is_over or run.ranges) and run.may_work_on is None:
                those |= wanted  # a streaming run whose last sign was lost
    for run, those in touched.values():
        if those:
            yield run, sorted(those)


def _its(run_ids: Sequence[str]) -> str:
    return "its" if len(run_ids) == 1 else "their"
