"""Bisection: the record that raises becomes a letter, and everything else is committed."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rebalance.core.batches.engine_settings import EngineSettings, HoldBudget
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.run_snapshot import FailureCause, RunState
from dagster_rebalance.core.partitions.bisected import bisection_of
from dagster_rebalance.core.partitions.state_machine import Phase
from dagster_rebalance.core.reporting.explain import explain_partition
from dagster_rebalance.core.runs.bisection import Part, is_waiting
from dagster_rebalance.core.runs.retry import RetryBackoff
from dagster_rebalance.core.runs.stream_batch import BatchOutcome
from tests.core.streams import Stream
from tests.core.world import World, span, tp

if TYPE_CHECKING:
    from collections.abc import Collection

    from dagster_rebalance.core.model.offsets import OffsetRange
    from tests.core.world import Member

SETTINGS = EngineSettings(
    limits=BatchLimits(max_records_per_range=64),
    budget=HoldBudget(30, 5),
    max_attempts=2,
    dead_letter_topic="dead",
    bisects=True,
    lease_s=100_000,
)
CAUSE = FailureCause.RECORDS
BACKOFF = RetryBackoff(0.0, 0.0)


def raises(ranges: tuple[OffsetRange, ...], bad: Collection[int]) -> bool:
    """Whether one of the ranges has a bad record; only the first partition has any."""
    of_first = [range_ for range_ in ranges if range_.partition == 0]
    return any(range_.start <= offset < range_.until for range_ in of_first for offset in bad)


class PerBatch:
    """A group with one run per batch."""

    def __init__(
        self, records: int, settings: EngineSettings = SETTINGS, partitions: int = 1
    ) -> None:
        self.world = World(records=records, partitions=partitions)
        self.settings = settings
        self.calls: list[OffsetRange] = []
        self.member: Member = self.world.member(owns=partitions, settings=settings, backoff=BACKOFF)

    def step(self, bad: Collection[int], cause: FailureCause = CAUSE) -> None:
        """Each requested run starts and ends."""
        self.world.wait(1, self.member)
        for run_id in self.member.tick():
            if self.world.start(run_id) is None:
                self.end(run_id, bad, cause)
        self.world.wait(1, self.member)

    def end(self, run_id: str, bad: Collection[int], cause: FailureCause) -> None:
        run = self.world.dagster.runs[run_id]
        self.calls += run.ranges
        if raises(run.ranges, bad):
            self.world.dagster.move(run_id, RunState.FAILED, cause=cause)
        else:
            self.world.succeed(run_id)

    def crash(self) -> None:
        """The member crashes, and another one takes over."""
        number = len(self.member.engine.partitions)
        self.member = self.world.member(owns=number, settings=self.settings, backoff=BACKOFF)


class Streaming:
    """A group with a streaming run."""

    def __init__(
        self, records: int, settings: EngineSettings = SETTINGS, partitions: int = 1
    ) -> None:
        self.world = World(records=records, partitions=partitions)
        self.settings = settings
        self.calls: list[OffsetRange] = []
        self.runs = 1
        self.member = Stream(
            self.world, "r1", owns=range(partitions), settings=settings, backoff=BACKOFF
        )

    def step(self, bad: Collection[int], cause: FailureCause = CAUSE) -> None:
        """The next batch begins and ends."""
        batch = self.member.work.at_work
        for _ in range(20):
            batch = batch or self.member.turn()
        if batch is None:
            return
        self.calls += batch.ranges
        is_bad = raises(batch.ranges, bad)
        self.member.end(BatchOutcome.FAILED if is_bad else BatchOutcome.SUCCEEDED, cause=cause)

    def crash(self) -> None:
        """The process is killed between two batches."""
        partitions = range(len(self.member.engine.partitions))
        self.member.die()
        self.runs += 1
        self.member = Stream(
            self.world,
            f"r{self.runs}",
            owns=partitions,
            settings=self.settings,
            backoff=BACKOFF,
        )


Group = PerBatch | Streaming
FORMS = pytest.mark.parametrize("form", [PerBatch, Streaming])


def play(group: Group, bad: Collection[int], *, until: int, crashes: Collection[int] = ()) -> None:
    """Play until an offset is committed; the member crashes after some of the steps."""
    for number in range(2_000):
        if group.world.kafka.offset(0) == until and not group.member.engine.holds:
            return
        if number in crashes:
            group.crash()
        group.step(bad)
    pytest.fail(f"stands still: {group.world.kafka.stored}")


def letters(group: Group) -> set[int]:
    found = group.world.kafka.letters
    assert all(letter.is_record and len(letter.range) == 1 for letter in found)
    return {letter.range.start for letter in found}


def assert_exactly_once(group: Group, bad: Collection[int], until: int, number: int = 0) -> None:
    processed = [
        offset
        for range_, times in group.world.output.items()
        if range_.partition == number
        for _ in range(times)
        for offset in range(range_.start, range_.until)
    ]
    assert sorted(processed) == [offset for offset in range(until) if offset not in bad]


@FORMS
@pytest.mark.parametrize("bad", [0, 1, 31, 32, 41, 63])
def test_record_that_raises_becomes_letter_within_the_bound_of_calls(
    form: type[Group], bad: int
) -> None:
    group = form(64)
    play(group, {bad}, until=64)
    assert letters(group) == {bad}
    assert [letter.range.start for letter in group.world.kafka.letters] == [bad]
    assert_exactly_once(group, {bad}, 64)
    assert len(group.calls) - SETTINGS.max_attempts <= 2 * log2(64) + 1
    assert group.member.engine.partitions[tp(0)].entries == ()


@FORMS
@settings(max_examples=25, deadline=None)
@given(
    records=st.integers(1, 64),
    bad=st.sets(st.integers(0, 63), max_size=6),
    crashes=st.sets(st.integers(0, 40), max_size=4),
)
def test_records_are_processed_once_or_become_letters_through_crashes(
    form: type[Group], records: int, bad: set[int], crashes: set[int]
) -> None:
    bad = {offset for offset in bad if offset < records}
    group = form(records)
    play(group, bad, until=records, crashes=crashes)
    assert letters(group) == bad
    assert_exactly_once(group, bad, records)
    levels = ceil(log2(records)) if records > 1 else 1
    wasted = 2 * len(crashes)
    assert len(group.calls) <= SETTINGS.max_attempts + wasted + len(bad) * (2 * levels + 1)


@pytest.mark.parametrize(("form", "error"), [(PerBatch, ""), (Streaming, "it raised")])
def test_letter_has_the_error_of_a_batch_of_a_streaming_run(form: type[Group], error: str) -> None:
    """That of another run is in Dagster's events."""
    group = form(4)
    play(group, {2}, until=4)
    assert {letter.error for letter in group.world.kafka.letters} == {error}


