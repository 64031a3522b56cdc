"""The member loop with real parts, turn by turn.

The engine, the consumer and the instance are real; the group and the instance are in memory.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.batches.engine_settings import EngineSettings
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.events import LostReason, PartitionsLost
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.orchestration.member.loop import MemberLoop
from dagster_rebalance.orchestration.runs.canceller import in_thread
from dagster_rebalance.orchestration.storage.dynamic_partitions import GroupJobs, JobName
from tests.orchestration.bench import SETTINGS, Bench, Status
from tests.orchestration.member.story import BenchScript
from tests.orchestration.parts import idle_job, new_on_postgres, span, tp
from tests.story import stories

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from dagster_rebalance.core.model.offsets import LogPosition, TopicPartition
    from dagster_rebalance.kafka.consumer.consumer import PollResult
    from dagster_rebalance.testing.postgres import Postgres


PAUSE = Directive(Action.PAUSE, "*", "a person", 1.0, "it must stand")
RESUME = Directive(Action.RESUME, "*", "a person", 2.0)
PAIRS = EngineSettings(limits=BatchLimits(max_ranges_per_run=2, max_runs_in_flight=1), lease_s=1e9)
SOME = {"PAIRS": PAIRS}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@stories("""
## batch_is_claimed_requested_committed_and_recorded
bench | offers | claims = 0[0,10) b-1 # claimed before it is requested
run STARTED | until offered = none | offset = 0
succeed | until recorded = orders-0 0-10 | offset = 10 | partitions = orders-0
events ~ assigned | member_of_assigned_event = True

## offset_of_another_client_is_not_overwritten
# An operator moved the offset, or another member owns the partition.
working | produce 0 10 | stored 0 5 | mark | succeed | until failed = True
writes = 0:5 | offset = 5 # adopted, and claimed from there
offers | offered = 0[5,20)

## coordinator_that_answers_no_commits_does_not_stop_the_member
# In classic that lasts while another member holds a revoke.
working | commits unanswered | succeed | until failed = True | recorded = none
commits answered | until recorded = orders-0 0-10

## write_whose_answer_was_lost_is_not_repeated
# The claim of another member could already be stored behind it.
working | mark | loses_answer | succeed | until recorded = orders-0 0-10
writes = 0:10 | failed = False

## partition_whose_commit_failed_is_written_again_alone
bench partitions=2 settings=PAIRS | offers | run STARTED | until offered = none
mark | fails_commit 1 | succeed | until recorded = orders-0 0-10, orders-1 0-10
writes = 0:10 1:10, 1:10 | notes ~ the offset of orders-1 could not be written yet

## retriable_error_is_noted
bench | poll_fails "the broker is away" "" retriable
read_fails 3 "the coordinator moved" retriable | offers
notes ~ the broker is away | noted "the coordinator moved" = 3

## retriable_error_of_the_client_between_two_polls_is_noted
bench | client_reports throttled retriable | turn 2 | notes ~ throttled

## permanent_error_of_the_client_ends_the_member
bench | turn | client_reports "wrong password" | raises BrokerError "wrong password" turn

## refused_request_ends_the_member
bench | read_fails 1 "not authorised" | raises BrokerError "not authorised" turn 2

## silent_leader_delays_no_other_partition
bench partitions=3 | silence 1 | until offered = 0[0,10), 2[0,10)
silence 2 | until offered = 0[0,10), 1[0,10), 2[0,10) | notes ~ failed for orders-1

## silent_leader_is_not_asked_at_each_read
# Each request costs the other partitions a second and a half.
bench partitions=2 | offers | silence 1 | turn 40 | noted "failed for orders-1" = 1

## leader_that_answers_again_is_read_soon
bench partitions=2 | silence 1 | offers | turn 20 | silence | mark | offers 2 | took 0 3 = True

## commit_that_the_storage_refuses_is_recorded_once_later
bench | catalogue commits 3 | offers | run SUCCESS | until recorded = orders-0 0-10
turn 30 | recorded = orders-0 0-10
noted "recording commits in Dagster failed and is retried: database is locked" = 3

