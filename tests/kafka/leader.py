"""A slow leader of a classic group, which speaks the protocol itself."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition

if TYPE_CHECKING:
    from typing_extensions import Self

_JOIN_GROUP, _JOIN_VERSION = 11, 3
_REBALANCE_IN_PROGRESS = 27
_SYNC_GROUP, _SYNC_VERSION = 14, 2
_TIMEOUT_MS = 20_000


class SlowLeader:
    """The first member of a group with the strategy cooperative-sticky."""

    def __init__(self, bootstrap_servers: str, group: str, topic: str) -> None:
        # The one node of a test cluster is the coordinator of every group, once a client has looked
        # one up and the node has created and loaded `__consumer_offsets`.
        client = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group})
        client.committed([TopicPartition(topic, 0)], timeout=120)
        client.close()
        host, _, port = bootstrap_servers.partition(":")
        self._connection = socket.create_connection((host, int(port)), timeout=120)
        self._group = group
        self._topic = topic
        self._generation = 0
        self.member_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def join(self) -> set[str]:
        """Ask for a new generation, and wait until all have joined; return the ids of the others.

        The group waits for `assign` then.
        """
        subscription = struct.pack(">hi", 0, 1) + _text(self._topic) + struct.pack(">i", -1)
        protocol = struct.pack(">i", 1) + _text("cooperative-sticky") + _bytes(subscription)
        body = (
            _text(self._group)
            + struct.pack(">ii", _TIMEOUT_MS, _TIMEOUT_MS)
            + _text(self.member_id)
            + _text("consumer")
            + protocol
        )
        answer = _Answer(self._ask(_JOIN_GROUP, _JOIN_VERSION, body))
        answer.skip(4)
        assert answer.number(">h") == 0
        self._generation = answer.number(">i")
        answer.text()
        leader, self.member_id = answer.text(), answer.text()
        assert leader == self.member_id
        members = set()
        for _ in range(answer.number(">i")):
            members.add(answer.text())
            answer.skip(answer.number(">i"))
        return members - {self.member_id}

    def assign(self, partitions: dict[str, list[int]], *, may_be_late: bool = False) -> None:
        """Let the group go on: the numbers of the partitions that each member gets.

        `may_be_late`: another member may have joined in between.
        """
        body = (
            _text(self._group)
            + struct.pack(">i", self._generation)
            + _text(self.member_id)
            + struct.pack(">i", len(partitions) + 1)
        )
        for member, numbers in {**partitions, self.member_id: []}.items():
            share = (
                struct.pack(">hi", 0, 1)
                + _text(self._topic)
                + struct.pack(f">i{len(numbers)}i", len(numbers), *numbers)
            )
            body += _text(member) + _bytes(share + struct.pack(">i", -1))
        answer = _Answer(self._ask(_SYNC_GROUP, _SYNC_VERSION, body))
        answer.skip(4)
        assert answer.number(">h") in ({0, _REBALANCE_IN_PROGRESS} if may_be_late else {0})

    def _ask(self, key: int, version: int, body: bytes) -> bytes:
        request = struct.pack(">hhi", key, version, 1) + _text("slow-leader") + body
        self._connection.sendall(_bytes(request))
        (length,) = struct.unpack(">i", self._receive(4))
        return self._receive(length)[4:]

    def _receive(self, length: int) -> bytes:
        received = b""
        while len(received) < length:
            received += self._connection.recv(length - len(received))
        return received


class _Answer:
    """Reads an answer from its beginning to its end."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    def number(self, kind: str) -> int:
        (value,) = struct.unpack_from(kind, self._raw, self._at)
        self._at += struct.calcsize(kind)
        return int(value)

    def text(self) -> str:
        length = self.number(">h")
        self._at += length
        return self._raw[self._at - length : self._at].decode()

    def skip(self, length: int) -> None:
        self._at += length


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def _bytes(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value