@FORMS
def test_record_whose_attempts_shared_a_run_is_attempted_alone_first(form: type[Group]) -> None:
    group = form(1, replace(SETTINGS, max_attempts=1), partitions=2)
    play(group, {0}, until=1)
    for _ in range(3):
        group.step({0})
    assert {letter.range.topic_partition for letter in group.world.kafka.letters} == {tp(0)}
    assert group.world.kafka.offset(1) == 1
    assert_exactly_once(group, set(), 1, number=1)


@FORMS
def test_new_records_follow_the_bisected_range(form: type[Group]) -> None:
    group = form(64)
    play(group, {5, 70}, until=64)
    group.world.kafka.produce(tp(0), 64)
    play(group, {5, 70}, until=128)
    assert letters(group) == {5, 70}
    assert_exactly_once(group, {5, 70}, 128)


@FORMS
def test_other_partitions_are_processed_during_a_bisection(form: type[Group]) -> None:
    group = form(64, partitions=2)
    group.world.kafka.produce(tp(1), 64)
    while bisection_of(group.member.engine.partitions[tp(0)].entries) is None:
        group.step({7})
    play(group, {7}, until=64)
    assert group.world.kafka.offset(1) == 128
    assert_exactly_once(group, (), 128, 1)


@FORMS
def test_failure_in_the_environment_stops_the_partition_and_is_retried(form: type[Group]) -> None:
    group = form(64, replace(SETTINGS, max_attempts=3))
    for _ in range(3):
        group.step({9}, FailureCause.ENVIRONMENT)
    owned = group.member.engine.partitions[tp(0)]
    assert owned.phase is Phase.STOPPED
    assert bisection_of(owned.entries) is None
    retry = Directive(Action.RETRY, "orders:0", "op", 1.0, "mended")
    group.world.orders.append(retry)
    for _ in range(4):
        group.step({9})
    play(group, {9}, until=64)
    assert letters(group) == {9}
    assert group.member.engine.partitions[tp(0)].phase is Phase.OWNED


