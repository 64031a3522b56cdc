"""The acts of the story of streaming runs.

They turn the sensor on, deploy, kill a process and stop the producer; the runs do everything else.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.markup import escape

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from proofs.demo.story import check_running
from proofs.demo.streaming.board import StreamBoard, painted
from proofs.demo.streaming.parts import LOCATION, PARTITIONS, SENSOR, SESSION_TIMEOUT_S
from proofs.demo.streaming.state import Life, run_of
from proofs.demo.view import plain, short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proofs.demo.streaming.parts import Parts
    from proofs.demo.streaming.state import Snapshot, StreamingRun, Watcher
    from proofs.demo.view import View
    from proofs.witness.catalogue import Event

ACT_LIMIT_S = 180.0
_LOOK_EVERY_S = 0.25
_STEADY_S = 4.0
"""Time that an act continues to be watched after its last event."""
_KILL_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Act:
    """A played act, with its times in seconds since 1970."""

    name: str
    began_at: float
    ended_at: float


@dataclass
class Play:
    """Plays the acts in order.

    Attributes:
        played: The played acts.
        left: The runs of the old code after the deploy.
        victim: The killed run.
    """

    parts: Parts
    watcher: Watcher
    view: View
    played: list[Act] = field(default_factory=list)
    left: list[StreamingRun] = field(default_factory=list)
    victim: StreamingRun | None = None

    def run(self) -> None:
        """Play all acts.

        Raises:
            DagsterRebalanceError: An act timed out, or a process has ended unexpectedly.
        """
        self.first_run()
        with self.parts.producer:
            self.one_run_works()
            self.second_run_joins()
            self.new_code_is_deployed()
            self.run_is_killed()
            self.producer_stops()
        self.view.clear()

    def first_run(self) -> None:
        """The sensor starts a run, which joins the group."""
        self.view.step("starting a streaming run: a Dagster run that stays, and joins the group")
        self.parts.dagster.ui.start_sensor(LOCATION, SENSOR)
        self._until("the run to join", lambda now: now.owners == {1})

    def one_run_works(self) -> None:
        """Records are produced, and one run works on all partitions."""
        with self._act("one run", f"records come; one run works on all {PARTITIONS} partitions"):
            self._watch_for("commits of all partitions", 1.5 * _STEADY_S)

    def second_run_joins(self) -> None:
        """A second run takes its share."""
        with self._act(
            "a second run joins",
            "two runs are wanted instead of one: the second takes its share, the first keeps "
            "working on the rest",
        ):
            self._meanwhile("the code location to load again", lambda: self.parts.scale_to(2))
            self._until("the second run to take its share", lambda now: now.owners == {1, 2})
            self._watch_for("commits of all partitions", _STEADY_S)

    def new_code_is_deployed(self) -> None:
        """Runs with the new code join, and the old ones leave one by one."""
        old = {run.run_id for run in self._look().runs}
        with self._act(
            "deploy of new code",
            "a deploy: the code of the asset changes. Runs with the new code join first, then "
            "the old ones leave, one by one, each at the end of its batch",
        ):
            self._meanwhile(
                "the code location to load the new code",
                lambda: self.parts.deploy('CODE = "v1"', 'CODE = "v2"'),
            )
            snapshot = self._until(
                "the new code to have all partitions",
                lambda now: (
                    all(
                        lane.owner is not None and lane.owner.run_id not in old
                        for lane in now.lanes
                    )
                    and all(run.life is Life.LEFT for run in now.runs if run.run_id in old)
                ),
            )
            self.left = [run for run in snapshot.runs if run.run_id in old]
            self._watch_for("commits of all partitions", _STEADY_S)

    def run_is_killed(self) -> None:
        """A run is killed."""
        self.victim = victim = self._owner_of_most()
        with self._act(
            "kill -9",
            f"kill -9 of {painted(victim)} in the middle of a batch. Kafka notices when the "
            f"session times out: after {SESSION_TIMEOUT_S} s here, 45 s by default",
        ):
            self._kill(victim)
            self._until(
                "Kafka to give its partitions to others",
                lambda now: not {victim.number, 0} & now.owners,
            )
            ends = self.parts.producer.ends
            self._until(
                "them to process the backlog",
                lambda now: all(lane.committed >= ends[lane.number] for lane in now.lanes),
            )

    def producer_stops(self) -> None:
        """The producer stops, and the backlog is processed."""
        with self._act("the producer stops", "the producer stops, and all records get committed"):
            self.parts.producer.stop()
            self._until(
                "everything to be committed, and shown in Dagster",
                lambda now: now.lag == 0 and self.watcher.recorded_until() == now.committed,
            )

    def _kill(self, run: StreamingRun) -> None:
        """Kill the run as soon as it has begun a batch."""
        process = self.watcher.process_of(run)
        if process is None:
            msg = f"{run.name} ({run.run_id}) has not logged its process"
            raise DagsterRebalanceError(msg)
        self._look()
        before = dict(self.watcher.work.in_hand)
        deadline_at = time.monotonic() + _KILL_LIMIT_S
        while not any(
            at_work.run_id == run.run_id and at_work != before.get(number)
            for number, at_work in self.watcher.work.in_hand.items()
        ):
            if time.monotonic() > deadline_at:
                msg = f"{run.name} has begun no batch for {_KILL_LIMIT_S:g} s"
                raise DagsterRebalanceError(msg)
            time.sleep(0.001)
            self.watcher.look_at_kafka()
        os.kill(process, signal.SIGKILL)
        self.watcher.killed.add(run.run_id)
        self.view.say(f"kill -9 {process}, the process of {painted(run)}")

    def _owner_of_most(self) -> StreamingRun:
        owners = [lane.owner for lane in self._look().lanes if lane.owner is not None]
        return max(owners, key=owners.count)

    @contextmanager
    def _act(self, name: str, text: str) -> Iterator[None]:
        self.view.act(f"Act {len(self.played) + 1}", text)
        began_at = time.time()
        yield
        self.played.append(Act(name, began_at, time.time()))

    def _meanwhile(self, what: str, action: Callable[[], None]) -> None:
        """Run a slow call while the view is updated."""
        with ThreadPoolExecutor(1) as thread:
            doing = thread.submit(action)
            self._until(what, lambda _: doing.done())
        doing.result()

    def _watch_for(self, what: str, seconds: float) -> None:
        began_at = time.time()
        self._until(
            what,
            lambda now: now.committed_since(began_at) and time.time() >= began_at + seconds,
        )

    def _until(self, what: str, is_so: Callable[[Snapshot], bool]) -> Snapshot:
        deadline_at = time.monotonic() + ACT_LIMIT_S
        while True:
            snapshot = self._look()
            board = StreamBoard(snapshot)
            self.view.show(board, what)
            if is_so(snapshot):
                return snapshot
            check_running(
                [self.parts.dagster.daemon, self.parts.dagster.locations[LOCATION].server]
            )
            self.parts.producer.check()
            if time.monotonic() >= deadline_at:
                state = plain(board.in_words())
                msg = f"timed out after {ACT_LIMIT_S:g} s waiting for {what}; {state}"
                raise DagsterRebalanceError(msg)
            time.sleep(_LOOK_EVERY_S)

    def _look(self) -> Snapshot:
        snapshot = self.watcher.look(self.parts.producer.ends)
        for event in self.watcher.take_events():
            if told := self._told(event):
                self.view.say(told)
        return snapshot

    def _told(self, event: Event) -> str:
        run = self.watcher.named(run_of(event))
        name = painted(run) if run else event.member
        if event.kind == "joined" and run:
            return f"{name} joins (Dagster run {run.run_id[:8]}, code {run.code})"
        if event.kind == "assigned":
            return f"{name} is assigned {short(event.partitions)}"
        if event.kind == "hold":
            return f"{name}: {escape(event.text)}"
        if event.kind == "left":
            return f"{name} has left: {escape(str(event.metadata['reason']))}"
        return ""
