"""Tags and config of runs, which users may have changed."""

from __future__ import annotations

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.offsets import OffsetRange, is_topic_name
from dagster_rebalance.core.model.run_snapshot import BatchRequest
from dagster_rebalance.orchestration.storage.run_tags import (
    BATCH_TAG,
    BISECTED_TAG,
    GROUP_TAG,
    RANGES_TAG,
    SET_ASIDE_TAG,
    format_range,
    format_ranges,
    parse_ranges,
    ranges_in,
    run_config,
    run_tags,
    set_aside_of,
)
from tests.orchestration.parts import batch_request, span

topics = st.text("abcXYZ019._-", min_size=1, max_size=20).filter(is_topic_name)
ranges = st.builds(
    lambda topic, partition, start, size: OffsetRange(topic, partition, start, start + size),
    topics,
    st.integers(0, 10_000),
    st.integers(0, 2**62),
    st.integers(1, 10**9),
)


@given(st.lists(ranges, min_size=1, max_size=6))
def test_run_config_round_trip_keeps_ranges(wanted: list[OffsetRange]) -> None:
    made = BatchRequest("b-1", 1, tuple(wanted))
    assert ranges_in(run_config(made, "any_key"), "b-1") == tuple(wanted)


def test_ranges_of_another_batch_are_ignored() -> None:
    """The tag of a re-execution may name another batch than its config."""
    assert ranges_in(run_config(batch_request("b-1"), "kafka_batch"), "b-2") == ()


def test_batch_is_found_among_other_resources() -> None:
    config = run_config(batch_request("b-1", span(3)), "batch_of_orders")
    config["resources"] = {
        "io": {"config": {"path": "/data"}},
        "plain": "text",
        "other": {},
        **config["resources"],
    }
    assert ranges_in(config, "b-1") == (span(3),)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"resources": None},
        {"resources": {"batch": None}},
        {"resources": {"batch": {"config": {"batch_id": "b-1"}}}},
        {"resources": {"batch": {"config": {"batch_id": "b-1", "ranges": {"env": "RANGES"}}}}},
        {"resources": {"batch": {"config": {"batch_id": "b-1", "ranges": ["orders:0:5"]}}}},
        {"resources": {"batch": {"config": {"batch_id": "b-1", "ranges": ["orders:0:9:5"]}}}},
        {"resources": {"batch": {"config": {"batch_id": "b-1", "ranges": [None]}}}},
        {
            "resources": {
                "batch": {"config": {"batch_id": "b-1", "ranges": ["orders' OR '1'='1:0:5:9"]}}
            }
        },
        {"resources": {"batch": {"config": {"batch_id": "b-1", "ranges": ["../../etc:0:5:9"]}}}},
        {"ops": {"work": {"config": {"batch_id": "b-1"}}}},
    ],
)
def test_unreadable_run_config_has_no_ranges(config: dict[str, object]) -> None:
    assert ranges_in(config, "b-1") == ()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("orders", "orders"),
        ("orders:0:1", "orders:0:1"),
        ("orders:0:1:2:3", "orders:0:1:2:3"),
        ("orders:x:1:2", "orders:x:1:2"),
        ("orders:0:-1:2", "orders:0:-1:2"),
        ("orders:0:1:²", "orders:0:1:²"),
        ("orders:0:1:2,1:5", "orders:1:5"),
        ("orders:0:1:2,", "orders:"),
        ("orders:0:1:2,payments:0:1:2", "orders:payments:0:1:2"),
    ],
)
def test_parse_ranges_names_the_invalid_text(text: str, shown: str) -> None:
    with pytest.raises(ValueError, match="is not a range") as problem:
        list(parse_ranges([text]))
    assert str(problem.value).startswith(repr(shown))


def test_range_separator_is_no_topic_character() -> None:
    assert format_range(OffsetRange("a-b.c_d", 3, 120, 240)) == "a-b.c_d:3:120:240"
    assert list(parse_ranges(["a-b.c_d:3:120:240"])) == [OffsetRange("a-b.c_d", 3, 120, 240)]


def test_few_ranges_have_one_text_each() -> None:
    few = [span(number) for number in range(100)]
    assert format_ranges(few) == [f"orders:{number}:0:10" for number in range(100)]


def test_many_ranges_have_one_text_for_each_topic() -> None:
    others = [OffsetRange("payments", number, 7, 9) for number in range(2)]
    many = [*(span(number) for number in range(100)), *others]
    joined, last = format_ranges(many)
    assert joined.startswith("orders:0:0:10,1:0:10,2:0:10,")
    assert last == "payments:0:7:9,1:7:9"


@given(st.lists(ranges, min_size=101, max_size=101))
def test_many_ranges_keep_their_order(many: list[OffsetRange]) -> None:
    """A run that is requested again has the same run key."""
    assert list(parse_ranges(format_ranges(many))) == many


def test_list_of_ranges_of_an_earlier_release_is_read() -> None:
    many = [span(number) for number in range(200)]
    assert list(parse_ranges(map(format_range, many))) == many


def test_run_tags_of_a_part_have_the_bisected_range() -> None:
    tags = run_tags(batch_request("b-1.n0-40", span(3, 0, 32)), "etl")
    assert (tags[BISECTED_TAG], tags[RANGES_TAG]) == ("orders-3 [0, 64)", "orders-3 [0, 32)")
    assert BISECTED_TAG not in run_tags(batch_request("b-1", span(3)), "etl")


def test_run_tags_shorten_many_ranges() -> None:
    tags = run_tags(batch_request("b-1", *(span(number) for number in range(10))), "etl")
    assert (tags[BATCH_TAG], tags[GROUP_TAG]) == ("b-1", "etl")
    assert tags[RANGES_TAG].endswith("orders-3 [0, 10), and 6 more")


def test_re_execution_that_skips_steps_leaves_what_its_parent_has_set_aside() -> None:
    named, unnamed = (
        dg.DagsterRun("job", tags={SET_ASIDE_TAG: text}) for text in ("parent orders-0-3", "parent")
    )
    assert set_aside_of(named, is_partial=True) == frozenset({"orders-0-3"})
    assert set_aside_of(unnamed, is_partial=True) is None
    assert set_aside_of(named, is_partial=False) == frozenset()
