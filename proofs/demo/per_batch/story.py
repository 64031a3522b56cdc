"""A Dagster run for each batch: two members hand partitions over while Spark runs drain."""

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
    """The story.

    Attributes:
        protocol: The group protocol.
        records_per_second: What the producer produces.
    """

    protocol: str
    records_per_second: int
    line_every_s: float = 15.0

    @contextmanager
    def stage(self, step: Callable[[str], None], interrupts: Interrupts) -> Iterator[PerBatchStage]:
        """Start everything."""
        with all_parts(
            protocol=self.protocol,
            records_per_second=self.records_per_second,
            step=step,
            interrupts=interrupts,
        ) as parts:
            yield PerBatchStage(parts)


@dataclass(frozen=True)
class PerBatchStage:
    """What the story runs on."""

    parts: Parts

    @property
    def logs(self) -> list[Path]:
        """The files with what the parts have to say."""
        home, kafka, spark = self.parts.folder / "home", self.parts.kafka, self.parts.spark
        return [*home.glob("*.log"), *kafka.logs, spark.process.log]

    @property
    def pages(self) -> list[tuple[str, str]]:
        """What a person can look at."""
        return [
            ("the commits", self.parts.asset_page("offsets")),
            ("the members and the hold receipts", self.parts.asset_page("group")),
            ("the sensor's ticks", self.parts.sensor_page()),
        ]

    def play(self, view: View, interrupts: Interrupts) -> Report:
        """Play all acts, and judge what came out."""
        parts = self.parts
        admin = admin_of(parts.kafka.bootstrap_servers)
        watcher = Watcher(parts.instance, GROUP, parts.partitions, admin, interrupts)
        Play(parts, watcher, view).run()
        return make_report(parts, watcher)
