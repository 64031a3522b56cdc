"""Dead letters: the records of a dead-letter topic, and the state of each letter.

A letter is one Kafka record: a record that was set aside, or a range whose attempts are exhausted.
Its Kafka key is `<topic>-<partition>-<offset>` or the key of the range. A record of topic
`orders-3` and a range of topic `orders` can have the same key, so a letter is identified by its
kind, too. Its headers are those of the set-aside record, followed by the block of `dead_letter.*`
headers, which begins with `dead_letter.kind`. Only this block is read, so a set-aside record may
have such headers, too.

A further record with the same key, an empty value and the kind of the letter changes its state. The
newest record of a letter counts: in the order of the topic partition, and by `dead_letter.time_ms`
across partitions. A run that repeats a range stores no second letter for an open or discarded
letter. The run of a rerun then has the tag `SET_ASIDE_TAG` with its own run id, so the letter is
not replayed. If the source topic was recreated, another record has the same offset, and mostly
another timestamp. Its letter replaces the former one.

Other programs and groups may write to the topic. `parse_record` never raises, and `LetterFold`
counts what is no letter of the group.
"""

from __future__ import annotations

import enum
import json
import operator
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange, next_offset
from dagster_rebalance.core.model.printable import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_REASON_CHARACTERS = 2_000
"""Limit of a reason in a header: a topic limits the size of a record, headers included."""
REASON_HEADER = "dead_letter.reason"
_PREFIX = "dead_letter."
_KIND, _STATE = f"{_PREFIX}kind", f"{_PREFIX}state"
_MALFORMED_SHOWN = 10
_MAX_PROBLEM_CHARACTERS = 300
LIMIT_WINDOW_MS = 3_600_000
_ALWAYS_ALLOWED = 10
_ALL_PERCENT = 100
_LIMIT = re.compile(r"(?P<amount>[0-9]{1,9}|[0-9]{1,3}(\.[0-9]{1,6})?(?=%))(?P<percent>%?)")

Headers = list[tuple[str, "bytes | None"]]


class LetterLimit(NamedTuple):
    """The limit `max_dead_letters`: letters of a partition within an hour.

    Attributes:
        number: The number of letters; None for a share.
        share: The share of the offsets, above 0 and up to 1.
    """

    number: int | None
    share: float = 1.0

    @classmethod
    def parse(cls, text: str) -> LetterLimit:
        """Parse the setting, such as `100` or `1%`.

        Raises:
            ConfigurationError: The text is neither a number nor a share.
        """
        match = _LIMIT.fullmatch(re.sub(r"\s+%", "%", text.strip()))
        amount = float(match["amount"]) if match else 0.0
        if match is None or amount <= 0 or (match["percent"] and amount > _ALL_PERCENT):
            msg = (
                f"max_dead_letters={text[:40]!r} must be a number of letters per hour, such as "
                "100, or a share of the records up to 100%, such as 1%"
            )
            raise ConfigurationError(msg)
        if match["percent"]:
            return cls(None, amount / _ALL_PERCENT)
        return cls(int(amount))

    def allowed(self, offsets: int) -> int:
        """Return the number of letters that some offsets may have.

        A share always allows 10 letters, so one record does not stop a small range.
        """
        if self.number is not None:
            return self.number
        return max(_ALWAYS_ALLOWED, int(self.share * offsets))


class LetterKind(enum.Enum):
    """What a letter contains."""

    RECORD = "record"
    RANGE = "range"


class LetterState(enum.Enum):
    """What has become of a letter."""

    OPEN = "open"
    REPLAYED = "replayed"
    DISCARDED = "discarded"


class LetterRecord(NamedTuple):
    """The Kafka record of a letter or of its state."""

    key: str
    value: bytes | None
    headers: Headers


