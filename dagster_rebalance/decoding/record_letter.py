"""A dead letter of one record: the record as it was, with where it came from and what is wrong.

Owns its key, by which a reader drops what a replay has repeated, and the names of its headers.
"""

from __future__ import annotations

from dataclasses import dataclass

REASON_HEADER = "dead_letter.reason"
MOST_REASON_CHARACTERS = 2_000
"""A topic takes a record of a certain size, headers included."""

Headers = list[tuple[str, "bytes | None"]]


@dataclass(frozen=True)
class RecordLetter:
    """A record that could not be decoded.

    Attributes:
        topic: Where it is.
        partition: Of that topic.
        offset: In that partition.
        timestamp_ms: When it was made, in milliseconds since 1970; None if it does not say.
        reason: Why it could not be decoded.
        key: Its key.
        value: Its value, which becomes that of the letter.
        headers: Its headers, which the letter keeps.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None
    reason: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @property
    def letter_key(self) -> str:
        """The same for each letter of one record."""
        return f"{self.topic}-{self.partition}-{self.offset}"

    @property
    def letter_headers(self) -> Headers:
        """Those of the record, and what is known of it."""
        about: dict[str, object] = {
            "dead_letter.topic": self.topic,
            "dead_letter.partition": self.partition,
            "dead_letter.offset": self.offset,
            "dead_letter.timestamp_ms": self.timestamp_ms,
            REASON_HEADER: self.reason[:MOST_REASON_CHARACTERS],
        }
        told: Headers = [
            (name, str(value).encode()) for name, value in about.items() if value is not None
        ]
        return [*self.headers, *told, ("dead_letter.key", self.key)]
