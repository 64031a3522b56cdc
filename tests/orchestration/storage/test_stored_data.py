"""Literal data as this version stores it: later versions must read the same from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.claims import (
    Claim,
    LastCommit,
    StoredPartition,
    decode,
    encode,
)
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.offsets import Log, OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.core.reporting.group_status import RecordedAssignment
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
from dagster_rebalance.core.runs.retry import FailedAttempt
from dagster_rebalance.core.runs.stream_batch import BatchOutcome
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.group_settings import GroupSettings
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.commit_history import last_recorded, processed
from dagster_rebalance.orchestration.storage.dynamic_partitions import (
    DirectiveStore,
    GroupJobs,
    JobName,
    RerunStore,
)
from dagster_rebalance.orchestration.storage.failure_notes import FailureNotes
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity, MemberLease
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.range_owners import (
    ProcessingRun,
    RangeOwners,
    StreamingRunRecords,
)
from dagster_rebalance.orchestration.storage.run_tags import (
    RunEvent,
    record_run_event,
    run_events_of,
)
from tests.orchestration.parts import idle_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RUN = "11111111-1111-4111-8111-111111111111"
STREAM = "22222222-2222-4222-8222-222222222222"
GROUP = GroupAssets.of("etl")
FIRST, SECOND = OffsetRange("orders", 3, 120, 240), OffsetRange("orders", 4, 0, 10)
BATCH = [("b-1", FIRST), ("b-1", SECOND)]
STREAMED = [(f"s.{STREAM}.1.1", FIRST), (f"s.{STREAM}.2.1", SECOND)]

BATCH_TEXT = f"{RUN} 1 at_work b-1:orders:3:120:240 b-1:orders:4:0:10"
FAILURE_TEXT = f'["etl orders:3:120:240", "{STREAM}", 2, "ValueError: no price"]'
KEY_VALUES = {
    "dagster_rebalance/sign_of_life/1": f"{RUN} 7/60.0 boot:1:2",
    "dagster_rebalance/sign_of_life/17": f"{STREAM} 8/30.5 orders:3,4;payments:0 boot:3:4",
    "dagster_rebalance/work/8147": BATCH_TEXT,
    "dagster_rebalance/work/2737": BATCH_TEXT,
    "dagster_rebalance/left/18836": f"succeeded s.{STREAM}.1.1:orders:3:120:240",
    "dagster_rebalance/left/98886": f"dropped s.{STREAM}.2.1:orders:4:0:10",
    "dagster_rebalance/streams/54905": f"{STREAM} 17",
    "dagster_rebalance/begun/54905": f"{STREAM} s.{STREAM}.5.1 1764000000",
    "dagster_rebalance/failure/47496": FAILURE_TEXT,
    "dagster_rebalance/seat/2aa536773b7db0acbaba3b8276b952c3": "process-1 1764000000",
}
DYNAMIC_PARTITIONS = {
    "dagster_rebalance/orders/etl": [
        '1764000000000000001 ["pause", "orders:3", "ada", 1764000000.5, "table is moved"]',
        '1764000000000000002 ["resume", "*", "bob", 1764000100.0, ""]',
    ],
    "dagster_rebalance/reruns/etl": [
        '["x1", 2, 2, 1, "ada", 1764000000.5, "wrong prices", "orders:3:120+120 orders:4:0+10"]',
    ],
    "dagster_rebalance/jobs/631fd8e1ffac93e47a9eeeaeb7c7ffa4": [
        '["", "idle_job"]',
        '["shop", "orders_job"]',
    ],
    "dagster_rebalance/settings/etl": ['{"group_id": "etl", "max_attempts": 3}'],
}
RUN_TAGS = {
    "dagster_rebalance/batch": "b-1",
    "dagster_rebalance/group": "etl",
    "dagster_rebalance/attempt": "2",
    "dagster_rebalance/ranges": "orders-3 [120, 240), orders-4 [0, 10)",
    "dagster_rebalance/version": "v7",
}
RUN_CONFIG = {
    "resources": {
        "kafka_batch": {
            "config": {"batch_id": "b-1", "ranges": ["orders:3:120:240", "orders:4:0:10"]}
        }
    }
}
RUN_EVENTS = {
    "began": RunEvent.BEGAN,
    "refused": RunEvent.REFUSED,
    "finished": RunEvent.FINISHED,
    "taken back": RunEvent.TAKEN_BACK,
    "stop": RunEvent.STOP,
    "interrupted": RunEvent.INTERRUPTED,
    "over": RunEvent.OVER,
    "ready": RunEvent.READY,
    "joined": RunEvent.JOINED,
    "leave": RunEvent.LEAVE,
}


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as made:
        run = made.create_run_for_job(
            idle_job,
            run_id=RUN,
            status=dg.DagsterRunStatus.STARTED,
            tags=RUN_TAGS,
            run_config=RUN_CONFIG,
        )
        made.report_engine_event("dagster_rebalance [began]: the process has begun", run)
        made.run_storage.set_cursor_values(KEY_VALUES)
        for name, keys in DYNAMIC_PARTITIONS.items():
            made.add_dynamic_partitions(name, keys)
        yield made


def values_of(instance: dg.DagsterInstance, *keys: str) -> Mapping[str, str]:
    return instance.run_storage.get_cursor_values(set(keys))


def key_of(kind: str) -> str:
    return next(key for key in KEY_VALUES if key.startswith(f"dagster_rebalance/{kind}/"))


def test_run_tags_config_and_heartbeat_are_read(instance: dg.DagsterInstance) -> None:
    (run,) = RunLedger(instance, "etl").read(["b-1"], claims=BATCH)
    assert (run.run_id, run.batch_id, run.ranges) == (RUN, "b-1", (FIRST, SECOND))
    assert (run.attempt, run.code_version) == (2, "v7")
    assert (run.heartbeat, run.heartbeat_timeout_s) == ("7/60.0 boot:1:2", 60.0)


def test_refusal_in_tags_is_read(instance: dg.DagsterInstance) -> None:
    run_id = RUN.replace("1", "3")
    instance.create_run_for_job(
        idle_job,
        run_id=run_id,
        status=dg.DagsterRunStatus.FAILURE,
        tags={
            **RUN_TAGS,
            "dagster_rebalance/batch": "b-3",
            "dagster_rebalance/refused": run_id,
            "dagster_rebalance/refusal": "orders-3 is paused",
            "dagster_rebalance/taken_back": run_id,
        },
    )
    (run,) = RunLedger(instance, "etl").read(["b-3"])
    assert (run.is_refused, run.is_cancelled_by_member, run.refusal) == (
        True,
        True,
        "orders-3 is paused",
    )


@pytest.mark.parametrize(("word", "event"), RUN_EVENTS.items())
def test_run_event_is_read_and_written_by_its_name(
    instance: dg.DagsterInstance, word: str, event: RunEvent
) -> None:
    read = instance.create_run_for_job(idle_job)
    instance.report_engine_event(f"dagster_rebalance [{word}]: some sentence", read)
    assert run_events_of(instance, read.run_id) == {event}
    written = instance.create_run_for_job(idle_job)
    record_run_event(instance, written, event, "the reason")
    (entry,) = instance.all_logs(written.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
    message = (entry.dagster_event and entry.dagster_event.message) or ""
    assert message.startswith(f"dagster_rebalance [{word}]: ")
    assert message.endswith(": the reason")


def test_heartbeat_of_a_streaming_run_is_read_by_its_number(instance: dg.DagsterInstance) -> None:
    number = StreamingRunRecords(instance).storage_id(STREAM)
    assert number == 17
    assert Heartbeats(instance).read({STREAM: number}) == {
        STREAM: "8/30.5 orders:3,4;payments:0 boot:3:4"
    }
    runs = RunLedger(instance, "etl").read([], claims=STREAMED)
    assert {(run.heartbeat, run.heartbeat_timeout_s) for run in runs} == {
        ("8/30.5 orders:3,4;payments:0 boot:3:4", 30.5)
    }
    assert {run.active_partitions for run in runs} == {
        frozenset(
            {
                TopicPartition("orders", 3),
                TopicPartition("orders", 4),
                TopicPartition("payments", 0),
            }
        )
    }


def test_range_owners_are_read_and_written(instance: dg.DagsterInstance) -> None:
    owners = RangeOwners(instance)
    note = ProcessingRun(RUN, 1, is_finished=False)
    assert owners.read(BATCH) == dict.fromkeys(BATCH, note)
    owners.finish(RUN, 1, BATCH)
    own = BATCH_TEXT.rpartition(" ")[0]
    assert values_of(instance, key_of("work")) == {
        key_of("work"): own.replace("at_work", "finished")
    }
    owners.begin(RUN, 1, BATCH)
    assert values_of(instance, key_of("work")) == {key_of("work"): own}


def test_outcomes_of_abandoned_claims_are_read_and_written(instance: dg.DagsterInstance) -> None:
    claims = StreamingRunRecords(instance)
    outcomes = dict(zip(STREAMED, (BatchOutcome.SUCCEEDED, BatchOutcome.INTERRUPTED), strict=True))
    assert claims.read(STREAMED) == outcomes
    assert claims.start_times([STREAM]) == {f"s.{STREAM}.5.1": 1764000000.0}
    written = {key: KEY_VALUES[key] for key in KEY_VALUES if "/left/" in key or "/begun/" in key}
    instance.run_storage.set_cursor_values(dict.fromkeys(written, ""))
    claims.record(outcomes)
    claims.record_start(STREAM, f"s.{STREAM}.5.1", 1764000000.2)
    claims.record_storage_id(STREAM, 17)
    assert values_of(instance, *written) == written
    assert values_of(instance, key_of("streams")) == {key_of("streams"): f"{STREAM} 17"}


def test_failure_notes_are_read_and_written(instance: dg.DagsterInstance) -> None:
    notes = FailureNotes(instance, "etl")
    failed = FailedAttempt(STREAM, 2, "ValueError: no price")
    assert notes.read([FIRST, SECOND]) == {FIRST: failed}
    instance.run_storage.set_cursor_values({key_of("failure"): ""})
    notes.write([FIRST], failed)
    assert values_of(instance, key_of("failure")) == {key_of("failure"): FAILURE_TEXT}


def test_member_lease_is_read_and_released(instance: dg.DagsterInstance) -> None:
    lease = MemberLease(instance, GROUP, "shop", "etl_sensor")
    assert lease.read() == "process-1 1764000000"
    lease.release("process-2")
    assert lease.read() == "process-1 1764000000"
    lease.renew("process-2")
    assert lease.read().startswith("process-2 17")


def test_directives_are_read(instance: dg.DagsterInstance) -> None:
    assert DirectiveStore(instance, GROUP.directives_name).read() == (
        Directive(Action.PAUSE, "orders:3", "ada", 1764000000.5, "table is moved"),
        Directive(Action.RESUME, "*", "bob", 1764000100.0),
    )


def test_reruns_are_read_and_removed_by_their_text(instance: dg.DagsterInstance) -> None:
    store = RerunStore(instance, GROUP.reruns_name)
    rerun = Rerun("x1", "ada", "wrong prices", 1764000000.5, 1, 2)
    batch = RerunBatch(rerun, 2, (FIRST, SECOND))
    assert store.read() == (batch,)
    store.remove([batch])
    assert store.read() == ()
    store.add([batch])
    name = "dagster_rebalance/reruns/etl"
    assert list(instance.get_dynamic_partitions(name)) == DYNAMIC_PARTITIONS[name]


def test_jobs_of_the_group_are_read_and_written(instance: dg.DagsterInstance) -> None:
    run = instance.get_run_by_id(RUN)
    assert run is not None
    assert GroupJobs(instance, "etl", None).have(run)
    GroupJobs(instance, "etl", JobName("shop", "returns_job")).add_own()
    name = "dagster_rebalance/jobs/631fd8e1ffac93e47a9eeeaeb7c7ffa4"
    assert set(instance.get_dynamic_partitions(name)) == {
        *DYNAMIC_PARTITIONS[name],
        '["shop", "returns_job"]',
    }


def test_settings_of_the_group_are_read(instance: dg.DagsterInstance) -> None:
    assert GroupSettings(instance, GROUP.settings_name).read() == {
        "group_id": "etl",
        "max_attempts": 3,
    }


OFFSET_METADATA = [
    (
        (
            'dr2 32e7d5b7 {"c":[[240,"b-1"],[300,"s.run-2.1.1","b-0"]],"e":5,'
            '"l":[100,"b-0","run-0"],"o":120,"t":"abc123"}'
        ),
        StoredPartition(
            120,
            (Claim(240, "b-1"), Claim(300, "s.run-2.1.1", "b-0")),
            LastCommit(100, "b-0", "run-0"),
            Log("abc123", 5),
        ),
    ),
    (
        'dr1 e3723c15 {"c":[[240,"b-1"]],"l":[100,"b-0","run-0"]}',
        StoredPartition(120, (Claim(240, "b-1"),), LastCommit(100, "b-0", "run-0")),
    ),
]


@pytest.mark.parametrize(("text", "stored"), OFFSET_METADATA)
def test_offset_metadata_is_read_and_written(text: str, stored: StoredPartition) -> None:
    assert decode(OffsetAndMetadata(120, text)) == stored
    if text.startswith("dr2"):
        assert encode(stored) == OffsetAndMetadata(120, text)


def test_recorded_commits_are_read(instance: dg.DagsterInstance) -> None:
    partition = TopicPartition("orders", 3)
    records: list[dict[str, Any]] = [
        {"start": 0, "until": 60, "run": dg.MetadataValue.dagster_run(RUN), "batch": "b-0"},
        {"start": 60, "until": 100, "run": RUN, "joined": [[80, RUN]], "commits": 2},
        {
            "start": 100,
            "until": 240,
            "run": dg.MetadataValue.dagster_run(STREAM),
            "joined": dg.MetadataValue.json({STREAM: [110, 130], RUN: [120]}),
        },
        {"start": "by hand"},
    ]
    for metadata in records:
        instance.report_runless_asset_event(
            dg.AssetMaterialization(
                ["kafka", "etl", "offsets"], partition="orders-3", metadata=metadata
            )
        )
    found = [
        (one.range.start, one.range.until) for one in processed(instance, GROUP.offsets, partition)
    ]
    assert found == [(130, 240), (120, 130), (110, 120), (100, 110), (80, 100), (60, 80), (0, 60)]
    last = last_recorded(instance, GROUP.offsets, [partition])
    assert (last[partition].until, last[partition].run_id) == (240, STREAM)


def test_group_events_are_read(instance: dg.DagsterInstance) -> None:
    identity = {"code_location": "shop", "sensor": "etl_sensor"}
    catalogue = Catalogue(instance, GROUP, MemberIdentity("shop", "etl_sensor", "process-1"))
    catalogue.record_joined()
    events: list[dict[str, Any]] = [
        {
            "event": "assigned",
            "partitions": dg.MetadataValue.json(["orders-3", "orders-4"]),
            "member_id": "kafka-1",
            "member": "shop/2222",
            "code_location": "shop",
            "started_by": "etl_sensor",
            "incarnation": "process-3",
            "member_run": dg.MetadataValue.dagster_run(STREAM),
        },
        {"event": "joined", **identity, "incarnation": "process-2"},
    ]
    for metadata in events:
        instance.report_runless_asset_event(
            dg.AssetObservation(["kafka", "etl", "group"], metadata=metadata)
        )
    assert next(catalogue.assigned()) == RecordedAssignment(
        "kafka-1",
        "shop/2222",
        "process-3",
        frozenset({TopicPartition("orders", 3), TopicPartition("orders", 4)}),
        is_run=True,
    )
    wanted = catalogue.leave_request()
    assert wanted is not None
    assert "process-2" in wanted.reason


@pytest.mark.parametrize(
    ("rows", "reasons", "told"),
    [
        (
            [
                {"partition": "orders-3", "reason": "no price", "said_by": "owner"},
                {"partition": "orders-4", "reason": "paused", "said_by": "look"},
            ],
            ["no price", "paused"],
            3,
        ),
        (
            [
                {
                    "partition": f"orders-{number}",
                    "reason": "no size",
                    "what_to_do": "Fix it",
                    "run": "",
                    "found_by": by,
                }
                for number, by in ((3, "a scan of the group"), (4, "its owner"))
            ],
            ["no size. Fix it", "no size. Fix it"],
            4,
        ),
    ],
)
def test_check_of_stopped_partitions_is_read(
    instance: dg.DagsterInstance, rows: list[dict[str, str]], reasons: list[str], told: int
) -> None:
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=GROUP.offsets,
            check_name="no_partition_stopped",
            passed=False,
            metadata={
                "stopped": dg.MetadataValue.table([dg.TableRecord({**row}) for row in rows]),
                "stopped_partitions": dg.MetadataValue.int(2),
            },
        )
    )
    shown = Catalogue(
        instance, GROUP, MemberIdentity("shop", "etl_sensor", "process-1")
    ).shown_stops()
    assert [shown.reasons[TopicPartition("orders", number)] for number in (3, 4)] == reasons
    assert (shown.partitions, set(shown.told)) == (2, {TopicPartition("orders", told)})
