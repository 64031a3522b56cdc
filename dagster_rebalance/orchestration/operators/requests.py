"""Requests of operators: directives and reruns, for the jobs and the command line.

Both select partitions that the group was ever assigned, and are stored in Dagster. Members read
directives every few seconds, and before they claim ranges of newly assigned partitions. The sensor
of the group starts the runs of reruns. A directive does not need Kafka.
"""

from __future__ import annotations

import logging
import time
import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.directives import (
    Action,
    Directive,
    in_force,
    resolve_selector,
    resume_command,
)
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.letters import LetterKind, LetterState
from dagster_rebalance.core.model.offsets import TopicPartition, names_of, parse_partitions
from dagster_rebalance.core.operators.replay_selection import GroupPositions, select_letters
from dagster_rebalance.core.operators.rerun_schedule import steps
from dagster_rebalance.core.operators.rerun_selection import (
    DisjointRanges,
    PartitionHistory,
    Selection,
    Span,
    select,
)
from dagster_rebalance.core.runs.rerun_batch import (
    RECORDS_PER_RUN,
    RUNS_AT_ONCE,
    Rerun,
    RerunBatch,
    batches_of,
)
from dagster_rebalance.kafka.client.errors import first_few
from dagster_rebalance.kafka.log_bounds import read_bounds
from dagster_rebalance.orchestration.operators.replayed_letters import (
    TopicReads,
    is_transient,
    mark_replayed,
)
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.dead_letters import recorded_letters
from dagster_rebalance.orchestration.reporting.member_tables import utc
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.commit_history import processed
from dagster_rebalance.orchestration.storage.dynamic_partitions import DirectiveStore, RerunStore
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import dagster as dg

    from dagster_rebalance.core.model.letters import Letter, LetterFold
    from dagster_rebalance.core.model.offsets import Bounds, OffsetRange
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

logger = logging.getLogger(__name__)
_GROUPS_PREFIX = "kafka"
_PATIENCE_S = 30.0
_MOST_NAMED = 20
_RETRIES_KEPT_S = 3600.0
"""Members read a retry within seconds, and a later member retries failed ranges anyway."""
_DOES = {
    Action.PAUSE: "no new batch starts, and running batches finish and are committed",
    Action.STOP: "no new batch starts, and running batches are cancelled",
    Action.RESUME: "they continue from their committed offsets",
    Action.RETRY: "failed, stopped and waiting ranges are retried",
}


class DirectiveRequest(NamedTuple):
    """A request to pause, stop, resume or retry partitions.

    Attributes:
        action: The action.
        partitions: The partitions, each as `Directive.partitions`.
        by: The operator.
        reason: The reason.
    """

    action: Action
    partitions: Sequence[str]
    by: str
    reason: str = ""


class RerunRequest(NamedTuple):
    """A request to process past ranges again.

    Attributes:
        partitions: The partitions, each as in a directive, or as a table shows it: `orders-3`.
        span: The offsets or commit times to process again.
        by: The operator.
        reason: The reason.
        records_per_run: The number of offsets per run.
        runs_at_once: The maximum number of concurrent runs.
    """

    partitions: Sequence[str]
    span: Span
    by: str
    reason: str
    records_per_run: int = RECORDS_PER_RUN
    runs_at_once: int = RUNS_AT_ONCE


def issue_directive(instance: dg.DagsterInstance, group_id: str, request: DirectiveRequest) -> str:
    """Issue a directive to all members of a group, present and future, and show it in Dagster.

    Returns:
        A message about the outcome.

    Raises:
        ConfigurationError: The request is incomplete or matches no partition of the group, or
            earlier directives cannot be read.
    """
    assets = GroupAssets.of(group_id)
    now = time.time()

    def directive(selector: str) -> Directive:
        return Directive(request.action, selector, request.by.strip(), now, request.reason.strip())

    typed = [directive(selector).partitions for selector in request.partitions]
    if not typed:
        msg = f"name the partitions to {request.action.value}: orders:3, a topic, a pattern, or *"
        raise ConfigurationError(msg)
    known = partitions_of(instance, assets, group_id)
    chosen = dict(resolve_selector(selector, known, group_id) for selector in typed)
    directives = [directive(selector) for selector in chosen]
    matched = sorted({partition for those in chosen.values() for partition in those})
    is_retry = request.action is Action.RETRY
    directive_store = DirectiveStore(instance, assets.directives_name)
    store = DirectiveStore(instance, assets.retries_name) if is_retry else directive_store
    try:
        before = directive_store.read()
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    store.add(directives)
    text = f"{names_of(matched)} {directives[0]}"
    outcome = f"{text}. {_consequence(request.action, directives, matched, before)}"
    try:
        store.tidy(before=now - _RETRIES_KEPT_S if is_retry else 0.0)
        Catalogue(instance, assets, NO_MEMBER).record_directives(directives, matched, text)
    except Exception as error:  # of any database; the directive already applies
        logger.warning("a directive of group %s could not be reported", group_id, exc_info=True)
        return f"{outcome} Dagster could not show it on the asset of the group: {error}"
    return outcome


