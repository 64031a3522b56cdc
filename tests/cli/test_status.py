"""The table of `dagster-rebalance status`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dagster_rebalance.cli.status import _table
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.reporting.group_status import Owners, PartitionStatus
from dagster_rebalance.orchestration.reporting.group_snapshot import GroupSnapshot

PARTITION = TopicPartition("orders", 3)
WHY = f"orders-3: the log lost records, run dagster-rebalance reset orders:3 {'--yes ' * 20}"
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
    ordered="",
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
