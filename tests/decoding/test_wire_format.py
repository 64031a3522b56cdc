"""Frames of payloads, and invalid frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding.wire_format import Frame, SchemaText, parse_frame

ID = b"\x00\x00\x00\x01\x02"


@pytest.mark.parametrize(
    ("payload", "frame"),
    [
        (ID, Frame(258, 5, ())),
        (b"\x00\xff\xff\xff\xff", Frame(2**32 - 1, 5, ())),
        (ID + b"data", Frame(258, 5, ())),
    ],
)
def test_frame_is_a_magic_byte_and_an_unsigned_id(payload: bytes, frame: Frame) -> None:
    assert parse_frame(payload) == frame


@pytest.mark.parametrize(
    ("indexes", "frame"),
    [
        (b"\x00", Frame(258, 6, (0,))),
        (b"\x02\x00", Frame(258, 7, (0,))),
        (b"\x02\x06", Frame(258, 7, (3,))),
        (b"\x06\x00\x02\xac\x02", Frame(258, 10, (0, 1, 150))),
        (b"\x02\x01", Frame(258, 7, (-1,))),
    ],
)
def test_protobuf_frame_has_message_indexes(indexes: bytes, frame: Frame) -> None:
    assert parse_frame(ID + indexes + b"", has_indexes=True) == frame


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "empty"),
        (b"{}", "byte 123"),
        (b"\x00\x00\x00\x01", "4 bytes, too few"),
        (b"\x01" + bytes(16), "GUID"),
        (b"\x01" + bytes(15), "byte 1 and not"),
        (ID, "truncated"),
        (ID + b"\x04\x02", "truncated"),
        (ID + b"\xff\xff\xff\xff\xff\x01", "truncated"),
        (ID + b"\x01", "the count is -1"),
        (ID + b"\xca\x01", "the count is 101"),
    ],
)
def test_invalid_frame_is_refused_with_a_reason(payload: bytes, why: str) -> None:
    with pytest.raises(UndecodableError, match=why):
        parse_frame(payload, has_indexes=True)


@given(payload=st.binary(max_size=40), has_indexes=st.booleans())
def test_any_bytes_have_a_frame_or_a_reason(payload: bytes, *, has_indexes: bool) -> None:
    try:
        frame = parse_frame(payload, has_indexes=has_indexes)
    except UndecodableError:
        return
    assert 5 <= frame.starts_at <= len(payload)


def test_schema_text_equals_by_text_and_references() -> None:
    alone, again = SchemaText("order"), SchemaText("order", ())
    parsed = {alone: "parsed"}
    assert parsed[again] == "parsed"
    assert SchemaText("order", (("customer", "text"),)) not in parsed
