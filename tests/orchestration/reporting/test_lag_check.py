"""The lag of a group as members report it in Dagster, and the manual check."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.directives import Action
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.reporting.lag import NO_LIMIT, GroupLag, LagLimit, PartitionLag
from dagster_rebalance.orchestration.operators.requests import DirectiveRequest, issue_directive
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import (
    LAG_CHECK,
    STOPPED_CHECK,
    build_lag_check,
)
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.orchestration.bench import SETTINGS, Bench
from tests.orchestration.member.story import evaluations as evaluations_of_stops
from tests.orchestration.parts import GROUPS, kafka_in_memory, tp

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.group_ports import OffsetAndTimestamp
    from dagster_rebalance.orchestration.ports import ShownStops
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def observed(instance: dg.DagsterInstance, asset: dg.AssetKey) -> list[dg.AssetObservation]:
    records = instance.fetch_observations(asset, limit=100, ascending=True).records
    return [record.asset_observation for record in records if record.asset_observation]


def figures(observation: dg.AssetObservation, *names: str) -> list[object]:
    return [observation.metadata[name].value for name in names]


def rows(observation: dg.AssetObservation) -> list[Mapping[str, Any]]:
    table = observation.metadata["largest"]
    assert isinstance(table, dg.TableMetadataValue)
    return [record.data for record in table.records]


def evaluations(instance: dg.DagsterInstance, asset: dg.AssetKey) -> list[bool]:
    found = instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(asset, LAG_CHECK), limit=100
    )
    return [record.evaluation.passed for record in reversed(found) if record.evaluation]


def test_lag_of_all_partitions_is_observed(
    instance: dg.DagsterInstance,
) -> None:
    """Stopped ones and those of another member, too."""
    bench = Bench(instance, partitions=3, records=10)
    bench.turn()
    bench.group.committed[tp(2)] = OffsetAndMetadata(4, "text of another application")
    other = bench.joined_by_another()

    def is_shared() -> bool:
        other.poll(0)
        return bool(other.assignment()) and tp(0) in bench.engine.partitions

    bench.until(is_shared)
    bench.until(
        lambda: any(
            "stopped" in str(seen.description) for seen in observed(instance, bench.assets.lag)[-1:]
        )
    )
    last = observed(instance, bench.assets.lag)[-1]
    assert figures(last, "lag", "lag_max", "partitions") == [26, 10, 3]
    assert figures(last, "stopped_partitions", "paused_partitions") == [1, 0]
    row = next(row for row in rows(last) if row["partition"] == "orders-2")
    assert (row["lag"], row["committed"], row["end"]) == (6, 4, 10)
    assert "was not written by dagster_rebalance" in row["state"]


def test_scan_reads_some_partitions_in_each_turn(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_rebalance.orchestration.member.group_report._MOST_AT_ONCE", 2)
    bench = Bench(instance, partitions=5, settings=replace(SETTINGS, lag_every_s=10.0))
    bench.until(lambda: observed(instance, bench.assets.lag), 2000)
    read: list[int] = []
    real = bench.group.beginning_offsets

    def beginning_offsets(
        partitions: Collection[TopicPartition], timeout_s: float = 10.0
    ) -> dict[TopicPartition, int]:
        read.append(len(partitions))
        return real(partitions, timeout_s)

    monkeypatch.setattr(bench.group, "beginning_offsets", beginning_offsets)
    bench.group.produce(tp(4), 7)
    bench.until(lambda: read)
    assert read == [2]
    bench.turn()
    assert read == [2, 2]
    bench.until(lambda: len(observed(instance, bench.assets.lag)) > 1)
    assert read[:3] == [2, 2, 1]
    assert figures(observed(instance, bench.assets.lag)[-1], "lag", "partitions") == [57, 5]


def test_observations_and_results_count_towards_the_budget_of_records(
    instance: dg.DagsterInstance,
) -> None:
    bench = Bench(instance, settings=replace(SETTINGS, lag_every_s=10.0))
    bench.until(lambda: observed(instance, bench.assets.lag), 2000)
    bench.turn()
    assigned = [one for one in bench.observed() if one["event"] == "assigned"]
    lag, stops = observed(instance, bench.assets.lag), evaluations_of_stops(bench)
    assert [len(assigned), len(lag), len(stops)] == [1, 1, 1]
    assert sum(bench.engine.owed) == len([*assigned, *lag, *stops])


def test_incomplete_scan_is_dropped_after_a_standstill(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_rebalance.orchestration.member.group_report._MOST_AT_ONCE", 2)
    bench = Bench(instance, partitions=5, settings=replace(SETTINGS, lag_every_s=10.0))
    report = bench.member_loop._report
    bench.until(lambda: report._scanning)
    before = len(observed(instance, bench.assets.lag))
    bench.group.clock.advance(11)
    bench.turn()
    assert report._scanning is None
    assert len(observed(instance, bench.assets.lag)) == before
    bench.until(lambda: len(observed(instance, bench.assets.lag)) > before, 2000)


def test_row_links_the_run_that_processes_it(instance: dg.DagsterInstance) -> None:
    bench = Bench(instance, settings=replace(SETTINGS, lag_every_s=10.0))
    bench.batch_requests()
    run = bench.run(dg.DagsterRunStatus.STARTED)
    bench.until(lambda: rows(observed(instance, bench.assets.lag)[-1])[0]["run"], 2000)
    last = observed(instance, bench.assets.lag)[-1]
    assert rows(last)[0]["run"] == run.run_id[:8]
    link = last.metadata[f"run {run.run_id[:8]}"]
    assert isinstance(link, dg.DagsterRunMetadataValue)
    assert link.run_id == run.run_id


def test_owner_of_the_first_partition_observes_the_lag(
    instance: dg.DagsterInstance,
) -> None:
    bench = Bench(instance, partitions=2)
    other = bench.joined_by_another()

    def is_shared() -> bool:
        other.poll(0)
        return len(other.assignment()) == 1 and len(bench.engine.partitions) == 1

    bench.until(is_shared)
    assert tp(1) in bench.engine.partitions
    for number in range(200):
        bench.group.produce(tp(number % 2))
        bench.turn(10)
        other.poll(0)
    assert observed(instance, bench.assets.lag) == []
    owner = bench.group.owner(tp(0))
    assert owner is not None
    bench.group.fence(owner)
    bench.until(lambda: observed(instance, bench.assets.lag), 2000)
    assert tp(0) in bench.engine.partitions


def test_missing_topic_is_reported_beside_the_lag_of_the_others(
    instance: dg.DagsterInstance,
) -> None:
    bench = Bench(instance, records=10, others=["a"])

    def told() -> str:
        found = instance.event_log_storage.get_asset_check_execution_history(
            dg.AssetCheckKey(bench.assets.offsets, STOPPED_CHECK), limit=1
        )
        return str(found[0].evaluation.description) if found and found[0].evaluation else ""

    bench.until(lambda: "topic a does not exist" in told())
    assert any("stopped: topic a does not exist" in line for line in bench.mailbox.mail.summary)
    bench.until(lambda: observed(instance, bench.assets.lag))
    last = observed(instance, bench.assets.lag)[-1]
    assert figures(last, "lag", "partitions", "missing_topics") == [10, 1, 1]
    assert "topic a does not exist" in str(last.description)
    bench.group.add_partitions("a", 1)
    bench.until(lambda: told() == "no partition is stopped or paused", 1000)
    assert not any("topic a" in line for line in bench.mailbox.mail.summary)


def test_unchanged_lag_is_observed_seldom(instance: dg.DagsterInstance) -> None:
    bench = Bench(instance, records=0)
    bench.turn(40)
    before = len(observed(instance, bench.assets.lag))
    began_at = bench.group.clock()
    bench.turn(1160)
    assert bench.group.clock() - began_at == pytest.approx(290, abs=1)
    assert len(observed(instance, bench.assets.lag)) - before <= 1


def test_stopped_partition_is_observed_at_once(instance: dg.DagsterInstance) -> None:
    bench = Bench(instance, records=0)
    bench.turn(450)
    before = bench.group.clock()
    bench.group.produce(tp(0), 10)
    bench.consumer.refuses = {tp(0): "the right to commit was taken away"}
    bench.until(
        lambda: observed(instance, bench.assets.lag)[-1].metadata["stopped_partitions"].value
    )
    assert bench.group.clock() - before < 12


def test_pause_and_resume_are_observed_at_once(instance: dg.DagsterInstance) -> None:
    bench = Bench(instance, records=0)
    bench.turn(450)
    seen = len(observed(instance, bench.assets.lag))

    def paused() -> list[object]:
        newest = observed(instance, bench.assets.lag)[seen:]
        return [one.metadata["paused_partitions"].value for one in newest]

    for action, wanted in ((Action.PAUSE, [1]), (Action.RESUME, [1, 0])):
        before = bench.group.clock()
        issue_directive(instance, "etl", DirectiveRequest(action, ("*",), "ada", "away"))
        bench.until(lambda: len(paused()) == len(wanted))  # noqa: B023 - called in this turn
        assert paused() == wanted
        assert bench.group.clock() - before < 12
    issue_directive(instance, "etl", DirectiveRequest(Action.RETRY, ("*",), "ada", "away"))
    bench.turn(50)
    assert len(observed(instance, bench.assets.lag)) == seen + 2, "a retry changes no figure"


@contextmanager
def reports_of_a_stop(
    bench: Bench, partition: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Callable[[], object]]]:
    """Stop a partition, and yield the reports of it, which the storage does not carry out."""
    reports: list[Callable[[], object]] = []
    with monkeypatch.context() as patch:
        patch.setattr(bench.member_loop._report, "_show", lambda work, _: reports.append(work))
        bench.group.produce(partition, 10)
        bench.consumer.refuses = {partition: "the right to commit was taken away"}
        bench.until(lambda: bench.engine.partitions[partition].stop_reason)
        reports.clear()
        bench.until(lambda: reports)
        yield reports


@pytest.mark.parametrize("first", ["report", "member"])
def test_report_from_before_a_standstill_is_not_shown(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Another member may own the partition since, and has shown that it continues."""
    bench = Bench(instance, records=0)
    bench.turn(50)
    catalogue = bench.member_loop.dependencies.catalogue
    with reports_of_a_stop(bench, tp(0), monkeypatch) as reports:
        report = reports[0]
    read = catalogue.shown_stops

    def stands_still() -> ShownStops:
        monkeypatch.setattr(catalogue, "shown_stops", read)
        bench.group.clock.advance(11)
        if first == "member":
            bench.turn()
        return read()

    monkeypatch.setattr(catalogue, "shown_stops", stands_still)
    report()
    assert not catalogue.shown_stops().partitions
    bench.until(lambda: catalogue.shown_stops().partitions, 2000)


