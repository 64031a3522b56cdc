"""The member loop in trouble.

A thousand partitions stop at once, partitions go and come back in one turn, and the storage hangs.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.errors import BrokerError, PartitionLostError
from dagster_rebalance.core.model.events import (
    LostReason,
    PartitionsAssigned,
    PartitionsLost,
    RevokeRequested,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.lag import GroupState
from dagster_rebalance.kafka.group_ports import CommitResult
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import (
    STOPPED_CHECK,
    build_stopped_check,
)
from dagster_rebalance.orchestration.runs.canceller import in_thread
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.proxy import Proxy
from tests.orchestration.bench import Bench, Status
from tests.orchestration.parts import make_run, span, tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.orchestration.ports import RunError
    from dagster_rebalance.testing.postgres import Postgres


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def instance_on_disk() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as made:
        yield made


def evaluations(instance: dg.DagsterInstance, bench: Bench) -> list[dg.AssetCheckEvaluation]:
    records = instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(bench.assets.offsets, STOPPED_CHECK), limit=100
    )
    return [record.evaluation for record in records if record.evaluation is not None]


def test_a_thousand_partitions_that_all_stop_cost_one_evaluation() -> None:
    """An outage was longer than the retention, and stopped each partition.

    A look at the whole group for each of them kept the member deaf until it was fenced.
    """
    with dg.DagsterInstance.ephemeral() as instance:
        bench = Bench(instance, partitions=1_000, records=0)
        for number in range(1_000):
            bench.group.committed[tp(number)] = OffsetAndMetadata(5, "text of another application")
        bench.until(
            lambda: (
                sum(bool(owned.stop_reason) for owned in bench.engine.partitions.values()) == 1_000
            )
        )
        (newest,) = evaluations(instance, bench)
        assert newest.metadata["stopped_partitions"].value == 1_000
        assert str(newest.description).endswith("; and 980 more")
        assert newest.metadata["partitions"].value == "orders-0..999"
        assert len(dg.serialize_value(newest)) < 21_000
        bench.turn(120)
        assert len(evaluations(instance, bench)) == 1, (
            "they are looked up again each ten seconds, which is no news"
        )


def test_the_notes_say_what_is_stopped_and_that_it_goes_on(instance: dg.DagsterInstance) -> None:
    """The log of a tick is what people read first."""
    bench = Bench(instance)
    bench.group.committed[tp(0)] = OffsetAndMetadata(0, "text of another application")
    bench.until(lambda: any(owned.stop_reason for owned in bench.engine.partitions.values()))
    assert any(" stopped: orders-0: " in note for note in bench.mailbox.take_notes())
    bench.group.committed[tp(0)] = OffsetAndMetadata(0)
    bench.until(lambda: bench.mailbox.mail.batch_requests)
    assert any(note.endswith(" orders-0 continues") for note in bench.mailbox.take_notes())


def test_what_is_stopped_is_shown_again_when_the_storage_fails_once(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check would keep its old colour until the next news. The simulator found it."""
    bench = Bench(instance)
    bench.group.committed[tp(0)] = OffsetAndMetadata(0, "text of another application")
    show, asked = bench.catalogue.show_stopped, 0

    def fail_once(standing: GroupState, errors: Mapping[TopicPartition, RunError]) -> None:
        nonlocal asked
        asked += bool(standing.stopped)
        if asked == 1:
            message = "database is locked"
            raise OSError(message)
        show(standing, errors)

    monkeypatch.setattr(bench.catalogue, "show_stopped", fail_once)
    bench.until(lambda: any(not shown.passed for shown in evaluations(instance, bench)))


def test_a_stop_that_only_its_owner_knows_of_stays_shown(instance: dg.DagsterInstance) -> None:
    """Another member has news, and a person executes the check by hand: neither knows the reason.

    The check was green for good behind a partition that stood still.
    """
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
    turn_until(lambda: not evaluations(instance, blue)[0].passed)

    def shown() -> str:
        newest = evaluations(instance, blue)[0]
        return "" if newest.passed else str(newest.metadata["partitions"].value)

    before = len(evaluations(instance, blue))
    green.member_loop._report.add_news()
    turn_until(lambda: len(evaluations(instance, blue)) > before)
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


def test_a_member_that_stood_still_shows_nothing_before_it_knows_what_it_has_lost(
    instance: dg.DagsterInstance,
) -> None:
    """Its partition had gone to another member, which had shown that it is stopped.

    The member woke up, still had it, and showed that it goes on. The simulator found it.
    """
    bench = Bench(instance)
    bench.batch_requests()
    bench.group.clock.advance(12)
    bench.catalogue.show_stopped(GroupState({tp(0): "as its new owner sees it"}), {})
    bench.member_loop._report.add_news()
    bench.turn()
    assert not evaluations(instance, bench)[0].passed
    bench.until(lambda: evaluations(instance, bench)[0].passed)


