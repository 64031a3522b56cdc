"""`KafkaBatch` and its start check, in real runs with a group in memory."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg
import pytest

from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange
from dagster_rebalance.core.model.run_snapshot import RunState
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.definitions import build_kafka_batch_defs
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.runs import heartbeat as heartbeat_module
from dagster_rebalance.orchestration.runs import process
from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.dynamic_partitions import DirectiveStore
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.range_owners import RangeOwners
from dagster_rebalance.orchestration.storage.run_tags import (
    REFUSED_TAG,
    RunEvent,
    format_range,
    record_run_event,
    run_config,
    run_events_of,
    run_tags,
)
from tests.orchestration.parts import (
    GROUPS,
    LEAVES,
    KafkaInMemory,
    batch_request,
    claimed,
    fork_and_leave,
    fork_pools,
    kafka_in_memory,
    make_run,
    span,
    tags_of,
    tp,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.model.run_snapshot import BatchRequest, RunSnapshot

Status = dg.DagsterRunStatus


class Stage:
    """A job with two assets that take their batch, on a group in memory.

    Batch `batch_id` has claimed partition 0 of that group.
    """

    def __init__(self, instance: dg.DagsterInstance, batch_id: str) -> None:
        self.instance = instance
        self.kafka: KafkaInMemory = kafka_in_memory()
        self.group = GROUPS[self.kafka.group_id]
        self.batch_request = batch_request(batch_id)
        self.group.committed[tp(0)] = claimed(0, 10, batch_id)
        self.worked: list[tuple[str, tuple[OffsetRange, ...]]] = []
        self.on_work: Callable[[str], object] = str
        self.job = build_kafka_batch_defs(
            kafka=self.kafka, assets=[self._asset("first"), self._asset("second")]
        ).resolve_job_def("kafka_batches")

    def _asset(self, name: str) -> dg.AssetsDefinition:
        @dg.asset(name=name, required_resource_keys={"kafka_batch"})
        def work(context) -> dg.MaterializeResult[None]:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates the annotation
            batch: KafkaBatch = context.resources.kafka_batch
            self.on_work(name)
            self.worked.append((name, batch.offset_ranges))
            return dg.MaterializeResult(metadata=batch.metadata())

        return work

    def other(
        self,
        status: dg.DagsterRunStatus,
        wanted: BatchRequest | None = None,
        tags: dict[str, str] | None = None,
    ) -> dg.DagsterRun:
        """Another run of the group."""
        return make_run(
            self.instance,
            wanted or self.batch_request,
            status,
            group_id=self.kafka.group_id,
            tags=tags,
        )

    def run(
        self, wanted: BatchRequest | None = None, *, tagged: BatchRequest | None = None
    ) -> tuple[bool, str, str]:
        wanted = wanted or self.batch_request
        tags = run_tags(tagged or wanted, self.kafka.group_id)
        return self.execute(tags, run_config(wanted, "kafka_batch"))

    def execute(
        self, tags: dict[str, str] | None = None, config: dict[str, Any] | None = None
    ) -> tuple[bool, str, str]:
        result = self.job.execute_in_process(
            instance=self.instance, tags=tags, run_config=config, raise_on_error=False
        )
        failures = [event for event in result.all_events if event.is_failure]
        said = " ".join(str(event.event_specific_data) for event in failures)
        return result.success, said, result.run_id

    def seen(self) -> RunSnapshot:
        (seen,) = RunLedger(self.instance, self.kafka.group_id).read([self.batch_request.batch_id])
        return seen

    def is_refused(
        self,
        because: str,
        wanted: BatchRequest | None = None,
        *,
        tagged: BatchRequest | None = None,
    ) -> None:
        succeeded, said, run_id = self.run(wanted, tagged=tagged)
        assert not succeeded
        assert (
            f"This run must not process batch {(tagged or wanted or self.batch_request).batch_id}: "
            in said
        )
        assert because in said
        assert not self.worked
        assert tags_of(self.instance, run_id)[REFUSED_TAG] == run_id
        assert run_events_of(self.instance, run_id) == {RunEvent.BEGAN, RunEvent.REFUSED}


@pytest.fixture
def stage(batch_id: str) -> Iterator[Stage]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Stage(instance, batch_id)


@pytest.fixture
def stored_stage(instance: dg.DagsterInstance, batch_id: str) -> Stage:
    return Stage(instance, batch_id)


def test_run_of_paused_partition_refuses_itself(stage: Stage) -> None:
    book = DirectiveStore(stage.instance, GroupAssets.of(stage.kafka.group_id).directives_name)
    book.add([Directive(Action.PAUSE, "orders:0", "ada", 1_700_000_000.0, "the warehouse is away")])
    stage.is_refused(
        "orders-0 is paused by ada since 2023-11-14 22:13:20 UTC: the warehouse is away"
    )


def test_run_with_claim_works_and_two_assets_get_its_batch(
    stored_stage: Stage,
) -> None:
    stage = stored_stage
    succeeded, said, run_id = stage.run()
    assert succeeded, said
    assert sorted(stage.worked) == [("first", (span(0),)), ("second", (span(0),))]
    tags = tags_of(stage.instance, run_id)
    assert REFUSED_TAG not in tags
    assert run_events_of(stage.instance, run_id) == {RunEvent.BEGAN, RunEvent.FINISHED}
    event = (
        stage.instance.fetch_materializations(dg.AssetKey("first"), limit=1)
        .records[0]
        .asset_materialization
    )
    assert event is not None
    assert event.metadata["batch"].value == stage.batch_request.batch_id
    assert event.metadata["offsets"].value == 10
    assert "dagster/row_count" not in event.metadata, "offsets are not records"
    assert "orders-0 [0, 10)" in str(event.metadata["ranges"].value)


@pytest.mark.parametrize(("how", "code"), LEAVES)
def test_fork_of_asset_exits_at_its_end(
    stored_stage: Stage, how: Callable[[], object], code: int
) -> None:
    stage, codes = stored_stage, list[int]()
    stage.on_work = lambda _name: codes.append(fork_and_leave(how))
    succeeded, said, run_id = stage.run()
    assert succeeded, said
    assert codes == [code, code]
    kinds = [
        entry.dagster_event.event_type
        for entry in stage.instance.all_logs(run_id)
        if entry.dagster_event is not None
    ]
    assert dg.DagsterEventType.STEP_FAILURE not in kinds
    assert kinds.count(dg.DagsterEventType.STEP_OUTPUT) == 2


def test_asset_can_use_process_pools(stored_stage: Stage) -> None:
    """A worker that is terminated right after its fork must receive the signal."""
    stored_stage.on_work = lambda _name: fork_pools()
    succeeded, said, _ = stored_stage.run()
    assert succeeded, said


def test_run_that_lost_its_lease_after_its_assets_fails(
    stored_stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_module, "_CHECKS_PER_TIMEOUT", 1)
    leave = Heartbeat.__exit__

    def leave_late(heartbeat: Heartbeat, *error: Any) -> None:  # noqa: ANN401 - as for any context manager
        heartbeat._beaten_at -= 1000.0
        leave(heartbeat, *error)

    monkeypatch.setattr(Heartbeat, "__exit__", leave_late)
    succeeded, _, _ = stored_stage.run()
    assert not succeeded
    seen = stored_stage.seen()
    assert (seen.state, seen.is_cancelled_by_member, seen.is_gone) == (RunState.FAILED, True, True)


def test_run_beside_process_of_deleted_run_refuses_itself(stored_stage: Stage) -> None:
    stage = stored_stage
    other = stage.other(Status.STARTED)
    heartbeat = Heartbeat(stage.instance, other, timeout_s=1000.0)
    heartbeat.begin()
    heartbeat.record_claims([(stage.batch_request.batch_id, span(0))])
    stage.instance.delete_run(other.run_id)
    stage.is_refused(
        f"run {other.run_id} of the same batch was deleted from Dagster, and its process may still"
    )


def test_run_without_batch_explains_how_batches_start(stage: Stage) -> None:
    succeeded, said, run_id = stage.execute()
    assert not succeeded
    assert "This run has no batch of Kafka offsets" in said
    assert "turn it on" in said
    assert REFUSED_TAG not in tags_of(stage.instance, run_id)
    assert not stage.worked


@pytest.mark.parametrize(
    ("committed", "reason"),
    [
        ({tp(0): OffsetAndMetadata(0)}, "orders-0 [0, 10) is no longer claimed by batch"),
        (
            {tp(0): OffsetAndMetadata(10)},
            "orders-0 [0, 10) is already committed (the group is at 10)",
        ),
        ({}, "the group has no committed offset for orders-0"),
    ],
)
def test_run_without_claim_refuses_itself(
    stage: Stage, committed: dict[TopicPartition, OffsetAndMetadata], reason: str
) -> None:
    stage.group.committed.clear()
    stage.group.committed.update(committed)
    stage.is_refused(reason)


def test_run_refuses_itself_if_kafka_is_unavailable(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(_: KafkaInMemory) -> NoReturn:
        message = "no broker answers"
        raise BrokerError(message, retriable=True)

    monkeypatch.setattr(KafkaInMemory, "connect", connect)
    stage.is_refused("its claim could not be read from Kafka: no broker answers")


def test_run_is_refused_if_dagster_storage_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    def read(*_: object, **__: object) -> NoReturn:
        msg = "database is locked"
        raise OSError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(RunLedger, "read", read)
        succeeded, said, run_id = stage.run()
    assert not succeeded
    assert "database is locked" in said
    assert not stage.worked
    assert run_events_of(stage.instance, run_id) == {RunEvent.BEGAN, RunEvent.REFUSED}
    seen = stage.seen()
    assert (seen.is_live, seen.is_refused) == (False, True)


def test_run_that_hangs_while_recording_claims_does_not_begin(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, later = RangeOwners.begin, process.boot_time_s() + 1_000.0

    def begin(notes: RangeOwners, *work: Any) -> None:  # noqa: ANN401 - a note and its claims
        real(notes, *work)
        monkeypatch.setattr(process, "boot_time_s", lambda: later)

    monkeypatch.setattr(RangeOwners, "begin", begin)
    stage.is_refused("it could send no heartbeat for")
    assert RangeOwners(stage.instance).read([(stage.batch_request.batch_id, span(0))]) == {}


def test_one_range_without_claim_refuses_the_run(stage: Stage) -> None:
    stage.is_refused(
        "orders-1 [0, 10) is not claimed",
        batch_request(stage.batch_request.batch_id, span(0), span(1)),
    )


@pytest.mark.parametrize("status", [Status.STARTED, Status.CANCELING, Status.SUCCESS])
def test_refusal_names_another_run_of_the_batch(stage: Stage, status: dg.DagsterRunStatus) -> None:
    """With a tie-break, both runs could work."""
    other = stage.other(status)
    stage.is_refused(f"run {other.run_id} of the same batch has")


def test_refusal_names_run_of_another_batch_on_the_range(stage: Stage) -> None:
    other = stage.other(Status.STARTED, batch_request("b-overwritten", span(0, 5, 15)))
    stage.is_refused(f"run {other.run_id} of batch b-overwritten has started on orders-0 [0, 10)")


def test_refusal_names_ended_run_that_may_still_work(stage: Stage) -> None:
    other = stage.other(Status.CANCELED)
    record_run_event(stage.instance, other, RunEvent.BEGAN)
    stage.is_refused(f"run {other.run_id} of the same batch has canceled in Dagster")


def test_began_is_recorded_before_the_start_check(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, frozenset[RunEvent]]] = []
    real = RunLedger.read

    def read(
        ledger: RunLedger,
        batch_ids: Iterable[str],
        *,
        with_live: bool = False,
        claims: Iterable[Claimed] = (),
    ) -> tuple[RunSnapshot, ...]:
        runs = real(ledger, batch_ids, with_live=with_live, claims=claims)
        seen.extend((run.has_begun, run_events_of(stage.instance, run.run_id)) for run in runs)
        return runs

    monkeypatch.setattr(RunLedger, "read", read)
    stage.group.committed.clear()
    stage.is_refused("the group has no committed offset")
    assert seen == [(True, frozenset({RunEvent.BEGAN}))]


def test_runs_that_do_not_work_on_the_range_are_ignored(stored_stage: Stage) -> None:
    stage = stored_stage
    for status in (
        Status.FAILURE,
        Status.CANCELED,
        Status.NOT_STARTED,
        Status.QUEUED,
        Status.STARTING,
    ):
        stage.other(status)
    refused = stage.other(Status.STARTED)
    stage.instance.add_run_tags(refused.run_id, {REFUSED_TAG: refused.run_id})
    stage.other(Status.STARTED, batch_request(stage.batch_request.batch_id, span(1)))
    succeeded, said, _ = stage.run()
    assert succeeded, said


def test_retry_of_refused_run_counts_for_others(stage: Stage) -> None:
    """It has a copy of the tag of its parent."""
    parent = stage.other(Status.FAILURE)
    retry = stage.other(Status.STARTED, tags={REFUSED_TAG: parent.run_id})
    stage.is_refused(f"run {retry.run_id} of the same batch has started")


def test_run_without_batch_tag_refuses_itself(stage: Stage) -> None:
    stage.is_refused(
        "the batch id in its run config differs from its tag dagster_rebalance/batch",
        tagged=batch_request("another"),
    )


@pytest.mark.parametrize(
    "text", ["orders:0:0:x", "orders:0:10:0", "orders:0:0:10,1:0", "orders:0:0:10, 1:0:10"]
)
def test_run_with_invalid_ranges_refuses_itself(stage: Stage, text: str) -> None:
    """The refusal does not show the text, which may be the value of an environment variable."""
    config = {"batch_id": stage.batch_request.batch_id, "ranges": [text]}
    tags = run_tags(stage.batch_request, stage.kafka.group_id)
    _, said, run_id = stage.execute(tags, {"resources": {"kafka_batch": {"config": config}}})
    assert "the ranges in its run config cannot be read: each must be topic:partition:" in said
    assert "Re-execute the run that the sensor requested" in said
    assert tags_of(stage.instance, run_id)[REFUSED_TAG] == run_id


def test_run_with_a_repeated_range_refuses_itself(stage: Stage) -> None:
    ranges = [*map(format_range, stage.batch_request.ranges)] * 2
    config = {"batch_id": stage.batch_request.batch_id, "ranges": ranges}
    tags = run_tags(stage.batch_request, stage.kafka.group_id)
    _, said, _ = stage.execute(tags, {"resources": {"kafka_batch": {"config": config}}})
    assert "its ranges are not those of its run config" in said


def test_run_with_other_ranges_than_claimed_refuses_itself(stage: Stage) -> None:
    stage.is_refused(
        "is no longer claimed by batch", batch_request(stage.batch_request.batch_id, span(0, 0, 5))
    )


def test_records_is_the_sum_of_the_ranges() -> None:
    batch = KafkaBatch(
        kafka=kafka_in_memory(), batch_id="b", ranges=["orders:0:0:10", "orders:1:5:8"]
    )
    assert batch.records == 13


def test_connector_options_cannot_change_the_ranges() -> None:
    kafka = KafkaConsumerResource(bootstrap_servers="nowhere:1", group_id="etl", topics=["orders"])
    batch = KafkaBatch(kafka=kafka, batch_id="b-1", ranges=["orders:0:0:10"])
    spark = SimpleNamespace(
        spark_session=SimpleNamespace(sparkContext=SimpleNamespace(addJobTag=len))
    )
    with pytest.raises(ConfigurationError, match="startingTimestamp"):
        batch.dataframe(spark, options={"includeHeaders": "true", "startingTimestamp": "0"})


def test_row_count_is_that_of_the_asset() -> None:
    kafka = KafkaConsumerResource(bootstrap_servers="nowhere:1", group_id="etl", topics=["orders"])
    shown = KafkaBatch(kafka=kafka, batch_id="b-1", ranges=["orders:0:0:10"]).metadata(row_count=7)
    assert (shown["offsets"], shown["dagster/row_count"]) == (10, 7)


def test_run_ended_by_signal_records_interrupted(stored_stage: Stage) -> None:
    def end(_name: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    stored_stage.on_work = end
    succeeded, _, _ = stored_stage.run()
    assert not succeeded
    seen = stored_stage.seen()
    assert run_events_of(stored_stage.instance, seen.run_id) == {
        RunEvent.BEGAN,
        RunEvent.INTERRUPTED,
        RunEvent.FINISHED,
    }
