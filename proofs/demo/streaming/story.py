from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proofs.demo.streaming.acts import Play
from proofs.demo.streaming.parts import GROUP, JOB, LOCATION, Parts, all_parts
from proofs.demo.streaming.processor import Processor
from proofs.demo.streaming.report import Report, make_report
from proofs.demo.streaming.state import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from proofs.demo.view import View
    from proofs.interrupts import Interrupts


@dataclass(frozen=True)
class Streaming:
    """Streaming runs: a second run joins, new code is deployed, and one run is killed."""

    protocol: str
    records_per_second: int
    processor: Processor = Processor.PYTHON
    line_every_s: float = 5.0

    @contextmanager
    def stage(
        self, step: Callable[[str], None], interrupts: Interrupts
    ) -> Iterator[StreamingStage]:
        with all_parts(
            protocol=self.protocol,
            records_per_second=self.records_per_second,
            processor=self.processor,
            step=step,
            interrupts=interrupts,
        ) as parts:
            yield StreamingStage(parts)


@dataclass(frozen=True)
class StreamingStage:
    parts: Parts

    @property
    def logs(self) -> list[Path]:
        return self.parts.logs

    @property
    def pages(self) -> list[tuple[str, str]]:
        url = self.parts.dagster.ui.url
        return [
            ("the streaming runs", f"{url}/locations/__repository__@{LOCATION}/jobs/{JOB}/runs"),
            ("the batches", f"{url}/assets/orders?view=events"),
            ("the commits", f"{url}/assets/kafka/{GROUP}/offsets?view=events"),
            ("joins, holds and leaves", f"{url}/assets/kafka/{GROUP}/group?view=events"),
        ]

    def play(self, view: View, interrupts: Interrupts) -> Report:  # noqa: ARG002 - it asks nothing that a signal may not interrupt
        watcher = Watcher(self.parts.instance, self.parts.log)
        play = Play(self.parts, watcher, view)
        play.run()
        return make_report(self.parts, watcher, play)
