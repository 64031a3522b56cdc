"""Reruns: selection from the recorded history, request, storage, start and display."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance import KafkaBatch, build_kafka_batch_defs, build_kafka_stream_defs
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.commit_parts import CommitPart, CommitParts
from dagster_rebalance.core.model.directives import Action
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.letters import LetterFold
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.operators.rerun_selection import Span
from dagster_rebalance.core.reporting.joined_ranges import JoinedRanges
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch, batches_of
from dagster_rebalance.orchestration import builders
from dagster_rebalance.orchestration.member.mailbox import Mail
from dagster_rebalance.orchestration.operators import rerun_tick
from dagster_rebalance.orchestration.operators.replayed_letters import TopicReads, mark_replayed
from dagster_rebalance.orchestration.operators.requests import (
    DirectiveRequest,
    RerunRequest,
    Reruns,
    issue_directive,
    time_of,
)
from dagster_rebalance.orchestration.per_batch import batch_sensor as sensor_module
from dagster_rebalance.orchestration.per_batch.hosted_members import Members
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.commit_history import processed
from dagster_rebalance.orchestration.storage.dynamic_partitions import RerunStore
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.range_owners import RangeOwners
from dagster_rebalance.orchestration.storage.run_tags import (
    BATCH_TAG,
    GROUP_TAG,
    RERUN_BY_TAG,
    RERUN_REASON_TAG,
    RERUN_TAG,
    rerun_tags,
    run_config,
    run_tags,
)
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.asset_table import ROWS, SEEN
from tests.orchestration.parts import (
    EACH_STORAGE,
    GROUPS,
    batch_request,
    give_sign,
    kafka_in_memory,
    make_run,
    span,
    status_of,
    tags_of,
    tp,
)
from tests.orchestration.streaming.test_asset_table import outcome_of

if TYPE_CHECKING:
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.core.model.run_snapshot import BatchRequest

Status = dg.DagsterRunStatus
ALL = Span(since=0.0)
JOINED = CommitParts.of([CommitPart(12, "run-1"), CommitPart(20, "run-2")])


@pytest.fixture(params=EACH_STORAGE)
def instance(request: pytest.FixtureRequest) -> dg.DagsterInstance:
    found: dg.DagsterInstance = request.getfixturevalue(request.param)
    return found


class Resting:
    is_over = is_lost = False
    mail = Mail((), ("it rests",))

    def tick(self, _patience_s: float = 0.0) -> tuple[Mail, list[str]]:
        return self.mail, []


class Ground:
    """A group in memory that has committed 30 offsets of partition 0, in three ranges."""

    def __init__(self, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instance = instance
        self.monkeypatch = monkeypatch
        self.kafka = kafka_in_memory()
        self.group_id = self.kafka.group_id
        self.assets = GroupAssets.of(self.group_id)
        self.catalogue = Catalogue(instance, self.assets, NO_MEMBER)
        self.catalogue.add_partitions([tp(0), tp(1)])
        self.group = GROUPS[self.group_id]
        self.group.produce(tp(0), 100)
        self.commit(span(0, 0, 10), span(0, 10, 20), span(0, 20, 30))
        self.reruns = Reruns(instance, self.kafka)
        self.book = RerunStore(instance, self.assets.reruns_name)
        self.worked: list[OffsetRange] = []
        self.name = unique_name("batches").replace("-", "_")
        self.defs = build_kafka_batch_defs(kafka=self.kafka, assets=[self._asset()], name=self.name)
        self.cursor: str | None = None

    def _asset(self) -> dg.AssetsDefinition:
        @dg.asset(name="work", required_resource_keys={"kafka_batch"})
        def work(context) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates the annotation
            assert context.resources.kafka_batch.is_rerun
            self.worked += context.resources.kafka_batch.offset_ranges

        return work

    def commit(self, *ranges: OffsetRange, **more: Any) -> None:  # noqa: ANN401 - fields of all kinds
        for range_ in ranges:
            wanted = RecordCommit(range_, 1, "b-1", "run-1", 0, None, None, **more)
            self.catalogue.record_commits([wanted])
            self.group.committed[range_.topic_partition] = OffsetAndMetadata(range_.until)

    def wanted(self, meant: Span = ALL, *partitions: str, **more: Any) -> RerunRequest:  # noqa: ANN401 - as above
        return RerunRequest(partitions or ("*",), meant, "ada", "the fix", **more)

    def begin(self, meant: Span = ALL, **more: Any) -> str:  # noqa: ANN401 - as above
        planned = self.reruns.plan(self.wanted(meant, "orders:0", **more))
        said = self.reruns.begin(planned)
        assert planned.rerun.rerun_id in said
        return planned.rerun.rerun_id

    def tick(self, *, real: bool = True, location: str = "shop") -> Any:  # noqa: ANN401 - Dagster's class is private
        for module, name, value in (
            (sensor_module, "MEMBERS", Members()),
            (sensor_module, "_host", lambda *_, **__: Resting()),
            (sensor_module, "is_real_tick", lambda _context: real),
            (builders, "location_of", lambda _context: location),
        ):
            self.monkeypatch.setattr(module, name, value)
        name = f"{self.name}_sensor"
        made = self.defs.resolve_sensor_def(name)
        with dg.build_sensor_context(
            instance=self.instance,
            definitions=self.defs,
            sensor_name=name,
            resources={"kafka": self.kafka},
            cursor=self.cursor,
        ) as context:
            result = made.evaluate_tick(context)
        self.cursor = result.cursor
        return result

    def run(self, wanted: BatchRequest) -> tuple[bool, str, str]:
        """Execute a run of the group's job. Returns its success, its messages and its id."""
        result = self.defs.resolve_job_def(self.name).execute_in_process(
            instance=self.instance,
            tags=run_tags(wanted, self.group_id),
            run_config=run_config(wanted, "kafka_batch"),
            raise_on_error=False,
        )
        said = " ".join(str(e.event_specific_data) for e in result.all_events if e.is_failure)
        return result.success, said, result.run_id

    def shown(self, key: dg.AssetKey) -> list[dict[str, Any]]:
        records = self.instance.fetch_observations(key, limit=20).records
        return [
            {name: value.value for name, value in record.asset_observation.metadata.items()}
            for record in records
            if record.asset_observation is not None
        ]


