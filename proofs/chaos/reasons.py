"""The reasons why no run works on a partition: faults, holds, hand-overs and missing ticks.

A fault of one member explains nothing about the partitions of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from proofs.chaos.exchange import HEARTBEAT_TIMEOUT_S, SESSION_TIMEOUT_S
from proofs.chaos.faults import Fault, Kind
from proofs.chaos.spans import Span
from proofs.chaos.stalls import Explained

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proofs.chaos.stalls import History
    from proofs.witness.catalogue import Event, HoldSeen

OF_MEMBERS = {
    Kind.MEMBER_KILLED,
    Kind.MEMBER_TERMINATED,
    Kind.MEMBER_FROZEN,
    Kind.CODE_SERVER_KILLED,
    Kind.CODE_SERVER_RELOADED,
}
LEAVING = {
    Kind.MEMBER_TERMINATED,
    Kind.CODE_SERVER_RELOADED,
    Kind.RUN_CANCELLED,
    Kind.LAUNCH_REFUSED,
    Kind.CODE_DEPLOYED,
}
OF_BROKERS = {Kind.BROKER_KILLED, Kind.COORDINATOR_MOVED}
OF_STORAGE = {Kind.STORAGE_LOCKED, Kind.STORAGE_HANGS}
OF_DAGSTER = {*OF_STORAGE, Kind.LAUNCH_REFUSED}
"""The affected tick fails, and its requests are repeated by the tick after the next."""
OF_RUNS = {
    Kind.RUN_WORKER_KILLED,
    Kind.RUN_DELETED,
    Kind.RUN_FORCE_TERMINATED,
    Kind.RUN_CUT_OFF_FROM_STORAGE,
    Kind.RUN_FROZEN,
    Kind.RUN_FROZEN_LONG,
}
"""Work may begin only after the run's process has stopped or is known to be gone."""
DEATH_LIMIT_S = 30.0
"""Time until the process of a run that ended in Dagster is known to be gone: the heartbeat timeout
and a tick or two."""
AFTERMATH_S = 5.0
"""Time of clients and databases to detect that a server is back."""
TAKEN_OVER_S = SESSION_TIMEOUT_S + 5 / 4 * HEARTBEAT_TIMEOUT_S + AFTERMATH_S
"""Time until a partition of a streaming run has a new worker: Kafka detects the loss after the
session timeout. The next owner then detects that the run is dead after the heartbeat timeout,
with checks at a quarter of it."""
LEASE_S = 2 / 3 * HEARTBEAT_TIMEOUT_S
"""A streaming run stops itself after this time without Dagster's storage."""
GONE_LIMIT_S = 90.0
"""Time until Kafka has assigned the partitions of a lost member to others."""
ON_ITS_WAY_S = 10.0
START_LIMIT_S = 60.0
"""Time until the sensor has replaced a streaming run, and that has joined."""
HEARTBEAT_S = 3.0
"""Time until the members of a classic rebalance, which learn of it by heartbeats, have joined both
phases."""
PATIENCE_S = 15.0
"""After this time without a tick a member claims nothing, as no run would start
(`EngineSettings.plan_patience_s`)."""


@dataclass(frozen=True)
class Evidence:
    """The known events.

    Attributes:
        faults: The injected faults.
        holds: The receipts.
        assigned: Reported assignments over time.
        left: Reported departures.
        ticks: As in `stalls.judge`.
        slow: Slow answers of the bystander.
        is_classic: Whether the group protocol is the classic one.
        is_streaming: Whether streaming runs are the members.
    """

    faults: Sequence[Fault]
    holds: Sequence[HoldSeen]
    assigned: Sequence[Event]
    left: Sequence[Event]
    ticks: Mapping[str, Sequence[float]]
    slow: Sequence[Span] = ()
    is_classic: bool = False
    is_streaming: bool = False

    @property
    def of_members(self) -> set[Kind]:
        """The faults that take a member away."""
        return OF_MEMBERS | OF_RUNS if self.is_streaming else OF_MEMBERS


def reasons(evidence: Evidence, histories: Sequence[History], until: float) -> Iterator[Explained]:
    """Return all reasons for idleness, the strongest first."""
    for history in histories:
        yield from _of_faults(evidence, history, until)
    for hold in evidence.holds:
        for name in hold.partitions:
            yield Explained(Span(hold.ended_at - hold.seconds, hold.ended_at), "held", name)
    for history in histories:
        yield from _given_to_leaving_members(evidence, history, until)
        yield from _given_to_dead_members(evidence, history, until)
        yield from _missed_by_kafka(evidence, history, until)
        yield from _on_its_way(evidence, history)
        if not evidence.is_streaming:
            yield from _without_ticks(evidence.ticks, history, until)
    yield from (Explained(span, "the machine was busy") for span in evidence.slow)
    if evidence.is_classic:
        for span in _classic_rebalances(evidence):
            for history in histories:
                yield Explained(span, "a classic rebalance waits for a member", history.name)


