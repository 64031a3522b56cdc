"""Settings and metadata of `PipesBatch`; tests/docs reads its records."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_rebalance import OffsetRange, PipesBatch
from dagster_rebalance.spark import pipes_batch

BATCH = PipesBatch("b-1", "etl", (OffsetRange("orders", 0, 5, 9),), "read_uncommitted")


@pytest.mark.parametrize("own", [None, "read_committed"])
def test_isolation_level_defaults_to_that_of_the_group(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        pipes_batch, "read_ranges", lambda *given, **more: asked.append((given, more))
    )
    session: Any = object()
    kafka = {"bootstrap.servers": "broker:9092", **({"isolation.level": own} if own else {})}
    BATCH.dataframe(session, kafka, options={"includeHeaders": "true"}, allow_plaintext=True)
    (((of, ranges, settings), more),) = asked
    assert of is session
    assert ranges == BATCH.offset_ranges
    assert settings == {**kafka, "isolation.level": own or "read_uncommitted"}
    assert more == {"connector_options": {"includeHeaders": "true"}, "allow_plaintext": True}


def test_batch_from_extras_has_the_metadata_of_a_batch() -> None:
    batch = PipesBatch.from_extras(BATCH.extras)
    assert type(batch) is PipesBatch
    assert batch == BATCH
    shown = {
        "batch": "b-1",
        "ranges": {"raw_value": "- `orders-0 [5, 9)`", "type": "md"},
        "offsets": 4,
    }
    assert batch.metadata() == shown
    assert batch.metadata(row_count=0) == {**shown, "dagster/row_count": 0}
