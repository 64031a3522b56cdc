"""Policies of a member.

They cover runs at a deadline, runs of lost partitions, and ranges that fail too often.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.batches.engine_settings import (
    DeadlinePolicy,
    EngineSettings,
    HoldBudget,
    LossPolicy,
)
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.commands import StoreDeadLetter
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.reporting.lag import GroupState
from dagster_rebalance.orchestration.member import loop as pump_module
from dagster_rebalance.orchestration.reporting.dead_letters import MOST_ERROR_CHARACTERS
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from tests.orchestration.bench import SETTINGS, Bench
from tests.orchestration.member.story import BenchScript, evaluations
from tests.orchestration.parts import tp
from tests.story import stories

if TYPE_CHECKING:
    from collections.abc import Iterator

QUICK = replace(SETTINGS, budget=HoldBudget(6.0, 3.0))
LETTERS = replace(
    SETTINGS,
    limits=BatchLimits(max_ranges_per_run=1, max_records_per_range=10),
    max_attempts=2,
    dead_letter_topic="dead",
)
SOME = {
    "QUICK": QUICK,
    "RELEASE": replace(QUICK, on_deadline=DeadlinePolicy.RELEASE),
    "LEAVE": replace(SETTINGS, on_lost=LossPolicy.LEAVE),
    "CANCEL": replace(SETTINGS, on_lost=LossPolicy.CANCEL),
    "LETTERS": LETTERS,
    "ONE": replace(LETTERS, max_attempts=1),
    "MISSING": replace(LETTERS, dead_letter_topic="missing"),
}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def resource(**settings: Any) -> EngineSettings:  # noqa: ANN401 - settings of all kinds
    given = {"bootstrap_servers": "kafka:9092", "group_id": "etl", "topics": ["orders"], **settings}
    return KafkaConsumerResource(**given).engine_settings()


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({}, "on_deadline", DeadlinePolicy.CANCEL),
        ({"on_deadline": "release"}, "on_deadline", DeadlinePolicy.RELEASE),
        ({}, "on_lost", LossPolicy.LEAVE),
        ({"on_lost": "cancel"}, "on_lost", LossPolicy.CANCEL),
        ({}, "dead_letter_topic", None),
        ({"dead_letter_topic": "for-set-aside-records"}, "dead_letter_topic", None),
        ({"on_failure": "dead_letter", "dead_letter_topic": "dead"}, "dead_letter_topic", "dead"),
        ({"on_failure": "dead_letter", "dead_letter_topic": "dead"}, "bisects", False),
        ({"on_failure": "bisect", "dead_letter_topic": "dead"}, "dead_letter_topic", "dead"),
        (
            {"on_failure": "bisect", "dead_letter_topic": "dead", "max_dead_letters": "1%"},
            "bisects",
            True,
        ),
    ],
)
def test_policies_reach_the_engine(settings: dict[str, str], field: str, value: object) -> None:
    assert getattr(resource(**settings), field) == value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"on_failure": "dead_letter"}, "needs a dead_letter_topic"),
        ({"on_failure": "bisect"}, "on_failure='bisect' needs a dead_letter_topic"),
        (
            {"on_failure": "bisect", "dead_letter_topic": "dead", "max_attempts": 1},
            "needs max_attempts=2 or more",
        ),
        (
            {"on_failure": "dead_letter", "dead_letter_topic": "dead", "max_dead_letters": 5},
            "max_dead_letters stops a partition",
        ),
        ({"on_failure": "dead_letter", "dead_letter_topic": "orders"}, "is one of topics"),
        (
            {"on_failure": "dead_letter", "dead_letter_topic": "dead", "topics": ["^d"]},
            "matches a pattern there",
        ),
        (
            {"on_failure": "dead_letter", "dead_letter_topic": "no topic"},
            "cannot be the name of a topic",
        ),
        ({"dead_letter_topic": "__consumer_offsets"}, "is a topic of Kafka itself"),
        ({"max_dead_letters": 5}, "dead_letter_topic, which has no value: name the topic"),
    ],
)
def test_dead_letter_settings_that_cannot_work_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as problem:
        resource(**settings)
    assert "group etl" in str(problem.value)


@stories("""
## deadline_with_cancel_ends_the_run_and_waits_for_it
holding QUICK | cancelled = none | until cancelled = 1 | owner 1 = member
fail 1 | until owner 1 = other | outcomes = deadline | offset 1 = 0 | claims 1 = 1[0,10) b-2

