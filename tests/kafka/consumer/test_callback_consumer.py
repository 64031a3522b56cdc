"""`RebalanceConsumer` has the operations that KAFKA-20385 includes, until its callback returns."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance.core.model.errors import IllegalStateError, UnsupportedOperationError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.aio.async_consumer import AsyncRebalanceAwareConsumer
from dagster_rebalance.kafka.aio.async_operations import AsyncRebalanceConsumer
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.operations import RebalanceConsumer
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.consumers import P0, Listener, consumer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# As KAFKA-20385 lists them, in snake case, with arguments for each overload.
INCLUDED: dict[str, list[tuple[Any, ...]]] = {
    "commit_sync": [
        (),
        (None, 5.0),
        ({P0: OffsetAndMetadata(1)},),
        ({P0: OffsetAndMetadata(1)}, 5.0),
    ],
    "commit_async": [(), (None, print), ({P0: OffsetAndMetadata(1)}, print)],
    "committed": [({P0},), ({P0}, 5.0)],
    "position": [(P0,), (P0, 5.0)],
    "seek": [(P0, 3), (P0, OffsetAndMetadata(3))],
    "seek_to_beginning": [({P0},)],
    "seek_to_end": [({P0},)],
    "assignment": [()],
    "pause": [({P0},)],
    "resume": [({P0},)],
    "paused": [()],
    "client_instance_id": [(5.0,)],
    "beginning_offsets": [({P0},), ({P0}, 5.0)],
    "end_offsets": [({P0},), ({P0}, 5.0)],
    "offsets_for_times": [({P0: 1},), ({P0: 1}, 5.0)],
    "partitions_for": [("orders",), ("orders", 5.0)],
    "list_topics": [(), (5.0,)],
    "metrics": [()],
    "current_lag": [(P0,)],
    "group_metadata": [()],
}
OMITTED = [
    *("poll", "poll_with_rebalance", "close", "subscribe", "unsubscribe", "assign", "wakeup"),
    *("enforce_rebalance", "register_metric_for_subscription"),
    *("unregister_metric_for_subscription", "set_rebalance_listener", "delay_revoke"),
]
CALLS = [(name, arguments) for name, overloads in INCLUDED.items() for arguments in overloads]


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_callback_consumers_have_the_included_operations_only() -> None:
    assert public_names(RebalanceConsumer) == {*INCLUDED, "expire"}
    assert public_names(AsyncRebalanceConsumer) == {*INCLUDED}


@pytest.mark.parametrize("name", OMITTED)
@pytest.mark.parametrize("consumer", [RebalanceConsumer, AsyncRebalanceConsumer])
def test_callback_consumers_omit_operations_that_harm_a_rebalance(
    consumer: type, name: str
) -> None:
    """KAFKA-20385: "would cause re-entrant polling", "would terminate the consumer", and so on."""
    assert not hasattr(consumer, name)


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_operation_works_in_a_callback_as_on_the_consumer(
    name: str, arguments: tuple[Any, ...]
) -> None:
    """Without a fetcher `seek` refuses, on both."""
    group = FakeGroup({"orders": 1})
    results: list[object] = []

    def result(operations: object) -> object:
        try:
            return getattr(operations, name)(*arguments)
        except (IllegalStateError, UnsupportedOperationError) as error:
            return str(error)

    def call(_: Collection[TopicPartition], consumer: RebalanceConsumer) -> None:
        results.append(result(consumer))

    blue = consumer_of(group)
    blue.set_rebalance_listener(Listener(assigned=call))
    blue.poll(0)
    assert results == [result(blue)]
    assert "ended with its callback" not in str(results)


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_operation_after_the_callback_is_refused_in_every_thread(
    name: str, arguments: tuple[Any, ...]
) -> None:
    """KAFKA-20385: "Any use outside of this scope, will result in an IllegalStateException"."""
    consumers: list[RebalanceConsumer] = []
    blue = consumer_of(FakeGroup({"orders": 1}))
    blue.set_rebalance_listener(Listener(assigned=lambda _, consumer: consumers.append(consumer)))
    blue.poll(0)
    refused: list[str] = []

    def use() -> None:
        with pytest.raises(IllegalStateError, match="ended with its callback"):
            getattr(consumers[0], name)(*arguments)
        refused.append(threading.current_thread().name)

    use()
    elsewhere = threading.Thread(target=use, name="elsewhere")
    elsewhere.start()
    elsewhere.join()
    assert refused == [threading.current_thread().name, "elsewhere"]


def parameters(operation: Callable[..., object]) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in inspect.signature(operation).parameters.values()]


@pytest.mark.parametrize("name", sorted(public_names(RebalanceAwareConsumer) - {"cluster"}))
def test_asyncio_operation_is_a_coroutine_function_with_the_same_parameters(name: str) -> None:
    if name in {"set_rebalance_listener", "member_id", "subscribe"}:
        return  # an ordinary method, a property, and one with a deprecated parameter
    operation = getattr(AsyncRebalanceAwareConsumer, name)
    assert inspect.iscoroutinefunction(operation)
    assert operation.__doc__
    assert parameters(operation) == parameters(getattr(RebalanceAwareConsumer, name))
