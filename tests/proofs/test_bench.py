"""`make bench`: the form of its results, and the verdict; no test asserts a speed."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Message
from deltalake import write_deltalake

from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.errors import DagsterRebalanceError
from proofs.bench import (
    arrow_streams,
    arrow_visible,
    bad_records,
    decoding,
    hold,
    idle,
    poll,
    readers,
    stream_spark,
    structured_streaming,
)
from proofs.bench.dagster_cost import bytes_entry, sqlite_bytes, ticks_entries
from proofs.bench.deploy import duplicates_entries, gap_entries, has_settled
from proofs.bench.deploy_work import BLOCKING, POLLED, Work, Written, lost_and_doubled, ranges_of
from proofs.bench.entries import Entry, Goal, Sample, write_json
from proofs.bench.hold import PAIRS, Played, entries_of
from proofs.bench.members import Hold
from proofs.bench.plot import margin, write_svg
from proofs.bench.stream_latency import latency_entries, retained_rate, revokes_in
from proofs.bench.stream_scale import (
    burst_times,
    many_entries,
    member_thread,
    partitions_entry,
    windows_of,
)
from proofs.bench.streams import BATCHES, STREAM, Committed, percentile, ranges_in
from proofs.bench.tracker import shuffled
from proofs.witness.offsets_topic import MemberAssigned, StoredOffset

if TYPE_CHECKING:
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from proofs.witness.offsets_topic import GroupRecord

FIELDS = {"name", "ours", "peer", "ratio", "unit", "runs", "goal", "met"}
AIOKAFKA = PAIRS[-1][1]


def entry(*samples: Sample, goal: Goal) -> Entry:
    """An entry of a benchmark."""
    return Entry("speed", "this against that", "speed", "records/s", goal, samples)


@pytest.mark.parametrize(
    ("goal", "ratio", "met"),
    [
        (Goal(">=", 0.98), 0.98, True),
        (Goal(">=", 0.98), 0.979, False),
        (Goal(">=", 0.98), 1.2, True),
        (Goal("<=", 3), 3.0, True),
        (Goal("<=", 3), 3.01, False),
        (Goal("<=", 3), 0.5, True),
    ],
)
def test_verdict_follows_from_ratio_and_goal(goal: Goal, ratio: float, met: bool) -> None:  # noqa: FBT001 - a column of the table
    assert entry(Sample(1.0, 1.0, ratio), goal=goal).met is met


def test_entry_has_the_median_of_its_runs() -> None:
    found = entry(
        Sample(10, 10, 1.0), Sample(1, 10, 0.1), Sample(99, 100, 0.99), goal=Goal(">=", 0.95)
    ).as_json()
    assert (found["ours"], found["peer"], found["ratio"], found["runs"], found["met"]) == (
        10,
        10,
        0.99,
        3,
        True,
    )


def test_entries_are_written_as_a_list(tmp_path: Path) -> None:
    write_json([entry(Sample(2, None, 1.0), goal=Goal("<=", 3))], tmp_path / "build" / "bench.json")
    (found,) = json.loads((tmp_path / "build" / "bench.json").read_text())
    assert found.keys() >= FIELDS
    assert (found["name"], found["peer"], found["goal"]) == ("speed", None, "<= 3")


def played(held: int) -> Played:
    """Two partitions share ten records a second before a hold of one second.

    Partition 1 is revoked; partition 0 has `held` records during the hold.
    """
    arrivals = [(number / 10, number % 2) for number in range(-100, 0)] + [
        (number / held, 0) for number in range(held)
    ]
    return Played([*arrivals, (1.0, 0)], Hold(0.0, 1.0, frozenset({0})), (-10.0, 0.0))


def test_hold_rate_counts_only_retained_partitions_during_the_hold() -> None:
    assert played(5).steady_rate == pytest.approx(5)
    assert played(4).held_rate == pytest.approx(4)
    assert played(4).ratio == pytest.approx(0.8)
    assert Played([(1.0, 0)], Hold(0.0, 1.0, frozenset({0})), (-10.0, 0.0)).ratio == 0


def test_entry_compares_package_and_peers() -> None:
    everyone = {name: played(5 if "ours" in name else 1) for pair in PAIRS for name in pair[:2]}
    for found in entries_of([everyone, everyone]):
        assert found.ours == pytest.approx(5)
        assert found.peer == pytest.approx(1)
        assert found.met


def test_peer_that_is_not_installed_is_reported_as_missing() -> None:
    here = {name: played(5) for pair in PAIRS for name in pair[:2] if name != AIOKAFKA}
    entries = entries_of([here])
    assert [found.note for found in entries if found.peer is None] == ["aiokafka is not installed"]
    assert len(entries) == len(PAIRS)


def test_tracker_marks_are_complete_and_out_of_order() -> None:
    marks = shuffled(640, seed=1)
    assert len({at for at, _ in marks}) == 64
    assert sorted(marks) == sorted(
        (at, offset) for at in {at for at, _ in marks} for offset in range(10)
    )
    offsets = [offset for at, offset in marks if at.partition == 0]
    assert offsets != sorted(offsets)
    assert marks == shuffled(640, seed=1)


def test_bench_command_measures_the_selected_cases(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "proofs",
        "bench",
        "--only",
        "tracker",
        "--runs",
        "2",
        "--marks",
        "6400",
    ]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "bench.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    time, memory = json.loads((tmp_path / "bench.json").read_text())
    assert time.keys() >= FIELDS
    assert (time["name"], time["runs"], time["goal"]) == ("tracker", 2, "<= 3")
    assert memory["unit"] == "kB"
    assert "done() against a bare dict update" in done.stdout


def test_idle_member_is_measured_at_two_sizes() -> None:
    small, large = idle.measure(runs=1, turns=10, step=lambda _text: None)
    assert "1,000" in small.case
    assert "10,000" in large.case
    assert small.unit == large.unit == "s of CPU in 1 s"
    assert 0 < small.ratio < large.ratio


@pytest.mark.broker
def test_hold_is_measured_for_package_and_peers(kafka_broker: KafkaCluster) -> None:
    entries = hold.measure(kafka_broker, runs=1, hold_s=1.0, steady_s=1.0, step=lambda _text: None)
    assert [found.case for found in entries] == [case for _, _, case in PAIRS]
    assert all(
        found.ours > 0 and found.peer is not None and found.as_json().keys() >= FIELDS
        for found in entries
    )


@pytest.mark.broker
def test_reading_is_measured_for_package_and_client(kafka_broker: KafkaCluster) -> None:
    bare, careful = poll.measure(kafka_broker, runs=2, records=20_000, step=lambda _text: None)
    assert bare.case != careful.case
    for found in (bare, careful):
        assert found.ours > 0
        assert found.peer
        assert len(found.samples) == 2 * 3


def test_decoding_is_measured_for_package_and_fastavro() -> None:
    (found,) = decoding.measure(runs=2, records=10_000, step=lambda _text: None)
    assert found.case.startswith("10,000 Avro records of 10 fields")
    assert [sample.ratio for sample in found.samples] == [
        sample.ours / (sample.peer or 0) for sample in found.samples
    ]


@pytest.mark.broker
def test_readers_are_measured_for_package_and_client(kafka_broker: KafkaCluster) -> None:
    entries = readers.measure(kafka_broker, runs=1, records=20_000, step=lambda _text: None)
    assert [found.name for found in entries] == ["poll_defaults", "iteration", "arrow", "arrow"]
    assert all(found.ours > 0 and found.peer and len(found.samples) == 3 for found in entries)


def test_cpu_of_help_is_measured() -> None:
    (found,) = readers.measure_help(runs=1, step=lambda _text: None)
    assert found.unit == "s of CPU"
    assert found.ratio > 0
    assert len(found.samples) == 5


def stored(partition: int, at: float, offset: int, *claims: tuple[int, str]) -> StoredOffset:
    """Return the records of a member for a partition."""
    text = encode(StoredPartition(offset, tuple(Claim(*claim) for claim in claims))).metadata
    return StoredOffset("group", "orders", partition, offset, at, text)


def test_latency_of_a_range_is_from_its_first_claim_to_its_commit() -> None:
    found = ranges_in(
        [
            stored(0, 1.0, 0),
            stored(0, 2.0, 0, (10, "a")),
            stored(1, 2.5, 7, (9, "a")),
            stored(0, 3.0, 0, (10, "a"), (15, "b")),
            stored(0, 5.0, 10, (15, "b")),
            stored(1, 5.5, 9),
            stored(0, 9.0, 15),
        ]
    )
    assert found == [
        Committed(0, 10, "a", 2.0, 5.0),
        Committed(1, 2, "a", 2.5, 5.5),
        Committed(0, 5, "b", 3.0, 9.0),
    ]
    assert [one.took_s for one in found] == [3.0, 3.0, 6.0]


def test_latency_of_a_claim_that_is_withdrawn_is_not_counted() -> None:
    found = ranges_in(
        [
            stored(0, 1.0, 0, (10, "a")),
            stored(0, 2.0, 0),
            stored(0, 3.0, 0, (10, "b")),
            stored(0, 4.0, 10),
        ]
    )
    assert found == [Committed(0, 10, "b", 3.0, 4.0)]


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(range(1000), 0.99) == 990
    assert percentile([1, 5], 0.99) == 5


@pytest.mark.parametrize(
    ("goal", "ratio", "factor"),
    [(Goal(">=", 100), 200, 2), (Goal("<=", 0.06), 0.03, 2), (Goal("<=", 1.3), 2.6, 0.5)],
)
def test_plot_shows_the_distance_of_a_figure_from_its_goal(
    tmp_path: Path, goal: Goal, ratio: float, factor: float
) -> None:
    found = Entry("speed", "a < b", "time", "s", goal, [Sample(1, 1, ratio)])
    assert margin(found) == pytest.approx(factor)
    write_svg([found], tmp_path / "images" / "plot.svg")
    root = ET.fromstring((tmp_path / "images" / "plot.svg").read_text())  # noqa: S314 - our own
    assert any("a < b" in (text.text or "") for text in root.iter())


def test_revoke_time_is_from_the_request_to_the_release_of_its_member() -> None:
    records: list[GroupRecord]
    every, kept, asked = frozenset(range(4)), frozenset({0, 1}), frozenset({2, 3})
    records = [
        MemberAssigned("group", "a", every, 1.0),
        MemberAssigned("group", "a", every, 2.0, asked),
        MemberAssigned("group", "b", frozenset(), 2.5),
        MemberAssigned("group", "a", every, 2.6, asked),
        StoredOffset("group", "orders", 2, 5, 2.8),
        MemberAssigned("group", "a", kept, 3.0),
        MemberAssigned("group", "b", asked, 3.5),
    ]
    assert revokes_in(records) == [(2.0, 3.0, kept)]


def test_latency_is_reported_in_percentiles_beside_per_batch_runs() -> None:
    turns = [
        [Committed(0, 1, "a", 0.0, took) for took in (0.02, 0.04, 0.3)],
        [Committed(0, 1, "a", 0.0, 0.05)],
    ]
    p50, p99, against = latency_entries("SQLite", turns, 10.0)
    assert [sample.ours for sample in p50.samples] == [0.04, 0.05]
    assert [sample.ours for sample in p99.samples] == [0.3, 0.05]
    assert [sample.ratio for sample in against.samples] == pytest.approx([250, 200])
    assert (p50.met, p99.met, against.met) == (True, True, True)


def test_retained_partitions_are_measured_between_commits_around_the_hold() -> None:
    commits = [Committed(0, 10, "a", at - 1, at) for at in (1.0, 2.0, 3.0, 4.0, 6.0, 7.0)]
    rate = retained_rate(commits, 2.5, 3.5, frozenset({0}), after_s=1.0)
    assert rate == pytest.approx(30 / 4)


def test_batches_end_with_their_last_range_and_count_after_the_first() -> None:
    commits = [
        Committed(0, 10, "a", 0.0, 1.0),
        Committed(0, 10, "b", 1.0, 3.0),
        Committed(1, 5, "a", 0.0, 2.0),
        Committed(1, 30, "c", 1.0, 7.0),
    ]
    ends = stream_spark.ends_of(commits)
    assert ends == [(2.0, 15), (3.0, 10), (7.0, 30)]
    assert stream_spark.records_per_second(ends) == 40 / 5


def test_cpu_is_counted_between_the_first_and_the_last_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s = iter([1.0, 10.0, 2.0, 11.0, 5.0, 12.0])
    monkeypatch.setattr(stream_spark, "cpu_with_children_s", lambda _pid: next(used_s))
    meter = stream_spark.Meter(1, 2)
    for records in (0, 1_000, 1_000, 2_000, 5_000):
        meter.look(records)
    assert meter.per_million == (17 - 11) / 4_000 * 1_000_000


def test_cpu_of_a_killed_process_counts_with_its_last_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s = {1: iter([1.0, 4.0]), 2: iter([0.0, 1.0, 2.0, 7.0])}

    def used(pid: int) -> float:
        for found in used_s[pid]:
            return found
        raise FileNotFoundError

    monkeypatch.setattr(stream_spark, "cpu_with_children_s", used)
    meter = stream_spark.Meter(1, 2)
    for records in (1_000, 2_000, 3_000, 6_000):
        meter.look(records)
    assert meter.per_million == (4 + 7 - 1) / 5_000 * 1_000_000


def test_lost_and_doubled_rows_are_counted_by_partition() -> None:
    rows = pa.table({"partition": [0, 0, 0, 1, 1], "offset": [0, 1, 1, 0, 3]})
    assert arrow_streams.lost_and_doubled(rows, 6) == (2, 1)


def test_two_runs_are_compared_with_structured_streaming_by_round() -> None:
    ours = [
        arrow_streams.Played(600.0, 1.0, resident_mb=300.0, after_kill_s=12.0, doubled=2),
        arrow_streams.Played(450.0, 2.0, resident_mb=510.0, after_kill_s=11.0),
    ]
    peers = [arrow_streams.Played(300.0, 4.0), arrow_streams.Played(300.0, 4.0)]
    entries = arrow_streams.entries_of("iceberg", "some records", ours, peers)
    rate, cpu, lost, doubled, resident = entries
    assert [sample.ratio for sample in rate.samples] == [2.0, 1.5]
    assert [sample.ratio for sample in cpu.samples] == [0.25, 0.5]
    assert "Iceberg" in rate.case
    assert "12.0 s" in rate.note
    assert (lost.met, doubled.met, doubled.ratio) == (True, False, 2)
    assert (resident.ratio, resident.met) == (510.0, False)


def test_bad_records_are_compared_with_none_by_round_and_all_are_counted() -> None:
    clean = bad_records.Timed(20.0, 4.0, bad_records.Wrong())
    turns = [
        (bad_records.Timed(22.0, 6.0, bad_records.Wrong(rows=3)), clean),
        (bad_records.Timed(20.0, 5.0, bad_records.Wrong(letters=1)), clean),
    ]
    faulted = bad_records.Wrong(replayed=2)
    took, counted = bad_records.entries_of("a form", "a case", Goal("<=", 1.1), turns, faulted)
    assert (took.met, took.ratio) == (True, 1.05)
    assert took.note == "CPU seconds 5.5 and 4.0"
    assert (counted.met, counted.ratio) == (False, 6)
    assert "rows 3, letters 1, after the replay 2" in counted.note


def test_bad_records_are_the_same_in_each_run_and_spread_over_the_topic() -> None:
    found = bad_records.bad_numbers(20_000)
    assert found == bad_records.bad_numbers(20_000)
    assert [number // 2_000 for number in found] == list(range(bad_records.BAD_RECORDS))


def test_lost_doubled_and_bad_rows_are_wrong() -> None:
    rows = pa.table({"partition": [0, 0, 1, 1], "offset": [0, 1, 0, 2]})
    assert bad_records.wrong_rows(rows, 5, [(1, 1)]) == 0
    assert bad_records.wrong_rows(rows, 5, [(0, 1)]) == 2, "one lost, one bad"
    assert bad_records.wrong_rows(pa.concat_tables([rows, rows]), 5, [(1, 1)]) == 4
    assert bad_records.wrong_rows(rows, 5, ()) == 1


def test_records_of_delta_lake_are_visible_once_the_reader_has_their_version(
    tmp_path: Path,
) -> None:
    for start in (0, 1, 2):
        times = pa.array([1_000_000 * (start + 1)] * 2, pa.timestamp("us", "UTC"))
        write_deltalake(tmp_path, pa.table({"timestamp": times}), mode="append")
    records = arrow_visible.visible_records(tmp_path, [(0, 1.5), (2, 3.5)])
    assert records.to_pydict() == {
        "produced": [1.0, 1.0, 2.0, 2.0, 3.0, 3.0],
        "took": [0.5, 0.5, 1.5, 1.5, 0.5, 0.5],
    }
    p50, p99 = arrow_visible.visible_entries(records, 1.0, 3.0, 2)
    assert [sample.ratio for sample in p50.samples] == [0.5, 1.5, 0.5]
    assert (p50.met, p99.met) == (False, True)
    with pytest.raises(DagsterRebalanceError, match="no record was produced"):
        arrow_visible.visible_entries(records, 1.0, 9.0, 2)


def test_streaming_run_is_compared_with_each_peer_by_round() -> None:
    found = {STREAM: [0.5, 0.4], structured_streaming.NAME: [0.4, 0.4], BATCHES: [10.0, 20.0]}
    goals = {structured_streaming.NAME: Goal("<=", 1.25), BATCHES: Goal("<=", 0.01)}
    spark, batches = stream_spark.entries_of("stream_micro_batch", "small", "s", found, goals)
    assert [sample.ratio for sample in spark.samples] == pytest.approx([1.25, 1.0])
    assert [sample.ratio for sample in batches.samples] == pytest.approx([0.05, 0.02])
    assert (spark.met, batches.met) == (True, False)


def test_lost_and_doubled_records_are_counted_individually(tmp_path: Path) -> None:
    work = Work("", "orders", str(tmp_path), batch_s=0.0)
    work.process([(0, 0, 5), (0, 3, 8)], "v1")
    work.process([(0, 3, 4), (1, 1, 2), (0, 0, 5)], "v2")
    output = work.output()
    assert [one.version for one in output if one.start == 0] == ["v2"]
    assert work.at_work() == []
    lost, doubled = {(0, 8), (0, 9), (1, 0), (1, 2)}, {(0, 3), (0, 4)}
    assert lost_and_doubled(output, [10, 3]) == (len(lost), len(doubled))


def test_polled_records_become_ranges_without_client_events() -> None:
    end = Message(
        topic="orders", partition=0, offset=9, error=KafkaError(KafkaError._PARTITION_EOF)
    )
    polled = [(0, 5), (1, 2), (0, 6), (1, 3), (1, 4)]
    messages = [Message(topic="orders", partition=number, offset=at) for number, at in polled]
    assert ranges_of([*messages, end]) == [(0, 5, 7), (1, 2, 5)]


@pytest.mark.parametrize(
    ("last", "process", "settled"), [("v2", 2, True), ("v1", 2, False), ("v2", 1, False)]
)
def test_deployed_version_has_settled_when_its_processes_do_all_new_work(
    last: str,
    process: int,
    settled: bool,  # noqa: FBT001 - a column of the table
) -> None:
    rounds = [("v1", 1), ("v2", 1), ("v2", 1), ("v2", process)]
    output = [
        Written(partition, 10 * number, 10 * number + 10, version, by)
        for partition in range(8)
        for number, (version, by) in enumerate(rounds)
    ]
    again = Written(7, 40, 50, last, process)
    assert has_settled([again, *output], "v2") is settled
    assert not has_settled(output[:-4], "v2")


def test_deploy_is_reported_with_lost_and_repeated_records() -> None:
    counted = {STREAM: [(0, 0), (0, 2), (0, 0)], POLLED: [(7, 0)] * 3, BLOCKING: [(0, 5)] * 3}
    entries = duplicates_entries(counted)
    assert [(one.ours, one.peer, one.met) for one in entries] == [
        (0, 21, True),
        (2, 0, False),
        (0, 0, True),
        (2, 15, False),
    ]


def test_longest_gap_of_all_rounds_counts() -> None:
    gaps_s = {STREAM: [3.6, 2.0], BATCHES: [30.0, 40.0], structured_streaming.NAME: [2.0, 3.0]}
    for found, peer in zip(gap_entries(gaps_s), (40.0, 3.0), strict=True):
        assert (found.ours, found.ratio, found.peer, found.met) == (3.6, 3.6, peer, False)
    assert gap_entries({**gaps_s, STREAM: [3.5]})[0].met


def test_claim_to_commit_is_reported_by_the_third_of_the_phase_in_which_it_was_claimed() -> None:
    ranges = [Committed(0, 1, "a", at, at + took) for at, took in ((9.0, 0.1), (20.0, 0.4))]
    windows = windows_of([*ranges, Committed(1, 1, "b", 39.75, 40.0)], 9.5, 30.0)
    assert [len(window) for window in windows] == [1, 1, 1]
    found = partitions_entry(100, "SQLite", 0.3, windows)
    assert [sample.ratio for sample in found.samples] == pytest.approx([0.1, 0.4, 0.25])
    assert (found.met, found.note) == (True, "3 ranges; p50 0.250 s")


def test_burst_ends_with_the_last_commit_of_its_records() -> None:
    records: list[GroupRecord] = [
        stored(0, 9.0, 0),
        MemberAssigned("group", "a", frozenset({0, 1}), 9.5),
        stored(0, 10.0, 0, (1, "a")),
        stored(0, 10.4, 1),
        stored(1, 10.7, 1),
        stored(1, 20.2, 2),
        stored(0, 20.9, 2),
    ]
    assert burst_times(records, [10.0, 20.0], 2) == pytest.approx([0.7, 0.9])


def test_assignment_of_many_partitions_is_measured_to_its_first_claim() -> None:
    every, kept = frozenset(range(4)), frozenset({0, 1})
    records: list[GroupRecord] = [
        MemberAssigned("group", "a", every, 1.0),
        stored(0, 1.5, 0),
        stored(0, 3.0, 0, (1, "a")),
        stored(0, 4.0, 1),
        MemberAssigned("group", "a", every, 5.0, frozenset({2, 3})),
        MemberAssigned("group", "a", kept, 5.5),
    ]
    begun, held = many_entries(records, 4)
    assert (begun.ratio, held.ratio) == (2.0, 0.5)
    assert "a hold of 2 of them" in held.case


def test_thread_of_the_member_is_found_among_those_of_a_run() -> None:
    threads = {"MainThread": 1, "dagster_rebalance member": 2, "member of run ab": 3}
    assert member_thread(threads) == 3


def test_ticks_are_compared_with_those_of_an_empty_asset() -> None:
    def tick(seconds: float, *runs: str) -> dict[str, Any]:
        return {"timestamp": 10.0, "endTimestamp": 10.0 + seconds, "runIds": list(runs)}

    ours = [tick(0.1), tick(1.6, "a", "b"), tick(0.2), {**tick(9), "endTimestamp": None}, tick(0.3)]
    quiet, requesting = ticks_entries("the queue", ours, [tick(0.1), tick(1.2, "c")])
    assert [quiet.ratio, quiet.peer, quiet.met] == [pytest.approx(0.2), pytest.approx(0.1), True]
    assert [requesting.ratio, requesting.peer] == [pytest.approx(1.6), pytest.approx(1.2)]
    assert quiet.note == "3 ticks, 0 runs, by Dagster's times"
    assert requesting.note == "1 ticks, 2 runs, by Dagster's times"
    assert "the queue" in requesting.case
    (alone,) = ticks_entries("the queue", [tick(1.6, "r")], [])
    assert alone.peer is None
    with pytest.raises(DagsterRebalanceError, match="no tick"):
        list(ticks_entries("the queue", [], []))


def test_bytes_of_dagster_are_those_of_pages_in_use_scaled_to_a_day(tmp_path: Path) -> None:
    def grow(rows: int) -> None:
        with closing(sqlite3.connect(tmp_path / "history" / "runs.db")) as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("CREATE TABLE IF NOT EXISTS events (body TEXT)")
            database.executemany("INSERT INTO events VALUES (?)", [("x" * 1_000,)] * rows)
            database.commit()

    (tmp_path / "history").mkdir()
    grow(1)
    before = sqlite_bytes(tmp_path)
    grow(100)
    grown = sqlite_bytes(tmp_path) - before
    assert 100_000 < grown < 200_000
    found = bytes_entry(8, 20, 100_000, 600.0)
    assert found.ratio == pytest.approx(14.4)
    assert found.met
