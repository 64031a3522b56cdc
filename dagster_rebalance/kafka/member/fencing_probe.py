"""Detect during a hold whether the member was fenced or its partitions were taken over.

The probe commits metadata above every limit. The broker validates the member before it refuses the
metadata, so the error shows whether the member is still valid, and no offset is stored. The probe
must never commit an offset that it has read: a transaction of the caller may have moved it since.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from dagster_rebalance.core.model.events import LostReason
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, names_of
from dagster_rebalance.kafka.client.confluent import to_commit
from dagster_rebalance.kafka.client.errors import (
    FENCED_IN_HOLD,
    METADATA_TOO_LARGE,
    TOPIC_ERRORS,
    error_text,
    is_final,
    kafka_error,
)
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
"""An unavailable coordinator must not delay the caller's commits."""
_TOO_LONG = "-" * 32_000
"""A broker stores 4,095 characters by default, and closes the connection on 32,767 bytes."""
_BEYOND_EVERY_OFFSET = 2**62


class Probe:
    """The probe of one session."""

    def __init__(
        self, settings: Settings, commits: Commits, clock: Callable[[], float], interval_s: float
    ) -> None:
        self._settings = settings
        self._commits = commits
        self._clock = clock
        self._interval_s = interval_s
        self._check_at = clock()
        self._is_refused = True
        self._refused_topics: set[str] = set()
        self.offsets_may_move = False
        """Whether producers may commit the group's offsets in transactions. Moved offsets do not
        prove another owner in that case."""

    def start(self) -> None:
        """Start probing a hold; the first check follows after one interval."""
        self._check_at = self._clock() + self._interval_s
        self._refused_topics.clear()

    def check(self, session: SessionView) -> None:
        """If a check is due, read the committed offsets and send the probe commit.

        Ends the session if the member was fenced or its hold superseded.
        """
        now = self._clock()
        if now < self._check_at:
            return
        self._check_at = now + self._interval_s
        held = session.hold.partitions if session.hold else frozenset()
        probed = self._chosen(session.owned, held)
        try:
            found, refused = self._commits.look_up({*probed, *held}, _READ_TIMEOUT_S)
        except KafkaException as problem:
            self._handle_error(session, kafka_error(problem))
            return
        known = {tp: offset for tp, offset in found.items() if tp in held}
        moved = [] if self.offsets_may_move else self._commits.moved(known)
        if moved:
            logger.warning(
                "group '%s': another member committed %s, which this member holds",
                self._settings.group_id,
                names_of(moved),
            )
            session.end(LostReason.SUPERSEDED)
            return
        self._commits.remember(known)
        for tp in probed if self._is_refused else ():
            if tp in found:
                self._send(session, tp, found[tp])
            elif refused[tp] is not OPEN_TRANSACTION:
                self._skip_topic(tp, refused[tp])

    def _chosen(
        self, owned: Iterable[TopicPartition], held: Collection[TopicPartition]
    ) -> list[TopicPartition]:
        """Return the partition to probe; none if every topic was refused in this hold.

        A retained partition is preferred: it has no other owner if a broker stores the probe.
        """
        candidates = [tp for tp in owned if tp.topic not in self._refused_topics]
        retained = [tp for tp in candidates if tp not in held]
        return [min(retained or candidates)] if candidates else []

    def _skip_topic(self, partition: TopicPartition, error: KafkaError) -> None:
        """Probe another topic at once.

        The broker refuses a topic that was deleted, or may not be read, before it checks the
        member.
        """
        logger.info(
            "group '%s': no further probe is sent for topic '%s' in this hold: %s",
            self._settings.group_id,
            partition.topic,
            error_text(error),
        )
        self._refused_topics.add(partition.topic)
        self._check_at = self._clock()

    def _send(
        self, session: SessionView, partition: TopicPartition, found: OffsetAndMetadata | None
    ) -> None:
        # If a broker stores it, reading still starts at the same position: at the same offset or,
        # if that is out of range, at the end of the log to which it is reset.
        nothing = 0 if self._settings.offset_reset == "earliest" else _BEYOND_EVERY_OFFSET
        probe = OffsetAndMetadata(found.offset if found else nothing, _TOO_LONG)
        try:
            answers = session.consumer.commit(
                offsets=[to_commit(partition, probe)], asynchronous=False
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
            self._commits.restore(partition, probe.offset, found)
        elif error.code() in TOPIC_ERRORS:
            self._skip_topic(partition, error)
        elif error.code() != METADATA_TOO_LARGE:
            self._handle_error(session, error)

    def _handle_error(self, session: SessionView, error: KafkaError) -> None:
        if error.code() in FENCED_IN_HOLD:
            session.end(LostReason.FENCED)
        elif is_final(error):
            session.fail(error)
        else:
            logger.info(
                "group '%s': a probe during a hold got no answer: %s",
                self._settings.group_id,
                error_text(error),
            )
