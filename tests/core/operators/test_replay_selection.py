"""The ranges of a replay of dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.letters import (
    Letter,
    LetterFold,
    LetterKind,
    LetterState,
    Place,
    StateChange,
)
from dagster_rebalance.core.model.offsets import Bounds
from dagster_rebalance.core.model.run_snapshot import RunSnapshot, RunState
from dagster_rebalance.core.operators.replay_selection import (
    GroupPositions,
    letters_in,
    select_letters,
)
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
from tests.core.world import span, tp

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.operators.rerun_selection import Selection

REPLAY = Rerun("abc", "ada", "the fix", 0.0, letters="dead")


def record(offset: int, partition: int = 0, group_id: str = "shop") -> Letter:
    return Letter(span(partition, offset, offset + 1), "bad", group_id=group_id)


def failed(start: int, until: int, partition: int = 0, group_id: str = "shop") -> Letter:
    return Letter(span(partition, start, until), "", kind=LetterKind.RANGE, group_id=group_id)


def chosen(*letters: Letter, **more: Any) -> Selection:  # noqa: ANN401 - facts of all kinds
    """The selection in a group that has committed 30 of 100 offsets and recorded each range."""
    group = GroupPositions(
        "shop",
        more.get("committed", {tp(0): 30}),
        {tp(0): more.get("log", Bounds(0, 100)), tp(1): Bounds(0, 100)},
        more.get("recorded", [letter.range for letter in letters]),
        more.get("left_out", ()),
        more.get("replayed", ()),
    )
    return select_letters(letters, group, more.get("runs", ()), more.get("planned", ()))


def run(batch_id: str, *ranges: OffsetRange, state: RunState = RunState.STARTED) -> RunSnapshot:
    return RunSnapshot("12345678-run", batch_id, ranges, state)


def test_letters_become_their_ranges_in_order() -> None:
    found = chosen(record(7), failed(20, 25), record(3), record(8, group_id=""))
    assert found.ranges == (span(0, 3, 4), span(0, 7, 8), span(0, 8, 9), span(0, 20, 25))
    assert (found.left_out, found.widened) == ((), ())


@pytest.mark.parametrize(
    ("letter", "more", "why"),
    [
        (record(7, group_id="other"), {}, "it is a letter of group other"),
        (record(7, 1), {}, "group shop does not read this partition"),
        (record(7), {"left_out": {record(7).id}}, "`only` of the group leaves out its record"),
        (record(7), {"committed": {tp(0): None}}, "the group has no committed offset"),
        (record(30), {}, "the group is at offset 30, so it will process"),
        (failed(29, 31), {}, "the group is at offset 30, so it will process"),
        (record(7), {"log": Bounds(0, 7)}, "Kafka's log ends at 7: it was truncated.*produce"),
        (record(40), {"log": Bounds(0, 35)}, "Kafka's log ends at 35: .*produce the record of"),
        (failed(5, 9), {"log": Bounds(0, 7)}, "other records will have its offsets: discard it"),
        (failed(5, 9), {"log": Bounds(6, 100)}, "has deleted its records .the log begins at 6."),
        (failed(5, 9), {"recorded": []}, "Dagster has no record of this dead letter of group"),
        (failed(5, 9), {"replayed": [span(0, 7, 8)]}, "rerun orders:0 --from-offset 5 --until-o"),
        (record(7), {"runs": [run("b-1", span(0, 0, 10))]}, "run 12345678 of the group may be"),
        (record(7), {"runs": [run("r.xyz.1", span(0, 0, 10))]}, "run 12345678 already includes"),
        (
            record(7),
            {"planned": [RerunBatch(REPLAY, 1, (span(0, 7, 8),))]},
            "rerun abc already includes it",
        ),
    ],
)
def test_letter_that_cannot_be_replayed_is_left_out(
    letter: Letter, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"nothing to replay: orders-.*{why}"):
        chosen(letter, **more)


def test_record_that_kafka_has_deleted_is_replayed_from_its_letter() -> None:
    assert chosen(record(7), log=Bounds(20, 100), recorded=[]).ranges == (span(0, 7, 8),)


def test_finished_runs_and_runs_on_other_offsets_exclude_nothing() -> None:
    runs = [
        run("b-1", span(0, 0, 10), state=RunState.SUCCEEDED),
        run("b-2", span(0, 10, 20), span(1, 0, 10)),
        run("r.xyz.1", span(0, 10, 20)),
        run("r.xyz.2", span(0, 15, 18)),
    ]
    planned = [RerunBatch(REPLAY, 1, (span(0, 10, 20),))]
    assert chosen(record(7), runs=runs, planned=planned).ranges == (span(0, 7, 8),)


def test_replayed_record_excludes_only_ranges_that_include_it() -> None:
    letters, replayed = [failed(5, 9), record(12)], [span(0, 12, 13), span(0, 9, 10), span(1, 7, 8)]
    assert chosen(*letters, replayed=replayed).ranges == (span(0, 5, 9), span(0, 12, 13))


def test_letter_of_a_range_includes_those_of_its_records() -> None:
    found = chosen(record(7), record(12), failed(5, 9), failed(8, 10), record(7))
    assert found.ranges == (span(0, 5, 9), span(0, 12, 13))
    assert [(one.range, one.why) for one in found.left_out] == [
        (span(0, 8, 10), f"the letter of {span(0, 5, 9)} includes it"),
        (span(0, 7, 8), f"the letter of {span(0, 5, 9)} includes it"),
        (span(0, 7, 8), f"the letter of {span(0, 5, 9)} includes it"),
    ]


def test_letters_in_ranges_are_open_and_lie_in_one_of_them() -> None:
    fold = LetterFold()
    letters = [record(5), record(9), record(7, 1), failed(5, 9), failed(8, 12), failed(6, 7)]
    for offset, letter in enumerate(letters):
        fold.add(Place(0, offset), letter)
    fold.add(Place(0, 20), StateChange(record(5).key, LetterState.DISCARDED, "ada", "no", 1))
    fold.add(Place(0, 21), StateChange(record(8).key, LetterState.DISCARDED, "ada", "no", 1))
    found = letters_in([span(0, 5, 9), span(1, 7, 8)], fold.entries.values())
    assert [entry.letter for entry in found] == [record(7, 1), failed(5, 9), failed(6, 7)]
