"""The dead letter of one record."""

from __future__ import annotations

from dataclasses import replace

from dagster_rebalance.decoding.batches import RecordLetter
from dagster_rebalance.decoding.decoder import MAX_REASON_CHARACTERS

LETTER = RecordLetter("orders", 3, 7, 5, "why", b"k", b"v", (("trace", b"\x01"), ("trace", None)))


def test_letter_key_is_the_position_of_the_record() -> None:
    assert LETTER.letter_key == "orders-3-7"


def test_letter_keeps_the_headers_and_adds_its_own() -> None:
    assert LETTER.letter_headers == [
        ("trace", b"\x01"),
        ("trace", None),
        ("dead_letter.topic", b"orders"),
        ("dead_letter.partition", b"3"),
        ("dead_letter.offset", b"7"),
        ("dead_letter.timestamp_ms", b"5"),
        ("dead_letter.reason", b"why"),
        ("dead_letter.key", b"k"),
    ]
    bare = dict(replace(LETTER, timestamp_ms=None, key=None).letter_headers)
    assert "dead_letter.timestamp_ms" not in bare
    assert bare["dead_letter.key"] is None


def test_long_reason_is_truncated() -> None:
    long = replace(LETTER, reason="x" * 10_000)
    assert len(dict(long.letter_headers)["dead_letter.reason"] or b"") == MAX_REASON_CHARACTERS
