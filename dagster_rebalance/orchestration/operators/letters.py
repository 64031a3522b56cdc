"""Requests of operators about dead letters, for the job and the command line: discard and replay.

A replay is a rerun of the ranges of letters (`Reruns.plan_letters`): the sensor of the group starts
its runs beside the group, and marks the letters once their run has succeeded (`rerun_tick`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.directives import check_lengths
from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.core.model.letters import LetterState, StateChange
from dagster_rebalance.core.operators.letter_selection import (
    chosen_letters,
    newest_first,
)
from dagster_rebalance.core.reporting.open_letters import count_letters
from dagster_rebalance.core.runs.rerun_batch import RUNS_AT_ONCE
from dagster_rebalance.orchestration.operators.requests import Reruns
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.resources.letter_topic import DeadLetterTopic
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import dagster as dg

    from dagster_rebalance.core.model.letters import Letter, LetterFold
    from dagster_rebalance.orchestration.operators.requests import RerunPlan
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

_ROWS_SHOWN = 20


class DiscardPlan(NamedTuple):
    """The letters that a request discards."""

    letters: Sequence[Letter]
    topic: DeadLetterTopic
    by: str
    why: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The number of letters, and the letters by partition and reason."""
        number = _number_of(self.letters)
        return (f"{number} of topic {self.topic.name} to discard", *_counts(self.letters))


class LetterRequest(NamedTuple):
    """A request about open letters.

    Attributes:
        keys: The keys of the letters.
        everything: Whether the request is about all open letters; then there are no keys.
        containing: With `everything`, a text in the reason of the letters.
        by: The operator.
        why: The reason of the operator.
        topic: The dead-letter topic; empty for that of the group.
    """

    keys: Sequence[str]
    everything: bool
    containing: str
    by: str
    why: str
    topic: str = ""

    def chosen(self, topic: DeadLetterTopic) -> tuple[list[Letter], LetterFold]:
        """Return the letters, and all letters of the topic.

        Raises:
            BrokerError: Kafka did not answer, or there is no such topic.
            ConfigurationError: The request is incomplete, or names a letter that is not open.
        """
        for what, text in (("your name (by)", self.by), ("a reason (why)", self.why)):
            if not text.strip():
                msg = f"give {what}, which others see with the letters"
                raise ConfigurationError(msg)
        check_lengths(self.by, self.why)
        fold = topic.read()
        entries = chosen_letters(
            fold.entries,
            self.keys,
            everything=self.everything,
            containing=self.containing,
            topic=topic.name,
            group_id=topic.group_id,
        )
        return [entry.letter for entry in entries if entry.letter is not None], fold


def letters_text(topic: DeadLetterTopic) -> str:
    """Return the number of letters, and the open ones by partition and reason, for a log.

    Raises:
        BrokerError: Kafka did not answer, or there is no such topic.
    """
    fold = topic.read()
    counts = ", ".join(f"{fold.counts[state]} {state.value}" for state in LetterState)
    found = newest_first(fold.in_state(LetterState.OPEN))
    letters = [entry.letter for entry in found if entry.letter is not None]
    lines = [f"topic {topic.name}: {counts}; {fold.malformed} other records", *_counts(letters)]
    newest = ", ".join(letter.key for letter in letters[:_ROWS_SHOWN])
    return "\n".join([*lines, *([f"newest: {newest}"] if letters else [])])


def _counts(letters: Sequence[Letter]) -> Iterator[str]:
    rows = count_letters(letters)
    for row in rows[:_ROWS_SHOWN]:
        yield f"{row.letters} of {row.partition} ({row.kind.value}): {row.reason}"
    if len(rows) > _ROWS_SHOWN:
        yield f"and {len(rows) - _ROWS_SHOWN} more reasons"


def _number_of(letters: Sequence[Letter]) -> str:
    return f"{len(letters)} letter{'s' * (len(letters) != 1)}"


def plan_replay(
    instance: dg.DagsterInstance,
    kafka: KafkaConsumerResource,
    request: LetterRequest,
    *,
    runs_at_once: int = RUNS_AT_ONCE,
) -> RerunPlan:
    """Return the ranges that a replay of letters would process. `Reruns.begin` begins it.

    Raises:
        BrokerError: Kafka did not answer, or refused.
        ConfigurationError: See `LetterRequest.chosen`; or no letter can be replayed.
    """
    topic = DeadLetterTopic(kafka, request.topic)
    return Reruns(instance, kafka).plan_letters(
        *request.chosen(topic),
        topic.name,
        by=request.by.strip(),
        reason=request.why.strip(),
        runs_at_once=runs_at_once,
    )


def plan_discard(kafka: KafkaConsumerResource, request: LetterRequest) -> DiscardPlan:
    """Return the letters that a request discards. Nothing is written.

    Raises:
        BrokerError: Kafka did not answer, or refused.
        ConfigurationError: See `LetterRequest.chosen`.
    """
    topic = DeadLetterTopic(kafka, request.topic)
    letters, _ = request.chosen(topic)
    return DiscardPlan(letters, topic, request.by.strip(), request.why.strip())


def discard(instance: dg.DagsterInstance, kafka: KafkaConsumerResource, plan: DiscardPlan) -> str:
    """Mark letters as discarded, and show it in Dagster.

    Returns:
        A message about the outcome.

    Raises:
        BrokerError: Kafka did not answer, or refused.
        DagsterRebalanceError: The letters are discarded, but Dagster did not record it.
    """
    letters, topic, by, why = plan
    now_ms = round(time.time() * 1000)
    topic.change(
        StateChange(letter.key, LetterState.DISCARDED, by, why, now_ms, kind=letter.kind)
        for letter in letters
    )
    done = f"{_number_of(letters)} of topic {topic.name} discarded"
    catalogue = Catalogue(instance, GroupAssets.of(kafka.group_id), NO_MEMBER)
    try:
        catalogue.record_discarded(letters, by=by, why=why)
    except Exception as error:
        msg = f"{done}, but Dagster's storage did not record it: {error}"
        raise DagsterRebalanceError(msg) from error
    return done