## slow_command_is_noted_without_the_name_of_its_class
bench | slow_commits 9.9 | offers | until writes !~ none
notes ~ writing offsets to Kafka took 9.9 s | command_names_in_notes = False

## group_state_that_cannot_be_shown_stops_no_partition
bench | catalogue unshown | offers
notes ~ reporting the state of the group to Dagster failed: database is locked

## member_abandoned_within_a_turn_executes_no_command
bench | abandoned yes | until owns = 0 | turn 20 | writes = none
abandoned no | offers | writes !~ none

## dead_run_is_ended_and_its_batch_requested_again
working | until offered = 0[0,10) | status = FAILURE | attempts = 2
notes ~ makes sure that run run0 has really ended
""")
def test_loop(instance: dg.DagsterInstance, story: str) -> None:
    BenchScript(instance, SOME).play(story)


@stories("""
## events_of_one_poll_reach_the_engine_in_their_order
# In the other order the engine would go on without a look-up.
bench | turn | lose 0 | assign 0 | turn | owns = 0
heard PartitionsAssigned PartitionsLost = \
PartitionsAssigned 0, PartitionsLost 0 SESSION, PartitionsAssigned 0

## hold_that_is_superseded_is_reported_as_superseded
holding | supersede | until heard PartitionsLost = PartitionsLost 0 1 SUPERSEDED
outcomes = superseded

## hold_of_a_fenced_member_loses_all_partitions
holding | fence | until heard PartitionsLost = PartitionsLost 0 1 FENCED

## revoke_is_delayed_until_its_run_is_committed
holding | held = 1 | turn 20 | owner 1 = member | heard RevokeRequested = RevokeRequested 1
succeed 1 | until owner 1 = other | offset 1 = 10 | offset 0 = 0 | outcomes = drained
heard RevokeRequested = RevokeRequested 1

## revoke_without_work_is_released_by_the_next_poll
bench partitions=2 records=0 | until phase 0 = OWNED | until phase 1 = OWNED
another_joins | mark | until owns = 0 | turn | assignment = 0 | took 0 0.5 = True

## queued_run_of_a_held_partition_is_cancelled
bench partitions=2 | offers 2 | run QUEUED 0 1 | until offered = none
cancels_are_noted | another_joins | until cancelled = 1 unstarted

## standstill_releases_no_held_partition
# A poll releases the partitions that were not delayed since the last one.
working SETTINGS 2 | another_joins | advance 20 | turn | until held = 1
advance 20 | turn 3 | owner 1 = member

## partition_that_is_lost_assigned_and_revoked_in_one_turn_is_drained
# The request is a new one, and not the hold that was lost.
holding | lose 1 | assign 1 | revoke 1 | turn | held = 1
heard RevokeRequested = RevokeRequested 1, RevokeRequested 1
turn 20 | assignment = 0 1

## held_partition_that_the_consumer_gives_up_is_lost
# Otherwise its next assignment would end the member.
holding | never_delays | turn 2 | owns = 0 | outcomes = lost
""")
def test_loop_in_a_rebalance(instance: dg.DagsterInstance, story: str) -> None:
    BenchScript(instance).play(story)


HAND_OVER = """
bench | joined | offers | run STARTED | turn 20 | joined process-2 | until has_left = True
outcomes = handed over | offset = 0
successor | until live = True | offered = none
succeed | until recorded = orders-0 0-10 | offset = 10
"""


@stories(f"""
## sensor_that_does_not_tick_leaves_after_its_lease
bench records=0 | without_ticks | mark | runs_to_its_end
events = joined, assigned, hold, left | event hold cause = leave
event left reason ~ has not ticked for 40 s | took 40 42 = True

## leave_waits_for_the_run_at_work
bench | offers | run STARTED | leave "its process ends" 30 | turn 50
has_left = False | offered = none
succeed | until has_left = True | offset = 10 | recorded = orders-0 0-10