@FORMS
def test_failure_of_unknown_cause_is_not_bisected(form: type[Group]) -> None:
    group = form(64)
    for _ in range(2):
        group.step({9}, FailureCause.UNKNOWN)
    assert group.member.engine.partitions[tp(0)].phase is Phase.STOPPED
    assert group.world.kafka.letters == []


@FORMS
def test_part_that_fails_in_the_environment_has_all_attempts(form: type[Group]) -> None:
    group = form(64)
    for _ in range(2):
        group.step({9})
    group.step({9}, FailureCause.ENVIRONMENT)
    owned = group.member.engine.partitions[tp(0)]
    assert owned.phase is Phase.OWNED
    assert bisection_of(owned.entries) == (span(0, 0, 64), span(0, 0, 32))
    group.step({9}, FailureCause.ENVIRONMENT)
    assert group.member.engine.partitions[tp(0)].phase is Phase.STOPPED
    assert group.world.kafka.letters == []


@FORMS
def test_pause_in_a_bisection_is_obeyed_and_it_continues(form: type[Group]) -> None:
    group = form(64)
    for _ in range(3):
        group.step({9})
    group.world.orders.append(Directive(Action.PAUSE, "orders:0", "op", 1.0, "wait"))
    group.world.wait(10, group.member)
    for _ in range(2):
        group.step({9})
    number = len(group.calls)
    for _ in range(4):
        group.step({9})
    assert len(group.calls) == number
    group.world.orders.clear()
    play(group, {9}, until=64)
    assert letters(group) == {9}
    assert_exactly_once(group, {9}, 64)


def test_revoke_in_a_bisection_waits_for_the_half_at_work_only() -> None:
    group = PerBatch(64)
    for _ in range(2):
        group.step({40})
    group.world.wait(1, group.member)
    (run_id,) = group.member.tick()
    assert group.world.start(run_id) is None
    group.world.wait(1, group.member)
    group.member.feed(events.RevokeRequested((tp(0),)))
    group.world.wait(2, group.member)
    assert tp(0) in group.member.engine.held
    group.world.succeed(run_id)
    group.world.wait(2, group.member)
    assert tp(0) not in group.member.engine.partitions
    stored = decode(group.world.kafka.stored[tp(0)])
    assert stored.next_offset == 32
    assert [claim.until for claim in stored.claims] == [48, 64]
    group.member = group.world.member(owns=1, settings=SETTINGS)
    play(group, {40}, until=64)
    assert letters(group) == {40}
    assert_exactly_once(group, {40}, 64)


def test_part_of_a_bisected_range_is_a_repeat() -> None:
    group = Streaming(4)
    for _ in range(3):
        group.step({2})
    assert group.calls[-1] == span(0, 0, 2)
    group.member.turn()
    assert group.member.work.at_work is not None
    assert group.member.work.at_work.is_repeat


def test_half_at_work_of_a_lost_streaming_run_is_waited_for() -> None:
    group = Streaming(64)
    for _ in range(2):
        group.step({40})
    while group.member.work.at_work is None:
        group.member.turn()
    assert group.member.work.at_work.ranges == (span(0, 0, 32),)
    heir = Stream(group.world, "r2", settings=SETTINGS)
    group.member.feed(events.PartitionsLost((tp(0),)))
    heir.feed(events.PartitionsAssigned((tp(0),)))
    for _ in range(8):
        heir.turn()
    assert heir.work.at_work is None
    group.member.end()
    group.member = heir
    play(group, {40}, until=64)
    assert letters(group) == {40}
    assert_exactly_once(group, {40}, 64)


