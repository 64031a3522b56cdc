"""Detect stalls: a partition has records, no run works on it, and no reason explains it.

The judgement uses Kafka's log, Dagster's runs and ticks, and the faults. A partition is busy while
it has a live run, or while a batch waits for the next tick of its owner's sensor. With streaming
runs it is busy during its batches, and while its owner, which works on one batch at a time, works
on others. Otherwise it is idle, which must be explained by a fault, a hold, a missing owner or
missing ticks.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from proofs.chaos.spans import Span, total_s, without

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

STALL_S = 2.0
TICKS_WAITED = 2
"""The missed tick of a batch, and the next one."""
LONGEST_WAIT_S = 30.0
"""A longer time without a tick must be explained."""
REQUEST_S = 5.0
"""Time of Dagster's daemon to create the runs that a tick requests, on a busy machine."""
LONGEST_TURN_S = 10.0
"""A longer turn of its owner on other partitions must be explained."""
NOBODY_S = 90.0
"""Time until a streaming run owns the partition again, also after all runs were killed."""


@dataclass(frozen=True, slots=True)
class RunSeen:
    """A run in Dagster.

    Attributes:
        created_at: Time of its creation.
        ended_at: Time of its end; None if it never ended.
        succeeded: Whether it completed all of its work.
        by: The member of a streaming run.
    """

    created_at: float
    ended_at: float | None
    succeeded: bool
    by: str = ""


@dataclass(frozen=True)
class History:
    """The history of one partition, with times in seconds since 1970.

    Attributes:
        name: The partition.
        ends: Observed ends, oldest first.
        commits: Committed offsets, oldest first.
        claims: Ends of claimed ranges, oldest first.
        runs: Its runs, oldest first.
        owners: Member ids of the owners over time; None without an owner.
        turns: Work of its owner, a streaming run, on other partitions.
    """

    name: str
    ends: Sequence[tuple[float, int]]
    commits: Sequence[tuple[float, int]]
    claims: Sequence[tuple[float, int]]
    runs: Sequence[RunSeen]
    owners: Sequence[tuple[float, str | None]]
    turns: Sequence[Span] = ()

    def owner_at(self, at: float) -> str | None:
        """Return the owner at a time."""
        return next((owner for since, owner in reversed(self.owners) if since <= at), None)

    def owned(self, until: float) -> Iterator[tuple[Span, str | None]]:
        """Return the owners with their spans, until a time."""
        for (since, owner), (end, _) in pairwise([*self.owners, (until, None)]):
            yield Span(since, end), owner


@dataclass(frozen=True, slots=True)
class Explained:
    """A reason for idleness.

    Attributes:
        span: Its time.
        why: Its description.
        partition: The partition; None for all.
        is_fault: Whether a delayed batch waits for the next ticks after it.
    """

    span: Span
    why: str
    partition: str | None = None
    is_fault: bool = False


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall.

    Attributes:
        partition: The partition.
        span: Its time.
        before: The last event before it.
        after: The first event after it.
    """

    partition: str
    span: Span
    before: str
    after: str

    def __str__(self) -> str:
        text = (
            f"{self.partition} stood still for {self.span.seconds:.1f} s "
            f"from {clock(self.span.begin)} on"
        )
        return f"{text}, after {self.before} and until {self.after}"


@dataclass
class Judgement:
    """The result.

    Attributes:
        stalls: Unexplained idleness.
        watched_s: Partition-seconds with records and without any reason for idleness.
        idle_s: Partition-seconds of idleness, by reason.
    """

    stalls: list[Stall] = field(default_factory=list)
    watched_s: float = 0.0
    idle_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


def clock(at: float) -> str:
    """Return a time of day as in the brokers' logs."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")  # noqa: DTZ006 - the time that a person's clock shows


def judge(
    histories: Iterable[History],
    ticks: Mapping[str, Sequence[float]] | None,
    reasons: Sequence[Explained],
    until: float,
) -> Judgement:
    """Detect the stalls.

    Args:
        histories: The partitions.
        ticks: Start of each completed tick of each member's sensor, by member id, oldest first;
            None with streaming runs, which need no ticks.
        reasons: The reasons for idleness.
        until: End of the judged time.
    """
    judgement = Judgement()
    for history in histories:
        behind = _behind(history, until)
        mended = [one.span.end for one in reasons if one.is_fault and one.partition == history.name]
        idle = without(behind, _busy(history, behind, ticks, mended, until))
        nobody_s = NOBODY_S if ticks is None else until
        for reason in [*_nobody(history, until, nobody_s), *reasons]:
            if reason.partition in {None, history.name}:
                left = without(idle, [reason.span])
                judgement.idle_s[reason.why] += total_s(idle) - total_s(left)
                idle, behind = left, without(behind, [reason.span])
        judgement.watched_s += total_s(behind)
        judgement.stalls += [
            Stall(history.name, span, *_around(history, span))
            for span in idle
            if span.seconds > STALL_S
        ]
    return judgement


