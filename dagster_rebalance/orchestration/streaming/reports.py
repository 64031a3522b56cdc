"""Reports of a streaming run to Dagster: what its assets have returned.

Dagster keeps every event, so the results of the batches within `record_every_s` share one
materialization of each asset. The first result of an asset is reported before the commit of its
batch, later ones after it: a commit waits for no report. A failed check is reported at once, a
passed one when the result changes or with the next materialization. What an asset itself reports as
an event is never joined.

If the process is killed, the results since the last materialization are not shown. Their offsets
are recorded in the offsets asset.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.orchestration.storage.key_values import is_lost_connection
from dagster_rebalance.orchestration.streaming.joined_results import JoinedResults, Result
from dagster_rebalance.orchestration.streaming.versions import Provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.orchestration.batch.resource import KafkaBatch
    from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
    from dagster_rebalance.orchestration.streaming.asset_calls import Made

logger = logging.getLogger(__name__)
_RETRY_S = 1.0
_MOST_REFUSALS = 5
_MOST_CHECKS = 5
_CHECK_EVERY_S = 60.0
"""A check that changes or fails in each batch is reported this often, after the first few."""


class CheckReports:
    """When the results of one check are reported."""

    def __init__(self) -> None:
        self.waiting: list[dg.AssetCheckEvaluation] = []
        self._shown: tuple[bool, dg.AssetCheckSeverity] | None = None
        self._allowance, self._counted_at = float(_MOST_CHECKS), float("-inf")

    def add(self, found: dg.AssetCheckEvaluation) -> None:
        """Add a result. It replaces those before it, except failed ones that are more severe."""
        kept = [one for one in self.waiting if _severity(one) > _severity(found)]
        self.waiting = [*kept, found]

    def is_urgent(self, now: float) -> bool:
        """Whether to report what waits now: it failed or differs, and not too often."""
        since_s = now - self._counted_at
        self._allowance = min(float(_MOST_CHECKS), self._allowance + since_s / _CHECK_EVERY_S)
        self._counted_at = now
        is_news = any(not one.passed or _outcome(one) != self._shown for one in self.waiting)
        return is_news and self._allowance >= 1

    def reported(self, found: dg.AssetCheckEvaluation) -> None:
        """Note that Dagster has a result."""
        self.waiting.remove(found)
        self._shown = _outcome(found)
        self._allowance -= 1


def _severity(found: dg.AssetCheckEvaluation) -> int:
    if found.passed:
        return 0
    return 2 if found.severity is dg.AssetCheckSeverity.ERROR else 1


def _outcome(found: dg.AssetCheckEvaluation) -> tuple[bool, dg.AssetCheckSeverity]:
    return found.passed, found.severity


class BatchReports:
    """The reports of one run. Only the thread that processes calls it, or the end of the run.

    Args:
        context: The context of the step.
        heartbeat: The heartbeat of the run.
        log: Writes an error to the log of the run.
        every_s: How long results are joined; with 0 each result is a materialization.
        clock: A monotonic clock.

    Attributes:
        is_storing_joined: Whether a joined result is being stored. If an interrupt broke that off,
            its batches would be shown twice or not at all.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        heartbeat: Heartbeat,
        log: Callable[..., None],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._heartbeat = heartbeat
        self._log = log
        self._every_s = every_s
        self._clock = clock
        specs = context.assets_def.specs
        self._specs = {spec.key: spec for spec in specs}
        checks = context.assets_def.check_specs
        self._blocking = {spec.key for spec in checks if spec.blocking}
        self._provenance = Provenance(context.instance, context.run.run_id, specs)
        self._results: dict[dg.AssetKey, Result] = {}
        self._joined: dict[dg.AssetKey, JoinedResults] = {}
        self._shown: set[dg.AssetKey] = set()
        self._checks: dict[dg.AssetCheckKey, CheckReports] = {}
        self._refusals: dict[dg.AssetKey, int] = {}
        self._due_at = float("-inf")
        self.is_storing_joined = False

    # A batch

    def begin(self) -> None:
        """Begin a batch."""
        self._results.clear()
        self._keep(self._provenance.look)

    def add(self, made: Made, batch: KafkaBatch) -> list[dg.AssetCheckEvaluation]:
        """Take a result of an asset, and return the checks that it evaluates."""
        if isinstance(made, dg.AssetCheckResult):
            return [self._evaluate(made)]
        if not isinstance(made, dg.MaterializeResult):
            self._keep(partial(self._context.log_event, made))
            return []
        key = made.asset_key or self._context.asset_key
        tags = self._provenance.tags(key, made.data_version, batch.batch_id)
        self._results[key] = Result(
            self._specs[key], batch, made.metadata or {}, {**tags, **(made.tags or {})}
        )
        if not self._every_s:
            self._keep_result(key)
        return [self._evaluate(check) for check in made.check_results or ()]

    def show_first(self) -> None:
        """Report the results of a batch with the first one of an asset, in their order.

        If that fails, so does the batch.
        """
        if not self._results.keys() <= self._shown:
            self.write()
            for key in [*self._results]:
                self._keep_result(key)

    def succeed(self, held: Collection[TopicPartition]) -> None:
        """Join the results of a batch that is done with the ones before.

        Results of partitions that are `held` are reported: they are released after this batch.
        """
        for key in [*self._results]:
            self._join(self._results.pop(key))
        if self._touches(held):
            self.write()

    def fail(self) -> None:
        """Report what the assets of a failed batch have returned, each on its own."""
        if self._results:
            self.write()
        for result in [*self._results.values()]:
            # Not repeated: the error of the batch must not become that of the report.
            self._try_report(partial(self._context.log_event, result.event))
        self._results.clear()

    def _join(self, result: Result) -> None:
        key = result.spec.key
        if key in self._joined:
            self._joined[key].add(result)
        else:
            self._joined[key] = JoinedResults(result)

    def _keep_result(self, key: dg.AssetKey) -> None:
        self._keep(partial(self._context.log_event, self._results[key].event))
        self._shown.add(key)
        del self._results[key]

    def _evaluate(self, check: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
        found = dg.AssetCheckEvaluation(
            asset_key=check.asset_key or self._context.asset_key,
            check_name=check.check_name or "",
            passed=check.passed,
            metadata=check.metadata,
            severity=check.severity,
            description=check.description,
        )
        reports = self._checks.setdefault(found.asset_check_key, CheckReports())
        reports.add(found)
        if not self._every_s or reports.is_urgent(self._clock()) or self._fails_batch(found):
            if not found.passed and found.asset_key in self._results:
                # Dagster shows a check beside the newest materialization.
                self._write_joined(found.asset_key)
                self._keep_result(found.asset_key)
            for one in [*reports.waiting]:
                self._keep(partial(self._context.instance.report_runless_asset_event, one))
                reports.reported(one)
        return found

    def _fails_batch(self, found: dg.AssetCheckEvaluation) -> bool:
        is_error = not found.passed and found.severity is dg.AssetCheckSeverity.ERROR
        return is_error and found.asset_check_key in self._blocking

    def failed_of(self, found: Iterable[dg.AssetCheckEvaluation]) -> list[str]:
        """Return the checks that fail the batch, as `check of asset`."""
        return [
            f"{one.check_name} of {one.asset_key.to_user_string()}"
            for one in found
            if self._fails_batch(one)
        ]

    # Between batches

    def write_due(self, held: Collection[TopicPartition]) -> None:
        """Report what waits if it is due, or if it is of partitions that are to be released."""
        if self._clock() >= self._due_at or self._touches(held):
            self.write()
        now = self._clock()
        for reports in self._checks.values():
            if reports.waiting and reports.is_urgent(now):
                self._write_checks(reports)

    def _touches(self, held: Collection[TopicPartition]) -> bool:
        return bool(held) and any(one.ranges.touches(held) for one in self._joined.values())

    def write(self) -> None:
        """Report what waits. What the storage does not take is reported later."""
        if not self._joined and self._due_at > float("-inf"):
            return
        self._due_at = self._clock() + self._every_s
        for key in [key for key in self._specs if key in self._joined]:
            self._write_joined(key)
        for reports in self._checks.values():
            self._write_checks(reports)
        if self._joined:
            self._due_at = float("-inf")

    def _write_joined(self, key: dg.AssetKey) -> None:
        joined = self._joined.pop(key, None)  # first: it is never reported twice
        if joined is None:
            return
        self.is_storing_joined = True
        try:
            error = self._try_report(partial(self._context.log_event, joined.event))
        finally:
            self.is_storing_joined = False
        if error is None:
            self._refusals.pop(key, None)
            return
        self._joined[key] = joined
        if not is_lost_connection(error) and self._try_beat():
            self._refusals[key] = self._refusals.get(key, 0) + 1
            if self._refusals[key] >= _MOST_REFUSALS:
                del self._joined[key], self._refusals[key]
                text = "Dagster's storage refuses a materialization of %s, for %s: %s"
                self._log(text, key.to_user_string(), joined.ranges, error)

    def _write_checks(self, reports: CheckReports) -> None:
        for one in [*reports.waiting]:
            if self._try_report(partial(self._context.instance.report_runless_asset_event, one)):
                return
            reports.reported(one)

    # The storage

    def _keep(self, report: Callable[[], None]) -> None:
        """Report to Dagster, with retries while its storage is unavailable.

        The asset is done, so an outage is no failed attempt; during a longer outage, the lease ends
        the run. If the storage refuses a report but accepts heartbeats, the report is at fault, and
        so is the asset. After a lost connection, the next report opens a new connection.
        """
        refusals = 0
        while (error := self._try_report(report)) is not None:
            if not is_lost_connection(error):
                refusals += 1
                if refusals == _MOST_REFUSALS:
                    raise error
                refusals = refusals if self._try_beat() else 0
            time.sleep(_RETRY_S)

    def _try_report(self, report: Callable[[], None]) -> Exception | None:
        """Report once, and return the error if the storage did not accept the report."""
        try:
            with self._heartbeat.reporting():
                report()
        except Exception as error:
            logger.warning("Dagster's storage accepted no report", exc_info=True)
            return error
        # The context keeps logged events until its step ends, which may take an hour.
        deque(self._context.op_execution_context.consume_events(), maxlen=0)
        return None

    def _try_beat(self) -> bool:
        """Store a heartbeat, and return whether the storage accepted it."""
        try:
            with self._heartbeat.reporting():
                self._heartbeat.beat(self._context.instance)
        except Exception:  # noqa: BLE001 - of any database
            return False
        return True