## newer_process_of_the_code_location_replaces_the_member
# After a reload the lease alone would take a minute.
bench records=0 | joined | turn 3 | joined process-2 | mark | until left ~ process-2
took 0 10 = True

## run_at_work_is_handed_over_to_the_successor
{HAND_OVER}

## member_that_drains_for_a_deploy_hands_over_when_its_successor_joins
bench | joined | offers | run STARTED | leave "its process ends" 40 | turn 20 | has_left = False
joined process-2 | mark | until has_left = True | took 0 5 = True

## pattern_that_matches_no_topic_yet_is_no_error
bench topic=^later records=0 | without_ticks | runs_to_its_end
event left reason ~ has not ticked for 40 s

## topic_that_does_not_exist_ends_the_member_before_it_joins
bench topic=missing | raises BrokerError "missing does not exist" runs_to_its_end | events = none

## member_joins_for_the_topics_that_it_may_read
bench others=dead | forbid dead | abandoned yes | runs_to_its_end | notes ~ ACL READ
bench others=dead | forbid dead orders | raises BrokerError "ACL READ" runs_to_its_end
""")
def test_loop_joins_and_leaves(instance: dg.DagsterInstance, story: str) -> None:
    BenchScript(instance).play(story)


@pytest.mark.postgres
def test_run_at_work_is_handed_over_on_postgres(postgres: Postgres) -> None:
    with new_on_postgres(postgres) as instance:
        BenchScript(instance).play(HAND_OVER)


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


def test_idle_member_calls_the_storage_less_than_once_a_second(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members share a database, and on Dagster+ each call is a request."""
    bench = Bench(instance, partitions=100, records=0)
    bench.turn(50)
    calls = counted_calls(instance, monkeypatch)
    began_at = bench.group.clock()
    bench.turn(240)
    waited_s = bench.group.clock() - began_at
    assert waited_s == pytest.approx(60, abs=1)
    assert 0 < calls.total() < waited_s, calls