@pytest.fixture
def ground(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(instance, monkeypatch)


# The past


def past(ground: Ground, number: int = 1, **limits: Any) -> list[tuple[OffsetRange, bool]]:  # noqa: ANN401 - two kinds
    """The recorded ranges of a partition, newest first, and whether each is known to be one."""
    found = processed(ground.instance, ground.assets.offsets, tp(number), **limits)
    return [(one.range, one.is_whole) for one in found]


def test_joined_commits_are_separate_ranges(ground: Ground) -> None:
    ground.commit(span(1, 0, 5))
    ground.commit(span(1, 5, 30), joined=JOINED)
    assert past(ground) == [
        (span(1, 20, 30), True),
        (span(1, 12, 20), True),
        (span(1, 5, 12), True),
        (span(1, 0, 5), True),
    ]


def test_merged_commits_are_no_single_range(ground: Ground) -> None:
    merged = CommitParts.of([CommitPart(12, "run-1"), CommitPart(20, "run-2", 4, 2, None, 3)])
    ground.commit(span(1, 5, 30), joined=merged)
    assert past(ground) == [
        (span(1, 20, 30), True),
        (span(1, 12, 20), False),
        (span(1, 5, 12), True),
    ]


def test_late_commit_is_one_range_if_its_run_has_that_range(ground: Ground) -> None:
    ground.commit(span(1, 0, 5), is_late=True)
    assert past(ground) == [(span(1, 0, 5), False)]
    run = make_run(ground.instance, batch_request("b-1", span(1, 5, 9)), Status.SUCCESS)
    wanted = RecordCommit(span(1, 5, 9), 1, "b-1", run.run_id, 0, None, None, is_late=True)
    ground.catalogue.record_commits([wanted])
    assert past(ground)[0] == (span(1, 5, 9), True)


def test_late_commit_of_a_streaming_run_has_the_ranges_of_its_materializations(
    ground: Ground,
) -> None:
    @dg.op
    def show(context) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates the annotation
        for ranges in ([span(1, 0, 5), span(0, 0, 9)], [span(1, 5, 9)]):
            shown = KafkaBatch.for_testing(ranges).metadata()
            context.log_event(dg.AssetMaterialization("work", metadata=shown))

    @dg.job
    def streaming() -> None:
        show()

    run_id = streaming.execute_in_process(instance=ground.instance).run_id
    wanted = RecordCommit(span(1, 0, 9), 1, "s.x.1.1", run_id, 0, None, None, is_late=True)
    ground.catalogue.record_commits([wanted])
    assert past(ground) == [(span(1, 5, 9), True), (span(1, 0, 5), True)]


def test_late_commit_has_the_ranges_of_a_joined_materialization(ground: Ground) -> None:
    ranges = JoinedRanges()
    for number, batch in enumerate(([span(1, 0, 5), span(0, 0, 9)], [span(1, 5, 9)]), 1):
        ranges.add(batch, number)

    @dg.op
    def show(context) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates the annotation
        packed = dg.MetadataValue.json({"ranges": ranges.packed()})
        shown = {"ranges": dg.MetadataValue.md(str(ranges)), "joined": packed}
        context.log_event(dg.AssetMaterialization("work", metadata=shown))

    @dg.job
    def streaming() -> None:
        show()

    run_id = streaming.execute_in_process(instance=ground.instance).run_id
    for until, whole in ((9, [(span(1, 5, 9), True), (span(1, 0, 5), True)]), (8, [])):
        wanted = RecordCommit(span(1, 0, until), 1, "s.x.1.1", run_id, 0, None, None, is_late=True)
        ground.catalogue.record_commits([wanted])
        assert past(ground)[:2] == (whole or [(span(1, 0, 8), False), (span(1, 5, 9), True)])


def test_only_the_needed_part_of_the_history_is_read(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dagster_rebalance.orchestration.storage.commit_history._RECORDS_PER_QUERY", 2
    )
    ranges = [span(0, 20, 30), span(0, 10, 20), span(0, 0, 10)]
    assert [found for found, _ in past(ground, 0)] == ranges
    assert [found for found, _ in past(ground, 0, start=15)] == ranges[:2]
    newest = next(processed(ground.instance, ground.assets.offsets, tp(0)))
    assert past(ground, 0, since=newest.at + 2.0) == []


def test_manual_materializations_are_no_history(ground: Ground) -> None:
    reported: list[dict[str, Any]] = [
        {},
        {"start": 9, "until": 3, "run": "x"},
        {"start": "a", "until": 3, "run": "x"},
    ]
    for metadata in reported:
        ground.instance.report_runless_asset_event(
            dg.AssetMaterialization(ground.assets.offsets, partition="orders-1", metadata=metadata)
        )
    assert past(ground) == []


# Asking


def test_rerun_is_planned_stored_and_shown(ground: Ground) -> None:
    planned = ground.reruns.plan(ground.wanted(Span(12), "orders-0", records_per_run=10))
    assert planned.selection.ranges == (span(0, 10, 20), span(0, 20, 30))
    assert ground.book.read() == ()
    said = ground.reruns.begin(planned)
    assert said.startswith(f"rerun {planned.rerun.rerun_id} by ada: the fix: 2 runs, at most 2 at")
    assert ground.book.read() == planned.batches
    assert (
        Reruns(ground.instance, ground.kafka)
        .open_ones()[0]
        .startswith(f"{planned.rerun}: 0 of 2 runs are done, requested at 20")
    )
    (event,) = ground.shown(ground.assets.group)
    assert (event["event"], event["by"], event["reason"]) == ("rerun", "ada", "the fix")
    assert event["partitions"] == ["orders-0"]


@pytest.mark.parametrize(
    ("meant", "partitions", "said"),
    [
        (Span(0), ("*",), "offsets apply to one partition"),
        (ALL, ("payments",), "payments matches no partition of group"),
        (Span(0), ("orders:1",), "there is nothing to process again"),
    ],
)
def test_rerun_without_matching_ranges_is_refused(
    ground: Ground, meant: Span, partitions: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ground.reruns.plan(ground.wanted(meant, *partitions))
    with pytest.raises(ConfigurationError, match="name the partitions to process again"):
        ground.reruns.plan(RerunRequest((), ALL, "ada", "the fix"))
    assert ground.book.read() == ()


def test_rerun_of_deleted_records_or_of_a_running_rerun_is_refused(ground: Ground) -> None:
    ground.begin(Span(20))
    with pytest.raises(ConfigurationError, match="already includes orders-0"):
        ground.reruns.plan(ground.wanted())
    ground.group.delete_before(tp(0), 5)
    with pytest.raises(ConfigurationError, match="begins at 10: rerun orders:0 --from-offset 10"):
        ground.reruns.plan(ground.wanted(Span(0, 20), "orders:0"))


def test_rerun_is_refused_while_a_leader_is_silent(ground: Ground) -> None:
    ground.group.silence(tp(0))
    with pytest.raises(BrokerError, match="orders-0"):
        ground.reruns.plan(ground.wanted())


def test_first_of_two_concurrent_reruns_gets_the_ranges(ground: Ground) -> None:
    first, second = (ground.reruns.plan(ground.wanted()) for _ in range(2))
    ground.reruns.begin(first)
    with pytest.raises(ConfigurationError, match="was requested at the same moment"):
        ground.reruns.begin(second)
    assert ground.book.read() == first.batches


def test_longest_rerun_batch_fits(ground: Ground) -> None:
    """Postgres takes no key of more than 2,704 bytes."""
    letters = [span(0, n, n + 1) for n in range(10**17, 10**17 + 100, 2)]
    for topic in ("", "d" * 249):
        rerun = Rerun("abcdefgh", "\U0001f6d1" * 60, "\U0001f6d1" * 300, 1.0, 2, 1, topic)
        batches = batches_of(rerun, letters, records_per_run=100)
        ground.book.add(batches)
        assert ground.book.read() == batches
        assert (
            max(map(len, ground.instance.get_dynamic_partitions(ground.assets.reruns_name))) > 900
        )
        ground.book.remove(batches)


def test_unreadable_rerun_is_an_error(ground: Ground) -> None:
    ground.instance.add_dynamic_partitions(ground.assets.reruns_name, ['["abc", 1]'])
    with pytest.raises(ConfigurationError, match="a newer version may have written it"):
        ground.book.read()
    said = ground.tick().skip_message
    assert said.startswith("it rests; reruns could not be scheduled: the rerun batch"), (
        "the rest goes on"
    )


def test_deleted_run_of_a_rerun_is_ended_on_all_its_ranges(ground: Ground) -> None:
    """Otherwise each next run finds its note and refuses itself."""
    ground.begin()
    (batch,) = ground.book.read()
    ranges = (*batch.ranges, span(1, 0, 10))
    ground.book.remove([batch])
    ground.book.add([replace(batch, ranges=ranges)])
    claims = [(batch.batch_id, range_) for range_ in ranges]
    notes = RangeOwners(ground.instance)
    notes.begin("gone", 1, claims)
    notes.finish("gone", 1, claims)
    for _ in range(2):
        ground.tick()
    assert notes.read(claims) == {}


def test_rerun_is_cancelled_although_one_of_its_runs_cannot_be(ground: Ground) -> None:
    rerun_id = ground.begin()
    (batch,) = ground.book.read()
    wanted = batch_request(batch.batch_id, *batch.ranges)
    runs = [
        make_run(ground.instance, wanted, Status.NOT_STARTED, group_id=ground.group_id)
        for _ in range(3)
    ]
    real = RunLedger.cancel

    def cancel(ledger: RunLedger, run_id: str, *, only_unstarted: bool = False) -> None:
        if run_id == runs[1].run_id:
            message = "no right to delete jobs"
            raise ConfigurationError(message)
        real(ledger, run_id, only_unstarted=only_unstarted)

    ground.monkeypatch.setattr(RunLedger, "cancel", cancel)
    with pytest.raises(ConfigurationError, match=f"{runs[1].run_id}: no right to delete jobs"):
        ground.reruns.cancel(rerun_id)
    assert [status_of(ground.instance, run) for run in runs] == [
        Status.CANCELED,
        Status.NOT_STARTED,
        Status.CANCELED,
    ]
    assert ground.shown(ground.assets.group)[0]["event"] == "rerun_cancelled"


def test_cancelled_rerun_ends_its_runs(ground: Ground) -> None:
    rerun_id = ground.begin()
    (batch,) = ground.book.read()
    wanted = batch_request(batch.batch_id, *batch.ranges)
    run = make_run(ground.instance, wanted, Status.NOT_STARTED, group_id=ground.group_id)
    with pytest.raises(
        ConfigurationError, match=f"no unfinished rerun 'xyz'; unfinished: {rerun_id}"
    ):
        ground.reruns.cancel("xyz")
    assert "0 of 1 runs were done, 1 live ones are cancelled" in ground.reruns.cancel(rerun_id)
    assert status_of(ground.instance, run) is Status.CANCELED
    assert ground.reruns.open_ones() == []
    assert ground.shown(ground.assets.group)[0]["event"] == "rerun_cancelled"
    ground.begin()


def test_run_of_a_cancelled_rerun_that_dies_does_not_keep_its_ranges(ground: Ground) -> None:
    """A run whose process ended while it was cancelled would be CANCELING forever."""
    rerun_id = ground.begin()
    (batch,) = ground.book.read()
    alive, dead = (
        make_run(
            ground.instance,
            batch_request(batch.batch_id, *ranges),
            Status.CANCELING,
            group_id=ground.group_id,
            tags=rerun_tags(batch.rerun),
        )
        for ranges in ([span(1, 0, 10)], batch.ranges)
    )
    ground.reruns.cancel(rerun_id)
    now = time.time()
    ground.monkeypatch.setattr(time, "time", lambda: now)
    give_sign(ground.instance, dead, "0 elsewhere:1:1")
    for beat in range(5):
        with pytest.raises(ConfigurationError, match=f"run {dead.run_id[:8]} of rerun"):
            ground.begin()
        give_sign(ground.instance, alive, f"{beat} elsewhere:2:1")
        ground.tick()
        now += ground.kafka.heartbeat_timeout_s / 4
    assert status_of(ground.instance, dead) is Status.FAILURE
    assert status_of(ground.instance, alive) is Status.CANCELING
    ground.begin()


def test_cancelled_rerun_counts_runs_that_ended_since_the_last_tick(
    ground: Ground,
) -> None:
    rerun_id = ground.begin(records_per_run=10)
    succeeded, said, run_id = ground.run(batch_request(f"r.{rerun_id}.1", span(0, 0, 10)))
    assert succeeded, said
    assert "1 of 3 runs were done, 0 live ones are cancelled" in ground.reruns.cancel(rerun_id)
    event = ground.shown(ground.assets.offsets)[0]
    assert (event["event"], event["run"]) == ("reprocessed", run_id)
    observed = ground.instance.fetch_observations(ground.assets.group, limit=1).records[0]
    assert observed.asset_observation is not None
    assert "cancelled, 2 ranges left" in str(observed.asset_observation.description)


def test_tick_does_not_record_a_rerun_as_done_that_is_cancelled_during_it(ground: Ground) -> None:
    rerun_id = ground.begin(records_per_run=10)
    succeeded, said, _ = ground.run(batch_request(f"r.{rerun_id}.1", span(0, 0, 10)))
    assert succeeded, said
    real = Catalogue.record_reprocessed

    def cancelled_first(catalogue: Catalogue, batch: RerunBatch, run_id: str) -> None:
        ground.monkeypatch.setattr(Catalogue, "record_reprocessed", real)
        ground.reruns.cancel(rerun_id)
        real(catalogue, batch, run_id)

    ground.monkeypatch.setattr(Catalogue, "record_reprocessed", cancelled_first)
    ground.tick()
    assert [shown["event"] for shown in ground.shown(ground.assets.group)] == [
        "rerun_cancelled",
        "rerun",
    ]


def replayed(ground: Ground, *topics: str) -> list[str]:
    """Store and run one replay of each dead-letter topic; return their ids."""
    rerun_ids = [f"replay{number}" for number in range(len(topics))]
    for number, (rerun_id, topic) in enumerate(zip(rerun_ids, topics, strict=True)):
        range_ = span(0, 10 * number, 10 * number + 10)
        rerun = Rerun(rerun_id, "ada", "the fix", time.time(), letters=topic)
        ground.book.add([RerunBatch(rerun, 1, (range_,))])
        succeeded, said, _ = ground.run(batch_request(f"r.{rerun_id}.1", range_))
        assert succeeded, said
    return rerun_ids


def refuse(ground: Ground, topic: str, error: BrokerError) -> list[tuple[str, float]]:
    """Let Kafka refuse a dead-letter topic; return the reads. Other topics are empty."""
    reads: list[tuple[str, float]] = []

    def read(letters: DeadLetterTopic, *, limit_s: float) -> LetterFold:
        reads.append((letters.name, limit_s))
        if letters.name == topic:
            raise error
        return LetterFold()

    ground.monkeypatch.setattr(DeadLetterTopic, "read", read)
    return reads


GONE = BrokerError("no such topic", retriable=True, topics=["gone"])


def test_topic_of_a_replay_that_is_gone_delays_no_other_replay(ground: Ground) -> None:
    gone, _ = replayed(ground, "gone", "letters")
    refuse(ground, "gone", GONE)
    said = str(ground.tick().skip_message)
    assert [batch.rerun.rerun_id for batch in ground.book.read()] == [gone]
    assert f"no such topic; to end it, use dagster-rebalance rerun --cancel {gone}" in said


def test_one_read_of_at_most_5_s_without_an_answer_serves_all_finished_batches(
    ground: Ground,
) -> None:
    run = dg.DagsterRun("job")
    ground.instance.add_run(run)
    reads = refuse(ground, "silent", BrokerError("no broker", retriable=True))
    kafka = ground.kafka.model_copy(update={"dead_letter_topic": "silent"})
    known: TopicReads = {}
    for number in range(3):
        batch = RerunBatch(Rerun("abc", "ada", "the fix", 0.0), number, (span(0, 0, 10),))
        assert "no broker" in mark_replayed(ground.instance, kafka, batch, run.run_id, known)
    replay = Rerun("def", "ada", "the fix", 0.0, letters="answers")
    for number in range(3):
        batch = RerunBatch(replay, number, (span(0, 0, 10),))
        assert not mark_replayed(ground.instance, kafka, batch, run.run_id, known)
    assert reads == [("silent", 5.0), ("answers", 5.0)]


def test_error_of_a_source_topic_delays_no_other_batch(ground: Ground) -> None:
    run = dg.DagsterRun("job")
    ground.instance.add_run(run)
    error = BrokerError("no leader", retriable=True, partitions={tp(0): "no leader"})
    reads = refuse(ground, "letters", error)
    batch = RerunBatch(Rerun("abc", "ada", "the fix", 0.0, letters="letters"), 1, (span(0, 0, 10),))
    known: TopicReads = {}
    for _ in range(2):
        with pytest.raises(BrokerError, match="no leader"):
            mark_replayed(ground.instance, ground.kafka, batch, run.run_id, known)
    assert len(reads) == 2


@pytest.mark.parametrize("error", [GONE, BrokerError("may not be written")])
def test_cancel_ends_a_replay_whose_letters_cannot_be_marked(
    ground: Ground, error: BrokerError
) -> None:
    (rerun_id,) = replayed(ground, "gone")
    refuse(ground, "gone", error)
    said = ground.reruns.cancel(rerun_id)
    assert f"letters of {span(0, 0, 10)} in topic gone could not be marked as replayed" in said
    assert str(error) in said
    assert "discard these letters" in said
    assert not ground.book.read()


def test_cancel_keeps_finished_batches_of_a_replay_while_kafka_is_away(ground: Ground) -> None:
    (rerun_id,) = replayed(ground, "letters")
    refuse(ground, "letters", BrokerError("no broker", retriable=True))
    assert "the next tick marks the letters of" in ground.reruns.cancel(rerun_id)
    assert "no broker" in str(ground.tick().skip_message)
    assert len(ground.book.read()) == 1


def test_time_may_have_a_zone() -> None:
    assert time_of("2026-11-23T14:00+01:00") == time_of("2026-11-23T13:00Z")
    assert time_of("2026-11-23T13:00") == time_of("2026-11-23T13:00Z")
    with pytest.raises(ConfigurationError, match="'soon' is not a time"):
        time_of("soon")


# The sensor


def test_sensor_starts_the_runs_of_a_rerun_and_records_its_end(ground: Ground) -> None:
    assert ground.tick().skip_message == "it rests"
    rerun_id = ground.begin(records_per_run=10, runs_at_once=1)
    committed = dict(ground.group.committed)
    assert not ground.tick(real=False).run_requests
    for number in (1, 2, 3):
        (request,) = ground.tick().run_requests
        batch_id = f"r.{rerun_id}.{number}"
        assert (
            request.tags.items()
            >= {
                BATCH_TAG: batch_id,
                GROUP_TAG: ground.group_id,
                RERUN_TAG: rerun_id,
                RERUN_BY_TAG: "ada",
                RERUN_REASON_TAG: "the fix",
            }.items()
        )
        succeeded, said, run_id = ground.run(
            batch_request(batch_id, span(0, 10 * number - 10, 10 * number))
        )
        assert succeeded, said
        assert len(ground.tick().run_requests or ()) == (number < 3)
        event = ground.shown(ground.assets.offsets)[0]
        assert (event["event"], event["run"], event["batch"]) == ("reprocessed", run_id, batch_id)
    assert ground.worked == [span(0, 0, 10), span(0, 10, 20), span(0, 20, 30)]
    assert ground.tick().skip_message == "it rests"
    assert ground.shown(ground.assets.group)[0]["event"] == "rerun_done"
    assert ground.group.committed == committed
    assert len(ground.instance.fetch_materializations(ground.assets.offsets, limit=9).records) == 3


def test_one_code_location_schedules_reruns(ground: Ground) -> None:
    """Each run would be started twice, and the two would refuse each other."""
    ground.begin()
    assert ground.tick(location="blue").run_requests
    assert f"blue:{ground.name}_sensor schedules" in ground.tick(location="green").skip_message
    ground.monkeypatch.setattr(rerun_tick, "_LEASE_S", -10.0)
    assert ground.tick(location="green").run_requests


def test_stop_of_a_partition_cancels_the_run_of_its_rerun(ground: Ground) -> None:
    ground.begin()
    (batch,) = ground.book.read()
    wanted = batch_request(batch.batch_id, *batch.ranges)
    run = make_run(ground.instance, wanted, Status.NOT_STARTED, group_id=ground.group_id)
    issue_directive(
        ground.instance, ground.group_id, DirectiveRequest(Action.STOP, ["orders:0"], "bob", "away")
    )
    assert "orders:0 is stopped by bob" in ground.tick().skip_message
    assert status_of(ground.instance, run) is Status.CANCELED
    assert not ground.tick().run_requests
    issue_directive(
        ground.instance, ground.group_id, DirectiveRequest(Action.RESUME, ["orders:0"], "bob")
    )
    (request,) = ground.tick().run_requests
    assert request.run_key.endswith(".2")


def test_launcher_that_cannot_cancel_fails_no_tick(ground: Ground) -> None:
    ground.begin()
    (batch,) = ground.book.read()
    wanted = batch_request(batch.batch_id, *batch.ranges)
    make_run(ground.instance, wanted, Status.NOT_STARTED, group_id=ground.group_id)
    issue_directive(
        ground.instance, ground.group_id, DirectiveRequest(Action.STOP, ["orders:0"], "bob", "away")
    )

    def fails(*_: object, **__: object) -> None:
        message = "no right to delete jobs"
        raise ConfigurationError(message)

    ground.monkeypatch.setattr(RunLedger, "cancel", fails)
    assert "orders:0 is stopped by bob" in ground.tick().skip_message


# The runs


def test_run_of_a_cancelled_rerun_refuses_itself(ground: Ground) -> None:
    rerun_id = ground.begin()
    ground.reruns.cancel(rerun_id)
    succeeded, said, run_id = ground.run(batch_request(f"r.{rerun_id}.1", span(0, 0, 10)))
    assert not succeeded
    assert "no rerun includes these ranges" in said
    assert "dagster_rebalance/refused" in tags_of(ground.instance, run_id)
    assert ground.worked == []


def test_streaming_job_processes_the_batch_of_a_rerun(ground: Ground) -> None:
    @dg.asset(
        name=f"{ground.name}_orders",
        check_specs=[dg.AssetCheckSpec("counted", asset=f"{ground.name}_orders")],
    )
    def orders(kafka_batch):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - Dagster evaluates it
        ground.worked += kafka_batch.offset_ranges
        counted = dg.AssetCheckResult(passed=True, check_name="counted")
        return dg.MaterializeResult(metadata={"rows": 7}, check_results=[counted])

    streaming = build_kafka_stream_defs(
        kafka=ground.kafka, assets=[orders], name="stream", version="v1"
    )
    rerun_id = ground.begin(Span(10))
    wanted = batch_request(f"r.{rerun_id}.1", span(0, 10, 20), span(0, 20, 30))
    result = streaming.resolve_job_def("stream").execute_in_process(
        instance=ground.instance,
        tags=run_tags(wanted, ground.group_id),
        run_config=run_config(wanted, "stream_rerun_batch"),
        raise_on_error=False,
    )
    assert result.success
    assert ground.worked == [span(0, 10, 20), span(0, 20, 30)]
    (made,) = ground.instance.fetch_materializations(orders.key, limit=5).records
    assert made.asset_materialization is not None
    shown = {name: value.value for name, value in made.asset_materialization.metadata.items()}
    assert (shown["rows"], shown["batch"], shown["offsets"]) == (7, wanted.batch_id, 20)
    assert len(result.get_asset_check_evaluations()) == 1


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
def test_run_of_a_rerun_plays_every_form_of_asset(ground: Ground) -> None:
    forms = [form for form in ROWS if not form.stream]
    SEEN.clear()
    streaming = build_kafka_stream_defs(
        kafka=ground.kafka,
        assets=[asset for form in forms for asset in form.given],
        name="stream",
        resources={key: one for form in forms for key, one in form.resources.items()},
    )
    wanted = batch_request(f"r.{ground.begin(Span(10))}.1", span(0, 10, 20), span(0, 20, 30))
    result = streaming.resolve_job_def("stream").execute_in_process(
        instance=ground.instance,
        tags=run_tags(wanted, ground.group_id),
        run_config=run_config(wanted, "stream_rerun_batch"),
    )
    assert result.success
    outcome = outcome_of(ground.instance, result.run_id)
    for form in forms:
        form.check(outcome)


def test_run_of_a_rerun_does_not_belong_to_a_claim(ground: Ground) -> None:
    make_run(
        ground.instance,
        batch_request("r.abc.1", span(0, 0, 10)),
        Status.STARTED,
        group_id=ground.group_id,
    )
    ledger = RunLedger(ground.instance, ground.group_id)
    assert ledger.read(["b-1"], claims=[("b-1", span(0, 0, 10))]) == ()
    assert [run.batch_id for run in ledger.read(["b-1"], with_live=True)] == ["r.abc.1"]


# The job


def ask(ground: Ground, **config: Any) -> tuple[bool, str]:  # noqa: ANN401 - fields of all kinds
    name = f"{ground.name}_rerun"
    result = ground.defs.resolve_job_def(name).execute_in_process(
        instance=ground.instance,
        run_config={"ops": {f"{name}_request": {"config": config}}},
        raise_on_error=False,
    )
    entries = ground.instance.all_logs(result.run_id)
    return result.success, " ".join(entry.user_message for entry in entries) + json.dumps(
        [str(event.event_specific_data) for event in result.all_events if event.is_failure]
    )


def test_launchpad_plans_and_starts_a_rerun(ground: Ground) -> None:
    form = {"partitions": ["orders:0"], "from_offset": 5, "reason": "the fix", "by": "ada"}
    succeeded, said = ask(ground, **form, until_offset=15)
    assert succeeded, said
    assert "run 1: orders-0 [0, 10) (as a whole, although only a part was selected)" in said
    assert "this is a dry run" in said
    assert ground.book.read() == ()
    succeeded, said = ask(ground, **form, until_offset=40, dry_run=False)
    assert succeeded, said
    assert "left out: orders-0 [30, 40): not committed yet" in said
    (batch,) = ground.book.read()
    assert f"{batch.rerun}: 1 run, at most 2 at once" in said
    succeeded, said = ask(ground, cancel=batch.rerun.rerun_id)
    assert succeeded, said
    assert ground.book.read() == ()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "name the partitions"),
        ({"partitions": ["*"]}, "name the part to process again"),
        ({"partitions": ["*"], "since": "soon"}, "'soon' is not a time"),
        ({"partitions": ["*"], "since": "2020-01-01", "until": "2020-01-02"}, "give a name"),
        ({"since": "2020-01-01", "by": "ada", "reason": "x"}, "name the partitions"),
    ],
)
def test_invalid_form_is_refused(ground: Ground, config: dict[str, Any], problem: str) -> None:
    succeeded, said = ask(ground, **config)
    assert not succeeded
    assert problem in said
    assert ground.book.read() == ()


def test_long_list_is_cut_in_the_log(ground: Ground) -> None:
    ground.commit(*(span(1, n, n + 1) for n in range(120)))
    ground.group.produce(tp(1), 200)
    succeeded, said = ask(ground, partitions=["orders:1"], since="2020-01-01", reason="x", by="ada")
    assert succeeded, said
    assert "and 20 more ranges" in said


def test_span_of_time_selects_by_commit_time(ground: Ground) -> None:
    commits = list(processed(ground.instance, ground.assets.offsets, tp(0)))
    planned = ground.reruns.plan(ground.wanted(Span(since=commits[0].at)))
    assert planned.selection.ranges == (commits[0].range,)
