"""What the words of the settings do.

They decide about runs at a deadline, runs of lost partitions, and ranges that fail too often.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from confluent_kafka import KafkaError

from dagster_rebalance.core.batches.engine_settings import (
    DeadlinePolicy,
    EngineSettings,
    HoldBudget,
    LossPolicy,
)
from dagster_rebalance.core.batches.planning import BatchLimits
from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.core.reporting.lag import GroupState
from dagster_rebalance.orchestration.member import loop as pump_module
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.reporting.dead_letters import MOST_ERROR_CHARACTERS
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from tests.orchestration.bench import SETTINGS, Bench, Status
from tests.orchestration.parts import tp

if TYPE_CHECKING:
    from collections.abc import Iterator

QUICK = replace(SETTINGS, budget=HoldBudget(6.0, 3.0))
LETTERS = replace(
    SETTINGS, limits=BatchLimits(max_records_per_range=10), max_attempts=2, dead_letter_topic="dead"
)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def resource(**settings: Any) -> EngineSettings:  # noqa: ANN401 - settings of all kinds
    given = {"bootstrap_servers": "kafka:9092", "group_id": "etl", "topics": ["orders"], **settings}
    return KafkaConsumerResource(**given).engine_settings()


def held(
    instance: dg.DagsterInstance, settings: EngineSettings
) -> tuple[Bench, list[dg.DagsterRun], list[tuple[str, bool]]]:
    """A member with a run at work on each of two partitions, asked for one of them.

    And the runs that it asks to be cancelled, with `only_unstarted`.
    """
    bench = Bench(instance, partitions=2, settings=settings)
    bench.batch_requests(2)
    runs = [bench.run(Status.STARTED, number) for number in (0, 1)]
    bench.until(lambda: not bench.mailbox.mail.batch_requests)
    cancelled = bench.only_note_cancels()
    bench.joined_by_another()
    bench.until(lambda: bench.engine.holds)
    return bench, runs, cancelled


def outcomes(bench: Bench) -> list[object]:
    return [event["outcome"] for event in bench.observed() if event["event"] == "hold"]


def exhausted(
    instance: dg.DagsterInstance, settings: EngineSettings = LETTERS, records: int = 20
) -> tuple[Bench, list[dg.DagsterRun]]:
    bench = Bench(instance, settings=settings, records=records)
    runs = []
    for attempt in (1, 2):
        wanted = [attempt]
        bench.until(
            lambda: [r.attempt for r in bench.mailbox.mail.batch_requests] == wanted  # noqa: B023
        )
        runs.append(bench.run(Status.STARTED))
        bench.until(lambda: not bench.mailbox.mail.batch_requests)
        bench.fail(runs[-1], f"attempt {attempt} met a poisoned record")
    return bench, runs


def two_exhausted(instance: dg.DagsterInstance) -> Bench:
    """A member with two partitions, whose first ranges have failed for good.

    Their letters are under way.
    """
    bench = Bench(
        instance, partitions=2, settings=replace(LETTERS, limits=SETTINGS.limits, max_attempts=1)
    )
    bench.batch_requests(2)
    for number in (0, 1):
        bench.fail(bench.run(Status.STARTED, number))
    bench.until(lambda: len(bench.producer.sent) == 2)
    return bench


def check_state(bench: Bench) -> tuple[bool, str]:
    key = dg.AssetCheckKey(bench.assets.offsets, STOPPED_CHECK)
    evaluation = bench.instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[
        key
    ].evaluation
    assert evaluation is not None
    return evaluation.passed, str(evaluation.description)


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({}, "on_deadline", DeadlinePolicy.CANCEL),
        ({"on_deadline": "release"}, "on_deadline", DeadlinePolicy.RELEASE),
        ({}, "on_lost", LossPolicy.LEAVE),
        ({"on_lost": "cancel"}, "on_lost", LossPolicy.CANCEL),
        ({}, "dead_letter_topic", None),
        ({"on_failure": "dead_letter", "dead_letter_topic": "dead"}, "dead_letter_topic", "dead"),
    ],
)
def test_the_words_of_the_settings_reach_the_core(
    settings: dict[str, str], field: str, value: object
) -> None:
    """A policy that is not passed on shows only when it is needed."""
    assert getattr(resource(**settings), field) == value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"on_failure": "dead_letter"}, "needs a dead_letter_topic"),
        ({"dead_letter_topic": "dead"}, "has no effect with on_failure='pause'"),
        ({"on_failure": "dead_letter", "dead_letter_topic": "orders"}, "is one of topics"),
        (
            {"on_failure": "dead_letter", "dead_letter_topic": "dead", "topics": ["^d"]},
            "matches a pattern there",
        ),
        (
            {"on_failure": "dead_letter", "dead_letter_topic": "no topic"},
            "cannot be the name of a topic",
        ),
    ],
)
def test_dead_letters_that_could_not_work_are_refused_at_the_start(
    settings: dict[str, Any], words: str
) -> None:
    """Not when the first range has failed."""
    with pytest.raises(ConfigurationError, match=words) as problem:
        resource(**settings)
    assert "group etl" in str(problem.value)


def test_at_the_deadline_runs_are_cancelled_and_waited_for(instance: dg.DagsterInstance) -> None:
    """`on_deadline="cancel"`: nothing works on the partition when its next owner gets it."""
    bench, runs, cancelled = held(instance, QUICK)
    (going,) = bench.engine.held
    assert cancelled == []
    bench.until(lambda: cancelled)
    assert set(cancelled) == {(runs[going.partition].run_id, False)}
    assert bench.group.owner(going) is bench.member, "still held: the run has not ended"
    bench.fail(runs[going.partition])
    bench.until(lambda: bench.group.owner(going) is not bench.member)
    assert outcomes(bench) == ["deadline"]
    assert bench.offset(going.partition) == 0
    assert len(decode(bench.group.committed[going]).claims) == 1


def test_at_the_deadline_partitions_are_released_with_their_runs_at_work(
    instance: dg.DagsterInstance,
) -> None:
    """`on_deadline="release"`: the next owner adopts them through the claim."""
    bench, _, cancelled = held(instance, replace(QUICK, on_deadline=DeadlinePolicy.RELEASE))
    (going,) = bench.engine.held
    bench.until(lambda: bench.group.owner(going) is not bench.member)
    assert cancelled == []
    assert outcomes(bench) == ["deadline"]
    assert bench.offset(going.partition) == 0
    assert len(decode(bench.group.committed[going]).claims) == 1


@pytest.mark.parametrize("policy", list(LossPolicy))
def test_runs_of_lost_partitions_are_left_or_cancelled(
    instance: dg.DagsterInstance, policy: LossPolicy
) -> None:
    """`on_lost`: in both cases nothing is written for them any more."""
    bench, runs, cancelled = held(instance, replace(SETTINGS, on_lost=policy))
    bench.group.fence(bench.member)
    bench.until(lambda: "lost" in outcomes(bench))
    assert set(cancelled) == (
        {(run.run_id, False) for run in runs} if policy is LossPolicy.CANCEL else set()
    )
    assert {bench.offset(0), bench.offset(1)} == {0}


def test_a_range_that_fails_too_often_is_in_the_topic_before_its_offset_is_committed(
    instance: dg.DagsterInstance,
) -> None:
    """`on_failure="dead_letter"` gives the range up, and the partition goes on.

    The record says what is exhausted and why.
    """
    bench, runs = exhausted(instance)
    bench.until(lambda: bench.producer.sent)
    bench.turn(50)
    assert bench.offset() == 0, "not confirmed yet"
    bench.catalogue.show_stopped(GroupState({tp(0): "as another member has seen it meanwhile"}), {})
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
        "the dead-letter topic has it"
    )
    shown = {name: record.metadata[name].value for name in ("dead_letter", "run")}
    assert shown == {"dead_letter": True, "run": runs[-1].run_id}
    (seen,) = [event for event in bench.observed() if event["event"] == "dead_letter"]
    assert (seen["partitions"], seen["start"], seen["until"]) == (["orders-0"], 0, 10)
    bench.until(lambda: check_state(bench)[0])
    assert any("although no run succeeded" in note for note in bench.mailbox.take_notes())


def test_a_letter_that_is_refused_stops_the_partition_until_it_is_stored(
    instance: dg.DagsterInstance,
) -> None:
    """It is shown with what to do, and tried again by itself."""
    bench, _ = exhausted(instance)
    bench.until(lambda: bench.producer.sent)
    bench.producer.end(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    bench.until(lambda: not check_state(bench)[0])
    assert "could not be recorded in the dead-letter topic dead" in check_state(bench)[1]
    assert "ACLs WRITE and DESCRIBE" in check_state(bench)[1]
    assert bench.offset() == 0
    bench.until(lambda: len(bench.producer.sent) == 2)
    bench.producer.end()
    bench.until(lambda: bench.offset() == 10)
    bench.until(lambda: check_state(bench)[0])


def test_while_storage_is_away_no_letter_is_sent_without_its_reason(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine asks again."""
    bench, _ = exhausted(instance)
    tried = []

    def away(run_id: str, _batch_id: str) -> str:
        tried.append(run_id)
        message = "database is locked"
        raise OSError(message)

    monkeypatch.setattr(bench.member_loop.dependencies.runs, "why_failed", away)
    bench.until(lambda: len(tried) == 2)
    assert bench.producer.sent == []
    monkeypatch.undo()
    bench.until(lambda: bench.producer.sent)


