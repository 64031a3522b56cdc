"""Record filter: which records of its topics a group processes.

The other records are committed, and no reader of a batch returns them. A filter has two forms with
the same meaning: for a record of a Python client, and SQL for Spark's Kafka source. Texts are
compared by their UTF-8 bytes, so a key or a header with other bytes is only another value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

_FIELDS = ("header_equals", "header_in", "key_prefix", "tombstones")
_REPLACED = "\ufffd"


class Record(Protocol):
    """A record, as a message of confluent-kafka."""

    def key(self) -> str | bytes | None:
        """The key."""

    def value(self) -> str | bytes | None:
        """The value; None for a tombstone."""

    def headers(self) -> Any:  # noqa: ANN401 - the client has two types
        """The headers: pairs of a name and a value; None for none."""


@dataclass(frozen=True)
class RecordPredicate:
    """Conditions that a record must all fulfil to be processed.

    Attributes:
        header_equals: Values by the name of a header. A record fulfils the condition if one of its
            headers with this name has the value. The value null equals no text.
        header_in: Lists of values, one of which such a header must have.
        key_prefix: The text with which the key must begin. A record without a key is left out.
        tombstones: True for records without a value only, False for none of them. None for both.

    Raises:
        ConfigurationError: There is no condition, or one that no record or each record fulfils.
    """

    header_equals: Mapping[str, str] = field(default_factory=dict)
    header_in: Mapping[str, Sequence[str]] = field(default_factory=dict)
    key_prefix: str | None = None
    tombstones: bool | None = None

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem is not None:
            msg = f"only: {problem}"
            raise ConfigurationError(msg)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the filter of `fields`.

        Raises:
            ConfigurationError: A name or a type is wrong, or see above.
        """
        unknown = sorted(map(str, fields.keys() - set(_FIELDS)))
        if unknown:
            msg = (
                f"only has no condition {unknown[0]!r}: its conditions are {', '.join(_FIELDS)}, "
                "and a record must fulfil all that are given"
            )
            raise ConfigurationError(msg)
        return cls(**{name: value for name, value in fields.items() if value is not None})

    @property
    def fields(self) -> dict[str, Any]:
        """The conditions, as JSON types."""
        found: dict[str, Any] = {
            "header_equals": dict(self.header_equals),
            "header_in": {name: list(values) for name, values in self.header_in.items()},
            "key_prefix": self.key_prefix,
            "tombstones": self.tombstones,
        }
        return {name: value for name, value in found.items() if value not in ({}, None)}

    def __str__(self) -> str:
        texts = [f"header {name} is {value!r}" for name, value in self.header_equals.items()]
        texts += [
            f"header {name} is one of {', '.join(map(repr, values))}"
            for name, values in self.header_in.items()
        ]
        if self.key_prefix is not None:
            texts.append(f"the key begins with {self.key_prefix!r}")
        if self.tombstones is not None:
            texts.append("the value is null" if self.tombstones else "the value is not null")
        return " and ".join(texts)

    @cached_property
    def needs_headers(self) -> bool:
        """Whether a condition reads headers."""
        return bool(self._headers)

    def passes(self, record: Record) -> bool:
        """Return whether a record is processed."""
        if self.tombstones is not None and (record.value() is None) is not self.tombstones:
            return False
        if self._prefix is not None:
            key = _bytes(record.key())
            if key is None or not key.startswith(self._prefix):
                return False
        if not self._headers:
            return True
        headers = record.headers() or ()
        return all(
            any(known == name and _bytes(value) in values for known, value in headers)
            for name, values in self._headers
        )

    @property
    def sql(self) -> str:
        """The condition as SQL, for rows with the columns `key`, `value` and `headers`."""
        texts = []
        if self.tombstones is not None:
            texts.append("value IS NULL" if self.tombstones else "value IS NOT NULL")
        if self._prefix is not None:
            prefix = self._prefix
            texts.append(f"coalesce(substring(key, 1, {len(prefix)}) = {_literal(prefix)}, false)")
        for name, values in self._headers:
            is_value = f"h.value IN ({', '.join(map(_literal, sorted(values)))})"
            # Bytes, because the text of a literal depends on the session.
            is_name = f"CAST(h.key AS BINARY) = {_literal(name.encode())}"
            texts.append(f"coalesce(exists(headers, h -> {is_name} AND {is_value}), false)")
        return " AND ".join(texts)

    @cached_property
    def _prefix(self) -> bytes | None:
        return None if self.key_prefix is None else self.key_prefix.encode()

    @cached_property
    def _headers(self) -> tuple[tuple[str, frozenset[bytes]], ...]:
        one = ((name, (value,)) for name, value in self.header_equals.items())
        return tuple(
            (name, frozenset(value.encode() for value in values))
            for name, values in (*one, *self.header_in.items())
        )


def _problem(given: RecordPredicate) -> str | None:
    """Return what is wrong with a filter, and the remedy."""
    if all(getattr(given, name) in ({}, None) for name in _FIELDS):
        return f"it has no condition: give {', '.join(_FIELDS[:-1])} or {_FIELDS[-1]}"
    if given.tombstones not in {None, True, False}:
        return "tombstones must be true (only records without a value) or false (none of them)"
    if given.key_prefix == "":
        return "each key begins with key_prefix='': give a text, or remove key_prefix"
    return _problem_of_headers(given) or _problem_of_texts(given)


def _problem_of_headers(given: RecordPredicate) -> str | None:
    for name in ("header_equals", "header_in"):
        if not isinstance(getattr(given, name), Mapping):
            return f"{name} must be a mapping with the names of headers as keys"
        if "" in getattr(given, name):
            return f"{name} has a header without a name: name the header"
    for name, values in given.header_in.items():
        if not isinstance(values, list | tuple) or not values:
            return f"header_in needs a list of at least one value for header {name!r}"
    return None


def _problem_of_texts(given: RecordPredicate) -> str | None:
    texts = [
        *given.header_equals,
        *given.header_in,
        *given.header_equals.values(),
        *(value for values in given.header_in.values() for value in values),
        *([] if given.key_prefix is None else [given.key_prefix]),
    ]
    wrong = [text for text in texts if not _is_text(text)]
    if wrong:
        return f"{wrong[0]!r} must be a text that UTF-8 can encode: put numbers in quotes"
    # Readers replace bytes of a name that are not UTF-8 by this character.
    replaced = next((n for n in (*given.header_equals, *given.header_in) if _REPLACED in n), None)
    return None if replaced is None else f"the header name {replaced!r} is not valid: has U+FFFD"


def _is_text(value: object) -> bool:
    # The type itself: a variable that Dagster reads later is a text, too.
    return type(value) is str and value.encode(errors="ignore").decode() == value


def _bytes(part: str | bytes | None) -> bytes | None:
    return part.encode() if isinstance(part, str) else part


def _literal(value: bytes) -> str:
    return f"X'{value.hex()}'"
