"""Member events: actions and observations of a member, each with a name and fields.

The names are stable between releases: users filter logs by them, and `metrics` counts them. No
decision depends on a member event.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_rebalance.core.model.offsets import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping


class EventKind(enum.Enum):
    """Names of member events."""

    MEMBER_JOINED = "dagster_rebalance.member.joined"
    MEMBER_LEAVING = "dagster_rebalance.member.leaving"
    MEMBER_LEFT = "dagster_rebalance.member.left"
    MEMBER_FAILED = "dagster_rebalance.member.failed"
    PARTITIONS_ASSIGNED = "dagster_rebalance.partitions.assigned"
    REVOKE_REQUESTED = "dagster_rebalance.revoke.requested"
    PARTITIONS_LOST = "dagster_rebalance.partitions.lost"
    HOLD_WAITING = "dagster_rebalance.hold.waiting"
    HOLD_ENDED = "dagster_rebalance.hold.ended"
    BATCH_CLAIMED = "dagster_rebalance.batch.claimed"
    BATCH_ADOPTED = "dagster_rebalance.batch.adopted"
    ATTEMPT_STARTED = "dagster_rebalance.attempt.started"
    ATTEMPT_ENDED = "dagster_rebalance.attempt.ended"
    OFFSETS_COMMITTED = "dagster_rebalance.offsets.committed"
    OFFSETS_RECORDED = "dagster_rebalance.offsets.recorded"
    OFFSETS_MOVED = "dagster_rebalance.offsets.moved"
    WRITE_FAILED = "dagster_rebalance.write.failed"
    PARTITION_STOPPED = "dagster_rebalance.partition.stopped"
    PARTITION_RESUMED = "dagster_rebalance.partition.resumed"
    DIRECTIVES_CHANGED = "dagster_rebalance.partitions.ordered"
    DEAD_LETTER_STORED = "dagster_rebalance.dead_letter.stored"
    DEAD_LETTER_FAILED = "dagster_rebalance.dead_letter.failed"
    RUNS_CANCELLED = "dagster_rebalance.runs.cancelled"
    RUNS_DEAD = "dagster_rebalance.runs.dead"
    NOTED = "dagster_rebalance.noted"


class EventSpec(NamedTuple):
    """Properties of all member events of one name.

    Attributes:
        level: The level of `logging`.
        fields: The names of the fields.
        meaning: The description in the documentation.
    """

    level: int
    fields: tuple[str, ...]
    meaning: str


_RANGE = ("topic", "partition", "start", "until")
EVENT_SPECS: Mapping[EventKind, EventSpec] = {
    EventKind.MEMBER_JOINED: EventSpec(logging.INFO, ("topics",), "The member joins its group."),
    EventKind.MEMBER_LEAVING: EventSpec(
        logging.INFO, ("reason",), "The member drains its partitions, releases them and leaves."
    ),
    EventKind.MEMBER_LEFT: EventSpec(logging.INFO, ("reason",), "The member has left its group."),
    EventKind.MEMBER_FAILED: EventSpec(
        logging.ERROR, ("error",), "The member ended with a permanent error."
    ),
    EventKind.PARTITIONS_ASSIGNED: EventSpec(
        logging.INFO, ("partitions",), "Kafka assigned partitions to the member."
    ),
    EventKind.REVOKE_REQUESTED: EventSpec(
        logging.INFO, ("partitions",), "Kafka requested a revoke: a hold begins."
    ),
    EventKind.PARTITIONS_LOST: EventSpec(
        logging.WARNING,
        ("partitions", "reason"),
        "Partitions were lost. Reasons: `session`, `fenced`, `superseded`, `expired`.",
    ),
    EventKind.HOLD_WAITING: EventSpec(
        logging.INFO,
        ("cause", "partitions", "run_ids", "limit_s"),
        "A hold lasts longer than a second because of live runs.",
    ),
    EventKind.HOLD_ENDED: EventSpec(
        logging.INFO,
        (
            "outcome",
            "cause",
            "partitions",
            "seconds",
            "run_ids",
            "cancelled_run_ids",
            "handed_over",
        ),
        "The receipt of a hold. Partitions handed over keep their claims for the next owner.",
    ),
    EventKind.BATCH_CLAIMED: EventSpec(
        logging.DEBUG,
        ("batch_id", "ranges", "offsets", "is_again"),
        "The claim of a batch is stored in Kafka. `is_again`: a streaming run claims a claimed "
        "range again.",
    ),
    EventKind.BATCH_ADOPTED: EventSpec(
        logging.INFO,
        ("batch_id", "run_ids", *_RANGE),
        "The member took over a range with its live runs.",
    ),
    EventKind.ATTEMPT_STARTED: EventSpec(
        logging.DEBUG, ("batch_id", "attempt_run_id", "ranges"), "A run works on a batch."
    ),
    EventKind.ATTEMPT_ENDED: EventSpec(
        logging.INFO,
        ("batch_id", "attempt_run_id", "ranges", "outcome"),
        "The run no longer works on the batch. Outcomes: `succeeded` (level DEBUG), `failed`, "
        "`not_started`, `refused`, `interrupted`, `taken_back`.",
    ),
    EventKind.OFFSETS_COMMITTED: EventSpec(
        logging.DEBUG,
        (
            *_RANGE,
            "offsets",
            "batch_id",
            "attempt_run_id",
            "claim_to_commit_s",
            "lag",
            "is_dead_letter",
        ),
        "Kafka has stored the end of a range. `claim_to_commit_s` is null where another member "
        "had written the claim.",
    ),
    EventKind.OFFSETS_RECORDED: EventSpec(
        logging.DEBUG,
        (*_RANGE, "commits"),
        "Dagster has the materialization of one commit or several.",
    ),
    EventKind.OFFSETS_MOVED: EventSpec(
        logging.INFO,
        ("topic", "partition", "recorded_until", "offset"),
        "The committed offset is not the last recorded one: it was moved externally.",
    ),
    EventKind.WRITE_FAILED: EventSpec(
        logging.WARNING,
        ("topic", "partition", "failure"),
        "An offset was not written. Failures: `changed` (written externally), `retriable`, "
        "`refused`.",
    ),
    EventKind.PARTITION_STOPPED: EventSpec(
        logging.WARNING, ("topic", "partition", "reason"), "A partition cannot continue."
    ),
    EventKind.PARTITION_RESUMED: EventSpec(
        logging.INFO,
        ("topic", "partition", "is_released"),
        "The partition continues, or was released while it was stopped (`is_released`).",
    ),
    EventKind.DIRECTIVES_CHANGED: EventSpec(
        logging.INFO, ("partitions", "order"), "A directive paused, stopped or resumed partitions."
    ),
    EventKind.DEAD_LETTER_STORED: EventSpec(
        logging.WARNING,
        (*_RANGE, "batch_id", "attempt_run_id"),
        "A range was stored in the dead-letter topic.",
    ),
    EventKind.DEAD_LETTER_FAILED: EventSpec(
        logging.WARNING,
        (*_RANGE, "batch_id", "attempt_run_id", "reason"),
        "A range may not have been stored in the dead-letter topic. Storing it is retried.",
    ),
    EventKind.RUNS_CANCELLED: EventSpec(
        logging.INFO,
        ("run_ids", "reason"),
        "The member cancels runs, which are not failed attempts.",
    ),
    EventKind.RUNS_DEAD: EventSpec(
        logging.WARNING, ("run_ids",), "Runs sent no heartbeat, and are ended."
    ),
    EventKind.NOTED: EventSpec(logging.INFO, (), "Any other note."),
}


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """One member event.

    Attributes:
        fields: The fields that `EVENT_SPECS` lists for the name, as values of the core.
    """

    kind: EventKind
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> int:
        """The level of `logging`; `DEBUG` for success."""
        if self.fields.get("outcome") == SUCCEEDED:
            return logging.DEBUG
        return EVENT_SPECS[self.kind].level


SUCCEEDED = "succeeded"


def json_value(value: object) -> object:
    """Return the value of a field as a JSON type."""
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple) and not isinstance(value, TopicPartition):
        return [json_value(each) for each in value]
    return str(value)
