"""The open letters of a replay or rerun, marked as replayed after their run has succeeded."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.letters import LetterKind, LetterState, StateChange
from dagster_rebalance.core.operators.replay_selection import letters_in
from dagster_rebalance.orchestration.batch.letters import with_their_records
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.orchestration.runs.coverage import Coverage
from dagster_rebalance.orchestration.storage.run_tags import set_aside_of

if TYPE_CHECKING:
    import dagster as dg

    from dagster_rebalance.core.model.letters import LetterFold
    from dagster_rebalance.core.runs.rerun_batch import RerunBatch
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

_LIMIT_S = 5.0
"""A tick does not wait longer for Kafka; the next one marks the letters."""


def is_transient(error: BrokerError) -> bool:
    """Whether the letters can be marked later without a change of Kafka's topics or rights."""
    return error.retriable and not error.topics


TopicReads = dict[str, "LetterFold | BrokerError"]
"""The letters of each topic, or why it is not read again: one read serves all finished batches."""


def mark_replayed(
    instance: dg.DagsterInstance,
    kafka: KafkaConsumerResource,
    batch: RerunBatch,
    run_id: str,
    known: TopicReads | None = None,
) -> str:
    """Mark the letters of a batch whose run has succeeded; return a message, or "".

    These are the open letters of ranges and of records in the ranges of the batch, without those
    whose record the run has set aside again, or `only` leaves out. A repeated call changes nothing.

    Args:
        instance: The Dagster instance.
        kafka: The group.
        batch: The batch.
        run_id: The run that has succeeded.
        known: The reads of this tick or command. After an error, no call waits for the topic again.

    Raises:
        BrokerError: Kafka did not answer, or refused. Call this again. For another rerun than a
            replay, the message says so instead.
    """
    if not (batch.rerun.letters or kafka.dead_letter_topic):
        return ""
    run = instance.get_run_by_id(run_id)
    still_open = None
    if run is not None:
        still_open = set_aside_of(run, is_partial=Coverage(instance).is_partial(run))
    text = ""
    if still_open is None or still_open:
        text = f"run {run_id[:8]} of {batch.rerun} set records aside, whose letters stay open"
    if still_open is None:
        return text
    known = {} if known is None else known
    try:
        if left_out := _mark(kafka, batch, run_id, still_open, known):
            more = f"`only` leaves out the records of letters that stay open: {left_out}"
            text = f"{text}; {more}" if text else f"{batch.rerun}: {more}"
    except BrokerError as error:
        name = DeadLetterTopic(kafka, batch.rerun.letters).name
        # The error of a source topic is about this batch only.
        if {name}.issuperset([*error.topics, *(one.topic for one in error.partitions)]):
            known[name] = error
        if batch.rerun.letters:
            raise
        return f"the letters of records that {batch.rerun} has processed are still open: {error}"
    return text


def _mark(
    kafka: KafkaConsumerResource,
    batch: RerunBatch,
    run_id: str,
    still_open: frozenset[str],
    known: TopicReads,
) -> int:
    """Mark the letters; return the number of those whose records `only` leaves out."""
    topic = DeadLetterTopic(kafka, batch.rerun.letters)
    if topic.name not in known:
        known[topic.name] = topic.read(limit_s=_LIMIT_S)
    fold, rerun, now_ms = known[topic.name], batch.rerun, round(time.time() * 1000)
    if isinstance(fold, BrokerError):
        raise fold
    entries = [*letters_in(batch.ranges, fold.entries.values())]
    found = [
        letter
        for entry in entries
        if (letter := entry.letter) is not None
        and entry.place not in fold.left_out
        and (letter.kind is LetterKind.RANGE or letter.key not in still_open)
    ]
    # The run has processed the record of a letter with a range of its own, wherever it is.
    own = set(batch.ranges) if rerun.letters else set()
    compared = [one for one in found if one.kind is LetterKind.RECORD and one.range not in own]
    if compared:
        with closing(kafka.reader()) as reader:
            others = set(compared).difference(with_their_records(compared, reader, _LIMIT_S))
        found = [one for one in found if one not in others]
    if found:
        topic.change(
            (
                StateChange(
                    one.key, LetterState.REPLAYED, rerun.by, rerun.reason, now_ms, run_id, one.kind
                )
                for one in found
            ),
            limit_s=_LIMIT_S,
        )
    return sum(entry.place in fold.left_out for entry in entries)
