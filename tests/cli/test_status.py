"""The output of `dagster-rebalance status` and `explain`."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

import pytest
from rich.console import Console

from dagster_rebalance.cli import status
from dagster_rebalance.cli.status import _table
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.model.printable import Reason
from dagster_rebalance.core.reporting.group_status import Owners, PartitionStatus
from dagster_rebalance.orchestration.reporting.group_snapshot import GroupSnapshot
from tests.cli.command_line import invoke

if TYPE_CHECKING:
    from typer.testing import Result

PARTITION = TopicPartition("orders", 3)
WHY = Reason(
    "orders-3: the log lost records", f"run dagster-rebalance reset orders:3 {'--yes ' * 20}"
)
STOPPED = PartitionStatus(
    partition=PARTITION,
    owner="shop/4f0a9c11",
    committed=123_456_789,
    claims=((OffsetRange("orders", 3, 123_456_789, 123_556_789), "b-1"),),
    end=123_999_999,
    lag=543_210,
    runs=("0f3c1111-aaaa", "91c0aaaa-bbbb"),
    hold="held by shop/4f0a9c11, shop/aaaaaaaa waits for it",
    stopped=WHY,
    paused="",
    sentence=f"orders-3: stopped: {WHY}",
)


@pytest.mark.parametrize("width", [80, 120, 200, 300])
def test_table_in_any_width_cuts_nothing_off(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    seen = GroupSnapshot({}, {PARTITION: STOPPED}, [], [])
    console.print(_table("shop", seen, Owners(()), [STOPPED], width=width))
    table = console.file.getvalue()  # type: ignore[attr-defined]
    for cell in ("orders-3 ", " 123456789 ", " 123999999 ", " 543210 "):
        assert cell in table
    assert "\N{HORIZONTAL ELLIPSIS}" not in table
    assert table.count("--yes") == 20
    assert len(table.splitlines()) < 15


class Reads(Protocol):
    """Runs a command of a group that is read as given, until Ctrl-C after the last read."""

    def __call__(self, command: str, *found: GroupSnapshot | BrokerError) -> Result:
        """Run one."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:

    def run(command: str, *found: GroupSnapshot | BrokerError) -> Result:
        left = list(found)

        def read() -> tuple[GroupSnapshot, Owners]:
            seen = left.pop(0)
            if isinstance(seen, BrokerError):
                raise seen
            return seen, Owners(())

        def wait(_interval_s: float) -> None:
            if not left:
                raise KeyboardInterrupt

        target = SimpleNamespace(kafka=SimpleNamespace(group_id="shop"))
        reader = SimpleNamespace(read=read, sensors=list)
        monkeypatch.setattr(status, "open_target", lambda *_: nullcontext(target))
        monkeypatch.setattr(status, "connect_group", lambda _: nullcontext(reader))
        monkeypatch.setattr("time.sleep", wait)
        result = invoke(*command.split())
        assert not left
        assert result.exit_code == 0, result.exception
        return result

    return run


SEEN = GroupSnapshot({}, {PARTITION: STOPPED}, [], [])
AWAY = BrokerError("no broker answered", retriable=True)


def test_watch_waits_after_each_read(reads: Reads) -> None:
    assert reads("status --watch", SEEN).stdout.count("group shop") == 1


def test_watch_survives_an_outage(reads: Reads) -> None:
    table = reads("status --watch", SEEN, AWAY, SEEN)
    assert table.stdout.count("group shop") == 2
    assert "no broker answered" in table.stdout


def test_watch_of_json_survives_an_outage(reads: Reads) -> None:
    rows = reads("status --watch --json", SEEN, AWAY, SEEN)
    assert [json.loads(line)["group"] for line in rows.stdout.splitlines()] == ["shop", "shop"]
    assert "no broker answered" in rows.stderr


@pytest.mark.parametrize("form", ["", "--json"])
def test_watch_ends_if_the_first_read_fails(reads: Reads, form: str) -> None:
    with pytest.raises(BrokerError, match="no broker answered"):
        reads(f"status --watch {form}", AWAY)


def test_headline_names_partitions_with_unknown_lag(reads: Reads) -> None:
    others = {
        TopicPartition("orders", number): replace(
            STOPPED, partition=TopicPartition("orders", number), end=None, lag=None
        )
        for number in (4, 5)
    }
    seen = GroupSnapshot({}, {PARTITION: STOPPED, **others}, [], [])
    assert "lag at least 543210 (2 partitions unknown)" in reads("status", seen).stdout


