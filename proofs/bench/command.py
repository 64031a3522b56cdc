"""`python -m proofs bench`: compare the package with other clients on a real Kafka.

A missed goal is reported, and is no error: a busy machine can miss one.
"""

from __future__ import annotations

import enum
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from dagster_rebalance.cli.app import INTERRUPTED
from dagster_rebalance.testing.broker import KafkaCluster
from dagster_rebalance.testing.spark_connect import (
    DELTA_LAKE,
    SparkConnectServer,
    table_settings,
)
from proofs.bench import (
    arrow_output,
    arrow_streams,
    arrow_visible,
    bad_records,
    coordinator,
    dagster_cost,
    decoding,
    deploy,
    hold,
    idle,
    poll,
    readers,
    spark_batches,
    stream_latency,
    stream_scale,
    stream_spark,
    tracker,
)
from proofs.bench.entries import table_of, write_json
from proofs.bench.plot import write_svg
from proofs.bench.streams import DELTA, PARQUET
from proofs.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from proofs.bench.entries import Entry

_T = TypeVar("_T")
_LARGE_HEAP = "1g"
_BURSTS = 5


class Benchmark(enum.Enum):
    """The benchmarks."""

    HOLD = "retained_during_hold"
    COORDINATOR = "without_coordinator"
    POLL = "poll_overhead"
    READERS = "readers"
    HELP = "help"
    TRACKER = "tracker"
    DECODED = "decoded"
    DECODED_IN_SPARK = "decoded_in_spark"
    IDLE = "idle"
    INGEST = "spark_ingest"
    WRITES = "write_by_range"
    LATENCY = "stream_claim_to_commit"
    STREAM_IDLE = "stream_idle"
    PARTITIONS = "stream_partitions"
    BURST = "stream_burst"
    END = "stream_end"
    COMMIT_CPU = "commit_cpu"
    MANY = "many_partitions"
    TICK = "batch_tick"
    BYTES = "dagster_bytes"
    REVOKE = "stream_revoke"
    MICRO_BATCH = "stream_micro_batch"
    BACKLOG = "stream_backlog"
    ARROW = "arrow_parquet"
    ARROW_STREAMS = "arrow_streams"
    VISIBLE = "arrow_visible"
    BAD = "bad_records"
    GAP = "stream_deploy_gap"
    DUPLICATES = "deploy_duplicates"


@dataclass
class _Parts:
    """Kafka and Spark of the benchmarks, each started on first use and stopped with the stack."""

    stack: ExitStack
    interrupts: Interrupts
    step: Callable[[str], None]

    def _started(self, what: str, part: AbstractContextManager[_T]) -> _T:
        self.step(f"starting {what}")
        started = self.stack.enter_context(part)
        self.stack.callback(self.interrupts.end)
        return started

    @cached_property
    def kafka(self) -> KafkaCluster:
        return self._started("Kafka", KafkaCluster())

    @cached_property
    def nodes(self) -> KafkaCluster:
        """Kafka with three nodes, for benchmarks that kill one."""
        return self._started("a Kafka of three nodes", KafkaCluster(nodes=coordinator.NODES))

    @cached_property
    def streamed(self) -> KafkaCluster:
        """Kafka for streaming runs and Spark, whose topic of offsets is read repeatedly."""
        return self._started("Kafka for streaming runs", KafkaCluster())

    @cached_property
    def crowded(self) -> KafkaCluster:
        """Kafka for topics with thousands of partitions, which would slow others down."""
        return self._started("Kafka for many partitions", KafkaCluster(heap=_LARGE_HEAP))

    @cached_property
    def spark(self) -> SparkConnectServer:
        """A warm Spark Connect server."""
        server = SparkConnectServer(libraries=(decoding.spark_avro(),))
        return self._started("Spark Connect", server)

    @cached_property
    def spark_delta(self) -> SparkConnectServer:
        """A warm Spark Connect server with Delta Lake."""
        warehouse = Path(self.stack.enter_context(TemporaryDirectory(prefix="bench-")))
        server = SparkConnectServer(settings=table_settings(warehouse), libraries=[DELTA_LAKE])
        return self._started("Spark Connect with Delta Lake", server)


