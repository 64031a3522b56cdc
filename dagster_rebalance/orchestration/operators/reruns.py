"""People have past ranges processed again: what the job and the command line have in common.

What is repeated is decided when it is asked for, and kept in the book of reruns. The sensor of the
group starts the runs, so that neither a command nor a job has to wait for them.
"""

from __future__ import annotations

import logging
import time
import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.directives import selection
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.operators.rerun_schedule import steps
from dagster_rebalance.core.operators.rerun_selection import (
    DisjointRanges,
    PartitionHistory,
    Selection,
    Span,
    select,
)
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch, batches_of
from dagster_rebalance.kafka.log_bounds import read_bounds
from dagster_rebalance.orchestration.operators.directives import partitions_of
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.runs.queries import RunLedger
from dagster_rebalance.orchestration.storage.commit_history import processed
from dagster_rebalance.orchestration.storage.dynamic_partitions import RerunStore
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import dagster as dg

    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

logger = logging.getLogger(__name__)
RECORDS_PER_RUN = 100_000
RUNS_AT_ONCE = 2
_PATIENCE_S = 30.0
"""How long Kafka may take. A person rather waits than tries again."""


class Wanted(NamedTuple):
    """What a person wants to be processed again.

    Attributes:
        partitions: Which partitions, each as in an order, or as a table shows it: `orders-3`.
        span: Which part of their past.
        by: Who wants it.
        reason: Why.
        records_per_run: How many offsets one run processes.
        runs_at_once: How many runs may be at work at the same time.
    """

    partitions: Sequence[str]
    span: Span
    by: str
    reason: str
    records_per_run: int = RECORDS_PER_RUN
    runs_at_once: int = RUNS_AT_ONCE


class Planned(NamedTuple):
    """A rerun before it begins.

    Attributes:
        selection: What it repeats, and what it leaves out.
        batches: The same, for each run.
    """

    selection: Selection
    batches: tuple[RerunBatch, ...]

    @property
    def rerun(self) -> Rerun:
        """The rerun."""
        return self.batches[0].rerun


