"""The play of bad records reports each wrong letter."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import dagster as dg
import pytest
from confluent_kafka import Producer, TopicPartition

from dagster_rebalance.core.model.letters import (
    Letter,
    LetterFold,
    LetterKind,
    LetterState,
    Malformed,
    Place,
    StateChange,
)
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.orchestration.storage.dynamic_partitions import RerunStore
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import RERUN_TAG
from proofs.chaos.bad import (
    BAD,
    EVERY,
    FIRST,
    STAYS_BAD,
    Bad,
    is_bad,
    stays_bad,
    why_bad,
)
from proofs.chaos.exchange import GROUP, LETTERS, TOPIC
from proofs.chaos.letters import Letters, expected, wrong_letters, wrong_states
from proofs.witness.output import Row
from tests.kafka.readers import commit_by_hand

if TYPE_CHECKING:
    from dagster_rebalance.testing.broker import KafkaCluster

MENDED, LASTING = FIRST, FIRST + EVERY
PRODUCED: dict[int, tuple[int, int | None]] = {0: (0, 0), MENDED: (0, 50), LASTING: (1, 300)}


def _letter(number: int, partition: int, offset: int) -> Letter:
    range_ = OffsetRange("numbers", partition, offset, offset + 1)
    reason = STAYS_BAD if stays_bad(number) else BAD
    value = json.dumps({"number": number}).encode()
    return Letter(range_, f"ValueError: {reason}", value, group_id=GROUP)


OF_MENDED, OF_LASTING = _letter(MENDED, 0, 50), _letter(LASTING, 1, 300)


def test_bad_records_are_few_and_half_of_them_are_mended() -> None:
    bad = [number for number in range(8 * EVERY) if is_bad(number)]
    assert len(bad) == 8
    lasting = [number for number in bad if why_bad(number, is_mended=True)]
    assert lasting == bad[1::2]
    assert [why_bad(number, is_mended=False) for number in (0, *bad[:2])] == [None, BAD, STAYS_BAD]


def test_output_must_have_all_records_but_those_that_stay_bad() -> None:
    assert list(expected(PRODUCED)) == [0, MENDED]


def test_one_letter_for_each_bad_record_is_right() -> None:
    assert not [*wrong_letters(PRODUCED, [OF_MENDED, OF_LASTING])]


@pytest.mark.parametrize(
    ("letters", "problem"),
    [
        pytest.param([OF_MENDED], f"bad record {LASTING} has no letter", id="missing"),
        pytest.param(
            [OF_MENDED, OF_LASTING, OF_LASTING],
            f"bad record {LASTING} has more than one letter",
            id="doubled",
        ),
        pytest.param([OF_MENDED, OF_LASTING, _letter(0, 0, 0)], "not bad", id="good record"),
        pytest.param([_letter(MENDED, 0, 51), OF_LASTING], "another place", id="other place"),
        pytest.param([replace(OF_MENDED, group_id="b"), OF_LASTING], "of b", id="other group"),
        pytest.param([replace(OF_MENDED, reason="?"), OF_LASTING], "wrong", id="other reason"),
        pytest.param(
            [replace(OF_MENDED, kind=LetterKind.RANGE), OF_LASTING], "wrong", id="of a range"
        ),
    ],
)
def test_wrong_letter_is_reported(letters: list[Letter], problem: str) -> None:
    (*_, found) = wrong_letters(PRODUCED, letters)
    assert problem in found


def _fold(*states: tuple[Letter, LetterState]) -> LetterFold:
    fold = LetterFold()
    for number, (letter, state) in enumerate(states):
        fold.add(Place(0, 2 * number), letter)
        if state is not LetterState.OPEN:
            fold.add(Place(0, 2 * number + 1), StateChange(letter.key, state, "ada", "mended", 1))
    return fold


@pytest.mark.parametrize(
    ("letter", "state", "is_right"),
    [
        (OF_MENDED, LetterState.REPLAYED, True),
        (OF_MENDED, LetterState.OPEN, False),
        (OF_MENDED, LetterState.DISCARDED, False),
        (OF_LASTING, LetterState.DISCARDED, True),
        (OF_LASTING, LetterState.REPLAYED, False),
        (OF_LASTING, LetterState.OPEN, False),
    ],
)
def test_state_of_a_letter_is_what_became_of_its_record(
    letter: Letter, state: LetterState, *, is_right: bool
) -> None:
    assert (not [*wrong_states(_fold((letter, state)))]) is is_right


def test_records_that_are_no_letters_are_reported() -> None:
    fold = _fold((OF_MENDED, LetterState.REPLAYED))
    fold.add(
        Place(0, 7),
        StateChange(
            OF_MENDED.range.key, LetterState.REPLAYED, "ada", "mended", 1, kind=LetterKind.RANGE
        ),
    )
    assert not [*wrong_states(fold)], "a replay marks the letter of the range, too"
    fold.add(Place(0, 8), Malformed("it is text"))
    assert len([*wrong_states(fold)]) == 1


@pytest.mark.broker
def test_failed_replay_is_repeated_until_all_mended_records_are_replayed(
    kafka_broker: KafkaCluster,
) -> None:
    """The sensor of a group, which starts the runs and marks the letters, is played here."""
    kafka_broker.create_topic(TOPIC, 2)
    kafka_broker.create_topic(LETTERS)
    client = kafka_broker.client_config()
    producer = Producer({**client, "log_level": 0})
    for letter in (OF_MENDED, OF_LASTING):
        producer.produce(TOPIC, letter.value, partition=letter.range.partition)
        at = replace(letter, range=replace(letter.range, start=0, until=1))
        producer.produce(LETTERS, at.value, at.key, headers=[*at.record.headers])
    assert producer.flush(120) == 0
    offsets = [TopicPartition(TOPIC, number, 1) for number in (0, 1)]
    commit_by_hand({**client, "group.id": GROUP}, *offsets)
    produced: dict[int, tuple[int, int | None]] = {MENDED: (0, 0), LASTING: (1, 0)}

    with dg.DagsterInstance.ephemeral() as instance:
        assets = GroupAssets.of(GROUP)
        instance.add_dynamic_partitions(assets.partitions_name, [f"{TOPIC}-0", f"{TOPIC}-1"])
        store = RerunStore(instance, assets.reruns_name)
        letters = Letters(instance, kafka_broker.bootstrap_servers, Bad.BISECT)
        letters.check(produced, [])
        assert letters.problems == []
        letters.check(produced, [Row(MENDED, 0, 0, 0, 1)])
        assert ["before the replay" in one for one in letters.problems] == [True]

        assert not letters.replay()
        (failed,) = store.read()
        assert [str(one.topic_partition) for one in failed.ranges] == [f"{TOPIC}-0"], "mended"
        assert not letters.replay(), "it has not ended"
        assert store.read() == (failed,)
        run = dg.DagsterRun(
            "job", status=dg.DagsterRunStatus.FAILURE, tags={RERUN_TAG: failed.rerun.rerun_id}
        )
        instance.add_run(run)
        assert not letters.replay(), "cancels the failed one"
        assert store.read() == ()
        assert not letters.replay(), "begins another one"
        (again,) = store.read()
        assert again.ranges == failed.ranges
        assert again.rerun.rerun_id != failed.rerun.rerun_id

        store.remove([again])
        topic = DeadLetterTopic(letters.kafka, LETTERS)
        topic.change([StateChange(f"{TOPIC}-0-0", LetterState.REPLAYED, "ada", "mended", 1)])
        assert letters.replay()
        letters.discard()
        letters.discard()
        stored, fold = letters.read()
        assert not [*wrong_letters(produced, stored), *wrong_states(fold)]