def _consequence(
    action: Action,
    directives: Sequence[Directive],
    matched: Sequence[TopicPartition],
    before: Sequence[Directive],
) -> str:
    paused = [partition for partition in matched if in_force(before, partition) is not None]
    more = ""
    if action is Action.RETRY and paused:
        more = f" Still paused or stopped by an operator: {names_of(paused)}."
    elif action is Action.RESUME and len(paused) < len(matched):
        others = [partition for partition in matched if partition not in paused]
        more = f" Not paused before: {names_of(others)}."
    elif action in {Action.PAUSE, Action.STOP}:
        more = f" To continue: {resume_command(*(one.partitions for one in directives))}"
    return f"Within seconds {_DOES[action]}.{more}"


def groups_of(instance: dg.DagsterInstance) -> list[str]:
    """Return the consumer groups of an instance, by their assets."""
    keys = instance.get_asset_keys(prefix=[_GROUPS_PREFIX])
    return sorted(
        {
            key.path[1]
            for key in keys
            if len(key.path) > 1 and key == GroupAssets.of(key.path[1]).group
        }
    )


def partitions_of(
    instance: dg.DagsterInstance, assets: GroupAssets, group_id: str
) -> list[TopicPartition]:
    """Return the partitions that members of the group were ever assigned.

    Raises:
        ConfigurationError: There are no partitions: the name of the group may be wrong, or its
            members did not start.
    """
    # Users can add other keys on the page of the asset.
    keys = list(instance.get_dynamic_partitions(assets.partitions_name))
    found = list(parse_partitions(keys))
    if not found:
        groups = groups_of(instance)
        if assets.group.path[1] in groups:
            msg = (
                f"group {group_id} has not been assigned a partition yet: look at the ticks of its "
                "sensor, and at the logs of its newest runs"
            )
        else:
            msg = (
                f"group {group_id} has never been assigned a partition in this Dagster instance. "
                f"Groups of the instance: {', '.join(groups) or 'none'}"
            )
        raise ConfigurationError(msg)
    return sorted(found)


class RerunPlan(NamedTuple):
    """A rerun before it begins.

    Attributes:
        selection: The ranges to process again, and the ranges that are left out.
        batches: The ranges of each run.
    """

    selection: Selection
    batches: tuple[RerunBatch, ...]

    @property
    def rerun(self) -> Rerun:
        """The rerun that the plan would begin."""
        return self.batches[0].rerun


