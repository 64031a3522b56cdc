"""The log of a member, as a formatter for machines sees it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model import events
from dagster_rebalance.core.model.member_events import EVENT_SPECS, EventKind, MemberEvent
from dagster_rebalance.orchestration.member.dependencies import MemberLog
from tests.orchestration.bench import Bench, Status
from tests.orchestration.parts import tp

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGGER = "dagster_rebalance.orchestration.member.log"
OF_EACH = {"group_id": "etl", "member": "blue:sensor"}
_OWN = vars(logging.makeLogRecord({})).keys() | {"message"}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the extra attributes of the log records, as a JSON formatter writes them."""
    return [
        json.loads(
            json.dumps(
                {
                    "level": record.levelname,
                    "text": record.getMessage(),
                    **{k: v for k, v in vars(record).items() if k not in _OWN},
                }
            )
        )
        for record in caplog.records
        if record.name == LOGGER
    ]


def test_member_event_is_one_record_with_its_fields(
    instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(instance)
    bench.member_loop.dependencies = replace(bench.member_loop.dependencies, log=MemberLog(OF_EACH))
    with caplog.at_level(logging.DEBUG, LOGGER):
        bench.batch_requests()
        run = bench.run(Status.STARTED)
        bench.turn(20)
        bench.succeed(run)
        bench.until(bench.materialised)
    found = {line["event_name"]: line for line in lines(caplog)}
    assert [*found][:2] == [
        EventKind.PARTITIONS_ASSIGNED.value,
        EventKind.BATCH_CLAIMED.value,
    ]
    committed = found[EventKind.OFFSETS_COMMITTED.value]
    assert {**committed, "claim_to_commit_s": 0} == {
        "level": "DEBUG",
        "text": "orders-0 [0, 10) is committed",
        "event_name": "dagster_rebalance.offsets.committed",
        **OF_EACH,
        "topic": "orders",
        "partition": 0,
        "start": 0,
        "until": 10,
        "offsets": 10,
        "batch_id": "b-1",
        "attempt_run_id": run.run_id,
        "claim_to_commit_s": 0,
        "lag": 0,
        "is_dead_letter": False,
    }
    for line in lines(caplog):
        fields = line.keys() - {"level", "text", "event_name", *OF_EACH}
        assert fields == set(EVENT_SPECS[EventKind(line["event_name"])].fields)


def test_routine_events_are_logged_at_debug_level(
    instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(instance)
    with caplog.at_level(logging.INFO, LOGGER):
        bench.batch_requests()
        bench.member.deliver(events.PartitionsLost((tp(0),), events.LostReason.FENCED))
        bench.turn()
    assert [(line["level"], line["event_name"].rpartition(".")[2]) for line in lines(caplog)] == [
        ("INFO", "assigned"),
        ("WARNING", "lost"),
    ]
    assert lines(caplog)[1]["reason"] == "fenced"


def test_text_of_an_event_is_no_format(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        MemberLog().write(MemberEvent(EventKind.NOTED, "100 % of %s"))
    assert [line["text"] for line in lines(caplog)] == ["100 % of %s"]
