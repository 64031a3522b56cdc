"""Stores dead letters of single records, and waits until all of them are stored.

Owns that whoever goes on after `store` may commit: each letter is confirmed by all replicas in
sync, or there is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import BrokerError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_rebalance.decoding.batches import RecordLetter
    from dagster_rebalance.kafka.producers.dead_letters import DeadLetterProducer

_WAIT_S = 0.1


def store(producer: DeadLetterProducer, letters: Iterable[RecordLetter]) -> None:
    """Store letters. Each ends within the producer's own limit.

    Raises:
        BrokerError: One could not be stored.
    """
    under_way = set()
    for letter in letters:
        producer.send(letter.letter_key, letter.value, letter.letter_headers)
        under_way.add(letter.letter_key)
    while under_way:
        for delivery in producer.deliveries(_WAIT_S):
            under_way.discard(delivery.key)
            if delivery.problem:
                msg = (
                    f"the record {delivery.key} cannot be decoded, and its dead letter could not "
                    f"be stored in topic {producer.topic}: {delivery.problem}. Nothing was "
                    "committed"
                )
                raise BrokerError(msg)
