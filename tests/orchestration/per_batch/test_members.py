"""The members of a process: one for each sensor, from its first tick to its departure.

Threads are real; the group is in memory.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.engine.engine import Engine
from dagster_rebalance.core.model.errors import BrokerError, DagsterRebalanceError
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
from dagster_rebalance.orchestration.per_batch.hosted_members import HostedMember, Members
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity, MemberLease
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember, ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.kafka.group_ports import GroupEvent

ETERNAL = EngineSettings(lease_s=1e9)
"""The clock of a group in memory runs as fast as its members poll."""


class PacedMember(FakeMember):
    """A member in memory whose polls take some real time, as a thread's have to."""

    def poll(self, timeout_s: float) -> list[GroupEvent]:
        time.sleep(0.002)
        return super().poll(timeout_s)


class Farm:
    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.group = FakeGroup({"orders": 2})
        self.made: list[HostedMember] = []
        self.fails: list[Exception] = []
        self.stuck = threading.Event()
        self.stuck.set()

    def make(
        self, shutdown_timeout_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> HostedMember:
        member = HostedMember(
            "test", self._parts, shutdown_timeout_s=shutdown_timeout_s, clock=clock
        )
        self.made.append(member)
        return member

    @contextmanager
    def _parts(self) -> Iterator[MemberDependencies]:
        if self.fails:
            raise self.fails.pop(0)
        assert self.stuck.wait(120)
        config = {"bootstrap.servers": "memory:1", "group.id": "etl"}
        clock = self.group.clock
        with RebalanceAwareConsumer(
            config, fetch=False, member=PacedMember(self.group), cluster=self.group, clock=clock
        ) as consumer:
            engine = Engine(ETERNAL, new_batch_id=lambda _: "b", now=clock())
            catalogue = Catalogue(
                self.instance, GroupAssets.of("etl"), MemberIdentity("blue", "sensor", "p")
            )
            yield MemberDependencies(
                consumer, engine, RunLedger(self.instance, "etl"), catalogue, ["orders"], clock
            )


@pytest.fixture
def farm() -> Iterator[Farm]:
    with dg.DagsterInstance.ephemeral() as instance:
        made = Farm(instance)
        yield made
        made.stuck.set()
        for member in made.made:
            member.leave("the test is over")
        for member in made.made:
            member.join(time.monotonic() + 120)
            assert member.is_over


def has_joined(farm: Farm, members: Members) -> bool:
    mail, _ = members.tick("key", farm.make)
    return "starting" not in mail.summary[0] and bool(farm.group.members)


def test_ticks_share_one_member_for_each_key(farm: Farm) -> None:
    """A tick comes on another thread each time."""
    members = Members()
    wait_until(lambda: has_joined(farm, members), timeout_s=120, what="the member to join")
    assert len(farm.made) == 1
    assert members.get("key") is farm.made[0]
    assert members.get("another") is None, "a look-up creates no member"
    members.tick("another", farm.make)
    assert len(farm.made) == 2


def test_first_tick_has_the_first_assignment(farm: Farm) -> None:
    mail, _ = Members(patience_s=120).tick("key", farm.make)
    assert mail.summary[0].startswith("owns orders-0, orders-1")


def test_first_tick_fails_with_its_member(farm: Farm) -> None:
    farm.fails = [BrokerError("no answer from kafka:9092")]
    with pytest.raises(BrokerError, match="no answer from kafka:9092"):
        Members(patience_s=120).tick("key", farm.make)


def test_failed_member_fails_the_next_tick_and_is_replaced(farm: Farm) -> None:
    members = Members()
    farm.fails = [BrokerError("no answer from kafka:9092")]
    failed = farm.make()
    wait_until(lambda: failed.is_over, timeout_s=120, what="the failure")
    with pytest.raises(BrokerError, match="no answer from kafka:9092"):
        members.tick("key", lambda: failed)
    wait_until(lambda: has_joined(farm, members), timeout_s=120, what="a new member to join")
    assert members.get("key") is not failed


def test_member_that_left_is_replaced(farm: Farm) -> None:
    members = Members()
    wait_until(lambda: has_joined(farm, members), timeout_s=120, what="the member to join")
    farm.made[0].leave("test")
    farm.made[0].join(time.monotonic() + 120)
    mail, _ = members.tick("key", farm.make)
    assert mail.batch_requests == ()
    assert members.get("key") is None
    members.tick("key", farm.make)
    assert len(farm.made) == 2


def test_notes_reach_one_tick(farm: Farm) -> None:
    members = Members()
    notes: list[str] = []

    def assigned() -> bool:
        notes.extend(members.tick("key", farm.make)[1])
        return any("assigned orders-0" in note for note in notes)

    wait_until(assigned, timeout_s=120, what="the note")
    assert len([note for note in notes if "assigned orders-0" in note]) == 1


def test_shutdown_lets_members_leave_the_group(farm: Farm) -> None:
    members = Members()
    wait_until(lambda: has_joined(farm, members), timeout_s=120, what="the member to join")
    members.shut_down()
    assert farm.made[0].is_over
    assert farm.group.members == ()


def test_shutdown_waits_no_longer_than_its_limit(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dagster_rebalance.orchestration.per_batch.hosted_members._EXIT_MARGIN_S", 0.0
    )
    farm.stuck.clear()
    members = Members()
    members.tick("key", lambda: farm.make(shutdown_timeout_s=0.05))
    members.shut_down()
    assert not farm.made[0].is_over


def test_shutdown_without_members_does_nothing() -> None:
    Members().shut_down()


IMPORTS = """
import threading
import confluent_kafka

def refuse(*args, **kwargs):
    raise AssertionError("a client was made on import")

confluent_kafka.Consumer = refuse
import dagster as dg
from dagster_rebalance import KafkaConsumerResource, build_kafka_batch_defs

before = set(threading.enumerate())

@dg.asset(required_resource_keys={"kafka_batch"})
def work() -> None: ...

defs = build_kafka_batch_defs(
    kafka=KafkaConsumerResource(bootstrap_servers="kafka:9092", group_id="etl", \
topics=["orders"]), assets=[work]
)
defs.resolve_job_def("kafka_batches")
from dagster_rebalance.orchestration.per_batch.hosted_members import MEMBERS
assert not MEMBERS._members
assert set(threading.enumerate()) == before, threading.enumerate()
print("nothing started")
"""


def test_import_of_definitions_starts_nothing() -> None:
    """Run processes, the webserver and tests import the user's code, too."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.stdout.endswith("nothing started\n"), done.stderr


def test_signal_lets_members_leave_and_prevents_others(
    farm: Farm,
) -> None:
    """A code server answers ticks until its runs are over."""
    watched: list[Callable[[], None]] = []
    members = Members(watched.append)
    wait_until(lambda: has_joined(farm, members), timeout_s=120, what="the member to join")
    members.tick("another", farm.make)
    (told_to_end,) = watched
    told_to_end()
    for member in farm.made:
        member.join(time.monotonic() + 120)
        assert member.is_over, "the member ends without a tick and before the process"
    for key in ("key", "another", "a third"):
        members.tick(key, farm.make)
        mail, _ = members.tick(key, farm.make)
        assert mail.summary == ("this code server is shutting down: it joins no group",)
    assert len(farm.made) == 2


def test_replaced_member_stays_out_while_its_successor_lives(farm: Farm) -> None:
    """Two replicas of a code server both get ticks."""
    members = Members()
    seat = MemberLease(farm.instance, GroupAssets.of("etl"), "blue", "sensor")
    wait_until(lambda: has_joined(farm, members), timeout_s=120, what="the member to join")
    wait_until(
        lambda: seat.read().startswith("p "), timeout_s=120, what="the member to take its seat"
    )
    other = Catalogue(
        farm.instance, GroupAssets.of("etl"), MemberIdentity("blue", "sensor", "replica")
    )
    other.record_joined()
    other.renew_lease()
    wait_until(lambda: farm.made[0].is_over, timeout_s=120, what="the member to make way")
    for _ in range(3):
        mail, _ = members.tick("key", farm.make, seat.read)
        assert "run one replica of the code server" in mail.summary[0]
    assert len(farm.made) == 1
    assert seat.read().startswith("replica "), (
        "a replica that yields does not release the other's lease"
    )
    other.release_lease()
    members.tick("key", farm.make, seat.read)
    assert len(farm.made) == 2


def test_hanging_member_fails_its_ticks_and_is_replaced(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    hangs, wakes = threading.Event(), threading.Event()
    real = PacedMember.poll

    def poll(member: PacedMember, timeout_s: float) -> list[GroupEvent]:
        if member.is_subscribed_to("orders") and farm.group.members and not hangs.is_set():
            hangs.set()
            assert wakes.wait(120)
        return real(member, timeout_s)

    monkeypatch.setattr(PacedMember, "poll", poll)
    members = Members()
    make = partial(farm.make, clock=clock)
    members.tick("key", make)
    assert hangs.wait(120)
    clock.advance(29)
    members.tick("key", make)
    clock.advance(2)
    with pytest.raises(
        DagsterRebalanceError,
        match=r"hangs: no turn of its loop for 31 s, while polling Kafka; after 120 s a new member",
    ):
        members.tick("key", make)
    clock.advance(90)
    with pytest.raises(
        DagsterRebalanceError,
        match="it writes nothing any more, and the next tick creates a new member",
    ):
        members.tick("key", make)
    wait_until(
        lambda: has_joined(farm, members) and len(farm.made) == 2,
        timeout_s=120,
        what="the new member to join",
    )
    assert not farm.made[0].is_over
    wakes.set()
    farm.made[0].join(time.monotonic() + 120)
    assert farm.made[0].is_over, "the superseded member leaves without a request"
    assert len(farm.group.members) == 1
    assert members.get("key") is farm.made[1]


def test_lease_is_held_where_dagster_has_no_key_values(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("get_cursor_values", "set_cursor_values"):
        monkeypatch.setattr(
            type(farm.instance.run_storage),
            name,
            lambda *_: NotImplementedError("not supported from the user cloud"),
        )
    lease = MemberLease(farm.instance, GroupAssets.of("etl"), "blue", "sensor")
    lease.renew("a process")
    lease.release("a process")
    assert lease.read() == "unknown"
