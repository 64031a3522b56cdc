"""The catalogue: shows commits, holds, members and stopped partitions in Dagster.

Commits are materializations of the offsets asset, which is partitioned by topic-partition: one
Dagster partition per range would exceed Dagster's limit within days. Memberships and receipts are
observations of the group asset, which trigger nothing downstream. Events are reported immediately
and without a run: Dagster drops events in a sensor's result when the tick times out.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.commands import recorded_commits
from dagster_rebalance.core.model.events import LastRecorded, LeaveRequested
from dagster_rebalance.core.model.offsets import TopicPartition, listed, names_of, parse_listed
from dagster_rebalance.core.reporting.group_status import RecordedAssignment
from dagster_rebalance.orchestration.reporting.checks import (
    DRAINED_CHECK,
    GAP_CHECK,
    LAG_CHECK,
    STOPPED_CHECK,
    as_evaluation,
    drained_today,
    gap_result,
    lag_observation,
    lag_result,
    last_evaluation,
    shown_stops,
    stopped_result,
)
from dagster_rebalance.orchestration.reporting.group_settings import GroupSettings
from dagster_rebalance.orchestration.reporting.letter_checks import (
    LETTERS_CHECK,
    letters_observation,
    letters_result,
)
from dagster_rebalance.orchestration.reporting.member_tables import (
    History,
    member_name,
    record_in,
    tables_of,
)
from dagster_rebalance.orchestration.storage.commit_history import (
    last_recorded,
    materialisation,
)
from dagster_rebalance.orchestration.storage.dynamic_partitions import DirectiveStore
from dagster_rebalance.orchestration.storage.member_lease import MemberLease
from dagster_rebalance.orchestration.storage.newest_records import NewestRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.commands import HoldOutcome, Receipt, RecordCommit, ShowHold
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.letters import Letter
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.operators.reset_offsets import Move
    from dagster_rebalance.core.reporting.group_status import MemberRecord
    from dagster_rebalance.core.reporting.lag import GroupLag, GroupState, LagLimit
    from dagster_rebalance.core.reporting.open_letters import OpenLetters
    from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
    from dagster_rebalance.orchestration.ports import RunError, ShownStops
    from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
    from dagster_rebalance.orchestration.storage.names import GroupAssets
    from dagster_rebalance.orchestration.storage.newest_records import Recorded

_EVENTS_READ = 100
_ASSIGNMENTS_READ = 1_000
_MOST_COMMITTED = 100
_MOST_KEYS = 100
_RECORDED_AT_ONCE_S = 1.0
_READ_AGAIN_AFTER_S = 1.0
_IDENTITY = ("member", "code_location", "started_by", "sensor", "incarnation", "member_run")
_NO_GAP = (
    "no gap. Members compare each commit with the previous one when they record it, and this check "
    "fails at the first gap"
)


class Catalogue:
    """The catalogue of one member, or of a command (`NO_MEMBER`).

    Args:
        instance: The instance to report to.
        assets: The assets of the group.
        host: The process of the member.
        settings: The public settings of the group; empty for a command.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        assets: GroupAssets,
        host: MemberIdentity,
        settings: str = "",
    ) -> None:
        self._instance = instance
        self._assets = assets
        self._host = host
        self._known: set[str] = set()
        self._has_released = False
        self._newest_event: int | None = None
        self._has_evaluated_gaps = self._has_evaluated_drained = False
        self._newest = NewestRecords(instance, assets.offsets)
        self._history = History(instance, assets.group)
        self._lease = MemberLease(instance, assets, host.location, host.sensor)
        self._directives = DirectiveStore(instance, assets.directives_name)
        self._retry_store = DirectiveStore(instance, assets.retries_name)
        self._retries: tuple[Directive, ...] = ()
        self._reads_retries = True
        self._settings = settings

    def renew_lease(self) -> None:
        """Renew the lease of this process on its sensor."""
        self._lease.renew(self._host.incarnation)
        if self._has_released:  # while this renewal hung
            self._lease.release(self._host.incarnation)

    def release_lease(self) -> None:
        """Release the lease, so that another process can join at once."""
        self._has_released = True
        self._lease.release(self._host.incarnation)

    def add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions to the offsets asset."""
        keys = {str(partition) for partition in partitions} - self._known
        if keys:
            self._instance.add_dynamic_partitions(self._assets.partitions_name, sorted(keys))
            self._known |= keys

    def last_recorded(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, LastRecorded]:
        """Return the last recorded commit of each partition that has one."""
        return last_recorded(self._instance, self._assets.offsets, tuple(partitions))

    def record_commits(
        self,
        commits: Sequence[RecordCommit],
        is_wanted: Callable[[RecordCommit], bool] = lambda _: True,
    ) -> tuple[RecordCommit, ...]:
        """Record the parts of commits that no member has recorded; return the recorded commits.

        Dagster stores each record in a separate transaction. After an error, call this again with
        all of the commits. `is_wanted` is asked before each record: the next owner of a partition
        may record the commit by that time. What is recorded is read again after a second, because
        the process may have been suspended.
        """
        found: dict[TopicPartition, Recorded] = {}
        read_at, recorded = float("-inf"), []
        for at, commit in enumerate(commits):
            if not is_wanted(commit):
                continue
            if time.monotonic() - read_at > _READ_AGAIN_AFTER_S:
                read_at = time.monotonic()
                found = self._newest.read(left.range.topic_partition for left in commits[at:])
            partition = commit.range.topic_partition
            rest, known = self._newest.rest_of(commit, found.get(partition))
            found[partition] = known
            if rest is not None:
                self._record(rest)
                until = known.highest
                self._evaluate_gaps(
                    partition if until is not None and until < rest.range.start else None
                )
                known.add(recorded_commits(rest.range.start, rest.ends))
            recorded.append(commit)
        return tuple(recorded)

    def _record(self, commit: RecordCommit) -> None:
        record = materialisation(
            commit, self._assets.offsets, self._host.location, _time_of(commit)
        )
        if commit.is_dead_letter:
            partitions = _json([commit.range.topic_partition])
            metadata = {"partitions": partitions, **record.metadata}
            self._observe("dead_letter", record.description or "", metadata)
        self._instance.report_runless_asset_event(record)

    def _evaluate_gaps(self, leaves_gap: TopicPartition | None) -> None:
        """Evaluate the check when a commit leaves a gap, and once after the last gap.

        Earlier gaps were reported when they occurred.
        """
        if leaves_gap or not self._has_evaluated_gaps:
            self._has_evaluated_gaps = True
            assets = self._assets
            result = gap_result(self._instance, assets.offsets, assets.group, leaves_gap)
            if result.passed:
                # Reported once, so it must not count the commits of that moment.
                result = dg.AssetCheckResult(passed=True, description=_NO_GAP)
            if leaves_gap or result.passed:
                self._evaluate(result, GAP_CHECK, self._assets.offsets)

    def record_hold(self, hold: ShowHold, at: float | None = None) -> None:
        """Record that partitions are held since a time, and for which runs."""
        self._observe(
            "holding",
            str(hold),
            {
                "cause": hold.cause.value,
                "partitions": _json(hold.partitions),
                "runs": dg.MetadataValue.json(list(hold.run_ids)),
                "released_by": dg.MetadataValue.timestamp((at or time.time()) + hold.limit_s),
            },
        )

    def record_receipt(self, receipt: Receipt, at: float | None = None) -> None:
        """Record how a hold ended, and when."""
        self._observe(
            "hold",
            str(receipt),
            {
                "outcome": receipt.outcome.value,
                "cause": receipt.cause.value,
                "partitions": _json(receipt.partitions),
                "seconds": round(receipt.seconds, 3),
                "ended_at": dg.MetadataValue.timestamp(at or time.time()),
                "committed": dg.MetadataValue.json(
                    {
                        str(partition): offset
                        for partition, offset in islice(receipt.committed.items(), _MOST_COMMITTED)
                    }
                ),
                "committed_partitions": len(receipt.committed),
                "runs": dg.MetadataValue.json(list(receipt.run_ids)),
                "cancelled": dg.MetadataValue.json(list(receipt.cancelled)),
                "handed_over": _json(receipt.handed_over),
            },
        )
        self._evaluate_drained(receipt.outcome)

    def _evaluate_drained(self, outcome: HoldOutcome) -> None:
        """Evaluate the check when a hold did not drain, and once after all holds have drained."""
        if outcome.is_drained and self._has_evaluated_drained:
            return
        result = drained_today(self._instance, self._assets.group)
        if result.passed or not outcome.is_drained:
            self._evaluate(result, DRAINED_CHECK, self._assets.group)
        self._has_evaluated_drained = result.passed

    def _evaluate(self, result: dg.AssetCheckResult, check: str, asset: dg.AssetKey) -> None:
        self._instance.report_runless_asset_event(as_evaluation(result, check, asset))

    def directives(self) -> tuple[Directive, ...]:
        """Return the directives of the group, oldest first, and then its retries.

        Only every second call reads the retries, because an idle member must seldom query Dagster's
        storage.
        """
        if self._reads_retries:
            self._retries = self._retry_store.read()
        self._reads_retries = not self._reads_retries
        return (*self._directives.read(), *self._retries)

    def show_stopped(self, standing: GroupState, errors: Mapping[TopicPartition, RunError]) -> None:
        """Report the stopped, paused and missing partitions of the group to the check."""
        self._evaluate(stopped_result(standing, errors), STOPPED_CHECK, self._assets.offsets)

    def shown_stops(self) -> ShownStops:
        """Return the stops that the check of the group shows."""
        return shown_stops(self._instance, self._assets.offsets)

    def show_lag(self, lag: GroupLag, limit: LagLimit) -> None:
        """Observe the lag, and evaluate the check if its result differs from the shown one.

        Every evaluation may send an alert. The last evaluation may be by another member or a user.
        """
        self._instance.report_runless_asset_event(lag_observation(lag, self._assets.lag))
        if not limit:
            return
        last = last_evaluation(self._instance, LAG_CHECK, self._assets.lag)
        if last is None or last.passed is bool(limit.exceeded(lag)):
            self._evaluate(lag_result(lag, limit), LAG_CHECK, self._assets.lag)

    def show_letters(self, letters: OpenLetters) -> None:
        """Observe the open dead letters, and evaluate the check if its result has changed."""
        key = self._assets.letters
        self._instance.report_runless_asset_event(letters_observation(letters, key))
        last = last_evaluation(self._instance, LETTERS_CHECK, key)
        if last is None or last.passed is bool(letters.letters):
            self._evaluate(letters_result(letters), LETTERS_CHECK, key)

    def record_joined(self) -> None:
        """Record that this process has joined. The event also notifies the former process."""
        if self._settings:
            GroupSettings(self._instance, self._assets.settings_name).keep(self._settings)
        self._observe("joined", f"{self._host.location} joined the group", {})
        for storage_id, metadata in self._observed(limit=_EVENTS_READ):
            if metadata.get("incarnation") == self._host.incarnation:
                self._newest_event = storage_id
                return

    def record_assigned(self, partitions: Iterable[TopicPartition], member_id: str) -> None:
        """Record an assignment, and the member's id in Kafka."""
        self._observe(
            "assigned",
            f"{self._host.location} was assigned {names_of(partitions)}",
            {"partitions": _json(partitions), "member_id": member_id},
        )

    def assigned(self) -> Iterator[RecordedAssignment]:
        """Yield the recent assignments, newest first."""
        for _, metadata in self._observed(limit=_ASSIGNMENTS_READ):
            if metadata.get("event") == "assigned":
                yield RecordedAssignment(
                    str(metadata.get("member_id")),
                    member_name(metadata),
                    str(metadata.get("incarnation")),
                    frozenset(parse_listed(metadata.get("partitions"))),
                    is_run="member_run" in metadata,
                )

    def record_directives(
        self, directives: Sequence[Directive], matched: Iterable[TopicPartition], text: str
    ) -> None:
        """Record directives that an operator has issued together."""
        first = directives[0]
        self._report(
            text,
            {
                "event": first.action.value,
                "partitions": _json(matched),
                "selectors": dg.MetadataValue.json([one.partitions for one in directives]),
                "by": first.by,
                "reason": first.reason,
                "given_at": dg.MetadataValue.timestamp(first.at),
            },
        )

    def record_moves(self, moves: Collection[Move], *, by: str, reason: str) -> None:
        """Record that an operator has moved committed offsets."""
        partitions = [move.partition for move in moves]
        why = f": {reason}" if reason else ""
        self._observe(
            "reset",
            f"{by or 'an operator'} moved the committed offsets of {names_of(partitions)}{why}",
            {
                "partitions": _json(partitions),
                "moves": dg.MetadataValue.json(
                    {str(move.partition): [move.before, move.stored.offset] for move in moves}
                ),
                "by": by,
                "reason": reason,
            },
        )

    def record_discarded(self, letters: Collection[Letter], *, by: str, why: str) -> None:
        """Record that an operator has discarded dead letters."""
        partitions = sorted({letter.range.topic_partition for letter in letters})
        self._observe(
            "letters_discarded",
            f"{by} discarded {len(letters)} dead letter{'s' * (len(letters) != 1)} of "
            f"{names_of(partitions)}: {why}",
            {
                "partitions": _json(partitions),
                "letters": len(letters),
                "keys": dg.MetadataValue.json(
                    [letter.key for letter in islice(letters, _MOST_KEYS)]
                ),
                "by": by,
                "reason": why,
            },
        )

    def record_rerun(
        self, event: str, rerun: Rerun, what: str, ranges: Iterable[OffsetRange] = ()
    ) -> None:
        """Record an event of a rerun.

        Args:
            event: `rerun`, `rerun_done` or `rerun_cancelled`.
            rerun: The rerun.
            what: A description of the event.
            ranges: The ranges of the event, if known.
        """
        partitions = sorted({range_.topic_partition for range_ in ranges})
        self._observe(
            event,
            f"{rerun}: {what}" + (f" of {names_of(partitions)}" if partitions else ""),
            {"partitions": _json(partitions), "runs": rerun.batches, **_rerun_metadata(rerun)},
        )

    def record_reprocessed(self, batch: RerunBatch, run_id: str) -> None:
        """Record an observation on each partition whose ranges were reprocessed; not a commit."""
        of: dict[TopicPartition, list[OffsetRange]] = {}
        for range_ in batch.ranges:
            of.setdefault(range_.topic_partition, []).append(range_)
        for partition, ranges in of.items():
            self._instance.report_runless_asset_event(
                dg.AssetObservation(
                    asset_key=self._assets.offsets,
                    partition=str(partition),
                    description=f"processed again by {batch.rerun}",
                    metadata={
                        "event": "reprocessed",
                        "ranges": dg.MetadataValue.md(
                            "\n".join(f"- `{range_}`" for range_ in ranges)
                        ),
                        "offsets": sum(map(len, ranges)),
                        "run": dg.MetadataValue.dagster_run(run_id),
                        "batch": batch.batch_id,
                        **_rerun_metadata(batch.rerun),
                    },
                )
            )

    def record_left(self, reason: str) -> None:
        """Record that this process has left."""
        self._observe("left", f"{self._host.location} left the group: {reason}", {"reason": reason})

    def leave_request(self) -> LeaveRequested | None:
        """Return a request to leave if a newer process of the same sensor has joined."""
        newer = self._successor()
        if newer is None:
            return None
        return LeaveRequested(
            f"a newer process of this code location has taken over ({newer})", has_successor=True
        )

    def _successor(self) -> str | None:
        if self._newest_event is None:
            # The storage was unavailable when this process joined. Without the position of its
            # event, older processes would count as newer ones.
            self.record_joined()
            return None
        own = ("joined", self._host.location, self._host.sensor)
        for storage_id, metadata in self._observed(
            limit=_EVENTS_READ, after=self._newest_event, ascending=True
        ):
            event = (metadata.get("event"), metadata.get("code_location"), metadata.get("sensor"))
            if event == own and metadata.get("incarnation") != self._host.incarnation:
                return str(metadata.get("incarnation"))
            # Only now: the answer about a successor may be dropped because it came late.
            self._newest_event = storage_id
        return None

    def _observed(
        self, *, limit: int, after: int | None = None, ascending: bool = False
    ) -> Iterator[tuple[int, dict[str, object]]]:
        records = self._instance.fetch_observations(
            dg.AssetRecordsFilter(asset_key=self._assets.group, after_storage_id=after),
            limit=limit,
            ascending=ascending,
        ).records
        for record in records:
            if record.asset_observation is not None:
                metadata = record.asset_observation.metadata
                yield record.storage_id, {name: value.value for name, value in metadata.items()}

    def _observe(self, event: str, description: str, metadata: Mapping[str, Any]) -> None:
        """Report an event of this process on the group asset."""
        full = {
            "event": event,
            **metadata,
            **self._host.names,
            "incarnation": self._host.incarnation,
        }
        if self._host.run_id:
            full["member_run"] = dg.MetadataValue.dagster_run(self._host.run_id)
        self._report(description, full)

    def _report(self, description: str, metadata: Mapping[str, Any]) -> None:
        known = self._history.read()
        now = {
            name: value.value if isinstance(value, dg.MetadataValue) else value
            for name, value in metadata.items()
        }
        event = record_in(description, now, time.time())
        self._report_tables(
            description, [*known.values(), *((event,) if event is not None else ())], metadata
        )
        history = self._history.read() if event is not None else known
        if self._is_overtaken(known, history):
            text = "corrects the tables: two members reported at the same time"
            corrected = {name: value for name, value in metadata.items() if name in _IDENTITY}
            self._report_tables(text, history.values(), {**corrected, "event": "corrected"})

    def _is_overtaken(
        self, known: Mapping[int, MemberRecord], history: Mapping[int, MemberRecord]
    ) -> bool:
        """Whether another member has reported just before the last event, which does not show it.

        Of two members that report at the same time, the one with the later event notices.
        """
        new = {at: one.member for at, one in history.items() if at not in known}
        own = max((at for at, member in new.items() if member == self._host.incarnation), default=0)
        return any(at < own and member != self._host.incarnation for at, member in new.items())

    def _report_tables(
        self, description: str, history: Iterable[MemberRecord], metadata: Mapping[str, Any]
    ) -> None:
        self._instance.report_runless_asset_event(
            dg.AssetObservation(
                asset_key=self._assets.group,
                description=description,
                metadata={"what": description, **tables_of(history), **metadata},
            )
        )


def _time_of(commit: RecordCommit) -> float | None:
    """Return the time of a commit in seconds since 1970, or None if it is recorded at once."""
    if commit.committed_at is None:
        return None
    age_s = time.monotonic() - commit.committed_at
    return time.time() - age_s if commit.joined or age_s >= _RECORDED_AT_ONCE_S else None


def _json(partitions: Iterable[TopicPartition]) -> dg.JsonMetadataValue:
    return dg.MetadataValue.json(listed(partitions))


def _rerun_metadata(rerun: Rerun) -> dict[str, Any]:
    return {
        "rerun": rerun.rerun_id,
        "by": rerun.by,
        "reason": rerun.reason,
        "asked_at": dg.MetadataValue.timestamp(rerun.at),
    }
