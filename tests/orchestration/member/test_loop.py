"""The member loop with real parts, turn by turn.

The engine is real, the consumer is a real one on a group in memory, and the instance is a real one
in memory.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import dagster as dg
import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.events import LostReason, PartitionsAssigned, PartitionsLost
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.reporting.lag import GroupState
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.kafka.group_ports import CommitResult, RequestFailed
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.runs.canceller import in_thread
from dagster_rebalance.orchestration.storage.dynamic_partitions import GroupJobs, JobName
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from tests.orchestration.bench import SETTINGS, Bench, Status
from tests.orchestration.parts import idle_job, new_on_postgres, status_of, tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.consumer.consumer import PollResult, RebalanceAwareConsumer
    from dagster_rebalance.testing.postgres import Postgres


PAUSE = Directive(Action.PAUSE, "*", "a person", 1.0, "it must stand")
RESUME = Directive(Action.RESUME, "*", "a person", 2.0)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def test_a_batch_is_claimed_offered_committed_and_recorded(instance: dg.DagsterInstance) -> None:
    """The life of a batch, seen from the thread that carries it out."""
    bench = Bench(instance)
    bench.batch_requests()
    (offered,) = bench.mailbox.mail.batch_requests
    assert decode(bench.group.committed[tp(0)]).ranges(tp(0)) == (
        (offered.ranges[0], offered.batch_id),
    ), "claimed before it is offered"
    run = bench.run(Status.STARTED)
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    assert bench.offset() == 0, "nothing is committed before the run succeeded"
    bench.succeed(run)
    bench.until(bench.materialised)
    assert bench.offset() == 10
    assert bench.materialised() == [("orders-0", 0, 10)]
    assert bench.observed()[0]["event"] == "assigned"
    assert bench.observed()[0]["member_id"] == bench.member.member_id
    assert list(instance.get_dynamic_partitions(bench.assets.partitions_name)) == ["orders-0"]


def counted_calls(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls of an instance from now on, and of what signs of life are kept in, by name."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            calls[name] += 1
            return function(*arguments, **named)

        return call

    for name, _ in inspect.getmembers(dg.DagsterInstance, inspect.isfunction):
        if not name.startswith("_"):
            monkeypatch.setattr(instance, name, counted(name, getattr(instance, name)))
    for name in ("get_cursor_values", "set_cursor_values"):
        kept = instance.run_storage
        monkeypatch.setattr(kept, name, counted(name, getattr(kept, name)))
    return calls


def test_an_idle_member_asks_storage_less_than_once_a_second(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members of a team share a database, and on Dagster+ each call is a request."""
    bench = Bench(instance, partitions=100, records=0)
    bench.turn(50)
    calls = counted_calls(instance, monkeypatch)
    began_at = bench.group.clock()
    bench.turn(240)
    waited_s = bench.group.clock() - began_at
    assert waited_s == pytest.approx(60, abs=1)
    assert 0 < calls.total() < waited_s, calls


