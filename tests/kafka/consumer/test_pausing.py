"""Pause marks: which partitions they cover, and how they travel in the metadata of a commit."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.claims import Claim, StoredPartition, decode, encode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.caller_commits import with_mark, without_mark
from dagster_rebalance.kafka.consumer.pauses import Pauses

EU, US = (TopicPartition(f"orders-{where}", 0) for where in ("eu", "us"))
CLICKS = TopicPartition("clicks", 3)
ORDERS = re.compile("orders-.*")


def test_marks_of_partitions_topics_and_the_consumer_are_independent() -> None:
    pauses = Pauses()
    pauses.partitions.add(EU)
    pauses.pause_topics(["orders-eu"])
    pauses.is_everything_paused = True
    assert pauses.among([EU, CLICKS]) == {EU, CLICKS}
    pauses.is_everything_paused = False
    assert pauses.among([EU, CLICKS]) == {EU}
    pauses.resume_topics(["orders-eu"])
    assert pauses.covers(EU)
    pauses.partitions.discard(EU)
    assert not pauses.covers(EU)


def test_pattern_covers_topics_whose_whole_name_matches() -> None:
    pauses = Pauses()
    pauses.pause_topics([re.compile("orders")])
    assert not pauses.covers(EU)
    pauses.pause_topics([ORDERS])
    assert pauses.among([EU, US, CLICKS]) == {EU, US}


def test_last_call_that_names_a_topic_decides() -> None:
    pauses = Pauses()
    pauses.pause_topics([ORDERS])
    pauses.resume_topics(["orders-eu"])
    assert pauses.among([EU, US]) == {US}
    pauses.pause_topics(["orders-eu"])
    pauses.resume_topics([ORDERS])
    assert not pauses.among([EU, US])
    pauses.pause_topics(["orders-us"])
    assert pauses.among([EU, US]) == {US}


def test_decisions_about_topics_do_not_accumulate() -> None:
    pauses = Pauses()
    for _ in range(100):
        pauses.pause_topics([ORDERS, "clicks"])
        pauses.resume_topics(["clicks", ORDERS])
    pauses.resume_topics(["never-paused"])
    assert vars(pauses)["_topics"] == {}


@given(st.text(max_size=50))
def test_mark_leaves_metadata_unchanged(metadata: str) -> None:
    assert without_mark(with_mark(metadata)) == (metadata, True)
    assert without_mark("mine") == ("mine", False)


def test_mark_and_claims_share_the_metadata() -> None:
    stored = StoredPartition(5, (Claim(9, "batch-1"),))
    committed = encode(stored)
    text, marked = without_mark(with_mark(committed.metadata))
    assert marked
    assert decode(OffsetAndMetadata(committed.offset, text)) == stored