def test_a_partition_that_is_being_taken_in_is_not_said_to_go_on(
    instance: dg.DagsterInstance,
) -> None:
    """A reload must not turn the check green while the new member still looks.

    Each reload did so, and the check stayed green if the new member left before it had looked.
    """
    bench = Bench(instance)
    bench.group.committed[tp(0)] = OffsetAndMetadata(0, "text of another application")
    bench.catalogue.reads_fail = True
    bench.turn(60)
    assert bench.engine.partitions[tp(0)].phase is Phase.RESTORING
    (evaluation,) = evaluations(instance, bench)
    assert not evaluation.passed
    assert "was not written by dagster_rebalance" in str(evaluation.description)


def test_a_stopped_partition_that_is_given_up_is_not_said_to_go_on(
    instance: dg.DagsterInstance,
) -> None:
    """It goes on nowhere: its next owner finds the same reason."""
    bench = Bench(instance)
    bench.group.committed[tp(0)] = OffsetAndMetadata(0, "text of another application")
    bench.until(lambda: any(owned.stop_reason for owned in bench.engine.partitions.values()))
    bench.mailbox.send(events.LeaveRequested("its process ends", 30.0))
    bench.until(lambda: bench.member_loop._left)
    notes = bench.mailbox.take_notes()
    assert not [note for note in notes if note.endswith("continues")]
    assert [note for note in notes if note.endswith("orders-0 was stopped when it was released")]


def test_the_name_of_the_check_stays() -> None:
    """Under another one its history and the alerts on it would be lost."""
    group = GroupAssets.of("etl")
    check = build_stopped_check(
        group.offsets, "kafka", lambda instance: Catalogue(instance, group, NO_MEMBER)
    )
    assert [spec.name for spec in check.check_specs] == ["no_partition_stopped"]


def test_a_partition_that_was_lost_came_back_and_is_asked_for_in_one_turn_is_drained(
    instance: dg.DagsterInstance,
) -> None:
    """The partition was lost during a hold, after a standstill.

    The request is a new one, and must not be taken for the hold that was lost.
    """
    bench = Bench(instance, partitions=2)
    bench.batch_requests(2)
    for number in (0, 1):
        bench.run(Status.STARTED, number)
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    bench.joined_by_another()
    bench.until(lambda: bench.engine.holds)
    (held,) = bench.engine.held
    bench.member.deliver(PartitionsLost((held,), LostReason.SESSION))
    bench.member.deliver(PartitionsAssigned((held,)))
    bench.member.deliver(RevokeRequested((held,)))
    bench.turn()
    assert bench.engine.held == {held}
    assert len(bench.engine.heard(events.RevokeRequested)) == 2
    bench.turn(20)
    assert held in bench.consumer.assignment(), "delayed while its run works"


def test_what_goes_without_being_released_is_lost(instance: dg.DagsterInstance) -> None:
    """The engine must not keep a partition that the consumer has given up.

    The next assignment of that partition would end the member.
    """
    bench = Bench(instance, partitions=2)
    bench.batch_requests(2)
    for number in (0, 1):
        bench.run(Status.STARTED, number)
    bench.joined_by_another()
    bench.until(lambda: bench.engine.holds)
    (held,) = bench.engine.held
    bench.consumer.delay_revoke = lambda _: True  # type: ignore[method-assign,assignment]
    bench.turn(2)
    assert held not in bench.engine.partitions
    assert [event["outcome"] for event in bench.observed() if event["event"] == "hold"] == ["lost"]


