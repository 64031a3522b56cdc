"""Which finished runs of a group may be deleted from Dagster.

A run may go once nothing refers to it: no claim and no note in Kafka names it, all of its ranges
are committed, no unfinished run or rerun depends on it, and no newest materialization is its. What
is finished stays finished and old claims only disappear, so a live group changes none of that.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.claims import StoredPartition
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import names_of
from dagster_rebalance.core.partitions.recovery import read_stored
from dagster_rebalance.core.runs.rerun_batch import rerun_of
from dagster_rebalance.core.runs.stream_batch import StreamBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition

FEWEST_DAYS, MOST_DAYS = 3, 36_500
"""Members read the runs of the last two days that ended without a report of their process. A time
long before the first run is not supported by Dagster's storage."""
NOT_CHECKED = "not checked yet: call prune again"


class PrunedKind(enum.Enum):
    """The kind of a run of a group."""

    STREAMING = "streaming run"
    BATCH = "run of a batch"
    RERUN = "run of a rerun"


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended.

    Attributes:
        stream: The sensor and the slot of a streaming run; empty for another run.
        batch_id: The batch of another run.
        ranges: The ranges of that batch; empty if they are unknown.
        ended_at: Seconds since 1970.
    """

    run_id: str
    ended_at: float
    stream: str = ""
    batch_id: str = ""
    ranges: Sequence[OffsetRange] = ()

    @property
    def kind(self) -> PrunedKind | None:
        """Its kind; None if an operator has launched it without a batch."""
        if self.stream:
            return PrunedKind.STREAMING
        if rerun_of(self.batch_id):
            return PrunedKind.RERUN
        return PrunedKind.BATCH if self.batch_id and self.ranges else None


@dataclass(frozen=True, slots=True)
class References:
    """Everything that refers to runs.

    Attributes:
        committed: The committed offset of each partition that has one.
        batch_ids: The batches of claims.
        run_ids: The runs that claims and notes in Kafka name.
        needed: Other runs that are needed, and why.
        reruns: The unfinished reruns.
    """

    committed: Mapping[TopicPartition, int]
    batch_ids: frozenset[str] = frozenset()
    run_ids: frozenset[str] = frozenset()
    needed: Mapping[str, str] = field(default_factory=dict)
    reruns: frozenset[str] = frozenset()

    @classmethod
    def in_kafka(cls, stored: Mapping[TopicPartition, OffsetAndMetadata | None]) -> References:
        """Return the references in committed offsets.

        Raises:
            ConfigurationError: The metadata of an offset cannot be read, so it may name any run.
        """
        committed, batch_ids, run_ids = {}, set(), set()
        unreadable = []
        for partition, offset in stored.items():
            if offset is None:
                continue
            state = read_stored(offset)
            if not isinstance(state, StoredPartition):
                unreadable.append(partition)
                continue
            committed[partition] = offset.offset
            for claim in state.claims:
                batch_ids |= {claim.batch_id, claim.previous_batch_id} - {""}
            for part in () if state.last_commit is None else state.last_commit.parts:
                batch_ids.add(part.batch_id)
                run_ids.add(part.run_id)
        if unreadable:
            msg = (
                f"nothing was deleted: the metadata of the offsets of {names_of(unreadable)} "
                "cannot be read, and may name any run. dagster-rebalance explain says why"
            )
            raise ConfigurationError(msg)
        streams = (StreamBatch.parse(batch_id) for batch_id in batch_ids)
        run_ids |= {batch.run_id for batch in streams if batch is not None}
        return cls(committed, frozenset(batch_ids), frozenset(run_ids))


def why_kept(run: FinishedRun, references: References) -> str:
    """Return why a run must stay; empty if it may be deleted."""
    if run.kind is None:
        return "has no batch"
    if run.run_id in references.run_ids or run.batch_id in references.batch_ids:
        return "named in Kafka"
    if run.run_id in references.needed:
        return references.needed[run.run_id]
    if run.kind is PrunedKind.RERUN:
        is_open = rerun_of(run.batch_id) in references.reruns
        return "of an unfinished rerun" if is_open else ""
    if any(one.until > references.committed.get(one.topic_partition, 0) for one in run.ranges):
        return "its ranges are not committed"
    return ""


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The runs to delete, and how many stay for which reason.

    Attributes:
        is_partial: Whether the search ended before the limit of runs and before the last run.
    """

    runs: tuple[FinishedRun, ...]
    kept: Mapping[str, int]
    is_partial: bool = False

    @classmethod
    def of(cls, runs: Iterable[FinishedRun], references: References) -> PrunePlan:
        """Sort finished runs."""
        deleted, kept = [], Counter[str]()
        for run in runs:
            reason = why_kept(run, references)
            if reason:
                kept[reason] += 1
            else:
                deleted.append(run)
        return cls(tuple(deleted), dict(kept))

    def by_kind(self) -> dict[PrunedKind, list[FinishedRun]]:
        """Return the runs to delete of each kind, oldest first."""
        kinds: dict[PrunedKind, list[FinishedRun]] = {}
        for run in sorted(self.runs, key=lambda run: run.ended_at):
            if run.kind is not None:
                kinds.setdefault(run.kind, []).append(run)
        return kinds


class PruneSearch:
    """Searches finished runs, page by page, until it has found enough runs to delete.

    Args:
        most: The limit of runs to delete.
        most_read: The limit of runs that are read once one to delete was found. Before, the search
            goes on: runs that stay would be the first ones of the next search too.
    """

    def __init__(self, most: int, most_read: int) -> None:
        self._most = most
        self._most_read = most_read
        self._read = 0
        self._is_at_end = False
        self._runs: list[FinishedRun] = []
        self._kept: Counter[str] = Counter()

    @property
    def missing(self) -> int:
        """How many more runs may be deleted."""
        return self._most - len(self._runs)

    @property
    def _is_at_its_limit(self) -> bool:
        return NOT_CHECKED in self._kept or self._read >= self._most_read

    @property
    def is_over(self) -> bool:
        """Whether no more runs are to be read."""
        return not self.missing or self._is_at_end or self._is_at_its_limit

    def add(self, first: PrunePlan, last: PrunePlan, *, read: int, is_at_end: bool) -> None:
        """Add the next runs.

        Args:
            first: Their plan.
            last: The plan of those that `first` would delete.
            read: How many runs were read, also those that are not in the plan.
            is_at_end: Whether these are the last runs.
        """
        if self._runs:
            self._read += read
        self._kept += Counter(first.kept) + Counter(last.kept)
        self._runs += sorted(last.runs, key=lambda run: run.ended_at)[: self.missing]
        self._is_at_end = is_at_end

    def plan(self) -> PrunePlan:
        """Return the plan of all runs that were read."""
        is_partial = self.missing > 0 and not self._is_at_end
        return PrunePlan(tuple(self._runs), dict(self._kept), is_partial)
