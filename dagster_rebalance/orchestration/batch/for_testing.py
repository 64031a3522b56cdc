"""The messages of a batch in a test of an asset, with Spark and without."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.core.model.offsets import OffsetRange

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class GivenMessages:
    """The messages of a batch for testing."""

    def __init__(self, ranges: Iterable[OffsetRange], messages: Iterable[Message] | None) -> None:
        own = tuple(ranges)
        self._messages = None if messages is None else tuple(messages)
        for message in self._messages or ():
            _check_parts(message)
            if not any(_holds(range_, message) for range_ in own):
                msg = (
                    f"the message at {message.topic()}-{message.partition()} offset "
                    f"{message.offset()} is in none of the ranges {', '.join(map(str, own))}: a "
                    "real batch would not have it"
                )
                raise IllegalStateError(msg)

    def read(self, ranges: Iterable[OffsetRange]) -> Iterator[Message]:
        """Return the messages of some ranges."""
        if self._messages is None:
            msg = "this batch has no messages: give some to KafkaBatch.for_testing(messages=)"
            raise IllegalStateError(msg)
        wanted = tuple(ranges)
        return (one for one in self._messages if any(_holds(range_, one) for range_ in wanted))

    def dataframe(
        self,
        session: SparkSession,
        ranges: Iterable[OffsetRange],
        options: Mapping[str, str] | None,
    ) -> DataFrame:
        """Return the messages of some ranges in the columns of Spark's Kafka source."""
        from dagster_rebalance.spark.reading.ranges import given_records

        wanted = tuple(ranges)
        rows = [
            (*_columns(message), range_.start, range_.until)
            for range_ in wanted
            for message in self.read([range_])
        ]
        return given_records(session, rows, wanted, options)


def _check_parts(message: Message) -> None:
    headers: Any = message.headers()
    is_text = all(_is_bytes(part) for part in (message.key(), message.value()))
    if is_text and (
        headers is None or (isinstance(headers, list) and all(map(_is_header, headers)))
    ):
        return
    msg = (
        f"the message at {message.topic()}-{message.partition()} offset {message.offset()} has a "
        "form that Kafka's client never returns: its key and its value must be bytes or None, and "
        "its headers a list of pairs of a name and bytes or None"
    )
    raise IllegalStateError(msg)


def _is_header(header: Any) -> bool:  # noqa: ANN401 - what a test gives
    if not isinstance(header, tuple) or len(header) != 2:  # noqa: PLR2004 - name and value
        return False
    name, value = header
    return isinstance(name, str) and _is_bytes(name) and _is_bytes(value)


def _is_bytes(part: object) -> bool:
    if isinstance(part, str):  # the client encodes it
        return part.encode(errors="ignore").decode() == part
    return part is None or isinstance(part, bytes)


def _time(at_ms: int) -> datetime | None:
    """Return a time, if Python has it: its years end at 9999."""
    try:
        return _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return None


def _holds(range_: OffsetRange, message: Message) -> bool:
    return (message.topic(), message.partition()) == (
        range_.topic,
        range_.partition,
    ) and range_.start <= (message.offset() or 0) < range_.until


def _columns(message: Message) -> tuple[object, ...]:
    kind, at_ms = message.timestamp()
    at = _time(at_ms) if kind else None
    return (
        *(message.key(), message.value(), message.topic(), message.partition(), message.offset()),
        # Kafka's client numbers the types from 1, Spark from 0.
        *(at, kind - 1, message.headers()),
    )
