"""Whether a revoke can be held with the installed Kafka client: asked before a member joins, answered once in a process.

Clients from 2.12 to 2.16 were tried on real brokers (`make compat`). An older one is refused. A newer one plays a held revoke on
librdkafka's mock cluster, inside this process and on 127.0.0.1, in a tenth of a second, and is refused if it gives the partitions away.

Must never refuse a client for what was not seen: when the play cannot be brought about, a warning says so, and the member starts.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import confluent_kafka
from confluent_kafka import KafkaException

from dagster_rebalance.consumer import held_revoke
from dagster_rebalance.consumer.leaving import leave
from dagster_rebalance.consumer.translation import ours
from dagster_rebalance.core.errors import ConfigurationError, IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.partition import TopicPartition

logger = logging.getLogger(__name__)

OLDEST = (2, 12)
NEWEST_TRIED = (2, 16)

_TOPIC = "held-revoke"
_POLL_S = 0.01
_POLLS = 500
_POLLS_IN_HOLD = 5
_ANSWER_LIMIT_S = 5.0


@cache
def check_client() -> None:
    """Refuse a client that a revoke cannot be held with.

    Raises:
        ConfigurationError: It is too old, or gives partitions away while they are held. The message names it and those that work.
    """
    versions = _versions()
    if min(versions) < OLDEST:
        msg = (
            f"{_installed()} is too old: the consumer protocol and held revokes need version {_dotted(OLDEST)} or newer of both. "
            "Upgrade confluent-kafka"
        )
        raise ConfigurationError(msg)
    if max(versions) <= NEWEST_TRIED:
        return
    holds = holds_on_the_mock()
    if holds is None:
        logger.warning("%s is newer than what was tried (%s), and could not be tried here", _installed(), _dotted(NEWEST_TRIED))
    elif holds:
        logger.info("%s is newer than what was tried (%s); it holds a revoke on the mock cluster", _installed(), _dotted(NEWEST_TRIED))
    else:
        msg = (
            f"{_installed()} does not hold a revoke: it would give partitions away in the middle of a drain. "
            f"Install a version from {_dotted(OLDEST)} to {_dotted(NEWEST_TRIED)}, and report this one"
        )
        raise ConfigurationError(msg)


def holds_on_the_mock() -> bool | None:
    """Whether the client keeps its partitions through a held revoke; None when the mock cluster did not get that far."""
    mock = {"test.mock.num.brokers": 1, "allow.auto.create.topics": True, "log_level": 0}
    consumer = confluent_kafka.Consumer({**mock, "group.id": _TOPIC, "group.protocol": "consumer"})
    held: set[TopicPartition] = set()
    try:
        return _hold(consumer, held)
    except IllegalStateError:
        return False
    except KafkaException as problem:
        logger.info("the mock cluster: %s", problem)
        return None
    finally:
        leave(consumer, held)


def _hold(consumer: confluent_kafka.Consumer, held: set[TopicPartition]) -> bool | None:
    is_asked = False

    def on_revoke(revoked: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]) -> None:
        if not is_asked:
            return  # by the end of a play that did not get this far
        held_revoke.suppress_unassign(revoked)
        held.update(map(ours, partitions))

    consumer.list_topics(_TOPIC, timeout=_ANSWER_LIMIT_S)  # the mock makes it when it is asked for
    consumer.subscribe([_TOPIC], on_revoke=on_revoke)
    if not _polled(consumer, consumer.assignment):
        return None
    is_asked = True
    consumer.unsubscribe()
    if not _polled(consumer, lambda: held):
        is_asked = False
        return None
    for _ in range(_POLLS_IN_HOLD):
        consumer.poll(_POLL_S)
    if set(map(ours, consumer.assignment())) != held:
        return False
    held_revoke.complete(consumer, held, eager=False)
    return not consumer.assignment()


def _polled(consumer: confluent_kafka.Consumer, until: Callable[[], object]) -> bool:
    for _ in range(_POLLS):
        if until():
            return True
        consumer.poll(_POLL_S)
    return False


def _versions() -> list[tuple[int, ...]]:
    return [tuple(map(int, version.split(".")[:2])) for version in held_revoke.installed()]


def _installed() -> str:
    return "confluent-kafka {} with librdkafka {}".format(*held_revoke.installed())


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
