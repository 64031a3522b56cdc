"""The run ledger: queries of Dagster's runs for the core, and a member's commands to these runs.

Runs are queried by one tag only: on SQLite with 10,000 runs, a query by two tags took 11 s, and a
query by one tag milliseconds.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.core.model.printable import escaped, one_line
from dagster_rebalance.core.model.run_snapshot import (
    LIVE,
    WORKING,
    FailureCause,
    RunSnapshot,
    RunState,
)
from dagster_rebalance.core.runs.retry import with_error
from dagster_rebalance.orchestration.runs.coverage import Coverage
from dagster_rebalance.orchestration.runs.process import is_gone, kill
from dagster_rebalance.orchestration.storage.dynamic_partitions import GroupJobs
from dagster_rebalance.orchestration.storage.failure_notes import (
    FailureNotes,
    cause_of_event,
    recorded_cause,
    text_of_event,
)
from dagster_rebalance.orchestration.storage.heartbeats import (
    Heartbeats,
    partitions_in,
    process_in,
    timeout_in,
)
from dagster_rebalance.orchestration.storage.range_owners import (
    RangeOwners,
    StreamingRunRecords,
    stream_batches,
)
from dagster_rebalance.orchestration.storage.run_tags import (
    ATTEMPT_TAG,
    BATCH_TAG,
    GROUP_TAG,
    MAX_REFUSAL_CHARACTERS,
    OLD_HEARTBEAT_TAG,
    OLD_TAKEN_BACK_TAG,
    REFUSAL_TAG,
    REFUSED_TAG,
    RERUN_TAG,
    STREAM_TAG,
    VERSION_TAG,
    RunEvent,
    ranges_in,
    record_run_event,
    run_events_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.runs.stream_batch import BatchOutcome
    from dagster_rebalance.orchestration.storage.dynamic_partitions import JobName

logger = logging.getLogger(__name__)

_STATES = {
    dg.DagsterRunStatus.NOT_STARTED: RunState.CREATED,
    dg.DagsterRunStatus.MANAGED: RunState.WAITING,
    dg.DagsterRunStatus.QUEUED: RunState.WAITING,
    dg.DagsterRunStatus.STARTING: RunState.STARTING,
    dg.DagsterRunStatus.STARTED: RunState.STARTED,
    dg.DagsterRunStatus.SUSPENDED: RunState.STARTED,
    dg.DagsterRunStatus.CANCELING: RunState.CANCELING,
    dg.DagsterRunStatus.SUCCESS: RunState.SUCCEEDED,
    dg.DagsterRunStatus.FAILURE: RunState.FAILED,
    dg.DagsterRunStatus.CANCELED: RunState.CANCELED,
}
LIVE_STATUSES = [status for status, state in _STATES.items() if state in LIVE]
_AT_WORK = {status for status, state in _STATES.items() if state in WORKING}
_LAUNCHED = [dg.DagsterRunStatus.STARTING, *_AT_WORK]
_CODE_SERVER_ERROR = "DagsterUserCode"
"""The prefix of the names of Dagster's errors about a code server; Dagster exports none."""
_UNSURE = {dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
"""Statuses that may also be set by another process than that of the run."""
_ENDED = {*_UNSURE, dg.DagsterRunStatus.SUCCESS}
_FINAL = {RunEvent.REFUSED, RunEvent.OVER}
_WILL_RETRY_TAG = "dagster/will_retry"
_RETRY_NUMBER_TAG = "dagster/retry_number"
"""A tag of Dagster's automatic retries, but not of manual re-executions of them."""
_NUMBER = re.compile("[0-9]{1,12}")
_BATCHES_PER_QUERY = 100
_REPEAT_STOP_S = 5.0
"""The delay after which a launcher that could not stop a run is asked again; each request adds to
the log of the run."""
_STOPS_KEPT = 1_000
_EVENTS_KEPT = 20_000
"""The size of the cache of events of ended runs: a stopped range has a run every few minutes."""
_LONGEST_SILENCE = timedelta(days=2)
RETRY_PATIENCE_S = 300.0
"""How long a failed run counts as live if Dagster announced a retry, which may never come."""


class RunLedger:
    """The runs of one group in one Dagster instance.

    Args:
        instance: The Dagster instance.
        group_id: The consumer group.
        own_job: The job of this member; None for read-only use.
        stop_work: Stops the Spark jobs and external work of a run whose process has ended.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        group_id: str,
        *,
        own_job: JobName | None = None,
        stop_work: Callable[[str], None] | None = None,
    ) -> None:
        self._instance = instance
        self._group_id = group_id
        self._stop_work = stop_work
        self._heartbeats = Heartbeats(instance)
        self._owners = RangeOwners(instance)
        self._streaming_runs = StreamingRunRecords(instance)
        self._failures = FailureNotes(instance, group_id)
        self._errors: OrderedDict[str, tuple[str, FailureCause]] = OrderedDict()
        self._deleted_claims: dict[str, list[Claimed]] = {}
        self._final_events: OrderedDict[str, frozenset[RunEvent]] = OrderedDict()
        self._repeat_stop_at: OrderedDict[str, float] = OrderedDict()
        self._jobs = GroupJobs(instance, group_id, own_job)
        self._coverage = Coverage(instance)

    def read(
        self, batch_ids: Iterable[str], *, with_live: bool = False, claims: Iterable[Claimed] = ()
    ) -> tuple[RunSnapshot, ...]:
        """Return all runs of the batches, with `with_live` also all live runs of the group.

        The oldest runs come first. Runs of other groups and jobs are ignored. Deleted runs that may
        process one of `claims` are appended.
        """
        self._jobs.add_own()
        records = self._records(sorted(batch_ids), with_live=with_live)
        unique = {
            record.dagster_run.run_id: record
            for record in records
            if self._is_of_group(record.dagster_run)
        }
        retried = {record.dagster_run.parent_run_id for record in unique.values()}
        # The status of a run was read before its events and heartbeats: a run that ended without
        # them will find its end in its start check.
        events = self._events_of_ended(unique)
        watched = {
            run_id: record.storage_id
            for run_id, record in unique.items()
            if record.dagster_run.status in _AT_WORK
            or (run_id in events and run_id not in self._final_events)
        }
        heartbeats = self._heartbeats.read(watched)
        runs = [
            (
                record.dagster_run,
                self._seen(
                    record,
                    is_retried=record.dagster_run.run_id in retried,
                    events=events.get(record.dagster_run.run_id, frozenset()),
                    heartbeat=heartbeats.get(record.dagster_run.run_id, ""),
                ),
            )
            for record in sorted(unique.values(), key=lambda record: record.storage_id)
        ]
        seen = tuple(self._coverage.with_coverage(runs))
        claimed = tuple(claims)
        return (
            *self._streams(claimed),  # older than any per-batch run of the same batch
            *seen,
            *self._deleted(claimed, {record.dagster_run.run_id for record in records}),
        )

    def _records(self, batch_ids: list[str], *, with_live: bool) -> list[dg.RunRecord]:
        records = [
            record
            for start in range(0, len(batch_ids), _BATCHES_PER_QUERY)
            for record in self._instance.get_run_records(
                dg.RunsFilter(tags={BATCH_TAG: batch_ids[start : start + _BATCHES_PER_QUERY]}),
                ascending=True,
            )
        ]
        if with_live:
            # Not by the tag of the group as well: that reads all runs that the group ever had,
            # while few runs are live at any time.
            records += self._instance.get_run_records(
                dg.RunsFilter(statuses=LIVE_STATUSES), ascending=True
            )
        return records

    def _events_of_ended(
        self, records: Mapping[str, dg.RunRecord]
    ) -> dict[str, frozenset[RunEvent]]:
        events = {
            run_id: self._events(run_id)
            for run_id, record in records.items()
            if record.dagster_run.status in _ENDED
        }
        for run_id, known in events.items():
            if known & _FINAL or records[run_id].dagster_run.status is dg.DagsterRunStatus.SUCCESS:
                self._final_events[run_id] = known
                self._final_events.move_to_end(run_id)
        while len(self._final_events) > _EVENTS_KEPT:
            self._final_events.popitem(last=False)
        return events

    def _streams(self, claims: Iterable[Claimed]) -> Iterable[RunSnapshot]:
        """Yield the streaming runs that have made claims, once for each batch."""
        batches = stream_batches(claims)
        wanted = {batch.run_id for batch in batches.values()}
        if not wanted:
            return
        records = self._instance.get_run_records(dg.RunsFilter(run_ids=sorted(wanted)))
        runs = {record.dagster_run.run_id: self._seen_alone(record) for record in records}
        runs |= {run_id: self._deleted_stream(run_id) for run_id in sorted(wanted - runs.keys())}
        outcomes, begun = (
            self._streaming_runs.read(batches),
            self._streaming_runs.start_times(wanted),
        )
        failed = self._failures.read(range_ for _, range_ in batches)
        for claim, batch in batches.items():
            at = begun.get(claim[0])
            working_s = None if at is None else max(0.0, time.time() - at)
            run = replace(runs[batch.run_id], working_s=working_s)
            seen = batch.as_runs((claim[1],), run, outcomes.get(claim))
            yield from with_error(seen, failed.get(claim[1]))

    def streams(self, records: Iterable[dg.RunRecord]) -> tuple[RunSnapshot, ...]:
        """Return the snapshots of streaming runs, with any claims."""
        return tuple(map(self._seen_alone, records))

    def live_reruns(self) -> tuple[RunSnapshot, ...]:
        """Return the launched runs of reruns, also of cancelled ones."""
        self._jobs.add_own()
        records = self._instance.get_run_records(dg.RunsFilter(statuses=_LAUNCHED), ascending=True)
        return self.streams(
            record
            for record in records
            if RERUN_TAG in record.dagster_run.tags and self._is_of_group(record.dagster_run)
        )

    def written_off(self) -> tuple[RunSnapshot, ...]:
        """Return the runs of the group that ended in Dagster without FINISHED from their process.

        Only runs that ended in the last two days are read: older runs are long without a heartbeat.
        """
        # In UTC. Postgres may store times of another zone; two days cover the difference.
        since = datetime.now(timezone.utc) - _LONGEST_SILENCE
        records = self._instance.get_run_records(
            dg.RunsFilter(
                statuses=list(_UNSURE), tags={GROUP_TAG: self._group_id}, updated_after=since
            ),
            ascending=True,
        )
        seen = [self._seen_alone(r) for r in records if self._jobs.have(r.dagster_run)]
        return tuple(
            run
            for run in seen
            if not run.is_over and RunEvent.FINISHED not in self._events(run.run_id)
        )

    def _seen_alone(self, record: dg.RunRecord) -> RunSnapshot:
        run = record.dagster_run
        events = self._events(run.run_id) if run.status in _ENDED else frozenset()
        heartbeat = self._heartbeat(run.run_id, record.storage_id)
        return self._seen(record, is_retried=True, events=events, heartbeat=heartbeat)

    def _heartbeat(self, run_id: str, number: int, default: str = "") -> str:
        return self._heartbeats.read({run_id: number}).get(run_id, default)

    def _deleted_stream(self, run_id: str) -> RunSnapshot:
        number = self._streaming_runs.storage_id(run_id)
        heartbeat = "" if number is None else self._heartbeat(run_id, number)
        if not heartbeat:
            return RunSnapshot(run_id, "", (), RunState.FAILED)
        return RunSnapshot(
            run_id,
            "",
            (),
            RunState.DELETED,
            heartbeat=heartbeat,
            heartbeat_timeout_s=timeout_in(heartbeat),
            active_partitions=partitions_in(heartbeat),
            is_gone=is_gone(process_in(heartbeat), run_id),
            is_over=False,
        )

    def record_outcomes(self, outcomes: Mapping[Claimed, BatchOutcome]) -> None:
        """Record the outcomes of claims, for their next owners."""
        self._streaming_runs.record(outcomes)

    def record_age(self, run_id: str, batch_id: str, seconds: float) -> None:
        """Record for how long a streaming run has worked on a batch."""
        self._streaming_runs.record_start(run_id, batch_id, time.time() - seconds)

    def _deleted(self, claims: Iterable[Claimed], known: Collection[str]) -> Iterable[RunSnapshot]:
        """Yield the runs that are recorded as owners of claims, but are no longer in Dagster."""
        owners = {
            claim: owner
            for claim, owner in self._owners.read(claims).items()
            if owner.run_id not in known
        }
        deleted = {
            run_id: owner
            for run_id, owner in {owner.run_id: owner for owner in owners.values()}.items()
            if self._instance.get_run_by_id(run_id) is None
        }
        self._deleted_claims |= {
            run_id: [claim for claim, owner in owners.items() if owner.run_id == run_id]
            for run_id in deleted
        }
        heartbeats = self._heartbeats.read({o.run_id: o.storage_id for o in deleted.values()})
        for run_id, owner in deleted.items():
            heartbeat = heartbeats.get(run_id, "")
            yield RunSnapshot(
                run_id=run_id,
                batch_id=self._deleted_claims[run_id][0][0],
                ranges=tuple(sorted(range_ for _, range_ in self._deleted_claims[run_id])),
                state=RunState.DELETED,
                heartbeat=heartbeat or "another run has taken its slot",
                heartbeat_timeout_s=timeout_in(heartbeat),
                is_gone=owner.is_finished or is_gone(process_in(heartbeat), run_id),
                is_over=False,
            )

    def _is_of_group(self, run: dg.DagsterRun) -> bool:
        return run.tags.get(GROUP_TAG) == self._group_id and self._jobs.have(run)

    def _events(self, run_id: str) -> frozenset[RunEvent]:
        """Return the events of a run that ended in Dagster; final ones are cached."""
        known = self._final_events.get(run_id)
        return run_events_of(self._instance, run_id) if known is None else known

    def why_failed(self, run_id: str, batch_id: str) -> str:  # noqa: ARG002 - a run has one batch
        """Return the error that Dagster stored for a failed run, with causes, without traces."""
        entry = self._failure(run_id)
        event = entry.dagster_event if entry else None
        if event is None:
            return "Dagster has no event of the failure"
        # The event of a run that was reported as failed has a message, and no data.
        error = event.job_failure_data.error if event.event_specific_data else None
        messages = [] if error else [event.message or "Dagster has no reason"]
        while error is not None:
            messages.append(error.message.strip())
            error = error.cause
        return escaped("\ncaused by: ".join(messages))

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        """Cancel a run, after TAKEN_BACK is recorded, so that it is not a failed attempt.

        A launcher can cancel a run during its launch, for example by deleting a pending pod.
        Dagster's default launcher is not used: it waits for the process while it holds a lock of
        its code server, and no run starts in that time. Instead, the process reads the run event
        STOP, and interrupts itself.

        Args:
            run_id: The run.
            only_unstarted: Whether to skip a run that has started.
        """
        instance = self._instance
        run = instance.get_run_by_id(run_id)
        if run is None or STREAM_TAG in run.tags:  # a streaming run also processes other batches
            return
        if not self._may_cancel(run, only_unstarted=only_unstarted):
            return
        if (
            run.status is not dg.DagsterRunStatus.CANCELING
            and RunEvent.TAKEN_BACK not in run_events_of(instance, run_id)
        ):
            record_run_event(instance, run, RunEvent.TAKEN_BACK)
            run = instance.get_run_by_id(run_id)  # it may have started during the write
            if run is None or not self._may_cancel(run, only_unstarted=only_unstarted):
                return
        if run.status is dg.DagsterRunStatus.NOT_STARTED:
            instance.report_run_canceled(run)  # never submitted: no launcher has it
            return
        if self._is_launched_by_default and run.status in _AT_WORK:
            self._request_stop(run)
            return
        self._defer_stop(run_id, until=time.monotonic() + _REPEAT_STOP_S)
        if self._ask_launcher(run_id):
            self._defer_stop(run_id, until=float("inf"))
            return
        now = instance.get_run_by_id(run_id)
        if now is not None and not now.is_finished:
            msg = (
                "Dagster's launcher could not stop it; the last events of the run have the reason. "
                "On Kubernetes the service account of the code server needs the right to delete "
                "jobs"
            )
            raise ConfigurationError(msg)

    def _ask_launcher(self, run_id: str) -> bool:
        try:
            return self._instance.run_coordinator.cancel_run(run_id)
        except Exception as error:
            if not type(error).__name__.startswith(_CODE_SERVER_ERROR):
                raise
            reason = one_line(str(error).partition("\n")[0])  # the rest is a stack trace
            msg = (
                "its code server was reloaded, or does not answer in time; the member retries "
                f"({reason})"
            )
            raise DagsterRebalanceError(msg) from error

    @property
    def _is_launched_by_default(self) -> bool:
        return isinstance(self._instance.run_launcher, dg.DefaultRunLauncher)

    def _request_stop(self, run: dg.DagsterRun) -> None:
        if RunEvent.STOP not in run_events_of(self._instance, run.run_id):
            record_run_event(self._instance, run, RunEvent.STOP)
        now = self._instance.get_run_by_id(run.run_id)
        # Dagster would show a run that has ended since as CANCELING forever.
        if now is not None and now.status in _AT_WORK - {dg.DagsterRunStatus.CANCELING}:
            self._instance.report_run_canceling(now)
        self._defer_stop(run.run_id, until=float("inf"))

    def _may_cancel(self, run: dg.DagsterRun, *, only_unstarted: bool) -> bool:
        """Whether to request the end of a run.

        The request is repeated for a CANCELING run: a launcher sets that status before its request
        to the process, which may then fail.
        """
        match run.status:
            case dg.DagsterRunStatus.STARTING:
                return not self._is_launched_by_default
            case dg.DagsterRunStatus.STARTED:
                return not only_unstarted
            case dg.DagsterRunStatus.CANCELING:
                is_due = time.monotonic() >= self._repeat_stop_at.get(run.run_id, 0.0)
                return not only_unstarted and is_due
            case _:
                return not run.is_finished

    def _defer_stop(self, run_id: str, *, until: float) -> None:
        self._repeat_stop_at[run_id] = until
        if len(self._repeat_stop_at) > _STOPS_KEPT:
            self._repeat_stop_at.popitem(last=False)

    def end_dead(self, run_id: str, heartbeat: str) -> bool:
        """End a run whose process is gone or silent.

        The run's process ends first (if it is on this machine), then its external work, then the
        run in Dagster. So nothing of the run is left when its batch is requested again.

        Args:
            run_id: The run.
            heartbeat: The last known heartbeat of the run; empty if it has sent none.

        Returns:
            Whether nothing of the run is left. A run that has sent another heartbeat is alive. If
            the run sent its first heartbeat before it was ended in Dagster, it may work, and stops
            when it reads that end. If it sent the heartbeat later, its start check reads the end. A
            run without a heartbeat that is no longer in Dagster may have begun and been deleted:
            the next query finds it as the owner of its ranges.
        """
        if self._has_other_heartbeat(run_id, heartbeat):
            return False
        self._end_process(run_id, heartbeat)
        if self._stop_work is not None:
            self._stop_work(run_id)
        run = self._instance.get_run_by_id(run_id)
        if run is None:
            self._owners.erase(run_id, self._deleted_claims.get(run_id, ()))
            self._streaming_runs.forget(run_id)
        self._free_slots(run_id)
        if run is None or run.status is dg.DagsterRunStatus.SUCCESS:
            return True
        if not run.is_finished:  # else the run keeps its own status
            self._instance.report_run_failed(
                run,
                "dagster_rebalance: the process of this run sent no heartbeat; its batch is "
                "requested again",
            )
        if self._has_other_heartbeat(run_id, heartbeat):
            return False
        record_run_event(self._instance, run, RunEvent.OVER)
        return True

    def _free_slots(self, run_id: str) -> None:
        """Free the slots of pools that a dead run holds, for which its next attempt would wait.

        Dagster frees the slots of a killed run only with `free_slots_after_run_end_seconds`.
        """
        storage = self._instance.event_log_storage
        if storage.supports_global_concurrency_limits:
            storage.free_concurrency_slots_for_run(run_id)

    def _end_process(self, run_id: str, heartbeat: str) -> None:
        """End the process of a run without heartbeats.

        As in `cancel`, Dagster's default launcher is not used: a killed or frozen process never
        answers, so no run of its code location would start again.
        """
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return  # the process is about to exit and must not be killed
        if self._is_launched_by_default:
            kill(process_in(heartbeat))
            return
        try:
            self._instance.run_launcher.terminate(run_id)
        except Exception:
            logger.info(
                "the launcher could not end run %s, whose process sends no heartbeat",
                run_id,
                exc_info=True,
            )

    def _has_other_heartbeat(self, run_id: str, heartbeat: str) -> bool:
        """Whether a run has sent another heartbeat, or may have sent one and been deleted since."""
        record = self._instance.get_run_record_by_id(run_id)
        number = self._streaming_runs.storage_id(run_id) if record is None else record.storage_id
        if number is None:
            return not heartbeat and run_id not in self._deleted_claims
        return self._heartbeat(run_id, number, default=heartbeat) != heartbeat

    def _seen(
        self,
        record: dg.RunRecord,
        *,
        is_retried: bool,
        events: frozenset[RunEvent],
        heartbeat: str,
    ) -> RunSnapshot:
        run = record.dagster_run
        batch_id = run.tags.get(BATCH_TAG, "")
        state = _STATES[run.status]
        old_heartbeat = _old_heartbeat(record)
        has_begun = RunEvent.BEGAN in events or old_heartbeat != ""
        error, cause = (
            self._error(run) if RunEvent.REFUSED not in events else ("", FailureCause.UNKNOWN)
        )
        return RunSnapshot(
            run_id=run.run_id,
            batch_id=batch_id,
            ranges=ranges_in(run.run_config, batch_id),
            state=state,
            attempt=_number(run.tags.get(ATTEMPT_TAG, "")),
            parent_id=run.parent_run_id or "",
            is_automatic=_RETRY_NUMBER_TAG in run.tags,
            has_started=has_begun or (record.start_time is not None and run.status not in _UNSURE),
            awaits_retry=state is RunState.FAILED
            and not is_retried
            and self._will_be_retried(record),
            is_refused=RunEvent.REFUSED in events or run.tags.get(REFUSED_TAG) == run.run_id,
            is_cancelled_by_member=RunEvent.TAKEN_BACK in events
            or run.tags.get(OLD_TAKEN_BACK_TAG) == run.run_id,
            is_interrupted=RunEvent.INTERRUPTED in events,
            heartbeat=heartbeat or old_heartbeat,
            heartbeat_timeout_s=timeout_in(heartbeat),
            active_partitions=partitions_in(heartbeat),
            is_gone=RunEvent.FINISHED in events
            or (heartbeat != "" and is_gone(process_in(heartbeat), run.run_id)),
            is_written_off=RunEvent.OVER in events,
            is_over=run.status not in _UNSURE or bool(events & _FINAL) or not has_begun,
            refusal=one_line(run.tags.get(REFUSAL_TAG, ""))[:MAX_REFUSAL_CHARACTERS],
            ended_at=record.end_time if run.status in _ENDED else None,
            working_s=_age_s(record) if run.status in _AT_WORK else None,
            code_version=run.tags.get(VERSION_TAG, ""),
            error=error,
            cause=cause,
        )

    def _error(self, run: dg.DagsterRun) -> tuple[str, FailureCause]:
        """Return the error of a run, in one line, and its cause; empty if it has not failed."""
        if run.status is not dg.DagsterRunStatus.FAILURE:
            return "", FailureCause.UNKNOWN
        if run.run_id not in self._errors:
            failure = self._failure(run.run_id)
            cause = recorded_cause(run) or cause_of_event(failure)
            self._errors[run.run_id] = text_of_event(failure), cause
            if len(self._errors) > _EVENTS_KEPT:
                self._errors.popitem(last=False)
        return self._errors[run.run_id]

    def _failure(self, run_id: str) -> dg.EventLogEntry | None:
        entries = self._instance.all_logs(run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
        return entries[-1] if entries else None

    def _will_be_retried(self, record: dg.RunRecord) -> bool:
        """Whether Dagster is about to retry a failed run.

        Dagster sets the tag 20 to 30 ms after the failure. Until then, Dagster's setting for
        retries decides. In Dagster+, user code cannot read this setting, so only the tag counts.
        """
        default = "true" if self._instance.run_retries_enabled else "false"
        if record.dagster_run.tags.get(_WILL_RETRY_TAG, default).lower() != "true":
            return False
        # Not `update_timestamp`: Postgres stores it in the time zone of its writer.
        return record.end_time is not None and time.time() - record.end_time < RETRY_PATIENCE_S


def _age_s(record: dg.RunRecord) -> float | None:
    """Return the time since a run started, by the clocks of its process and of this process."""
    return None if record.start_time is None else max(0.0, time.time() - record.start_time)


def _old_heartbeat(record: dg.RunRecord) -> str:
    """Return the heartbeat of a run of 0.1.0; empty if the tag is a copy from its parent run."""
    at = _number(record.dagster_run.tags.get(OLD_HEARTBEAT_TAG, ""))
    return str(at) if record.start_time is not None and at >= int(record.start_time) else ""


def _number(text: str) -> int:
    """Return the number in a tag; 0 if a user has replaced the number by other text."""
    return int(text) if _NUMBER.fullmatch(text) else 0
