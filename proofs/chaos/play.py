"""The play: inject faults, then wait without faults until all records are processed.

It stops if a process has ended unexpectedly, or if the group does not recover.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import dagster as dg

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.orchestration.storage.run_tags import GROUP_TAG
from proofs.chaos import on_kafka, on_members, on_runs, on_storage, on_streams
from proofs.chaos.bad import Bad
from proofs.chaos.draw import Draw
from proofs.chaos.exchange import GROUP, RUNS, SENSOR, TOPIC
from proofs.chaos.faults import Fault, Faults, Ground, Kind
from proofs.chaos.letters import Letters
from proofs.chaos.parts import STREAMS
from proofs.witness.catalogue import CatalogueReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from proofs.chaos.faults import UnderWay
    from proofs.chaos.parts import Parts
    from proofs.witness.catalogue import Event

_T = TypeVar("_T")
BEGIN_LIMIT_S = 180.0
PEACE_LIMIT_S = 420.0
WORK_LIMIT_S = 30.0
STORAGE_LIMIT_S = 120.0
"""A member that is suspended inside a write blocks Dagster's storage until it is resumed."""
_LOOK_EVERY_S = 0.25
_SAME_MOMENT_S = 5.0
_ANY: dict[Kind, Callable[[Ground], UnderWay | None]] = {
    Kind.CODE_SERVER_RELOADED: on_members.reload,
    Kind.BROKER_KILLED: on_kafka.kill_broker,
    Kind.COORDINATOR_MOVED: on_kafka.move_coordinator,
    Kind.PARTITIONS_ADDED: on_kafka.add_partition,
    Kind.DAEMON_KILLED: on_members.kill_daemon,
    Kind.RUN_WORKER_KILLED: on_runs.kill_worker,
    Kind.RUN_FAILED: on_runs.fail,
    Kind.RUN_DELETED: on_runs.delete,
    Kind.RUN_FORCE_TERMINATED: on_runs.force_terminate,
    Kind.RUN_CUT_OFF_FROM_STORAGE: on_runs.cut_off,
    Kind.SPARK_KILLED: on_kafka.kill_spark,
    Kind.STORAGE_LOCKED: on_storage.lock,
    Kind.STORAGE_HANGS: on_storage.hang,
}
STRIKES = _ANY | {
    Kind.MEMBER_KILLED: on_members.kill,
    Kind.MEMBER_TERMINATED: on_members.terminate,
    Kind.MEMBER_FROZEN: on_members.freeze,
    Kind.CODE_SERVER_KILLED: on_members.kill_with_runs,
    Kind.RUN_RE_EXECUTED_IN_PART: on_runs.re_execute_in_part,
    Kind.LAUNCH_REFUSED: on_runs.refuse_launches,
    Kind.OFFSETS_DELETED: on_kafka.delete_offsets,
    Kind.TOPIC_MADE_ANEW: on_kafka.make_topic_anew,
}
"""The faults with code locations as members."""
STREAMING_STRIKES = _ANY | {
    Kind.RUN_FROZEN: on_streams.freeze,
    Kind.RUN_FROZEN_LONG: on_streams.freeze_long,
    Kind.RUN_CANCELLED: on_streams.cancel,
    Kind.LAUNCH_REFUSED: on_streams.refuse_launches,
    Kind.CODE_DEPLOYED: on_streams.deploy,
    Kind.CODE_SERVER_AWAY: on_streams.kill_code_server,
    Kind.CODE_SERVER_KILLED: on_streams.kill_with_runs,
}
"""The faults with streaming runs as members."""
_TOLD_EVERY_S = 20.0
_LOAD_EVERY_S = 5.0
_OVER = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]


class Assigned:
    """Owners of partitions by the members' own reports.

    Reports of two members may arrive in any order, and a killed member reports nothing more, so an
    assignment replaces an older one of another member.
    """

    def __init__(self) -> None:
        self._since: dict[str, dict[str, float]] = {}

    @property
    def members(self) -> list[str]:
        """The members with partitions."""
        return [member for member, since in self._since.items() if since]

    def of(self, member: str) -> frozenset[int]:
        """Return the numbers of a member's partitions."""
        return frozenset(int(name.rpartition("-")[2]) for name in self._since.get(member, ()))

    def take(self, event: Event) -> None:
        """Apply a report."""
        mine = self._since.setdefault(event.member, {})
        if event.kind == "assigned":
            for since in self._since.values():
                for name in event.partitions:
                    if since.get(name, event.at) < event.at - _SAME_MOMENT_S:
                        del since[name]
            mine.update(dict.fromkeys(event.partitions, event.at))
        elif event.kind == "hold":
            for name in event.partitions:
                mine.pop(name, None)


