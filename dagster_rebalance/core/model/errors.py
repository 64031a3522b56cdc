"""Every error of the package, split by who must act on it.

A message says what happened, to which partition, and what to do. Shells translate foreign errors
into these in one place each; nothing here is swallowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.printable import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition


class DagsterRebalanceError(Exception):
    """The root of all errors raised by this package."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*map(shown, messages))


class ConfigurationError(DagsterRebalanceError):
    """The configuration cannot work. The person who wrote it must change it."""


class BrokerError(DagsterRebalanceError):
    """Kafka, or its schema registry, could not be reached or refused a request.

    Attributes:
        retriable: Whether the same request may succeed later without a change by anybody.
        partitions: The partitions that the request failed for, with the broker's reason; empty when
            it failed as a whole.
        topics: The topics that were deleted or may not be read, if that is the whole trouble:
            requests for other topics are answered.
    """

    def __init__(
        self,
        message: str,
        *,
        retriable: bool = False,
        partitions: Mapping[TopicPartition, str] | None = None,
        topics: Collection[str] = (),
    ) -> None:
        super().__init__(message)
        self.retriable = retriable
        self.topics = frozenset(topics)
        self.partitions: dict[TopicPartition, str] = {
            partition: shown(reason) for partition, reason in (partitions or {}).items()
        }


class RebalanceInProgressError(BrokerError):
    """A commit met a rebalance.

    The partitions are still owned: poll, then commit again (KIP-429).
    """

    def __init__(
        self, message: str, *, partitions: Mapping[TopicPartition, str] | None = None
    ) -> None:
        super().__init__(message, retriable=True, partitions=partitions)


class PartitionLostError(BrokerError):
    """The member may not commit for the partitions any more.

    The coordinator has fenced the member, the partitions belong to another member, or their topic
    was deleted.
    """


class ClaimError(DagsterRebalanceError):
    """The metadata of a committed offset is not a claim that this version can read.

    An operator must look at it.
    """


class BatchRefusedError(DagsterRebalanceError):
    """A run must not work on its batch.

    The claim is gone, or another run works or has worked on it.
    """


class IllegalStateError(DagsterRebalanceError):
    """The call is not allowed in the present state: a bug in the caller.

    The state stays as it was.
    """


class UndecodableError(DagsterRebalanceError):
    """A record cannot be decoded, whoever tries and how often.

    Who produced it must look at it. Its topic goes on without it if the team says where it goes.
    """


class UnsupportedOperationError(DagsterRebalanceError):
    """The Kafka client cannot answer this, and nothing is made up in its place."""
