"""A streaming run: a Dagster run that is a member of the group and processes batch after batch.

The member lives in another thread, so membership depends on no batch. The main thread processes the
batches, because Spark and signals need it. SIGTERM (a drained node) and a cancellation in Dagster
ask the run to leave after its current batch; a batch that must not continue is interrupted.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.core.model.events import LeaveRequested
from dagster_rebalance.core.model.run_snapshot import FailureCause
from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch, batch_ids
from dagster_rebalance.core.streaming.batch_tracker import ReaderReuse
from dagster_rebalance.orchestration.batch.letters import LetterProducers
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.member.dependencies import MemberDependencies, MemberLog
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.member.mailbox import Mailbox
from dagster_rebalance.orchestration.member.opentelemetry import meter_of
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.dead_letters import DeadLetters
from dagster_rebalance.orchestration.reporting.group_settings import public_settings
from dagster_rebalance.orchestration.reporting.record_letters import RecordLetters
from dagster_rebalance.orchestration.resources.hardcoded_secrets import without_secrets
from dagster_rebalance.orchestration.resources.letter_topic import NewLetters
from dagster_rebalance.orchestration.runs import process, signals
from dagster_rebalance.orchestration.runs.external_jobs import stopping
from dagster_rebalance.orchestration.runs.heartbeat import LAST_EVENT_LIMIT_S, Heartbeat
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.dynamic_partitions import JobName
from dagster_rebalance.orchestration.storage.failure_notes import (
    FailureNotes,
    cause_of_error,
    text_of_error,
)
from dagster_rebalance.orchestration.storage.heartbeats import format_partitions
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.range_owners import StreamingRunRecords
from dagster_rebalance.orchestration.storage.run_tags import (
    STREAM_TAG,
    VERSION_TAG,
    RunEvent,
    format_range,
    record_run_event,
    run_events_of,
)
from dagster_rebalance.orchestration.streaming.reports import BatchReports
from dagster_rebalance.orchestration.streaming.worker import StreamWorker
from dagster_rebalance.spark.spark_jobs import jvm_has_died, settle_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.reporting.lag import LagLimit
    from dagster_rebalance.core.runs.retry import FailedAttempt
    from dagster_rebalance.core.streaming.batch_tracker import BegunBatch
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
    from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
    from dagster_rebalance.orchestration.runs.external_jobs import WorkStopper
    from dagster_rebalance.orchestration.streaming.asset_calls import AssetCall

logger = logging.getLogger(__name__)
_YOUNG_OBJECTS = 10_000
"""New objects after which Python collects garbage. A batch makes more than its default of 700."""
_WAIT_S = 1.0
_LOOK_S = 0.1
"""The interval of reading the log end, which delays new records."""
_IDLE_LOOK_S = 0.5
_PROGRESS_S = 600.0
"""Each summary is an event of the run, which Dagster keeps."""
_JOIN_LIMIT_S = 30.0
_RANGES_SHOWN = 20


class BatchInterruptedError(dg.DagsterExecutionInterruptedError):
    """Raised in the current batch when it must not continue.

    This is not an `Exception`, so handlers in the asset do not catch it. Dagster raises the base
    class in a cancelled run, so a Pipes client ends its job.
    """


@dataclass
class Progress:
    """The batches of a streaming run since the last summary in its log."""

    since: float
    batches: int = 0
    offsets: int = 0
    left_out: int = 0

    def __str__(self) -> str:
        took_s = max(time.monotonic() - self.since, 1e-3)
        text = f"{self.batches} batches, {self.offsets / took_s:,.0f} records/s"
        return f"{text}, {self.left_out:,} left out by `only`" if self.left_out else text


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Keep garbage collections short and rare, because no thread works during one.

    A full collection takes 0.1 s or more for the objects of Dagster alone, which live as long as
    the process. With 1,000 partitions there was one every few batches.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    if thresholds[0]:  # 0 turns collections off
        gc.set_threshold(max(_YOUNG_OBJECTS, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class StreamRun:
    """The work of one streaming run."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        kafka: KafkaConsumerResource,
        spark: KafkaSparkResource | None,
        calls: Sequence[AssetCall],
        lag_limit: LagLimit,
        *,
        stopper: WorkStopper | None = None,
    ) -> None:
        self._context = context
        self._stopper = stopper
        self._lag_limit = lag_limit
        self._kafka = kafka
        self._calls = calls
        self._spark = spark
        self._reader = kafka.reader()
        self._letter_producers = LetterProducers(kafka)
        self._logs = ReaderReuse()
        self._run = context.run
        self._mailbox = Mailbox()
        self._heartbeat = Heartbeat(
            context.instance, self._run, timeout_s=kafka.heartbeat_timeout_s
        )
        self._reports = BatchReports(
            context,
            self._heartbeat,
            partial(self._log, context.log.error),
            kafka.engine_settings(streams=True).record_every_s,
        )
        self._main = threading.current_thread()
        self._pid = os.getpid()
        self._is_at_work = False
        self._is_in_body = False
        self._is_interrupted = False
        self._is_over = False
        self._gives_up = False
        self._was_asked_to_leave = False
        self._failure: BaseException | None = None
        self._has_left = threading.Event()
        self._wake_member: Callable[[], None] | None = None
        self._instance: dg.DagsterInstance | None = None
        self._work = StreamWorker(
            self._run.run_id,
            RunLedger(
                context.instance,
                kafka.group_id,
                own_job=JobName.of(self._run),
                stop_work=stopping(spark, stopper),
            ),
            wake=self._wake,
            interrupt=self._interrupt,
            beat=self._beat,
            keep=self._keep_error,
            note=FailureNotes(context.instance, kafka.group_id).write,
            give_up=self._give_up,
            limit_s=kafka.batch_limit_s(streams=True),
            patience_s=kafka.heartbeat_timeout_s,
        )
        self._heartbeat.partitions = lambda: format_partitions(self._work.active_partitions)
        self._heartbeat.on_cancel = partial(self._ask_to_leave, "its run is cancelled")

    def work(self) -> None:
        """Process batches until the member has left; raise the failure that ended the run.

        If the run was cancelled, or other runs may take over its work, the batch is interrupted.
        """
        if self._kafka.why_not_to_join:
            raise ConfigurationError(self._kafka.why_not_to_join)
        instance = self._context.instance
        self._heartbeat.begin()
        StreamingRunRecords(instance).record_storage_id(self._run.run_id, self._heartbeat.number)
        with (
            self._heartbeat,
            self._signals(),
            signals.isolate_forks(instance),
            closing(self._reader),
            _rare_collections(),
            closing(self._letter_producers),
        ):
            if self._kafka.dead_letter_topic:  # connect in the background: it takes up to a second
                self._letter_producers.of(self._kafka.dead_letter_topic)
            member = threading.Thread(
                target=self._run_member, name=f"member of run {self._run.run_id}", daemon=True
            )
            member.start()
            try:
                self._process_batches(member)
            finally:
                self._is_over = True
                self._mailbox.send(LeaveRequested("its run ends", self._kafka.shutdown_timeout_s))
                self._wake()
                member.join(_JOIN_LIMIT_S)
                self._report_at_end(self._reports.write)
                if self._work.unreported:  # the last batch may have ended after the member left
                    self._report_at_end(partial(self._work.report, ()))
        if self._was_asked_to_leave and self._failure is None and self._is_unwanted():
            self._failure = dg.DagsterExecutionInterruptedError()
        if self._failure is not None:
            # The records are not at fault: the current batch is no failed attempt.
            record_run_event(instance, self._run, RunEvent.TAKEN_BACK)
            raise self._failure

    def _is_unwanted(self) -> bool:
        """Whether the run is no longer STARTED in Dagster, for example because it was cancelled.

        A signal alone, as on a drained node, is neither a cancellation nor a failure: the sensor
        starts the next run at once.
        """
        run = self._context.instance.get_run_by_id(self._run.run_id)
        return run is None or run.status is not dg.DagsterRunStatus.STARTED

    def _process_batches(self, member: threading.Thread) -> None:
        progress = Progress(time.monotonic())
        while member.is_alive():
            batch = self._work.next(_WAIT_S)
            self._is_at_work = batch is not None
            try:
                if batch is not None and not self._has_left.is_set():
                    if self._lost_spark(ask=False):
                        self._work.end(BatchOutcome.DROPPED)
                    else:
                        self._process(batch, progress)
            finally:
                self._is_at_work = False
            self._reports.write_due(self._work.held)
            progress = self._log_progress(progress)

    # The batch

    def _process(self, batch: BegunBatch, progress: Progress) -> None:
        ranges = [format_range(range_) for range_ in batch.ranges]
        generation = self._logs.advance(batch.logs)
        clients = "" if generation is None else f"dagster-run-{self._run.run_id}-{generation}"
        parsed = StreamBatch.parse(batch.batch_id) or StreamBatch(self._run.run_id, 0)
        given = (
            KafkaBatch(kafka=self._kafka, batch_id=batch.batch_id, ranges=ranges)
            .read_by(self._reader, clients)
            .store_letters_by(
                self._letter_producers,
                run_id=self._run.run_id,
                attempt=parsed.attempt,
                is_repeat=batch.is_repeat,
            )
        )
        outcome, error, cause = BatchOutcome.INTERRUPTED, "", FailureCause.UNKNOWN
        try:
            self._is_interrupted = False
            self._is_in_body = True
            self._call(given)
            self._is_in_body = False  # from here on the batch is done, and its results count
            outcome = BatchOutcome.SUCCEEDED
        except BatchInterruptedError:
            self._is_in_body = False
            self._log(self._context.log.warning, "batch %s was interrupted", batch.batch_id)
        # Extensions in Rust and a cancelled asyncio task raise no Exception.
        except BaseException as problem:  # whatever the user's code raises
            self._is_in_body = False  # first: an interrupt must not hit the code below
            if self._mailbox.is_abandoned:  # the run must not continue to work, and ends
                raise
            # A batch that did not end when it was interrupted, or that lost its Spark: the records
            # are not at fault.
            if self._is_interrupted or self._lost_spark():
                said = text_of_error(problem)
                self._log(self._context.log.warning, "batch %s ended with %s", batch.batch_id, said)
            else:
                outcome = BatchOutcome.FAILED
                error = without_secrets(text_of_error(problem), self._kafka)
                if self._kafka.on_failure == "bisect":  # earlier versions could not read the cause
                    cause = cause_of_error(problem)
        else:
            progress.batches += 1
            progress.offsets += given.records
            progress.left_out += given.left_out_records
            if batch.is_repeat and (warning := given.close_processed_letters()):
                self._log(self._context.log.warning, warning)
            self._reports.succeed(self._work.held)
        finally:
            self._is_in_body = False
            self._settle_spark(batch.batch_id, is_done=outcome is BatchOutcome.SUCCEEDED)
            if outcome is BatchOutcome.SUCCEEDED or self._wait_until_stopped(batch.batch_id):
                self._work.end(outcome, error, cause)

    def _keep_error(self, batch: BegunBatch, failed: FailedAttempt) -> None:
        """Show the error of a batch in Dagster, and store it for the runs that replace this run."""
        shown = ", ".join(map(str, batch.ranges[:_RANGES_SHOWN]))
        more = "" if len(batch.ranges) <= _RANGES_SHOWN else f" and {len(batch.ranges)} in all"
        text = "batch %s failed on %s%s (attempt %d): %s"
        arguments = (batch.batch_id, shown, more, failed.attempt, failed.error)
        self._log(self._context.log.error, text, *arguments)
        notes = FailureNotes(self._context.instance, self._kafka.group_id)
        self._log(lambda *_: notes.write(batch.ranges, failed), text, *arguments)

    def _lost_spark(self, *, ask: bool = True) -> bool:
        """Whether the JVM of a local Spark has died. If so, ask the member to leave."""
        if not jvm_has_died(ask=ask):
            return False
        self._ask_to_leave("the JVM of its Spark has died")
        return True

    def _call(self, batch: KafkaBatch) -> None:
        self._reports.begin()
        try:
            with signals.exit_forks_of(self._pid):  # before a child could report anything
                for call in () if batch.is_left_out() else self._calls:
                    self._call_asset(call, batch)
            self._reports.show_first()
        except Exception:
            self._is_in_body = False  # as in `_process`
            self._reports.fail()
            raise

    def _call_asset(self, call: AssetCall, batch: KafkaBatch) -> None:
        failed: list[str] = []
        for made in call(self._context, batch):
            self._check_not_interrupted()
            failed += self._reports.failed_of(self._reports.add(made, batch))
            self._check_not_interrupted()  # while it reported
        self._check_not_interrupted()
        if failed:
            msg = f"blocking checks failed: {', '.join(failed)}"
            raise dg.Failure(msg)

    def _check_not_interrupted(self) -> None:
        """Raise the interruption that an asset has caught.

        A Pipes client may catch it: dagster-databricks cancels its job and returns as if the job
        had succeeded.
        """
        signals.exit_if_fork_of(self._pid)
        if self._is_interrupted:
            raise BatchInterruptedError

    def _log(self, write: Callable[..., None], text: str, *arguments: object) -> None:
        """Write to the log of the run; if Dagster is unavailable, to the log of the process."""
        try:
            with self._heartbeat.reporting():
                write(text, *arguments)
        except Exception:
            logger.warning(text, *arguments, exc_info=True)

    def _settle_spark(self, batch_id: str, *, is_done: bool) -> None:
        try:
            settle_batch(batch_id, is_done=is_done)
            if self._spark is not None and not is_done:
                # Also jobs on records that the asset did not read through the batch.
                self._spark.interrupt_work()
        except Exception:
            logger.warning("the Spark work of %s could not be ended", batch_id, exc_info=True)

    def _wait_until_stopped(self, batch_id: str) -> bool:
        """Wait until the external work of a batch has stopped: no run may begin the batch before.

        Returns:
            False if the run had to end first. The run then fails, and the next owner waits for the
                same work.
        """
        tries, since = 0, time.monotonic()
        while self._stopper is not None:
            try:
                if not self._heartbeat.interrupted_because:  # else others stop it
                    self._stopper(self._run.run_id, since=since)
                    return True
            except Exception as error:  # noqa: BLE001 - whatever the user's code raises
                tries += 1
                if tries & (tries - 1) == 0:  # not each second for a day
                    text = (
                        "the external work of batch %s has not ended, so the batch is "
                        "not finished: %s"
                    )
                    self._log(self._context.log.warning, text, batch_id, error)
            if self._heartbeat.interrupted_because or self._has_left.is_set():
                msg = f"the external work of batch {batch_id} had not ended when its run had to end"
                self._failure = self._failure or IllegalStateError(msg)
                return False
            time.sleep(_WAIT_S)
        return True

    def _log_progress(self, progress: Progress) -> Progress:
        for note in self._mailbox.take_notes():
            self._log(self._context.log.info, "%s", note)
        if time.monotonic() - progress.since < _PROGRESS_S:
            return progress
        summary = "; ".join(self._mailbox.mail.summary)
        self._log(self._context.log.info, "%s; %s", progress, summary)
        return Progress(time.monotonic())

    # The member

    def _run_member(self) -> None:
        try:
            with self._dependencies() as dependencies:
                MemberLoop(dependencies, self._mailbox).run()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._failure = error
        finally:
            self._has_left.set()
            self._work.close()
            self._end_body()

    def _give_up(self) -> None:
        """Leave the group and end the process, because an interrupted batch does not end."""
        if not self._gives_up:
            self._gives_up = True
            reason = "the running batch was interrupted and does not end"
            self._mailbox.send(LeaveRequested(reason, 0.0))

    def _end_body(self) -> None:
        """Interrupt the current batch until it ends, because no member is left to commit it.

        An asset may catch the interruption, or wait for a thread that nothing interrupts.
        """
        self._interrupt()
        patience_s = 0.0 if self._gives_up else self._kafka.heartbeat_timeout_s
        until = time.monotonic() + patience_s
        while self._is_at_work and not self._is_over:
            if time.monotonic() > until and process.is_of_one_run():
                logger.critical("run %s does not end: its process is killed", self._run.run_id)
                self._report_at_end(self._reports.write)
                if not self._work.is_late:  # else the current batch is a failed attempt
                    self._report_at_end(
                        partial(
                            record_run_event, self._context.instance, self._run, RunEvent.TAKEN_BACK
                        )
                    )
                process.end_hard()
            time.sleep(_WAIT_S)
            self._interrupt()

    @staticmethod
    def _report_at_end(say: Callable[[], None]) -> None:
        """Report before the run ends. A storage that hangs does not block the end."""
        last_word = threading.Thread(target=say, daemon=True)
        last_word.start()
        last_word.join(LAST_EVENT_LIMIT_S)

    @contextmanager
    def _dependencies(self) -> Iterator[MemberDependencies]:
        kafka, run = self._kafka, self._run
        settings = kafka.engine_settings(streams=True).of_stream(run.run_id)
        settings = replace(
            settings,
            bounds_s=_LOOK_S,
            idle_bounds_s=_IDLE_LOOK_S,
            code_version=run.tags.get(VERSION_TAG, ""),
        )
        producer = kafka.dead_letters()
        record_letters = RecordLetters(kafka) if kafka.on_failure == "bisect" else None
        name = run.tags[STREAM_TAG]
        with (
            dg.DagsterInstance.from_ref(self._context.instance.get_ref()) as instance,
            kafka.connect() as consumer,
            closing(producer) if producer else nullcontext(),
            record_letters or nullcontext(),
            NewLetters(kafka) if kafka.dead_letter_topic else nullcontext() as letters,
        ):
            self._wake_member = consumer.wakeup
            self._instance = instance
            yield MemberDependencies(
                consumer=consumer,
                engine=Engine(
                    settings,
                    new_batch_id=batch_ids(run.run_id),
                    now=time.monotonic(),
                ),
                runs=self._work,
                work=self._work,
                dead_letters=DeadLetters(producer, kafka.group_id, record_letters)
                if producer
                else None,
                catalogue=StreamCatalogue(instance, kafka, run),
                dead_letter_topic=kafka.dead_letter_topic,
                new_letters=letters,
                topics=kafka.topics,
                lag_limit=self._lag_limit,
                log=MemberLog(
                    {"group_id": kafka.group_id, "member": name, "member_run_id": run.run_id}
                ),
                meter=meter_of(kafka.group_id, name, most_partitions=kafka.metrics_partitions),
                clock_with_suspension=process.boot_time_s,
            )

    def _beat(self) -> None:
        self._heartbeat.beat(self._instance or self._context.instance)

    def _wake(self) -> None:
        if self._wake_member is not None:
            self._wake_member()

    # The end

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if self._main is not threading.main_thread():  # only that one may handle signals
            yield
            return
        handlers = {
            signal.SIGTERM: self._on_end_signal,
            signal.SIGINT: self._on_end_signal,
            signal.SIGUSR2: self._on_interrupt,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                # An interrupt may still be on its way, and would end the process by default.
                signal.signal(number, signal.SIG_IGN if number is signal.SIGUSR2 else handler)

    def _on_end_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._heartbeat.interrupted_because:
            self._mailbox.is_abandoned = self._is_interrupted = True
            raise dg.DagsterExecutionInterruptedError
        self._ask_to_leave("its process was asked to end")

    def _ask_to_leave(self, reason: str) -> None:
        """Ask the member to leave, once.

        Not every launcher can send a signal, so the run status CANCELING counts as well.
        """
        if self._was_asked_to_leave:
            return
        self._was_asked_to_leave = True
        self._mailbox.send(LeaveRequested(reason, self._kafka.shutdown_timeout_s))
        self._wake()

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_in_body:
            self._is_interrupted = True
            if self._reports.is_storing_joined:  # `_check_not_interrupted` follows
                return
            # Once: a second interrupt must not hit the handler of the first.
            self._is_in_body = False
            raise BatchInterruptedError

    def _interrupt(self) -> None:
        is_there = self._main is threading.main_thread() and self._main.ident is not None
        if is_there and not self._is_over:
            signal.pthread_kill(self._main.ident or 0, signal.SIGUSR2)


class StreamCatalogue(Catalogue):
    """The catalogue of a streaming run, which has neither a lease nor a successor."""

    def __init__(
        self, instance: dg.DagsterInstance, kafka: KafkaConsumerResource, run: dg.DagsterRun
    ) -> None:
        origin = run.remote_job_origin
        location = origin.repository_origin.code_location_origin.location_name if origin else ""
        _, _, sensor = run.tags.get(STREAM_TAG, "").rpartition(":")
        super().__init__(
            instance,
            GroupAssets.of(kafka.group_id),
            MemberIdentity(
                f"{location or 'stream'}/{run.run_id[:8]}", sensor, run.run_id, run.run_id
            ),
            public_settings(kafka),
        )
        self._run = run
        self._has_joined = False
        self._due: list[RunEvent] = []

    def renew_lease(self) -> None:
        """Do nothing: a streaming run has no lease."""

    def release_lease(self) -> None:
        """Do nothing: a streaming run has no lease."""

    def leave_request(self) -> LeaveRequested | None:
        """Return a request to leave if the sensor has asked this run to leave."""
        self._record_due_events()
        if RunEvent.LEAVE not in run_events_of(self._instance, self._run.run_id):
            return None
        return LeaveRequested("another streaming run takes its place")

    def record_joined(self) -> None:
        """Record that the member is ready, so partitions may be assigned to it."""
        self._due.append(RunEvent.READY)
        super().record_joined()
        self._record_due_events()

    def record_assigned(self, partitions: Iterable[TopicPartition], member_id: str) -> None:
        """Record an assignment; with the first assignment, also record that the run has joined."""
        if not self._has_joined:
            self._has_joined = True
            self._due.append(RunEvent.JOINED)
        super().record_assigned(partitions, member_id)
        self._record_due_events()

    def _record_due_events(self) -> None:
        """Record run events that are not stored yet: without them, no run is replaced."""
        while self._due:
            record_run_event(self._instance, self._run, self._due[0])
            del self._due[0]
