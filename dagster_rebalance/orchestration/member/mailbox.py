"""The mailbox: the only state that the ticks of a sensor share with the thread of a member.

A tick puts an event in and takes the current mail. Only the tick that has created the member waits
for its first mail, for a moment; the member waits for no tick.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.model.events import Event
    from dagster_rebalance.core.model.run_snapshot import BatchRequest

_NOTES_KEPT = 500


@dataclass(frozen=True, slots=True)
class Mail:
    """The runs that a tick must request, and a long and a short summary of the member."""

    batch_requests: tuple[BatchRequest, ...] = ()
    summary: tuple[str, ...] = ("the member is starting",)
    headline: str = "this process has no member"


class Mailbox:
    """Safe for several threads.

    Attributes:
        mail: The current mail of the member.
        doing: The current step of the member, as the end of a message.
        is_abandoned: Whether another member has replaced this member, which must then stop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._notes: deque[str] = deque(maxlen=_NOTES_KEPT)
        self._posted_at = clock()
        self._has_settled = threading.Event()
        self.mail = Mail()
        self.doing = "starting"
        self.is_abandoned = False

    @property
    def silent_s(self) -> float:
        """Seconds since the member last posted mail, which it does many times a second."""
        return self._clock() - self._posted_at

    def post(self, mail: Mail) -> None:
        """Replace the mail."""
        self.mail = mail
        self._posted_at = self._clock()

    def settle(self) -> None:
        """End the wait for the first mail, which has arrived or never will."""
        self._has_settled.set()

    def wait_for_first(self, limit_s: float) -> None:
        """Wait for the first mail, for `limit_s` seconds at most."""
        self._has_settled.wait(limit_s)

    def send(self, event: Event) -> None:
        """Send an event to the member."""
        self._events.put(event)

    def take_events(self) -> list[Event]:
        """Take the events, oldest first."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def note(self, text: str) -> None:
        """Add a message to the log of the next tick."""
        self._notes.append(f"{time.strftime('%H:%M:%S')} {text}")

    def take_notes(self) -> list[str]:
        """Take the notes, oldest first."""
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes
