"""A code-server process: the real member loop, consumer and engine on simulated ports.

Its sensor ticks, and its network fails. While it waits for an answer all others continue, so
anything can happen between two of its requests.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.errors import BrokerError, DagsterRebalanceError
from dagster_rebalance.core.model.events import LeaveRequested, TickArrived
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.runs.stream_batch import batch_ids
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.member.mailbox import Mailbox
from proofs.simulation.client import SimulatedMember
from proofs.simulation.clockwork import Violation
from proofs.simulation.cluster import SimulatedCluster
from proofs.simulation.coordinator import TOPIC
from proofs.simulation.hanging import Hanging
from proofs.simulation.ports import SimulatedCatalogue, SimulatedDeadLetters, SimulatedRuns
from proofs.simulation.streams import SimulatedWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.model.directives import Directive
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from proofs.simulation.classic import ClassicGroup
    from proofs.simulation.clockwork import Clockwork
    from proofs.simulation.consumer_protocol import ConsumerGroup
    from proofs.simulation.progress import Wait
    from proofs.simulation.streams import StreamingDagster
    from proofs.simulation.weather import Weather

_CONFIG = {
    "consumer": {"group.protocol": "consumer"},
    "cooperative": {
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
    },
    "eager": {"group.protocol": "classic", "partition.assignment.strategy": "range"},
}
_LONG_S = 1.0
_HANGS_S = (5.0, 20.0, 130.0)
_CLOCKS_APART_S = 4096.0
"""Offsets between the monotonic clocks of processes."""
_ABANDONED_AFTER_S = 9.0
"""Longer than a request, and shorter than Kafka's session timeout."""
_ANSWERED_WITHIN_S = 10.0
"""A later answer never comes: the connection is lost."""
_HANG_IS_BORNE_S = 80.0
"""After this time a member must use a new connection."""


class ProcessKilledError(BaseException):
    """Unwinds a killed process; must not be caught."""


class _SteppedPump(MemberLoop):
    """The real member loop, stepped from outside."""

    has_orders = True

    def begin(self) -> None:
        """Run the part of `run` before its first turn."""
        self.dependencies.consumer.subscribe(list(self.dependencies.topics))
        self._show(self.dependencies.catalogue.record_joined)

    def turn(self) -> None:
        self._turn()
        if self._mailbox.is_abandoned:
            self._leave(self._left or "another member has taken its place")

    def _answer(self, command: commands.Command) -> events.Event | None:
        """Without directives this is no query, which would consume random numbers."""
        if isinstance(command, commands.ReadDirectives) and not self.has_orders:
            return events.DirectivesRead((), command.epoch)
        return super()._answer(command)

    @property
    def left(self) -> str | None:
        return self._left


