"""Which topics a group reads: names and patterns."""

from __future__ import annotations

import re

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.topics import Topics

THERE = ["__consumer_offsets", "orders", "orders.eu", "orders.us", "payments", "returns"]


@pytest.mark.parametrize(
    ("texts", "among", "missing"),
    [
        (["returns", "orders", "orders"], ("returns", "orders"), ()),
        (["orders", "gone", "away"], ("orders",), ("away", "gone")),
        (["^orders"], ("orders", "orders.eu", "orders.us"), ()),
        (["^orders$"], ("orders",), ()),
        ([r"^orders\.(eu|us)$", "returns"], ("returns", "orders.eu", "orders.us"), ()),
        (["^.*"], ("orders", "orders.eu", "orders.us", "payments", "returns"), ()),
        (["^nothing", "gone"], (), ("gone",)),
        (["__consumer_offsets"], ("__consumer_offsets",), ()),
    ],
)
def test_names_and_patterns_match_existing_topics(
    texts: list[str], among: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    topics = Topics.of(texts)
    assert topics.among(THERE) == among
    assert topics.missing(THERE) == missing
    assert [topic for topic in THERE if topics.have(topic)] == sorted(among)


@pytest.mark.parametrize("texts", [["^orders", "returns"], [r"^orders\.", "^pay|^ret"]])
def test_subscription_with_pattern_is_one_full_match_pattern(texts: list[str]) -> None:
    topics = Topics.of(texts)
    pattern = topics.subscription
    assert isinstance(pattern, re.Pattern)
    fitting = {topic for topic in THERE if pattern.fullmatch(topic)}
    assert fitting == set(topics.among(THERE))


def test_subscription_without_pattern_is_unique_names() -> None:
    assert Topics.of(["b", "a", "b"]).subscription == ("b", "a")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "topics is empty: name at least one"),
        (["a b"], r"'a b' in topics cannot be the name of a topic.*A pattern begins with \^"),
        (["^(?P<a>x)", "^(?P<a>y)"], "cannot be combined into one: redefinition of group name 'a'"),
        (["^orders("], r"pattern '\^orders\(' in topics is invalid: missing \)"),
    ],
)
def test_invalid_topics_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topics.of(texts)
