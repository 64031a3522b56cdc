"""What a client reports in its callbacks about its connections, kept as the reason of a silence.

A response that is too large and a quota concern a connection and no partition, so no message of
the client carries them. Must never decide that a read fails: its owner does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster_rebalance.kafka.client.errors import ALL_BROKERS_DOWN, UNPARSABLE, said

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import KafkaError, ThrottleEvent

NO_REASON = (
    "the client reports no reason; the batch there is damaged, or in a format that it does not know"
)
"""What a silent client is reported with, if it has reported nothing."""
_VALID_S = 60.0
"""librdkafka repeats an error that goes on every 30 s."""


class ConnectionErrors:
    """The last troubles of one client.

    Args:
        clock: A monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.forget()

    def noting(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a client, with callbacks that also call those of the user."""
        return {
            **config,
            "error_cb": _both(self._note, config.get("error_cb")),
            "throttle_cb": _both(self._note_throttling, config.get("throttle_cb")),
        }

    def forget(self) -> None:
        """The client has made progress: an earlier report is no reason any more."""
        self._last: KafkaError | None = None
        self._noted_at = float("-inf")
        self._throttled_s = 0.0
        self._throttled_until = float("-inf")

    def take_unparsable(self) -> KafkaError | None:
        """The error of a response that the client did not take, once. It repeats the request."""
        last = self._last
        if last is None or last.code() not in UNPARSABLE:
            return None
        self._last = None
        return last

    @property
    def reason(self) -> str:
        """Why the client may be silent; empty when it has reported nothing for a while."""
        now = self._clock()
        if self._last is not None and now < self._noted_at + _VALID_S:
            return f"{said(self._last)} ({self._last.name()})"
        if now < self._throttled_until:
            return (
                f"the broker throttles this client for {self._throttled_s:g} s, because it is "
                "above its quota"
            )
        return ""

    def _note(self, error: KafkaError) -> None:
        # That all brokers are down follows from the error before it, and says less.
        if error.code() != ALL_BROKERS_DOWN or self._last is None:
            self._last, self._noted_at = error, self._clock()

    def _note_throttling(self, event: ThrottleEvent) -> None:
        self._throttled_s = event.throttle_time
        self._throttled_until = self._clock() + event.throttle_time + _VALID_S


def _both(
    ours: Callable[[Any], None], theirs: Callable[[Any], None] | None
) -> Callable[[Any], None]:
    def call(reported: Any) -> None:  # noqa: ANN401 - an error or an event, as the client has it
        ours(reported)
        if theirs is not None:
            theirs(reported)

    return call
