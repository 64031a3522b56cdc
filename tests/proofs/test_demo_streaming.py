"""The story of streaming runs, with records that the test stores."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from proofs.demo.checks import Check
from proofs.demo.streaming.acts import Act
from proofs.demo.streaming.board import StreamBoard
from proofs.demo.streaming.checks import check_deploy, check_recorded
from proofs.demo.streaming.figures import ActFigures, Waits, figures_of
from proofs.demo.streaming.state import Lane, Life, Snapshot, StreamingRun
from proofs.demo.streaming.work_log import Done, InHand, WorkLog
from proofs.witness.committed import longest_gap
from proofs.witness.offsets_topic import MemberAssigned, StoredOffset
from proofs.witness.output import Row, json_rows

if TYPE_CHECKING:
    from pathlib import Path


def _stored(at: float, offset: int, until: int = 0, run_id: str = "") -> StoredOffset:
    """Return a record of a member for partition 0: an offset with a claim."""
    claims = (Claim(until, str(StreamBatch(run_id, 1))),) if run_id else ()
    text = encode(StoredPartition(offset, claims)).metadata
    return StoredOffset("orders", "orders", 0, offset, at, text)


def _range(start: int, until: int, partition: int = 0) -> OffsetRange:
    return OffsetRange("orders", partition, start, until)


def _log(*records: StoredOffset | MemberAssigned) -> WorkLog:
    log = WorkLog()
    for record in records:
        log.take(record)
    return log


def test_claim_is_in_flight_until_it_is_committed() -> None:
    log = _log(_stored(1.0, 0), _stored(2.0, 0, 10, "a"))
    assert log.in_hand == {0: InHand(_range(0, 10), "a", 2.0)}
    assert not log.done
    log.take(_stored(2.5, 10, 25, "a"))
    assert log.done == [Done(_range(0, 10), 2.5, 2.0, "a")]
    assert log.in_hand == {0: InHand(_range(10, 25), "a", 2.5)}
    assert log.committed(0) == 10


def test_range_taken_over_by_another_run_is_reported_with_its_first_time() -> None:
    log = _log(_stored(1.0, 0, 10, "a"), _stored(7.0, 0, 10, "a"), _stored(8.0, 0, 10, "b"))
    assert log.again == [InHand(_range(0, 10), "a", 1.0)]
    log.take(_stored(8.5, 10))
    assert log.done == [Done(_range(0, 10), 8.5, 1.0, "b")]
    assert not log.in_hand


def test_work_log_has_the_owner_of_each_partition() -> None:
    log = _log(MemberAssigned("orders", "member", frozenset({0}), 1.0), _stored(1.0, 0))
    assert log.owners.of(0) == "member"


COMMITS = [
    Done(_range(0, 10), 100.2, 100.1, "a"),
    Done(_range(0, 10, partition=1), 100.3, 100.1, "a"),
    Done(_range(10, 20), 101.0, 100.9, "a"),
    Done(_range(10, 20, partition=1), 106.4, 100.9, "a"),
    Done(_range(20, 30), 107.0, 106.9, "a"),
]


@pytest.mark.parametrize(
    ("since", "until", "gap"),
    [
        pytest.param(90.0, 95.0, (10.3, 1), id="before all"),
        pytest.param(100.25, 100.28, (0.8, 0), id="quiet"),
        pytest.param(103.0, 104.0, (6.1, 1), id="within the gap"),
        pytest.param(100.0, 107.0, (6.1, 1), id="all"),
        pytest.param(106.5, 130.0, (23.6, 1), id="no later commit"),
    ],
)
def test_longest_gap_is_of_the_partition_that_waited_longest(
    since: float, until: float, gap: tuple[float, int]
) -> None:
    commits = [(one.range.partition, one.at) for one in COMMITS]
    found_s, partition = longest_gap(commits, since, until)
    assert (round(found_s, 3), partition) == gap


def test_act_counts_the_records_produced_in_it() -> None:
    produced_at = {
        0: dict.fromkeys(range(30), 100.0),
        1: {offset: 100.0 if offset < 10 else 103.0 for offset in range(20)},
    }
    found = figures_of(Act("kill", 102.0, 104.0), COMMITS, produced_at)
    assert found == ActFigures("kill", 2.0, 10, Waits(3.4, 3.4), 3.7, 1)


def test_gap_belongs_to_the_act_in_which_it_ends() -> None:
    produced_at = {0: dict.fromkeys(range(30), 100.0), 1: dict.fromkeys(range(20), 100.0)}
    acts = Act("deploy", 99.0, 101.0), Act("kill", 101.0, 108.0)
    found = [figures_of(act, COMMITS, produced_at) for act in acts]
    assert [one.longest_gap_s for one in found] == [1.3, 6.1]


def test_waits_without_records_are_zero() -> None:
    assert Waits.of([]) == Waits(0.0, 0.0)
    assert Waits.of([float(number) for number in range(101)]) == Waits(50.0, 99.0)


def test_rows_of_json_lines_have_the_range_of_their_file(tmp_path: Path) -> None:
    folder = tmp_path / "orders-3"
    folder.mkdir()
    line = '{"number": 7, "partition": 3, "offset": 12}\n'
    (folder / "10-15.jsonl").write_text(line)
    (folder / "15-20.4711").write_text(line)
    assert list(json_rows(tmp_path)) == [Row(7, 3, 12, 10, 15)]


NAME = "Dagster shows each committed offset once"


@pytest.mark.parametrize(
    ("recorded", "detail"),
    [
        ([_range(0, 10)], "partition 0, which ends at 20: ends at 10"),
        (
            [_range(0, 10), _range(5, 20)],
            "partition 0, which ends at 20: orders-0 [5, 20) does not follow",
        ),
        (
            [_range(0, 10), _range(12, 20)],
            "partition 0, which ends at 20: orders-0 [12, 20) does not follow",
        ),
    ],
    ids=["not to the end", "twice", "a hole"],
)
def test_offsets_not_shown_exactly_once_fail_the_check(
    recorded: list[OffsetRange], detail: str
) -> None:
    assert check_recorded(recorded, {0: 20}) == Check(NAME, passed=False, detail=detail)
    assert check_recorded([_range(10, 20), _range(0, 10)], {0: 20}).passed


OLD = StreamingRun(1, "11111111", "v1", Life.LEFT, dg.DagsterRunStatus.SUCCESS)


def test_run_that_did_not_leave_in_order_fails_the_check() -> None:
    assert check_deploy([OLD, OLD]).passed
    failed = replace(OLD, status=dg.DagsterRunStatus.FAILURE)
    assert check_deploy([OLD, failed]).detail == "run 1 ended as FAILURE"
    assert not check_deploy([]).passed


def test_line_has_all_data_of_the_table() -> None:
    lane = Lane(
        0, OLD, is_asked_back=False, committed=10, lag=3, per_second=5, last=None, in_hand=None
    )
    starting = replace(OLD, number=2, life=Life.STARTING)
    lanes = (lane, replace(lane, number=1, owner=None, is_asked_back=True))
    words = StreamBoard(Snapshot(lanes, (OLD, starting))).in_words()
    assert words == (
        "[dodger_blue1]run 1[/dodger_blue1] code v1: orders-0; [dim]no owner[/dim]: orders-1; "
        "10 records/s; committed 20; lag 6; held until the batch at work is committed: orders-1; "
        "[green3]run 2[/green3] starting"
    )
