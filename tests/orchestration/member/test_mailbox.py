"""The mailbox between ticks and the member's thread."""

from __future__ import annotations

from dagster_rebalance.core.model.events import LeaveRequested, TickArrived
from dagster_rebalance.orchestration.member.mailbox import Mailbox


def test_events_are_taken_once_and_in_order() -> None:
    """A tick that is told twice would prolong the lease; a lost one would end it."""
    box = Mailbox()
    box.send(TickArrived())
    box.send(LeaveRequested("test"))
    assert box.take_events() == [TickArrived(), LeaveRequested("test")]
    assert box.take_events() == []


def test_notes_are_taken_once_and_the_oldest_give_way() -> None:
    """While no tick comes (after a reload, say) notes must not grow without end."""
    box = Mailbox()
    for number in range(1000):
        box.note(f"event {number}")
    notes = box.take_notes()
    assert len(notes) == 500
    assert notes[-1].endswith("event 999")
    assert box.take_notes() == []


def test_before_the_first_turn_the_mail_says_that_the_member_starts() -> None:
    """The first tick comes before the member has joined.

    Its skip reason is all that an operator sees.
    """
    mail = Mailbox().mail
    assert mail.batch_requests == ()
    assert mail.summary == ("the member is starting",)