class LetterStamp(NamedTuple):
    """The origin of the letters of one attempt.

    Attributes:
        attempt: The number of the attempt, from 1.
        time_ms: When the letter is stored.
    """

    group_id: str
    batch_id: str
    run_id: str
    attempt: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter.

    Attributes:
        range: The offset of the record as a range of length 1, or the failed range.
        reason: Why the record was set aside, or the error of the last run of the range.
        value: The value of the record, or JSON about the range.
        record_key: The key of the record; None for a range.
        headers: The headers of the record.
        timestamp_ms: The timestamp of the record, if it has one.
        attempt: The number of the attempt that stored the letter, from 1.
        time_ms: When the letter was stored.
    """

    range: OffsetRange
    reason: str
    value: bytes | None = None
    kind: LetterKind = LetterKind.RECORD
    record_key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None
    group_id: str = ""
    batch_id: str = ""
    run_id: str = ""
    attempt: int | None = None
    time_ms: int | None = None

    @property
    def id(self) -> str:
        """The kind and the key, which no other letter has."""
        return letter_id(self.kind, self.key)

    @property
    def key(self) -> str:
        """The Kafka key."""
        return letter_key(self.kind, self.range)

    def is_of_same_record(self, other: Letter | None) -> bool:
        """Whether another letter with this id has the same record, as far as timestamps tell."""
        return (
            other is None
            or None in {self.timestamp_ms, other.timestamp_ms}
            or self.timestamp_ms == other.timestamp_ms
        )

    def stamped(self, stamp: LetterStamp) -> Letter:
        """Return the letter with the attempt that stores it."""
        return replace(self, **stamp._asdict())

    @property
    def record(self) -> LetterRecord:
        """The Kafka record."""
        return LetterRecord(
            self.key,
            self.value,
            [
                *self.headers,
                *_encoded(
                    kind=self.kind.value,
                    topic=self.range.topic,
                    partition=self.range.partition,
                    offset=self.range.start,
                    until=self.range.until if self.kind is LetterKind.RANGE else None,
                    timestamp_ms=self.timestamp_ms,
                    reason=self.reason[:MAX_REASON_CHARACTERS],
                    group_id=self.group_id or None,
                    batch_id=self.batch_id or None,
                    run_id=self.run_id or None,
                    attempt=self.attempt,
                    time_ms=self.time_ms,
                ),
                (f"{_PREFIX}key", self.record_key),
            ],
        )


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of the state of a letter.

    Attributes:
        key: The Kafka key of the letter.
        by: The operator.
        why: The reason of the operator.
        run_id: The run that replayed the letter; empty for a discarded one.
        kind: The kind of the letter.
        group_id: The group of the letter; empty for any, as in earlier versions.
    """

    key: str
    state: LetterState
    by: str
    why: str
    time_ms: int
    run_id: str = ""
    kind: LetterKind = LetterKind.RECORD
    group_id: str = ""

    @property
    def id(self) -> str:
        """The id of the letter."""
        return letter_id(self.kind, self.key)

    @property
    def record(self) -> LetterRecord:
        """The Kafka record. Its value is empty, not null: compaction must not delete it."""
        block = _encoded(
            state=self.state.value,
            letter=self.kind.value,
            by=self.by,
            why=self.why[:MAX_REASON_CHARACTERS],
            run_id=self.run_id or None,
            group_id=self.group_id or None,
            time_ms=self.time_ms,
        )
        return LetterRecord(self.key, b"", block)


@dataclass(frozen=True, slots=True)
class Malformed:
    """A record of the topic that is neither a letter nor a state."""

    problem: str


def letter_id(kind: LetterKind, key: str) -> str:
    """Return the id of a letter: `record:orders-3-1207`. No topic has a colon."""
    return f"{kind.value}:{key}"


def letter_key(kind: LetterKind, range_: OffsetRange) -> str:
    """Return the Kafka key of a letter."""
    if kind is LetterKind.RANGE:
        return range_.key
    return f"{range_.topic}-{range_.partition}-{range_.start}"


