"""A filter of records, against its conditions spelled out, and bad input with a remedy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.batches.record_filter import RecordPredicate
from dagster_rebalance.core.model.errors import ConfigurationError

NAMES, TEXTS = (
    st.sampled_from(["kind", "Kind", "k'\\nd", ""]),
    st.sampled_from(["", "a", "ä", "ab"]),
)
PARTS: st.SearchStrategy[Any] = st.sampled_from([None, b"", b"a", b"ab", "ä", b"\xc3", b"\xff"])
FILTERS = st.builds(
    RecordPredicate,
    header_equals=st.dictionaries(NAMES.filter(bool), TEXTS, max_size=2),
    header_in=st.dictionaries(
        NAMES.filter(bool), st.lists(TEXTS, min_size=1, max_size=3), max_size=2
    ),
    key_prefix=st.sampled_from([None, "a", "ä"]),
    tombstones=st.sampled_from([True, False]),
)


@dataclass
class Sent:
    """A record."""

    parts: tuple[str | bytes | None, str | bytes | None] = (None, None)
    named: list[tuple[str, str | bytes | None]] | None = field(default_factory=list)

    def key(self) -> str | bytes | None:
        return self.parts[0]

    def value(self) -> str | bytes | None:
        return self.parts[1]

    def headers(self) -> list[tuple[str, str | bytes | None]] | None:
        return self.named


RECORDS = st.builds(
    Sent,
    st.tuples(PARTS, PARTS),
    st.none() | st.lists(st.tuples(NAMES, PARTS), max_size=3),
)


def as_bytes(part: str | bytes | None) -> bytes | None:
    return part.encode() if isinstance(part, str) else part


@given(only=FILTERS, record=RECORDS)
def test_record_passes_exactly_if_it_fulfils_each_condition(
    only: RecordPredicate, record: Sent
) -> None:
    wanted = [*((name, [value]) for name, value in only.header_equals.items())]
    wanted += [(name, list(values)) for name, values in only.header_in.items()]
    expected = (record.value() is None) == only.tombstones
    if only.key_prefix is not None:
        expected &= (as_bytes(record.key()) or b"").startswith(only.key_prefix.encode())
    for name, values in wanted:
        found = [as_bytes(value) for known, value in record.headers() or [] if known == name]
        expected &= any(value.encode() in found for value in values)
    assert only.passes(record) is expected
    assert only.needs_headers is bool(wanted)


@given(only=FILTERS)
def test_filter_survives_json(only: RecordPredicate) -> None:
    assert RecordPredicate.of(json.loads(json.dumps(only.fields))) == only


def test_tombstones_are_processed_without_a_condition_on_them() -> None:
    only = RecordPredicate(key_prefix="a")
    assert only.passes(Sent((b"a", None)))
    assert only.passes(Sent((b"a", b"")))
    assert only.sql == "coalesce(substring(key, 1, 1) = X'61', false)"


def test_sql_compares_bytes_and_is_never_null() -> None:
    only = RecordPredicate({"k'": "a"}, {"ä": ["b", ""]}, "ö", tombstones=True)
    assert only.sql == (
        "value IS NULL AND coalesce(substring(key, 1, 2) = X'c3b6', false) AND "
        "coalesce(exists(headers, h -> CAST(h.key AS BINARY) = X'6b27' AND h.value IN (X'61')), "
        "false) AND coalesce(exists(headers, h -> CAST(h.key AS BINARY) = X'c3a4' AND "
        "h.value IN (X'', X'62')), false)"
    )
    assert RecordPredicate(tombstones=False).sql == "value IS NOT NULL"


def test_filter_is_shown_in_words() -> None:
    only = RecordPredicate({"kind": "order"}, {"region": ["eu", "us"]}, "o-", tombstones=False)
    assert str(only) == (
        "header kind is 'order' and header region is one of 'eu', 'us' and the key begins with "
        "'o-' and the value is not null"
    )
    assert str(RecordPredicate(tombstones=True)) == "the value is null"
    assert str(RecordPredicate(key_prefix="o-")) == "the key begins with 'o-'"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "it has no condition: give header_equals"),
        ({"header_in": {}, "key_prefix": None}, "it has no condition"),
        ({"key": "a"}, "only has no condition 'key': its conditions are header_equals"),
        ({"key_prefix": ""}, "remove key_prefix"),
        ({"header_in": {"kind": []}}, "a list of at least one value for header 'kind'"),
        ({"header_in": {"kind": "order"}}, "a list of at least one value for header 'kind'"),
        ({"header_equals": "kind"}, "header_equals must be a mapping"),
        ({"header_equals": {"": "a"}}, "header_equals has a header without a name"),
        ({"header_in": {"": ["a"]}}, "header_in has a header without a name"),
        ({"header_equals": {"kind": 7}}, "7 must be a text that UTF-8 can encode: put numbers"),
        ({"header_in": {"kind": ["a", "\ud800"]}}, "must be a text that UTF-8 can encode"),
        ({"header_equals": {"\ufffd": "a"}}, "is not valid: has U+FFFD"),
        ({"header_equals": {"kind": None}}, "None must be a text"),
        ({"tombstones": "yes"}, "tombstones must be true"),
    ],
)
def test_filter_that_cannot_work_is_refused_with_a_remedy(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RecordPredicate.of(fields)
    assert problem in str(caught.value).replace("\\ufffd", "\ufffd")