def _of_faults(evidence: Evidence, history: History, until: float) -> Iterator[Explained]:
    number = int(history.name.rpartition("-")[2])
    every_tick = sorted({at for ticks in evidence.ticks.values() for at in ticks})
    for fault in evidence.faults:
        is_of_others = fault.partitions is not None and number not in fault.partitions
        if is_of_others and not _has_just_lost(evidence, history, fault, until):
            continue
        mended_at = fault.end(until)
        if evidence.is_streaming:
            end = _end_beside_streams(fault, history, mended_at)
        elif fault.kind in OF_MEMBERS:
            moved_at = next((at for at, _ in history.owners if at > fault.began_at), until)
            end = min(moved_at, fault.began_at + GONE_LIMIT_S)
        elif fault.kind in OF_RUNS:
            created = [run.created_at for run in history.runs if run.created_at > fault.began_at]
            end = min([*created, mended_at + DEATH_LIMIT_S])
        elif fault.kind in OF_BROKERS:
            end = mended_at + AFTERMATH_S
        elif fault.kind in OF_DAGSTER:
            end = max(mended_at + AFTERMATH_S, _second_tick(evidence, history, mended_at))
        elif fault.kind is Kind.DAEMON_KILLED:
            end = next(iter([at for at in every_tick if at > mended_at][1:]), until)
        else:
            continue
        yield Explained(Span(fault.began_at, end), fault.kind.value, history.name, is_fault=True)


def _has_just_lost(evidence: Evidence, history: History, fault: Fault, until: float) -> bool:
    """Return whether Kafka has taken the partition from the run before its fault.

    The next owner waits for the end of that run if a batch was at work, and the fault prolongs it.
    """
    if not evidence.is_streaming:
        return False
    ids = _ids(evidence, fault)
    return any(
        owner in ids and 0 <= fault.began_at - span.end <= HEARTBEAT_TIMEOUT_S
        for span, owner in history.owned(until)
    )


def _ids(evidence: Evidence, fault: Fault) -> set[object]:
    """Return the member ids of the target of a fault, up to the fault."""
    return {
        event.metadata["member_id"]
        for event in evidence.assigned
        if event.member.startswith(fault.target) and event.at <= fault.began_at
    }


def _end_beside_streams(fault: Fault, history: History, mended_at: float) -> float:
    """Return the end of a fault's effect on streaming runs.

    They need no daemon, no code server and no ticks.
    """
    began_at = since = fault.began_at
    is_long = mended_at - began_at > LEASE_S
    if fault.kind in OF_BROKERS or (fault.kind in OF_STORAGE and not is_long):
        return mended_at + AFTERMATH_S
    if fault.kind in OF_RUNS:
        end = began_at + TAKEN_OVER_S
        if fault.kind is Kind.RUN_FROZEN and mended_at - began_at < SESSION_TIMEOUT_S:
            end = mended_at + AFTERMATH_S
    elif fault.kind in {Kind.CODE_SERVER_KILLED, *OF_STORAGE}:
        # All runs are gone: the partition has no owner until a new one has joined.
        owned = [at for at, owner in history.owners if owner is not None and at > mended_at]
        end = min(owned[:1] or [mended_at + START_LIMIT_S]) + TAKEN_OVER_S
        since = mended_at  # their earlier batches have ended with them
    else:
        return began_at
    others = [
        run.created_at
        for run in history.runs
        if run.created_at > since
        and (run.by != fault.target or run.created_at > mended_at > began_at)
    ]
    return min([end, *others])


def _second_tick(evidence: Evidence, history: History, since: float) -> float:
    """Return the time of the second tick of the owner of a partition."""
    ticks = evidence.ticks.get(history.owner_at(since) or "", ())
    following = [at for at in ticks if at > since][:2]
    return min([*following[1:], since + PATIENCE_S])


