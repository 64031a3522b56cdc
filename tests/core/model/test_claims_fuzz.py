"""Whatever stands in the metadata of an offset, it is a claim or a claim error, and quickly."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.batches.engine_settings import ForeignMetadata
from dagster_rebalance.core.model.claims import Claim, LastCommit, StoredPartition, decode, encode
from dagster_rebalance.core.model.errors import ClaimError
from dagster_rebalance.core.model.events import PartitionLookup
from dagster_rebalance.core.model.offsets import MAX_OFFSET, Bounds, OffsetAndMetadata
from dagster_rebalance.core.model.topics import StartFrom
from dagster_rebalance.core.partitions.owned import OwnedPartition, Refused
from dagster_rebalance.core.partitions.recovery import restore
from dagster_rebalance.kafka.consumer.caller_commits import with_mark
from tests.core.world import tp

LONGEST_REASON = 1000
OFFSET = 120
BOUNDS = Bounds(0, 500)
VALID = encode(
    StoredPartition(OFFSET, (Claim(130, "b-1"), Claim(140, "b-2")), LastCommit(100, "b-0", "run-1"))
).metadata

# Everything that Python can hold in a text: NUL, line ends, lone surrogates, other scripts.
any_text = st.text(st.characters(codec=None, exclude_categories=()))


def sealed(body: str) -> str:
    """A body with a header and a checksum that fit."""
    return f"dr2 {zlib.crc32(body.encode(errors='surrogatepass')):08x} {body}"


def read(text: str) -> StoredPartition | None:
    """Decode a text, or return None if it is refused; the reason must be printable."""
    try:
        stored = decode(OffsetAndMetadata(OFFSET, text))
    except ClaimError as error:
        reason = str(error)
        reason.encode()
        assert len(reason) < LONGEST_REASON
        return None
    assert stored.next_offset == OFFSET
    assert all(OFFSET < claim.until <= MAX_OFFSET for claim in stored.claims)
    return stored


@st.composite
def mutated(draw: st.DrawFn, valid: str) -> str:
    """A valid text in which a few places were cut out, doubled or written over."""
    text = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 12)))
        text = (
            text[:start]
            + draw(
                st.one_of(
                    any_text, st.just(text[start:end] * 2), st.sampled_from('0-9,"[]{}:eE.\x00')
                )
            )
            + text[end:]
        )
    return text


@given(any_text)
def test_decode_of_any_text_returns_or_raises_claim_error(text: str) -> None:
    read(text)
    read(sealed(text))


@given(mutated(VALID))
def test_decode_of_damaged_claims_never_returns_other_claims(text: str) -> None:
    assert read(text) in {None, decode(OffsetAndMetadata(OFFSET, VALID)), StoredPartition(OFFSET)}


@given(mutated(VALID.split(" ", 2)[2]))
def test_decode_of_forged_claims_returns_or_raises_claim_error(body: str) -> None:
    stored = read(sealed(body))
    if stored is not None:
        assert decode(encode(stored)) == stored


@given(
    st.one_of(any_text, mutated(VALID), mutated(VALID.split(" ", 2)[2]).map(sealed)),
    st.sampled_from(ForeignMetadata),
)
def test_restore_with_any_metadata_succeeds_or_names_the_partition(
    text: str, policy: ForeignMetadata
) -> None:
    """Any other error would end the member with all its partitions."""
    owned = OwnedPartition(tp(0), 4)
    found = PartitionLookup(OffsetAndMetadata(OFFSET, text), BOUNDS)
    taken = restore(owned, found, start_from=StartFrom.EARLIEST, foreign_metadata=policy)
    if isinstance(taken, Refused):
        assert policy is ForeignMetadata.REFUSE
        assert taken.reason.startswith("orders-0: the metadata ")
        taken.reason.encode()
    else:
        assert taken.ledger is not None
        assert taken.ledger.next_offset == OFFSET


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "body",
    [
        "[" * 1_000_000,
        '{"c":' * 200_000,
        "1" * 1_000_000,
        '{"c":[[' + "9" * 4_000 + ',"b"]]}',
        '{"c":[[-' + "9" * 4_000 + ',"b"]]}',
        '{"l":[' + "9" * 4_000 + ',"b","r"]}',
        '{"c":[[1e400,"b"]]}',
        '{"c":[[NaN,"b"]]}',
        '{"c":[[9223372036854775808,"b"]]}',
        json.dumps({"c": [[number, "b"] for number in range(200_000, 0, -1)]}),
        json.dumps({"c": [[130, "b" * 1_000_000]]}),
        '{"c":[],"c":[[130,"b"],[125,"b"]]}',
        '{"c":{"ab":1}}',
        '{"c":"ab"}',
        '{"l":{"a":1,"b":2,"c":3}}',
        "\x00" * 1_000_000,
        "\ud800" * 1_000_000,
        " " * 1_000_000,
    ],
    ids=lambda body: f"{len(body)} of {body[:12]!r}",
)
def test_decode_of_huge_text_fails_fast_with_short_reason(body: str) -> None:
    """Brokers may allow more than 4,096 bytes, and the reason goes into logs, ticks and checks."""
    assert read(sealed(body)) is None
    assert read(body) is None


def test_decode_of_claims_after_pause_mark_raises() -> None:
    assert read(with_mark(VALID)) is None