def test_re_execution_that_succeeds_before_the_halving_is_stored_commits_the_range() -> None:
    group = PerBatch(64)
    group.step({40})
    group.world.wait(1, group.member)
    (run_id,) = group.member.tick()
    assert group.world.start(run_id) is None
    batch_id = group.world.dagster.runs[run_id].batch_id
    group.member.unanswered.add(commands.WriteOffsets)
    group.end(run_id, {40}, CAUSE)
    group.world.wait(0.75, group.member)
    again = group.world.dagster.add(batch_id, (span(0, 0, 64),))
    group.world.succeed(again)
    group.world.wait(2, group.member)
    group.member.unanswered.clear()
    play(group, (), until=64)
    assert group.world.output == {span(0, 0, 64): 1}
    assert group.world.kafka.letters == []


def test_next_owner_stores_the_letter_after_a_crash_behind_it() -> None:
    group = PerBatch(1)
    group.member.fails.add(commands.WriteOffsets)
    group.member.fails.clear()
    group.step({0})
    group.world.wait(1, group.member)
    (run_id,) = group.member.tick()
    group.world.start(run_id)
    group.member.fails.add(commands.WriteOffsets)
    group.end(run_id, {0}, CAUSE)
    group.world.wait(2, group.member)
    assert group.world.kafka.offset(0) == 0
    group.crash()
    play(group, {0}, until=1)
    assert {letter.range for letter in group.world.kafka.letters} == {span(0, 0, 1)}


def test_obsolete_letter_of_a_record_is_named_by_its_key() -> None:
    group = PerBatch(1)
    group.member.unanswered.add(commands.StoreDeadLetter)
    for _ in range(3):
        group.step({0})
    (letter,) = {*group.world.kafka.letters}
    (entry,) = group.member.engine.partitions[tp(0)].entries
    again = group.world.dagster.add(entry.batch_id, (span(0, 0, 1),))
    group.member.feed(events.DeadLetterStored(letter), lambda: group.world.succeed(again))
    group.world.wait(2, group.member)
    notes = [one.text for one in group.member.done if isinstance(one, commands.Note)]
    assert any("the record with the key orders-0-0 in the dead-letter" in note for note in notes)


def test_operator_that_cancels_a_half_stops_the_partition() -> None:
    group = PerBatch(64)
    for _ in range(2):
        group.step({40})
    group.world.wait(1, group.member)
    (run_id,) = group.member.tick()
    group.world.start(run_id)
    group.world.dagster.move(run_id, RunState.CANCELED)
    group.world.wait(2, group.member)
    owned = group.member.engine.partitions[tp(0)]
    assert group.world.kafka.letters == []
    assert bisection_of(owned.entries) == (span(0, 0, 64), span(0, 0, 32))


def test_search_is_explained_and_noted() -> None:
    group = PerBatch(64)
    for _ in range(3):
        group.step({40})
    text = explain_partition(group.member.engine.partitions[tp(0)], group.world.now)
    assert text.startswith("orders-0: bisecting [32, 64), attempt on [32, 48); [32, 48): waits for")
    assert "[48, 64)" not in text
    while not group.world.kafka.letters:
        group.step({40})
    group.world.wait(2, group.member)
    text = explain_partition(group.member.engine.partitions[tp(0)], group.world.now)
    assert "bisecting [0, 64), attempt on [41, 42)" in text
    notes = [one.text for one in group.member.done if isinstance(one, commands.Note)]
    assert "orders-0: bisecting [0, 64), attempt on [0, 32)" in notes


def test_halving_that_waits_for_kafka_is_explained() -> None:
    group = PerBatch(64)
    group.step({40})
    group.member.unanswered.add(commands.WriteOffsets)
    group.step({40})
    text = explain_partition(group.member.engine.partitions[tp(0)], group.world.now)
    assert "2 runs failed on [0, 64); the halving of the first claim has waited" in text
    group.member.unanswered.clear()
    play(group, {40}, until=64)
    assert letters(group) == {40}