def parse_record(
    key: str | bytes | None,
    value: str | bytes | None,
    headers: Iterable[tuple[str, str | bytes | None]] | None,
) -> Letter | StateChange | Malformed:
    """Parse a record of a dead-letter topic, also one of an earlier version."""
    try:
        given = [(name, _bytes(one)) for name, one in headers or ()]
        found = _parsed(_text(_bytes(key)), _bytes(value), given)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as problem:
        text = escaped(f"{type(problem).__name__}: {problem}"[:_MAX_PROBLEM_CHARACTERS])
        return Malformed(f"it cannot be read as a dead letter ({text})")
    if isinstance(found, Letter) and found.key != _text(_bytes(key)):
        return Malformed(f"its key is not {found.key}, which its origin requires")
    return found


def _parsed(key: str, value: bytes | None, headers: Headers) -> Letter | StateChange | Malformed:
    names = [name for name, _ in headers]
    if _KIND in names:
        at = len(names) - 1 - names[::-1].index(_KIND)
        return _letter(value, headers[:at], dict(headers[at:]))
    block = dict(headers)
    if f"{_PREFIX}offset" in block:  # from an earlier version
        own = [(name, one) for name, one in headers if not name.startswith(_PREFIX)]
        return _letter(value, own, block)
    if _STATE in block and not value:
        return _state_change(key, block)
    return _letter_without_headers(value)


def _letter(value: bytes | None, own: Headers, block: Mapping[str, bytes | None]) -> Letter:
    kind = LetterKind(_named(block, "kind") or LetterKind.RECORD.value)
    start = int(_named(block, "offset"))
    until = int(_named(block, "until")) if kind is LetterKind.RANGE else next_offset(start)
    return Letter(
        OffsetRange(_named(block, "topic"), int(_named(block, "partition")), start, until),
        reason=_named(block, "reason"),
        value=value,
        kind=kind,
        record_key=block.get(f"{_PREFIX}key"),
        headers=tuple(own),
        timestamp_ms=_number(block, "timestamp_ms"),
        group_id=_named(block, "group_id"),
        batch_id=_named(block, "batch_id"),
        run_id=_named(block, "run_id"),
        attempt=_number(block, "attempt"),
        time_ms=_number(block, "time_ms"),
    )


def _state_change(key: str, block: Mapping[str, bytes | None]) -> StateChange | Malformed:
    state = LetterState(_named(block, "state"))
    if state is LetterState.OPEN:
        return Malformed("a letter cannot be marked as open")
    return StateChange(
        key,
        state,
        _named(block, "by"),
        _named(block, "why"),
        _number(block, "time_ms") or 0,
        _named(block, "run_id"),
        LetterKind(_named(block, "letter") or LetterKind.RECORD.value),
        _named(block, "group_id"),
    )


def _letter_without_headers(value: bytes | None) -> Letter:
    """Return the letter of a range, as earlier versions stored it."""
    about = json.loads(value or b"null")
    if not isinstance(about, dict):
        msg = "it has neither the headers of a letter nor a JSON object about a range"
        raise TypeError(msg)
    bounds = (operator.index(about[name]) for name in ("partition", "start", "until"))
    at = datetime.fromisoformat(about["time"])
    return Letter(
        OffsetRange(about["topic"], *bounds),
        str(about["error"]),
        value,
        LetterKind.RANGE,
        group_id=str(about["group_id"]),
        batch_id=str(about["batch_id"]),
        run_id=str(about["run_ids"][-1]) if about["run_ids"] else "",
        time_ms=int(at.timestamp() * 1000),
    )


class Place(NamedTuple):
    """The position of a record in the dead-letter topic."""

    partition: int
    offset: int


@dataclass(slots=True)
class LetterEntry:
    """A letter and its state.

    Attributes:
        letter: None if only changes of its state are left in the topic.
        place: The position of the letter, or of the change of its state if it has no letter.
        change: The change of the state that counts; None for an open letter.
        repeats: How often the letter was stored again while it was open.
        newest: The position of the record that counts.
    """

    letter: Letter | None
    place: Place
    newest: Place
    change: StateChange | None = None
    repeats: int = 0

    @property
    def state(self) -> LetterState:
        """The state of the letter."""
        return LetterState.OPEN if self.change is None else self.change.state

    @property
    def time_ms(self) -> int:
        """The time of the record that counts."""
        counting = self.change or self.letter
        return (counting.time_ms if counting else None) or 0


