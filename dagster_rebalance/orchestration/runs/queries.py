"""The run ledger: Dagster's runs, as the core sees them, and what a member does to them.

Looks runs up by one tag only: two tags at once took 11 s on SQLite with 10,000 runs, one takes
milliseconds.
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
from dagster_rebalance.core.model.printable import one_line, shown
from dagster_rebalance.core.model.run import LIVE, WORKING, RunSeen, RunState
from dagster_rebalance.core.runs.failed_attempt import with_error
from dagster_rebalance.orchestration.runs.coverage import Coverage
from dagster_rebalance.orchestration.runs.own_jobs import JobName, OwnJobs
from dagster_rebalance.orchestration.runs.process import is_gone, kill
from dagster_rebalance.orchestration.storage.abandoned_claims import AbandonedClaims, streamed
from dagster_rebalance.orchestration.storage.failure_notes import FailureNotes, text_of_event
from dagster_rebalance.orchestration.storage.heartbeats import (
    Heartbeats,
    partitions_in,
    process_in,
    timeout_in,
)
from dagster_rebalance.orchestration.storage.range_owners import RangeOwners
from dagster_rebalance.orchestration.storage.run_events import (
    RunEvent,
    record_run_event,
    run_events_of,
)
from dagster_rebalance.orchestration.storage.run_tags import (
    ATTEMPT_TAG,
    BATCH_TAG,
    GROUP_TAG,
    MOST_REFUSAL_CHARACTERS,
    OLD_HEARTBEAT_TAG,
    OLD_TAKEN_BACK_TAG,
    REFUSAL_TAG,
    REFUSED_TAG,
    STREAM_TAG,
    VERSION_TAG,
    ranges_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.runs.stream_batch import Outcome

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
_OF_CODE_SERVER = "DagsterUserCode"
"""How the names of errors begin that Dagster raises for a code server; Dagster exports none."""
_UNSURE = {dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
"""Others than the process of a run write these, too."""
_ENDED = {*_UNSURE, dg.DagsterRunStatus.SUCCESS}
_FINAL = {RunEvent.REFUSED, RunEvent.OVER}
_WILL_RETRY_TAG = "dagster/will_retry"
_RETRY_NUMBER_TAG = "dagster/retry_number"
"""Of runs that Dagster executed again by itself. It leaves the tag out when a person executes one
of them again."""
_NUMBER = re.compile("[0-9]{1,12}")
_BATCHES_PER_QUERY = 100
_STOP_AGAIN_S = 5.0
"""How soon a launcher that could not stop a run is asked again; it adds to the run's log each
time."""
_STOPS_KEPT = 1_000
_MARKS_KEPT = 20_000
"""Of runs that are over, so that a look asks only for the marks of new ones: a stopped range gets
a run every few minutes, for days."""
_LONGEST_SILENCE = timedelta(days=2)
RETRY_PATIENCE_S = 300.0
"""How long a failed run that Dagster announced to retry counts as live: a retry that never comes
must not stall a partition."""


class RunLedger:
    """The runs of one group in one Dagster instance.

    Args:
        instance: Dagster.
        group_id: The group.
        own_job: The job of the member that looks; None for who is no member.
        stop_work: Stops the work of a run that may outlive its process, on Spark or elsewhere.
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
        self._signs = Heartbeats(instance)
        self._notes = RangeOwners(instance)
        self._left = AbandonedClaims(instance)
        self._failures = FailureNotes(instance, group_id)
        self._errors: OrderedDict[str, str] = OrderedDict()
        self._noted: dict[str, list[Claimed]] = {}
        self._final_marks: OrderedDict[str, frozenset[RunEvent]] = OrderedDict()
        self._ask_again_at: OrderedDict[str, float] = OrderedDict()
        self._own_jobs = OwnJobs(instance, group_id, own_job)
        self._coverage = Coverage(instance)

    def read(
        self, batch_ids: Iterable[str], *, live_too: bool = False, claims: Iterable[Claimed] = ()
    ) -> tuple[RunSeen, ...]:
        """All runs of the batches, and all live runs of the group if `live_too`; oldest first.

        Other groups and jobs do not count.

        After them come those that were deleted and may be at work on one of `claims`.
        """
        self._own_jobs.add_mine()
        wanted = sorted(batch_ids)
        records = [
            record
            for start in range(0, len(wanted), _BATCHES_PER_QUERY)
            for record in self._instance.get_run_records(
                dg.RunsFilter(tags={BATCH_TAG: wanted[start : start + _BATCHES_PER_QUERY]}),
                ascending=True,
            )
        ]
        if live_too:
            # Not by the tag as well: that reads all runs that the group ever had, while there are
            # few live ones at any time.
            records += self._instance.get_run_records(
                dg.RunsFilter(statuses=LIVE_STATUSES), ascending=True
            )
        unique = {
            record.dagster_run.run_id: record
            for record in records
            if self._counts(record.dagster_run)
        }
        retried = {record.dagster_run.parent_run_id for record in unique.values()}
        ordered = sorted(unique.values(), key=lambda record: record.storage_id)
        # The status of a run was read before its marks and its signs: a run that ended without them
        # looks later whether it may work.
        marks = {
            run_id: self._marks(run_id)
            for run_id, record in unique.items()
            if record.dagster_run.status in _ENDED
        }
        for run_id, known in marks.items():
            if known & _FINAL or unique[run_id].dagster_run.status is dg.DagsterRunStatus.SUCCESS:
                self._final_marks[run_id] = known
                self._final_marks.move_to_end(run_id)
        while len(self._final_marks) > _MARKS_KEPT:
            self._final_marks.popitem(last=False)
        watched = {
            run_id: record.storage_id
            for run_id, record in unique.items()
            if record.dagster_run.status in _AT_WORK
            or (run_id in marks and run_id not in self._final_marks)
        }
        signs = self._signs.read(watched)
        found = [
            (
                record.dagster_run,
                self._seen(
                    record,
                    is_retried=record.dagster_run.run_id in retried,
                    marks=marks.get(record.dagster_run.run_id, frozenset()),
                    sign=signs.get(record.dagster_run.run_id, ""),
                ),
            )
            for record in ordered
        ]
        seen = tuple(self._coverage.added(found))
        claimed = tuple(claims)
        return (
            *self._streams(claimed),  # a run that a sensor requested for such a batch came later
            *seen,
            *self._deleted(claimed, {record.dagster_run.run_id for record in records}),
        )

    def _streams(self, claims: Iterable[Claimed]) -> Iterable[RunSeen]:
        """The streaming runs that have made claims, once for each batch."""
        batches = streamed(claims)
        wanted = {batch.run_id for batch in batches.values()}
        if not wanted:
            return
        records = self._instance.get_run_records(dg.RunsFilter(run_ids=sorted(wanted)))
        runs = {record.dagster_run.run_id: self._seen_alone(record) for record in records}
        outcomes, begun = self._left.read(batches), self._left.begun(wanted)
        failed = self._failures.read(range_ for _, range_ in batches)
        for claim, batch in batches.items():
            run = runs.get(batch.run_id) or self._deleted_stream(batch.run_id)
            at = begun.get(claim[0])
            run = replace(run, works_for_s=None if at is None else max(0.0, time.time() - at))
            seen = batch.seen((claim[1],), run, outcomes.get(claim))
            yield from with_error(seen, failed.get(claim[1]))

    def streams(self, records: Iterable[dg.RunRecord]) -> tuple[RunSeen, ...]:
        """Streaming runs that Dagster has, whatever they claim."""
        return tuple(map(self._seen_alone, records))

    def written_off(self) -> tuple[RunSeen, ...]:
        """The runs of the group that ended in Dagster, and whose process has not said so.

        They are found by the group and their marks, whatever they have claimed. Only those that
        ended in the last two days are looked at: any other was silent for long enough.
        """
        # In UTC, and Postgres may keep the time of another zone.
        since = datetime.now(timezone.utc) - _LONGEST_SILENCE
        records = self._instance.get_run_records(
            dg.RunsFilter(
                statuses=list(_UNSURE), tags={GROUP_TAG: self._group_id}, updated_after=since
            ),
            ascending=True,
        )
        seen = [self._seen_alone(r) for r in records if self._own_jobs.have(r.dagster_run)]
        return tuple(
            run
            for run in seen
            if not run.is_over and RunEvent.FINISHED not in self._marks(run.run_id)
        )

    def _seen_alone(self, record: dg.RunRecord) -> RunSeen:
        run = record.dagster_run
        marks = self._marks(run.run_id) if run.status in _ENDED else frozenset()
        signs = self._signs.read({run.run_id: record.storage_id})
        return self._seen(record, is_retried=True, marks=marks, sign=signs.get(run.run_id, ""))

    def _deleted_stream(self, run_id: str) -> RunSeen:
        number = self._left.number(run_id)
        sign = "" if number is None else self._signs.read({run_id: number}).get(run_id, "")
        if not sign:  # nothing is known of it any more
            return RunSeen(run_id, "", (), RunState.FAILED)
        return RunSeen(
            run_id,
            "",
            (),
            RunState.DELETED,
            heartbeat=sign,
            heartbeat_timeout_s=timeout_in(sign),
            may_work_on=partitions_in(sign),
            is_gone=is_gone(process_in(sign), run_id),
            is_over=False,
        )

    def tell(self, outcomes: Mapping[Claimed, Outcome]) -> None:
        """Tell whoever finds these claims how the work on them ended."""
        self._left.tell(outcomes)

    def tell_age(self, run_id: str, batch_id: str, seconds: float) -> None:
        """Tell for how long a streaming run has worked on a batch."""
        self._left.tell_begun(run_id, batch_id, time.time() - seconds)

    def _deleted(self, claims: Iterable[Claimed], known: Collection[str]) -> Iterable[RunSeen]:
        """The runs that have noted their work on claims, and are not in Dagster any more."""
        notes = {
            claim: note
            for claim, note in self._notes.read(claims).items()
            if note.run_id not in known
        }
        gone = {
            note.run_id: note
            for note in notes.values()
            if self._instance.get_run_by_id(note.run_id) is None
        }
        self._noted |= {
            run_id: [claim for claim, note in notes.items() if note.run_id == run_id]
            for run_id in gone
        }
        signs = self._signs.read({run_id: note.number for run_id, note in gone.items()})
        for run_id, note in gone.items():
            sign = signs.get(run_id, "")
            yield RunSeen(
                run_id=run_id,
                batch_id=self._noted[run_id][0][0],
                ranges=tuple(sorted(range_ for _, range_ in self._noted[run_id])),
                state=RunState.DELETED,
                heartbeat=sign or "its place was taken by another run",
                heartbeat_timeout_s=timeout_in(sign),
                is_gone=note.is_finished or is_gone(process_in(sign), run_id),
                is_over=False,
            )

    def _counts(self, run: dg.DagsterRun) -> bool:
        return run.tags.get(GROUP_TAG) == self._group_id and self._own_jobs.have(run)

    def _marks(self, run_id: str) -> frozenset[RunEvent]:
        """The marks of a run that ended in Dagster; nobody adds any to one that is over."""
        known = self._final_marks.get(run_id)
        return run_events_of(self._instance, run_id) if known is None else known

    def why_failed(self, run_id: str, batch_id: str) -> str:  # noqa: ARG002 - a run has one batch
        """Return the error that a run failed with, and the causes of that error.

        The text is as Dagster has noted it, without stack traces.
        """
        entry = self._failure(run_id)
        event = entry.dagster_event if entry else None
        if event is None:
            return "Dagster has no event of its failure"
        # A run that was marked as failed from outside has a message, and no data.
        error = event.job_failure_data.error if event.event_specific_data else None
        messages = [] if error else [event.message or "Dagster noted no reason"]
        while error is not None:
            messages.append(error.message.strip())
            error = error.cause
        return shown("\ncaused by: ".join(messages))

    def cancel(self, run_id: str, *, only_unstarted: bool = False) -> None:
        """Cancel a run, and mark it first, so that it does not count as a failed attempt.

        A launcher may cancel a run that is being launched, by deleting a pod that waits for its
        node for example. Dagster's default launcher is not asked: the process of the run sees the
        request among its marks, and interrupts itself. That launcher waits for the process while it
        holds a lock of its code server, and no run starts in that time.

        Args:
            run_id: The run.
            only_unstarted: Whether a run that has started is left alone.

        Raises:
            ConfigurationError: The launcher could not.
            DagsterRebalanceError: The code server of the launcher did not take the request.
        """
        instance = self._instance
        run = instance.get_run_by_id(run_id)
        if run is None or STREAM_TAG in run.tags:  # a streaming run works on what others own, too
            return
        if not self._may_cancel(run, only_unstarted=only_unstarted):
            return
        if (
            run.status is not dg.DagsterRunStatus.CANCELING
            and RunEvent.TAKEN_BACK not in run_events_of(instance, run_id)
        ):
            record_run_event(instance, run, RunEvent.TAKEN_BACK)
            run = instance.get_run_by_id(
                run_id
            )  # a write may take its time, and the run begin meanwhile
            if run is None or not self._may_cancel(run, only_unstarted=only_unstarted):
                return
        if run.status is dg.DagsterRunStatus.NOT_STARTED:
            instance.report_run_canceled(
                run
            )  # it was never submitted, so no queue and no launcher knows it
            return
        if self._is_launched_by_default and run.status in _AT_WORK:
            self._ask_process(run)
            return
        self._note_asked(run_id, again_at=time.monotonic() + _STOP_AGAIN_S)
        if self._ask_launcher(run_id):
            self._note_asked(run_id, again_at=float("inf"))
            return
        now = instance.get_run_by_id(run_id)
        if now is not None and not now.is_finished:
            msg = (
                "Dagster's launcher could not stop it; the last events of the run say why. On "
                "Kubernetes the service account "
                "of the code server needs the right to delete jobs"
            )
            raise ConfigurationError(msg)

    def _ask_launcher(self, run_id: str) -> bool:
        try:
            return self._instance.run_coordinator.cancel_run(run_id)
        except Exception as error:
            if not type(error).__name__.startswith(_OF_CODE_SERVER):
                raise
            reason = one_line(str(error).partition("\n")[0])  # the rest is a stack trace
            msg = (
                "its code server was reloaded, or does not answer in time; the member asks again "
                f"({reason})"
            )
            raise DagsterRebalanceError(msg) from error

    @property
    def _is_launched_by_default(self) -> bool:
        return isinstance(self._instance.run_launcher, dg.DefaultRunLauncher)

    def _ask_process(self, run: dg.DagsterRun) -> None:
        if RunEvent.STOP not in run_events_of(self._instance, run.run_id):
            record_run_event(self._instance, run, RunEvent.STOP)
        now = self._instance.get_run_by_id(run.run_id)
        # Dagster would show a run that has ended since as canceling, for ever.
        if now is not None and now.status in _AT_WORK - {dg.DagsterRunStatus.CANCELING}:
            self._instance.report_run_canceling(now)
        self._note_asked(run.run_id, again_at=float("inf"))

    def _may_cancel(self, run: dg.DagsterRun, *, only_unstarted: bool) -> bool:
        """Whether to ask for the end of a run.

        Launchers show it as canceling first: it is one only once they have asked its process.
        """
        match run.status:
            case dg.DagsterRunStatus.STARTING:
                return not self._is_launched_by_default
            case dg.DagsterRunStatus.STARTED:
                return not only_unstarted
            case dg.DagsterRunStatus.CANCELING:
                return not only_unstarted and time.monotonic() >= self._ask_again_at.get(
                    run.run_id, 0.0
                )
            case _:
                return not run.is_finished

    def _note_asked(self, run_id: str, *, again_at: float) -> None:
        self._ask_again_at[run_id] = again_at
        if len(self._ask_again_at) > _STOPS_KEPT:
            self._ask_again_at.popitem(last=False)

    def end_dead(self, run_id: str, sign: str) -> bool:
        """End a run whose process is gone or silent.

        The process ends first, where this machine has it, then its work elsewhere, and at last the
        run in Dagster. So nothing of the run is left when its batch is requested again.

        Args:
            run_id: The run.
            sign: The last sign of life that was seen of it; empty if it has given none.

        Returns:
            Whether nothing of it works any more. One that has given another sign meanwhile lives.
            If it gave its first sign before this has ended it in Dagster, it may be at work, and
            stops when it finds that end; if later, it looks after its sign whether it may work, and
            finds the end then. One that had given none, and is not in Dagster any more, may have
            begun and been deleted since: the next look finds it by its note.

        Raises:
            Exception: Whatever stopping that work raises; it may go on, so the run is not over yet.
        """
        if self._has_given_another(run_id, sign):
            return False
        self._end_process(run_id, sign)
        if self._stop_work is not None:
            self._stop_work(run_id)
        run = self._instance.get_run_by_id(run_id)
        if run is None:
            self._notes.erase(run_id, self._noted.get(run_id, ()))
            self._left.forget(run_id)
        self._free_slots(run_id)
        if run is None or run.status is dg.DagsterRunStatus.SUCCESS:
            return True
        if not run.is_finished:  # else it ended meanwhile: what it says of itself stands
            self._instance.report_run_failed(
                run,
                "dagster_rebalance: the process of this run gave no sign of life; its batch is "
                "requested again",
            )
        if self._has_given_another(run_id, sign):
            return False
        record_run_event(self._instance, run, RunEvent.OVER)
        return True

    def _free_slots(self, run_id: str) -> None:
        """Free the slots of pools that a dead run holds.

        Dagster frees them when a step ends in its process, and of a killed run only with
        `free_slots_after_run_end_seconds`. Until then its next attempt waits for the slot.
        """
        storage = self._instance.event_log_storage
        if storage.supports_global_concurrency_limits:
            storage.free_concurrency_slots_for_run(run_id)

    def _end_process(self, run_id: str, sign: str) -> None:
        """End the process of a run that gives no sign of life.

        Dagster's default launcher is not asked, as in `cancel`: a process that is killed or frozen
        never answers, so no run of its code location would start again.
        """
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return  # a process that is about to end by itself must not be killed
        if self._is_launched_by_default:
            kill(process_in(sign))
            return
        try:
            self._instance.run_launcher.terminate(run_id)
        except Exception:
            logger.info(
                "the launcher could not end run %s, whose process gives no sign of life",
                run_id,
                exc_info=True,
            )

    def _has_given_another(self, run_id: str, sign: str) -> bool:
        """Tell whether a run has given another sign, or may have.

        A run that had given none may have begun and been deleted since.
        """
        record = self._instance.get_run_record_by_id(run_id)
        number = self._left.number(run_id) if record is None else record.storage_id
        if number is None:
            return not sign and run_id not in self._noted
        return self._signs.read({run_id: number}).get(run_id, sign) != sign

    def _seen(
        self, record: dg.RunRecord, *, is_retried: bool, marks: frozenset[RunEvent], sign: str
    ) -> RunSeen:
        run = record.dagster_run
        batch_id = run.tags.get(BATCH_TAG, "")
        state = _STATES[run.status]
        old_sign = _old_sign(record)
        has_begun = RunEvent.BEGAN in marks or old_sign != ""
        return RunSeen(
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
            is_refused=RunEvent.REFUSED in marks or run.tags.get(REFUSED_TAG) == run.run_id,
            is_taken_back=RunEvent.TAKEN_BACK in marks
            or run.tags.get(OLD_TAKEN_BACK_TAG) == run.run_id,
            is_interrupted=RunEvent.INTERRUPTED in marks,
            heartbeat=sign or old_sign,
            heartbeat_timeout_s=timeout_in(sign),
            may_work_on=partitions_in(sign),
            is_gone=RunEvent.FINISHED in marks
            or (sign != "" and is_gone(process_in(sign), run.run_id)),
            is_written_off=RunEvent.OVER in marks,
            is_over=run.status not in _UNSURE or bool(marks & _FINAL) or not has_begun,
            refusal=one_line(run.tags.get(REFUSAL_TAG, ""))[:MOST_REFUSAL_CHARACTERS],
            ended_at=record.end_time if run.status in _ENDED else None,
            works_for_s=_age_s(record) if run.status in _AT_WORK else None,
            code_version=run.tags.get(VERSION_TAG, ""),
            error=self._error(run) if RunEvent.REFUSED not in marks else "",
        )

    def _error(self, run: dg.DagsterRun) -> str:
        """Return what a run has failed with, in one line; empty where it has not failed."""
        if run.status is not dg.DagsterRunStatus.FAILURE:
            return ""
        if run.run_id not in self._errors:
            self._errors[run.run_id] = text_of_event(self._failure(run.run_id))
            if len(self._errors) > _MARKS_KEPT:
                self._errors.popitem(last=False)
        return self._errors[run.run_id]

    def _failure(self, run_id: str) -> dg.EventLogEntry | None:
        entries = self._instance.all_logs(run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
        return entries[-1] if entries else None

    def _will_be_retried(self, record: dg.RunRecord) -> bool:
        """Whether Dagster is about to retry a failed run.

        It says so 20 to 30 ms after the failure: until then, assume it.

        In Dagster+ the setting is one of the deployment, which user code cannot read; there its tag
        alone tells.
        """
        default = "true" if self._instance.run_retries_enabled else "false"
        if record.dagster_run.tags.get(_WILL_RETRY_TAG, default).lower() != "true":
            return False
        # Not `update_timestamp`: Postgres keeps it in the time zone of whoever wrote it, and does
        # not say in which.
        return record.end_time is not None and time.time() - record.end_time < RETRY_PATIENCE_S


def _age_s(record: dg.RunRecord) -> float | None:
    """For how long a run is started, by the clock of its process and of this one."""
    return None if record.start_time is None else max(0.0, time.time() - record.start_time)


def _old_sign(record: dg.RunRecord) -> str:
    """Return the sign of life of a run of 0.1.0.

    The sign is empty where the tag is a copy from the run that this one executes again.
    """
    at = _number(record.dagster_run.tags.get(OLD_HEARTBEAT_TAG, ""))
    return str(at) if record.start_time is not None and at >= int(record.start_time) else ""


def _number(text: str) -> int:
    """The number in a tag; 0 when a person has spoilt it."""
    return int(text) if _NUMBER.fullmatch(text) else 0
