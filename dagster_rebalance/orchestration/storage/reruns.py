"""The book of reruns: the batches of a group that people want to be processed again.

They are kept as orders are (`directives`), one for each run, until that run has succeeded or a
person has cancelled the rerun. So a rerun outlives every process, and needs no process of its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable

    import dagster as dg


class RerunStore:
    """The batches of one group that are not finished.

    Args:
        instance: Keeps them.
        name: The name of the book.
    """

    def __init__(self, instance: dg.DagsterInstance, name: str) -> None:
        self._instance = instance
        self._name = name

    def read(self) -> tuple[RerunBatch, ...]:
        """All batches, in the order in which they were asked for.

        Raises:
            ConfigurationError: Somebody else has written into the book.
        """
        return tuple(_read(text) for text in self._instance.get_dynamic_partitions(self._name))

    def add(self, batches: Iterable[RerunBatch]) -> None:
        """Add batches."""
        self._instance.add_dynamic_partitions(self._name, [_written(batch) for batch in batches])

    def remove(self, batches: Iterable[RerunBatch]) -> None:
        """Remove batches; those that are not there are removed already."""
        for batch in batches:
            self._instance.delete_dynamic_partition(self._name, _written(batch))


def _written(batch: RerunBatch) -> str:
    rerun = batch.rerun
    said = [
        rerun.rerun_id,
        batch.number,
        rerun.batches,
        rerun.runs_at_once,
        rerun.by,
        rerun.at,
        rerun.reason,
        packed(batch.ranges),
    ]
    return json.dumps(said, ensure_ascii=False)


def _read(text: str) -> RerunBatch:
    try:
        rerun_id, number, batches, runs_at_once, by, at, reason, ranges = json.loads(text)
        rerun = Rerun(
            str(rerun_id), str(by), str(reason), float(at), int(runs_at_once), int(batches)
        )
        return RerunBatch(rerun, int(number), unpacked(str(ranges)))
    except (ConfigurationError, TypeError, ValueError) as error:
        msg = (
            f"the batch {text[:200]!r} of a rerun cannot be read: a newer version may have written "
            "it, which then has to be used"
        )
        raise ConfigurationError(msg) from error
