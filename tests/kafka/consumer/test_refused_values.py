"""Operations and settings refuse unusable values, name the expected ones, and change nothing."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.listener import CompositeRebalanceListener
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.kafka.consumers import CONFIG, P0, consumer_of, member_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE = {P0: OffsetAndMetadata(1)}

TIMED: dict[str, Callable[[Any, Any], object]] = {
    "commit_sync": lambda it, timeout_s: it.commit_sync(ONE, timeout_s),
    "commit_offsets": lambda it, timeout_s: it.commit_offsets(ONE, timeout_s),
    "committed": lambda it, timeout_s: it.committed([P0], timeout_s),
    "position": lambda it, timeout_s: it.position(P0, timeout_s),
    "beginning_offsets": lambda it, timeout_s: it.beginning_offsets([P0], timeout_s),
    "end_offsets": lambda it, timeout_s: it.end_offsets([P0], timeout_s),
    "offsets_for_times": lambda it, timeout_s: it.offsets_for_times({P0: 0}, timeout_s),
    "partitions_for": lambda it, timeout_s: it.partitions_for("orders", timeout_s),
    "list_topics": lambda it, timeout_s: it.list_topics(timeout_s),
    "check": lambda it, timeout_s: it.check(timeout_s),
    "close": lambda it, timeout_s: it.close(timeout_s),
}

PATTERN = "a compiled pattern of text"
NAMES = "a collection of names"
TOPICS = "names of topics, or one compiled pattern"
SECONDS = "a number of seconds"
COUNT = "a whole number as max_records"

REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("pause_pattern", (None,), PATTERN),
    ("pause_pattern", ("orders",), PATTERN),
    ("pause_pattern", (re.compile(b"o.*"),), PATTERN),
    ("resume_pattern", (None,), PATTERN),
    ("pause_topics", ("orders",), NAMES),
    ("pause_topics", ([5],), NAMES),
    ("resume_topics", ("orders",), NAMES),
    ("resume_topics", ([5],), NAMES),
    ("resume_topics", (None,), NAMES),
    ("subscribe", ("orders",), TOPICS),
    ("subscribe", (5,), TOPICS),
    ("subscribe", (None,), TOPICS),
    ("subscribe", (re.compile(b"o.*"),), PATTERN),
    ("close", ("x",), SECONDS),
    ("close", (None,), SECONDS),
    ("close", (math.nan,), SECONDS),
    ("commit_sync", (ONE, "x"), SECONDS),
    ("commit_sync", (ONE, math.nan), SECONDS),
    ("poll", ("1",), SECONDS),
    ("commit_async", (ONE, 5), "a function"),
    ("poll", (0, None), COUNT),
    ("poll", (0, 2.5), COUNT),
]


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup({"orders": 1})


@pytest.fixture
def consumer(group: FakeGroup) -> Iterator[RebalanceAwareConsumer]:
    consumer = consumer_of(group)
    consumer.poll(0)
    yield consumer
    consumer.close()


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [*REFUSED, *((name, ("orders",), SECONDS) for name in TIMED)],
)
def test_operation_with_a_wrong_value_is_refused_and_changes_nothing(
    group: FakeGroup,
    consumer: RebalanceAwareConsumer,
    name: str,
    arguments: tuple[Any, ...],
    expected: str,
) -> None:
    is_timed = name in TIMED and arguments == ("orders",)
    with pytest.raises(TypeError, match=f"{name} expects {expected}"):
        TIMED[name](consumer, *arguments) if is_timed else getattr(consumer, name)(*arguments)
    consumer.poll(0)
    assert consumer.assignment() == {P0}
    assert not consumer.paused()
    assert not group.committed


@pytest.mark.parametrize("name", TIMED)
def test_time_out_below_0_is_infinite(
    group: FakeGroup, consumer: RebalanceAwareConsumer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in confluent-kafka."""
    limits: list[float] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:  # noqa: ANN401 - any of them
            limits.extend(given for given in arguments if isinstance(given, int | float))
            return call(*arguments)

        return noted

    for of, calls in (
        (member_of(consumer), ("settle", "committed", "close")),
        (
            group,
            (
                "beginning_offsets",
                "end_offsets",
                "offsets_for_times",
                "partitions_for",
                "list_topics",
                "check",
            ),
        ),
    ):
        for call in calls:
            monkeypatch.setattr(of, call, noting(getattr(of, call)))
    TIMED[name](consumer, -1)
    assert math.inf in limits
    assert min(limits) >= 0