def bench(
    *,
    only: Annotated[
        list[Benchmark] | None,
        typer.Option(help="A benchmark; may be given several times. Default: all."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Number of repetitions.")] = 3,
    hold_seconds: Annotated[float, typer.Option(min=0.5, help="Duration of a hold.")] = 8.0,
    steady_seconds: Annotated[
        float, typer.Option(min=0.5, help="Duration of the steady phase before it.")
    ] = 6.0,
    records: Annotated[
        int,
        typer.Option(
            min=2000,
            help="Records of poll_overhead, readers, decoded, decoded_in_spark, arrow_parquet and "
            "spark_ingest.",
        ),
    ] = 2_000_000,
    marks: Annotated[int, typer.Option(min=1000, help="Records of tracker.")] = 1_000_000,
    turns: Annotated[int, typer.Option(min=10, help="Turns of an idle member.")] = 300,
    streams: Annotated[
        int, typer.Option(min=1, help="Number of repetitions with streaming runs.")
    ] = 2,
    stream_seconds: Annotated[
        float, typer.Option(min=1, help="Measured duration of a streaming run.")
    ] = 10.0,
    rebalances: Annotated[int, typer.Option(min=1, help="Number of revokes in stream_revoke.")] = 8,
    partition_seconds: Annotated[
        float, typer.Option(min=3, help="Measured duration of a run in stream_partitions.")
    ] = 180.0,
    visible_seconds: Annotated[
        float, typer.Option(min=3, help="Measured duration of arrow_visible.")
    ] = 180.0,
    bytes_seconds: Annotated[
        float, typer.Option(min=10, help="Measured duration of a run in dagster_bytes.")
    ] = 600.0,
    tick_seconds: Annotated[
        float, typer.Option(min=10, help="Measured duration of batch_tick.")
    ] = 90.0,
    most_partitions: Annotated[
        int, typer.Option(min=10, help="Partitions of many_partitions, and limit of stream_idle.")
    ] = 10_000,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="One repetition and short phases, for development of the benchmarks."
        ),
    ] = False,
    backlog: Annotated[
        int, typer.Option(min=1000, help="Records of stream_backlog and arrow_streams per run.")
    ] = 5_000_000,
    batches: Annotated[
        int,
        typer.Option(min=4, help="Batches of stream_backlog, stream_micro_batch and arrow_*."),
    ] = 20,
    bad_of: Annotated[
        int, typer.Option(min=1000, help="Records of bad_records per run, 10 of them bad.")
    ] = 1_000_000,
    bad_range: Annotated[
        int, typer.Option(min=10, help="Records of bad_records per range of a partition.")
    ] = 50_000,
    bad_form: Annotated[
        list[bad_records.Form] | None,
        typer.Option(help="A form of bad_records; may be given several times. Default: all."),
    ] = None,
    output: Annotated[Path, typer.Option(help="The file for the figures.")] = Path(
        "build/bench.json"
    ),
) -> None:
    """Measure, side by side with confluent-kafka and aiokafka, and compare with the goals."""
    if quick:
        runs = streams = 1
        stream_seconds = partition_seconds = 10.0
        bytes_seconds, tick_seconds, visible_seconds, most_partitions = 60.0, 20.0, 20.0, 2_000
    interrupts = Interrupts()
    interrupts.install()
    chosen = set(only or Benchmark)
    # Without a terminal rich takes it to have 80 columns, and would leave out half of the table.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    # On stderr it is heard at once; the table is the output.
    step = Console(stderr=True, highlight=False).print
    entries: list[Entry] = []
    try:
        with ExitStack() as stack:
            parts = _Parts(stack, interrupts, step)
            held: dict[str, Any] = {
                "runs": runs,
                "hold_s": hold_seconds,
                "steady_s": steady_seconds,
                "step": step,
            }
            streaming: dict[str, Any] = {"runs": streams, "seconds": stream_seconds, "step": step}
            measures: dict[Benchmark, Callable[[], list[Entry]]] = {
                Benchmark.HOLD: lambda: hold.measure(parts.kafka, **held),
                Benchmark.POLL: lambda: poll.measure(
                    parts.kafka, runs=runs, records=records, step=step
                ),
                Benchmark.READERS: lambda: readers.measure(
                    parts.kafka, runs=runs, records=records, step=step
                ),
                Benchmark.HELP: lambda: readers.measure_help(runs=runs, step=step),
                Benchmark.COORDINATOR: lambda: coordinator.measure(parts.nodes, **held),
                Benchmark.TRACKER: lambda: tracker.measure(runs=runs, marks=marks, step=step),
                Benchmark.DECODED: lambda: decoding.measure(runs=runs, records=records, step=step),
                Benchmark.DECODED_IN_SPARK: lambda: decoding.measure_in_spark(
                    parts.streamed, parts.spark, runs=runs, records=records, step=step
                ),
                Benchmark.IDLE: lambda: idle.measure(runs=runs, turns=turns, step=step),
                Benchmark.LATENCY: lambda: stream_latency.measure_latency(
                    parts.streamed, **streaming
                ),
                Benchmark.STREAM_IDLE: lambda: stream_latency.measure_idle(
                    parts.crowded, most=most_partitions, **streaming
                ),
                Benchmark.PARTITIONS: lambda: stream_scale.measure_partitions(
                    parts.crowded, seconds=partition_seconds, step=step
                ),
                Benchmark.BURST: lambda: stream_scale.measure_burst(
                    parts.crowded, bursts=_BURSTS, step=step
                ),
                Benchmark.END: lambda: stream_scale.measure_end(
                    parts.crowded, runs=streams, step=step
                ),
                Benchmark.COMMIT_CPU: lambda: stream_scale.measure_commit_cpu(
                    parts.crowded, **streaming
                ),
                Benchmark.MANY: lambda: stream_scale.measure_many(
                    parts.crowded, partitions=most_partitions, step=step
                ),
                Benchmark.TICK: lambda: dagster_cost.measure_ticks(
                    parts.crowded, seconds=tick_seconds, step=step
                ),
                Benchmark.BYTES: lambda: dagster_cost.measure_bytes(
                    parts.crowded, seconds=bytes_seconds, step=step
                ),
                Benchmark.REVOKE: lambda: stream_latency.measure_revoke(
                    parts.streamed, rebalances=rebalances, step=step
                ),
                Benchmark.MICRO_BATCH: lambda: stream_spark.measure_micro_batches(
                    parts.streamed, parts.spark, runs=streams, batches=batches, step=step
                ),
                Benchmark.BACKLOG: lambda: stream_spark.measure_backlog(
                    parts.streamed,
                    parts.spark,
                    runs=streams,
                    batches=batches,
                    records=backlog,
                    step=step,
                ),
                Benchmark.ARROW: lambda: arrow_output.measure(
                    parts.streamed, runs=streams, records=records, batches=batches, step=step
                ),
                Benchmark.ARROW_STREAMS: lambda: arrow_streams.measure(
                    parts.streamed,
                    {PARQUET: lambda: parts.spark, DELTA: lambda: parts.spark_delta},
                    runs=streams,
                    records=backlog,
                    batches=batches,
                    step=step,
                ),
                Benchmark.VISIBLE: lambda: arrow_visible.measure(
                    parts.streamed, seconds=visible_seconds, step=step
                ),
                Benchmark.BAD: lambda: bad_records.measure(
                    parts.streamed,
                    lambda: parts.spark,
                    runs=runs,
                    records=bad_of,
                    per_range=bad_range,
                    forms=bad_form or list(bad_records.Form),
                    step=step,
                ),
                Benchmark.GAP: lambda: deploy.measure_gap(
                    parts.streamed, parts.spark, runs=streams, step=step
                ),
                Benchmark.DUPLICATES: lambda: deploy.measure_duplicates(
                    parts.streamed, runs=streams, step=step
                ),
                Benchmark.WRITES: lambda: spark_batches.measure_writes(
                    parts.streamed, parts.spark, runs=runs, step=step
                ),
                Benchmark.INGEST: lambda: spark_batches.measure_ingest(
                    parts.streamed, parts.spark, runs=runs, records=records, step=step
                ),
            }
            for name, measure in measures.items():
                if name in chosen:
                    entries += measure()
                    write_json(entries, output)  # the rest takes minutes, and may fail
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    write_svg(entries, output.with_suffix(".svg"))
    console.print(table_of(entries))
    console.print(f"the figures are in {output}")
