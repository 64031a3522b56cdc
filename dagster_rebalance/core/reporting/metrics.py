"""Metrics of a member: names, units, attributes, and the measurements of each member event.

Names and attributes follow OpenTelemetry: Kafka concepts have the attributes of its semantic
conventions (`messaging.*`), all others the prefix `dagster_rebalance.`. An attribute has at most as
many values as there are topics; only `PARTITION` has more, and it is limited by a setting. Ids of
runs and batches are never attributes.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dagster_rebalance.core.model.claims import LEFT_OUT
from dagster_rebalance.core.model.member_events import EventKind, json_value
from dagster_rebalance.core.partitions.state_machine import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.core.model.member_events import MemberEvent
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from dagster_rebalance.core.revokes.hold import Hold

    _Fields: TypeAlias = Mapping[str, Any]
    _Measure: TypeAlias = Callable[[_Fields], Iterator["Measurement"]]
    _Values: TypeAlias = Iterator[tuple[float, Mapping[str, str]]]

SYSTEM = "messaging.system"
GROUP = "messaging.consumer.group.name"
TOPIC = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"
MEMBER = "dagster_rebalance.member"
CAUSE = "dagster_rebalance.cause"
OUTCOME = "dagster_rebalance.outcome"
REASON = "dagster_rebalance.reason"
STATE = "dagster_rebalance.state"
OF_EACH = (SYSTEM, GROUP, MEMBER)
"""The attributes of each measurement. A member is a sensor or a streaming job."""


class Form(enum.Enum):
    """The kind of instrument."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


class Instrument(NamedTuple):
    """The definition of a metric. `unit` is a UCUM unit, or the counted noun in braces.

    `attributes` come in addition to `OF_EACH`; `buckets` are the bucket boundaries of a histogram.
    """

    name: str
    form: Form
    unit: str
    attributes: tuple[str, ...]
    description: str
    buckets: tuple[float, ...] = ()


def _counter(name: str, unit: str, description: str, *attributes: str) -> Instrument:
    return Instrument(f"dagster_rebalance.{name}", Form.COUNTER, unit, attributes, description)


def _gauge(name: str, unit: str, description: str, *attributes: str) -> Instrument:
    return Instrument(f"dagster_rebalance.{name}", Form.GAUGE, unit, attributes, description)


def _seconds(
    name: str, description: str, buckets: tuple[float, ...], *attributes: str
) -> Instrument:
    name = f"dagster_rebalance.{name}.duration"
    return Instrument(name, Form.HISTOGRAM, "s", attributes, description, buckets)


