"""An occurrence is one thing that a member did, or that happened to it, with a name and fields.

Owns the names, which stay the same from release to release, and what each is logged with: people
filter logs by them, and `metrics` counts them. Whoever finds something out names it here; nothing
is decided by an occurrence.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Occurred(enum.Enum):
    """The names of occurrences."""

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
    PARTITIONS_ORDERED = "dagster_rebalance.partitions.ordered"
    DEAD_LETTER_STORED = "dagster_rebalance.dead_letter.stored"
    DEAD_LETTER_FAILED = "dagster_rebalance.dead_letter.failed"
    RUNS_CANCELLED = "dagster_rebalance.runs.cancelled"
    RUNS_DEAD = "dagster_rebalance.runs.dead"
    NOTED = "dagster_rebalance.noted"


class Kind(NamedTuple):
    """What is known of all occurrences of one name.

    Attributes:
        level: The level of the log, as in `logging`.
        fields: The names of the fields.
        meaning: What has happened, for the documentation.
    """

    level: int
    fields: tuple[str, ...]
    meaning: str


_RANGE = ("topic", "partition", "start", "until")
KINDS: Mapping[Occurred, Kind] = {
    Occurred.MEMBER_JOINED: Kind(logging.INFO, ("topics",), "The member joins its group."),
    Occurred.MEMBER_LEAVING: Kind(
        logging.INFO, ("reason",), "It gives up all partitions, and leaves when they are drained."
    ),
    Occurred.MEMBER_LEFT: Kind(logging.INFO, ("reason",), "It is no member any more."),
    Occurred.MEMBER_FAILED: Kind(
        logging.ERROR, ("error",), "It ended with an error that waiting does not mend."
    ),
    Occurred.PARTITIONS_ASSIGNED: Kind(
        logging.INFO, ("partitions",), "Kafka gave partitions to the member."
    ),
    Occurred.REVOKE_REQUESTED: Kind(
        logging.INFO, ("partitions",), "Kafka asks for partitions back: a hold begins."
    ),
    Occurred.PARTITIONS_LOST: Kind(
        logging.WARNING,
        ("partitions", "reason"),
        "Partitions were taken away. Reasons: `session`, `fenced`, `superseded`, `expired`.",
    ),
    Occurred.HOLD_WAITING: Kind(
        logging.INFO,
        ("cause", "partitions", "run_ids", "limit_s"),
        "A hold lasts for longer than a second, because runs are at work.",
    ),
    Occurred.HOLD_ENDED: Kind(
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
        "The receipt of a hold. Partitions that are handed over keep their claims for the next "
        "owner.",
    ),
    Occurred.BATCH_CLAIMED: Kind(
        logging.DEBUG,
        ("batch_id", "ranges", "offsets", "is_again"),
        "The claim of a batch is stored in Kafka. `is_again`: a streaming run claims what was "
        "claimed before.",
    ),
    Occurred.BATCH_ADOPTED: Kind(
        logging.INFO,
        ("batch_id", "run_ids", *_RANGE),
        "The member took a range over with the runs that work on it.",
    ),
    Occurred.ATTEMPT_STARTED: Kind(
        logging.DEBUG, ("batch_id", "attempt_run_id", "ranges"), "A run works on a batch."
    ),
    Occurred.ATTEMPT_ENDED: Kind(
        logging.INFO,
        ("batch_id", "attempt_run_id", "ranges", "outcome"),
        "It works on it no more. Outcomes: `succeeded` (at the level DEBUG), `failed`, "
        "`not_started`, `refused`, `interrupted`, `taken_back`.",
    ),
    Occurred.OFFSETS_COMMITTED: Kind(
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
    Occurred.OFFSETS_RECORDED: Kind(
        logging.DEBUG,
        (*_RANGE, "commits"),
        "Dagster has the materialisation of one commit or several.",
    ),
    Occurred.OFFSETS_MOVED: Kind(
        logging.INFO,
        ("topic", "partition", "recorded_until", "offset"),
        "The committed offset is not the one that was recorded last: somebody else moved it.",
    ),
    Occurred.WRITE_FAILED: Kind(
        logging.WARNING,
        ("topic", "partition", "failure"),
        "An offset was not written. Failures: `changed` (somebody else wrote it), `retriable`, "
        "`refused`.",
    ),
    Occurred.PARTITION_STOPPED: Kind(
        logging.WARNING, ("topic", "partition", "reason"), "A partition cannot go on."
    ),
    Occurred.PARTITION_RESUMED: Kind(
        logging.INFO,
        ("topic", "partition", "is_released"),
        "It goes on, or was given up while it was stopped (`is_released`).",
    ),
    Occurred.PARTITIONS_ORDERED: Kind(
        logging.INFO, ("partitions", "order"), "People paused, stopped or resumed partitions."
    ),
    Occurred.DEAD_LETTER_STORED: Kind(
        logging.WARNING,
        (*_RANGE, "batch_id", "attempt_run_id"),
        "The dead-letter topic has a range.",
    ),
    Occurred.DEAD_LETTER_FAILED: Kind(
        logging.WARNING,
        (*_RANGE, "batch_id", "attempt_run_id", "reason"),
        "It may not have it: this is tried again.",
    ),
    Occurred.RUNS_CANCELLED: Kind(
        logging.INFO, ("run_ids", "reason"), "The member cancels runs. This is no failed attempt."
    ),
    Occurred.RUNS_DEAD: Kind(
        logging.WARNING, ("run_ids",), "Runs gave no sign of life, and are ended."
    ),
    Occurred.NOTED: Kind(logging.INFO, (), "Anything else that people may want to know."),
}
"""What is logged with each name."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One thing that happened.

    Attributes:
        what: Its name.
        text: A sentence about it.
        fields: What `KINDS` promises for the name, as values of the core.
    """

    what: Occurred
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> int:
        """The level of the log. Success is the rule, and the rule is no news."""
        if self.fields.get("outcome") == SUCCEEDED:
            return logging.DEBUG
        return KINDS[self.what].level


SUCCEEDED = "succeeded"


def plain(value: object) -> object:
    """A field as JSON can have it."""
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return str(value)