class Process:
    """One member and its sensor.

    Args:
        incarnation: `<side>.<number>`: a newer process of a side succeeds an older one.
        clockwork: Time and chance.
        group: The coordinator.
        dagster: Dagster.
        weather: The weather.
        new_batch_id: Returns batch ids.
        has_orders: Whether operators pause partitions.
        is_streaming: Whether the process is a streaming run instead of a code server.
        is_replica: Whether it shares its ticks with another replica.
    """

    def __init__(
        self,
        incarnation: str,
        clockwork: Clockwork,
        *,
        group: ClassicGroup | ConsumerGroup,
        dagster: StreamingDagster,
        weather: Weather,
        new_batch_id: Callable[[int], str],
        has_orders: bool = False,
        is_streaming: bool = False,
        is_replica: bool = False,
    ) -> None:
        self.incarnation = incarnation
        self.is_replica = is_replica
        self.has_orders = has_orders
        self.clockwork = clockwork
        self.weather = weather
        self.skew = 0.0
        self.clock_base = _CLOCKS_APART_S * int(incarnation.partition(".")[2])
        self.is_gone = self.is_paused = self.is_retired = False
        self.is_hung = False
        self.is_connected = self.has_storage = True
        self.awake_since = float("-inf")
        self.ignorant_since: float | None = None
        self._paused_since: dict[tuple[TopicPartition, Directive], float] = {}
        self._assigned: dict[tuple[TopicPartition, int], float] = {}
        self._turn_began_at = float("-inf")
        self.waits_since: dict[tuple[TopicPartition, int, int, Wait], float] = {}
        self.done_since: dict[tuple[TopicPartition, int, int], float] = {}
        self.after_turn: Callable[[Process], None] = lambda _: None
        self.start_another: Callable[[], None] = lambda: None
        self._killed = False
        self._hanging: Hanging | None = None
        self._launcher_hangs: set[Hanging] = set()
        self._slow: set[Hanging] = set()
        self._hangs_since: float | None = None
        self._dagster = dagster
        self._group = group
        self._waits_for: dict[TopicPartition, frozenset[str]] = {}
        self._drains_until = 0.0
        self.member = SimulatedMember(self, group)
        self.catalogue = SimulatedCatalogue(self, dagster)
        self.letters = SimulatedDeadLetters(self, dagster)
        self.mailbox = Mailbox(self.clock)
        runs = SimulatedRuns(self, dagster)
        self.work: SimulatedWork | None = None
        settings = weather.settings
        if is_streaming:
            run_id = dagster.begin_stream(self)
            self.work = SimulatedWork(
                run_id,
                runs,
                dagster,
                reach=lambda: self.must_reach("dagster"),
                may_begin=partial(self.check_may_begin, "begins a batch of"),
            )
            settings, new_batch_id = settings.of_stream(run_id), batch_ids(run_id)
        self.engine = Engine(settings, new_batch_id=new_batch_id, now=self.clock())
        self.consumer = RebalanceAwareConsumer(
            {
                "bootstrap.servers": "simulated",
                "group.id": "simulated",
                **_CONFIG[weather.protocol],
            },
            hold_limit_s=weather.settings.budget.limit_s,
            fetch=False,
            clock=self.clock,
            member=self.member,
            cluster=SimulatedCluster(self, group),
        )
        parts = MemberDependencies(
            consumer=self.consumer,
            engine=self.engine,
            runs=self.work or runs,
            work=self.work,
            catalogue=self.catalogue,
            topics=[TOPIC],
            clock=self.clock,
            dead_letters=self.letters if weather.settings.dead_letter_topic else None,
            start=self._begin_work,
        )
        self.member_loop = _SteppedPump(parts, self.mailbox)
        self.member_loop.has_orders = has_orders
        self.member_loop.begin()
        self.mailbox.send(TickArrived())
        clockwork.after(0.0, self, self._turn)
        if not is_replica:
            clockwork.after(0.3, None, self._tick)

    def __str__(self) -> str:
        return f"member {self.incarnation}"

    def clock(self) -> float:
        """The clock of this process, which a waiting poll advances."""
        return self.clockwork.now + self.skew + self.clock_base

    def tell(self, what: str) -> None:
        self.clockwork.tell(self, what)

    @property
    def is_served(self) -> bool:
        """Whether ticks come, and all of its backends respond."""
        is_borne = (
            self._hangs_since is not None
            and self.clockwork.now - self._hangs_since < _HANG_IS_BORNE_S
        )
        is_ticked = not self.is_retired and not self.mailbox.is_abandoned
        return is_ticked and self.is_connected and self.has_storage and not is_borne

    @property
    def stands_still(self) -> bool:
        """Whether its member loop is suspended, or hangs in a call."""
        return self.is_paused or self.is_hung

    @property
    def is_lost(self) -> bool:
        """Whether it has hung so long that another member has to replace it."""
        return not self.is_gone and self.mailbox.silent_s > _ABANDONED_AFTER_S

    @property
    def has_left(self) -> bool:
        """Whether it has left the group in order."""
        return self.member_loop.left is not None and not self._killed

    def gauges(self) -> dict[str, int]:
        """Return the counters that must return to zero."""
        of_driver = {
            "holds": len(self.engine.holds),
            "batch_requests": len(self.engine.batch_requests),
            "dead letters under way": self.letters.under_way,
        }
        if self.has_left:
            # Its consumer is closed, and answers nothing any more.
            return of_driver
        return {
            **of_driver,
            "revokes": len(self.consumer.get_to_be_revoked_partitions()),
            "assigned partitions": len(self.consumer.assignment()),
        }

    def expects_drain(self, held: frozenset[TopicPartition]) -> None:
        """Start to require the drain of the known runs on these partitions.

        A partition that was not restored yet needs no drain.
        """
        owned = [
            self.engine.partitions[partition].draining()
            for partition in sorted(held)
            if partition in self.engine.partitions
        ]
        self._waits_for = {o.partition: o.live_runs for o in owned if o.phase is Phase.DRAINING}
        budget = self.weather.settings.budget
        drains_s = budget.limit_s - budget.commit_slice_s
        self._drains_until = self.clockwork.now + self.clock_base + drains_s

    def check_drained(self) -> None:
        """Check that no partition is released before the deadline while a run works on it.

        Not checked after an operator's interference, or while the member leaves.
        """
        if self.engine.leaving is not None or self.clock() >= self._drains_until:
            return
        for partition, run_ids in self._waits_for.items():
            busy = [
                run_id for run_id in sorted(run_ids) if self._dagster.works_on(run_id, partition)
            ]
            if busy and partition not in self._group.meddled:
                msg = f"{self} gives {partition} back while {busy[0]} works on it"
                raise Violation(msg)

    def check_may_begin(self, what: str, partition: TopicPartition) -> None:
        """Check that no work begins on a paused partition once the member has read the directive.

        It has read directives that are older than the assignment.
        """
        order = in_force(self.engine.directives, partition)
        actual = in_force(self._dagster.orders, partition)
        if actual is not None and self._dagster.ordered_at(actual) < self._assigned_after(
            partition
        ):
            order = actual
        if order is not None:
            msg = f"{self} {what} {partition}, which was {order}"
            raise Violation(msg)

    def check_claimed(self, partition: TopicPartition) -> None:
        """Check that a claim was decided before the member had read the pause."""
        owned = self.engine.partitions.get(partition)
        order = in_force(self.engine.directives, partition)
        if owned is None or owned.pending is None or order is None:
            return
        known_at = self._paused_since.get((partition, order), self.clock())
        if owned.pending.sent_at > known_at:
            self.check_may_begin("claims offsets of", partition)

    def _assigned_after(self, partition: TopicPartition) -> float:
        """Return the start of the turn in which a partition was assigned, or a later one."""
        owned = self.engine.partitions.get(partition)
        if owned is None:
            return float("-inf")
        return self._assigned.get((partition, owned.epoch), self._turn_began_at)

    def look_at_orders(self) -> None:
        """Note when partitions were assigned and directives read; no request follows."""
        for batch_request in self.mailbox.mail.batch_requests:
            for range_ in batch_request.ranges:
                self.check_may_begin("requests a run for", range_.topic_partition)
        self._assigned = {
            (partition, owned.epoch): self._assigned_after(partition)
            for partition, owned in self.engine.partitions.items()
        }
        self._paused_since = {
            (partition, order): self._paused_since.get((partition, order), self.clock())
            for partition in self.engine.partitions
            if (order := in_force(self.engine.directives, partition)) is not None
        }

    # What disturbs it

    def kill(self) -> None:
        self.tell("is killed")
        self.end()
        if self.work is not None:
            self._dagster.die(self.work.run_id)

    def end(self) -> None:
        self._killed = self.is_gone = True

    def cancel(self) -> None:
        """SIGTERM for a streaming run; its sensor starts another one."""
        self.mailbox.send(LeaveRequested("its run is cancelled", 8.0))

    def lose_storage(self, seconds: float) -> None:
        """Disconnect from Dagster's storage for a while."""
        self.has_storage = False
        self.clockwork.after(seconds, None, lambda: setattr(self, "has_storage", True))

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later: a zombie after a long pause."""
        self.tell(f"is paused for {seconds:.0f} s")
        self.is_paused = True
        if self.work is not None:
            self._dagster.freeze_work(self.work.run_id, seconds)
        self.clockwork.after(seconds, None, self._resume)

    def hang(self, seconds: float) -> None:
        """A call of the member loop hangs; ticks and librdkafka's heartbeats continue."""
        self.tell(f"hangs for {seconds:.0f} s")
        self.is_hung = True
        self.clockwork.after(seconds, None, self._goes_on)

    def _goes_on(self) -> None:
        self.is_hung, self.awake_since = False, self.clockwork.now
        self.tell("hangs no more")

    def retire(self) -> None:
        """Reload of the code location: no more ticks come."""
        self.tell("gets no more ticks")
        self.is_retired = True

    def leave(self) -> None:
        self.is_retired = True
        self.mailbox.send(LeaveRequested("it was asked to", 8.0))

    def replaced(self) -> None:
        """Another streaming run has joined, and replaces it."""
        self.mailbox.send(LeaveRequested("another run takes its place"))

    def _resume(self) -> None:
        self.is_paused = False
        self.awake_since = self.clockwork.now
        self.tell("goes on")

    # The network

    def reaches(self, backend: str, *, wait: bool = True) -> bool:
        """Return whether a request and its answer arrive.

        The others continue, and this process may be stopped or killed.
        """
        if self._hanging is not None:
            return self._reaches_late(self._hanging)
        if wait:
            asked_at = self.clockwork.now
            self.clockwork.let_others(self, self._stall())
            while self.stands_still and not self._killed:
                self.clockwork.let_others(self, 1.0)
            if self.clockwork.now - asked_at > _LONG_S:
                self.awake_since = self.clockwork.now
        if self._killed:
            raise ProcessKilledError
        is_there = self.is_connected if backend == "kafka" else self.has_storage
        return is_there and not self.clockwork.happens(self.weather.lost_requests)

    def must_reach(self, backend: str) -> None:
        """Raise the error of the member loop if a request or its answer is lost."""
        if not self.reaches(backend):
            if backend == "kafka":
                msg = "Kafka did not answer"
                raise BrokerError(msg, retriable=True)
            msg = "Dagster's storage did not answer"
            raise ConnectionError(msg)

    def _stall(self) -> float:
        clockwork = self.clockwork
        if clockwork.happens(self.weather.stalls / 20):
            self.pause(clockwork.within(2, 20))
        return (
            clockwork.within(0, 4)
            if clockwork.happens(self.weather.stalls)
            else self.weather.latency() / 4
        )

    # Storage and launchers that hang

    def ask_launcher(self) -> None:
        """Wait for a launcher, whose answer may be late or never come."""
        seconds = self.weather.answering()
        if not seconds:
            return
        self.tell(f"a launcher does not answer for {seconds:.0f} s")
        if self._hanging is None:
            self.clockwork.let_others(self, seconds)
        else:
            self._hanging.wait(seconds)
        if self._killed:
            raise ProcessKilledError

    def _begin_work(self, name: str, work: Callable[[], None]) -> None:
        """The member loop does not wait for the storage; only a late answer matters."""
        if (
            name == "storage"
            and self._hangs_since is None
            and self.clockwork.happens(self.weather.storage_hangs)
        ):
            self._hangs_since = self.clockwork.now
            hanging = Hanging(self.clockwork, work, lambda go_on: self._in_hanging(hanging, go_on))
            hanging.go_on()
        elif name == "storage" and self.weather.slow_storage_s:
            slow = Hanging(self.clockwork, work, lambda go_on: self._in_hanging(slow, go_on))
            self._slow.add(slow)
            slow.go_on()
        elif name != "storage" and self.weather.has_launchers:
            ending = Hanging(self.clockwork, work, lambda go_on: self._in_hanging(ending, go_on))
            self._launcher_hangs.add(ending)
            ending.go_on()
        else:
            work()

    def _in_hanging(self, hanging: Hanging, go_on: Callable[[], None]) -> None:
        before, self._hanging = self._hanging, hanging
        try:
            go_on()
        except ProcessKilledError:
            pass
        finally:
            self._hanging = before

    def _reaches_late(self, hanging: Hanging) -> bool:
        """Return whether a late answer comes at all."""
        if hanging in self._slow:
            hanging.wait(self.weather.storage_takes())
            if self._killed:
                raise ProcessKilledError
            return self.has_storage and not self.clockwork.happens(self.weather.lost_requests)
        seconds = 0.0
        if self._hangs_since == self.clockwork.now and hanging not in self._launcher_hangs:
            seconds = self.clockwork.chance.choice(_HANGS_S)
            self.tell(f"the storage does not answer it for {seconds:.0f} s")
        hanging.wait(seconds)
        while self.is_paused and not self._killed:
            hanging.wait(1.0)
        if self._killed:
            raise ProcessKilledError
        if seconds:
            self._hangs_since, self.awake_since = None, self.clockwork.now
        return self.has_storage and seconds < _ANSWERED_WITHIN_S

    # Actions

    def _turn(self) -> None:
        if self.is_gone:
            return
        if self.stands_still:
            self.clockwork.after(0.5, self, self._turn)
            return
        self.skew, self._turn_began_at = 0.0, self.clockwork.now
        try:
            self.clockwork.let_others(self, 0.0)
            self.member_loop.turn()
            self.after_turn(self)
            if self.member_loop.left is not None:
                self.tell(f"leaves: {self.member_loop.left}")
                self.consumer.close()
                self.is_gone = True
                if self.is_replica and not self.has_successor and not self.mailbox.is_abandoned:
                    self._free_seat()
                if self.work is not None:
                    self._dagster.end_stream(self.work.run_id)
                return
        except ProcessKilledError:
            return
        except DagsterRebalanceError as error:
            msg = f"{self} ended with {type(error).__name__}: {error}"
            raise Violation(msg) from error
        self.clockwork.after(self.skew + self.clockwork.within(0.0, 1.2), self, self._turn)

    @property
    def has_successor(self) -> bool:
        """Whether it has left for a successor."""
        return self.member_loop.has_successor

    def _free_seat(self) -> None:
        try:
            self.catalogue.release_lease()
        except ConnectionError:
            self.tell("could not free its seat")

    def _tick(self) -> None:
        """A tick finds the member, or starts another one if it has left."""
        if self.is_retired or (self._killed and self.work is None):
            return
        if self.is_gone:
            self.start_another()
            return
        clockwork = self.clockwork
        clockwork.after(clockwork.within(1.0, 4.0), None, self._tick)
        if self.is_paused or self.work or clockwork.happens(self.weather.lost_requests):
            return
        self.mailbox.send(TickArrived())
        for batch_request in self.mailbox.mail.batch_requests:
            self.request(batch_request)

    def request(self, batch_request: BatchRequest) -> None:
        """Request runs; a tick may be lost, or be resumed much later.

        The run key does not help then, nor with a second sensor.
        """
        clockwork = self.clockwork
        if clockwork.happens(self.weather.late_requests):
            keyed = clockwork.happens(0.5)
            clockwork.after(
                clockwork.within(0.5, 40), None, lambda: self._arrive(batch_request, keyed=keyed)
            )
        else:
            clockwork.after(
                clockwork.within(0.0, 0.5), None, lambda: self._arrive(batch_request, keyed=True)
            )

    def _arrive(self, batch_request: BatchRequest, *, keyed: bool) -> None:
        if keyed:
            self._dagster.request(batch_request)
        else:
            self._dagster.start(batch_request.batch_id, batch_request.ranges)