_WORK_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_HOLD_S = (0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class Metric(enum.Enum):
    """All metrics."""

    PARTITIONS_ASSIGNED = _counter(
        "partitions.assigned", "{partition}", "Partitions assigned to the member.", TOPIC
    )
    PARTITIONS_ASKED_BACK = _counter(
        "partitions.asked_back", "{partition}", "Partitions whose revoke began a hold.", TOPIC
    )
    PARTITIONS_LOST = _counter(
        "partitions.lost",
        "{partition}",
        "Lost partitions: `session`, `fenced`, `superseded`, `expired`.",
        *(TOPIC, REASON),
    )
    HOLD_DURATION = _seconds(
        "hold", "Time from the request of a revoke or leave to its end.", _HOLD_S, CAUSE, OUTCOME
    )
    BATCHES = _counter("batches.claimed", "{batch}", "Batches whose claims Kafka has stored.")
    ATTEMPTS = _counter(
        "attempts",
        "{attempt}",
        "Attempts on a batch that ended: `succeeded`, `failed`, `not_started`, `refused`, "
        "`interrupted`, `taken_back`.",
        OUTCOME,
    )
    OFFSETS_COMMITTED = _counter(
        "offsets.committed",
        "{offset}",
        "Committed offsets. Topics with transactions or compaction have fewer records.",
        TOPIC,
    )
    OFFSETS_LEFT_OUT = _counter(
        "offsets.left_out",
        "{offset}",
        "Offsets that were committed without a run: the filter `only` leaves out their records.",
        TOPIC,
    )
    COMMITS = _counter("commits", "{commit}", "Commits of ranges.", TOPIC)
    CLAIM_TO_COMMIT = _seconds(
        "claim_to_commit",
        "Time from the claim of a range to its commit, without claims of earlier owners.",
        _WORK_S,
        TOPIC,
    )
    WRITES_FAILED = _counter(
        "writes.failed",
        "{write}",
        "Failed writes of offsets: `changed`, `retriable`, `refused`.",
        *(TOPIC, REASON),
    )
    STOPS = _counter("stops", "{stop}", "Stops of partitions.", TOPIC)
    DEAD_LETTERS = _counter(
        "dead_letters",
        "{record}",
        "Records for the dead-letter topic: `stored`, `failed`.",
        *(TOPIC, OUTCOME),
    )
    RUNS_CANCELLED = _counter("runs.cancelled", "{run}", "Runs that the member cancelled.")
    RUNS_DEAD = _counter("runs.dead", "{run}", "Runs without a heartbeat that the member ended.")
    MEMBERS = _gauge("members", "{member}", "1 for each member of the process.")
    SILENCE = _gauge(
        "member.silence",
        "s",
        "Time since the last turn of the member loop, usually below 1 s. A member is abandoned "
        "after 120 s.",
    )
    PARTITIONS = _gauge(
        "partitions",
        "{partition}",
        "Partitions of the member: `restoring`, `owned`, `paused` (by an operator), `stopped`, "
        "`draining`, `drained`.",
        *(TOPIC, STATE),
    )
    LAG = _gauge(
        "lag", "{offset}", "Lag of all partitions of the member with a known end offset.", TOPIC
    )
    LAG_MAX = _gauge("lag.max", "{offset}", "The largest of these lags.", TOPIC)
    PARTITION_LAG = _gauge(
        "partition.lag",
        "{offset}",
        "Lag by partition, if the member owns at most `metrics_partitions`.",
        *(TOPIC, PARTITION),
    )
    OFFSETS_IN_FLIGHT = _gauge(
        "offsets.in_flight", "{offset}", "Claimed offsets that are not committed.", TOPIC
    )
    BATCHES_IN_FLIGHT = _gauge(
        "batches.in_flight", "{batch}", "Claimed batches that are not committed."
    )
    BATCH_AGE = _gauge("batch.age", "s", "Age of the oldest running batch; none while none runs.")
    HOLDS = _gauge("holds", "{hold}", "Open holds.", CAUSE)
    HOLD_REMAINING = _gauge(
        "hold.remaining", "s", "Time until the earliest limit of a hold.", CAUSE
    )


class Measurement(NamedTuple):
    """A value of a metric."""

    metric: Metric
    value: float
    attributes: Mapping[str, str]


def measurements(event: MemberEvent) -> Iterator[Measurement]:
    """Return the values that a member event adds to counters and histograms."""
    measure = _MEASURES.get(event.kind)
    if measure is not None:
        yield from measure(event.fields)


def _partitions_by_topic(metric: Metric) -> _Measure:
    def measure(fields: _Fields) -> Iterator[Measurement]:
        reason = {REASON: _plain(fields["reason"])} if "reason" in fields else {}
        for topic, count in Counter(tp.topic for tp in fields["partitions"]).items():
            yield Measurement(metric, count, {TOPIC: topic, **reason})

    return measure


def _one(metric: Metric, constant: Mapping[str, str] | None = None, **named: str) -> _Measure:
    """Add 1 to a counter. `named` maps names of event fields to attributes."""

    def measure(fields: _Fields) -> Iterator[Measurement]:
        attributes = {attribute: _plain(fields[name]) for name, attribute in named.items()}
        yield Measurement(metric, 1, {**attributes, **(constant or {})})

    return measure


def _runs(metric: Metric) -> _Measure:
    return lambda fields: iter([Measurement(metric, len(fields["run_ids"]), {})])


def _hold_ended(fields: _Fields) -> Iterator[Measurement]:
    attributes = {CAUSE: _plain(fields["cause"]), OUTCOME: _plain(fields["outcome"])}
    yield Measurement(Metric.HOLD_DURATION, fields["seconds"], attributes)


def _committed(fields: _Fields) -> Iterator[Measurement]:
    topic = {TOPIC: fields["topic"]}
    yield Measurement(Metric.OFFSETS_COMMITTED, fields["offsets"], topic)
    yield Measurement(Metric.COMMITS, 1, topic)
    if fields["attempt_run_id"] == LEFT_OUT:
        yield Measurement(Metric.OFFSETS_LEFT_OUT, fields["offsets"], topic)
    if fields["claim_to_commit_s"] is not None:
        yield Measurement(Metric.CLAIM_TO_COMMIT, fields["claim_to_commit_s"], topic)


def _plain(value: object) -> str:
    return str(json_value(value)).replace(" ", "_")


_MEASURES: Mapping[EventKind, _Measure] = {
    EventKind.PARTITIONS_ASSIGNED: _partitions_by_topic(Metric.PARTITIONS_ASSIGNED),
    EventKind.REVOKE_REQUESTED: _partitions_by_topic(Metric.PARTITIONS_ASKED_BACK),
    EventKind.PARTITIONS_LOST: _partitions_by_topic(Metric.PARTITIONS_LOST),
    EventKind.HOLD_ENDED: _hold_ended,
    EventKind.BATCH_CLAIMED: _one(Metric.BATCHES),
    EventKind.ATTEMPT_ENDED: _one(Metric.ATTEMPTS, outcome=OUTCOME),
    EventKind.OFFSETS_COMMITTED: _committed,
    EventKind.WRITE_FAILED: _one(Metric.WRITES_FAILED, topic=TOPIC, failure=REASON),
    EventKind.PARTITION_STOPPED: _one(Metric.STOPS, topic=TOPIC),
    EventKind.DEAD_LETTER_STORED: _one(Metric.DEAD_LETTERS, {OUTCOME: "stored"}, topic=TOPIC),
    EventKind.DEAD_LETTER_FAILED: _one(Metric.DEAD_LETTERS, {OUTCOME: "failed"}, topic=TOPIC),
    EventKind.RUNS_CANCELLED: _runs(Metric.RUNS_CANCELLED),
    EventKind.RUNS_DEAD: _runs(Metric.RUNS_DEAD),
}


@dataclass(frozen=True, slots=True)
class MemberState:
    """The state of a member at the time `at` of its clock. Immutable, so any thread may read it."""

    partitions: tuple[OwnedPartition, ...] = ()
    holds: tuple[Hold, ...] = ()
    at: float = 0.0


def read_gauge(
    metric: Metric, state: MemberState, *, now: float, max_partitions: int
) -> Iterator[Measurement]:
    """Return the values of a gauge. With more than `max_partitions`, no lag per partition."""
    for value, attributes in _values(metric, state, now, max_partitions):
        yield Measurement(metric, value, attributes)


def _values(metric: Metric, state: MemberState, now: float, max_partitions: int) -> _Values:
    entries = [entry for owned in state.partitions for entry in owned.known_entries]
    match metric:
        case Metric.MEMBERS:
            yield 1, {}
        case Metric.SILENCE:
            yield max(0.0, now - state.at), {}
        case Metric.BATCHES_IN_FLIGHT:
            yield len({entry.batch_id for entry in entries}), {}
        case Metric.BATCH_AGE:
            since = [entry.working_since for entry in entries if entry.working_since is not None]
            if since:
                yield max(0.0, now - min(since)), {}
        case Metric.HOLDS | Metric.HOLD_REMAINING:
            yield from _holds(metric, state, now)
        case Metric.PARTITION_LAG:
            for tp, lag in _lags(state) if len(state.partitions) <= max_partitions else ():
                yield lag, {TOPIC: tp.topic, PARTITION: str(tp.partition)}
        case _:
            yield from _topic_values(metric, state)


def _topic_values(metric: Metric, state: MemberState) -> _Values:
    if metric is Metric.PARTITIONS:
        states = Counter((owned.partition.topic, _state(owned)) for owned in state.partitions)
        for (topic, name), count in states.items():
            yield count, {TOPIC: topic, STATE: name}
        return
    by_topic: dict[str, list[int]] = {}
    for tp, value in _claimed(state) if metric is Metric.OFFSETS_IN_FLIGHT else _lags(state):
        by_topic.setdefault(tp.topic, []).append(value)
    for topic, values in by_topic.items():
        yield max(values) if metric is Metric.LAG_MAX else sum(values), {TOPIC: topic}


def _claimed(state: MemberState) -> Iterator[tuple[TopicPartition, int]]:
    for owned in state.partitions:
        yield owned.partition, sum(len(entry.range) for entry in owned.known_entries)


def _lags(state: MemberState) -> Iterator[tuple[TopicPartition, int]]:
    """The known lags: a restoring partition has no lag, rather than a lag of 0."""
    for owned in state.partitions:
        if owned.ledger is not None and owned.bounds is not None:
            yield owned.partition, owned.lag


def _holds(metric: Metric, state: MemberState, now: float) -> _Values:
    limits: dict[str, list[float]] = {}
    for hold in state.holds:
        limits.setdefault(_plain(hold.cause), []).append(hold.limit_at)
    for cause, ends in limits.items():
        yield len(ends) if metric is Metric.HOLDS else max(0.0, min(ends) - now), {CAUSE: cause}


def _state(owned: OwnedPartition) -> str:
    is_paused = owned.phase is Phase.OWNED and owned.directive is not None
    return "paused" if is_paused else _plain(owned.phase)
