"""The producer of numbered records: which answers count as confirmations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from proofs.witness import producer as producer_module
from proofs.witness.producer import NumberedProducer

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def test_producer_receives_no_offsets_of_a_duplicate_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = iter([0, 1, -1, 0, 1, 5])

    def produce(
        *_: object, partition: int, on_delivery: Callable[[None, SimpleNamespace], None]
    ) -> None:
        offset = next(offsets)
        on_delivery(None, SimpleNamespace(partition=lambda: partition, offset=lambda: offset))

    made = SimpleNamespace(produce=produce)
    monkeypatch.setattr(producer_module, "Producer", lambda _settings: made)
    producer = NumberedProducer("unreachable:9092", "numbers", partitions=1, per_second=1)
    for number in range(6):
        producer._send(number)
    assert [offset for _, offset in producer.confirmed.values()] == [0, 1, None, None, None, 5]
    assert producer.ends == [6]
