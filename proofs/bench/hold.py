"""`retained_during_hold`: the read rate of retained partitions while others are held.

Ours and the peers read the same records at the same time in separate groups, so a busy machine
slows all of them. Then a second member joins every group, and each first member holds the revoke.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from confluent_kafka import Producer

from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.members import Bare, Hold, Ours, client_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from dagster_rebalance.testing.broker import KafkaCluster
    from proofs.bench.members import Contender

    _Observed: TypeAlias = tuple[list[tuple[float, int]], Hold]

PARTITIONS, _PER_SECOND = 4, 2000
LIMIT_S = 60.0
_SETTLE_S = 1.0
"""Time before the measurement: the backlog is read faster than the rest."""
_RATIO = "ours during the hold over ours before it"
_OURS = "ours, {}"
_BARE = "confluent-kafka, {}"
_AIOKAFKA = "aiokafka, classic"
PAIRS = [
    (
        _OURS.format("consumer"),
        _BARE.format("consumer"),
        "consumer protocol, against confluent-kafka blocked in on_revoke",
    ),
    (
        _OURS.format("classic"),
        _BARE.format("classic"),
        "classic cooperative-sticky, against confluent-kafka blocked in on_revoke",
    ),
    (
        _OURS.format("classic"),
        _AIOKAFKA,
        "classic cooperative-sticky, against aiokafka waiting in on_partitions_revoked",
    ),
]
"""Ours, the peer, and the case."""


@dataclass(frozen=True)
class Played:
    """The records and the hold of one member.

    Attributes:
        arrivals: Time and partition of each record.
        hold: The hold.
        steady: Start and end of the steady phase.
    """

    arrivals: list[tuple[float, int]]
    hold: Hold
    steady: tuple[float, float]

    @property
    def steady_rate(self) -> float:
        """Return the records per second of the retained partitions before the hold."""
        times = self._times(*self.steady)
        later = [at for at in times if at > times[0]]
        return len(later) / (times[-1] - times[0]) if later else 0.0

    @property
    def held_rate(self) -> float:
        """Return the records per second of the retained partitions during the hold."""
        return len(self._times(self.hold.began_at, self.hold.ended_at)) / (
            self.hold.ended_at - self.hold.began_at
        )

    @property
    def ratio(self) -> float:
        return self.held_rate / self.steady_rate if self.steady_rate else 0.0

    def _times(self, begin: float, end: float) -> list[float]:
        return [
            at
            for at, partition in self.arrivals
            if begin <= at < end and partition in self.hold.retained
        ]


@dataclass
class _Stage:
    """Shared state of the members of one run.

    Attributes:
        reading: Members that read all partitions.
        invited: Set when the second members shall join.
        abandoned: Set when the run is given up.
    """

    reading: set[str] = field(default_factory=set)
    invited: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)


def measure(
    kafka: KafkaCluster, *, runs: int, hold_s: float, steady_s: float, step: Callable[[str], None]
) -> list[Entry]:
    plays = []
    for run in range(runs):
        step(f"retained_during_hold, run {run + 1} of {runs}")
        plays.append(_play_all(kafka, hold_s, steady_s))
    return entries_of(plays)


def entries_of(plays: Sequence[Mapping[str, Played]]) -> list[Entry]:
    """Return ours beside each peer, by the names of the members; aiokafka may be missing."""
    entries = []
    for ours, peer, case in PAIRS:
        samples = [
            Sample(
                play[ours].held_rate,
                play[peer].held_rate if peer in play else None,
                play[ours].ratio,
            )
            for play in plays
        ]
        note = f"steady {median(play[ours].steady_rate for play in plays):,.0f}"
        if all(peer not in play for play in plays):
            note = f"{peer.partition(',')[0]} is not installed"
        entries.append(
            Entry(
                "retained_during_hold", case, _RATIO, "records/s", Goal(">=", 0.98), samples, note
            )
        )
    return entries


def _contenders(servers: str, topic: str, hold_s: float) -> dict[str, Callable[[], Contender]]:
    """Return the factories of all members; those of one kind share a group."""
    contenders: dict[str, Callable[[], Contender]] = {}
    for protocol in ("consumer", "classic"):
        contenders[_OURS.format(protocol)] = partial(
            Ours, client_config(servers, unique_name("ours"), protocol), topic, hold_s
        )
        contenders[_BARE.format(protocol)] = partial(
            Bare, client_config(servers, unique_name("bare"), protocol), topic, hold_s
        )
    if find_spec("aiokafka") is not None:
        aiokafka = import_module("proofs.bench.aiokafka_member").AioKafka
        contenders[_AIOKAFKA] = partial(aiokafka, servers, unique_name("aiokafka"), topic, hold_s)
    return contenders


def _play_all(kafka: KafkaCluster, hold_s: float, steady_s: float) -> dict[str, Played]:
    topic = unique_name("hold")
    kafka.create_topic(topic, PARTITIONS)
    makers = _contenders(kafka.bootstrap_servers, topic, hold_s)
    stage = _Stage()
    with (
        in_background(partial(produce, kafka.bootstrap_servers, topic)),
        ThreadPoolExecutor(len(makers)) as pool,
    ):
        playing = {name: pool.submit(_play, name, make, stage) for name, make in makers.items()}
        try:
            _wait(playing, lambda name: name in stage.reading, "read all partitions")
            began_at = time.monotonic() + _SETTLE_S
            _wait(
                playing, lambda _name: time.monotonic() >= began_at + steady_s, "read on", steady_s
            )
            steady = (began_at, began_at + steady_s)
            stage.invited.set()
            _wait(
                playing,
                lambda name: playing[name].done(),
                f"hold partitions for {hold_s:g} s",
                hold_s,
            )
        finally:
            stage.abandoned.set()
        return {name: Played(*future.result(), steady) for name, future in playing.items()}


def _wait(
    playing: Mapping[str, Future[_Observed]],
    condition: Callable[[str], bool],
    what: str,
    extra_s: float = 0.0,
) -> None:
    """Wait until a condition holds for all; an error of a member ends the wait."""

    def waiting() -> list[str]:
        for future in playing.values():
            if future.done():
                future.result()
        return [name for name in playing if not condition(name)]

    wait_until(
        lambda: not waiting(),
        timeout_s=LIMIT_S + extra_s,
        what=lambda: f"{' and '.join(waiting())} to {what}",
    )


def _play(name: str, make: Callable[[], Contender], stage: _Stage) -> _Observed:
    """Read with a first member until its hold is over; a second one joins after the invitation."""
    arrivals: list[tuple[float, int]] = []
    is_joined = False
    with closing(make()) as first, ExitStack() as others:
        while not (first.hold.is_over or stage.abandoned.is_set()):
            came = first.poll()
            now = time.monotonic()
            arrivals.extend((now, partition) for partition in came)
            if came and len(first.owned()) == PARTITIONS:
                stage.reading.add(name)
            if stage.invited.is_set() and not is_joined:
                others.enter_context(in_background(partial(follow, make)))
                is_joined = True
    return arrivals, first.hold


@contextmanager
def in_background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a function in a thread until it is stopped, and raise its error here."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, stop)
        try:
            yield
        finally:
            stop.set()
        working.result()


def follow(make: Callable[[], Contender], stop: threading.Event) -> None:
    """Run a second member until it is stopped."""
    with closing(make()) as member:
        while not stop.is_set():
            member.poll()


def produce(servers: str, topic: str, stop: threading.Event) -> None:
    """Produce small records at a constant rate, evenly on all partitions."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, "log_level": 0})
    began_at, sent = time.monotonic(), 0
    while not stop.wait(0.005):
        due = int((time.monotonic() - began_at) * _PER_SECOND)
        for number in range(sent, due):
            producer.produce(topic, b"record", partition=number % PARTITIONS)
        sent = due
        producer.poll(0)
    producer.flush(LIMIT_S)
