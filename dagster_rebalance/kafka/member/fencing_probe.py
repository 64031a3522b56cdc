"""During a hold, the probe finds out whether the broker still knows the member.

It also finds out whether somebody else owns the held partitions.

Owns what is asked. The probe sends a commit that the broker refuses to everybody, for the length of
its metadata; the broker looks at the member first, and so tells whether it knows it. The broker
stores nothing: the probe must never write an offset that it read a moment ago, because a
transaction of the caller's may have moved it since.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from dagster_rebalance.core.model.events import LostReason
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, named
from dagster_rebalance.kafka.client.errors import (
    FENCED_IN_A_HOLD,
    METADATA_TOO_LARGE,
    OF_A_TOPIC,
    is_final,
    kafka_error,
    said,
)
from dagster_rebalance.kafka.client.types import to_commit
from dagster_rebalance.kafka.cluster.committed_offsets import OPEN_TRANSACTION

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from confluent_kafka import KafkaError

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.kafka.client.settings import Settings
    from dagster_rebalance.kafka.member.commits import Commits
    from dagster_rebalance.kafka.member.session_view import SessionView

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S = 0.5
"""A coordinator that is away must not keep the commits of the caller waiting."""
_TOO_LONG = "-" * 32_000
"""A broker stores 4,095 characters by default, and closes the connection on 32,767 bytes."""
_BEYOND_EVERY_OFFSET = 2**62


class Probe:
    """The questions of one session."""

    def __init__(
        self, settings: Settings, commits: Commits, clock: Callable[[], float], interval_s: float
    ) -> None:
        self._settings = settings
        self._commits = commits
        self._clock = clock
        self._interval_s = interval_s
        self._look_at = clock()
        self._is_refused = True
        self._refused_topics: set[str] = set()
        self.others_commit = False
        """Whether offsets may move without this member, in transactions: that is no sign then."""

    def begin(self) -> None:
        """A hold has begun: the first look comes an interval later."""
        self._look_at = self._clock() + self._interval_s
        self._refused_topics.clear()

    def look(self, session: SessionView) -> None:
        """Read the committed offsets and send the commit, if it is time to.

        The probe ends the session when something is wrong.
        """
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + self._interval_s
        held = session.hold.partitions if session.hold else frozenset()
        chosen = self._chosen(session.owned, held)
        try:
            found, refused = self._commits.look_up({*chosen, *held}, _READ_TIMEOUT_S)
        except KafkaException as problem:
            self._hear(session, kafka_error(problem))
            return
        known = {tp: offset for tp, offset in found.items() if tp in held}
        moved = [] if self.others_commit else self._commits.moved(known)
        if moved:
            logger.warning(
                "group '%s': somebody else committed %s, which this member holds",
                self._settings.group_id,
                named(moved),
            )
            session.end(LostReason.SUPERSEDED)
            return
        self._commits.remember(known)
        for tp in chosen if self._is_refused else ():
            if tp in found:
                self._send(session, tp, found[tp])
            elif refused[tp] is not OPEN_TRANSACTION:
                self._leave_topic(tp, refused[tp])

    def _chosen(
        self, owned: Iterable[TopicPartition], held: Collection[TopicPartition]
    ) -> list[TopicPartition]:
        """The partition to send the commit for: none if every topic was refused in this hold.

        A retained one is nobody else's, should a broker store the commit all the same.
        """
        fit = [tp for tp in owned if tp.topic not in self._refused_topics]
        return sorted(fit, key=lambda tp: (tp in held, tp))[:1]

    def _leave_topic(self, partition: TopicPartition, error: KafkaError) -> None:
        """Ask for another topic at once.

        The broker refuses a topic that was deleted, or may not be read, before it looks at the
        member.
        """
        logger.info(
            "group '%s': no further probe is sent for topic '%s' in this hold: %s",
            self._settings.group_id,
            partition.topic,
            said(error),
        )
        self._refused_topics.add(partition.topic)
        self._look_at = self._clock()

    def _send(
        self, session: SessionView, partition: TopicPartition, found: OffsetAndMetadata | None
    ) -> None:
        # Should a broker store it, reading starts where it would have: at the same offset or, out
        # of range, where it is reset to.
        nothing = 0 if self._settings.offset_reset == "earliest" else _BEYOND_EVERY_OFFSET
        refused = OffsetAndMetadata(found.offset if found else nothing, _TOO_LONG)
        try:
            answers = session.consumer.commit(
                offsets=[to_commit(partition, refused)], asynchronous=False
            )
        except KafkaException as problem:
            error: KafkaError | None = kafka_error(problem)
        else:
            error = next((tp.error for tp in answers or () if tp.error is not None), None)
        if error is None:
            self._is_refused = False
            logger.warning(
                "group '%s': the broker stored the metadata of a probe, 32,000 bytes, for %s; no "
                "further probe is sent",
                self._settings.group_id,
                partition,
            )
            self._commits.restore(partition, refused.offset, found)
        elif error.code() in OF_A_TOPIC:
            self._leave_topic(partition, error)
        elif error.code() != METADATA_TOO_LARGE:
            self._hear(session, error)

    def _hear(self, session: SessionView, error: KafkaError) -> None:
        if error.code() in FENCED_IN_A_HOLD:
            session.end(LostReason.FENCED)
        elif is_final(error):
            session.end_broken(error)
        else:
            logger.info(
                "group '%s': a probe during a hold got no answer: %s",
                self._settings.group_id,
                said(error),
            )
