"""Evict a member from its group with a leave request in its name."""

from __future__ import annotations

import socket
import struct

_LEAVE_GROUP = 13
_CONSUMER_GROUP_HEARTBEAT = 68
_LEAVING = -1


def evict(bootstrap_servers: str, group: str, member_id: str, protocol: str) -> None:
    host, _, port = bootstrap_servers.partition(
        ":"
    )  # the one node of a test cluster is the coordinator of every group
    if protocol == "classic":
        header, body = (
            struct.pack(">hhi", _LEAVE_GROUP, 0, 1) + _text(""),
            _text(group) + _text(member_id),
        )
    else:
        header = struct.pack(">hhi", _CONSUMER_GROUP_HEARTBEAT, 1, 1) + _text("") + b"\0"
        nothing = b"\0"
        body = (
            _compact(group)
            + _compact(member_id)
            + struct.pack(">i", _LEAVING)
            + nothing * 2
            + struct.pack(">i", -1)
            + nothing * 5
        )
    request = header + body
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (length,) = struct.unpack(">i", connection.recv(4))
        answer = connection.recv(length)
    # After the correlation id: an error code (classic), or empty tags, the throttle time and the
    # error code.
    (error,) = struct.unpack_from(">h", answer, 4 if protocol == "classic" else 9)
    assert error == 0, f"the broker answered {error} to the leave request"


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def _compact(value: str) -> bytes:
    assert len(value) < 127  # one byte of a varint
    return bytes([len(value) + 1]) + value.encode()
