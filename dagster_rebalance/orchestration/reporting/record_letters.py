"""Dead letters of single records, which bisection has found.

A thread of its member reads each record from Kafka, reads which letters of its partition are stored
already, and stores the letter as `KafkaBatch.set_aside` does. So a letter is not stored twice after
a crash, and `max_dead_letters` applies.
"""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from functools import cached_property
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import BrokerError, DagsterRebalanceError
from dagster_rebalance.core.model.events import DeadLetterFailed, DeadLetterStored
from dagster_rebalance.core.model.letters import LetterStamp
from dagster_rebalance.orchestration.batch.letters import (
    BatchLetters,
    LetterProducers,
    letter_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from dagster_rebalance.core.model.commands import StoreDeadLetter
    from dagster_rebalance.core.model.offsets import OffsetRange
    from dagster_rebalance.kafka.reading.range_reader import RangeReader
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

logger = logging.getLogger(__name__)


class RecordLetters:
    """Stores the letters of single records of one member, one after the other, in a thread."""

    def __init__(self, kafka: KafkaConsumerResource) -> None:
        self._kafka = kafka
        self._topic = kafka.dead_letter_topic or ""
        self._wanted: SimpleQueue[tuple[StoreDeadLetter, str] | None] = SimpleQueue()
        self._answers: SimpleQueue[DeadLetterStored | DeadLetterFailed] = SimpleQueue()
        self._under_way: set[OffsetRange] = set()

    def is_under_way(self, range_: OffsetRange) -> bool:
        """Whether the letter of a record is being stored."""
        return range_ in self._under_way

    def store(self, letter: StoreDeadLetter, error: str) -> None:
        """Store the letter of the only record in a range, without waiting."""
        self._under_way.add(letter.range)
        self._wanted.put((letter, error))

    def answers(self) -> Iterator[DeadLetterStored | DeadLetterFailed]:
        """Yield the results of letters."""
        while not self._answers.empty():
            answer = self._answers.get()
            self._under_way.discard(answer.letter.range)
            yield answer

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="record letters", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # Not joined: a next owner stores the letter again unless the topic has it.
        self._wanted.put(None)

    @cached_property
    def _reader(self) -> RangeReader:
        return self._kafka.reader()

    def _run(self) -> None:
        with closing(LetterProducers(self._kafka)) as producers:
            try:
                producers.of(self._topic)  # connects in the background, which takes up to a second
            except Exception:  # each letter tries it again, and its answer has the error
                logger.warning("no producer for the letters of records", exc_info=True)
            while (wanted := self._wanted.get()) is not None:
                self._answers.put(self._answer(*wanted, producers))
            if "_reader" in vars(self):
                self._reader.close()

    def _answer(
        self, wanted: StoreDeadLetter, error: str, producers: LetterProducers
    ) -> DeadLetterStored | DeadLetterFailed:
        try:
            self._store(wanted, error, producers)
        except DagsterRebalanceError as problem:
            return DeadLetterFailed(wanted, str(problem))
        except Exception as problem:
            logger.warning("the letter of %s could not be stored", wanted.range, exc_info=True)
            return DeadLetterFailed(wanted, f"{type(problem).__name__}: {problem}")
        return DeadLetterStored(wanted)

    def _store(self, wanted: StoreDeadLetter, error: str, producers: LetterProducers) -> None:
        message = next(chain.from_iterable(self._reader.read_lists([wanted.range])), None)
        if message is None:
            msg = (
                f"Kafka has no record at {wanted.range}, so the asset raises without a record. "
                "Mend it, and use dagster-rebalance retry"
            )
            raise BrokerError(msg)
        attempt = len(wanted.run_ids)
        BatchLetters(
            producers,
            producers.reader,
            [wanted.range],
            lambda time_ms: LetterStamp(
                self._kafka.group_id, wanted.batch_id, wanted.run_ids[-1], attempt, time_ms
            ),
            is_repeat=True,
            limit=self._kafka.letter_limit(),
        ).store([letter_of(message, error)], self._topic)
