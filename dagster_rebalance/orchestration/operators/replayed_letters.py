"""The letters of a replay, marked as replayed after their run has succeeded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.letters import LetterKind, LetterState, StateChange
from dagster_rebalance.core.operators.replay_selection import replayed_keys
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.orchestration.storage.run_tags import SET_ASIDE_TAG

if TYPE_CHECKING:
    import dagster as dg

    from dagster_rebalance.core.runs.rerun_batch import RerunBatch
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

_LIMIT_S = 5.0
"""A tick does not wait longer for Kafka; the next one marks the letters."""


def mark_replayed(
    instance: dg.DagsterInstance, kafka: KafkaConsumerResource, batch: RerunBatch, run_id: str
) -> str:
    """Mark the letters of a batch whose run has succeeded; return a message, or "".

    Does nothing for the batch of another rerun. A repeated call changes nothing.

    Raises:
        BrokerError: Kafka did not answer, or refused. Call this again.
    """
    rerun = batch.rerun
    if not rerun.letters:
        return ""
    run = instance.get_run_by_id(run_id)
    owner, *still_open = (run.tags.get(SET_ASIDE_TAG, "") if run else "").split() or [""]
    text = ""
    if owner == run_id:
        text = f"run {run_id[:8]} of {rerun} set records aside again, whose letters stay open"
        if not still_open:
            return text
    now_ms = round(time.time() * 1000)
    DeadLetterTopic(kafka, rerun.letters).change(
        (
            StateChange(key, LetterState.REPLAYED, rerun.by, rerun.reason, now_ms, run_id, kind)
            for kind, key in replayed_keys(batch.ranges)
            if owner != run_id or kind is LetterKind.RANGE or key not in still_open
        ),
        limit_s=_LIMIT_S,
    )
    return text