## deadline_with_release_leaves_the_run_at_work
# The next owner adopts it by the claim.
holding RELEASE | until owner 1 = other | cancelled = none | outcomes = deadline
offset 1 = 0 | claims 1 = 1[0,10) b-2

## loss_with_leave_cancels_no_run
holding LEAVE | fence | until outcomes ~ lost | cancelled = none | offset 0 = 0 | offset 1 = 0

## loss_with_cancel_cancels_all_runs
holding CANCEL | fence | until outcomes ~ lost | cancelled = 0, 1 | offset 0 = 0 | offset 1 = 0
""")
def test_policy_of_a_hold(instance: dg.DagsterInstance, story: str) -> None:
    BenchScript(instance, SOME).play(story)


@stories("""
## refused_letter_stops_its_partition_until_it_is_stored
fail_all 2 LETTERS | until letters = 1 | letters refused | until passed = False | offset = 0
check ~ could not be recorded in the dead-letter topic dead | check ~ ACLs WRITE and DESCRIBE
until letters = 2 | letters stored | until offset = 10 | until passed = True

## letter_waits_for_the_reason_while_the_storage_is_away
fail_all 2 LETTERS | failures unreadable | until failures_read = 2 | letters = 0
failures readable | until letters = 1

## reason_of_a_letter_under_way_is_read_once
fail_all 2 LETTERS | until letters = 1 | turn 100 | failures_read = 1

## letters_that_are_answered_late_and_together_are_sent_once
fail_all 1 ONE 2 | until letters = 2 | turn 100 | letters stored | advance 5
until offset 0 = 10 | until offset 1 = 10 | letters = 2

## revoke_waits_for_no_letter
# The claim stays, and the next owner stores the letter.
fail_all 1 ONE 2 | until letters = 2 | another_joins | until owns = 0
outcomes = nothing to do | claims 1 ~ 1[0,10)
letters stored | until offset 0 = 10 | offset 1 = 0

