"""Claims survive the trip through Kafka, and nothing else is ever taken for one."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.batches.planning import MOST_CLAIMS
from dagster_rebalance.core.model.claims import (
    Claim,
    LastCommit,
    StoredPartition,
    decode,
    encode,
)
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.commit_requests import MAX_METADATA_BYTES
from dagster_rebalance.core.model.errors import ClaimError, IllegalStateError
from dagster_rebalance.core.model.offsets import Log, OffsetAndMetadata
from dagster_rebalance.core.partitions.unrecorded import Unrecorded
from tests.core.world import span, tp

TOPIC_ID = "pFxV/CY9R+ucSC3puC7PuA"

ids = st.text("abcXYZ019_.:-", min_size=1, max_size=64)


@st.composite
def stored_partitions(draw: st.DrawFn) -> StoredPartition:
    """Anything that a member may store."""
    offset = draw(st.integers(0, 2**50))
    lengths = draw(st.lists(st.integers(1, 10**6), max_size=20))
    claims = []
    until = offset
    for length in lengths:
        until += length
        claims.append(Claim(until, draw(ids)))
    starts = sorted(draw(st.sets(st.integers(0, offset - 1), max_size=4))) if offset > 0 else []
    commits = tuple(
        LastCommit(start, draw(ids), draw(ids), draw(st.booleans())) for start in starts
    )
    last = replace(commits[-1], earlier=commits[:-1]) if commits else None
    epoch = draw(st.none() | st.integers(0, 2**31 - 1))
    return StoredPartition(
        offset, tuple(claims), last, Log(draw(st.sampled_from(["", TOPIC_ID])), epoch)
    )


def _sealed(body: object, version: str = "1") -> str:
    text = body if isinstance(body, str) else json.dumps(body)
    return f"dr{version} {zlib.crc32(text.encode(errors='surrogatepass')):08x} {text}"


@given(stored_partitions())
def test_decode_of_encoded_claims_returns_them(stored: StoredPartition) -> None:
    committed = encode(stored)
    assert decode(committed) == stored
    assert len(committed.metadata.encode()) <= MAX_METADATA_BYTES


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["c", "l", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["c", "l"]), json_values) | json_values, st.integers(0, 100))
def test_decode_with_valid_checksum_and_any_fields_returns_or_raises_claim_error(
    body: object, offset: int
) -> None:
    with suppress(ClaimError):
        decode(OffsetAndMetadata(offset, _sealed(body)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("node-1", "not written by dagster_rebalance"),
        ("x" * 100, "x...' was not written"),
        ("dr1 zzzzzzzz {}", "not written by dagster_rebalance"),
        (
            _sealed({}, version="3"),
            "format version 3, this release reads versions up to 2: upgrade dagster-rebalance",
        ),
        (_sealed({}, version="2"), "fields of a claim"),
        (_sealed({"o": "5"}, version="2"), "fields of a claim"),
        (_sealed({"o": 5, "t": 7}, version="2"), "fields of a claim"),
        (_sealed({"o": 5, "e": None}, version="2"), "fields of a claim"),
        (_sealed({"o": 5, "t": "a b"}, version="2"), "'a b' is not the id of a topic"),
        (_sealed({"o": 5, "e": -1}, version="2"), "-1 is not a leader epoch"),
        (_sealed({"o": 5, "e": 2**31}, version="2"), "2147483648 is not a leader epoch"),
        (_sealed({"o": 5}), "fields of a claim"),
        ("dr1 00000000 {}", "damaged: its checksum"),
        ("dr1 00000000 \ud800", "damaged: its checksum"),
        (_sealed("[" * 100_000), "fields of a claim"),
        (_sealed("nonsense"), "fields of a claim"),
        (_sealed([]), "fields of a claim"),
        (_sealed({"z": 1}), "fields of a claim"),
        (_sealed({"c": 5}), "fields of a claim"),
        (_sealed({"c": [[7]]}), "fields of a claim"),
        (_sealed({"c": [[True, "b"]]}), "fields of a claim"),
        (_sealed({"c": [[7.0, "b"]]}), "fields of a claim"),
        (_sealed({"c": [[7, 8]]}), "fields of a claim"),
        (_sealed({"l": [1, "b"]}), "fields of a claim"),
        (_sealed({"l": [1, "b", None]}), "fields of a claim"),
        (_sealed({"l": [1, "b", "r", 2]}), "fields of a claim"),
        (_sealed({"l": [1, "b", "r", 1, 1]}), "fields of a claim"),
        (_sealed('{"l": [1, "b"], "l": [2, "b", "r"]}'), "fields of a claim"),
        (_sealed('{"c": [], "c": []}'), "fields of a claim"),
        (_sealed('{"l": [3, "b", "r"], "l": [2, "b", "r"]}'), "the last commits do not grow"),
        (
            _sealed({"c": [[5, "b"]]}),
            (
                r"does not fit the committed offset 5: "
                r"the claims are not in ascending order from the offset: \(5, 5\)"
            ),
        ),
        (_sealed({"c": [[9, "b"], [8, "c"]]}), "the claims are not in ascending order"),
        (_sealed({"c": [[9, "a b"]]}), "'a b' is not an id"),
        (
            _sealed({"l": [5, "b", "r"]}),
            "the last commit starts at 5, which is not below the offset 5",
        ),
        (_sealed({"l": [1, "b", ""]}), "'' is not an id"),
    ],
)
def test_decode_of_invalid_metadata_raises_claim_error_with_reason(text: str, reason: str) -> None:
    with pytest.raises(ClaimError, match=reason):
        decode(OffsetAndMetadata(5, text))


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (StoredPartition(-1), "the offset -1 is negative"),
        (StoredPartition(5, (Claim(5, "b"),)), "not in ascending order"),
        (StoredPartition(5, (Claim(9, "b"), Claim(7, "c"))), "not in ascending order"),
        (StoredPartition(5, (Claim(9, "ü"),)), "'ü' is not an id"),
        (StoredPartition(5, (), LastCommit(-1, "b", "r")), "the last commit starts at -1"),
        (
            StoredPartition(5, tuple(Claim(6 + n, "b" * 64) for n in range(60))),
            "60 claims need .* claim fewer batches",
        ),
    ],
)
def test_encode_of_unreadable_state_raises(stored: StoredPartition, reason: str) -> None:
    with pytest.raises(IllegalStateError, match=reason):
        encode(stored)


def test_empty_metadata_has_no_claims() -> None:
    assert decode(OffsetAndMetadata(7)) == StoredPartition(7)
    assert encode(StoredPartition(7)) == OffsetAndMetadata(7, "")


def test_claim_starts_at_end_of_previous_claim() -> None:
    stored = StoredPartition(10, (Claim(20, "a"), Claim(25, "b")))
    assert stored.ranges(tp(3)) == ((span(3, 10, 20), "a"), (span(3, 20, 25), "b"))


def test_maximum_number_of_claims_fits_metadata() -> None:
    start = 2**63 - 1 - MOST_CLAIMS
    claims = tuple(Claim(start + n, "b" * 64) for n in range(1, MOST_CLAIMS + 1))
    before = LastCommit(start - 1, "b" * 64, "r" * 64, is_dead_letter=True)
    for claimed in range(1, MOST_CLAIMS + 1):
        commit = RecordCommit(span(0, 0, 1), 1, "b", "r", 0, None, None, is_late=True)
        parts = 1
        while Unrecorded((commit,) * parts).has_room(claimed, is_dead_letter=True):
            parts += 1
        assert parts >= 2
        earlier = tuple(replace(before, start=start - parts + n) for n in range(parts - 1))
        last = replace(before, earlier=earlier)
        encode(StoredPartition(start, claims[:claimed], last, Log(TOPIC_ID, 2**31 - 1)))


def test_earlier_release_reads_the_last_part_of_the_last_commits() -> None:
    """It refuses unknown fields, and keeps the last of several fields with one name."""
    last = LastCommit(7, "b", "r", earlier=(LastCommit(1, "a", "q"),))
    body = encode(StoredPartition(9, (), last)).metadata.split(" ", 2)[2]
    assert json.loads(body) == {"l": [7, "b", "r"], "o": 9}


def test_decode_of_metadata_copied_to_another_offset_raises() -> None:
    """MirrorMaker copies metadata to translated offsets, where claims would cover other records."""
    written = encode(StoredPartition(1000, (Claim(1100, "b"),)))
    with pytest.raises(
        ClaimError,
        match=r"committed with offset 1000, but is stored with 950: .*MirrorMaker",
    ):
        decode(OffsetAndMetadata(950, written.metadata))


def test_decode_reads_previous_format() -> None:
    text = _sealed({"c": [[9, "b"]], "l": [1, "a", "r"]})
    assert decode(OffsetAndMetadata(5, text)) == StoredPartition(
        5, (Claim(9, "b"),), LastCommit(1, "a", "r")
    )


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (Claim(130, "s.r1.2.1", is_early=True), '[130,"s.r1.2.0"]'),
        (Claim(130, "s.r2.1.1", "s.r1.2.1", is_early=True), '[130,"s.r2.1.1","s.r1.2.0"]'),
    ],
)
def test_early_claim_is_stored_as_attempt_0_of_its_batch(claim: Claim, text: str) -> None:
    stored = StoredPartition(120, (claim,))
    assert text in encode(stored).metadata
    assert decode(encode(stored)) == stored


def test_claimed_until_is_end_of_last_claim() -> None:
    assert StoredPartition(5).claimed_until == 5
    assert StoredPartition(5, (Claim(9, "b"),)).claimed_until == 9