def test_the_member_stays_in_the_group_while_the_storage_hangs(
    instance_on_disk: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member polls on, and the tick says what it waits for.

    A hold ends at its deadline, and afterwards everything goes on.
    """
    bench = Bench(instance_on_disk, partitions=2, start=in_thread)

    def are_offered() -> bool:
        # However many turns it takes: the storage is as slow as the machine, the clock of the bench
        # is not.
        bench.turn()
        return len(bench.mailbox.mail.batch_requests) == 2

    wait_until(are_offered, timeout_s=60, what="two offers")
    let_go, hanging = threading.Event(), threading.Event()
    real = bench.member_loop.dependencies.runs.read

    def hangs(*asked: Any, **further: Any) -> tuple[RunSnapshot, ...]:  # noqa: ANN401 - handed on
        hanging.set()
        assert let_go.wait(60)
        return real(*asked, **further)

    def is_hanging() -> bool:
        bench.turn()
        return hanging.is_set()

    monkeypatch.setattr(bench.member_loop.dependencies.runs, "read", hangs)
    wait_until(is_hanging, timeout_s=60, what="the storage to hang")
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

    wait_until(is_committed, timeout_s=60, what="the commit")


def test_a_write_that_kafka_refuses_stops_its_partition_alone_and_is_tried_again_slowly(
    instance: dg.DagsterInstance,
) -> None:
    """A right was taken away, and waiting does not mend that.

    Nobody looked while the write was tried each second. The other partitions go on.
    """
    settings = EngineSettings(
        limits=BatchLimits(max_ranges_per_run=2, max_runs_in_flight=1), lease_s=1e9
    )
    bench = Bench(instance, partitions=2, settings=settings)
    bench.group.committed[tp(0)] = bench.group.committed[tp(1)] = OffsetAndMetadata(0)
    bench.consumer.refuses = {tp(1): "not authorised: grant the ACL READ on topic orders"}
    bench.batch_requests()
    assert [batch_request.ranges for batch_request in bench.mailbox.mail.batch_requests] == [
        (span(0),)
    ], "the healthy range of the batch"
    reason = bench.engine.partitions[tp(1)].stop_reason
    assert reason.startswith(
        "orders-1: Kafka refuses to store its offset: not authorised: grant the ACL READ on topic "
        "orders"
    )
    writes = len(bench.consumer.writes)
    before = bench.group.clock()
    bench.until(lambda: bench.group.clock() - before > 25)
    assert len(bench.consumer.writes) == writes + 2
    bench.consumer.refuses = {}
    bench.until(
        lambda: (
            [batch_request.ranges for batch_request in bench.mailbox.mail.batch_requests]
            == [(span(0), span(1))]
        )
    )
    assert not bench.engine.partitions[tp(1)].stop_reason


def test_a_topic_that_may_not_be_read_is_noted_and_the_member_goes_on(
    instance: dg.DagsterInstance,
) -> None:
    """The client reports it from a poll."""
    bench = Bench(instance)
    bench.consumer.polls_fail = [BrokerError("orders may not be read", topics=["orders"])]
    bench.batch_requests()
    assert any("orders may not be read" in note for note in bench.mailbox.take_notes())
    bench.consumer.polls_fail = [BrokerError("the group may not be read")]
    with pytest.raises(BrokerError, match="the group"):
        bench.turn()


@pytest.mark.parametrize("topics", [(), ("orders",)])
def test_a_commit_that_is_lost_with_its_topic_is_refused_and_one_of_a_lost_partition_is_not(
    instance: dg.DagsterInstance, topics: tuple[str, ...]
) -> None:
    """No assignment tells the loss of the topic during a hold, which would wait to its end."""
    bench = Bench(instance)
    bench.until(lambda: tp(0) in bench.engine.partitions)
    write = commands.OffsetWrite(tp(0), 1, bench.group.committed.get(tp(0)), OffsetAndMetadata(7))
    error = PartitionLostError("it is gone", topics=topics)
    vars(bench.consumer)["commit_offsets"] = lambda *_: CommitResult(frozenset(), {tp(0): error})
    event = bench.member_loop._written((write,))
    assert isinstance(event, events.OffsetsWritten)
    assert bool(event.refused) is bool(topics)
    assert bool(event.failed) is not bool(topics)


def test_a_member_joins_for_the_topics_that_it_may_read(instance: dg.DagsterInstance) -> None:
    """Without any, it fails at once, and says which right is missing."""
    bench = Bench(instance, others=["dead"])
    bench.group.forbid("dead")
    bench.mailbox.is_abandoned = True
    bench.member_loop.run()
    assert any("ACL READ" in note for note in bench.mailbox.take_notes())
    bench = Bench(instance, others=["dead"])
    bench.group.forbid("dead", "orders")
    with pytest.raises(BrokerError, match="ACL READ"):
        bench.member_loop.run()


def test_offsets_that_may_not_be_read_stop_their_partition_alone(
    instance: dg.DagsterInstance,
) -> None:
    """The right is withdrawn between two reads of the bounds, and a write finds out first."""
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
def test_a_database_that_never_answers_costs_no_membership(postgres: Postgres) -> None:
    """A firewall that drops packets: the connection stays open, and its client has no time-out.

    On real parts.
    """
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

        wait_until(has_offers, timeout_s=60, what="the offers")
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

        wait_until(is_committed, timeout_s=60, what="the commit")
