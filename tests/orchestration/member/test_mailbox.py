"""The mailbox between ticks and the member's thread."""

from __future__ import annotations

from dagster_rebalance.core.model.events import LeaveRequested, TickArrived
from dagster_rebalance.orchestration.member.mailbox import Mailbox


def test_events_are_taken_once_and_in_order() -> None:
    box = Mailbox()
    box.send(TickArrived())
    box.send(LeaveRequested("test"))
    assert box.take_events() == [TickArrived(), LeaveRequested("test")]
    assert box.take_events() == []


def test_notes_are_taken_once_and_the_oldest_are_dropped() -> None:
    box = Mailbox()
    for number in range(1000):
        box.note(f"event {number}")
    notes = box.take_notes()
    assert len(notes) == 500
    assert notes[-1].endswith("event 999")
    assert box.take_notes() == []


def test_mail_before_the_first_turn_reports_the_start() -> None:
    mail = Mailbox().mail
    assert mail.batch_requests == ()
    assert mail.summary == ("the member is starting",)
