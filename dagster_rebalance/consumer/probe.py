"""Finds out during a hold whether the broker still knows the member, and whether somebody else owns what it holds.

Owns what is asked. The broker is sent a commit that it refuses to everybody, for the length of its metadata; it looks at the
member first, and so tells whether it knows it. Nothing is stored: an offset that was read a moment ago must never be written,
because a transaction of the caller's may have moved it since. Must never wait for the answer, and for a read only a little:
the thread that asks also reads the retained partitions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from dagster_rebalance.consumer.events import LostReason
from dagster_rebalance.consumer.kafka_errors import FENCED_IN_A_HOLD, METADATA_TOO_LARGE, kafka_error, names
from dagster_rebalance.consumer.translation import ours, to_commit
from dagster_rebalance.core.partition import OffsetAndMetadata

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import confluent_kafka
    from confluent_kafka import KafkaError

    from dagster_rebalance.consumer.session import Hold, Session
    from dagster_rebalance.consumer.settings import Settings
    from dagster_rebalance.core.partition import TopicPartition

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S = 0.5
_TOO_LONG = "-" * 32_000
"""A broker stores 4,096 bytes by default, and closes the connection on 32,767 and more."""
_BEYOND_EVERY_OFFSET = 2**62


def is_probe(partitions: Collection[confluent_kafka.TopicPartition]) -> bool:
    """Whether an answer of the client's is the answer to a probe."""
    return any(tp.metadata == _TOO_LONG for tp in partitions)


@dataclass(frozen=True)
class _Asked:
    """A probe without an answer: in which hold it was sent, and what its partition had committed then."""

    session: Session
    hold: Hold | None
    found: Mapping[TopicPartition, OffsetAndMetadata | None]


class Probe:
    """The questions of one member, whatever session it is in."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asked: _Asked | None = None
        self._is_refused = True
        self.others_commit = False
        """Whether offsets may move without this member, in transactions: that is no sign then."""

    def look(self, session: Session) -> None:
        """Read what is committed and send the commit; `session.ended` tells when something is wrong, now or later."""
        held = session.hold.partitions if session.hold else frozenset()
        # A retained partition is nobody else's, should a broker store the commit all the same.
        chosen = min(session.owned, key=lambda tp: (tp in held, tp))
        try:
            found = session.commits.read({chosen, *held}, _READ_TIMEOUT_S)
        except KafkaException as problem:
            self._hear(session, kafka_error(problem))
            return
        moved = [] if self.others_commit else session.commits.moved({tp: found[tp] for tp in held})
        if moved:
            logger.warning("group '%s': somebody else committed %s, which this member holds", self._settings.group_id, names(moved))
            session.ended = session.ended or LostReason.SUPERSEDED
            return
        session.commits.remember({tp: found[tp] for tp in held})
        self._send(session, chosen, found[chosen])

    def answered(self, session: Session, partitions: Collection[confluent_kafka.TopicPartition], error: KafkaError | None) -> None:
        """The broker has answered."""
        asked, self._asked = self._asked, None
        if error is None:
            self._is_refused = False
            stored = {ours(tp): tp.offset for tp in partitions}
            found = asked.found if asked else {}
            logger.warning(
                "group '%s': the broker stored the metadata of a probe, 32,000 bytes, for %s; no further probe is sent",
                self._settings.group_id,
                names(stored),
            )
            session.commits.restore(stored, found)
        elif error.code() != METADATA_TOO_LARGE and asked and (asked.session, asked.hold) == (session, session.hold):
            self._hear(session, error)

    def _send(self, session: Session, partition: TopicPartition, found: OffsetAndMetadata | None) -> None:
        is_unanswered = self._asked is not None and self._asked.session is session
        if is_unanswered or not self._is_refused:
            return
        # Should a broker store it, reading starts where it would have: at the same offset or, out of range, where it is reset to.
        nothing = 0 if self._settings.offset_reset == "earliest" else _BEYOND_EVERY_OFFSET
        refused = OffsetAndMetadata(found.offset if found else nothing, _TOO_LONG)
        try:
            session.consumer.commit(offsets=[to_commit(partition, refused)], asynchronous=True)
        except KafkaException as problem:
            self._hear(session, kafka_error(problem))
        else:
            self._asked = _Asked(session, session.hold, {partition: found})

    def _hear(self, session: Session, error: KafkaError) -> None:
        if error.code() in FENCED_IN_A_HOLD:
            session.ended = session.ended or LostReason.FENCED
        else:
            logger.info("group '%s': a probe during a hold got no answer: %s", self._settings.group_id, error.str())