class Reruns:
    """The reruns of one group."""

    def __init__(self, instance: dg.DagsterInstance, kafka: KafkaConsumerResource) -> None:
        self._instance = instance
        self._kafka = kafka
        self._assets = GroupAssets.of(kafka.group_id)
        self._catalogue = Catalogue(instance, self._assets, NO_MEMBER)
        self._store = RerunStore(instance, self._assets.reruns_name)
        self._runs = RunLedger(instance, kafka.group_id)

    def plan(self, request: RerunRequest) -> RerunPlan:
        """Return the ranges that a rerun would process. Nothing is written.

        Raises:
            BrokerError: Kafka did not answer, or refused.
            ConfigurationError: The ranges cannot be processed again; the message says why.
        """
        rerun = Rerun(
            uuid.uuid4().hex[:8],
            request.by.strip(),
            request.reason.strip(),
            time.time(),
            request.runs_at_once,
        )
        partitions = self._chosen(request.partitions)
        if request.span.start is not None and len(partitions) > 1:
            msg = (
                "offsets apply to one partition: name one, such as orders:3, or give the time of "
                "the commits (--since, --until)"
            )
            raise ConfigurationError(msg)
        selected = select(
            request.span,
            self._past(partitions, request.span),
            self._runs.read((), with_live=True),
            self._store.read(),
        )
        batches = batches_of(rerun, selected.ranges, records_per_run=request.records_per_run)
        return RerunPlan(selected, batches)

    def plan_letters(
        self,
        letters: Sequence[Letter],
        fold: LetterFold,
        topic: str,
        *,
        by: str,
        reason: str,
        runs_at_once: int,
    ) -> RerunPlan:
        """Return the ranges that a replay of dead letters would process. Nothing is written.

        Args:
            letters: Open letters.
            fold: All letters of their topic.
            topic: Their topic.
            by: The operator.
            reason: The reason.
            runs_at_once: The maximum number of concurrent runs.

        Raises:
            BrokerError: Kafka did not answer, or refused.
            ConfigurationError: No letter can be replayed; the message says why.
        """
        rerun = Rerun(uuid.uuid4().hex[:8], by, reason, time.time(), runs_at_once, letters=topic)
        known = partitions_of(self._instance, self._assets, self._kafka.group_id)
        named = {letter.range.topic_partition for letter in letters}
        committed, bounds = self._positions([one for one in known if one in named])
        failed = {letter.range for letter in letters if letter.kind is LetterKind.RANGE}
        replayed = [
            entry.letter.range
            for entry in fold.in_state(LetterState.REPLAYED)
            if entry.letter is not None and entry.letter.kind is LetterKind.RECORD
        ]
        selected = select_letters(
            letters,
            GroupPositions(
                self._kafka.group_id,
                committed,
                bounds,
                recorded_letters(self._instance, self._assets.offsets, failed),
                {one.id for one in letters if fold.entries[one.id].place in fold.left_out},
                replayed,
            ),
            self._runs.read((), with_live=True),
            self._store.read(),
        )
        batches = batches_of(rerun, selected.ranges, records_per_run=RECORDS_PER_RUN)
        return RerunPlan(selected, batches)

    def begin(self, plan: RerunPlan) -> str:
        """Store a rerun for the sensor, which starts its runs; return a message.

        Raises:
            ConfigurationError: A concurrent rerun has claimed some of the ranges.
        """
        self._store.add(plan.batches)
        rerun, ranges = plan.rerun, plan.selection.ranges
        own = DisjointRanges(ranges)
        for other in self._store.read():  # in the order of arrival: the first one has the ranges
            if other.rerun.rerun_id == rerun.rerun_id:
                break
            if any(map(own.overlapping, other.ranges)):
                self._store.remove(plan.batches)
                msg = (
                    f"{other.rerun} was requested at the same moment, and includes some of these "
                    "ranges: wait until it has ended"
                )
                raise ConfigurationError(msg)
        self._show_rerun("rerun", rerun, f"processes {len(ranges)} ranges again", ranges)
        return (
            f"{rerun}: {rerun.batches} run{'s' * (rerun.batches > 1)}, at most "
            f"{rerun.runs_at_once} at once. The sensor of the group starts them while it is on, "
            "and its ticks show their progress"
        )

    def cancel(self, rerun_id: str) -> str:
        """Cancel a rerun and its live runs; return a message.

        Raises:
            ConfigurationError: No open rerun has this id, or a launcher could not stop a run.
        """
        known = self._store.read()
        batches = [batch for batch in known if batch.rerun.rerun_id == rerun_id]
        if not batches:
            names = ", ".join(dict.fromkeys(batch.rerun.rerun_id for batch in known)) or "none"
            msg = f"no unfinished rerun {rerun_id!r}; unfinished: {names}"
            raise ConfigurationError(msg)
        # First, so that no further run begins.
        self._store.remove(batches)
        rerun = batches[0].rerun
        runs = self._runs.read([batch.batch_id for batch in batches])
        live = [run.run_id for run in runs if run.is_live]
        left = {run_id: why for run_id in live if (why := self._why_not_cancelled(run_id))}
        # No tick shows batches that have succeeded since the last one: they are removed.
        finished = dict(steps(batches, runs, ()).done)
        unmarked = self._finish(finished)
        ranges = [range_ for batch in batches if batch not in finished for range_ in batch.ranges]
        self._show_rerun("rerun_cancelled", rerun, f"cancelled, {len(ranges)} ranges left", ranges)
        if left:
            msg = (
                f"{rerun} is cancelled, but some of its runs could not be: terminate them "
                f"in Dagster: {'; '.join(f'{run_id}: {why}' for run_id, why in left.items())}"
                f"{unmarked}"
            )
            raise ConfigurationError(msg)
        done = rerun.batches - len(batches) + len(finished)
        return (
            f"{rerun} is cancelled: {done} of {rerun.batches} runs were done, "
            f"{len(live)} live ones are cancelled. Their output stays{unmarked}"
        )

    def _finish(self, done: Mapping[RerunBatch, str]) -> str:
        """Mark the letters of finished batches and show these; return which letters are unmarked.

        While Kafka does not answer, batches are stored again: the next tick marks their letters.
        """
        waiting: list[RerunBatch] = []
        unmarked: list[OffsetRange] = []
        notes: list[str] = []
        known: TopicReads = {}
        problem = ""
        for batch, run_id in done.items():
            try:
                notes.append(mark_replayed(self._instance, self._kafka, batch, run_id, known))
            except BrokerError as error:
                if is_transient(error):
                    waiting.append(batch)
                    continue
                unmarked += batch.ranges
                problem = f"{batch.rerun.letters} could not be marked as replayed: {error}"
            self._show(batch.rerun, self._catalogue.record_reprocessed, batch, run_id)
        text = "".join(f". {note}" for note in dict.fromkeys(filter(None, notes)))
        if waiting:
            self._store.add(waiting)
            text += ". Kafka does not answer: the next tick marks the letters of finished runs"
        if unmarked:
            shown = first_few(map(str, unmarked), _MOST_NAMED)
            text += (
                f". The letters of {shown} in topic {problem}. Another replay would process their "
                "records again, so discard these letters"
            )
        return text

    def _why_not_cancelled(self, run_id: str) -> str:
        try:
            self._runs.cancel(run_id)
        except Exception as error:  # noqa: BLE001 - of any launcher
            return str(error)
        return ""

    def open_ones(self) -> list[str]:
        """Return a message about each unfinished rerun."""
        left: dict[Rerun, int] = {}
        for batch in self._store.read():
            left[batch.rerun] = left.get(batch.rerun, 0) + 1
        return [
            f"{rerun}: {rerun.batches - count} of {rerun.batches} runs are done, requested at "
            f"{utc(rerun.at)}"
            for rerun, count in left.items()
        ]

    def _chosen(self, selectors: Sequence[str]) -> list[TopicPartition]:
        group_id = self._kafka.group_id
        known = partitions_of(self._instance, self._assets, group_id)
        found = {p for one in selectors for p in resolve_selector(one, known, group_id).partitions}
        if not found:
            msg = "name the partitions to process again: orders:3, a topic, a pattern, or *"
            raise ConfigurationError(msg)
        return sorted(found)

    def _past(
        self, partitions: Sequence[TopicPartition], span: Span
    ) -> dict[TopicPartition, PartitionHistory]:
        committed, bounds = self._positions(partitions)
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
                committed[partition],
                bounds[partition],
            )
            for partition in partitions
        }

    def _positions(
        self, partitions: Sequence[TopicPartition]
    ) -> tuple[dict[TopicPartition, int | None], dict[TopicPartition, Bounds]]:
        """Return the committed offsets, and the bounds of the logs."""
        if not partitions:
            return {}, {}
        with self._kafka.connect() as consumer:
            stored = consumer.committed(partitions, _PATIENCE_S)
            bounds = read_bounds(consumer, partitions, _PATIENCE_S)
        return {tp: None if at is None else at.offset for tp, at in stored.items()}, bounds

    def _show_rerun(
        self, event: str, rerun: Rerun, what: str, ranges: Iterable[OffsetRange]
    ) -> None:
        self._show(rerun, self._catalogue.record_rerun, event, rerun, what, ranges)

    def _show(self, rerun: Rerun, record: Callable[..., None], *what: object) -> None:
        try:
            record(*what)
        except Exception:  # of any database; the store decides
            logger.warning("%s could not be shown", rerun, exc_info=True)


def span_of(
    from_offset: int | None, until_offset: int | None, since: str | None, until: str | None
) -> Span:
    """Return the span of the offsets and times that an operator typed; empty means no bound.

    Raises:
        ConfigurationError: A time is invalid.
    """
    return Span(
        from_offset,
        until_offset,
        time_of(since) if since else None,
        time_of(until) if until else None,
    )


def time_of(text: str) -> float:
    """Parse a time that an operator typed, to seconds since 1970.

    Raises:
        ConfigurationError: The time is invalid.
    """
    try:
        at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        msg = f"{text!r} is not a time: write 2026-11-23T02:00 (UTC) or 2026-11-23T02:00+01:00"
        raise ConfigurationError(msg) from None
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