def test_a_live_run_and_a_hold_cost_a_bounded_number_of_calls(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look reads all live runs together: more of them cost no more calls."""
    GroupJobs(instance, "etl", JobName("r", idle_job.name)).add_own()
    patient = replace(SETTINGS, liveness=Liveness(heartbeat_timeout_s=1e9))
    bench = Bench(instance, partitions=4, settings=patient)
    bench.batch_requests(4)
    calls = counted_calls(instance, monkeypatch)

    def calls_in(turns: int) -> float:
        calls.clear()
        began_at = bench.group.clock()
        bench.turn(turns)
        return calls.total() / (bench.group.clock() - began_at)

    bench.run(Status.STARTED)
    bench.turn(50)
    with_one = calls_in(300)
    for _ in range(3):
        bench.run(Status.STARTED)
        bench.turn(50)
    with_four = calls_in(300)
    bench.joined_by_another()
    bench.until(lambda: bench.engine.holds)
    in_a_hold = calls_in(200)
    assert bench.engine.holds
    assert 0 < with_four <= with_one + 0.5, calls
    assert with_four < 5
    assert in_a_hold < 15, calls


def test_what_the_storage_answers_while_an_older_answer_waits_is_taken_in_behind_it(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What people ordered last would be undone by what they had ordered before."""
    bench = Bench(instance)
    bench.turn(20)
    answers, apply = bench.member_loop._storage._answers, bench.engine.apply

    def given(*orders: Directive) -> Callable[[], events.Event]:
        return lambda: events.DirectivesRead(orders, 0)

    def handled(event: events.Event, now: float) -> tuple[commands.Command, ...]:
        """The first answer has a command that takes long: a newer one comes meanwhile."""
        if isinstance(event, events.TickArrived):
            answers.put(given(PAUSE, RESUME))
            return (commands.Note("takes long"),)
        return apply(event, now)

    monkeypatch.setattr(bench.engine, "apply", handled)
    bench.ticks = False
    answers.put(events.TickArrived)
    answers.put(given(PAUSE))
    bench.turn()
    assert bench.engine.directives == (PAUSE, RESUME)


def test_a_storage_that_always_has_an_answer_does_not_keep_the_member_from_its_polls(
    instance: dg.DagsterInstance,
) -> None:
    """With many partitions at work it answers as fast as the engine takes answers in.

    A member that does not poll hears of no revoke, and Kafka evicts it.
    """
    bench = Bench(instance)
    bench.turn(20)
    answers, taken = bench.member_loop._storage._answers, list[int]()

    def answered() -> events.Event:
        assert len(taken) < 10_000, "the turn does not end"
        taken.append(1)
        answers.put(answered)
        return events.TimePassed()

    answers.put(answered)
    bench.turn()
    in_one_turn = len(taken)
    bench.turn()
    assert 0 < in_one_turn < len(taken), "it goes on with the next turn"


def test_what_happened_within_one_poll_is_told_in_its_order(instance: dg.DagsterInstance) -> None:
    """The partition is lost and assigned again at once.

    The other way round the engine would work on without looking anything up.
    """
    bench = Bench(instance)
    bench.turn()
    bench.member.deliver(PartitionsLost((tp(0),), LostReason.SESSION))
    bench.member.deliver(PartitionsAssigned((tp(0),)))
    bench.turn()
    told = bench.engine.heard(events.PartitionsAssigned, events.PartitionsLost)
    assert told[1:] == [events.PartitionsLost((tp(0),)), events.PartitionsAssigned((tp(0),))]
    assert set(bench.engine.partitions) == {tp(0)}


def test_a_superseded_hold_is_told_as_such(instance: dg.DagsterInstance) -> None:
    """Its receipt says that somebody else has the partitions, not that the session ended."""
    bench = Bench(instance, partitions=2)
    bench.batch_requests(2)
    for number in (0, 1):
        bench.run(Status.STARTED, number)
    bench.joined_by_another()
    bench.until(lambda: bench.engine.holds)
    bench.group.supersede(bench.member)
    bench.until(lambda: bench.engine.heard(events.PartitionsLost))
    assert bench.engine.heard(events.PartitionsLost) == [
        events.PartitionsLost((tp(0), tp(1)), LostReason.SUPERSEDED)
    ]
    assert [event["outcome"] for event in bench.observed() if event["event"] == "hold"] == [
        "superseded"
    ]


def test_a_lost_member_is_told_as_lost(instance: dg.DagsterInstance) -> None:
    """Fenced during a hold: all that it had is gone."""
    bench = Bench(instance, partitions=2)
    bench.batch_requests(2)
    for number in (0, 1):
        bench.run(Status.STARTED, number)
    bench.joined_by_another()
    bench.until(lambda: bench.engine.holds)
    bench.group.fence(bench.member)
    bench.until(lambda: bench.engine.heard(events.PartitionsLost))
    assert bench.engine.heard(events.PartitionsLost) == [
        events.PartitionsLost((tp(0), tp(1)), LostReason.FENCED)
    ]


def test_a_revoke_is_delayed_until_its_run_is_committed_and_no_longer(
    instance: dg.DagsterInstance,
) -> None:
    """The promise of the package, in one thread."""
    bench = Bench(instance, partitions=2)
    bench.batch_requests(2)
    runs = [bench.run(Status.STARTED, number) for number in (0, 1)]
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    bench.joined_by_another()
    bench.until(lambda: bench.engine.holds)
    (held,) = bench.engine.held
    bench.turn(20)
    assert bench.group.owner(held) is bench.member, "delayed while its run works"
    assert len(bench.engine.heard(events.RevokeRequested)) == 1, "asked once"
    bench.succeed(runs[held.partition])
    bench.until(lambda: bench.group.owner(held) is not bench.member)
    assert bench.offset(held.partition) == 10
    assert bench.offset(1 - held.partition) == 0
    assert [event["outcome"] for event in bench.observed() if event["event"] == "hold"] == [
        "drained"
    ]
    assert len(bench.engine.heard(events.RevokeRequested)) == 1


def test_a_revoke_without_work_is_released_by_the_next_poll(instance: dg.DagsterInstance) -> None:
    """An idle partition must not cost its next owner a second."""
    bench = Bench(instance, partitions=2, records=0)
    bench.until(
        lambda: (
            bench.engine.partitions
            and all(owned.phase.may_plan for owned in bench.engine.partitions.values())
        )
    )
    bench.joined_by_another()
    before = bench.group.clock()
    bench.until(lambda: len(bench.engine.partitions) == 1)
    bench.turn()
    assert len(bench.consumer.assignment()) == 1
    assert bench.group.clock() - before < 0.5


def test_a_queued_run_of_a_held_partition_is_cancelled(instance: dg.DagsterInstance) -> None:
    """Its work costs nothing to take back."""
    bench = Bench(instance, partitions=2)
    bench.batch_requests(2)
    runs = [bench.run(Status.QUEUED, number) for number in (0, 1)]
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    taken_back = bench.only_note_cancels()
    bench.joined_by_another()
    bench.until(lambda: taken_back)
    (held,) = bench.engine.held
    assert set(taken_back) == {(runs[held.partition].run_id, True)}


def test_what_somebody_else_stored_is_not_overwritten(instance: dg.DagsterInstance) -> None:
    """The member reads before it writes.

    An operator moved the offset, or another member owns the partition by now.
    """
    bench = Bench(instance)
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    bench.group.produce(tp(0), 10)
    bench.group.committed[tp(0)] = OffsetAndMetadata(5)
    writes = len(bench.consumer.writes)
    bench.succeed(run)
    bench.until(lambda: any(event.failed for event in bench.engine.heard(events.OffsetsWritten)))
    assert [write[tp(0)].offset for write in bench.consumer.writes[writes:]] == [5], (
        "it is taken in again, and claimed from there on"
    )
    assert bench.group.committed[tp(0)].offset == 5
    bench.batch_requests()
    assert bench.mailbox.mail.batch_requests[0].ranges[0].start == 5, (
        "it is taken in again, and obeyed"
    )


def test_a_coordinator_that_answers_no_commits_does_not_stop_the_member(
    instance: dg.DagsterInstance,
) -> None:
    """In classic that lasts for as long as another member holds a revoke, which may be minutes."""
    bench = Bench(instance)
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    bench.group.answers_commits = False
    bench.succeed(run)
    bench.until(lambda: any(event.failed for event in bench.engine.heard(events.OffsetsWritten)))
    assert not bench.materialised()
    bench.group.answers_commits = True
    bench.until(bench.materialised)
    assert bench.materialised() == [("orders-0", 0, 10)]


def test_a_write_whose_answer_was_lost_counts_as_done(instance: dg.DagsterInstance) -> None:
    """What is stored already is not written again.

    By then somebody else's claim could stand behind it.
    """
    bench = Bench(instance)
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    real = bench.consumer.commit_offsets

    def lose_the_answer(
        offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_s: float | None = None
    ) -> CommitResult:
        real(offsets, timeout_s)
        bench.consumer.commit_offsets = real  # type: ignore[method-assign]
        message = "timed out"
        raise BrokerError(message, retriable=True)

    bench.consumer.commit_offsets = lose_the_answer  # type: ignore[method-assign]
    writes = len(bench.consumer.writes)
    bench.succeed(run)
    bench.until(bench.materialised)
    assert len(bench.consumer.writes) == writes + 1
    assert not any(event.failed for event in bench.engine.heard(events.OffsetsWritten))
    assert bench.materialised() == [("orders-0", 0, 10)]


@pytest.mark.parametrize(
    ("woken", "asked_s"),
    [
        pytest.param(0, [0.1, 2.0], id="undisturbed"),
        pytest.param(2, [0.1, 2.0, 1.5, 1.0], id="woken"),
    ],
)
def test_after_a_standstill_it_asks_whether_it_is_still_a_member_before_it_goes_on(
    instance: dg.DagsterInstance, woken: int, asked_s: list[float]
) -> None:
    """A member must not record the commit of its successor a second time.

    Without the question it would find that commit and take it for its own, whose answer was lost.
    The storage answers and bodies end just then, and each ends a poll.
    """
    bench = Bench(instance)
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    bench.succeed(run)
    real, polls = bench.consumer.poll_with_rebalance, []

    def suspended(timeout_s: float) -> PollResult:
        polls.append(timeout_s)
        if len(polls) == 1:
            bench.group.clock.advance(20.0)
        elif len(polls) < 2 + woken:
            return real(0.5)
        elif len(polls) == 2 + woken:
            bench.member.deliver(PartitionsLost((tp(0),), LostReason.SESSION))
        return real(timeout_s)

    bench.consumer.poll_with_rebalance = suspended  # type: ignore[method-assign]
    writes = len(bench.consumer.writes)
    bench.turn()
    assert polls == asked_s
    assert len(bench.consumer.writes) == writes, "nothing is written"
    assert bench.materialised() == [], "nothing is recorded"
    assert any("polling Kafka took 20" in note for note in bench.mailbox.take_notes()), (
        "the tick says why"
    )


def test_a_machine_that_slept_is_a_standstill_although_its_clock_stood_still(
    instance: dg.DagsterInstance,
) -> None:
    """Linux's monotonic clock does not count while a laptop sleeps.

    The session of the member has ended all the same.
    """
    bench = Bench(instance)
    slept_s = [0.0]
    parts = replace(
        bench.member_loop.dependencies,
        clock_with_suspension=lambda: bench.group.clock() + slept_s[0],
    )
    bench.member_loop = MemberLoop(parts, bench.mailbox)
    bench.batch_requests()
    real, polls = bench.consumer.poll_with_rebalance, []

    def counted(timeout_s: float) -> PollResult:
        polls.append(timeout_s)
        return real(timeout_s)

    bench.consumer.poll_with_rebalance = counted  # type: ignore[method-assign]
    bench.turn()
    slept_s[0] = 3600.0
    bench.turn()
    assert polls == [0.1, 0.1, 2.0]


def test_a_standstill_gives_nothing_up(instance: dg.DagsterInstance) -> None:
    """Each poll releases the partitions that were not delayed since the last one.

    That holds for a held partition and for one that is asked for in that very poll.
    """
    bench = Bench(instance, partitions=2)
    bench.batch_requests(2)
    for number in (0, 1):
        bench.run(Status.STARTED, number)
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    bench.joined_by_another()
    bench.group.clock.advance(20.0)
    bench.turn()
    bench.until(lambda: bench.engine.holds)
    (held,) = bench.engine.held
    bench.group.clock.advance(20.0)
    bench.turn(3)
    assert bench.group.owner(held) is bench.member, "delayed while its run works"


def test_a_partition_whose_commit_failed_is_written_again_and_the_others_are_not(
    instance: dg.DagsterInstance,
) -> None:
    """One request for several partitions can fail for some."""
    bench = Bench(
        instance,
        partitions=2,
        settings=EngineSettings(limits=BatchLimits(max_ranges_per_run=2, max_runs_in_flight=1)),
    )
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    bench.consumer.commits_fail = [frozenset({tp(1)})]
    bench.consumer.writes.clear()
    bench.succeed(run)
    bench.until(lambda: len(bench.materialised()) == 2)
    assert [sorted(write) for write in bench.consumer.writes] == [[tp(0), tp(1)], [tp(1)]]
    assert any(
        "the offset of orders-1 could not be written yet" in note
        for note in bench.mailbox.take_notes()
    )


def test_a_retriable_error_is_noted_and_the_work_goes_on(instance: dg.DagsterInstance) -> None:
    """A broker that restarts must not end a member."""
    bench = Bench(instance)
    bench.consumer.polls_fail = [BrokerError("the broker is away", retriable=True)]
    bench.consumer.committed_fails = [BrokerError("the coordinator moved", retriable=True)] * 3
    bench.batch_requests()
    notes = " ".join(bench.mailbox.take_notes())
    assert "the broker is away" in notes
    assert notes.count("the coordinator moved") == 3


def test_a_partition_whose_leader_is_away_keeps_no_other_one_waiting(
    instance: dg.DagsterInstance,
) -> None:
    """The others wait neither while partitions are taken in nor later.

    The partition goes on as soon as its leader answers.
    """
    bench = Bench(instance, partitions=3)
    bench.group.silence(tp(1))
    bench.until(
        lambda: (
            {
                batch_request.ranges[0].partition
                for batch_request in bench.mailbox.mail.batch_requests
            }
            == {0, 2}
        )
    )
    bench.group.silence(tp(2))
    bench.until(
        lambda: (
            {
                batch_request.ranges[0].partition
                for batch_request in bench.mailbox.mail.batch_requests
            }
            == {0, 1, 2}
        )
    )
    assert "failed for orders-1" in " ".join(bench.mailbox.take_notes())


def test_a_leader_that_is_away_is_not_waited_for_at_each_look(instance: dg.DagsterInstance) -> None:
    """Each time costs all others a second and a half."""
    bench = Bench(instance, partitions=2)
    bench.batch_requests()
    bench.group.silence(tp(1))
    for _ in range(40):
        bench.turn()
    notes = [note for note in bench.mailbox.take_notes() if "failed for orders-1" in note]
    assert len(notes) == 1


def test_a_leader_that_is_back_is_found_soon(instance: dg.DagsterInstance) -> None:
    """Its partition has stood still for long enough."""
    bench = Bench(instance, partitions=2)
    bench.group.silence(tp(1))
    bench.until(lambda: bench.mailbox.mail.batch_requests)
    bench.turn(20)
    bench.group.silence()
    before = bench.group.clock()
    bench.batch_requests(2)
    assert bench.group.clock() - before < 3


def test_an_error_that_does_not_mend_itself_ends_the_member(instance: dg.DagsterInstance) -> None:
    """Wrong credentials, say: the tick shows it, red, instead of a member that seems to wait."""
    bench = Bench(instance)
    bench.turn()
    bench.member.fail(BrokerError("wrong password"))
    with pytest.raises(BrokerError, match="wrong password"):
        bench.turn()


def test_a_request_that_is_refused_ends_the_member(instance: dg.DagsterInstance) -> None:
    """As above, for what the member loop asks for a command."""
    bench = Bench(instance)
    bench.consumer.committed_fails = [BrokerError("not authorised")]
    with pytest.raises(BrokerError, match="not authorised"):
        bench.turn(2)


def test_a_command_that_storage_did_not_take_is_given_again(instance: dg.DagsterInstance) -> None:
    """Dagster's database may be away for a while: each commit is recorded once, later."""
    bench = Bench(instance)
    bench.catalogue.failures = 3
    bench.batch_requests()
    bench.run(Status.SUCCESS)
    bench.until(bench.materialised)
    bench.turn(30)
    assert bench.materialised() == [("orders-0", 0, 10)]
    notes = " ".join(bench.mailbox.take_notes())
    said = "recording a commit in Dagster failed and is tried again: database is locked"
    assert notes.count(said) == 3


def test_a_slow_command_is_noted_in_plain_words(instance: dg.DagsterInstance) -> None:
    """People read the notes in the tick, and know no class of a command."""
    bench = Bench(instance)
    real = bench.consumer.commit_offsets

    def slow(
        offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_s: float | None = None
    ) -> CommitResult:
        bench.group.clock.advance(9.9)
        return real(offsets, timeout_s)

    bench.consumer.commit_offsets = slow  # type: ignore[method-assign]
    bench.batch_requests()
    bench.until(lambda: bench.consumer.writes)
    notes = " ".join(bench.mailbox.take_notes())
    assert "writing offsets to Kafka took 9.9 s" in notes
    assert not any(command.__name__ in notes for command in get_args(commands.Command))


class SlowStorage:
    """Starts what needs Dagster's storage at once, until a commit is to be recorded."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.bench = Bench(instance, start=self.start)

    def start(self, _name: str, work: Callable[[], None]) -> None:
        owned = self.bench.engine.partitions.get(tp(0))
        if owned is None or owned.unrecorded is None:
            work()
        else:
            self.waiting.append(work)

    def until_it_waits(self) -> Bench:
        self.bench.batch_requests()
        self.bench.run(Status.SUCCESS)
        self.bench.until(lambda: self.waiting)
        assert self.bench.offset() == 10
        return self.bench

    def answer(self) -> None:
        for work in self.waiting:
            work()


def test_a_commit_of_a_lost_partition_is_recorded_by_its_next_owner_alone(
    instance: dg.DagsterInstance,
) -> None:
    """The next owner finds that nobody has recorded it, and would show it a second time."""
    storage = SlowStorage(instance)
    bench = storage.until_it_waits()
    bench.member.deliver(PartitionsLost((tp(0),), LostReason.SESSION))
    bench.turn()
    storage.answer()
    assert bench.materialised() == []


def test_a_member_that_has_left_records_no_commit(instance: dg.DagsterInstance) -> None:
    """Its partitions have their next owner by then. It leaves so when its run is taken for dead."""
    storage = SlowStorage(instance)
    bench = storage.until_it_waits()
    close = bench.consumer.close

    def close_before_the_storage_answers(timeout_s: float = 10.0) -> None:
        close(timeout_s)
        storage.answer()

    bench.consumer.close = close_before_the_storage_answers  # type: ignore[method-assign]
    bench.mailbox.is_abandoned = True
    bench.member_loop.run()
    assert bench.materialised() == []


def test_a_member_that_was_abandoned_in_the_middle_of_a_turn_carries_out_nothing_more(
    instance: dg.DagsterInstance,
) -> None:
    """It hung, and another member has its place and perhaps its partitions."""
    bench = Bench(instance)
    bench.mailbox.is_abandoned = True
    bench.until(lambda: bench.engine.partitions)
    bench.turn(20)
    assert not bench.consumer.writes
    bench.mailbox.is_abandoned = False
    bench.batch_requests()
    assert bench.consumer.writes, "it had something to write"


def test_events_without_weight_may_fail(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the catalogue shows an assignment is nice; the partition is worked on all the same."""
    bench = Bench(instance)

    def away(*_: object) -> None:
        message = "no connection"
        raise OSError(message)

    monkeypatch.setattr(bench.catalogue, "record_assigned", away)
    monkeypatch.setattr(bench.catalogue, "leave_request", away)
    bench.batch_requests()
    assert any(
        "showing the state of the group in Dagster failed: no connection" in note
        for note in bench.mailbox.take_notes()
    )


def test_run_is_over_when_the_lease_is_and_everything_is_given_up(
    instance: dg.DagsterInstance,
) -> None:
    """A sensor that was switched off must not hoard partitions; what it did is on record."""
    bench = Bench(instance, records=0)
    bench.ticks = False
    bench.member_loop.run()
    joined, assigned, hold, left = bench.observed()
    assert [event["event"] for event in (joined, assigned, hold, left)] == [
        "joined",
        "assigned",
        "hold",
        "left",
    ]
    assert "has not ticked for 40 s" in str(left["reason"])
    assert hold["cause"] == "leave"
    assert 40 <= bench.group.clock() < 42


def test_asked_to_leave_it_drains_first(instance: dg.DagsterInstance) -> None:
    """The end of the process waits for a run, within its limit."""
    bench = Bench(instance)
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.mailbox.send(events.LeaveRequested("its process ends", 30.0))
    bench.turn(50)
    assert bench.member_loop._left is None
    assert not bench.mailbox.mail.batch_requests
    bench.succeed(run)
    bench.until(lambda: bench.member_loop._left)
    assert bench.offset() == 10
    assert bench.materialised() == [("orders-0", 0, 10)]


def test_it_leaves_for_a_newer_process_of_its_code_location(instance: dg.DagsterInstance) -> None:
    """After a reload the old process gets no ticks, but its lease alone would take a minute."""
    bench = Bench(instance, records=0)
    bench.catalogue.record_joined()
    bench.turn(3)
    Catalogue(instance, bench.assets, MemberIdentity("blue", "sensor", "process-2")).record_joined()
    before = bench.group.clock()
    bench.until(lambda: bench.member_loop._left)
    assert "process-2" in str(bench.member_loop._left)
    assert bench.group.clock() - before < 10


def hand_over(instance: dg.DagsterInstance) -> None:
    """One member loop makes way for another, which adopts the run at work and commits it."""
    bench = Bench(instance)
    bench.catalogue.record_joined()
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.turn(20)
    Catalogue(instance, bench.assets, MemberIdentity("blue", "sensor", "process-2")).record_joined()
    bench.until(lambda: bench.member_loop._left)
    assert [event["outcome"] for event in bench.observed() if event["event"] == "hold"] == [
        "handed over"
    ]
    assert bench.offset() == 0
    bench.consumer.close()
    successor = Bench(instance, group=bench.group)
    successor.until(lambda: any(owned.live_runs for owned in successor.engine.partitions.values()))
    assert not successor.mailbox.mail.batch_requests
    successor.succeed(run)
    successor.until(lambda: successor.materialised() == [("orders-0", 0, 10)])
    assert successor.offset() == 10


@pytest.mark.postgres
def test_it_hands_a_run_over_on_postgres(postgres: Postgres) -> None:
    """Two processes see each other and a run through the types and transactions of Postgres."""
    with new_on_postgres(postgres) as instance:
        hand_over(instance)


def test_it_hands_a_run_over_to_its_successor(instance: dg.DagsterInstance) -> None:
    """A reload must stand no partition still until the longest run of the old process ends."""
    hand_over(instance)


def test_a_member_that_drains_for_a_deploy_hands_over_when_its_successor_joins(
    instance: dg.DagsterInstance,
) -> None:
    """The new process often starts only after the old one was told to end."""
    bench = Bench(instance)
    bench.catalogue.record_joined()
    bench.batch_requests()
    bench.run(Status.STARTED)
    bench.mailbox.send(events.LeaveRequested("its process ends", 40.0))
    bench.turn(20)
    assert bench.member_loop._left is None, "nobody is there who could adopt the run"
    Catalogue(instance, bench.assets, MemberIdentity("blue", "sensor", "process-2")).record_joined()
    before = bench.group.clock()
    bench.until(lambda: bench.member_loop._left)
    assert bench.group.clock() - before < 5


def test_a_pattern_that_fits_no_topic_yet_is_waited_for(instance: dg.DagsterInstance) -> None:
    """A topic that fits may come; a name that is not there may be wrong."""
    bench = Bench(instance, topic="^later", records=0)
    bench.ticks = False
    bench.member_loop.run()
    assert "has not ticked for 40 s" in str(bench.observed()[-1]["reason"])


def test_a_topic_that_does_not_exist_ends_it_before_it_joins(instance: dg.DagsterInstance) -> None:
    """A member without partitions would look as if there was nothing to do."""
    bench = Bench(instance, topic="missing")
    with pytest.raises(BrokerError, match="missing does not exist"):
        bench.member_loop.run()
    assert bench.observed() == []


def test_a_dead_run_is_ended_and_its_batch_offered_again(instance: dg.DagsterInstance) -> None:
    """No sign of life for the time-out: the partition must not wait for ever."""
    bench = Bench(instance)
    bench.batch_requests()
    run = bench.run(Status.STARTED)
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    bench.until(lambda: bench.mailbox.mail.batch_requests, turns=1000)
    assert status_of(instance, run) is Status.FAILURE
    assert bench.mailbox.mail.batch_requests[0].attempt == 2
    assert any(
        f"makes sure that run {run.run_id[:8]} has really ended" in note
        for note in bench.mailbox.take_notes()
    )


def test_ending_a_run_keeps_nobody_waiting(instance: dg.DagsterInstance) -> None:
    """A suspended code server does not answer Dagster for a minute.

    The other partitions go on, and the code server is asked once at a time.
    """
    bench = Bench(
        instance,
        partitions=2,
        start=lambda name, work: in_thread(name, work) if "ending" in name else work(),
    )
    bench.batch_requests(2)
    bench.run(Status.STARTED)
    healthy = bench.run(Status.STARTED, 1)
    answers, waiting = threading.Event(), list[threading.Thread]()

    def hangs(_run_id: str, _sign: str) -> None:
        waiting.append(threading.current_thread())
        answers.wait(10)

    bench.member_loop.dependencies.runs.end_dead = hangs  # type: ignore[method-assign,assignment]
    bench.until(lambda: waiting, turns=1000)
    bench.succeed(healthy)
    bench.until(bench.materialised)
    answers.set()
    assert threading.current_thread() not in waiting


def test_a_client_error_of_the_member_is_not_lost(instance: dg.DagsterInstance) -> None:
    """It is reported by the client between two polls; retriable ones are notes."""
    bench = Bench(instance)
    bench.member._events.append(RequestFailed(BrokerError("throttled", retriable=True)))
    bench.turn(2)
    assert any("throttled" in note for note in bench.mailbox.take_notes())


def shared(instance: dg.DagsterInstance) -> tuple[Bench, RebalanceAwareConsumer]:
    bench = Bench(instance, partitions=2)
    bench.turn()
    other = bench.joined_by_another()

    def is_shared() -> bool:
        other.poll(0)
        return len(bench.engine.partitions) == 1 and bool(other.assignment())

    bench.until(is_shared)
    return bench, other


def test_a_stop_of_another_member_stays_shown(instance: dg.DagsterInstance) -> None:
    """The check is the group's.

    A member whose own partitions go on must not turn it green for all.
    """
    bench, other = shared(instance)
    owned = next(iter(bench.engine.partitions))
    elsewhere = next(iter(other.assignment()))
    bench.group.committed[elsewhere] = OffsetAndMetadata(0, "text of another application")
    bench.member_loop._report.add_news()
    bench.until(lambda: bench.member_loop._report.is_current)
    key = dg.AssetCheckKey(bench.assets.offsets, STOPPED_CHECK)
    evaluation = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[
        key
    ].evaluation
    assert evaluation is not None
    assert not evaluation.passed
    assert str(elsewhere) in str(evaluation.metadata["stopped"].value)
    assert str(owned) not in str(evaluation.metadata["stopped"].value)


@pytest.mark.parametrize("is_stopped_at_last", [True, False])
def test_what_it_has_shown_of_other_members_is_looked_at_again(
    instance: dg.DagsterInstance, *, is_stopped_at_last: bool
) -> None:
    """The owner may show newer things between this member's look and its word.

    The owner then has no more news to correct that word.
    """
    bench, other = shared(instance)
    (elsewhere,) = other.assignment()
    key = dg.AssetCheckKey(bench.assets.offsets, STOPPED_CHECK)

    def is_shown_as_stopped() -> bool:
        found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[
            key
        ].evaluation
        return found is not None and str(elsewhere) in str(found.metadata["stopped"].value)

    stored = [OffsetAndMetadata(0), OffsetAndMetadata(0, "text of another application")]
    bench.group.committed[elsewhere] = stored[not is_stopped_at_last]
    bench.member_loop._report.add_news()
    bench.until(
        lambda: (
            is_shown_as_stopped() is not is_stopped_at_last and bench.member_loop._report.is_current
        )
    )
    bench.group.committed[elsewhere] = stored[is_stopped_at_last]
    bench.until(lambda: is_shown_as_stopped() is is_stopped_at_last)


def test_what_was_said_of_a_partition_is_soon_looked_at_again_by_its_new_owner(
    instance: dg.DagsterInstance,
) -> None:
    """While the member takes the partition in, it keeps what the last owner has said of it."""
    bench, other = shared(instance)
    (elsewhere,) = other.assignment()
    said = GroupState({elsewhere: "a transaction is open"}, reported=frozenset({elsewhere}))
    bench.catalogue.show_stopped(said, {})
    bench.catalogue.reads_fail = True
    other.close()
    bench.until(lambda: elsewhere in bench.engine.partitions)
    bench.until(
        lambda: (
            elsewhere in bench.member_loop._report._kept and bench.member_loop._report.is_current
        )
    )
    shown_at = bench.group.clock()
    bench.catalogue.reads_fail = False
    bench.until(lambda: not bench.catalogue.shown_stops().partitions)
    assert bench.group.clock() - shown_at < 15
