"""`python -m proofs bench` compares the package's speed with what one would use without it.

One run measures everything on a real Kafka. Owns the options, and what is shown and written. A
missed goal is reported, and is no error: a busy machine can miss one.
"""

from __future__ import annotations

import enum
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dagster_rebalance.cli.app import INTERRUPTED
from dagster_rebalance.testing.broker import KafkaCluster
from proofs.bench import coordinator, hold, idle, poll, tracker
from proofs.bench.entries import table_of, write_json
from proofs.interrupts import Interrupts


class Benchmark(enum.Enum):
    """The benchmarks."""

    HOLD = "retained_during_hold"
    COORDINATOR = "without_coordinator"
    POLL = "poll_overhead"
    TRACKER = "tracker"
    IDLE = "idle"


_ON_ONE_NODE = {Benchmark.HOLD, Benchmark.POLL}


def bench(
    *,
    only: Annotated[
        list[Benchmark] | None,
        typer.Option(help="Which one; may be given several times. Default: all."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="How often everything is repeated.")] = 5,
    hold_seconds: Annotated[
        float, typer.Option(min=0.5, help="How long partitions are held.")
    ] = 8.0,
    steady_seconds: Annotated[
        float, typer.Option(min=0.5, help="How long is read before, to compare with.")
    ] = 6.0,
    records: Annotated[
        int, typer.Option(min=2000, help="How many records poll_overhead reads each time.")
    ] = 2_000_000,
    marks: Annotated[
        int, typer.Option(min=1000, help="How many records the tracker is told about.")
    ] = 1_000_000,
    turns: Annotated[
        int, typer.Option(min=10, help="How often an idle member looks at its partitions.")
    ] = 300,
    output: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path(
        "build/bench.json"
    ),
) -> None:
    """Measure, side by side with confluent-kafka and aiokafka, and compare with the goals."""
    interrupts = Interrupts()
    interrupts.install()
    chosen = set(only or Benchmark)
    # Without a terminal rich takes it to have 80 columns, and would leave out half of the table.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    entries = []
    try:
        with ExitStack() as stack:
            # On stderr it is heard at once; the table is the output.
            step = Console(stderr=True, highlight=False).print
            if chosen & _ON_ONE_NODE:
                step("starting Kafka")
                kafka = stack.enter_context(KafkaCluster())
                stack.callback(interrupts.end)
                if Benchmark.HOLD in chosen:
                    entries += hold.measure(
                        kafka, runs=runs, hold_s=hold_seconds, steady_s=steady_seconds, step=step
                    )
                if Benchmark.POLL in chosen:
                    entries += poll.measure(kafka, runs=runs, records=records, step=step)
            if Benchmark.COORDINATOR in chosen:
                step("starting a Kafka of three nodes")
                nodes = stack.enter_context(KafkaCluster(nodes=coordinator.NODES))
                stack.callback(interrupts.end)
                entries += coordinator.measure(
                    nodes, runs=runs, hold_s=hold_seconds, steady_s=steady_seconds, step=step
                )
            if Benchmark.TRACKER in chosen:
                entries += tracker.measure(runs=runs, marks=marks, step=step)
            if Benchmark.IDLE in chosen:
                entries += idle.measure(runs=runs, turns=turns, step=step)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    write_json(entries, output)
    console.print(table_of(entries))
    console.print(f"the figures are in {output}")
