"""The faults: what each one does to the parts, when it can be done, and how it is mended.

Owns the kinds. Which comes when is `draw.py`'s; what they explain is `stalls.py`'s.
"""

from __future__ import annotations

import enum
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.cli.chaos.exchange import GROUP, SESSION_TIMEOUT_S, TOPIC
from dagster_rebalance.cli.chaos.parts import BROKERS, MEMBERS, RELOADED
from dagster_rebalance.core.errors import DagsterRebalanceError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from concurrent.futures import Future

    from dagster_rebalance.cli.chaos.parts import Parts

MOST_PARTITIONS = 24
_MOST_MEMBERS_AWAY = 2
_DEPARTURE_LIMIT_S = 180.0
_DATABASES = ("history/runs.db", "history/runs/index.db", "schedules/schedules.db")


class Kind(enum.Enum):
    """What can go wrong."""

    MEMBER_KILLED = "member killed (SIGKILL), its runs live on"
    MEMBER_TERMINATED = "member terminated (SIGTERM), as in a deploy"
    MEMBER_FROZEN = "member frozen (SIGSTOP) past its session time-out"
    CODE_SERVER_KILLED = "code server killed together with its runs"
    CODE_SERVER_RELOADED = "code server reloaded"
    BROKER_KILLED = "broker killed and restarted"
    COORDINATOR_MOVED = "group coordinator moved"
    PARTITIONS_ADDED = "partition added"
    DAEMON_KILLED = "Dagster daemon killed"
    RUN_WORKER_KILLED = "run worker killed"
    RUN_FAILED = "run failed"
    SPARK_KILLED = "Spark Connect server killed"
    STORAGE_LOCKED = "Dagster's storage locked"


@dataclass
class Fault:
    """A fault that was done.

    Attributes:
        kind: What.
        target: To whom or what.
        began_at: When, in seconds since 1970.
        partitions: The numbers of the partitions that it may hold up; None for all.
        mended_at: When it was over.
    """

    kind: Kind
    target: str
    began_at: float = field(default_factory=time.time)
    partitions: frozenset[int] | None = field(default=None)
    mended_at: float | None = None


@dataclass
class UnderWay:
    """A fault that is to be mended.

    Attributes:
        fault: Which.
        is_due: Whether it is time.
        mend: What mends it.
        mending: That it is being mended.
    """

    fault: Fault
    is_due: Callable[[], bool]
    mend: Callable[[], None]
    mending: Future[None] | None = None


