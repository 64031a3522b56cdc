"""The member loop in trouble.

A thousand partitions stop at once, partitions go and come back in one turn, and the storage hangs.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.errors import BrokerError, PartitionLostError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.reporting.lag import GroupState
from dagster_rebalance.kafka.group_ports import CommitResult
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import (
    build_stopped_check,
)
from dagster_rebalance.orchestration.runs.canceller import in_thread
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.proxy import Proxy
from tests.orchestration.bench import Bench, Status
from tests.orchestration.member.story import BenchScript, evaluations
from tests.orchestration.member.test_loop import PAIRS
from tests.orchestration.parts import make_run, tp
from tests.story import stories

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.testing.postgres import Postgres


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def instance_on_disk() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as made:
        yield made


def test_many_stops_are_one_evaluation() -> None:
    """A read of the group for each of them prevented polls until the member was fenced."""
    with dg.DagsterInstance.ephemeral() as instance:
        bench = Bench(instance, partitions=1_000, records=0)
        for number in range(1_000):
            bench.group.committed[tp(number)] = OffsetAndMetadata(5, "text of another application")
        bench.until(
            lambda: (
                sum(bool(owned.stop_reason) for owned in bench.engine.partitions.values()) == 1_000
            )
        )
        bench.until(lambda: evaluations(bench))
        (newest,) = evaluations(bench)
        assert newest.metadata["stopped_partitions"].value == 1_000
        assert str(newest.description).endswith("; and 997 more")
        assert newest.metadata["partitions"].value == "orders-0..999"
        assert len(dg.serialize_value(newest)) < 21_000
        bench.turn(120)
        assert len(evaluations(bench)) == 1, (
            "they are looked up again each ten seconds, which is no news"
        )


@stories("""
## stop_and_continuation_are_noted
bench | stored 0 0 foreign | until reason ~ not written | notes ~ stopped: orders-0:
stored 0 0 | until offered !~ none | notes ~ orders-0 continues

## stop_is_shown_again_when_the_storage_fails_once
# Otherwise the check would keep its state until the next news.
bench | stored 0 0 foreign | catalogue stops 1 | until passed = False

## member_after_a_standstill_shows_nothing_before_it_detects_its_losses
# The next owner had shown the partition as stopped.
bench | offers | advance 12 | show 0 "as its new owner sees it" | news | turn | passed = False
until passed = True

## partition_that_is_being_restored_is_not_shown_as_continued
# Each reload would turn the check green while the new member still reads.
bench | stored 0 0 foreign | catalogue unreadable | turn 60 | phase = RESTORING
evaluations = 1 | passed = False | check ~ was not written by dagster_rebalance

## stopped_partition_that_is_released_is_not_noted_as_continued
bench | stored 0 0 foreign | until reason ~ not written
leave "its process ends" 30 | until has_left = True
notes !~ continues | notes ~ orders-0 was stopped when it was released

## refused_write_stops_its_partition_alone_and_is_repeated_slowly
bench partitions=2 settings=PAIRS | stored 0 0 | stored 1 0
refuses 1 "not authorised: grant the ACL READ on topic orders" | offers | offered = 0[0,10)
reason 1 ~ orders-1: Kafka refuses to store its offset: not authorised: grant the ACL READ
mark | until took 25 1e9 = True | writes = 1:0, 1:0
refuses | until offered = 0[0,10) 1[0,10) | reason 1 = none

