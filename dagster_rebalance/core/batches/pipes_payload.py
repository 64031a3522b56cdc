"""The batch in the `extras` of a Dagster Pipes context, and the letters in the messages of its job.

The job reports the positions of the records that it sets aside as custom messages of Pipes. The run
stores their letters, after it has checked that no message is missing.

Connection settings are never included: Pipes may put its context into environment variables, logs
and readable files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.batches.record_filter import RecordPredicate
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.runs.bisection import Part
from dagster_rebalance.core.runs.rerun_batch import rerun_of

if TYPE_CHECKING:
    from typing_extensions import Self

EXTRAS_KEY = "dagster_rebalance"
"""The key of the batch in the extras."""
_FORM = 1
"""Version of the format."""
_FORM_WITH_FILTER = 2
"""An earlier version of this package would process the records that the filter leaves out."""
_LETTERS_KEY = "dagster_rebalance_letters"
"""The key of a message about letters. Its values are `job`, and `positions` or `total`."""
_CHUNK = 50
MAX_SENT_REASON = 200
"""Platforms limit a line of a log, in which some pass messages, to about 16 KiB."""

SentPosition = tuple[str, int, int, str]
"""Topic, partition and offset of a record, and the reason."""


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch as both sides of Dagster Pipes see it.

    Attributes:
        batch_id: The id of the batch.
        group_id: The consumer group that has claimed the batch.
        offset_ranges: The half-open ranges to process.
        isolation_level: Which transactional records the group reads, as librdkafka names it. Reads
            of a range at different levels return different records.
        takes_letters: Whether the run stores the letters of the job.
        only: Which records the group processes; None for all.
    """

    batch_id: str
    group_id: str
    offset_ranges: tuple[OffsetRange, ...]
    isolation_level: str = "read_committed"
    takes_letters: bool = False
    only: RecordPredicate | None = None

    @property
    def is_rerun(self) -> bool:
        """Whether the ranges were already committed and are processed again.

        Output by range is replaced. Effects that cannot be replaced, such as sent messages, may be
        skipped.
        """
        return rerun_of(self.batch_id) != ""

    @property
    def failed_ranges(self) -> tuple[OffsetRange, ...]:
        """The larger ranges of which this batch is a part, see `KafkaBatch.failed_ranges`."""
        part = Part.parse(self.batch_id)
        if part is None:
            return ()
        return tuple(larger for one in self.offset_ranges for larger in part.larger(one))

    @property
    def records(self) -> int:
        """The number of offsets in the ranges.

        With transactions or compaction, there are fewer records.
        """
        return sum(map(len, self.offset_ranges))

    @property
    def extras(self) -> dict[str, Any]:
        """The extras to send, as JSON types."""
        return {
            EXTRAS_KEY: {
                "form": _FORM if self.only is None else _FORM_WITH_FILTER,
                "batch_id": self.batch_id,
                "group_id": self.group_id,
                "isolation_level": self.isolation_level,
                "takes_letters": self.takes_letters,
                "ranges": [range_.fields for range_ in self.offset_ranges],
                **({} if self.only is None else {"only": self.only.fields}),
            }
        }

    @classmethod
    def from_extras(cls, extras: Mapping[str, Any]) -> Self:
        """Read the batch from the extras of a Pipes context (`open_dagster_pipes().extras`).

        Raises:
            ConfigurationError: The extras have no batch, or another version of this package sent
                it.
        """
        sent = extras.get(EXTRAS_KEY)
        if not isinstance(sent, Mapping):
            msg = (
                "the extras of this Pipes context have no Kafka batch: call the Pipes client with "
                "extras=kafka_batch.pipes_extras() in the asset"
            )
            raise ConfigurationError(msg)
        if sent.get("form") not in {_FORM, _FORM_WITH_FILTER}:
            msg = (
                f"the Kafka batch in the extras has format {sent.get('form')!r}, and this side "
                f"reads formats up to {_FORM_WITH_FILTER}: install the same version of "
                "dagster-rebalance on both sides"
            )
            raise ConfigurationError(msg)
        try:
            return cls(
                str(sent["batch_id"]),
                str(sent["group_id"]),
                tuple(OffsetRange(**fields) for fields in sent["ranges"]),
                str(sent["isolation_level"]),
                takes_letters=sent.get("takes_letters") is True,
                only=RecordPredicate.of(sent["only"]) if "only" in sent else None,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            msg = (
                f"the Kafka batch in the extras is damaged ({error}): pass the return value of "
                "kafka_batch.pipes_extras() unchanged"
            )
            raise ConfigurationError(msg) from error


def position_messages(job: str, positions: Sequence[SentPosition]) -> Iterator[dict[str, Any]]:
    """Yield the messages with the records that a job sets aside."""
    for at in range(0, len(positions), _CHUNK):
        chunk = [
            [topic, partition, offset, reason[:MAX_SENT_REASON]]
            for topic, partition, offset, reason in positions[at : at + _CHUNK]
        ]
        yield {_LETTERS_KEY: {"job": job, "positions": chunk}}


def end_message(job: str, total: int) -> dict[str, Any]:
    """Return the message with the number of records that a job has set aside."""
    return {_LETTERS_KEY: {"job": job, "total": total}}


def sent_positions(messages: Iterable[object]) -> list[SentPosition]:
    """Return the records that jobs have set aside, from all custom messages of their client.

    Raises:
        IllegalStateError: A message is missing or damaged.
    """
    found: dict[str, list[SentPosition]] = {}
    totals: dict[str, int] = {}
    for message in messages:
        sent = message.get(_LETTERS_KEY) if isinstance(message, Mapping) else None
        if sent is None:
            continue
        try:
            positions = found.setdefault(str(sent["job"]), [])
            positions += [
                (str(topic), int(partition), int(offset), str(reason))
                for topic, partition, offset, reason in sent.get("positions", ())
            ]
            if "total" in sent:
                totals[str(sent["job"])] = int(sent["total"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            msg = f"a message of the job about its letters is damaged ({error!r})"
            raise IllegalStateError(msg) from error
    if not totals or totals != {job: len(positions) for job, positions in found.items()}:
        msg = (
            "the messages about the letters of the job are not complete: let the job set records "
            "aside in `with batch.letters(pipes)`, and check that the client of Dagster Pipes "
            "receives all messages. Nothing was committed"
        )
        raise IllegalStateError(msg)
    return [position for positions in found.values() for position in positions]