def test_live_runs_and_a_hold_cost_a_bounded_number_of_calls(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_answers_of_the_storage_are_applied_in_their_order(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an earlier directive would undo a later one."""
    bench = Bench(instance)
    bench.turn(20)
    answers, apply = bench.member_loop._storage._answers, bench.engine.apply

    def given(*orders: Directive) -> Callable[[], events.Event]:
        return lambda: events.DirectivesRead(orders, 0)

    def handled(event: events.Event, now: float) -> tuple[commands.Command, ...]:
        """Return a slow command for the first answer; a newer answer arrives during it."""
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


def test_endless_answers_of_the_storage_do_not_prevent_polls(
    instance: dg.DagsterInstance,
) -> None:
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


def test_reads_of_log_ends_that_take_longer_than_their_interval_do_not_prevent_polls(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(instance)
    log_ends, reads = bench.group.log_ends, list[int]()

    def slow(
        partitions: Collection[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, LogPosition]:
        assert len(reads) < 1_000, "the turn does not end"
        reads.append(1)
        bench.group.clock.advance(1.1)
        return log_ends(partitions, timeout_s)

    monkeypatch.setattr(bench.group, "log_ends", slow)
    for turns in range(1, 4):
        bench.turn()
        assert turns <= len(reads) <= 10 * turns


def test_member_polls_between_the_reads_of_the_offsets_of_many_partitions(
    instance: dg.DagsterInstance,
) -> None:
    bench = Bench(instance, partitions=1_100)
    for reads in (1, 2, 3):
        bench.turn()
        assert len(bench.engine.heard(events.StoredOffsetsRead)) == reads
    bench.turn()
    assert bench.engine.has_settled


@pytest.mark.parametrize(
    ("woken", "asked_s"),
    [
        pytest.param(0, [0.1, 2.0], id="undisturbed"),
        pytest.param(2, [0.1, 2.0, 1.5, 1.0], id="woken"),
    ],
)
def test_member_polls_for_its_loss_after_a_suspension(
    instance: dg.DagsterInstance, woken: int, asked_s: list[float]
) -> None:
    """Otherwise it takes the commit of its successor for its own. Wake-ups end polls early."""
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


def test_suspended_machine_is_a_standstill(
    instance: dg.DagsterInstance,
) -> None:
    """Linux's monotonic clock does not count while a laptop sleeps."""
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


class SlowStorage:
    """Storage worker that runs each job at once, until a commit has to be recorded."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.bench = Bench(instance, start=self.start)

    def start(self, _name: str, work: Callable[[], None]) -> None:
        owned = self.bench.engine.partitions.get(tp(0))
        if owned is None or not owned.unrecorded:
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


def test_commit_of_a_lost_partition_is_left_to_its_next_owner(
    instance: dg.DagsterInstance,
) -> None:
    storage = SlowStorage(instance)
    bench = storage.until_it_waits()
    bench.member.deliver(PartitionsLost((tp(0),), LostReason.SESSION))
    bench.turn()
    storage.answer()
    assert bench.materialised() == []


def test_member_that_has_left_records_no_commit(instance: dg.DagsterInstance) -> None:
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


def test_slow_end_of_a_run_delays_no_other_partition(instance: dg.DagsterInstance) -> None:
    """A suspended code server does not answer Dagster for a minute."""
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
        answers.wait(120)

    bench.member_loop.dependencies.runs.end_dead = hangs  # type: ignore[method-assign,assignment]
    bench.until(lambda: waiting, turns=1000)
    bench.succeed(healthy)
    bench.until(bench.materialised)
    answers.set()
    assert threading.current_thread() not in waiting


@stories("""
## stop_of_another_members_partition_stays_shown
bench partitions=2 | share | stored 1 0 foreign | news | until current = True
passed = False | check stopped ~ orders-1 | check stopped !~ orders-0

## partition_of_another_member_that_stops_later_is_shown
# The owner may show newer things between the read and the report of this member.
bench partitions=2 | share | stored 1 0 | news | until evaluations !~ 0 | until current = True
check stopped !~ orders-1 | stored 1 0 foreign | until check stopped ~ orders-1

## partition_of_another_member_that_goes_on_later_is_shown
bench partitions=2 | share | stored 1 0 foreign | news | until check stopped ~ orders-1
until current = True | stored 1 0 | until check stopped !~ orders-1

## shown_stop_of_a_partition_is_soon_read_again_by_its_new_owner
bench partitions=2 | share | show 1 "a transaction is open" reported | catalogue unreadable
other_leaves | until owns = 0 1 | until kept = 1 | until current = True
mark | catalogue readable | until shown = 0 | took 0 15 = True
""")
def test_report_of_a_shared_group(instance: dg.DagsterInstance, story: str) -> None:
    BenchScript(instance).play(story)


@pytest.mark.parametrize("tenths", range(13))
def test_commit_of_a_partition_that_is_released_at_its_deadline_is_not_recorded_later(
    instance: dg.DagsterInstance, tenths: int
) -> None:
    """The next owner records it, even if the same decision repeats the record and releases."""
    waiting: list[Callable[[], None]] = []

    def start(_name: str, work: Callable[[], None]) -> None:
        owned = bench.engine.partitions.get(tp(1))
        if waiting or (owned is not None and owned.unrecorded):
            waiting.append(work)  # Dagster's storage does not answer any more
        else:
            work()

    bench = Bench(instance, partitions=2, start=start)
    bench.batch_requests(2)
    runs = [bench.run(Status.STARTED, number) for number in (0, 1)]
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    bench.only_note_cancels()
    bench.joined_by_another()
    bench.until(lambda: bench.engine.holds)
    bench.group.clock.advance(0.03 + tenths / 10)
    (held,) = bench.engine.held
    for run in runs:
        bench.succeed(run)
    bench.until(lambda: waiting)
    assert bench.engine.partitions[held].unrecorded
    bench.until(lambda: held not in bench.engine.partitions)
    bench.turn(3)
    assert span(held.partition, 0, 10) not in bench.member_loop._records._waiting
