from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.testing.local.kafka_node import admin_of
from proofs.demo.per_batch.acts import Play
from proofs.demo.per_batch.parts import GROUP, Parts, all_parts
from proofs.demo.per_batch.report import Report, make_report
from proofs.demo.per_batch.state import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from proofs.demo.view import View
    from proofs.interrupts import Interrupts


@dataclass(frozen=True)
class PerBatch:
    """One Dagster run per batch: two members hand partitions over while Spark runs drain."""

    protocol: str
    records_per_second: int
    line_every_s: float = 15.0

    @contextmanager
    def stage(self, step: Callable[[str], None], interrupts: Interrupts) -> Iterator[PerBatchStage]:
        with all_parts(
            protocol=self.protocol,
            records_per_second=self.records_per_second,
            step=step,
            interrupts=interrupts,
        ) as parts:
            yield PerBatchStage(parts)


@dataclass(frozen=True)
class PerBatchStage:
    parts: Parts

    @property
    def logs(self) -> list[Path]:
        home, kafka, spark = self.parts.folder / "home", self.parts.kafka, self.parts.spark
        return [*home.glob("*.log"), *kafka.logs, spark.process.log]

    @property
    def pages(self) -> list[tuple[str, str]]:
        return [
            ("the commits", self.parts.asset_page("offsets")),
            ("the members and the hold receipts", self.parts.asset_page("group")),
            ("the sensor's ticks", self.parts.sensor_page()),
        ]

    def play(self, view: View, interrupts: Interrupts) -> Report:
        parts = self.parts
        admin = admin_of(parts.kafka.bootstrap_servers)
        watcher = Watcher(parts.instance, GROUP, parts.partitions, admin, interrupts)
        Play(parts, watcher, view).run()
        return make_report(parts, watcher)
