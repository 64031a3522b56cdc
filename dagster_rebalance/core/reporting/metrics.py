"""The metrics of a member: their names, units and attributes, and what each occurrence adds.

Names and attributes follow OpenTelemetry: Kafka's words have the attributes of its semantic
conventions (`messaging.*`), everything else has the prefix `dagster_rebalance.`. No attribute has
more values than there are topics, with one exception that has a limit: `PARTITION`. Ids of runs and
batches are none.

Owns what is measured; a shell has an instrument for each of `Metric` and hands the numbers on.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dagster_rebalance.core.model.member_events import Occurred, plain
from dagster_rebalance.core.partitions.state_machine import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.core.model.member_events import Occurrence
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.partitions.owned import OwnedPartition
    from dagster_rebalance.core.revokes.hold import Hold

    _Fields: TypeAlias = Mapping[str, Any]
    _Adds: TypeAlias = Callable[[_Fields], Iterator["Measurement"]]

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
"""The attributes of each number. A member is a sensor or a streaming job of a code location."""


class Form(enum.Enum):
    """How numbers of a metric belong together."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


class Instrument(NamedTuple):
    """What is known of a metric.

    Attributes:
        name: Its name.
        form: How its numbers belong together.
        unit: As UCUM has it, or what is counted, in braces.
        attributes: What tells its numbers apart, beside `OF_EACH`.
        description: What it is.
        buckets: The limits of a histogram.
    """

    name: str
    form: Form
    unit: str
    attributes: tuple[str, ...]
    description: str
    buckets: tuple[float, ...] = ()