class Reruns:
    """The reruns of one group.

    Args:
        instance: The Dagster instance of its members.
        kafka: The group, and how to reach Kafka.
    """

    def __init__(self, instance: dg.DagsterInstance, kafka: KafkaConsumerResource) -> None:
        self._instance = instance
        self._kafka = kafka
        self._assets = GroupAssets.of(kafka.group_id)
        self._catalogue = Catalogue(instance, self._assets, NO_MEMBER)
        self._book = RerunStore(instance, self._assets.reruns_name)
        self._runs = RunLedger(instance, kafka.group_id)

    def plan(self, wanted: Wanted) -> Planned:
        """What would be processed again. Nothing is written.

        Raises:
            BrokerError: Kafka did not answer, or refused.
            ConfigurationError: It cannot be done; the message says why.
        """
        rerun = Rerun(
            uuid.uuid4().hex[:8],
            wanted.by.strip(),
            wanted.reason.strip(),
            time.time(),
            wanted.runs_at_once,
        )
        partitions = self._chosen(wanted.partitions)
        if wanted.span.start is not None and len(partitions) > 1:
            msg = (
                "offsets say something of one partition only: name one, such as orders:3, or say "
                "the time of the commits (--since, --until)"
            )
            raise ConfigurationError(msg)
        selection = select(
            wanted.span,
            self._past(partitions, wanted.span),
            self._runs.read((), live_too=True),
            self._book.read(),
        )
        batches = batches_of(rerun, selection.ranges, records_per_run=wanted.records_per_run)
        return Planned(selection, batches)

    def begin(self, planned: Planned) -> str:
        """Let the sensor start the runs; what follows, as a sentence.

        Raises:
            ConfigurationError: Another rerun has got some of the ranges meanwhile.
        """
        self._book.add(planned.batches)
        rerun = planned.rerun
        mine = DisjointRanges(planned.selection.ranges)
        for other in self._book.read():  # in the order in which they came: the first one has them
            if other.rerun.rerun_id == rerun.rerun_id:
                break
            if any(map(mine.overlapping, other.ranges)):
                self._book.remove(planned.batches)
                msg = (
                    f"{other.rerun} was asked for at the same moment, and is to process some of "
                    "these ranges: wait for its end"
                )
                raise ConfigurationError(msg)
        ranges = planned.selection.ranges
        self._show_rerun("rerun", rerun, f"processes {len(ranges)} ranges again", ranges)
        return (
            f"{rerun}: {rerun.batches} run{'s' * (rerun.batches > 1)}, at most "
            f"{rerun.runs_at_once} at once. The sensor of the group starts them as long as it is "
            "on, and its ticks say how they stand"
        )

    def cancel(self, rerun_id: str) -> str:
        """End a rerun: its runs that are at work are cancelled, and no more are started.

        Raises:
            ConfigurationError: There is none of this name, or the launcher could not stop a run.
        """
        known = self._book.read()
        mine = [batch for batch in known if batch.rerun.rerun_id == rerun_id]
        if not mine:
            names = ", ".join(dict.fromkeys(batch.rerun.rerun_id for batch in known)) or "none"
            msg = f"there is no rerun {rerun_id!r} that is not finished; there are: {names}"
            raise ConfigurationError(msg)
        # First, so that no run of it begins that has not.
        self._book.remove(mine)
        runs = self._runs.read([batch.batch_id for batch in mine])
        live = [run.run_id for run in runs if run.is_live]
        left = {run_id: why for run_id in live if (why := self._why_not_cancelled(run_id))}
        # No tick shows those that have succeeded since the last one: they are out of the book.
        finished = dict(steps(mine, runs, ()).done)
        for batch, run_id in finished.items():
            self._show(batch.rerun, self._catalogue.record_reprocessed, batch, run_id)
        ranges = [range_ for batch in mine if batch not in finished for range_ in batch.ranges]
        self._show_rerun(
            "rerun_cancelled", mine[0].rerun, f"cancelled, {len(ranges)} ranges left", ranges
        )
        if left:
            msg = (
                f"{mine[0].rerun} is cancelled, but not all of its runs could be: terminate them "
                f"in Dagster: {'; '.join(f'{run_id}: {why}' for run_id, why in left.items())}"
            )
            raise ConfigurationError(msg)
        done = mine[0].rerun.batches - len(mine) + len(finished)
        return (
            f"{mine[0].rerun} is cancelled: {done} of {mine[0].rerun.batches} runs were done, "
            f"{len(live)} at work are cancelled. What they have written stays"
        )

    def _why_not_cancelled(self, run_id: str) -> str:
        try:
            self._runs.cancel(run_id)
        except Exception as error:  # noqa: BLE001 - of any launcher
            return str(error)
        return ""

    def open_ones(self) -> list[str]:
        """The reruns that are not finished, each as a sentence."""
        left: dict[Rerun, int] = {}
        for batch in self._book.read():
            left[batch.rerun] = left.get(batch.rerun, 0) + 1
        return [
            f"{rerun}: {rerun.batches - count} of {rerun.batches} runs are done, asked for at "
            f"{datetime.fromtimestamp(rerun.at, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
            for rerun, count in left.items()
        ]

    def _chosen(self, selectors: Sequence[str]) -> list[TopicPartition]:
        known = partitions_of(self._instance, self._assets, self._kafka.group_id)
        group_id = self._kafka.group_id
        found = {p for one in selectors for p in selection(one, known, group_id).partitions}
        if not found:
            msg = "say which partitions to process again: orders:3, a topic, a pattern, or all"
            raise ConfigurationError(msg)
        return sorted(found)

    def _past(
        self, partitions: Iterable[TopicPartition], span: Span
    ) -> dict[TopicPartition, PartitionHistory]:
        those = list(partitions)
        with self._kafka.connect() as consumer:
            stored = consumer.committed(those, _PATIENCE_S)
            bounds = read_bounds(consumer, those, _PATIENCE_S)
        return {
            partition: PartitionHistory(
                tuple(
                    processed(
                        self._instance,
                        self._assets.offsets,
                        partition,
                        start=span.start or 0,
                        since=span.since or 0.0,
                    )
                ),
                None if (found := stored[partition]) is None else found.offset,
                bounds[partition],
            )
            for partition in those
        }

    def _show_rerun(
        self, event: str, rerun: Rerun, what: str, ranges: Sequence[OffsetRange]
    ) -> None:
        self._show(rerun, self._catalogue.record_rerun, event, rerun, what, ranges)

    def _show(self, rerun: Rerun, record: Callable[..., None], *what: object) -> None:
        try:
            record(*what)
        except Exception:  # of any database; the book says what counts
            logger.warning("%s could not be shown", rerun, exc_info=True)


def span_of(
    from_offset: int | None, until_offset: int | None, since: str | None, until: str | None
) -> Span:
    """The part of each partition that a person has typed; what is empty does not bound it.

    Raises:
        ConfigurationError: A time is none.
    """
    return Span(
        from_offset,
        until_offset,
        time_of(since) if since else None,
        time_of(until) if until else None,
    )


def time_of(text: str) -> float:
    """A time that a person has typed, in seconds since 1970.

    Raises:
        ConfigurationError: It is no time.
    """
    try:
        at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        msg = f"{text!r} is no time: write 2026-11-23T02:00 (UTC) or 2026-11-23T02:00+01:00"
        raise ConfigurationError(msg) from None
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