class Play:
    """Injects faults, and waits for the recovery.

    Args:
        parts: All processes.
        seed: Seed of the draw.
        say: Receives a sentence for every event.

    Attributes:
        faults: The injected faults.
        catalogue: The records of the group in Dagster.
        ends: Observed ends of the partitions over time.
        letters: The dead letters, if records are bad.
    """

    def __init__(self, parts: Parts, seed: int, say: Callable[[str], None]) -> None:
        self.catalogue = CatalogueReader(parts.instance, GROUP)
        self.ends: list[tuple[float, list[int]]] = []
        self.letters = (
            Letters(parts.instance, parts.kafka.bootstrap_servers, parts.bad) if parts.bad else None
        )
        self._assigned = Assigned()
        chance = random.Random(seed)  # noqa: S311 - no secret
        strikes = STREAMING_STRIKES if parts.is_streaming else STRIKES
        self.faults = Faults(Ground(parts, chance, self._assigned.of), strikes)
        missing = {
            Kind.SPARK_KILLED: parts.spark is None,
            Kind.STORAGE_HANGS: parts.postgres is None,
            Kind.RUN_RE_EXECUTED_IN_PART: parts.bad is Bad.BISECT,  # the job has one asset
        }
        kinds = [kind for kind in Kind if kind in strikes and not missing.get(kind)]
        self._draw = Draw(kinds, chance)
        self._parts = parts
        self._say = say
        self._cancelled: set[str] = set()
        self._tell_at = 0.0
        self._load_at = 0.0
        self._answered_at = time.monotonic()

    def run(self, faults: int) -> None:
        """Play.

        Raises:
            DagsterRebalanceError: A process has ended unexpectedly, or records remain at the end.
        """
        for location in self._parts.locations:
            self._parts.dagster.ui.start_sensor(location, SENSOR)
        members = RUNS if self._parts.is_streaming else len(self._parts.locations)
        self._until(
            "every member to have partitions",
            lambda: len(self._assigned.members) == members,
            BEGIN_LIMIT_S,
        )
        if self._parts.fleeting is not None:
            self._parts.fleeting.begin()
        while len(self.faults.done) < faults:
            self._rest()
            self._draw.next(self._strike)
        self._until("all faults to be repaired", lambda: not self.faults.under_way, PEACE_LIMIT_S)
        self._parts.producer.stop()
        self._until("everything to be worked off", lambda: not self._lags(), PEACE_LIMIT_S)
        if self.letters is not None:
            self._say("all records are committed; the bad ones are replayed with mended code")
            self.letters.check(self._parts.producer.confirmed, self._parts.rows())
            self._parts.exchange.mend()
            self._until("all letters to be replayed", self.letters.replay, PEACE_LIMIT_S)
            self.letters.discard()
        if self._parts.is_streaming:
            # Only the sensor ends a run whose launch was lost with a daemon that was killed.
            self._until("all runs to have started", self._have_all_started, PEACE_LIMIT_S)
            self._parts.dagster.ui.stop_sensor(STREAMS, SENSOR)
        self._until("all runs to end", self._have_all_ended, PEACE_LIMIT_S)

    def _have_all_started(self) -> bool:
        """Return whether every live run works."""
        live = self._asked(self._live_runs)
        return live is not None and all(run.status is dg.DagsterRunStatus.STARTED for run in live)

    def _have_all_ended(self) -> bool:
        """Return whether no run is live. Streaming runs are cancelled to leave in order."""
        live = self._asked(self._live_runs)
        for run in live or () if self._parts.is_streaming else ():
            if run.run_id not in self._cancelled:
                with suppress(DagsterRebalanceError):  # not while it is being launched
                    self._parts.dagster.ui.cancel(run.run_id)
                    self._cancelled.add(run.run_id)
        return live == []

    def _rest(self) -> None:
        """Wait before the next fault."""
        now = time.monotonic()
        pause_until = now + self._draw.pause_s()
        patience_until = now + WORK_LIMIT_S if self._draw.waits_for_work() else now
        commits = len(self.catalogue.recorded)
        while (now := time.monotonic()) < pause_until or (
            now < patience_until and len(self.catalogue.recorded) == commits
        ):
            self._look()

    def _strike(self, kind: Kind) -> bool:
        fault = self._asked(lambda: self.faults.strike(kind))
        if fault is not None:
            self._say(f"fault {len(self.faults.done)}: {_told(fault)}")
        return fault is not None

    def _look(self) -> None:
        for fault in self.faults.take_mended():
            self._say(f"mended: {_told(fault)}")
        self.ends.append((time.time(), self._parts.producer.ends))
        for event in self._asked(self.catalogue.read) or ():
            self._assigned.take(event)
            self._say(f"{event.member}: {event.text}")
        self._check_parts()
        self._load_what_is_broken()
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _TOLD_EVERY_S
            self._say(self._state())
        time.sleep(_LOOK_EVERY_S)

    def _asked(self, question: Callable[[], _T]) -> _T | None:
        """Return an answer of Dagster's storage, or None in an outage."""
        try:
            answer = question()
        except Exception:  # whatever it raises
            if time.monotonic() - self._answered_at > STORAGE_LIMIT_S:
                raise
            return None
        self._answered_at = time.monotonic()
        return answer

    def _load_what_is_broken(self) -> None:
        """Reload code locations that show an error, as an operator does.

        Dagster's code server keeps the error of a storage that was locked during its start.
        """
        is_storage_away = any(map(self._suffers, (Kind.STORAGE_LOCKED, Kind.STORAGE_HANGS)))
        if is_storage_away or time.monotonic() < self._load_at:
            return
        self._load_at = time.monotonic() + _LOAD_EVERY_S
        with suppress(DagsterRebalanceError):  # the webserver is busy, or the code is still broken
            for name in self._parts.dagster.ui.broken_locations():
                if self._parts.dagster.locations[name].server.is_running:
                    self._say(f"{name} could not be loaded, and is loaded again")
                    self._parts.dagster.ui.reload(name)

    def _check_parts(self) -> None:
        self._parts.producer.check()
        struck = {one.fault.target for one in self.faults.under_way}
        processes = [
            location.server
            for name, location in self._parts.dagster.locations.items()
            if name not in struck
        ]
        processes += [self._parts.dagster.daemon] if not self._suffers(Kind.DAEMON_KILLED) else []
        for process in processes:
            if not process.is_running:
                msg = (
                    f"{process.name} ended unexpectedly with exit code {process.exit_code}; "
                    f"{process.log} ends with:\n{process.tail()}"
                )
                raise DagsterRebalanceError(msg)

    def _suffers(self, kind: Kind) -> bool:
        return any(one.fault.kind is kind for one in self.faults.under_way)

    def _until(self, what: str, is_so: Callable[[], bool], limit_s: float) -> None:
        deadline_at = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() >= deadline_at:
                msg = f"timed out after {limit_s:g} s waiting for {what}; {self._state()}"
                raise DagsterRebalanceError(msg)
            self._look()

    def _committed(self) -> dict[str, int]:
        return {str(one.range.topic_partition): one.range.until for one in self.catalogue.recorded}

    def _lags(self) -> dict[str, int]:
        committed = self._committed()
        ends = {f"{TOPIC}-{number}": end for number, end in enumerate(self._parts.producer.ends)}
        return {
            name: end - committed.get(name, 0)
            for name, end in ends.items()
            if end > committed.get(name, 0)
        }

    def _live_runs(self) -> list[dg.DagsterRun]:
        runs = self._parts.instance.get_runs(dg.RunsFilter(tags={GROUP_TAG: GROUP}), limit=100)
        return [run for run in runs if run.status not in _OVER]

    def _state(self) -> str:
        lags = self._lags()
        behind = ", ".join(
            f"{name} by {lag}" for name, lag in sorted(lags.items(), key=lambda item: -item[1])[:4]
        )
        known = () if self._parts.is_streaming else self._parts.locations
        members = sorted({*known, *self._assigned.members})
        owners = "; ".join(f"{member} has {len(self._assigned.of(member))}" for member in members)
        live = self._asked(self._live_runs)
        runs = "Dagster's storage does not answer" if live is None else f"{len(live)} runs live"
        return (
            f"{owners} partitions; lag {sum(lags.values())}{f' ({behind})' if behind else ''}; "
            f"{runs}"
        )


def _told(fault: Fault) -> str:
    return f"{fault.kind.value}: {fault.target}"