def with_refused_letter(form: type[Group]) -> tuple[Group, commands.StoreDeadLetter]:
    """A group whose only record raises, and the letter, which is refused."""
    group = form(1)
    group.member.unanswered.add(commands.StoreDeadLetter)
    for _ in range(3):
        group.step({0})
    (letter,) = {*group.world.kafka.letters}
    group.member.feed(events.DeadLetterFailed(letter, "max_dead_letters allows 2"))
    return group, letter


@FORMS
def test_letter_that_cannot_be_stored_stops_the_partition_until_it_can(form: type[Group]) -> None:
    group, _ = with_refused_letter(form)
    owned = group.member.engine.partitions[tp(0)]
    assert owned.phase is Phase.STOPPED
    assert "the record could not be recorded in the dead-letter topic dead" in owned.stop_reason
    group.member.unanswered.clear()
    group.world.wait(5, group.member)
    play(group, {0}, until=1)
    assert group.member.engine.partitions[tp(0)].phase is Phase.OWNED


def test_run_that_an_operator_re_executed_before_the_halving_does_all_parts() -> None:
    """Its start check has read the claim of the whole range."""
    group = PerBatch(64)
    group.step({40})
    group.world.wait(1, group.member)
    (run_id,) = group.member.tick()
    assert group.world.start(run_id) is None
    batch_id = group.world.dagster.runs[run_id].batch_id
    group.end(run_id, {40}, CAUSE)
    group.world.wait(1, group.member)
    again = group.world.dagster.add(batch_id, (span(0, 0, 64),))  # seen only now
    (half,) = group.member.tick()
    refusal = group.world.start(half)
    assert refusal is not None
    assert f"run {again} of the same batch has started" in refusal
    group.world.wait(2, group.member)
    assert group.member.engine.partitions[tp(0)].live_runs == {again}
    group.world.succeed(again)
    play(group, {40}, until=64)
    assert group.world.output == {span(0, 0, 64): 1}
    assert group.world.kafka.letters == []


def test_part_does_not_start_after_a_run_on_the_whole_range_succeeded() -> None:
    group = PerBatch(64)
    for _ in range(2):
        group.step({40})
    group.world.wait(1, group.member)
    (half,) = group.member.tick()
    batch_id = group.world.dagster.runs[half].batch_id.rpartition(".")[0]
    group.world.succeed(group.world.dagster.add(batch_id, (span(0, 0, 64),)))
    refusal = group.world.start(half)
    assert refusal is not None
    assert "of the same batch has succeeded" in refusal


def test_claims_have_the_state_of_the_search() -> None:
    group = PerBatch(64)
    for _ in range(3):
        group.step({40})
    claims = [claim.batch_id for claim in decode(group.world.kafka.stored[tp(0)]).claims]
    assert claims == ["b1.n0-40", "b1.s0-40"]
    assert [is_waiting(batch_id) for batch_id in claims] == [False, True]
    part = Part.parse(claims[0])
    assert part is not None
    assert part.larger(span(0, 32, 48)) == (span(0, 0, 64), span(0, 32, 64))


@FORMS
@pytest.mark.parametrize("bad", [set(), {0}], ids=["mended", "not mended"])
def test_retry_calls_the_function_before_a_refused_letter_is_stored(
    form: type[Group], bad: set[int]
) -> None:
    group, letter = with_refused_letter(form)
    before = len(group.calls)
    group.world.orders.append(Directive(Action.RETRY, "orders:0", "op", 1.0, "mended"))
    group.world.wait(5, group.member)
    group.member.unanswered.clear()  # from now on, the topic would take the letter
    group.world.kafka.letters.clear()
    group.member.feed(events.DeadLetterStored(letter))  # it was being stored when `retry` came
    play(group, bad, until=1)
    assert len(group.calls) == before + 1
    assert letters(group) == bad
    assert_exactly_once(group, bad, 1)
    assert group.member.engine.partitions[tp(0)].phase is Phase.OWNED
