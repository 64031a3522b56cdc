"""A person moves committed offsets: which moves can be, and what must not be under way meanwhile.

Owns that nothing in flight is lost or done twice by a move. A claim names offsets behind the
committed one, and goes with it. So nobody may be at work on a claim, and no member may be there: it
would go on from what it has read. What is stored names the log that the offset belongs to, as the
commit of a member does, so that a later cut or a topic made anew is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.claims import StoredPartition, encode
from dagster_rebalance.core.errors import ConfigurationError
from dagster_rebalance.core.partition import ANY_BOUNDS, Log, named
from dagster_rebalance.core.runs import named_runs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.events import Found
    from dagster_rebalance.core.group_status import Owners
    from dagster_rebalance.core.partition import OffsetAndMetadata, TopicPartition
    from dagster_rebalance.core.runs import RunSeen


@dataclass(frozen=True, slots=True)
class Move:
    """One partition whose committed offset is moved.

    Attributes:
        partition: The partition.
        before: The committed offset; None where there is none.
        stored: What is stored instead.
        claims: How many claimed ranges are dropped with the old one.
    """

    partition: TopicPartition
    before: int | None
    stored: OffsetAndMetadata
    claims: int = 0

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
    if found is None or found.bounds == ANY_BOUNDS:
        msg = f"the leader of {partition} does not answer, so nobody knows its offsets: try again"
        raise ConfigurationError(msg)
    bounds = found.bounds
    if not bounds.start <= offset <= bounds.until:
        msg = (
            f"{partition} has no offset {offset}: Kafka has {bounds.start} (--to-earliest) to "
            f"{bounds.until} (--to-latest)"
        )
        raise ConfigurationError(msg)
    before = None if found.stored is None else found.stored.offset
    log = Log(found.topic_id, bounds.leader_epoch)
    return Move(partition, before, encode(StoredPartition(offset, log=log)), claims)


def obstacles(
    partitions: Collection[TopicPartition], owners: Owners, runs: Iterable[RunSeen]
) -> Iterator[str]:
    """Why nothing may be moved now, each with what to do.

    Args:
        partitions: What is to be moved.
        owners: The members of the group.
        runs: Its live runs.
    """
    if owners.members:
        names: Sequence[str] = sorted({owners.name(member) for member in owners.members})
        count = len(owners.members)
        yield (
            f"the group has {count} member{'' if count == 1 else 's'} ({', '.join(names)}): turn "
            "its sensor off, and cancel its streaming runs, if it has these. Members leave when "
            "their work is done; one that was killed counts for up to a session time-out"
        )
    for run in runs:
        ranges = {range_.topic_partition for range_ in run.ranges}
        touched = ranges | (run.may_work_on or frozenset())
        at_work = sorted(touched & set(partitions))
        if run.is_live and at_work:
            yield (
                f"{named_runs([run.run_id])} may be at work on {named(at_work)}: wait for its end, "
                "or cancel it"
            )
