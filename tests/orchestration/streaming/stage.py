"""Streaming runs in the process of a test: real Dagster runs on a group in memory."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance import KafkaBatch, build_kafka_stream_defs
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from dagster_rebalance.orchestration.storage.run_tags import SLOT_TAG, STREAM_TAG
from tests.orchestration.parts import GROUPS, kafka_in_memory, tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dagster_rebalance import ExternalWork
    from dagster_rebalance.core.model.offsets import OffsetRange

    Body = Callable[["Stage", KafkaBatch], object]

BY_THE_SENSOR = {STREAM_TAG: "here:stream_sensor", SLOT_TAG: "0"}
"""The tags of a run that the sensor has started."""
QUICK: dict[str, Any] = {"retry_delay_s": 0.01, "retry_delay_limit_s": 0.05}


def leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def then_leave(first: Body) -> Body:
    """Return a body that does something in its first batch, and leaves in the second."""

    def body(stage: Stage, batch: KafkaBatch) -> object:
        if len(stage.batches) == 1:
            return first(stage, batch)
        leave()
        return None

    return body


def attempts_of(batch_ids: Iterable[str]) -> list[int]:
    found = map(StreamBatch.parse, batch_ids)
    return [batch.attempt for batch in found if batch is not None]


class Stage:
    """A streaming run with one asset, whose body is a function of the test."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        body: Body,
        external_work: Sequence[ExternalWork] = (),
        **kafka: Any,  # noqa: ANN401 - settings of all kinds
    ) -> None:
        self.instance = instance
        self.kafka = kafka_in_memory(**kafka)
        self.group = GROUPS[self.kafka.group_id]
        self.batches: list[tuple[OffsetRange, ...]] = []
        self.ids: list[str] = []

        @dg.asset
        def orders(kafka_batch) -> dg.MaterializeResult[Any] | None:  # type: ignore[no-untyped-def] # noqa: ANN001 - Dagster evaluates it
            self.batches.append(kafka_batch.offset_ranges)
            self.ids.append(kafka_batch.batch_id)
            return body(self, kafka_batch)  # type: ignore[return-value]

        self.job = build_kafka_stream_defs(
            kafka=self.kafka, assets=[orders], name="stream", external_work=external_work
        ).resolve_job_def("stream")

    def run(self, *records: int) -> str:
        """Produce records, 3 to the first partition by default, and run until the run leaves."""
        for number, produced in enumerate(records or (3,)):
            self.group.produce(tp(number), produced)
        return self.job.execute_in_process(instance=self.instance, tags=BY_THE_SENSOR).run_id

    def lose_partitions(self) -> None:
        """Lose the partitions, and wait for the interruption of the batch."""
        (member,) = self.group.members
        self.group.fence(member)
        threading.Event().wait(120)

    @property
    def attempts(self) -> list[int]:
        return attempts_of(self.ids)

    def committed(self, number: int = 0) -> int:
        return self.group.committed[tp(number)].offset

    def messages(self, run_id: str) -> list[str]:
        return [entry.user_message for entry in self.instance.all_logs(run_id)]

    def shown(self, key: dg.AssetKey) -> Iterator[dict[str, object]]:
        # The newest ones, oldest first: other tests have used the instance.
        found = self.instance.fetch_materializations(key, limit=100).records
        for made in (record.asset_materialization for record in reversed(found)):
            assert made is not None
            yield {name: value.value for name, value in made.metadata.items()}
