"""The meter: passes the measurements of `core.reporting.metrics` to OpenTelemetry.

OpenTelemetry and its exporter may raise or hang, so a separate thread imports and calls them. A
member puts measurements into a bounded queue, and waits for the queue only when it leaves, for at
most a second. Exporters read the gauges from the state that members store here.

Without opentelemetry-api there is no meter; without an SDK, the API ignores the measurements.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from queue import Full, Queue
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_rebalance.core.reporting.metrics import (
    GROUP,
    MEMBER,
    SYSTEM,
    Form,
    Measurement,
    MemberState,
    Metric,
    measurements,
    read_gauge,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

    from dagster_rebalance.core.model.member_events import MemberEvent

    _Numbers: TypeAlias = "tuple[tuple[Measurement, ...], Mapping[str, str]]"

logger = logging.getLogger(__name__)
_MOST_WAITING = 10_000
"""Limit of the queue for an exporter that hangs. Further measurements are dropped."""
_FAREWELL_S = 1.0
"""How long a member that has left waits for its queued measurements."""
_WARN_AGAIN_S = 300.0


@dataclass(frozen=True)
class _Shown:
    """The state that the gauges of one member are read from."""

    attributes: Mapping[str, str]
    state: MemberState
    most_partitions: int
    clock: Callable[[], float]


class Meters:
    """The meters of the members of a process.

    Args:
        provider: Makes the instruments; None for the provider of the process.
    """

    def __init__(self, provider: MeterProvider | None = None) -> None:
        self._provider = provider
        self._queue: Queue[_Numbers | threading.Event] = Queue(_MOST_WAITING)
        self._shown: dict[str, _Shown] = {}
        self._instruments: dict[Metric, Any] = {}
        self._lost = 0
        self._warned_at = float("-inf")
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None

    def of(self, group_id: str, member: str, *, most_partitions: int) -> MemberMeter:
        """Return the meter of one member.

        Args:
            group_id: The consumer group.
            member: The member's name without a run id: each run id would be a new time series.
            most_partitions: If the member has more partitions, no lag per partition is recorded.
        """
        attributes = {SYSTEM: "kafka", GROUP: group_id, MEMBER: member}
        return MemberMeter(self, attributes, most_partitions)

    def add(self, member_events: Iterable[MemberEvent], attributes: Mapping[str, str]) -> None:
        """Count member events. Never waits or raises."""
        found = tuple(one for member_event in member_events for one in measurements(member_event))
        if found:
            self._put((found, attributes))

    def show(self, shown: _Shown) -> None:
        """Store a member's state, in place of the state of an abandoned member of that name."""
        self._shown[_name(shown.attributes)] = shown
        self._run()

    def forget(self, attributes: Mapping[str, str]) -> None:
        """Remove the gauges of a member that has left, and wait for its queued measurements."""
        self._shown.pop(_name(attributes), None)
        taken = threading.Event()
        if self._thread is not None and self._put(taken):
            taken.wait(_FAREWELL_S)

    def _put(self, item: _Numbers | threading.Event) -> bool:
        self._run()
        try:
            self._queue.put_nowait(item)
        except Full:
            self._lose("the exporter does not accept them")
            return False
        return True

    def _run(self) -> None:
        """Start the thread with the first measurement: an import or a preview starts nothing."""
        if self._thread is None:
            with self._start:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._main, name="dagster_rebalance metrics", daemon=True
                    )
                    try:
                        self._thread.start()
                    except RuntimeError as problem:  # the process ends, or has too many threads
                        self._lose(str(problem))

    def _main(self) -> None:
        try:
            self._make_instruments()
        except Exception:
            logger.warning("there are no metrics: OpenTelemetry does not work here", exc_info=True)
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._record(*item)

    def _record(self, numbers: Iterable[Measurement], attributes: Mapping[str, str]) -> None:
        for metric, value, more in numbers:
            instrument = self._instruments.get(metric)
            if instrument is None:
                continue
            try:
                is_counter = metric.value.form is Form.COUNTER
                record = instrument.add if is_counter else instrument.record
                record(value, {**attributes, **more})
            except Exception as problem:  # noqa: BLE001 - of any exporter
                self._lose(f"{type(problem).__name__}: {problem}")

    def _lose(self, why: str) -> None:
        self._lost += 1
        now = time.monotonic()
        if now - self._warned_at >= _WARN_AGAIN_S:
            self._warned_at = now
            logger.warning("metrics were dropped (%d so far): %s", self._lost, why)

    def _make_instruments(self) -> None:
        from opentelemetry import metrics  # noqa: PLC0415 - an extra, imported by this thread only

        provider = self._provider or metrics.get_meter_provider()
        meter = provider.get_meter("dagster_rebalance", version("dagster-rebalance"))
        for metric in Metric:
            self._instruments[metric] = self._instrument(meter, metric)

    def _instrument(self, meter: Meter, metric: Metric) -> object:
        kind = metric.value
        if kind.form is Form.COUNTER:
            return meter.create_counter(kind.name, kind.unit, kind.description)
        if kind.form is Form.HISTOGRAM:
            return meter.create_histogram(
                kind.name,
                kind.unit,
                kind.description,
                explicit_bucket_boundaries_advisory=list(kind.buckets),
            )
        return meter.create_observable_gauge(
            kind.name, [self._reader(metric)], kind.unit, kind.description
        )

    def _reader(self, metric: Metric) -> Callable[[CallbackOptions], list[Observation]]:
        from opentelemetry.metrics import Observation  # noqa: PLC0415 - as above

        def read(_options: CallbackOptions) -> list[Observation]:
            return [
                Observation(value, {**shown.attributes, **more})
                for shown in list(self._shown.values())
                for _, value, more in read_gauge(
                    metric,
                    shown.state,
                    now=shown.clock(),
                    max_partitions=shown.most_partitions,
                )
            ]

        return read


def _name(attributes: Mapping[str, str]) -> str:
    return f"{attributes[GROUP]} {attributes[MEMBER]}"


class MemberMeter:
    """The meter of one member, as `MeterPort` describes it."""

    def __init__(self, meters: Meters, attributes: Mapping[str, str], most_partitions: int) -> None:
        self._meters = meters
        self._attributes = attributes
        self._most_partitions = most_partitions

    def add(self, member_events: Iterable[MemberEvent]) -> None:
        """Count member events."""
        self._meters.add(member_events, self._attributes)

    def show(self, state: MemberState, clock: Callable[[], float]) -> None:
        """Set the state that the gauges are read from."""
        self._meters.show(_Shown(self._attributes, state, self._most_partitions, clock))

    def leave(self) -> None:
        """Remove the gauges, and wait for queued measurements."""
        self._meters.forget(self._attributes)


METERS = Meters()
"""The meters of this process."""


def meter_of(group_id: str, member: str, *, most_partitions: int) -> MemberMeter | None:
    """Return the meter of a member of this process; None without OpenTelemetry's API."""
    if not is_installed():
        return None
    return METERS.of(group_id, member, most_partitions=most_partitions)


def is_installed() -> bool:
    """Whether OpenTelemetry's API is installed. It is not imported."""
    try:
        return importlib.util.find_spec("opentelemetry.metrics") is not None
    except ModuleNotFoundError:
        return False
