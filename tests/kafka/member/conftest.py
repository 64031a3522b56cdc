"""Members with scripted clients, which own two partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.events import PartitionsAssigned
from dagster_rebalance.core.model.offsets import TopicPartition
from tests.kafka.clients import ScriptedMember

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.testing.fake_group import ManualClock

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptedMember]]:
    made: list[ScriptedMember] = []

    def make(clock: ManualClock | None = None, **settings: object) -> ScriptedMember:
        made.append(ScriptedMember(monkeypatch, settings, **({"clock": clock} if clock else {})))
        made[-1].grant(P0, P1)
        assert made[-1].poll() == [PartitionsAssigned((P0, P1))]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def scene(scripted: Callable[..., ScriptedMember]) -> ScriptedMember:
    return scripted()