def _behind(history: History, until: float) -> list[Span]:
    """Return the times in which the partition had records to read."""
    changes = [(at, "end", end) for at, end in history.ends]
    changes += [(at, "committed", offset) for at, offset in history.commits]
    latest = {"end": 0, "committed": 0}
    spans = []
    since: float | None = None
    for at, which, offset in sorted(changes):
        latest[which] = offset
        is_behind = latest["end"] > latest["committed"]
        if is_behind and since is None:
            since = at
        elif not is_behind and since is not None:
            spans.append(Span(since, at))
            since = None
    return spans if since is None else [*spans, Span(since, until)]


def _busy(
    history: History,
    behind: Sequence[Span],
    ticks: Mapping[str, Sequence[float]] | None,
    mended: Sequence[float],
    until: float,
) -> list[Span]:
    live = [
        Span(run.created_at, until if run.ended_at is None else run.ended_at)
        for run in history.runs
    ]
    if ticks is None:
        return live + _waiting_for_turn(history, without(behind, live), until)
    wanted = [at for at, _ in history.claims]
    wanted += [
        run.ended_at for run in history.runs if run.ended_at is not None and not run.succeeded
    ]
    wanted += [
        since
        for since, owner in history.owners
        if owner is not None and _is_claimed(history, since)
    ]
    wanted += [at for at in mended if _waits_for_a_run(history, at)]
    return live + [Span(at, min(until, _run_due_at(history, at, ticks))) for at in wanted]


def _waiting_for_turn(history: History, idle: Iterable[Span], until: float) -> list[Span]:
    """Return the turns in which the partition waited for its owner, if not too long."""
    found = []
    for span in idle:
        for owned, _ in history.owned(until):
            begin = max(span.begin, owned.begin)
            end = min(span.end, owned.end, begin + LONGEST_TURN_S)
            found += [
                Span(max(begin, turn.begin), min(end, turn.end))
                for turn in history.turns
                if turn.begin < end and turn.end > begin
            ]
    return found


def _is_claimed(history: History, at: float) -> bool:
    """Return whether a new owner finds a claim at that time."""
    claimed = max((until for since, until in history.claims if since <= at), default=0)
    return claimed > max((offset for since, offset in history.commits if since <= at), default=0)


def _waits_for_a_run(history: History, at: float) -> bool:
    """Return whether a batch was claimed at that time, and none of its runs had succeeded."""
    claimed_at = max((since for since, _ in history.claims if since <= at), default=at)
    return _is_claimed(history, at) and not any(
        run.succeeded and run.ended_at is not None and claimed_at <= run.ended_at <= at
        for run in history.runs
    )


def _run_due_at(history: History, wanted_at: float, ticks: Mapping[str, Sequence[float]]) -> float:
    """Return the time by which a batch must have a run."""
    its_ticks = ticks.get(history.owner_at(wanted_at) or "", ())
    following = its_ticks[bisect.bisect_right(its_ticks, wanted_at) :][:TICKS_WAITED]
    last, waited = wanted_at, 0
    for tick in following:
        if tick - last > LONGEST_WAIT_S:
            break
        last, waited = tick, waited + 1
    due = [last + (REQUEST_S if waited == TICKS_WAITED else LONGEST_WAIT_S)]
    due += [run.created_at for run in history.runs if run.created_at >= wanted_at]
    return min(due)


def _around(history: History, span: Span) -> tuple[str, str]:
    """Return the last event of a partition before a time, and the first one after it."""
    events = [(at, f"a commit up to {offset}") for at, offset in history.commits]
    events += [(at, f"a claim up to {offset}") for at, offset in history.claims]
    events += [(run.created_at, "a run was made") for run in history.runs]
    events += [
        (run.ended_at, f"a run {'succeeded' if run.succeeded else 'failed'}")
        for run in history.runs
        if run.ended_at is not None
    ]
    events += [
        (at, "a new owner had it" if owner else "it had no owner") for at, owner in history.owners
    ]
    told = [(at, f"{what} at {clock(at)}") for at, what in sorted(events)]
    before = [text for at, text in told if at <= span.begin]
    after = [text for at, text in told if at >= span.end]
    return before[-1] if before else "its beginning", after[0] if after else "the end"


def _nobody(history: History, until: float, limit_s: float) -> list[Explained]:
    first = history.owners[0][0] if history.owners else until
    spans = [
        Span(0.0, first),
        *(
            Span(span.begin, min(span.end, span.begin + limit_s))
            for span, owner in history.owned(until)
            if owner is None and span.seconds > 0
        ),
    ]
    return [Explained(span, "Kafka has assigned it to no member") for span in spans]