def test_report_of_a_stop_is_not_shown_after_its_partition_has_gone(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow storage: its next owner may have shown meanwhile that it continues."""
    bench = Bench(instance, partitions=2, records=0)
    bench.turn(50)
    catalogue = bench.member_loop.dependencies.catalogue
    with reports_of_a_stop(bench, tp(1), monkeypatch) as reports:
        other = bench.joined_by_another()

        def has_gone() -> bool:
            other.poll(0)
            return tp(1) not in bench.engine.partitions or tp(0) not in bench.engine.partitions

        bench.until(has_gone)
    assert tp(1) not in bench.engine.partitions
    reports[-1]()
    assert not catalogue.shown_stops().partitions


def test_late_report_of_stops_does_not_replace_a_newer_one(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage worker continues in another thread while a report hangs."""
    bench = Bench(instance, records=0)
    bench.turn(50)
    reports: list[Callable[[], object]] = []
    monkeypatch.setattr(bench.member_loop._report, "_show", lambda work, _: reports.append(work))

    def next_report(*, is_stopped: bool) -> Callable[[], object]:
        bench.until(lambda: bool(bench.engine.partitions[tp(0)].stop_reason) is is_stopped)
        before = len(reports)
        bench.member_loop._report.add_news(is_stop=True)
        bench.until(lambda: len(reports) > before)
        return reports[-1]

    bench.group.produce(tp(0), 10)
    bench.consumer.refuses = {tp(0): "the right to commit was taken away"}
    late = next_report(is_stopped=True)
    bench.consumer.refuses = {}
    newer = next_report(is_stopped=False)
    catalogue = bench.member_loop.dependencies.catalogue
    read = catalogue.shown_stops

    def hangs() -> ShownStops:
        monkeypatch.setattr(catalogue, "shown_stops", read)
        before = read()
        newer()
        return before

    monkeypatch.setattr(catalogue, "shown_stops", hangs)
    late()
    assert not catalogue.shown_stops().partitions


def test_refused_lag_request_ends_no_member(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(instance)
    bench.turn(450)

    def refuse(_timeout_s: float = 10.0) -> object:
        message = "the topic may not be described"
        raise BrokerError(message)

    monkeypatch.setattr(bench.consumer, "list_topics", refuse)
    bench.turn(700)
    issue_directive(instance, "etl", DirectiveRequest(Action.PAUSE, ("*",), "ada", "away"))
    bench.turn(100)
    notes = [note for note in bench.mailbox.take_notes() if "lag of the group" in note]
    assert notes
    assert notes[0].endswith("are not known: the topic may not be described")


@pytest.mark.parametrize("question", ["list_topics", "committed"])
def test_lag_check_fails_once_while_the_lag_is_unknown(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    bench = Bench(instance, partitions=2, records=0, lag_limit=LagLimit(10))
    bench.until(lambda: evaluations(instance, bench.assets.lag))
    silent_at = bench.group.clock()

    def silent(*_: object, **__: object) -> object:
        message = "the coordinator did not answer"
        raise BrokerError(message, retriable=True)

    with monkeypatch.context() as patch:
        patch.setattr(bench.consumer, question, silent)
        bench.until(lambda: len(evaluations(instance, bench.assets.lag)) > 1)
        assert bench.group.clock() - silent_at > 60
        # A real member would have lost its partitions; the observer continues to query Kafka.
        bench.group.fence(bench.member)
        bench.turn(800)
        assert evaluations(instance, bench.assets.lag) == [True, False]
    last = observed(instance, bench.assets.lag)[-1]
    assert figures(last, "partitions", "unknown_partitions") == [2, 2]
    assert rows(last)[0]["state"] == "the coordinator did not answer"
    bench.until(lambda: len(evaluations(instance, bench.assets.lag)) > 2)
    assert evaluations(instance, bench.assets.lag) == [True, False, True]


def test_observer_without_partitions_reports_an_outage(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of a member ends before the outage is long."""
    bench = Bench(instance, records=0, lag_limit=LagLimit(10))
    bench.until(lambda: evaluations(instance, bench.assets.lag))
    bench.turn()

    def silent(_timeout_s: float = 10.0) -> object:
        message = "all brokers are down"
        raise BrokerError(message, retriable=True)

    monkeypatch.setattr(bench.consumer, "list_topics", silent)
    bench.group.fence(bench.member)
    monkeypatch.setattr(bench.group, "rebalance", lambda: None)
    bench.until(lambda: not bench.engine.partitions)
    bench.until(lambda: len(evaluations(instance, bench.assets.lag)) > 1)
    assert evaluations(instance, bench.assets.lag) == [True, False]
    assert not bench.engine.partitions


def test_report_waits_briefly_for_restored_partitions(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(instance, start=lambda _name, _work: None)  # the storage never answers
    real, looked_at = bench.consumer.list_topics, []

    def counted(timeout_s: float = 10.0) -> object:
        looked_at.append(bench.group.clock())
        return real(timeout_s)

    monkeypatch.setattr(bench.consumer, "list_topics", counted)
    bench.until(lambda: bench.engine.partitions)
    assigned_at = bench.group.clock()
    bench.until(lambda: looked_at)
    assert 4 < looked_at[0] - assigned_at < 6


def test_observation_of_many_partitions_stays_small(instance: dg.DagsterInstance) -> None:
    everything = tuple(
        PartitionLag(
            tp(number), 0, 5000 - number, 5000 - number, state="why " * 100, run_id="r" * 36
        )
        for number in range(1000)
    )
    assets = GroupAssets.of("large")
    Catalogue(instance, assets, NO_MEMBER).show_lag(GroupLag(everything, stopped=1000), NO_LIMIT)
    (shown,) = observed(instance, assets.lag)
    assert len(rows(shown)) == 20
    assert figures(shown, "not_in_table") == ["980 partitions with less lag"]
    record = instance.fetch_observations(assets.lag, limit=1).records[0]
    assert len(dg.serialize_value(record.event_log_entry)) < 12_000


def test_lag_check_is_evaluated_when_its_result_changes(instance: dg.DagsterInstance) -> None:
    assets = GroupAssets.of("etl")
    catalogue = Catalogue(instance, assets, NO_MEMBER)
    for waiting in (5, 11, 12, 5, 6):
        lag = GroupLag((PartitionLag(tp(0), 0, waiting, waiting),))
        catalogue.show_lag(lag, LagLimit(10))
    assert evaluations(instance, assets.lag) == [True, False, True]
    assert len(observed(instance, assets.lag)) == 5


def test_lag_check_is_evaluated_after_another_result_of_another_member(
    instance: dg.DagsterInstance,
) -> None:
    assets = GroupAssets.of("etl")
    one, other = (Catalogue(instance, assets, NO_MEMBER) for _ in range(2))
    for catalogue, waiting in ((one, 11), (one, 12), (other, 5), (one, 11)):
        lag = GroupLag((PartitionLag(tp(0), 0, waiting, waiting),))
        catalogue.show_lag(lag, LagLimit(10))
    assert evaluations(instance, assets.lag) == [False, True, False]


def test_lag_check_needs_a_limit(instance: dg.DagsterInstance) -> None:
    bench = Bench(instance)
    bench.until(lambda: observed(instance, bench.assets.lag))
    assert evaluations(instance, bench.assets.lag) == []


def by_hand(
    kafka: KafkaConsumerResource, instance: dg.DagsterInstance, limit: LagLimit
) -> dg.AssetCheckEvaluation:
    group = GroupAssets.of(kafka.group_id)
    check = build_lag_check(
        group.lag, "kafka", limit, lambda storage: Catalogue(storage, group, NO_MEMBER)
    )
    job = dg.Definitions(asset_checks=[check], resources={"kafka": kafka})
    result = job.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    (evaluation,) = result.get_asset_check_evaluations()
    return evaluation


def test_manual_lag_check_needs_no_member(instance: dg.DagsterInstance) -> None:
    kafka = kafka_in_memory()
    GROUPS[kafka.group_id].produce(tp(1), 30)
    passed = by_hand(kafka, instance, LagLimit(30))
    assert passed.passed
    failed = by_hand(kafka, instance, LagLimit(29))
    assert not failed.passed
    assert failed.severity is dg.AssetCheckSeverity.ERROR
    assert failed.description == (
        "30 offsets wait, more than 29; lag 30 in 2 partitions, largest orders-1 (30)"
    )


@pytest.mark.parametrize(("age_s", "is_passed"), [(10, True), (120, False)])
def test_limit_in_seconds_applies_to_the_oldest_waiting_record(
    instance: dg.DagsterInstance, *, age_s: float, is_passed: bool
) -> None:
    kafka = kafka_in_memory()
    group = GROUPS[kafka.group_id]
    group.produce(tp(0), 3, timestamp=int((time.time() - 500) * 1000))
    group.committed[tp(0)] = OffsetAndMetadata(3)
    group.produce(tp(0), 3, timestamp=int((time.time() - age_s) * 1000))
    assert by_hand(kafka, instance, LagLimit(None, 60)).passed is is_passed


def test_timestamp_in_the_future_hides_no_waiting_record(instance: dg.DagsterInstance) -> None:
    """It is the first record since any time, also when it is committed."""
    bench = Bench(instance, records=0, lag_limit=LagLimit(None, 60.0))
    bench.group.produce(tp(0), 1, timestamp=int((bench.group.clock() + 86_400) * 1000))
    bench.group.committed[tp(0)] = OffsetAndMetadata(1, "text of another application")
    bench.group.produce(tp(0), 3, timestamp=int(bench.group.clock() * 1000))
    bench.until(lambda: False in evaluations(instance, bench.assets.lag), 2000)
    assert evaluations(instance, bench.assets.lag) == [True, False]


def test_manual_lag_check_fails_despite_a_timestamp_in_the_future(
    instance: dg.DagsterInstance,
) -> None:
    kafka = kafka_in_memory()
    group = GROUPS[kafka.group_id]
    group.produce(tp(0), 1, timestamp=int((time.time() + 86_400) * 1000))
    group.committed[tp(0)] = OffsetAndMetadata(1)
    group.produce(tp(0), 3, timestamp=int(time.time() * 1000))
    result = by_hand(kafka, instance, LagLimit(None, 60))
    assert not result.passed
    assert "the waiting time of records of orders-0 is not known" in str(result.description)


def test_unknown_record_age_delays_no_report_of_a_stop(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(
        partitions: Mapping[TopicPartition, int], _timeout_s: float = 10.0
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        message = "its leader did not answer"
        raise BrokerError(message, retriable=True, partitions=dict.fromkeys(partitions, ""))

    bench = Bench(instance, lag_limit=LagLimit(None, 60.0))
    monkeypatch.setattr(bench.group, "offsets_for_times", silent)
    bench.group.committed[tp(0)] = OffsetAndMetadata(0, "text of another application")
    bench.until(
        lambda: (
            bench.member_loop._report.is_current
            and any(owned.stop_reason for owned in bench.engine.partitions.values())
        )
    )
    assert observed(instance, bench.assets.lag) == []
    assert any("lag of the group is not known" in note for note in bench.mailbox.take_notes())