@pytest.fixture(scope="module")
def many() -> GroupSnapshot:
    """1,000 partitions, the last one stopped, and lag in the others grows with their number."""
    idle = replace(STOPPED, stopped="", hold="", claims=(), runs=(), sentence="waits")
    found = {
        one: replace(idle, partition=one, lag=one.partition)
        for one in (TopicPartition("orders", number) for number in range(999))
    }
    last = TopicPartition("orders", 999)
    stopped = replace(STOPPED, partition=last, lag=0, sentence="orders-999: stopped")
    return GroupSnapshot({}, {**found, last: stopped}, [], [])


def test_table_of_many_partitions_has_the_stopped_one_and_the_largest_lags(
    reads: Reads, many: GroupSnapshot
) -> None:
    headline, _, *rows = reads("status", many).stdout.splitlines()
    assert headline.startswith("group shop: no members, 1000 partitions, lag 498501, 1 stopped"), (
        headline
    )
    named = [row.split()[0] for row in rows if row.startswith("orders-")]
    assert named[:3] == ["orders-999", "orders-998", "orders-997"]
    assert len({name.rstrip(":") for name in named}) == 200
    assert rows[-1].startswith("and 800 more partitions: name partitions or topics")


def test_table_of_named_partitions_and_json_have_all_of_them(
    reads: Reads, many: GroupSnapshot
) -> None:
    assert "more partitions" not in reads("status orders:*", many).stdout
    assert len(json.loads(reads("status --json", many).stdout)["partitions"]) == 1000


def test_explain_of_many_partitions_begins_with_the_stopped_one(
    reads: Reads, many: GroupSnapshot
) -> None:
    said = reads("explain", many).stdout
    assert said.startswith("orders-999: stopped")
    assert "and 799 more partitions: name partitions or topics" in said


def test_table_of_stopped_partitions_has_each_remedy_once(
    reads: Reads, many: GroupSnapshot
) -> None:
    def stopped(number: int, remedy: str) -> PartitionStatus:
        partition = TopicPartition("orders", number)
        why = Reason(f"{partition}: 3 attempts failed: {'no price ' * 30}", remedy)
        return replace(STOPPED, partition=partition, stopped=why)

    found = [stopped(n, f"Fix it, then `retry orders:{n}`") for n in (3, 10)]
    found += [stopped(n, f"Find it, then `reset orders:{n}`") for n in range(20, 25)]
    found += [stopped(30, "")]
    seen = GroupSnapshot({}, {one.partition: one for one in found}, [], [])
    shown = reads("status", seen).stdout
    assert [line for line in shown.splitlines() if line.startswith("What")] == [
        "What to do for orders-3, orders-10: Fix it, then `retry orders:3 orders:10`.",
        "What to do for orders-20..24: Find it, then `reset TOPIC:PARTITION`.",
    ]
    states = [line for line in shown.splitlines() if ": stopped: 3 attempts failed" in line]
    assert len(states) == 8, shown
    assert all(line.endswith(" ...") for line in states)
    assert "explain" not in shown
    various = {one: stopped(one.partition, f"remedy {one}") for one in many.statuses}
    shown = reads("status", replace(many, statuses=various)).stdout
    assert shown.count("What to do for") == 5
    assert "explain` has the remedies of the other" in shown


def test_state_in_json_has_no_remedy(reads: Reads) -> None:
    (row,) = json.loads(reads("status --json", SEEN).stdout)["partitions"]
    assert row["state"] == "stopped: the log lost records"
    assert row["stopped"] == WHY


def test_explain_prints_sentences(reads: Reads) -> None:
    seen = replace(SEEN, missing_topics=["pay"], statuses={PARTITION: replace(STOPPED, end=None)})
    lines = reads("explain", seen).stdout.splitlines()
    assert lines[0].startswith("orders-3: stopped: orders-3: the log lost records. run")
    assert lines[1] == "  Its leader does not answer: check the brokers."
    assert lines[2] == "The group has no member, so no new batch starts."
    assert lines[3].startswith("  Turn its sensor on. If")
    assert lines[4].startswith("topic pay does not exist")
    assert all(line.endswith(".") for line in lines)


def test_explain_of_a_group_without_partitions_states_it(reads: Reads) -> None:
    assert reads("explain", GroupSnapshot({}, {}, [], [])).stdout == (
        "group shop has no partitions.\n"
    )