def _given_to_leaving_members(
    evidence: Evidence, history: History, until: float
) -> Iterator[Explained]:
    """Kafka assigns more partitions to a draining member that is about to leave."""
    for left in evidence.left:
        causes = [
            fault
            for fault in evidence.faults
            if fault.kind in LEAVING
            and fault.began_at <= left.at
            and (fault.target == left.member or fault.kind is Kind.CODE_DEPLOYED)
        ]
        if not causes:
            continue
        cause = max(causes, key=lambda fault: fault.began_at)
        process = left.metadata["incarnation"]
        ids = {
            event.metadata["member_id"]
            for event in evidence.assigned
            if event.metadata["incarnation"] == process
        }
        for span, owner in history.owned(until):
            if owner in ids and cause.began_at <= span.begin < left.at:
                end = min(span.end, left.at, cause.began_at + GONE_LIMIT_S)
                yield Explained(Span(span.begin, end), cause.kind.value, history.name)


def _given_to_dead_members(
    evidence: Evidence, history: History, until: float
) -> Iterator[Explained]:
    """Kafka assigns more partitions to a dead member until it detects the loss."""
    for fault in evidence.faults:
        if fault.kind not in evidence.of_members:
            continue
        ids = _ids(evidence, fault)
        # A process that comes back is another member, which is already known.
        known_at = fault.end(until)
        if fault.kind in OF_RUNS:
            known_at = fault.began_at + SESSION_TIMEOUT_S
        for span, owner in history.owned(until):
            if owner in ids and fault.began_at - HEARTBEAT_S <= span.begin <= known_at:
                end = min(span.end, fault.began_at + GONE_LIMIT_S)
                began_at = max(span.begin, fault.began_at)
                yield Explained(Span(began_at, end), fault.kind.value, history.name)


def _missed_by_kafka(evidence: Evidence, history: History, until: float) -> Iterator[Explained]:
    """Kafka may detect a loss only at the end of the session.

    A commit that waits for a broker delays the heartbeats behind it. The client loses an answer
    with them, and joins again after the coordinator has removed it.
    """
    for span, owner in history.owned(until):
        is_missed = owner is not None and history.owner_at(span.end) is None
        has_left = any(span.end - HEARTBEAT_S <= left.at <= span.end for left in evidence.left)
        if not is_missed or has_left:
            continue
        for fault in evidence.faults:
            known_at = fault.end(until) + SESSION_TIMEOUT_S
            if fault.kind in OF_BROKERS and fault.began_at <= span.end <= known_at:
                begin = max(span.begin, fault.began_at)
                yield Explained(Span(begin, span.end), fault.kind.value, history.name)


def _on_its_way(evidence: Evidence, history: History) -> Iterator[Explained]:
    """Kafka has decided, but the member learns it with its next heartbeat, once a second.

    A broker fault may lose the heartbeat's answer with the assignment. The coordinator does not
    repeat it until it moves or the assignment changes.
    """
    told = [event.at for event in evidence.assigned if history.name in event.partitions]
    for since, owner in history.owners:
        if owner is not None:
            heard_at = next((at for at in told if at >= since), since)
            limit_s = GONE_LIMIT_S if _is_answer_lost(evidence, since) else ON_ITS_WAY_S
            yield Explained(
                Span(since, min(heard_at, since + limit_s)),
                "on its way to its new owner",
                history.name,
            )


def _is_answer_lost(evidence: Evidence, at: float) -> bool:
    """Return whether a broker was away when the coordinator assigned a partition."""
    return any(
        fault.kind in OF_BROKERS
        and fault.began_at <= at + HEARTBEAT_S
        and (fault.mended_at is None or at <= fault.mended_at + AFTERMATH_S)
        for fault in evidence.faults
    )


def _without_ticks(
    ticks: Mapping[str, Sequence[float]], history: History, until: float
) -> Iterator[Explained]:
    for span, owner in history.owned(until):
        for before, after in pairwise([*ticks.get(owner or "", ()), until]):
            gap = Span(max(span.begin, before + PATIENCE_S), min(span.end, after + 1))
            if gap.seconds > 0:
                yield Explained(
                    gap, "Dagster did not evaluate the sensor of its owner", history.name
                )


def _classic_rebalances(evidence: Evidence) -> Iterator[Span]:
    """Return the times in which classic members wait in a rebalance, and no commit is answered.

    A rebalance waits for all members, including those that hold or are unavailable.
    """
    for hold in evidence.holds:
        yield Span(hold.ended_at - hold.seconds, hold.ended_at + HEARTBEAT_S)
    for event in evidence.assigned:
        yield Span(event.at - HEARTBEAT_S, event.at)
    for fault in evidence.faults:
        if fault.kind in evidence.of_members:
            moved = [event.at for event in evidence.assigned if event.at > fault.began_at]
            yield Span(fault.began_at, min([*moved, fault.began_at + GONE_LIMIT_S]))