_WORK_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_HOLD_S = (0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class Metric(enum.Enum):
    """All metrics."""

    PARTITIONS_ASSIGNED = Instrument(
        "dagster_rebalance.partitions.assigned",
        Form.COUNTER,
        "{partition}",
        (TOPIC,),
        "Partitions that Kafka gave to the member.",
    )
    PARTITIONS_ASKED_BACK = Instrument(
        "dagster_rebalance.partitions.asked_back",
        Form.COUNTER,
        "{partition}",
        (TOPIC,),
        "Partitions that Kafka asked back, which began a hold.",
    )
    PARTITIONS_LOST = Instrument(
        "dagster_rebalance.partitions.lost",
        Form.COUNTER,
        "{partition}",
        (TOPIC, REASON),
        "Partitions that were taken away: `session`, `fenced`, `superseded`, `expired`.",
    )
    HOLD_DURATION = Instrument(
        "dagster_rebalance.hold.duration",
        Form.HISTOGRAM,
        "s",
        (CAUSE, OUTCOME),
        "From the request of a revoke or leave to its end.",
        _HOLD_S,
    )
    BATCHES = Instrument(
        "dagster_rebalance.batches.claimed",
        Form.COUNTER,
        "{batch}",
        (),
        "Batches whose claims Kafka has stored.",
    )
    ATTEMPTS = Instrument(
        "dagster_rebalance.attempts",
        Form.COUNTER,
        "{attempt}",
        (OUTCOME,),
        "Work on a batch that ended: `succeeded`, `failed`, `not_started`, `refused`, "
        "`interrupted`, `taken_back`.",
    )
    OFFSETS_COMMITTED = Instrument(
        "dagster_rebalance.offsets.committed",
        Form.COUNTER,
        "{offset}",
        (TOPIC,),
        "Offsets that were committed. In topics with transactions or compaction there are fewer "
        "records.",
    )
    COMMITS = Instrument(
        "dagster_rebalance.commits",
        Form.COUNTER,
        "{commit}",
        (TOPIC,),
        "Commits of ranges.",
    )
    CLAIM_TO_COMMIT = Instrument(
        "dagster_rebalance.claim_to_commit.duration",
        Form.HISTOGRAM,
        "s",
        (TOPIC,),
        "From the claim of a range to its commit; not for claims that were taken over.",
        _WORK_S,
    )
    WRITES_FAILED = Instrument(
        "dagster_rebalance.writes.failed",
        Form.COUNTER,
        "{write}",
        (TOPIC, REASON),
        "Offsets that were not written: `changed`, `retriable`, `refused`.",
    )
    STOPS = Instrument(
        "dagster_rebalance.stops",
        Form.COUNTER,
        "{stop}",
        (TOPIC,),
        "How often a partition stopped.",
    )
    DEAD_LETTERS = Instrument(
        "dagster_rebalance.dead_letters",
        Form.COUNTER,
        "{record}",
        (TOPIC, OUTCOME),
        "Records for the dead-letter topic: `stored`, `failed`.",
    )
    RUNS_CANCELLED = Instrument(
        "dagster_rebalance.runs.cancelled",
        Form.COUNTER,
        "{run}",
        (),
        "Runs that the member cancelled.",
    )
    RUNS_DEAD = Instrument(
        "dagster_rebalance.runs.dead",
        Form.COUNTER,
        "{run}",
        (),
        "Runs without a sign of life that the member ended.",
    )
    MEMBERS = Instrument(
        "dagster_rebalance.members",
        Form.GAUGE,
        "{member}",
        (),
        "1 for each member of the process.",
    )
    SILENCE = Instrument(
        "dagster_rebalance.member.silence",
        Form.GAUGE,
        "s",
        (),
        "Since the member last turned, which it does many times a second. It is abandoned after "
        "120 s.",
    )
    PARTITIONS = Instrument(
        "dagster_rebalance.partitions",
        Form.GAUGE,
        "{partition}",
        (TOPIC, STATE),
        "Partitions that the member owns: `restoring`, `owned`, `paused` (by people), `stopped`, "
        "`draining`, `drained`.",
    )
    LAG = Instrument(
        "dagster_rebalance.lag",
        Form.GAUGE,
        "{offset}",
        (TOPIC,),
        "Offsets that wait in all partitions that the member owns and knows the end of.",
    )
    LAG_MAX = Instrument(
        "dagster_rebalance.lag.max",
        Form.GAUGE,
        "{offset}",
        (TOPIC,),
        "The same of the partition in which most wait.",
    )
    PARTITION_LAG = Instrument(
        "dagster_rebalance.partition.lag",
        Form.GAUGE,
        "{offset}",
        (TOPIC, PARTITION),
        "The same of each partition, if the member owns no more than `metrics_partitions`.",
    )
    OFFSETS_IN_FLIGHT = Instrument(
        "dagster_rebalance.offsets.in_flight",
        Form.GAUGE,
        "{offset}",
        (TOPIC,),
        "Offsets that are claimed and not committed.",
    )
    BATCHES_IN_FLIGHT = Instrument(
        "dagster_rebalance.batches.in_flight",
        Form.GAUGE,
        "{batch}",
        (),
        "Batches that are claimed and not committed.",
    )
    BATCH_AGE = Instrument(
        "dagster_rebalance.batch.age",
        Form.GAUGE,
        "s",
        (),
        "For how long the batch runs that has been running for longest; none while none runs.",
    )
    HOLDS = Instrument(
        "dagster_rebalance.holds",
        Form.GAUGE,
        "{hold}",
        (CAUSE,),
        "Holds that are not over.",
    )
    HOLD_REMAINING = Instrument(
        "dagster_rebalance.hold.remaining",
        Form.GAUGE,
        "s",
        (CAUSE,),
        "Until the earliest limit of a hold.",
    )


class Measurement(NamedTuple):
    """One number of a metric."""

    metric: Metric
    value: float
    attributes: Mapping[str, str]


def measured(occurrence: Occurrence) -> Iterator[Measurement]:
    """What an occurrence adds to counters and histograms."""
    adds = _ADDS.get(occurrence.what)
    if adds is not None:
        yield from adds(occurrence.fields)


def _moved(metric: Metric) -> _Adds:
    def adds(fields: _Fields) -> Iterator[Measurement]:
        reason = {REASON: _word(fields["reason"])} if "reason" in fields else {}
        for topic, count in Counter(tp.topic for tp in fields["partitions"]).items():
            yield Measurement(metric, count, {TOPIC: topic, **reason})

    return adds


def _one(metric: Metric, fixed: Mapping[str, str] | None = None, **named: str) -> _Adds:
    """Count one. `named` are attributes by the names of the fields that they are taken from."""

    def adds(fields: _Fields) -> Iterator[Measurement]:
        taken = {attribute: _word(fields[name]) for name, attribute in named.items()}
        yield Measurement(metric, 1, {**taken, **(fixed or {})})

    return adds


def _runs(metric: Metric) -> _Adds:
    return lambda fields: iter([Measurement(metric, len(fields["run_ids"]), {})])


def _held(fields: _Fields) -> Iterator[Measurement]:
    said = {CAUSE: _word(fields["cause"]), OUTCOME: _word(fields["outcome"])}
    yield Measurement(Metric.HOLD_DURATION, fields["seconds"], said)


def _committed(fields: _Fields) -> Iterator[Measurement]:
    topic = {TOPIC: fields["topic"]}
    yield Measurement(Metric.OFFSETS_COMMITTED, fields["offsets"], topic)
    yield Measurement(Metric.COMMITS, 1, topic)
    if fields["claim_to_commit_s"] is not None:
        yield Measurement(Metric.CLAIM_TO_COMMIT, fields["claim_to_commit_s"], topic)


def _word(value: object) -> str:
    """A value of the core as an attribute has it."""
    return str(plain(value)).replace(" ", "_")


_ADDS: Mapping[Occurred, _Adds] = {
    Occurred.PARTITIONS_ASSIGNED: _moved(Metric.PARTITIONS_ASSIGNED),
    Occurred.REVOKE_REQUESTED: _moved(Metric.PARTITIONS_ASKED_BACK),
    Occurred.PARTITIONS_LOST: _moved(Metric.PARTITIONS_LOST),
    Occurred.HOLD_ENDED: _held,
    Occurred.BATCH_CLAIMED: _one(Metric.BATCHES),
    Occurred.ATTEMPT_ENDED: _one(Metric.ATTEMPTS, outcome=OUTCOME),
    Occurred.OFFSETS_COMMITTED: _committed,
    Occurred.WRITE_FAILED: _one(Metric.WRITES_FAILED, topic=TOPIC, failure=REASON),
    Occurred.PARTITION_STOPPED: _one(Metric.STOPS, topic=TOPIC),
    Occurred.DEAD_LETTER_STORED: _one(Metric.DEAD_LETTERS, {OUTCOME: "stored"}, topic=TOPIC),
    Occurred.DEAD_LETTER_FAILED: _one(Metric.DEAD_LETTERS, {OUTCOME: "failed"}, topic=TOPIC),
    Occurred.RUNS_CANCELLED: _runs(Metric.RUNS_CANCELLED),
    Occurred.RUNS_DEAD: _runs(Metric.RUNS_DEAD),
}


@dataclass(frozen=True, slots=True)
class MemberState:
    """What gauges are read from. Its values do not change, so any thread may read it.

    Attributes:
        partitions: What the member owns.
        holds: Its holds.
        at: When it was so, on the member's clock.
    """

    partitions: tuple[OwnedPartition, ...] = ()
    holds: tuple[Hold, ...] = ()
    at: float = 0.0


def gauge(
    metric: Metric, state: MemberState, *, now: float, most_partitions: int
) -> Iterator[Measurement]:
    """Read a gauge of a member.

    Args:
        metric: Which one.
        state: How the member was when it last turned.
        now: The time, on the member's clock.
        most_partitions: With more partitions than this, there is no lag of each.
    """
    match metric:
        case Metric.MEMBERS:
            yield Measurement(metric, 1, {})
        case Metric.SILENCE:
            yield Measurement(metric, max(0.0, now - state.at), {})
        case Metric.PARTITIONS:
            states = Counter((owned.partition.topic, _state(owned)) for owned in state.partitions)
            for (topic, name), count in states.items():
                yield Measurement(metric, count, {TOPIC: topic, STATE: name})
        case Metric.PARTITION_LAG:
            for tp, lag in _lags(state) if len(state.partitions) <= most_partitions else ():
                which = {TOPIC: tp.topic, PARTITION: str(tp.partition)}
                yield Measurement(metric, lag, which)
        case Metric.HOLDS | Metric.HOLD_REMAINING:
            yield from _holds(metric, state, now)
        case Metric.BATCH_AGE:
            since = [
                entry.since
                for owned in state.partitions
                for entry in owned.known_entries
                if entry.since is not None
            ]
            if since:
                yield Measurement(metric, max(0.0, now - min(since)), {})
        case _:
            yield from _of_topics(metric, state)


def _of_topics(metric: Metric, state: MemberState) -> Iterator[Measurement]:
    if metric is Metric.BATCHES_IN_FLIGHT:
        batches = {entry.batch_id for owned in state.partitions for entry in owned.known_entries}
        yield Measurement(metric, len(batches), {})
        return
    numbers: dict[str, list[int]] = {}
    if metric is Metric.OFFSETS_IN_FLIGHT:
        for owned in state.partitions:
            claimed = sum(len(entry.range) for entry in owned.known_entries)
            numbers.setdefault(owned.partition.topic, []).append(claimed)
    else:
        for tp, lag in _lags(state):
            numbers.setdefault(tp.topic, []).append(lag)
    for topic, found in numbers.items():
        number = max(found) if metric is Metric.LAG_MAX else sum(found)
        yield Measurement(metric, number, {TOPIC: topic})


def _lags(state: MemberState) -> Iterator[tuple[TopicPartition, int]]:
    """The lag where it is known: a partition that is being looked up has none, and not 0."""
    for owned in state.partitions:
        if owned.ledger is not None and owned.bounds is not None:
            yield owned.partition, owned.lag


def _holds(metric: Metric, state: MemberState, now: float) -> Iterator[Measurement]:
    limits: dict[str, list[float]] = {}
    for hold in state.holds:
        limits.setdefault(_word(hold.cause), []).append(hold.limit_at)
    for cause, ends in limits.items():
        number = len(ends) if metric is Metric.HOLDS else max(0.0, min(ends) - now)
        yield Measurement(metric, number, {CAUSE: cause})


def _state(owned: OwnedPartition) -> str:
    is_paused = owned.phase is Phase.OWNED and owned.order is not None
    return "paused" if is_paused else _word(owned.phase)
