"""The batch in the `extras` of a Dagster Pipes context.

Connection settings are never included: Pipes may put its context into environment variables, logs
and readable files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.runs.bisection import Part
from dagster_rebalance.core.runs.rerun_batch import rerun_of

if TYPE_CHECKING:
    from typing_extensions import Self

EXTRAS_KEY = "dagster_rebalance"
"""The key of the batch in the extras."""
_FORM = 1
"""Version of the format."""


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch as both sides of Dagster Pipes see it.

    Attributes:
        batch_id: The id of the batch.
        group_id: The consumer group that has claimed the batch.
        offset_ranges: The half-open ranges to process.
        isolation_level: Which transactional records the group reads, as librdkafka names it. Reads
            of a range at different levels return different records.
    """

    batch_id: str
    group_id: str
    offset_ranges: tuple[OffsetRange, ...]
    isolation_level: str = "read_committed"

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
                "form": _FORM,
                "batch_id": self.batch_id,
                "group_id": self.group_id,
                "isolation_level": self.isolation_level,
                "ranges": [range_.fields for range_ in self.offset_ranges],
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
        if sent.get("form") != _FORM:
            msg = (
                f"the Kafka batch in the extras has format {sent.get('form')!r}, and this side "
                f"reads format {_FORM}: install the same version of dagster-rebalance on both sides"
            )
            raise ConfigurationError(msg)
        try:
            return cls(
                str(sent["batch_id"]),
                str(sent["group_id"]),
                tuple(OffsetRange(**fields) for fields in sent["ranges"]),
                str(sent["isolation_level"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = (
                f"the Kafka batch in the extras is damaged ({error}): pass the return value of "
                "kafka_batch.pipes_extras() unchanged"
            )
            raise ConfigurationError(msg) from error
