"""The restricted view has every operation of the proposal and none that it omits.

After the callback, it has nothing left.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any, cast

import pytest

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.aio.operations import AsyncRebalanceConsumer
from dagster_rebalance.kafka.consumer.callback_view import RebalanceConsumer
from dagster_rebalance.kafka.consumer.operations import ConsumerOperations

P0 = TopicPartition("orders", 0)

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
    *(
        "poll",
        "poll_with_rebalance",
        "close",
        "subscribe",
        "unsubscribe",
        "assign",
        "wakeup",
        "enforce_rebalance",
    ),
    *(
        "register_metric_for_subscription",
        "unregister_metric_for_subscription",
        "set_rebalance_listener",
        "delay_revoke",
    ),
]
CALLS = [(name, arguments) for name, overloads in INCLUDED.items() for arguments in overloads]


class Recorder:
    """Takes any call, and remembers it with its defaults filled in."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - it plays any method
        signature = inspect.signature(getattr(ConsumerOperations, name))

        def call(*arguments: object, **named: object) -> str:
            bound = signature.bind(self, *arguments, **named)
            bound.apply_defaults()
            self.calls.append((name, tuple(bound.arguments.values())[1:]))
            return f"the answer to {name}"

        return call


def test_the_view_has_what_the_proposal_includes_and_nothing_else() -> None:
    """A new operation must be put in one of the two lists."""
    public = {name for name in vars(RebalanceConsumer) if not name.startswith("_")}
    assert public == {*INCLUDED, "expire"}


@pytest.mark.parametrize("name", OMITTED)
@pytest.mark.parametrize("view", [RebalanceConsumer, AsyncRebalanceConsumer])
def test_what_is_dangerous_in_a_rebalance_is_not_there(view: type, name: str) -> None:
    """Each of these operations would harm a rebalance that is under way.

    KAFKA-20385: it "would cause re-entrant polling", "would terminate the consumer mid-rebalance",
    and so on.
    """
    assert not hasattr(view, name)


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_each_operation_goes_to_the_consumer_and_brings_its_answer(
    name: str, arguments: tuple[Any, ...]
) -> None:
    """The proposal's overloads become optional arguments, with the consumer's own defaults."""
    recorder = Recorder()
    answer = getattr(RebalanceConsumer(cast("ConsumerOperations", recorder)), name)(*arguments)
    directly = Recorder()
    getattr(directly, name)(*arguments)
    assert recorder.calls == directly.calls
    returns_something = inspect.signature(
        getattr(RebalanceConsumer, name)
    ).return_annotation not in {"None", "NoReturn"}
    assert answer == (f"the answer to {name}" if returns_something else None)


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_each_operation_is_refused_after_the_callback_in_every_thread(
    name: str, arguments: tuple[Any, ...]
) -> None:
    """KAFKA-20385: "Any use outside of this scope, will result in an IllegalStateException"."""
    recorder = Recorder()
    view = RebalanceConsumer(cast("ConsumerOperations", recorder))
    view.expire()
    refused: list[str] = []

    def use() -> None:
        with pytest.raises(IllegalStateError, match="ended with its callback"):
            getattr(view, name)(*arguments)
        refused.append(threading.current_thread().name)

    use()
    elsewhere = threading.Thread(target=use, name="elsewhere")
    elsewhere.start()
    elsewhere.join()
    assert refused == [threading.current_thread().name, "elsewhere"]
    assert not recorder.calls


@pytest.mark.parametrize("name", INCLUDED)
def test_the_view_for_asyncio_has_the_same_operations(name: str) -> None:
    """With the same arguments, each of them a coroutine."""
    operation = getattr(AsyncRebalanceConsumer, name)
    assert inspect.iscoroutinefunction(operation)
    ours, theirs = (
        inspect.signature(operation).parameters,
        inspect.signature(getattr(RebalanceConsumer, name)).parameters,
    )
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]
