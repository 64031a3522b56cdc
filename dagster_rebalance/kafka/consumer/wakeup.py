"""How a consumer that waits for records is read from and woken: iteration, `wakeup`, and time-outs.

Owns how a wait ends early. Must never call anything of the client in `wakeup`: it is called by
other threads and by signal handlers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dagster_rebalance.kafka.consumer.arguments import given_seconds
from dagster_rebalance.kafka.consumer.pausing import PausingConsumer

if TYPE_CHECKING:
    from confluent_kafka import Message
    from typing_extensions import Self

DEFAULT_POLL_S = 1.0
"""How long a poll waits unless it is told."""


class WakingConsumer(PausingConsumer):
    """A consumer that can be iterated over, and woken."""

    _woken = False
    _is_told = False
    """Whether the caller was told what the last poll has found."""

    def wakeup(self) -> None:
        """Let the poll that waits, or else the next one, return at once with what there is.

        It returns and raises nothing, so no record and no news of a rebalance is lost with it. An
        iteration over the consumer ends. Any thread and a signal handler may call it.
        """
        # A plain flag: a signal handler must not wait for a lock that the thread it interrupts has.
        self._woken = True
        self._member.wake()

    def __iter__(self) -> Self:
        """Iterate over the records, until `wakeup`."""
        return self

    def __next__(self) -> Message:
        """The next record.

        Each is polled for by itself, so the position is behind the last record that was returned,
        and a partition is given up between two records. Work that goes on beyond that needs `poll`
        and `delay_revoke`.

        Raises:
            StopIteration: `wakeup` was called.
            BrokerError: As in `poll`; the iteration can go on.
        """
        for record in self._next_or_nothing():
            # Plain steps, without a call: a signal handler may raise in between.
            self._is_told = True
            if self._fetcher:
                self._fetcher.is_open = False
            return record
        raise StopIteration

    def _next_or_nothing(self) -> list[Message]:
        """The next record, or nothing once the iteration has to end."""
        while not self._has_to_return():
            records = self._poll_once(DEFAULT_POLL_S, 1)
            if records:
                return records
            # An iteration goes on over what a poll has found.
            self._is_told = True
            if self._fetcher:
                self._fetcher.is_open = False
        self._woken = False
        return []

    def _has_to_return(self) -> bool:
        """Whether a poll has to return with what there is."""
        return self._woken

    @abstractmethod
    def _poll_once(self, timeout_s: float, max_records: int) -> list[Message]:
        """Poll, and leave a wakeup noted."""


def patience_s(timeout_s: float | None, timeout: float | None) -> float:
    """Return how long a poll waits, by this package's name or by confluent-kafka's.

    Raises:
        TypeError: Both are given, or it is no number.
    """
    if timeout_s is not None and timeout is not None:
        msg = "give timeout_s or timeout, not both: they mean the same"
        raise TypeError(msg)
    given: object = timeout if timeout_s is None else timeout_s
    return given_seconds("poll", DEFAULT_POLL_S if given is None else given)
