"""`dagster-rebalance letters replay` on a real Kafka, with the runs of the group's job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from confluent_kafka import Message, Producer
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import AdminClient

from dagster_rebalance import RecordFilter, build_kafka_batch_defs
from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.core.model.letters import LetterKind, LetterState, StateChange
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.core.model.run_snapshot import BatchRequest
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
from dagster_rebalance.orchestration import builders
from dagster_rebalance.orchestration.batch import resource as batch_resource
from dagster_rebalance.orchestration.operators.letters import LetterRequest, plan_replay
from dagster_rebalance.orchestration.operators.replayed_letters import mark_replayed
from dagster_rebalance.orchestration.operators.requests import Reruns
from dagster_rebalance.orchestration.per_batch import batch_sensor
from dagster_rebalance.orchestration.per_batch.hosted_members import Members
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import (
    RERUN_BY_TAG,
    RERUN_TAG,
    SET_ASIDE_TAG,
    run_config,
    run_tags,
)
from dagster_rebalance.testing.fixtures import unique_name
from tests.cli.command_line import invoke
from tests.cli.test_letters import AT_MS, Ward, ward
from tests.orchestration.operators.test_reruns import Resting

if TYPE_CHECKING:
    from dagster_rebalance.core.model.letters import Letter

__all__ = ["ward"]
pytestmark = pytest.mark.broker
RECORDS = 20
WHY = ("--why", "the fix", "--by", "ada")


class Ground:
    """A group that has committed 20 records of partition 0, and its code."""

    def __init__(self, ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ward = ward
        self.instance = ward.instance
        self.monkeypatch = monkeypatch
        producer = Producer(ward.kafka.client_config())
        for number in range(RECORDS):
            producer.produce(
                ward.orders,
                key=f"k{number}",
                value=f"v{number}",
                headers=[("n", str(number).encode())],
                partition=0,
                timestamp=AT_MS + number,
            )
        assert producer.flush(120) == 0
        self.partition = TopicPartition(ward.orders, 0)
        stored = {self.partition: OffsetAndMetadata(RECORDS)}
        ward.resource.group().move(stored, shown={self.partition: None})
        self.read: list[Message] = []
        self.ranges: list[OffsetRange] = []
        self.fault: Exception | None = None
        self.sets_aside: set[int] = set()
        self.name = unique_name("replay").replace("-", "_")
        self.defs = build_kafka_batch_defs(
            kafka=ward.resource, assets=[self._asset()], name=self.name
        )

    def _asset(self) -> dg.AssetsDefinition:
        @dg.asset(name="work", required_resource_keys={"kafka_batch"})
        def work(context) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates the annotation
            batch = context.resources.kafka_batch
            assert batch.is_rerun
            bad = [one for one in batch.messages() if one.offset() in self.sets_aside]
            if bad:
                assert batch.set_aside(bad, "still bad") == len(bad)
            if self.fault is not None:
                raise self.fault
            rows = batch.arrow().read_all().num_rows if batch.records else 0
            found = [*batch.messages()]
            assert rows == len(found)
            self.read += found
            self.ranges += batch.offset_ranges

        return work

    def failed_range(self, start: int, until: int) -> Letter:
        """Record a range as a dead letter, and return the letter."""
        range_ = OffsetRange(self.ward.orders, 0, start, until)
        catalogue = Catalogue(self.instance, GroupAssets.of(self.ward.orders), NO_MEMBER)
        commit = RecordCommit(range_, 1, "b-1", "run-1", 0, None, None, is_dead_letter=True)
        catalogue.record_commits([commit])
        return replace(self.ward.letter(start, kind=LetterKind.RANGE, value=b"{}"), range=range_)

    def record(self, offset: int, **more: Any) -> Letter:  # noqa: ANN401 - fields of a letter
        """Return the letter of a record, with a copy that differs from the record."""
        return self.ward.letter(
            offset,
            value=b"copy",
            record_key=f"k{offset}".encode(),
            headers=(("n", str(offset).encode()),),
            timestamp_ms=AT_MS + offset,
            **more,
        )

    def tick(self) -> Any:  # noqa: ANN401 - Dagster's class is private
        for module, name, value in (
            (batch_sensor, "MEMBERS", Members()),
            (batch_sensor, "_host", lambda *_, **__: Resting()),
            (batch_sensor, "is_real_tick", lambda _context: True),
            (builders, "location_of", lambda _context: "shop"),
        ):
            self.monkeypatch.setattr(module, name, value)
        sensor = f"{self.name}_sensor"
        with dg.build_sensor_context(
            instance=self.instance,
            definitions=self.defs,
            sensor_name=sensor,
            resources={"kafka": self.ward.resource},
        ) as context:
            return self.defs.resolve_sensor_def(sensor).evaluate_tick(context)

    def run(self, request: dg.RunRequest) -> Any:  # noqa: ANN401 - Dagster's class is private
        return self.defs.resolve_job_def(self.name).execute_in_process(
            instance=self.instance,
            tags=request.tags,
            run_config=request.run_config,
            raise_on_error=False,
        )

    def replay(self, *keys: str) -> list[Any]:
        """Request a replay, and execute its runs, and return their results."""
        self.ward.output("replay", *(keys or ("--all",)), *WHY, "--yes")
        return [self.run(request) for request in self.tick().run_requests]

    def discard(self, key: str) -> None:
        """Discard a letter."""
        change = StateChange(key, LetterState.DISCARDED, "bob", "a test order", AT_MS + 1_000)
        DeadLetterTopic(self.ward.resource).change([change])

    def states(self) -> dict[str, str]:
        """Return the state of each letter."""
        return {one["key"]: one["state"] for one in self.ward.listed("--state", "all")["letters"]}


@pytest.fixture
def ground(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(ward, monkeypatch)


def positions(messages: list[Message]) -> list[tuple[int | None, Any]]:
    return sorted((message.offset(), message.value()) for message in messages)


def test_replay_processes_the_records_of_letters_and_marks_them(ground: Ground) -> None:
    ward = ground.ward
    letters = [ground.record(3), ground.record(12), ground.failed_range(5, 8), ground.record(6)]
    ward.store(*letters)
    shown = ward.output("replay", "--all", *WHY)
    assert "Nothing was started: add --yes" in shown
    assert f"left out: {ward.orders}-0 [6, 7): the letter of {ward.orders}-0 [5, 8) inc" in shown
    assert "3 ranges, 5 offsets, 1 run" in shown
    assert not ground.tick().run_requests

    said = ward.output("replay", "--all", *WHY, "--yes")
    assert "by ada: the fix: 1 run, at most 2 at once. The sensor" in said
    with pytest.raises(ConfigurationError, match=r"nothing to replay: .* already includes it"):
        ward.output("replay", letters[0].key, *WHY)
    (request,) = ground.tick().run_requests
    assert (request.tags[RERUN_BY_TAG], bool(request.tags[RERUN_TAG])) == ("ada", True)
    result = ground.run(request)
    assert result.success
    assert set(ground.states().values()) == {"open"}, "no tick has seen the success of its run"
    assert not ground.tick().run_requests
    assert ground.states() == {letter.key: "replayed" for letter in letters}
    (shown_letter,) = [
        one for one in ward.listed("--state", "replayed")["letters"] if one["start"] == 3
    ]
    assert (shown_letter["by"], shown_letter["why"]) == ("ada", "the fix")
    assert f"in run {result.run_id}: the fix" in ward.output("show", letters[0].key)
    assert positions(ground.read) == [
        (offset, f"v{offset}".encode()) for offset in (3, 5, 6, 7, 12)
    ]
    assert ground.ranges == [
        OffsetRange(ward.orders, 0, *bounds) for bounds in ((3, 4), (5, 8), (12, 13))
    ]
    with ward.resource.connect() as consumer:
        stored = consumer.committed([ground.partition])[ground.partition]
    assert stored == OffsetAndMetadata(RECORDS)


def test_record_that_kafka_has_deleted_comes_from_its_letter(ground: Ground) -> None:
    ward = ground.ward
    ward.store(ground.record(3), ground.record(12), ground.failed_range(4, 6))
    admin = AdminClient({**ward.kafka.client_config()})
    for future in admin.delete_records([Partition(ward.orders, 0, 10)]).values():
        future.result(120)
    with pytest.raises(ConfigurationError, match=r"has deleted its records .* discard it"):
        ward.output("replay", f"{ward.orders}-0-4-6", *WHY)
    (result,) = ground.replay(f"{ward.orders}-0-3", f"{ward.orders}-0-12")
    assert result.success
    copy, original = sorted(ground.read, key=lambda message: message.offset() or 0)
    assert (copy.value(), original.value()) == (b"copy", b"v12")
    assert (copy.key(), copy.headers(), copy.timestamp()) == (
        b"k3",
        [("n", b"3")],
        (1, AT_MS + 3),
    )
    assert (original.key(), original.headers(), original.timestamp()) == (
        b"k12",
        [("n", b"12")],
        (1, AT_MS + 12),
    )


def test_letters_of_a_failed_run_and_of_records_set_aside_again_stay_open(ground: Ground) -> None:
    ward = ground.ward
    bad = ground.record(3)
    ward.store(bad)
    ground.fault = ValueError("still bad")
    (result,) = ground.replay(bad.key)
    assert not result.success
    ground.tick()  # ends the run, whose process goes on in this test
    assert "halted, because" in str(ground.tick().skip_message)
    assert ground.states() == {bad.key: "open"}
    rerun_id = result.dagster_run.tags[RERUN_TAG]
    assert "is cancelled" in invoke("rerun", "--cancel", rerun_id, "--group", ward.orders).output

    good = ground.record(12)
    ward.store(good)
    ground.fault, ground.sets_aside = None, {3}
    (result,) = ground.replay()
    assert result.success
    assert "set records aside, whose letters stay" in str(ground.tick().skip_message)
    assert ground.states() == {bad.key: "open", good.key: "replayed"}

    ground.sets_aside = set()
    (result,) = ground.replay(bad.key)
    assert result.success
    ground.tick()
    assert ground.states() == {bad.key: "replayed", good.key: "replayed"}
    with pytest.raises(ConfigurationError, match=f"{bad.key} is already replayed by ada"):
        ward.output("replay", bad.key, *WHY)


def test_replay_of_a_range_closes_the_letters_of_its_records(ground: Ground) -> None:
    """Also those that are not named, but not those whose record is set aside again."""
    whole, unnamed, again = ground.failed_range(10, 15), ground.record(12), ground.record(13)
    ground.ward.store(whole, unnamed, again)
    ground.sets_aside = {13, 14}
    (result,) = ground.replay(whole.key)
    assert result.success
    ground.tick()
    assert ground.states() == {
        whole.key: "replayed",
        unnamed.key: "replayed",
        again.key: "open",
        ground.record(14).key: "open",
    }


def test_range_is_not_replayed_over_a_record_that_was_replayed_before(ground: Ground) -> None:
    whole, one = ground.failed_range(5, 8), ground.record(6)
    ground.ward.store(whole, one)
    (result,) = ground.replay(one.key)
    assert result.success
    ground.tick()
    with pytest.raises(ConfigurationError, match="was replayed alone") as refused:
        ground.replay(whole.key)
    assert ground.states() == {whole.key: "open", one.key: "replayed"}

    way_out = str(refused.value).partition("use dagster-rebalance ")[2].split()
    shown = invoke(*way_out, "-r", "the fix", "--group", ground.ward.orders, "--yes").output
    assert "at most 2 at once" in shown
    (request,) = ground.tick().run_requests
    assert ground.run(request).success
    ground.tick()
    assert ground.states() == {whole.key: "replayed", one.key: "replayed"}


def test_replay_that_is_refused_changes_no_letter(ground: Ground) -> None:
    whole, one = ground.failed_range(10, 15), ground.record(12)
    ground.ward.store(whole, one)
    place = (ground.instance, ground.ward.resource)
    request = LetterRequest((), everything=True, containing="", by="ada", why="the fix")
    first, second = plan_replay(*place, request), plan_replay(*place, request)
    Reruns(*place).begin(first)
    with pytest.raises(ConfigurationError):
        Reruns(*place).begin(second)
    assert set(ground.states().values()) == {"open"}


def test_rerun_closes_the_letters_of_its_records(ground: Ground) -> None:
    letters = [ground.record(3), ground.record(4), ground.record(12)]
    ground.ward.store(*letters)
    run = dg.DagsterRun("job")
    run = run.with_tags({SET_ASIDE_TAG: f"{run.run_id} {letters[1].key}"})
    ground.instance.add_run(run)
    batch = RerunBatch(
        Rerun("abc", "ada", "the fix", 0.0), 1, (OffsetRange(ground.ward.orders, 0, 0, 10),)
    )
    old = replace(ground.record(5), timestamp_ms=AT_MS - 1, time_ms=AT_MS - 1)
    ground.ward.store(old)
    said = mark_replayed(ground.instance, ground.ward.resource, batch, run.run_id)
    assert "set records aside, whose letters stay open" in said
    assert [*ground.states().values()].count("open") == 3
    assert ground.states()[old.key] == "open", "of a log that was recreated since"
    assert ground.states()[letters[0].key] == "replayed"

    away = ground.ward.resource.model_copy(update={"dead_letter_topic": "no-such-topic"})
    assert "are still open" in mark_replayed(ground.instance, away, batch, run.run_id)


def test_replay_that_sets_many_records_aside_closes_the_other_letters(ground: Ground) -> None:
    """Its run closes them, because a tag cannot name all that stay open."""
    ground.monkeypatch.setattr(batch_resource, "_MOST_NAMED", 1)
    letters = [ground.record(offset) for offset in (3, 4, 12)]
    ground.ward.store(*letters)
    ground.sets_aside = {3, 4}
    (result,) = ground.replay()
    assert result.success
    ground.tick()
    assert [ground.states()[one.key] for one in letters] == ["open", "open", "replayed"]


def test_run_of_some_assets_closes_no_letters(ground: Ground) -> None:
    """Others may have set the records aside in an earlier attempt."""

    @dg.asset(required_resource_keys={"kafka_batch"})
    def first() -> None: ...

    @dg.asset(required_resource_keys={"kafka_batch"})
    def second() -> None: ...

    kafka, letter = ground.ward.resource, ground.record(3)
    ground.ward.store(letter)
    whole = OffsetRange(ground.ward.orders, 0, 0, RECORDS)
    claimed = encode(StoredPartition(0, (Claim(RECORDS, "b-9"),)))
    before = OffsetAndMetadata(RECORDS)
    kafka.group().move({ground.partition: claimed}, shown={ground.partition: before})
    job = build_kafka_batch_defs(
        kafka=kafka, assets=[first, second], name=ground.name
    ).resolve_job_def(ground.name)

    def run(**selection: Any) -> None:  # noqa: ANN401 - of Dagster
        request = BatchRequest("b-9", 2, (whole,))
        result = job.execute_in_process(
            instance=ground.instance,
            tags=run_tags(request, ground.ward.orders),
            run_config=run_config(request, "kafka_batch"),
            **selection,
        )
        RunLedger(ground.instance, ground.ward.orders).end_dead(result.run_id, "")

    run(asset_selection=[dg.AssetKey("second")])
    assert ground.states() == {letter.key: "open"}
    run()
    assert ground.states() == {letter.key: "replayed"}


def test_letter_that_is_discarded_before_its_run_is_not_processed(ground: Ground) -> None:
    letters = [ground.record(3), ground.record(12)]
    ground.ward.store(*letters)
    ground.ward.output("replay", "--all", *WHY, "--yes")
    ground.discard(letters[0].key)
    (request,) = ground.tick().run_requests
    assert ground.run(request).success
    ground.tick()
    assert positions(ground.read) == [(12, b"v12")]
    assert ground.states() == {letters[0].key: "discarded", letters[1].key: "replayed"}


def test_record_of_a_recreated_topic_is_not_replayed_instead_of_its_letter(ground: Ground) -> None:
    ground.ward.store(replace(ground.record(3), timestamp_ms=AT_MS - 1_000))
    (result,) = ground.replay()
    assert result.success
    assert positions(ground.read) == [(3, b"copy")]


def test_letter_whose_record_only_leaves_out_is_not_replayed(ground: Ground) -> None:
    """Without the plan of the job, too: the command line does not know `only`."""
    ward, letters = ground.ward, [ground.record(3), ground.record(12), ground.failed_range(5, 8)]
    ward.store(*letters)
    kafka = KafkaConsumerResource(
        bootstrap_servers=ward.kafka.bootstrap_servers,
        group_id=ward.orders,
        topics=[ward.orders],
        dead_letter_topic=ward.letters,
        only=RecordFilter(header_equals={"n": "12"}),
    )
    request = LetterRequest((), everything=True, containing="", by="ada", why="the fix")
    selected = plan_replay(ground.instance, kafka, request).selection
    assert [range_.start for range_ in selected.ranges] == [5, 12]
    (left_out,) = selected.left_out
    assert (left_out.range, "`only`" in left_out.why) == (letters[0].range, True)

    ward.resource = kafka
    ground.defs = build_kafka_batch_defs(kafka=kafka, assets=[ground._asset()], name=ground.name)
    (result,) = ground.replay(letters[0].key, letters[1].key)
    assert result.success
    assert positions(ground.read) == [(12, b"v12")]
    assert "`only` leaves out the records of letters that stay open: 1" in str(
        ground.tick().skip_message
    )
    assert [ground.states()[one.key] for one in letters[:2]] == ["open", "replayed"]


def test_letters_that_kafka_does_not_take_are_marked_by_the_next_tick(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ground.record(3), ground.record(12)
    ground.ward.store(first, second)

    def away(*_: object, **__: object) -> None:
        msg = "no broker"
        raise BrokerError(msg, retriable=True)

    (result,) = ground.replay(first.key)
    with monkeypatch.context() as patch:
        patch.setattr(DeadLetterTopic, "change", away)
        assert "by ada: the fix: no broker" in str(ground.tick().skip_message)
    assert ground.states()[first.key] == "open"
    ground.tick()
    assert ground.states()[first.key] == "replayed"

    (result,) = ground.replay(second.key)
    assert result.success
    cancel = ("rerun", "--cancel", result.dagster_run.tags[RERUN_TAG], "--group")
    with monkeypatch.context() as patch:
        patch.setattr(DeadLetterTopic, "change", away)
        assert "the next tick marks the letters of" in invoke(*cancel, ground.ward.orders).output
    assert ground.states()[second.key] == "open"
    ground.tick()
    assert ground.states()[second.key] == "replayed"
    assert "no unfinished rerun" in invoke("rerun", "--group", ground.ward.orders).output


def test_change_that_is_not_confirmed_in_time_is_an_error(ground: Ground) -> None:
    kafka = ground.ward.resource.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    change = StateChange("orders-0-1", LetterState.REPLAYED, "ada", "", AT_MS)
    with pytest.raises(BrokerError, match=r"orders-0-1 .* has not confirmed it in 0\.2 s"):
        DeadLetterTopic(kafka).change([change], limit_s=0.2)


# The job


def launch(ground: Ground, **config: Any) -> tuple[bool, str]:  # noqa: ANN401 - fields of all kinds
    name = f"{ground.name}_letters"
    result = ground.defs.resolve_job_def(name).execute_in_process(
        instance=ground.instance,
        run_config={"ops": {f"{name}_request": {"config": config}}},
        raise_on_error=False,
    )
    failed = [str(event.event_specific_data) for event in result.all_events if event.is_failure]
    entries = ground.instance.all_logs(result.run_id)
    return result.success, "\n".join([*(entry.user_message for entry in entries), *failed])


def test_launchpad_lists_replays_and_discards_letters(
    ground: Ground,
) -> None:
    ward = ground.ward
    letters = [ground.record(3, reason="row 3 is odd"), ground.record(12), ground.record(13)]
    ward.store(*letters)
    succeeded, said = launch(ground)
    assert succeeded, said
    assert f"topic {ward.letters}: 3 open, 0 replayed, 0 discarded; 0 other records" in said
    assert f"1 of {ward.orders}-0 (record): row # is odd" in said
    assert letters[2].key in said

    form = {"keys": [letters[0].key], "reason": "the fix", "by": "ada"}
    succeeded, said = launch(ground, **form, action="replay")
    assert succeeded, said
    assert f"run 1: {ward.orders}-0 [3, 4)" in said
    assert "this is a dry run" in said
    assert not ground.tick().run_requests
    succeeded, said = launch(ground, **form, action="replay", dry_run=False)
    assert succeeded, said
    assert "by ada: the fix: 1 run, at most 2 at once" in said
    (request,) = ground.tick().run_requests
    assert ground.run(request).success

    discard = {"all_open": True, "containing": "bad", "reason": "a test", "by": "bob"}
    succeeded, said = launch(ground, **discard, action="discard")
    assert succeeded, said
    assert f"2 letters of topic {ward.letters} to discard" in said
    assert ward.listed()["discarded"] == 0, "a dry run"
    succeeded, said = launch(ground, **discard, action="discard", dry_run=False)
    assert succeeded, said
    assert f"2 letters of topic {ward.letters} discarded" in said
    assert ward.listed()["discarded"] == 2

    for problem, config in (
        ("give your name", {"action": "discard"}),
        ("give a reason", {"action": "replay", "by": "ada"}),
        ("name either the keys", {"action": "replay", "by": "ada", "reason": "x"}),
        ("no-such-topic", {"topic": "no-such-topic"}),
    ):
        succeeded, said = launch(ground, **config)
        assert not succeeded
        assert problem in said