@dataclass(slots=True)
class LetterFold:
    """The letters of a dead-letter topic, folded from its records.

    Each topic partition must be read in the order of its offsets; partitions may alternate.
    Reading a record again changes nothing, except for the count of malformed records.

    Attributes:
        group_id: The group of the letters; empty for all groups.
        keeps_values: Whether values, keys and headers of the set-aside records are kept.
        entries: By the id of the letter.
        counts: The number of letters in each state.
        malformed: The number of records that are neither a letter nor a state.
        malformed_shown: The first of them, with their problem.
        others: The number of records of letters of other groups.
        left_out: The positions of letters whose record the group does not process. The reader of
            the topic adds them.
    """

    group_id: str = ""
    keeps_values: bool = True
    entries: dict[str, LetterEntry] = field(default_factory=dict)
    counts: Counter[LetterState] = field(default_factory=Counter)
    malformed: int = 0
    malformed_shown: list[str] = field(default_factory=list)
    others: int = 0
    left_out: set[Place] = field(default_factory=set)

    def add(self, place: Place, found: Letter | StateChange | Malformed) -> None:
        """Apply a parsed record."""
        if isinstance(found, Malformed):
            self.malformed += 1
            if len(self.malformed_shown) < _MALFORMED_SHOWN:
                self.malformed_shown.append(
                    f"partition {place.partition} offset {place.offset}: {found.problem}"
                )
            return
        if self.group_id and found.group_id not in {"", self.group_id}:
            self.others += 1
            return
        entry = self.entries.get(found.id)
        if entry is not None and entry.letter is not None:
            self.counts[entry.state] -= 1
        entry = (
            self._with_letter(entry, place, found)
            if isinstance(found, Letter)
            else _with_change(entry, place, found)
        )
        self.entries[found.id] = entry
        if entry.letter is not None:
            self.counts[entry.state] += 1

    def in_state(self, *states: LetterState) -> Iterator[LetterEntry]:
        """Yield the letters in one of some states."""
        return (
            entry
            for entry in self.entries.values()
            if entry.letter is not None and entry.state in states
        )

    def _with_letter(self, entry: LetterEntry | None, place: Place, letter: Letter) -> LetterEntry:
        if not self.keeps_values:
            letter = replace(letter, value=None, record_key=None, headers=())
        if entry is None:
            return LetterEntry(letter, place, place)
        if not _is_newer(place, letter.time_ms, entry):
            if entry.letter is None and place.partition != entry.newest.partition:
                entry.letter, entry.place = letter, place
        elif entry.change is None and letter.is_of_same_record(entry.letter):
            entry.repeats += 1
            entry.newest = place
        else:
            return LetterEntry(letter, place, place)
        return entry


def _with_change(entry: LetterEntry | None, place: Place, change: StateChange) -> LetterEntry:
    if entry is None:
        return LetterEntry(None, place, place, change)
    if _is_newer(place, change.time_ms, entry):
        entry.change, entry.newest = change, place
    return entry


def _is_newer(place: Place, time_ms: int | None, entry: LetterEntry) -> bool:
    """Whether a record counts more than the last one. Keys change partitions if a topic grows."""
    if place.partition == entry.newest.partition:
        return place.offset > entry.newest.offset
    return place != entry.place and (time_ms or 0) >= entry.time_ms


def _encoded(**values: object) -> Headers:
    return [
        (f"{_PREFIX}{name}", str(value).encode(errors="backslashreplace"))
        for name, value in values.items()
        if value is not None
    ]


def _named(block: Mapping[str, bytes | None], name: str) -> str:
    return _text(block.get(f"{_PREFIX}{name}"))


def _number(block: Mapping[str, bytes | None], name: str) -> int | None:
    text = _named(block, name)
    return int(text) if text else None


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")
