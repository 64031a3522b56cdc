"""Errors of the package, one class for each kind of remedy.

A message says what happened, to which partition, and what to do. Each library's errors are
translated to these classes in one place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.printable import escaped

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dagster_rebalance.core.model.offsets import TopicPartition


class DagsterRebalanceError(Exception):
    """Base class of all errors raised by this package."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*map(escaped, messages))


class ConfigurationError(DagsterRebalanceError):
    """The configuration is invalid and must be changed."""


class BrokerError(DagsterRebalanceError):
    """Kafka or its schema registry is unreachable or refused a request.

    Attributes:
        retriable: Whether the same request may succeed later without a change.
        partitions: The partitions that failed, with the broker's reason; empty if the whole request
            failed.
        topics: The deleted or unauthorized topics, if these are the only cause. Requests for other
            topics still succeed.
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
            partition: escaped(reason) for partition, reason in (partitions or {}).items()
        }


class RebalanceInProgressError(BrokerError):
    """A commit failed because a rebalance is in progress.

    The partitions are still owned: poll, then commit again (KIP-429).
    """

    def __init__(
        self, message: str, *, partitions: Mapping[TopicPartition, str] | None = None
    ) -> None:
        super().__init__(message, retriable=True, partitions=partitions)


class PartitionLostError(BrokerError):
    """The member may no longer commit for the partitions.

    The coordinator has fenced the member, the partitions belong to another member, or their topic
    was deleted.
    """


class ClaimError(DagsterRebalanceError):
    """The metadata of a committed offset is not a claim that this version can read.

    An operator must inspect it.
    """


class BatchRefusedError(DagsterRebalanceError):
    """A run must not process its batch.

    The claim no longer exists, or another run processes or has processed the batch.
    """


class IllegalStateError(DagsterRebalanceError):
    """The call is not allowed in the current state: a bug in the caller.

    The state is unchanged.
    """


class UndecodableError(DagsterRebalanceError):
    """A record cannot be decoded, by any reader and in any attempt.

    Its producer has to be fixed. With a dead-letter topic, the partition continues without the
    record.
    """


class TooManyLettersError(DagsterRebalanceError):
    """A partition has more dead letters than `max_dead_letters` allows.

    The batch fails, and after its attempts the partition stops: the producers or the code may have
    changed.
    """


class UnsupportedOperationError(DagsterRebalanceError):
    """The Kafka client does not support the operation."""
