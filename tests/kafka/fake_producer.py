"""A producer in memory: a test decides the fate of its records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import KafkaError


class FakeProducer:
    """What `DeadLetterProducer` needs of confluent-kafka's `Producer`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.sent: list[tuple[str, str, Any]] = []
        self.headers: list[list[Any] | None] = []
        self.refuses: list[Exception] = []
        self.fatal: KafkaError | None = None
        self.is_purged = False
        self._waiting: list[Callable[[KafkaError | None, Any], None]] = []
        self._reports: list[tuple[Callable[[KafkaError | None, Any], None], KafkaError | None]] = []

    def produce(
        self,
        topic: str,
        *,
        key: str,
        value: str | bytes | None,
        headers: list[Any] | None,
        on_delivery: Callable[[KafkaError | None, Any], None],
    ) -> None:
        if self.refuses:
            raise self.refuses.pop(0)
        self.sent.append((topic, key, value))
        self.headers.append(headers)
        self._waiting.append(on_delivery)

    def end(self, error: KafkaError | None = None) -> None:
        self._reports += [(report, error) for report in self._waiting]
        self._waiting = []

    def end_again(self) -> None:
        self._reports += self._reports

    def poll(self, timeout: float) -> int:
        assert timeout == 0 or self._reports, "its caller waits for what will not come"
        if self.fatal is not None:
            raise KafkaException(self.fatal)
        due, self._reports = self._reports, []
        for report, error in due:
            report(error, None)
        return len(due)

    def set_sasl_credentials(self, username: str, password: str, /) -> None:
        """Its login never changes."""

    def purge(self) -> None:
        self.is_purged = True

    def flush(self, timeout: float) -> int:
        return self.poll(timeout)
