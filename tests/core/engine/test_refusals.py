"""Kafka refuses writes or reads of a partition: it stops, and blocks no other partition."""

from __future__ import annotations

from dagster_rebalance.core.model import commands, events
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from tests.core.story import Script, play
from tests.core.world import tp
from tests.story import stories

STORIES = """
## partition_that_may_not_be_read_stops_and_resumes_automatically
world 10 2 | join m 0 | forbid 0 | assign 0 1 | wait 1
phase 0 = STOPPED | phase 1 = OWNED | reason = orders-0: grant the ACL READ
wait 25
shown = 0 stopped  # the same reason is no news
allow | wait 12
phase = OWNED | shown = 0 stopped, 0 resumed

## owned_partition_stops_when_its_bounds_may_not_be_read_any_more
world 0 2 | join m 2 | wait 1
phase 0 = OWNED
forbid 0 | wait 12
shown = 0 stopped | reason = orders-0: grant the ACL READ | phase 1 = OWNED

## hold_does_not_wait_for_a_refused_commit
world 10 | join m 0 | assign 0 | wait 1 | tick | start run1 | revoke 0 | wait 1
phase = DRAINING
forbid 0 | succeed run1 | wait 3
outcomes = revoke drained | receipt handed_over = 0 | claims 0 = 10:b1

## repeated_write_is_shown_as_waiting_since_the_first_one
world 10 | join m 0 | fails WriteOffsets | assign 0 | wait 30
explained ~ has waited 30.0 s for Kafka's confirmation
"""


@stories(STORIES)
def test_refusal(story: str) -> None:
    play(story)


def refuse(script: Script, write: commands.OffsetWrite, reason: str) -> None:
    """Kafka refuses a write."""
    script.member.feed(events.OffsetsWritten((), (), ((write, reason),)))


def test_refusals_for_unknown_partitions_are_ignored() -> None:
    script = play("world 0 2 | join m 2 | forbid 0 | wait 12 | phase = STOPPED")
    script.member.feed(events.BoundsRead({}, frozenset({tp(0), tp(7)})))
    script.play("phase = STOPPED")


def test_partition_resumes_when_its_refused_write_is_accepted() -> None:
    """The reason is shown once, and a refusal of another write changes nothing."""
    script = play("world 10 | join m 0 | fails WriteOffsets | assign 0")
    (asked,) = script.member.given(commands.WriteOffsets)
    assert isinstance(asked, commands.WriteOffsets)
    (write,) = asked.writes
    for number in range(2):
        refuse(script, write, f"grant the ACL READ, asked {number} times")
    refuse(script, commands.OffsetWrite(tp(0), 1, None, OffsetAndMetadata(7)), "late")
    refuse(script, commands.OffsetWrite(tp(5), 1, None, write.new), "foreign")
    ((_, reason),) = script.member.shown
    assert reason == (
        "orders-0: Kafka refuses to store its offset: grant the ACL READ, asked 0 times. It is "
        "retried every few seconds"
    )
    script.play("""
        phase = STOPPED
        wait 9 | given WriteOffsets = 1 | wait 2 | given WriteOffsets = 2
        answers | wait 11
        phase = OWNED | shown = 0 stopped, 0 resumed
        tick
        claims 0 = 10:b1
    """)
