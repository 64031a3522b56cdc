"""The mailbox between the ticks of a sensor and the thread of a member.

All that the two share. A tick puts in that it came, and takes what is there. The tick that has made
the member waits a moment for it; no other tick does, and the member waits for none.
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
    from dagster_rebalance.core.runs.batch_request import BatchRequest

_NOTES_KEPT = 500


@dataclass(frozen=True, slots=True)
class Mail:
    """What a tick finds: the runs to start, and what to tell people, also in few words."""

    batch_requests: tuple[BatchRequest, ...] = ()
    summary: tuple[str, ...] = ("the member is starting",)
    glance: str = "no member here"


class Mailbox:
    """Safe for several threads.

    Args:
        clock: A monotonic clock.

    Attributes:
        doing: What the member does at the moment, as the end of a sentence.
        is_abandoned: Whether another member has taken its place, so that it must do nothing any
            more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._notes: deque[str] = deque(maxlen=_NOTES_KEPT)
        self._posted_at = clock()
        self._mail = Mail()
        self._has_settled = threading.Event()
        self.doing = "starting"
        self.is_abandoned = False

    @property
    def mail(self) -> Mail:
        """What the member has to say."""
        return self._mail

    @property
    def silent_s(self) -> float:
        """For how long the member has said nothing.

        It does so many times a second while all is well.
        """
        return self._clock() - self._posted_at

    def post(self, mail: Mail) -> None:
        """Replace what the member has to say."""
        self._mail = mail
        self._posted_at = self._clock()

    def settle(self) -> None:
        """Let nobody wait for the first mail any more: it is there, or never comes."""
        self._has_settled.set()

    def wait_for_first(self, limit_s: float) -> None:
        """Wait until the member has said what it takes on first, or for `limit_s` seconds."""
        self._has_settled.wait(limit_s)

    def tell(self, event: Event) -> None:
        """Put something into the member's inbox."""
        self._events.put(event)

    def take_events(self) -> list[Event]:
        """What was put in, oldest first."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def note(self, text: str) -> None:
        """Leave a sentence for the next tick's log."""
        self._notes.append(f"{time.strftime('%H:%M:%S')} {text}")

    def take_notes(self) -> list[str]:
        """What happened since notes were last taken, oldest first."""
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes
