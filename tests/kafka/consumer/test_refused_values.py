"""The call that is given an unusable value refuses it and changes nothing.

The error says what is expected.
"""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.consumer.listener import CompositeRebalanceListener
from dagster_rebalance.testing.fake_group import FakeGroup

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = {"bootstrap.servers": "nobody:9092", "group.id": "etl"}
P0 = TopicPartition("orders", 0)
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

REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "pause_pattern(None)": (
        lambda it: it.pause_pattern(None),
        "pause_pattern expects a compiled pattern of text",
    ),
    "pause_pattern(text)": (
        lambda it: it.pause_pattern("orders"),
        "pause_pattern expects a compiled pattern of text",
    ),
    "pause_pattern(bytes)": (
        lambda it: it.pause_pattern(re.compile(b"o.*")),
        "pause_pattern expects a compiled pattern of text",
    ),
    "resume_pattern(None)": (
        lambda it: it.resume_pattern(None),
        "resume_pattern expects a compiled pattern of text",
    ),
    "pause_topics(text)": (
        lambda it: it.pause_topics("orders"),
        "pause_topics expects a collection of names",
    ),
    "pause_topics([5])": (
        lambda it: it.pause_topics([5]),
        "pause_topics expects a collection of names",
    ),
    "resume_topics(text)": (
        lambda it: it.resume_topics("orders"),
        "resume_topics expects a collection of names",
    ),
    "resume_topics([5])": (
        lambda it: it.resume_topics([5]),
        "resume_topics expects a collection of names",
    ),
    "resume_topics(None)": (
        lambda it: it.resume_topics(None),
        "resume_topics expects a collection of names",
    ),
    "subscribe(text)": (
        lambda it: it.subscribe("orders"),
        "subscribe expects names of topics, or one compiled pattern",
    ),
    "subscribe(5)": (
        lambda it: it.subscribe(5),
        "subscribe expects names of topics, or one compiled pattern",
    ),
    "subscribe(None)": (
        lambda it: it.subscribe(None),
        "subscribe expects names of topics, or one compiled pattern",
    ),
    "subscribe(bytes)": (
        lambda it: it.subscribe(re.compile(b"o.*")),
        "subscribe expects a compiled pattern of text",
    ),
    "close(text)": (lambda it: it.close("x"), "close expects a number of seconds"),
    "close(None)": (lambda it: it.close(None), "close expects a number of seconds"),
    "close(nan)": (lambda it: it.close(math.nan), "close expects a number of seconds"),
    "commit_sync(.., text)": (
        lambda it: it.commit_sync(ONE, "x"),
        "commit_sync expects a number of seconds",
    ),
    "commit_sync(.., nan)": (
        lambda it: it.commit_sync(ONE, math.nan),
        "commit_sync expects a number of seconds",
    ),
    "poll(text)": (lambda it: it.poll("1"), "poll expects a number of seconds"),
    **{
        f"{name}(.., text)": (
            lambda it, name=name: TIMED[name](it, "orders"),  # type: ignore[misc]
            f"{name} expects a number of seconds",
        )
        for name in TIMED
    },
    "commit_async(.., 5)": (lambda it: it.commit_async(ONE, 5), "commit_async expects a function"),
    "poll(0, None)": (lambda it: it.poll(0, None), "poll expects a whole number as max_records"),
    "poll(0, 2.5)": (lambda it: it.poll(0, 2.5), "poll expects a whole number as max_records"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_with_a_wrong_value_is_refused_and_changes_nothing(name: str) -> None:
    """A later error does not point to the mistake.

    That holds for an error of a later poll and for an AttributeError from inside the library.
    """
    call, expected = REFUSED[name]
    group = FakeGroup({"orders": 1})
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )
    consumer.subscribe(["orders"])
    consumer.poll(0)
    with pytest.raises(TypeError, match=expected):
        call(consumer)
    consumer.poll(0)
    assert consumer.assignment() == {P0}
    assert not consumer.paused()
    assert not group.committed
    consumer.close()


@pytest.mark.parametrize("name", TIMED)
def test_a_time_out_below_0_is_without_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in confluent-kafka; some calls gave up at once, and others took it for an error."""
    group = FakeGroup({"orders": 1})
    member = group.member()
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=member, cluster=group, clock=group.clock
    )
    consumer.subscribe(["orders"])
    consumer.poll(0)
    limits: list[float] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:  # noqa: ANN401 - any of them
            limits.extend(given for given in arguments if isinstance(given, int | float))
            return call(*arguments)

        return noted

    for of, calls in (
        (member, ("settle", "committed", "close")),
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


def test_a_time_out_that_no_clock_can_count_is_without_end() -> None:
    """A sum of the clock and such a number overflows."""
    group = FakeGroup({"orders": 1})
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )
    consumer.subscribe(["orders"])
    consumer.wakeup()
    assert consumer.poll(10**400) == []
    consumer.close(10**400)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_consumer_is_not_copied(duplicate: Callable[[object], object]) -> None:
    """The copy would share its member, and close it."""
    group = FakeGroup({"orders": 1})
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )
    with pytest.raises(TypeError, match="a consumer cannot be copied or pickled"):
        duplicate(consumer)
    consumer.close()


def test_a_setting_whose_name_is_no_text_is_refused() -> None:
    """In the mapping, and in the one inside of it."""
    with pytest.raises(ConfigurationError, match="the name of each setting must be a text, not 5"):
        RebalanceAwareConsumer({**CONFIG, 5: "x"})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="must be a text, not None"):
        validated({**CONFIG, "default.topic.config": {None: "x"}}, hold_limit_s=10)


@pytest.mark.parametrize("at", [-1, -2, -3, -1001])
def test_a_negative_time_is_refused(at: int) -> None:
    """Kafka takes -1 for the end of the log, and refuses others in words of its own."""
    group = FakeGroup({"orders": 1})
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )
    theirs = confluent_kafka.TopicPartition("orders", 0, at)
    for given in ({P0: at}, [theirs]):
        with pytest.raises(ValueError, match=f"orders-0: {at} is no time; give milliseconds"):
            consumer.offsets_for_times(given)
    consumer.close()


def test_a_refused_subscription_sets_no_listener() -> None:
    """It would be told of the partitions of the subscription before."""
    group, listener = FakeGroup({"orders": 1}), CompositeRebalanceListener()
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )
    listeners: list[object] = []
    consumer.set_rebalance_listener = listeners.append  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError, match="subscribe expects names of topics"):
        consumer.subscribe("orders", listener)
    assert listeners == []


def test_topics_that_can_be_gone_through_only_once_are_taken() -> None:
    """A generator is as good as a list.

    The check used it up, so that nothing was subscribed to or paused.
    """
    group = FakeGroup({"orders": 1})
    consumer = RebalanceAwareConsumer(
        CONFIG, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )
    consumer.subscribe(topic for topic in ["orders"])
    consumer.poll(0)
    consumer.pause_topics(topic for topic in ["orders"])
    assert consumer.assignment() == consumer.paused() == {P0}
    consumer.resume_topics(topic for topic in ["orders"])
    assert not consumer.paused()
    consumer.close()


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e9, 10**400, 0, -1, None, "5", True])
def test_a_hold_limit_that_the_client_could_not_have_is_refused(value: object) -> None:
    """The client's own words would be about a number that nobody has written."""
    with pytest.raises(ConfigurationError, match="hold_limit_s must be"):
        RebalanceAwareConsumer(CONFIG, hold_limit_s=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["probe_interval_s", "discovery_interval_s"])
@pytest.mark.parametrize("value", [math.nan, -1, None, "5", 10**400])
def test_an_interval_that_is_no_number_is_refused(name: str, value: object) -> None:
    """It would be met in the middle of a hold."""
    with pytest.raises(ConfigurationError, match=f"{name} must be a number of seconds"):
        RebalanceAwareConsumer(CONFIG, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["error_cb", "stats_cb", "throttle_cb", "on_commit"])
@pytest.mark.parametrize("value", [None, 5, "print"])
def test_a_callback_that_cannot_be_called_is_refused(name: str, value: object) -> None:
    """It would be met when something has gone wrong already."""
    with pytest.raises(ConfigurationError, match=f"'{name}' must be a function"):
        validated({**CONFIG, name: value}, hold_limit_s=10)


def test_settings_that_are_no_mapping_are_refused() -> None:
    """By this package, with what is expected."""
    with pytest.raises(ConfigurationError, match="the settings must be a mapping"):
        RebalanceAwareConsumer("localhost:9092")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"'default\.topic\.config' must be a mapping"):
        validated({**CONFIG, "default.topic.config": 5}, hold_limit_s=10)


def test_settings_of_topics_count_where_the_client_has_them_apart() -> None:
    """As the client itself takes them; a commit that nobody asked for hides in them as well."""
    settings = validated(
        {**CONFIG, "default.topic.config": {"auto.offset.reset": "earliest"}}, hold_limit_s=10
    )
    assert settings.offset_reset == "earliest"
    assert settings.fetcher()["auto.offset.reset"] == "error"
    with pytest.raises(ConfigurationError, match=r"enable\.auto\.commit"):
        validated({**CONFIG, "default.topic.config": {"enable.auto.commit": True}}, hold_limit_s=10)