class Faults:
    """Does faults to the parts.

    Args:
        parts: Everything that runs.
        chance: Draws targets and durations.
        owned: The numbers of the partitions that a member has.

    Attributes:
        done: Every fault so far, oldest first.
        under_way: Those that are not mended yet.
    """

    def __init__(self, parts: Parts, chance: random.Random, owned: Callable[[str], frozenset[int]]) -> None:
        self.done: list[Fault] = []
        self.under_way: list[UnderWay] = []
        self._parts = parts
        self._chance = chance
        self._owned = owned
        self._menders = ThreadPoolExecutor(thread_name_prefix="mender")

    def strike(self, kind: Kind) -> Fault | None:
        """Do a fault; None when it cannot be done now: who would suffer it is away already."""
        fault = {
            Kind.MEMBER_KILLED: self._kill_member,
            Kind.MEMBER_TERMINATED: self._terminate_member,
            Kind.MEMBER_FROZEN: self._freeze_member,
            Kind.CODE_SERVER_KILLED: self._kill_code_server,
            Kind.CODE_SERVER_RELOADED: self._reload_code_server,
            Kind.BROKER_KILLED: self._kill_broker,
            Kind.COORDINATOR_MOVED: self._move_coordinator,
            Kind.PARTITIONS_ADDED: self._add_partition,
            Kind.DAEMON_KILLED: self._kill_daemon,
            Kind.RUN_WORKER_KILLED: self._kill_run_worker,
            Kind.RUN_FAILED: self._fail_run,
            Kind.SPARK_KILLED: self._kill_spark,
            Kind.STORAGE_LOCKED: self._lock_storage,
        }[kind]()
        if fault is not None:
            self.done.append(fault)
        return fault

    def mend_what_is_due(self) -> list[Fault]:
        """Begin to mend the faults whose time has come, and return those that are mended.

        Raises:
            DagsterRebalanceError: Something does not come back.
        """
        for one in self.under_way:
            if one.mending is None and one.is_due():
                one.mending = self._menders.submit(one.mend)
        mended = [one for one in self.under_way if one.mending is not None and one.mending.done()]
        for one in mended:
            self.under_way.remove(one)
            one.fault.mended_at = time.time()
            if one.mending is not None:
                one.mending.result()
        return [one.fault for one in mended]

    def _later(self, fault: Fault, mend: Callable[[], None], shortest_s: float, longest_s: float) -> Fault:
        due_at = time.monotonic() + self._chance.uniform(shortest_s, longest_s)
        self.under_way.append(UnderWay(fault, lambda: time.monotonic() >= due_at, mend))
        return fault

    def _at_once(self, fault: Fault) -> Fault:
        fault.mended_at = fault.began_at
        return fault

    def _is_suffering(self, *kinds: Kind) -> bool:
        return any(one.fault.kind in kinds for one in self.under_way)

    def _member(self, *names: str) -> str | None:
        """One of the members, at most two of which may be away at a time."""
        away = {one.fault.target for one in self.under_way} & set(MEMBERS)
        here = sorted(set(names) - away)
        return self._chance.choice(here) if here and len(away) < _MOST_MEMBERS_AWAY else None

    def _of_member(self, kind: Kind, name: str) -> Fault:
        return Fault(kind, name, partitions=self._owned(name))

    def _bring_back(self, name: str) -> None:
        location = self._parts.dagster.locations[name]
        location.start(self._parts.dagster.home)
        location.wait_until_ready()

    def _kill_member(self) -> Fault | None:
        # The process of the one that can be reloaded is not its member: that is a child of it.
        name = self._member(*(member for member in MEMBERS if member != RELOADED))
        if name is None:
            return None
        fault = self._of_member(Kind.MEMBER_KILLED, name)
        self._parts.dagster.locations[name].server.kill()
        return self._later(fault, lambda: self._bring_back(name), 0, 8)

    def _terminate_member(self) -> Fault | None:
        name = self._member(*MEMBERS)
        if name is None:
            return None
        fault = self._of_member(Kind.MEMBER_TERMINATED, name)
        server = self._parts.dagster.locations[name].server
        server.send(signal.SIGTERM)
        late_at = time.monotonic() + _DEPARTURE_LIMIT_S

        def has_left() -> bool:
            if server.is_running and time.monotonic() > late_at:
                msg = f"{server.name} has not ended {_DEPARTURE_LIMIT_S:g} s after SIGTERM; {server.log} ends with:\n{server.tail()}"
                raise DagsterRebalanceError(msg)
            return not server.is_running

        self.under_way.append(UnderWay(fault, has_left, lambda: self._bring_back(name)))
        return fault

    def _freeze_member(self) -> Fault | None:
        name = self._member(*(member for member in MEMBERS if member != RELOADED))
        if name is None:
            return None
        fault = self._of_member(Kind.MEMBER_FROZEN, name)
        server = self._parts.dagster.locations[name].server
        server.suspend()
        return self._later(fault, server.resume, SESSION_TIMEOUT_S + 1, SESSION_TIMEOUT_S + 6)

    def _kill_code_server(self) -> Fault | None:
        name = self._member(*MEMBERS)
        if name is None:
            return None
        fault = self._of_member(Kind.CODE_SERVER_KILLED, name)
        self._parts.dagster.locations[name].server.stop_at_once()
        return self._later(fault, lambda: self._bring_back(name), 0, 8)

    def _reload_code_server(self) -> Fault | None:
        name = self._member(RELOADED)
        if name is None:
            return None
        fault = self._of_member(Kind.CODE_SERVER_RELOADED, name)
        self._parts.dagster.reload(name)
        return self._at_once(fault)

    def _node_may_go(self) -> bool:
        return not self._is_suffering(Kind.BROKER_KILLED, Kind.COORDINATOR_MOVED) and self._parts.kafka.is_in_sync()

    def _kill_broker(self) -> Fault | None:
        if not self._node_may_go():
            return None
        kafka, node = self._parts.kafka, self._chance.choice(BROKERS)
        # All partitions: each node has a copy of the group's offsets, and a commit waits until Kafka knows that one of them is gone (9 s).
        fault = Fault(Kind.BROKER_KILLED, f"node {node}")
        kafka.kill(node)
        return self._later(fault, lambda: kafka.restart(node), 1, 8)

    def _move_coordinator(self) -> Fault | None:
        kafka, node = self._parts.kafka, self._parts.kafka.coordinator(GROUP)
        if node not in BROKERS or not self._node_may_go():
            return None
        fault = Fault(Kind.COORDINATOR_MOVED, f"from node {node}")
        kafka.shut_down(node)
        return self._later(fault, lambda: kafka.restart(node), 0, 5)

    def _add_partition(self) -> Fault | None:
        total = len(self._parts.producer.ends) + 1
        if total > MOST_PARTITIONS or not self._node_may_go():
            return None
        self._parts.kafka.add_partitions(TOPIC, total)
        self._parts.producer.take_in(total)
        return self._at_once(Fault(Kind.PARTITIONS_ADDED, f"{TOPIC}-{total - 1}", partitions=frozenset({total - 1})))

    def _kill_daemon(self) -> Fault | None:
        if self._is_suffering(Kind.DAEMON_KILLED):
            return None
        fault = Fault(Kind.DAEMON_KILLED, "the daemon")
        self._parts.dagster.daemon.stop_at_once()
        return self._later(fault, self._parts.dagster.start_daemon, 0, 10)

    def _kill_run_worker(self) -> Fault | None:
        working = self._parts.exchange.working()
        if not working:
            return None
        run_id = self._chance.choice(sorted(working))
        if not self._parts.exchange.kill(run_id):
            return None
        return self._at_once(Fault(Kind.RUN_WORKER_KILLED, f"run {run_id[:8]}", partitions=frozenset()))

    def _fail_run(self) -> Fault | None:
        self._parts.exchange.fail_next()
        return self._at_once(Fault(Kind.RUN_FAILED, "the next run", partitions=frozenset()))

    def _kill_spark(self) -> Fault | None:
        spark = self._parts.spark
        if spark is None or self._is_suffering(Kind.SPARK_KILLED):
            return None
        fault = Fault(Kind.SPARK_KILLED, "Spark Connect", partitions=frozenset())
        spark.kill()
        return self._later(fault, spark.restart, 0, 5)

    def _lock_storage(self) -> Fault | None:
        if self._is_suffering(Kind.STORAGE_LOCKED):
            return None
        lock = StorageLock(self._parts)
        return self._later(Fault(Kind.STORAGE_LOCKED, "all databases"), lock.release, 2, 8)


class StorageLock:
    """Keeps all others from writing to Dagster's storage, as a backup or a long transaction would."""

    def __init__(self, parts: Parts) -> None:
        self._paths = [parts.dagster.home / name for name in _DATABASES]
        self._is_over = threading.Event()
        self._is_locked = threading.Event()
        self._thread = threading.Thread(target=self._lock, name="storage lock", daemon=True)
        self._thread.start()
        self._is_locked.wait(SESSION_TIMEOUT_S)

    def _lock(self) -> None:
        with ExitStack() as stack:
            for path in self._paths:
                connection = stack.enter_context(closing(sqlite3.connect(path, timeout=SESSION_TIMEOUT_S, isolation_level=None)))
                connection.execute("BEGIN EXCLUSIVE")
            self._is_locked.set()
            self._is_over.wait()

    def release(self) -> None:
        """Let the others write again."""
        self._is_over.set()
        self._thread.join()