## dead_letter_topic_that_does_not_exist_ends_the_member_before_it_joins
bench settings=MISSING
raises ConfigurationError "dead_letter_topic 'missing' does not exist.*create it" runs_to_its_end
events = none
""")
def test_dead_letters(instance: dg.DagsterInstance, story: str) -> None:
    BenchScript(instance, SOME).play(story)


def exhausted(
    instance: dg.DagsterInstance, story: str = "fail_all 2 LETTERS"
) -> tuple[Bench, list[dg.DagsterRun]]:
    script = BenchScript(instance, SOME)
    script.play(story)
    return script.bench, script.runs


def test_letter_is_stored_before_its_offset_is_committed(
    instance: dg.DagsterInstance,
) -> None:
    bench, runs = exhausted(instance)
    bench.until(lambda: bench.producer.sent)
    bench.turn(50)
    assert bench.offset() == 0, "not confirmed yet"
    bench.catalogue.show_stopped(GroupState({tp(0): "as another member has published it"}), {})
    ((topic, key, value),) = bench.producer.sent
    assert (topic, key) == ("dead", "orders-0-0-10")
    letter = json.loads(value)
    assert letter.pop("time").endswith("+00:00")
    assert letter == {
        "topic": "orders",
        "partition": 0,
        "start": 0,
        "until": 10,
        "group_id": "etl",
        "batch_id": "b-1",
        "run_ids": [run.run_id for run in runs],
        "error": "attempt 2 met a poisoned record",
    }
    bench.producer.end()
    bench.until(lambda: bench.mailbox.mail.batch_requests)
    assert bench.offset() == 10
    assert bench.materialised() == [("orders-0", 0, 10)]
    record = (
        instance.fetch_materializations(bench.assets.offsets, limit=1)
        .records[0]
        .asset_materialization
    )
    assert record is not None
    assert (
        record.description
        == f"the attempts of orders-0 [0, 10) are exhausted, the last run is {runs[-1].run_id}: "
        "its letter is in the dead-letter topic"
    )
    shown = {name: record.metadata[name].value for name in ("dead_letter", "run")}
    assert shown == {"dead_letter": True, "run": runs[-1].run_id}
    (seen,) = [event for event in bench.observed() if event["event"] == "dead_letter"]
    assert (seen["partitions"], seen["start"], seen["until"]) == (["orders-0"], 0, 10)
    bench.until(lambda: evaluations(bench)[0].passed)
    assert any("without a successful run" in note for note in bench.mailbox.take_notes())


def test_stored_letter_is_not_sent_again_by_a_second_answer(
    instance: dg.DagsterInstance,
) -> None:
    bench, _ = exhausted(instance)
    bench.until(lambda: bench.producer.sent)
    (owned,) = bench.engine.partitions.values()
    assert owned.dead_letter is not None
    bench.producer.end()
    bench.turn()
    bench.member_loop._store(owned.dead_letter.command, "why")  # the second answer
    assert len(bench.producer.sent) == 1


def test_reason_of_the_letters_of_a_batch_is_read_once(instance: dg.DagsterInstance) -> None:
    bench, _ = exhausted(instance, "fail_all 1 ONE 2 | until letters = 2 | letters stored")
    bench.until(lambda: bench.offset(0) == bench.offset(1) == 10)
    first = StoreDeadLetter(OffsetRange("orders", 0, 10, 20), 1, "b-9", ("r-9",))
    read = bench.ledger.whys
    for letter in (first, replace(first, range=OffsetRange("orders", 1, 10, 20))):
        bench.member_loop._read_failure(letter)
    assert bench.ledger.whys == read + 1
    bench.turn()
    bench.member_loop._read_failure(first)
    assert bench.ledger.whys == read + 2, "an answered request is not pending any more"


def test_error_of_a_streaming_run_is_not_read_from_dagster(instance: dg.DagsterInstance) -> None:
    bench, _ = exhausted(instance)
    bench.until(lambda: bench.producer.sent)
    (owned,) = bench.engine.partitions.values()
    assert owned.dead_letter is not None
    stored: list[str] = []
    bench.member_loop._store = lambda _, error: stored.append(error)  # type: ignore[method-assign, assignment]
    read = bench.ledger.whys
    bench.member_loop._read_failure(replace(owned.dead_letter.command, error="it raised"))
    assert (stored, bench.ledger.whys) == (["it raised"], read)


def test_member_polls_between_the_answers_to_many_letters(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump_module, "LETTERS_PER_TURN", 1)
    bench, _ = exhausted(instance, "fail_all 1 ONE 2 | until letters = 2")
    bench.producer.end()
    for taken in (1, 2):
        bench.turn()
        assert len(bench.engine.heard(events.DeadLetterStored)) == taken
    bench.until(lambda: bench.offset(0) == bench.offset(1) == 10)
    assert len(bench.producer.sent) == 2


def test_member_without_a_producer_fails(
    instance: dg.DagsterInstance,
) -> None:
    bench, _ = exhausted(instance)
    object.__setattr__(bench.member_loop.dependencies, "dead_letters", None)
    with pytest.raises(IllegalStateError, match="without a dead-letter producer"):
        bench.turn(100)


def test_error_in_a_letter_is_cut(
    instance: dg.DagsterInstance,
) -> None:
    bench, _ = exhausted(instance)
    bench.ledger.why = "é" * 100_000
    bench.until(lambda: bench.producer.sent)
    ((_, _, value),) = bench.producer.sent
    assert json.loads(value)["error"] == "é" * MOST_ERROR_CHARACTERS
