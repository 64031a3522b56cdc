"""The catalogue shows commits, holds, members and stopped partitions in Dagster.

Commits are materialisations of the offsets asset, one for each or for several that are joined. The
asset is partitioned by topic-partition (a Dagster partition for each range would pass Dagster's
limit within days). Receipts and memberships are observations of the group asset, so that they
trigger nothing downstream. The member reports everything at once and without a run: Dagster throws
events in a sensor's result away when the tick times out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.events import LastRecorded, LeaveRequested
from dagster_rebalance.core.model.offsets import TopicPartition, named, partitions_named
from dagster_rebalance.core.reporting.group_status import RecordedAssignment
from dagster_rebalance.orchestration.reporting import lag_check as lag_asset
from dagster_rebalance.orchestration.reporting.check_helpers import as_evaluation, last_evaluation
from dagster_rebalance.orchestration.reporting.group_settings import GroupSettings
from dagster_rebalance.orchestration.reporting.history_checks import (
    DRAINED_CHECK,
    GAP_CHECK,
    drained_by_now,
    gap_result,
)
from dagster_rebalance.orchestration.reporting.member_tables import (
    History,
    member_name,
    said_in,
    tables_of,
)
from dagster_rebalance.orchestration.reporting.stopped_check import evaluation, shown_stops
from dagster_rebalance.orchestration.storage.commit_history import (
    commits_in,
    last_recorded,
    materialisation,
    newest,
)
from dagster_rebalance.orchestration.storage.dynamic_partitions import DirectiveStore
from dagster_rebalance.orchestration.storage.member_lease import MemberLease

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from dagster_rebalance.core.model.commands import RecordCommit, ShowHold
    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.model.receipt import Outcome, Receipt
    from dagster_rebalance.core.operators.reset_offsets import Move
    from dagster_rebalance.core.reporting.lag import GroupLag, GroupState, LagLimit
    from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
    from dagster_rebalance.orchestration.ports import RunError, ShownStops
    from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
    from dagster_rebalance.orchestration.storage.names import GroupAssets

_EVENTS_READ = 100
_EACH_IS_CHECKED = (
    "no gap. Each commit is compared with the one before it when it is recorded, and this check "
    "fails at the first gap"
)
_ASSIGNMENTS_READ = 1_000


class Catalogue:
    """Reports for one member.

    Args:
        instance: Where it reports.
        assets: The assets of the group.
        host: The process that the member lives in.
        settings: What others may know of the settings of the group; empty for who is no member.
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
        self._newest_event: int | None = None
        self._is_gap_check_told = self._is_drained_told = False
        self._history = History(instance, assets.group)
        self._seat = MemberLease(instance, assets, host.location, host.sensor)
        self._order_book = DirectiveStore(instance, assets.directives_name)
        self._retry_book = DirectiveStore(instance, assets.retries_name)
        self._retries: tuple[Directive, ...] = ()
        self._reads_retries = True
        self._settings = settings

    def keep_seat(self) -> None:
        """Show other processes of the code location that this one is the member, and lives."""
        self._seat.renew(self._host.incarnation)

    def give_seat_up(self) -> None:
        """Let another process of the code location join at once."""
        self._seat.release(self._host.incarnation)

    def add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Make topic-partitions known as partitions of the offsets asset."""
        keys = {str(partition) for partition in partitions} - self._known
        if keys:
            self._instance.add_dynamic_partitions(self._assets.partitions_name, sorted(keys))
            self._known |= keys

    def last_recorded(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, LastRecorded]:
        """The last recorded commit of each partition that has one."""
        return last_recorded(self._instance, self._assets.offsets, tuple(partitions))

    def record_commit(self, commit: RecordCommit) -> None:
        """Record what is committed as a materialisation, unless that was done.

        A successor may have done it, or this member before the answer was lost.
        """
        known = {
            found
            for said in newest(self._instance, self._assets.offsets, commit.range.topic_partition)
            for found in commits_in(said)
        }
        rest = commit.without(known)
        if rest is not None:
            self._record(rest)
            leaves_gap = bool(known) and max(e for _, e, _ in known) < rest.range.start
            self._tell_gaps(rest.range.topic_partition if leaves_gap else None)

    def _tell_gaps(self, leaves_gap: TopicPartition | None) -> None:
        """Evaluate the check when a commit of a partition leaves a gap, and once when none does.

        What this member finds of earlier gaps was told when they came about.
        """
        if leaves_gap or not self._is_gap_check_told:
            self._is_gap_check_told = True
            assets = self._assets
            result = gap_result(self._instance, assets.offsets, assets.group, leaves_gap)
            if result.passed:
                # It is told once, and so must not count the commits of that moment.
                result = dg.AssetCheckResult(passed=True, description=_EACH_IS_CHECKED)
            if leaves_gap or result.passed:
                self._tell(result, GAP_CHECK, self._assets.offsets)

    def _record(self, commit: RecordCommit) -> None:
        record = materialisation(commit, self._assets.offsets, self._host.location)
        if commit.is_dead_letter:
            partitions = dg.MetadataValue.json([str(commit.range.topic_partition)])
            said = {"partitions": partitions, **record.metadata}
            self._observe("dead_letter", record.description or "", said)
        self._instance.report_runless_asset_event(record)

    def record_hold(self, hold: ShowHold) -> None:
        """Record that partitions are held, and what for."""
        self._observe(
            "holding",
            str(hold),
            {
                "cause": hold.cause.value,
                "partitions": dg.MetadataValue.json([str(p) for p in hold.partitions]),
                "runs": dg.MetadataValue.json(list(hold.run_ids)),
                "released_by": dg.MetadataValue.timestamp(time.time() + hold.limit_s),
            },
        )

    def record_receipt(self, receipt: Receipt) -> None:
        """Record how a hold ended."""
        self._observe(
            "hold",
            str(receipt),
            {
                "outcome": receipt.outcome.value,
                "cause": receipt.cause.value,
                "partitions": dg.MetadataValue.json(
                    [str(partition) for partition in receipt.partitions]
                ),
                "seconds": round(receipt.seconds, 3),
                "ended_at": dg.MetadataValue.timestamp(time.time()),
                "committed": dg.MetadataValue.json(
                    {str(partition): offset for partition, offset in receipt.committed.items()}
                ),
                "runs": dg.MetadataValue.json(list(receipt.run_ids)),
                "cancelled": dg.MetadataValue.json(list(receipt.cancelled)),
                "handed_over": dg.MetadataValue.json(
                    [str(partition) for partition in receipt.handed_over]
                ),
            },
        )
        self._tell_drained(receipt.outcome)

    def _tell_drained(self, outcome: Outcome) -> None:
        """Evaluate the check when a hold did not drain, and once when all have."""
        if outcome.is_drained and self._is_drained_told:
            return
        result = drained_by_now(self._instance, self._assets.group)
        if result.passed or not outcome.is_drained:
            self._tell(result, DRAINED_CHECK, self._assets.group)
        self._is_drained_told = result.passed

    def _tell(self, result: dg.AssetCheckResult, check: str, asset: dg.AssetKey) -> None:
        self._instance.report_runless_asset_event(as_evaluation(result, check, asset))

    def orders(self) -> tuple[Directive, ...]:
        """What people have ordered for the group, oldest first, and then what is to be retried.

        Every second look reads the retries: an idle member must ask Dagster's storage seldom.
        """
        if self._reads_retries:
            self._retries = self._retry_book.read()
        self._reads_retries = not self._reads_retries
        return (*self._order_book.read(), *self._retries)

    def show_stopped(self, standing: GroupState, errors: Mapping[TopicPartition, RunError]) -> None:
        """Show which partitions and topics of the group cannot go on, with the reasons.

        The check passes when no partition is stopped, no topic is missing, and nothing is paused by
        a person.
        """
        self._instance.report_runless_asset_event(
            evaluation(standing, errors, self._assets.offsets)
        )

    def shown_stops(self) -> ShownStops:
        """What the check shows as stopped now, whoever has shown it."""
        return shown_stops(self._instance, self._assets.offsets)

    def show_lag(self, lag: GroupLag, limit: LagLimit) -> None:
        """Observe the lag; the check is evaluated when it passes and did not, or the reverse.

        An evaluation each time would alert people each time. Whoever has evaluated it last, another
        member or a person, what Dagster shows is compared.
        """
        self._instance.report_runless_asset_event(lag_asset.observation(lag, self._assets.lag))
        if not limit:
            return
        last = last_evaluation(self._instance, lag_asset.LAG_CHECK, self._assets.lag)
        if last is None or last.passed is bool(limit.exceeded(lag)):
            self._instance.report_runless_asset_event(
                lag_asset.evaluation(lag, limit, self._assets.lag)
            )

    def record_joined(self) -> None:
        """Record that this process is a member from now on.

        A predecessor of it finds that with `successor`.
        """
        if self._settings:
            GroupSettings(self._instance, self._assets.settings_name).keep(self._settings)
        self._observe("joined", f"{self._host.location} joined the group", {})
        for storage_id, said in self._observed(limit=_EVENTS_READ):
            if said.get("incarnation") == self._host.incarnation:
                self._newest_event = storage_id
                return

    def record_assigned(self, partitions: Iterable[TopicPartition], member_id: str) -> None:
        """Record what Kafka gave to the member, and the id by which Kafka knows it."""
        self._observe(
            "assigned",
            f"{self._host.location} was assigned {named(partitions)}",
            {
                "partitions": dg.MetadataValue.json([str(partition) for partition in partitions]),
                "member_id": member_id,
            },
        )

    def assigned(self) -> Iterator[RecordedAssignment]:
        """What members have recorded of their assignments of late, newest first."""
        for _, said in self._observed(limit=_ASSIGNMENTS_READ):
            if said.get("event") == "assigned":
                yield RecordedAssignment(
                    str(said.get("member_id")),
                    member_name(said),
                    str(said.get("incarnation")),
                    frozenset(partitions_named(said.get("partitions"))),
                    is_run="member_run" in said,
                )

    def record_moves(self, moves: Collection[Move], *, by: str, reason: str) -> None:
        """Record that a person has moved committed offsets."""
        partitions = [move.partition for move in moves]
        why = f": {reason}" if reason else ""
        self._observe(
            "reset",
            f"{by or 'somebody'} moved the committed offsets of {named(partitions)}{why}",
            {
                "partitions": dg.MetadataValue.json([str(partition) for partition in partitions]),
                "moves": dg.MetadataValue.json(
                    {str(move.partition): [move.before, move.stored.offset] for move in moves}
                ),
                "by": by,
                "reason": reason,
            },
        )

    def record_rerun(
        self, event: str, rerun: Rerun, what: str, ranges: Iterable[OffsetRange] = ()
    ) -> None:
        """Record what becomes of a rerun.

        Args:
            event: `rerun`, when it was asked for, `rerun_done` or `rerun_cancelled`.
            rerun: The rerun.
            what: The same in words.
            ranges: What it is about, where that is known.
        """
        partitions = sorted({range_.topic_partition for range_ in ranges})
        self._observe(
            event,
            f"{rerun}: {what}" + (f" of {named(partitions)}" if partitions else ""),
            {
                "partitions": dg.MetadataValue.json([str(partition) for partition in partitions]),
                "runs": rerun.batches,
                **_rerun_metadata(rerun),
            },
        )

    def record_reprocessed(self, batch: RerunBatch, run_id: str) -> None:
        """Observe on each partition that ranges were processed again. It is no commit."""
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
        """Record that this process is no member any more."""
        self._observe("left", f"{self._host.location} left the group: {reason}", {"reason": reason})

    def leave_wanted(self) -> LeaveRequested | None:
        """Make way for a newer process, if one joined after this one did.

        Both processes serve the same sensor of the same code location.
        """
        newer = self._successor()
        if newer is None:
            return None
        return LeaveRequested(
            f"a newer process of this code location has taken over ({newer})", has_successor=True
        )

    def _successor(self) -> str | None:
        if self._newest_event is None:
            # Storage was away when this process joined: without the place of its own event, older
            # processes would look like newer ones.
            self.record_joined()
            return None
        mine = ("joined", self._host.location, self._host.sensor)
        for storage_id, said in self._observed(
            limit=_EVENTS_READ, after=self._newest_event, ascending=True
        ):
            self._newest_event = storage_id
            if (
                said.get("event"),
                said.get("code_location"),
                said.get("sensor"),
            ) == mine and said.get("incarnation") != self._host.incarnation:
                return str(said.get("incarnation"))
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
                yield (
                    record.storage_id,
                    {
                        name: value.value
                        for name, value in record.asset_observation.metadata.items()
                    },
                )

    def _observe(self, event: str, description: str, metadata: Mapping[str, Any]) -> None:
        """Report an event of the group, what people look for first, and who says it last."""
        said = {
            "event": event,
            **metadata,
            **self._host.names,
            "incarnation": self._host.incarnation,
        }
        if self._host.run_id:
            said["member_run"] = dg.MetadataValue.dagster_run(self._host.run_id)
        self._instance.report_runless_asset_event(
            dg.AssetObservation(
                asset_key=self._assets.group,
                description=description,
                metadata={"what": description, **self._tables(description, said), **said},
            )
        )

    def _tables(self, description: str, new: Mapping[str, Any]) -> dict[str, Any]:
        """The roster of the group, with what this member says now."""
        now = {
            name: value.value if isinstance(value, dg.MetadataValue) else value
            for name, value in new.items()
        }
        said = said_in(description, now, time.time())
        return tables_of([*self._history.read(), *((said,) if said is not None else ())])


def _rerun_metadata(rerun: Rerun) -> dict[str, Any]:
    return {
        "rerun": rerun.rerun_id,
        "by": rerun.by,
        "reason": rerun.reason,
        "asked_at": dg.MetadataValue.timestamp(rerun.at),
    }
