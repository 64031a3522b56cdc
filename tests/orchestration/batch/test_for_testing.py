"""`KafkaBatch.for_testing` for assets of both forms of run."""

# No `from __future__ import annotations` here: Dagster evaluates the annotation of a batch.

from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Message

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.orchestration.batch.resource import KafkaBatch
from dagster_rebalance.orchestration.streaming.asset_calls import AssetCall
from tests.orchestration.parts import span


def message(number: int, offset: int, value: str = "") -> Message:
    return Message(topic="orders", partition=number, offset=offset, value=value.encode())


RANGES = (span(0, 5, 8), span(1, 0, 10))
MESSAGES = (message(0, 5, "a"), message(1, 0, "b"), message(0, 7, "c"))


@dg.asset
def by_parameter(kafka_batch: KafkaBatch) -> dg.MaterializeResult:  # type: ignore[type-arg]
    return dg.MaterializeResult(metadata={**kafka_batch.metadata(), **_seen(kafka_batch)})


@dg.asset
def with_context(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch
) -> dg.MaterializeResult:  # type: ignore[type-arg]
    context.log.info("a line")
    return dg.MaterializeResult(metadata={**kafka_batch.metadata(), **_seen(kafka_batch)})


def _seen(batch: KafkaBatch) -> dict[str, str]:
    values = [(one.value() or b"").decode() for one in batch.messages()]
    ranges = [len(list(batch.messages(range_))) for range_ in batch.offset_ranges]
    return {"values": ",".join(values), "ranges": str(ranges)}


EXPECTED = {"values": "a,b,c", "ranges": "[2, 1]", "offsets": 13, "batch": "test"}


def shown(result: object) -> dict[str, Any]:
    assert isinstance(result, dg.MaterializeResult)
    return {name: value for name, value in (result.metadata or {}).items() if name in EXPECTED}


def test_asset_is_called_directly() -> None:
    batch = KafkaBatch.for_testing(RANGES, messages=MESSAGES)
    assert shown(by_parameter(kafka_batch=batch)) == EXPECTED
    assert shown(with_context(dg.build_asset_context(), kafka_batch=batch)) == EXPECTED
    with dg.build_asset_context(resources={"kafka_batch": batch}) as context:
        assert shown(with_context(context)) == EXPECTED


@pytest.mark.parametrize("asset", [by_parameter, with_context])
def test_asset_is_materialised(asset: dg.AssetsDefinition) -> None:
    batch = KafkaBatch.for_testing(RANGES, messages=MESSAGES)
    result = dg.materialize([asset], resources={"kafka_batch": batch})
    (event,) = result.asset_materializations_for_node(asset.op.name)
    assert {key: event.metadata[key].value for key in EXPECTED} == EXPECTED


@pytest.mark.parametrize("asset", [by_parameter, with_context])
def test_asset_is_called_with_one_batch_after_another(asset: dg.AssetsDefinition) -> None:
    body = AssetCall.of(asset, "kafka_batch")
    seen: list[object] = []

    @dg.asset
    def streaming(context: dg.AssetExecutionContext) -> None:
        for messages in (MESSAGES, ()):
            batch = KafkaBatch.for_testing(RANGES, messages=messages)
            seen.extend((made.metadata or {})["values"] for made in body(context, batch))

    dg.materialize([streaming])
    assert seen == ["a,b,c", ""]


def test_message_outside_of_batch_is_refused() -> None:
    with pytest.raises(IllegalStateError, match=r"orders-0 offset 8 is in none of the ranges"):
        KafkaBatch.for_testing(RANGES, messages=[message(0, 8)])


def test_batch_without_messages_raises() -> None:
    batch = KafkaBatch.for_testing(RANGES)
    with pytest.raises(IllegalStateError, match=r"KafkaBatch\.for_testing\(messages="):
        batch.messages()


def test_range_of_another_batch_is_refused() -> None:
    batch = KafkaBatch.for_testing(RANGES, messages=MESSAGES)
    with pytest.raises(IllegalStateError, match=r"orders-0 \[5, 7\) is no range of batch test"):
        batch.messages(span(0, 5, 7))


def test_empty_ranges_give_no_records() -> None:
    batch = KafkaBatch.for_testing(RANGES, messages=MESSAGES)
    assert list(batch.messages([])) == []
    assert list(KafkaBatch(kafka=batch.kafka, ranges=batch.ranges).messages([])) == []
