"""The acts of the story of per-batch runs.

They turn sensors on, send a signal and stop the producer; the members do everything else.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.markup import escape

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from proofs.demo.per_batch.board import LaneBoard, painted
from proofs.demo.per_batch.parts import BLUE, GREEN, SENSOR, WORK_S
from proofs.demo.story import check_running
from proofs.demo.view import plain, short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from proofs.demo.per_batch.parts import Parts
    from proofs.demo.per_batch.state import Lane, Snapshot, Watcher
    from proofs.demo.view import View
    from proofs.witness.catalogue import Event

ACT_LIMIT_S = 600.0
_LOOK_EVERY_S = 1.0
_BLUE_ALONE_COMMITS = 8
_TAKEN_OVER_COMMITS = 2
_SLOW_S = 10.0
_AT_ITS_BEGINNING_S = 11.0
"""Remaining simulated work of a slow run that has just begun: enough for green to join and for a
visible hold."""
_WORK_LEFT_S = 8.0


@dataclass
class Play:
    """Plays the acts in order."""

    parts: Parts
    watcher: Watcher
    view: View

    def run(self) -> None:
        """Play all acts.

        Raises:
            DagsterRebalanceError: An act timed out, or a process has ended unexpectedly.
        """
        self.blue_alone()
        self.green_joins()
        self.green_takes_over()
        self.blue_leaves()
        self.catch_up()

    def blue_alone(self) -> None:
        """One member works on all partitions."""
        self.view.act(
            "Act 1",
            f"{painted(BLUE)} works alone: all {len(self.parts.partitions)} partitions are its own",
        )
        self.parts.dagster.ui.start_sensor(BLUE, SENSOR)
        self._until(
            "the first commits", lambda _: len(self.watcher.recorded) >= _BLUE_ALONE_COMMITS
        )

    def green_joins(self) -> None:
        """A second member joins while runs are in flight; the first one drains some partitions."""
        self._until(
            "a slow run of blue to begin",
            lambda now: _slow_work_left_s(now.lanes) >= _AT_ITS_BEGINNING_S,
        )
        self.view.act(
            "Act 2",
            f"{painted(GREEN)} joins while runs of {painted(BLUE)} are in flight: only what moves "
            "is drained",
        )
        self.parts.dagster.ui.start_sensor(GREEN, SENSOR)
        self._until(
            "blue to give up its part",
            lambda _: any(hold.member == BLUE for hold in self.watcher.holds),
        )

    def green_takes_over(self) -> None:
        """Both members work on their partitions."""
        self.view.act(
            "Act 3",
            f"{painted(GREEN)} takes over the drained partitions, from the offsets that "
            f"{painted(BLUE)} committed",
        )
        self._until("green to commit", lambda _: self._commits_of(GREEN) >= _TAKEN_OVER_COMMITS)
        # A server that is shut down starts no runs: only those that have begun can be drained.
        self._until(
            "blue to be at slow work",
            lambda now: _slow_work_left_s(now.owned_by(BLUE), begun=True) >= _WORK_LEFT_S,
        )

    def blue_leaves(self) -> None:
        """The first member's code server is shut down, as in a deploy, with runs in flight.

        The member drains them, commits and leaves.
        """
        self.view.act(
            "Act 4",
            f"{painted(BLUE)} is shut down as in a deploy (SIGTERM), with runs in flight: it "
            "drains, commits and leaves",
        )
        self.watcher.leaving.add(BLUE)
        self.parts.dagster.locations[BLUE].server.send(signal.SIGTERM)
        everything = len(self.parts.partitions)
        self._until("green to own everything", lambda now: len(now.owned_by(GREEN)) == everything)

    def catch_up(self) -> None:
        """The producer stops, and the backlog is processed."""
        self.view.act("Act 5", f"the producer stops, {painted(GREEN)} catches up")
        self.parts.producer.stop()
        self._until("everything to be committed", lambda now: now.lag == 0 and not now.runs)
        self.view.clear()

    def _commits_of(self, member: str) -> int:
        return sum(one.member == member for one in self.watcher.recorded)

    def _until(self, what: str, is_so: Callable[[Snapshot], bool]) -> None:
        deadline_at = time.monotonic() + ACT_LIMIT_S
        while True:
            told = len(self.watcher.events)
            snapshot = self.watcher.look(self.parts.producer.ends)
            for event in self.watcher.events[told:]:
                self.view.say(_told(event))
            board = LaneBoard(snapshot)
            self.view.show(board, what)
            if is_so(snapshot):
                return
            self._check_parts()
            if time.monotonic() >= deadline_at:
                state = plain(board.in_words())
                msg = f"timed out after {ACT_LIMIT_S:g} s waiting for {what}; {state}"
                raise DagsterRebalanceError(msg)
            time.sleep(_LOOK_EVERY_S)

    def _check_parts(self) -> None:
        expected = [self.parts.dagster.daemon]
        expected += [
            location.server
            for name, location in self.parts.dagster.locations.items()
            if name not in self.watcher.leaving
        ]
        check_running(expected)


def _told(event: Event) -> str:
    if event.kind == "assigned":
        return f"{painted(event.member)} was assigned {short(event.partitions)}"
    if event.kind == "hold":
        return f"{painted(event.member)}: {escape(event.text)}"
    return escape(event.text).replace(event.member, painted(event.member), 1)


def _slow_work_left_s(lanes: Iterable[Lane], *, begun: bool = False) -> float:
    """Return the minimum remaining simulated work of the runs on slow partitions.

    Starting runs count unless `begun`.
    """
    return min(
        (_work_left_s(lane, begun=begun) for lane in lanes if _work_s(lane) > _SLOW_S), default=0.0
    )


def _work_left_s(lane: Lane, *, begun: bool) -> float:
    if lane.run is None or lane.run.is_queued or (begun and not lane.run.seconds):
        return 0.0
    return _work_s(lane) - lane.run.seconds


def _work_s(lane: Lane) -> float:
    return WORK_S[int(lane.name.rpartition("-")[2])]