def test_while_a_letter_is_under_way_dagster_is_not_asked_again(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine repeats itself each second, perhaps through a long outage of Kafka."""
    bench, _ = exhausted(instance)
    asked: list[str] = []

    def why(run_id: str, _batch_id: str) -> str:
        asked.append(run_id)
        return "why"

    monkeypatch.setattr(bench.member_loop.dependencies.runs, "why_failed", why)
    bench.until(lambda: bench.producer.sent)
    bench.turn(100)
    assert len(asked) == 1


def test_a_letter_that_was_stored_while_dagster_was_asked_once_more_is_not_sent_again(
    instance: dg.DagsterInstance,
) -> None:
    """The engine asked twice because Dagster took long to say why the run failed."""
    bench, _ = exhausted(instance)
    bench.until(lambda: bench.producer.sent)
    (owned,) = bench.engine.partitions.values()
    assert owned.dead_letter is not None
    bench.producer.end()
    bench.turn()
    bench.member_loop._store(owned.dead_letter.command, "why")  # the second answer
    assert len(bench.producer.sent) == 1


def test_letters_that_are_answered_late_and_together_are_sent_once(
    instance: dg.DagsterInstance,
) -> None:
    """What is done about the first answer finds that the second letter is due again."""
    bench = two_exhausted(instance)
    bench.turn(100)
    bench.producer.end()
    bench.group.clock.advance(5)
    bench.until(lambda: bench.offset(0) == bench.offset(1) == 10)
    assert len(bench.producer.sent) == 2


def test_a_member_polls_between_the_answers_to_many_letters(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand that fail at once would keep it from Kafka for 10 s."""
    monkeypatch.setattr(pump_module, "LETTERS_PER_TURN", 1)
    bench = two_exhausted(instance)
    bench.producer.end()
    for taken in (1, 2):
        bench.turn()
        assert len(bench.engine.heard(events.DeadLetterStored)) == taken
    bench.until(lambda: bench.offset(0) == bench.offset(1) == 10)
    assert len(bench.producer.sent) == 2


def test_a_revoke_does_not_wait_for_a_letter(instance: dg.DagsterInstance) -> None:
    """The claim stays, and the next owner stores it."""
    bench = two_exhausted(instance)
    bench.joined_by_another()
    bench.until(lambda: len(bench.engine.partitions) == 1)
    assert outcomes(bench) == ["nothing to do"]
    (gone,) = {tp(0), tp(1)} - bench.engine.partitions.keys()
    assert len(decode(bench.group.committed[gone]).claims) == 1
    bench.producer.end()
    (kept,) = bench.engine.partitions
    bench.until(lambda: bench.offset(kept.partition) == 10)
    assert bench.offset(gone.partition) == 0, "its letter came too late for this owner"


def test_a_dead_letter_topic_that_does_not_exist_ends_the_member_before_it_joins(
    instance: dg.DagsterInstance,
) -> None:
    """With the words that tell what to do."""
    bench = Bench(instance, settings=replace(LETTERS, dead_letter_topic="missing"))
    with pytest.raises(
        ConfigurationError, match=r"dead_letter_topic 'missing' does not exist.*create it"
    ):
        bench.member_loop.run()
    assert bench.observed() == []


def test_a_member_without_a_producer_says_so_instead_of_going_on(
    instance: dg.DagsterInstance,
) -> None:
    """It would ask for ever."""
    bench, _ = exhausted(instance)
    object.__setattr__(bench.member_loop.dependencies, "dead_letters", None)
    with pytest.raises(IllegalStateError, match="without a producer of dead letters"):
        bench.turn(100)


def test_the_error_in_a_letter_is_that_of_the_asset_and_has_an_end(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record must fit the topic."""
    bench, _ = exhausted(instance)
    monkeypatch.setattr(bench.member_loop.dependencies.runs, "why_failed", lambda *_: "é" * 100_000)
    bench.until(lambda: bench.producer.sent)
    ((_, _, value),) = bench.producer.sent
    assert json.loads(value)["error"] == "é" * MOST_ERROR_CHARACTERS
