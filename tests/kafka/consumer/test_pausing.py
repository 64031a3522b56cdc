"""Pause marks: what covers a partition, and how a mark travels with a commit."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.claims import Claim, StoredPartition, decode, encode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.consumer.pauses import Pauses, with_mark, without_mark

EU, US = (TopicPartition(f"orders-{where}", 0) for where in ("eu", "us"))
CLICKS = TopicPartition("clicks", 3)
ORDERS = re.compile("orders-.*")


def test_a_mark_covers_a_partition_that_nobody_has_seen_yet() -> None:
    """A mark is a wish of the user, not a state of the assignment.

    It counts "even if the topicPartition has not been existed".
    """
    marks = Pauses()
    marks.pause([TopicPartition("not-there-yet", 99)])
    assert marks.covers(TopicPartition("not-there-yet", 99))
    assert not marks.covers(TopicPartition("not-there-yet", 98))
    assert marks.partitions == {TopicPartition("not-there-yet", 99)}


def test_resuming_a_partition_takes_its_mark_away() -> None:
    """A second resume of the same partition changes nothing.

    The mark "can only be modified by the user's pause and resume".
    """
    marks = Pauses()
    marks.pause([EU, US])
    marks.resume([EU])
    marks.resume([EU])
    assert marks.among([EU, US]) == {US}


def test_marks_of_partitions_topics_and_everything_are_apart() -> None:
    """Whoever takes one of them away must not undo what another part of the program wants."""
    marks = Pauses()
    marks.pause([EU])
    marks.pause_topics(["orders-eu"])
    marks.pause_all()
    marks.resume_all()
    assert marks.covers(EU)
    marks.resume_topics(["orders-eu"])
    assert marks.covers(EU)
    marks.resume([EU])
    assert not marks.covers(EU)


def test_pausing_everything_covers_whatever_comes() -> None:
    """The mark of the whole consumer."""
    marks = Pauses()
    marks.pause_all()
    assert marks.among([EU, CLICKS]) == {EU, CLICKS}
    assert not marks.partitions


def test_a_pattern_covers_topics_whose_whole_name_matches() -> None:
    """The same rule as for a subscription."""
    marks = Pauses()
    marks.pause_topics([re.compile("orders")])
    assert not marks.covers(EU)
    marks.pause_topics([ORDERS])
    assert marks.among([EU, US, CLICKS]) == {EU, US}


def test_the_last_call_that_names_a_topic_decides() -> None:
    """A topic out of a pattern, and a pattern over a topic, in both orders."""
    marks = Pauses()
    marks.pause_topics([ORDERS])
    marks.resume_topics(["orders-eu"])
    assert marks.among([EU, US]) == {US}
    marks.pause_topics(["orders-eu"])
    marks.resume_topics([ORDERS])
    assert not marks.among([EU, US])
    marks.pause_topics(["orders-us"])
    assert marks.among([EU, US]) == {US}


def test_decisions_about_topics_do_not_pile_up() -> None:
    """A program may pause and resume for years."""
    marks = Pauses()
    for _ in range(100):
        marks.pause_topics([ORDERS, "clicks"])
        marks.resume_topics(["clicks", ORDERS])
    marks.resume_topics(["never-paused"])
    assert vars(marks)["_topics"] == {}


@given(st.text(max_size=50))
def test_a_mark_travels_in_front_of_any_metadata(metadata: str) -> None:
    """Whatever the user stores there comes back unchanged."""
    text, marked = without_mark(with_mark(metadata))
    assert (text, marked) == (metadata, True)


def test_metadata_without_a_mark_is_left_as_it_is() -> None:
    """It belongs to the user, or is a claim."""
    assert without_mark("mine") == ("mine", False)


def test_a_mark_and_claims_share_the_metadata() -> None:
    """The next owner finds both."""
    stored = StoredPartition(5, (Claim(9, "batch-1"),))
    committed = encode(stored)
    text, marked = without_mark(with_mark(committed.metadata))
    assert marked
    assert decode(OffsetAndMetadata(committed.offset, text)) == stored
