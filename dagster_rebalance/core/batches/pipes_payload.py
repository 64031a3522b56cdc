"""A batch on its way to a process that a Dagster Pipes client starts, in the client's `extras`.

Owns the form in which it travels, so that both sides agree on it. Nothing about how to reach Kafka
travels: Pipes may put its context into variables of the environment, logs of a cluster and files
that many can read, and a login has no place there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.core.runs.rerun_batch import rerun_of

if TYPE_CHECKING:
    from typing_extensions import Self

EXTRAS_KEY = "dagster_rebalance"
"""Where a batch stands among the extras of others."""
_FORM = 1
"""Another number means that the other side would misunderstand what stands there."""


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch as both sides of Dagster Pipes know it.

    Attributes:
        batch_id: The id of the batch.
        group_id: The consumer group that has claimed it.
        offset_ranges: The half-open ranges to process.
        isolation_level: Which records of transactions the group reads, as librdkafka names it. Two
            reads of a range with different ones have different records.
    """

    batch_id: str
    group_id: str
    offset_ranges: tuple[OffsetRange, ...]
    isolation_level: str = "read_committed"

    @property
    def is_rerun(self) -> bool:
        """Whether a person has the ranges processed again, although the group has committed them.

        What is written by range is replaced. What cannot be, such as a message to somebody, may be
        left out.
        """
        return rerun_of(self.batch_id) != ""

    @property
    def records(self) -> int:
        """How many offsets the ranges cover.

        With transactions or compaction there are fewer records.
        """
        return sum(map(len, self.offset_ranges))

    @property
    def extras(self) -> dict[str, Any]:
        """What `from_extras` reads, in types that JSON has."""
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
        """The batch in the extras of a Pipes context, as `open_dagster_pipes().extras` has them.

        Raises:
            ConfigurationError: There is none, or another version of this package has sent it.
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
                f"the Kafka batch in the extras has form {sent.get('form')!r}, and this side reads "
                f"form {_FORM}: install the same version of dagster-rebalance on both sides"
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
                f"the Kafka batch in the extras is damaged ({error}): hand over what "
                "kafka_batch.pipes_extras() returns, unchanged"
            )
            raise ConfigurationError(msg) from error
