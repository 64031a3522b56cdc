"""Repairs the headers of messages whose names are no UTF-8, as other languages' clients may write.

Owns that such a record has headers: of confluent-kafka's, the first look raises a `SystemError`,
and the second ends the process. As in Java, U+FFFD takes the place of the bytes.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from operator import length_hint
from typing import TYPE_CHECKING, Any

from confluent_kafka import Message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_REPLACED = "\ufffd"


def repair_headers(messages: Sequence[Message]) -> None:
    """Let the headers of messages be read, whatever the bytes of their names are."""
    left = iter(messages)
    while (problem := _problem_of(left)) is not None:
        message = messages[-1 - length_hint(left)]
        message.set_headers(list(_repaired(message, problem)))


def _problem_of(left: Iterator[Message]) -> SystemError | None:
    """The error of the first message that has one; the iterator is behind that message."""
    try:
        # Not in a loop of Python: a call there is compiled, after some of them, to one that does
        # not look for the error, and a later line raises it.
        deque(map(Message.headers, left), maxlen=0)
    except SystemError as problem:
        return problem
    return None


def _repaired(message: Message, problem: SystemError) -> Iterator[tuple[str, bytes | None]]:
    """The headers. The client tells the bytes of the first broken name only."""
    headers: Any = None
    with suppress(SystemError):
        headers = message.headers()
    broken = _first_broken(problem)
    for header in headers or ():
        # The client has put NULL in the place of a broken name, which only repr can bear.
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
