"""Consume the messages of a client, and repair headers whose names are not UTF-8.

confluent-kafka raises a `SystemError` at the first access to such headers, which clients in other
languages may write, and ends the process at the second. As in Java, U+FFFD replaces the bytes.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from operator import length_hint
from typing import TYPE_CHECKING, Any

from confluent_kafka import Message

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from confluent_kafka import Consumer

_REPLACED = "\ufffd"


def consume_available(consumer: Consumer, count: int, timeout_s: float) -> list[Message]:
    """Wait for the first message, and return it with the others that are already available.

    The client's own call would wait for all `count` messages.
    """
    batch = consumer.consume(count, 0.0)
    if timeout_s and not batch:
        batch = consumer.consume(1, timeout_s)
        if count > 1 and batch:
            batch += consumer.consume(count - 1, 0.0)
    return batch


def last_of_partitions(messages: Sequence[Message]) -> Iterable[Message]:
    """Return the last message of each partition."""
    keys: Iterable[object] = map(Message.partition, messages)
    if len(set(map(Message.topic, messages))) > 1:
        keys = zip(map(Message.topic, messages), keys, strict=True)
    return dict(zip(keys, messages, strict=True)).values()


def repair_headers(messages: Sequence[Message]) -> None:
    """Make the headers of messages readable, whatever the bytes of their names."""
    left = iter(messages)
    while (problem := _first_problem(left)) is not None:
        message = messages[-1 - length_hint(left)]
        message.set_headers(list(_repaired(message, problem)))


def _first_problem(left: Iterator[Message]) -> SystemError | None:
    """Return the error of the first message that has one, and advance the iterator past it."""
    try:
        # Not a Python loop: after some calls, CPython specialises the call to one that does not
        # check for the error, and a later line raises it.
        if any(map(Message.headers, left)):  # faster, and usually there are none
            deque(map(Message.headers, left), maxlen=0)
    except SystemError as problem:
        return problem
    return None


def _repaired(message: Message, problem: SystemError) -> Iterator[tuple[str, bytes | None]]:
    """Yield the headers. The client reports the bytes of only the first broken name."""
    headers: Any = None
    with suppress(SystemError):
        headers = message.headers()
    broken = _first_broken(problem)
    for header in headers or ():
        # In place of a broken name the client stores NULL, which only repr can handle.
        if repr(header).startswith("(<NULL>"):
            yield broken, header[1]
            broken = _REPLACED
        else:
            yield header


def _first_broken(problem: BaseException) -> str:
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, UnicodeDecodeError):
            return cause.object.decode(errors="replace")
        cause = cause.__cause__ or cause.__context__
    return _REPLACED