def test_time_out_that_overflows_the_clock_is_infinite(consumer: RebalanceAwareConsumer) -> None:
    consumer.wakeup()
    assert consumer.poll(10**400) == []
    consumer.close(10**400)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_consumer_refuses_to_be_copied(
    consumer: RebalanceAwareConsumer, duplicate: Callable[[object], object]
) -> None:
    """The copy would share its member, and close it."""
    with pytest.raises(TypeError, match="a consumer cannot be copied or pickled"):
        duplicate(consumer)


def test_setting_whose_name_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the name of each setting must be a text, not 5"):
        RebalanceAwareConsumer({**CONFIG, 5: "x"})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="must be a text, not None"):
        validated({**CONFIG, "default.topic.config": {None: "x"}}, hold_limit_s=10)


@pytest.mark.parametrize("at", [-1, -2, -3, -1001])
def test_negative_time_is_refused(consumer: RebalanceAwareConsumer, at: int) -> None:
    """Kafka treats -1 as the end of the log."""
    for times in ({P0: at}, [confluent_kafka.TopicPartition("orders", 0, at)]):
        with pytest.raises(ValueError, match=f"orders-0: {at} is not a time; pass milliseconds"):
            consumer.offsets_for_times(times)


def test_refused_subscription_sets_no_listener(consumer: RebalanceAwareConsumer) -> None:
    listeners: list[object] = []
    consumer.set_rebalance_listener = listeners.append  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError, match="subscribe expects names of topics"):
        consumer.subscribe("orders", CompositeRebalanceListener())
    assert listeners == []


def test_topics_may_be_a_generator(group: FakeGroup) -> None:
    consumer = consumer_of(group, subscribed=False)
    consumer.subscribe(topic for topic in ["orders"])
    consumer.poll(0)
    consumer.pause_topics(topic for topic in ["orders"])
    assert consumer.assignment() == consumer.paused() == {P0}
    consumer.resume_topics(topic for topic in ["orders"])
    assert not consumer.paused()
    consumer.close()


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e9, 10**400, 0, -1, None, "5", True])
def test_unusable_hold_limit_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="hold_limit_s must be"):
        RebalanceAwareConsumer(CONFIG, hold_limit_s=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["probe_interval_s", "discovery_interval_s"])
@pytest.mark.parametrize("value", [math.nan, -1, None, "5", 10**400])
def test_unusable_interval_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be a number of seconds"):
        RebalanceAwareConsumer(CONFIG, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["error_cb", "stats_cb", "throttle_cb", "on_commit"])
@pytest.mark.parametrize("value", [None, 5, "print"])
def test_setting_that_is_no_function_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' must be a function"):
        validated({**CONFIG, name: value}, hold_limit_s=10)


def test_settings_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the settings must be a mapping"):
        RebalanceAwareConsumer("localhost:9092")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"'default\.topic\.config' must be a mapping"):
        validated({**CONFIG, "default.topic.config": 5}, hold_limit_s=10)


def test_default_topic_config_is_part_of_the_settings() -> None:
    """As in the client; a setting for automatic commits is refused there too."""
    settings = validated(
        {**CONFIG, "default.topic.config": {"auto.offset.reset": "earliest"}}, hold_limit_s=10
    )
    assert settings.offset_reset == "earliest"
    assert settings.fetcher()["auto.offset.reset"] == "error"
    with pytest.raises(ConfigurationError, match=r"enable\.auto\.commit"):
        validated({**CONFIG, "default.topic.config": {"enable.auto.commit": True}}, hold_limit_s=10)