## topic_that_may_not_be_read_is_noted
bench | poll_fails "orders may not be read" orders | offers | notes ~ orders may not be read
poll_fails "the group may not be read" | raises BrokerError "the group" turn
""")
def test_loop_with_stopped_partitions(instance: dg.DagsterInstance, story: str) -> None:
    BenchScript(instance, {"PAIRS": PAIRS}).play(story)


def test_stop_known_only_to_its_owner_stays_shown(instance: dg.DagsterInstance) -> None:
    """Neither another member nor a manual check knows the reason."""
    blue = Bench(instance, partitions=2, records=0)
    green = Bench(instance, group=blue.group)

    def turn_until(condition: Callable[[], object]) -> None:
        for _ in range(300):
            green.turn()
            blue.turn()
            if condition():
                return
        pytest.fail("it did not come to that")

    turn_until(lambda: green.engine.partitions and blue.engine.partitions)
    (stopped,) = blue.engine.partitions
    blue.consumer.refuses = {stopped: "Group authorization failed"}
    blue.group.produce(stopped, 5)
    turn_until(lambda: not evaluations(blue)[0].passed)

    def shown() -> str:
        newest = evaluations(blue)[0]
        return "" if newest.passed else str(newest.metadata["partitions"].value)

    before = len(evaluations(blue))
    green.member_loop._report.add_news()
    turn_until(lambda: len(evaluations(blue)) > before)
    assert shown() == str(stopped)
    blue.catalogue.show_stopped(GroupState(), {})
    turn_until(lambda: shown() == str(stopped))
    blue.consumer.refuses = {}
    turn_until(lambda: not shown())
    green.member_loop._report.add_news()
    for _ in range(100):
        green.turn()
        blue.turn()
        assert not shown()


def test_name_of_the_check_stays() -> None:
    """Under another name its history and its alerts would be lost."""
    group = GroupAssets.of("etl")
    check = build_stopped_check(
        group.offsets, "kafka", lambda instance: Catalogue(instance, group, NO_MEMBER)
    )
    assert [spec.name for spec in check.check_specs] == ["no_partition_stopped"]


def test_member_stays_in_the_group_while_the_storage_hangs(
    instance_on_disk: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(instance_on_disk, partitions=2, start=in_thread)

    def are_offered() -> bool:
        # However many turns it takes: the storage is as slow as the machine, the clock of the bench
        # is not.
        bench.turn()
        return len(bench.mailbox.mail.batch_requests) == 2

    wait_until(are_offered, timeout_s=120, what="two offers")
    let_go, hanging = threading.Event(), threading.Event()
    real = bench.member_loop.dependencies.runs.read

    def hangs(*asked: Any, **further: Any) -> tuple[RunSnapshot, ...]:  # noqa: ANN401 - handed on
        hanging.set()
        assert let_go.wait(120)
        return real(*asked, **further)

    def is_hanging() -> bool:
        bench.turn()
        return hanging.is_set()

    monkeypatch.setattr(bench.member_loop.dependencies.runs, "read", hangs)
    wait_until(is_hanging, timeout_s=120, what="the storage to hang")
    began = bench.group.clock()
    bench.joined_by_another()
    bench.until(lambda: len(bench.engine.partitions) == 1)
    assert 49 < bench.group.clock() - began < 52, "the limit of the hold"
    assert any(
        "Dagster's storage has not answered for" in line for line in bench.mailbox.mail.summary
    )
    bench.turn(2)
    assert len(bench.consumer.assignment()) == 1
    (batch_request,) = bench.mailbox.mail.batch_requests
    make_run(instance_on_disk, batch_request, Status.SUCCESS)
    let_go.set()

    def is_committed() -> bool:
        bench.turn()
        return bench.offset(batch_request.ranges[0].partition) == 10

    wait_until(is_committed, timeout_s=120, what="the commit")


@pytest.mark.parametrize("topics", [(), ("orders",)])
def test_commit_is_refused_if_its_topic_is_lost(
    instance: dg.DagsterInstance, topics: tuple[str, ...]
) -> None:
    """No assignment event reports the loss of the topic during a hold."""
    bench = Bench(instance)
    bench.until(lambda: tp(0) in bench.engine.partitions)
    write = commands.OffsetWrite(tp(0), 1, bench.group.committed.get(tp(0)), OffsetAndMetadata(7))
    error = PartitionLostError("it is gone", topics=topics)
    vars(bench.consumer)["commit_offsets"] = lambda *_: CommitResult(frozenset(), {tp(0): error})
    event = bench.member_loop._written((write,))
    assert isinstance(event, events.OffsetsWritten)
    assert bool(event.refused) is bool(topics)
    assert bool(event.failed) is not bool(topics)


def test_first_write_for_a_recreated_topic_is_not_stored(instance: dg.DagsterInstance) -> None:
    bench = Bench(instance)
    bench.until(lambda: tp(0) in bench.engine.partitions)
    bench.group.recreate_topic("orders")
    write = commands.OffsetWrite(tp(0), 1, None, OffsetAndMetadata(7), "deleted")
    event = bench.member_loop._written((write,))
    assert event == events.OffsetsWritten((), ((write, events.WriteFailure.CHANGED),))
    assert tp(0) not in bench.group.committed


def test_offsets_that_may_not_be_read_stop_only_their_partition(
    instance: dg.DagsterInstance,
) -> None:
    bench = Bench(instance, partitions=2)
    bench.until(lambda: len(bench.engine.partitions) == 2)
    why = "reading failed: grant the ACL READ"
    refusal = BrokerError(why, partitions={tp(0): why}, topics=["orders"])
    bench.consumer.committed_fails = [refusal]
    write = commands.OffsetWrite(tp(0), 1, None, OffsetAndMetadata(0))
    event = bench.member_loop._written((write,))
    assert isinstance(event, events.OffsetsWritten)
    assert event.refused == ((write, why),)


@pytest.mark.postgres
def test_member_survives_a_database_that_never_answers(postgres: Postgres) -> None:
    """A firewall drops packets, and the client has no timeout."""
    name = unique_name("hangs").replace("-", "_")
    postgres.create_database(name)
    with (
        Proxy(postgres.port) as proxy,
        dg.instance_for_test(
            overrides=postgres.dagster_settings(name, port=proxy.port)
        ) as instance,
    ):
        bench = Bench(instance, partitions=2, start=in_thread)

        def has_offers() -> bool:
            bench.turn()
            return len(bench.mailbox.mail.batch_requests) == 2

        wait_until(has_offers, timeout_s=120, what="the offers")
        proxy.fall_silent()
        bench.joined_by_another()
        bench.until(lambda: len(bench.engine.partitions) == 1, turns=2_000)
        assert any(
            "Dagster's storage has not answered for" in line for line in bench.mailbox.mail.summary
        )
        bench.turn(2)
        assert len(bench.consumer.assignment()) == 1
        (batch_request,) = bench.mailbox.mail.batch_requests
        proxy.speak()
        make_run(instance, batch_request, Status.SUCCESS)

        def is_committed() -> bool:
            bench.turn()
            return bench.offset(batch_request.ranges[0].partition) == 10

        wait_until(is_committed, timeout_s=120, what="the commit")
