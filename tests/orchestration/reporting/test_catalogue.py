"""Events of a member in Dagster's catalogue, read back from a real instance."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.commands import (
    Cause,
    HoldOutcome,
    Receipt,
    RecordCommit,
    ShowHold,
)
from dagster_rebalance.core.model.commit_parts import CommitPart, CommitParts
from dagster_rebalance.core.model.events import LastRecorded
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.model.printable import Reason
from dagster_rebalance.core.reporting.lag import GroupState
from dagster_rebalance.orchestration.member.queued_records import QueuedRecords, TakenRecords
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.commit_history import commits_in, parts_in
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.newest_records import NewestRecords
from dagster_rebalance.orchestration.storage.run_tags import STREAM_TAG
from dagster_rebalance.orchestration.streaming.stream_run import StreamCatalogue
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.parts import span, tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JOINED = CommitParts.of([CommitPart(4, "run-a"), CommitPart(7, "run-b")])
COMMIT = RecordCommit(
    range=span(0),
    epoch=3,
    batch_id="b-1",
    run_id="run-1",
    lag=7,
    claim_to_commit_s=12.3456,
    drain_s=4.5678,
)
RECEIPT = Receipt(
    outcome=HoldOutcome.DEADLINE,
    cause=Cause.REVOKE,
    partitions=(tp(0), tp(1)),
    seconds=9.87654,
    committed={tp(0): 10},
    run_ids=("run-1", "run-2"),
    cancelled=("run-2",),
    handed_over=(tp(1),),
)


class Shown:
    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.assets = GroupAssets.of(unique_name("group"))
        self.catalogue = self.of("blue")

    def of(self, location: str, sensor: str = "sensor") -> Catalogue:
        return Catalogue(
            self.instance, self.assets, MemberIdentity(location, sensor, unique_name("process"))
        )

    def commits(self, limit: int = 10) -> list[dg.AssetMaterialization]:
        records = self.instance.fetch_materializations(self.assets.offsets, limit=limit).records
        return [record.asset_materialization for record in records if record.asset_materialization]

    def events(self) -> list[dict[str, Any]]:
        """The observations of the group asset without their tables and links, newest first."""
        records = self.instance.fetch_observations(self.assets.group, limit=10).records
        return [
            {
                name: value.value
                for name, value in r.asset_observation.metadata.items()
                if not isinstance(value, dg.TableMetadataValue) and not name.startswith("run ")
            }
            for r in records
            if r.asset_observation
        ]

    def table(self, name: str) -> list[dict[str, object]]:
        record = self.instance.fetch_observations(self.assets.group, limit=1).records[0]
        assert record.asset_observation is not None
        table = record.asset_observation.metadata[name]
        assert isinstance(table, dg.TableMetadataValue)
        return [dict(row.data) for row in table.records]

    def check(self) -> dg.AssetCheckEvaluation:
        key = dg.AssetCheckKey(self.assets.offsets, STOPPED_CHECK)
        record = self.instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
        assert record.evaluation is not None
        return record.evaluation


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def shown(request: pytest.FixtureRequest) -> Iterator[Shown]:
    if request.param == "postgres":
        yield Shown(request.getfixturevalue("on_postgres"))
        return
    with dg.DagsterInstance.ephemeral() as instance:
        yield Shown(instance)


def test_commit_is_a_materialization_of_its_partition(shown: Shown) -> None:
    shown.catalogue.record_commits([COMMIT])
    (commit,) = shown.commits()
    assert commit.partition == "orders-0"
    assert {name: value.value for name, value in commit.metadata.items()} == {
        "start": 0,
        "until": 10,
        "offsets": 10,
        "lag": 7,
        "run": "run-1",
        "batch": "b-1",
        "member": "blue",
        "claim_to_commit_seconds": 12.346,
        "drain_seconds": 4.568,
    }
    assert isinstance(commit.metadata["run"], dg.DagsterRunMetadataValue)


def test_commit_that_is_reported_again_is_recorded_once(shown: Shown) -> None:
    """An answer was lost, or a suspended member reports a commit of its successor."""
    shown.catalogue.record_commits([COMMIT])
    shown.of("green").record_commits([replace(COMMIT, epoch=1, is_late=True)])
    shown.of("green").record_commits([replace(COMMIT, range=span(0, 10, 20), run_id="run-2")])
    shown.catalogue.record_commits([COMMIT])
    assert [commit.metadata["until"].value for commit in shown.commits()] == [20, 10]


def test_joined_commits_are_one_materialization(shown: Shown) -> None:
    shown.catalogue.record_commits([replace(COMMIT, joined=JOINED)])
    (commit,) = shown.commits()
    assert {name: commit.metadata[name].value for name in ("start", "until", "run", "commits")} == {
        "start": 0,
        "until": 10,
        "run": "run-1",
        "commits": 3,
    }
    assert commit.description == "orders-0 [0, 10) committed in 3 commits"


def test_commit_that_a_joined_record_covers_is_not_recorded_again(shown: Shown) -> None:
    shown.catalogue.record_commits([replace(COMMIT, joined=JOINED)])
    late = replace(COMMIT, range=span(0, 0, 7), run_id="run-b", is_late=True)
    shown.catalogue.record_commits([late])
    assert len(shown.commits()) == 1
    shown.catalogue.record_commits([replace(late, run_id="another run")])
    assert len(shown.commits()) == 2


def test_joined_commits_are_recorded_without_those_already_recorded(shown: Shown) -> None:
    shown.of("green").record_commits(
        [replace(COMMIT, range=span(0, 0, 4), run_id="run-a", is_late=True)]
    )
    shown.catalogue.record_commits([replace(COMMIT, joined=JOINED)])
    bounds = [
        (commit.metadata["start"].value, commit.metadata["until"].value)
        for commit in shown.commits()
    ]
    assert bounds == [(4, 10), (0, 4)]


def counted_queries(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The reads of materializations from now on."""
    queries: list[object] = []
    real = dg.DagsterInstance.fetch_materializations

    def counted(instance: dg.DagsterInstance, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - Dagster's own
        queries.append(args)
        return real(instance, *args, **options)

    monkeypatch.setattr(dg.DagsterInstance, "fetch_materializations", counted)
    return queries


def commits_to(until: int, partitions: int) -> list[RecordCommit]:
    ranges = [OffsetRange("orders", one, until - 10, until) for one in range(partitions)]
    return [replace(COMMIT, range=range_, run_id=f"run-{until}") for range_ in ranges]


def test_commits_of_many_partitions_are_recorded_after_one_query(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown.catalogue.record_commits(commits_to(10, 4))
    queries = counted_queries(monkeypatch)
    for until in (20, 30):
        shown.catalogue.record_commits(commits_to(until, 4))
    assert len(queries) == 2
    ends = [str(commit.metadata["until"].value) for commit in shown.commits(limit=20)]
    assert sorted(ends) == [str(until) for until in (10, 20, 30) for _ in range(4)]


def test_commits_are_recorded_once_after_a_failure_among_them(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown.catalogue.record_commits(commits_to(10, 3))
    real, reports = dg.DagsterInstance.report_runless_asset_event, []

    def second_fails(instance: dg.DagsterInstance, event: dg.AssetMaterialization) -> None:
        reports.append(event)
        if len(reports) == 2:
            msg = "database is locked"
            raise OSError(msg)
        real(instance, event)

    monkeypatch.setattr(dg.DagsterInstance, "report_runless_asset_event", second_fails)
    with pytest.raises(OSError, match="locked"):
        shown.catalogue.record_commits(commits_to(20, 3))
    assert len(shown.commits()) == 4
    shown.catalogue.record_commits(commits_to(20, 3))
    shown.catalogue.record_commits(commits_to(20, 3))
    assert [commit.metadata["until"].value for commit in shown.commits()] == [20] * 3 + [10] * 3


def test_commit_behind_one_of_its_partition_is_recorded_with_it(shown: Shown) -> None:
    """In a hold, a requested record and the one that grows behind it are stored together."""
    shown.catalogue.record_commits(commits_to(10, 1))
    both = [*commits_to(20, 1), replace(COMMIT, range=span(0, 20, 25))]
    shown.catalogue.record_commits(both)
    shown.catalogue.record_commits(both)
    assert [commit.metadata["until"].value for commit in shown.commits()] == [25, 20, 10]


def test_commit_that_another_member_has_recorded_since_is_left_out(shown: Shown) -> None:
    shown.catalogue.record_commits(commits_to(10, 2))
    other = shown.of("green")
    other.record_commits([replace(COMMIT, range=span(0, 10, 20)), *commits_to(30, 1)[1:]])
    shown.instance.report_runless_asset_event(
        dg.AssetMaterialization(shown.assets.offsets, partition="orders-0")
    )
    earlier = CommitParts.of([CommitPart(20, COMMIT.run_id)])
    joined = replace(COMMIT, range=span(0, 10, 30), joined=earlier)
    shown.catalogue.record_commits([joined, commits_to(20, 2)[1]])
    assert [
        (commit.partition, commit.metadata["start"].value, commit.metadata["until"].value)
        for commit in shown.commits()
        if "until" in commit.metadata
    ] == [
        ("orders-1", 10, 20),
        ("orders-0", 20, 30),
        ("orders-0", 10, 20),
        ("orders-1", 0, 10),
        ("orders-0", 0, 10),
    ]


def during_the_first_record(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object], seconds: float
) -> None:
    """Let something happen while the next materialization is stored, and let time pass."""
    real, waiting = dg.DagsterInstance.report_runless_asset_event, [happens]

    def report(instance: dg.DagsterInstance, event: object) -> None:
        if waiting and isinstance(event, dg.AssetMaterialization):
            waiting.pop()()
            later = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + seconds)
            monkeypatch.setattr(f"{Catalogue.__module__}.time", later)
        real(instance, event)  # type: ignore[arg-type]

    monkeypatch.setattr(dg.DagsterInstance, "report_runless_asset_event", report)


def records_of(shown: Shown, until: int) -> Counter[str | None]:
    found = (one for one in shown.commits(limit=100) if one.metadata["until"].value == until)
    return Counter(one.partition for one in found)


@pytest.mark.parametrize("cached", [False, True])
def test_commits_that_the_next_owner_records_during_a_job_are_left_out(
    shown: Shown,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cached: bool,
) -> None:
    """The process was suspended while Dagster stored the first record of the job."""
    shown.catalogue.record_commits(commits_to(10, 5 if cached else 1))
    wanted = commits_to(20, 5)
    late = [replace(one, is_late=True) for one in wanted[1:]]
    during_the_first_record(monkeypatch, lambda: shown.of("green").record_commits(late), 30.0)
    assert shown.catalogue.record_commits(wanted) == tuple(wanted)
    assert records_of(shown, 20) == dict.fromkeys([str(tp(number)) for number in range(5)], 1)


def taken_of(commits: list[RecordCommit]) -> tuple[QueuedRecords, TakenRecords]:
    queue = QueuedRecords()
    queue.add(commits)
    return queue, queue.take()


def test_commits_that_are_cancelled_during_a_job_are_left_out(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member has lost a partition while another record was stored."""
    wanted = commits_to(20, 3)
    queue, taken = taken_of(wanted)
    during_the_first_record(monkeypatch, lambda: queue.cancel(wanted[1:2]), 0.0)
    recorded = shown.catalogue.record_commits(taken.commits, taken.is_wanted)
    assert recorded == (wanted[0], wanted[2])
    assert records_of(shown, 20) == {"orders-0": 1, "orders-2": 1}


def test_job_that_hangs_in_one_record_stores_that_record_and_no_other(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread stores the records, record by record, before the first one continues."""
    wanted = commits_to(20, 4)
    queue, hanging = taken_of(wanted)

    def continue_in_another_thread() -> None:
        queue.add(wanted)
        taken = queue.take()
        assert shown.catalogue.record_commits(taken.commits, taken.is_wanted) == tuple(wanted)

    during_the_first_record(monkeypatch, continue_in_another_thread, 0.0)
    assert shown.catalogue.record_commits(hanging.commits, hanging.is_wanted) == (wanted[0],)
    times = records_of(shown, 20)
    assert times.pop("orders-0") == 2  # Dagster has no conditional write
    assert times == {"orders-1": 1, "orders-2": 1, "orders-3": 1}


def test_records_of_a_busy_partition_hide_none_of_one_that_was_idle(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{NewestRecords.__module__}._RECORDS_PER_QUERY", 2)
    shown.catalogue.record_commits(commits_to(10, 2))
    for until in (20, 30, 40):
        shown.of("green").record_commits(commits_to(until, 1))
    again = [*commits_to(40, 1), commits_to(20, 2)[1]]
    shown.catalogue.record_commits(again)
    shown.catalogue.record_commits(again)
    assert [(commit.partition, commit.metadata["until"].value) for commit in shown.commits()] == [
        ("orders-1", 20),
        ("orders-0", 40),
        ("orders-0", 30),
        ("orders-0", 20),
        ("orders-1", 10),
        ("orders-0", 10),
    ]


def test_offsets_are_not_shown_as_rows(shown: Shown) -> None:
    """Transactions, compaction and filters leave offsets without records."""
    shown.catalogue.record_commits([COMMIT])
    (commit,) = shown.commits()
    assert not [name for name in commit.metadata if "row_count" in name]


def test_range_processed_again_is_recorded_again(shown: Shown) -> None:
    """An operator moved the offset back: the same bounds, but another run."""
    shown.catalogue.record_commits([COMMIT])
    shown.catalogue.record_commits([replace(COMMIT, run_id="run-2")])
    assert len(shown.commits()) == 2


def test_dead_letter_is_a_commit_and_an_event(shown: Shown) -> None:
    shown.catalogue.record_commits([replace(COMMIT, is_dead_letter=True)])
    (commit,) = shown.commits()
    assert (
        commit.description
        == "the attempts of orders-0 [0, 10) are exhausted, the last run is run-1: "
        "its letter is in the dead-letter topic"
    )
    assert commit.metadata["dead_letter"].value is True
    (event,) = shown.events()
    assert (event["event"], event["partitions"], event["until"], event["batch"]) == (
        "dead_letter",
        ["orders-0"],
        10,
        "b-1",
    )


def test_unknown_figures_of_a_commit_are_left_out(shown: Shown) -> None:
    """Zero would be a measurement."""
    shown.catalogue.record_commits(
        [replace(COMMIT, claim_to_commit_s=None, drain_s=None, is_late=True)]
    )
    metadata = shown.commits()[0].metadata
    assert not {"claim_to_commit_seconds", "drain_seconds"} & metadata.keys()
    assert metadata["recorded_late"].value is True


def test_last_recorded_commit_is_found_for_each_partition(shown: Shown) -> None:
    for commit in (
        COMMIT,
        replace(COMMIT, range=span(1, 0, 5)),
        replace(COMMIT, range=span(0, 10, 25)),
    ):
        shown.catalogue.record_commits([commit])
    assert shown.catalogue.last_recorded([tp(0), tp(1), tp(2)]) == {
        tp(0): LastRecorded(25, COMMIT.run_id),
        tp(1): LastRecorded(5, COMMIT.run_id),
    }


def test_manual_materialization_hides_no_recorded_commit(shown: Shown) -> None:
    shown.catalogue.record_commits([replace(COMMIT, range=span(1))])
    shown.instance.report_runless_asset_event(
        dg.AssetMaterialization(shown.assets.offsets, partition="orders-1")
    )
    shown.instance.report_runless_asset_event(
        dg.AssetMaterialization(shown.assets.offsets, partition="orders-0")
    )
    assert shown.catalogue.last_recorded([tp(0), tp(1)]) == {tp(1): LastRecorded(10, COMMIT.run_id)}


def test_receipt_is_an_observation_with_its_figures(shown: Shown) -> None:
    """The time is that of the hold's end: the storage may have been away since then."""
    shown.catalogue.record_receipt(RECEIPT, 1_000.0)
    (event,) = shown.events()
    assert event.pop("ended_at") == 1_000.0
    assert event.pop("incarnation")
    assert event == {
        "what": str(RECEIPT),
        "event": "hold",
        "code_location": "blue",
        "sensor": "sensor",
        "outcome": "deadline",
        "cause": "revoke",
        "partitions": ["orders-0", "orders-1"],
        "seconds": 9.877,
        "committed": {"orders-0": 10},
        "committed_partitions": 1,
        "runs": ["run-1", "run-2"],
        "cancelled": ["run-2"],
        "handed_over": ["orders-1"],
    }


def test_receipt_of_many_partitions_names_spans_and_the_first_offsets(shown: Shown) -> None:
    partitions = tuple(tp(number) for number in range(10_000))
    shown.catalogue.record_assigned(partitions, "member-7")
    committed = dict.fromkeys(partitions, 10)
    receipt = replace(RECEIPT, partitions=partitions, committed=committed, handed_over=partitions)
    shown.catalogue.record_receipt(receipt, 1_000.0)
    ended, assigned = shown.events()
    assert assigned["partitions"] == ended["partitions"] == ["orders-0..9999"]
    assert ended["handed_over"] == ["orders-0..9999"]
    assert len(ended["committed"]) == 100
    assert ended["committed_partitions"] == 10_000
    (found,) = shown.catalogue.assigned()
    assert found.partitions == frozenset(partitions)


def test_newest_event_has_tables_of_members_and_open_holds(shown: Shown) -> None:
    green = shown.of("green")
    shown.catalogue.record_joined()
    green.record_joined()
    shown.catalogue.record_assigned([tp(0), tp(1), tp(2), tp(3)], "member-7")
    shown.catalogue.record_hold(ShowHold(Cause.REVOKE, (tp(2), tp(3)), ("run-1",), 300.0))
    assert [row["owns"] for row in shown.table("members")] == ["orders-0..3", "no partitions"]
    (hold,) = shown.table("open_holds")
    assert (hold["member"], hold["holds"]) == ("blue", "orders-2, orders-3")
    assert hold["waits for"] == "run run-1"
    receipt = replace(RECEIPT, outcome=HoldOutcome.DRAINED, partitions=(tp(2), tp(3)))
    shown.catalogue.record_receipt(receipt)
    green.record_assigned([tp(2), tp(3)], "member-8")
    assert [(row["member"], row["owns"]) for row in shown.table("members")] == [
        ("blue", "orders-0, orders-1"),
        ("green", "orders-2, orders-3"),
    ]
    assert shown.table("open_holds") == []
    (ended,) = shown.table("receipts")
    assert (ended["member"], ended["outcome"], ended["receipt"]) == (
        "blue",
        "drained",
        str(receipt),
    )
    assert str(ended["ended"]).endswith(" UTC")


def test_tables_show_members_that_report_at_the_same_time(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    green, others = shown.of("green"), [lambda: shown.catalogue.record_assigned([tp(0)], "a")]
    report = type(shown.instance).report_runless_asset_event

    def report_second(instance: dg.DagsterInstance, event: Any) -> None:  # noqa: ANN401 - as Dagster's
        while others:  # after the first member has read the history
            others.pop()()
        report(instance, event)

    monkeypatch.setattr(type(shown.instance), "report_runless_asset_event", report_second)
    green.record_assigned([tp(1)], "b")
    assert [(row["member"], row["owns"]) for row in shown.table("members")] == [
        ("blue", "orders-0"),
        ("green", "orders-1"),
    ]
    corrected, *_ = shown.events()
    assert (corrected["event"], corrected["code_location"]) == ("corrected", "green")
    assert len(shown.events()) == 3
    green.record_assigned([tp(1), tp(2)], "b")
    assert len(shown.events()) == 4


def test_runs_of_holds_are_linked(shown: Shown) -> None:
    """The cells of a table cannot be links in Dagster's UI."""
    shown.catalogue.record_hold(ShowHold(Cause.LEAVE, (tp(0),), ("3f61351e-1",), 10.0))
    record = shown.instance.fetch_observations(shown.assets.group, limit=1).records[0]
    assert record.asset_observation is not None
    assert record.asset_observation.description == (
        "leave of orders-0: waiting for 1 run, at most 10 s"
    )
    assert record.asset_observation.metadata["run 3f61351e"] == dg.MetadataValue.dagster_run(
        "3f61351e-1"
    )


def test_assignments_and_departures_are_observed(shown: Shown) -> None:
    shown.catalogue.record_assigned([tp(0)], "member-7")
    shown.catalogue.record_left("its process ends")
    left, assigned = shown.events()
    assert (assigned["event"], assigned["partitions"], assigned["member_id"]) == (
        "assigned",
        ["orders-0"],
        "member-7",
    )
    assert (left["event"], left["reason"]) == ("left", "its process ends")


def test_stopped_partition_fails_the_check_with_its_reason(shown: Shown) -> None:
    why = Reason("orders-1: offsets were deleted", "Move the offset")
    failed = {tp(1): ("3f61351e-1", "b", "")}
    shown.catalogue.show_stopped(GroupState({tp(1): why}, failed=failed), {})
    check = shown.check()
    assert not check.passed
    assert check.severity is dg.AssetCheckSeverity.ERROR
    assert check.description == "orders-1: offsets were deleted"
    stopped = check.metadata["stopped"]
    assert isinstance(stopped, dg.TableMetadataValue)
    (row,) = stopped.records
    assert row.data == {
        "partition": "orders-1",
        "reason": "orders-1: offsets were deleted",
        "what_to_do": "Move the offset",
        "run": "3f61351e",
        "found_by": "a scan of the group",
    }
    assert shown.catalogue.shown_stops().reasons == {tp(1): why}
    shown.catalogue.show_stopped(GroupState(), {})
    assert shown.check().passed


def test_check_of_many_problems_describes_the_first_and_lists_the_others(shown: Shown) -> None:
    stopped: dict[TopicPartition, str] = {
        tp(n): Reason(f"orders-{n}: {'no price ' * 99}", "Fix it") for n in range(3)
    }
    paused = dict.fromkeys([tp(8), tp(9)], "paused by ada")
    shown.catalogue.show_stopped(GroupState(stopped, paused, missing=("pay",)), {})
    check = shown.check()
    assert str(check.description).endswith("; and 2 more")
    assert len(str(check.description)) < 2000
    assert "Fix it" not in str(check.description)
    paused_table, missing = check.metadata["paused"], check.metadata["missing"]
    assert isinstance(paused_table, dg.TableMetadataValue)
    assert isinstance(missing, dg.TableMetadataValue)
    assert [row.data for row in paused_table.records] == [
        {
            "partition": f"orders-{n}",
            "reason": "paused by ada",
            "what_to_do": f"dagster-rebalance resume orders:{n}",
        }
        for n in (8, 9)
    ]
    (row,) = missing.records
    assert row.data["topic"] == "pay"
    assert str(row.data["what_to_do"]).startswith("Create it")


def test_newer_process_of_the_same_sensor_is_a_successor(shown: Shown) -> None:
    shown.catalogue.record_joined()
    assert shown.catalogue.leave_request() is None
    newer = shown.of("blue")
    newer.record_joined()
    wanted = shown.catalogue.leave_request()
    assert wanted is not None
    assert wanted.has_successor
    assert newer._host.incarnation in wanted.reason
    assert newer.leave_request() is None, "an older process is none"


def test_successor_is_found_again_if_the_first_answer_was_late(shown: Shown) -> None:
    """The storage worker drops the result of a job that hung."""
    shown.catalogue.record_joined()
    shown.of("blue").record_joined()
    assert [shown.catalogue.leave_request() is None for _ in range(2)] == [False, False]


def test_late_renewal_of_the_lease_is_undone_after_a_release(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that hung may be carried out after the release."""
    lease, catalogue = shown.catalogue._lease, shown.catalogue
    renew = lease.renew

    def hung(incarnation: str) -> None:
        catalogue.release_lease()
        renew(incarnation)

    catalogue.renew_lease()
    assert lease.read() != ""
    monkeypatch.setattr(lease, "renew", hung)
    catalogue.renew_lease()
    assert lease.read() == ""


@pytest.mark.parametrize(("location", "sensor"), [("green", "sensor"), ("blue", "another")])
def test_members_of_other_locations_and_sensors_are_no_successors(
    shown: Shown, location: str, sensor: str
) -> None:
    shown.catalogue.record_joined()
    shown.of(location, sensor).record_joined()
    shown.catalogue.record_assigned([tp(0)], "m")
    assert shown.catalogue.leave_request() is None


def test_older_process_is_no_successor_of_a_member_that_could_not_record_its_join(
    shown: Shown,
) -> None:
    shown.of("blue").record_joined()
    assert shown.catalogue.leave_request() is None
    assert shown.events()[0]["incarnation"] == shown.catalogue._host.incarnation, (
        "it has joined now"
    )
    assert shown.catalogue.leave_request() is None
    shown.of("blue").record_joined()
    assert shown.catalogue.leave_request() is not None


def test_successor_is_found_among_many_other_events(shown: Shown) -> None:
    shown.catalogue.record_joined()
    for _ in range(120):
        shown.catalogue.record_left("test")
    shown.of("blue").record_joined()
    assert [shown.catalogue.leave_request() is None for _ in range(2)] == [True, False]


class CountingInstance:
    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.added: list[list[str]] = []

    def add_dynamic_partitions(self, name: str, keys: list[str]) -> None:
        self.added.append(keys)
        self.instance.add_dynamic_partitions(name, keys)

    def __getattr__(self, name: str) -> object:
        return getattr(self.instance, name)


def test_partitions_are_added_once(shown: Shown) -> None:
    """Each addition is a query for each key, and partitions return with each rebalance."""
    counting = CountingInstance(shown.instance)
    catalogue = Catalogue(counting, shown.assets, MemberIdentity("blue", "sensor", "p"))  # type: ignore[arg-type]
    catalogue.add_partitions([tp(0), tp(1)])
    catalogue.add_partitions([tp(1)])
    catalogue.add_partitions([tp(1), tp(2)])
    assert counting.added == [["orders-0", "orders-1"], ["orders-2"]]
    assert list(shown.instance.get_dynamic_partitions(shown.assets.partitions_name)) == [
        "orders-0",
        "orders-1",
        "orders-2",
    ]


def test_last_commits_of_many_partitions_are_read_in_two_queries(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = [tp(number) for number in range(1_000)]
    for partition in partitions[:30]:
        for until in (10, 20):
            shown.catalogue.record_commits(
                [
                    replace(
                        COMMIT, range=OffsetRange("orders", partition.partition, until - 10, until)
                    )
                ]
            )
    shown.instance.report_runless_asset_event(
        dg.AssetMaterialization(shown.assets.offsets, partition="orders-3", metadata={"until": "?"})
    )
    queries = counted_queries(monkeypatch)
    assert shown.catalogue.last_recorded(partitions) == dict.fromkeys(
        partitions[:30], LastRecorded(20, COMMIT.run_id)
    )
    assert len(queries) == 2, "one for all, and one for the partition with a manual report"


def test_event_of_a_streaming_run_names_its_code_location_and_sensor(
    instance: dg.DagsterInstance,
) -> None:
    assets = GroupAssets.of(unique_name("group"))
    host = MemberIdentity("shop/3f61351e", "stream_sensor", "3f61351e-1", "3f61351e-1")
    catalogue = Catalogue(instance, assets, host)
    catalogue.record_assigned([tp(0)], "m")
    (record,) = instance.fetch_observations(assets.group, limit=1).records
    assert record.asset_observation is not None
    said = {name: value.value for name, value in record.asset_observation.metadata.items()}
    assert (said["member"], said["code_location"]) == ("shop/3f61351e", "shop")
    assert said["started_by"] == "stream_sensor"
    assert "sensor" not in said
    assert [one.name for one in catalogue.assigned()] == ["shop/3f61351e"]


def test_streaming_run_names_the_sensor_that_started_it(instance: dg.DagsterInstance) -> None:
    group_id = unique_name("group")
    kafka = KafkaConsumerResource(
        bootstrap_servers="localhost:1", group_id=group_id, topics=["orders"]
    )
    run = dg.DagsterRun(job_name="stream", tags={STREAM_TAG: "shop:stream_sensor"})
    StreamCatalogue(instance, kafka, run).record_left("a reason")
    records = instance.fetch_observations(GroupAssets.of(group_id).group, limit=1).records
    (said,) = [record.asset_observation for record in records]
    assert said is not None
    assert said.metadata["started_by"].value == "stream_sensor"


def test_joined_commits_of_earlier_versions_are_read() -> None:
    known = {"start": 0, "until": 9, "run": "c"}
    expected = [(0, 4, "a"), (0, 7, "b"), (0, 9, "c")]
    for joined in ([[4, "a"], [7, "b"], "spoilt", [1]], {"a": [4], "b": [7], "spoilt": 5}):
        assert list(commits_in({**known, "joined": joined})) == expected


@pytest.mark.parametrize("parts", ["", "spoilt", "eJwDAAAAAAE="])
def test_damaged_joined_commits_are_left_out(parts: str) -> None:
    known = {"start": 0, "until": 9, "run": "c", "joined": {"runs": ["a"], "parts": parts}}
    assert list(commits_in(known)) == [(0, 9, "c")]


def test_joined_commits_keep_their_batches_and_times(shown: Shown) -> None:
    """The engine has a monotonic clock; Dagster shows the time of day."""
    now = time.monotonic()
    joined = CommitParts.of(
        [CommitPart(4, "run-a", 7, 7, now - 60.0), CommitPart(7, "run-b", 1, 1, now - 30.0)]
    )
    last = replace(COMMIT, batch_id="s.run-1.5.1", joined=joined, committed_at=now - 10.0)
    shown.catalogue.record_commits([last])
    (commit,) = shown.commits()
    parts = parts_in({name: value.value for name, value in commit.metadata.items()})
    assert [(part.until, part.run_id, part.number) for part in parts] == [
        (4, "run-a", 7),
        (7, "run-b", 1),
        (10, "run-1", 5),
    ]
    times = [part.at or 0.0 for part in parts]
    assert [round(times[2] - at) for at in times] == [50, 20, 0]
    assert times[2] <= time.time() - 10.0


def test_commit_that_is_recorded_later_has_its_time(shown: Shown) -> None:
    now = time.monotonic()
    shown.catalogue.record_commits(
        [
            replace(COMMIT, committed_at=now - 5.0),
            replace(COMMIT, range=span(0, 10, 20), committed_at=now),
        ]
    )
    assert ["committed_at" in commit.metadata for commit in shown.commits()] == [False, True]
