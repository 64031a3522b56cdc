"""`python -m proofs chaos`: the options, the printed lines and the exit code.

All processes of the command end with it, also after Ctrl-C or a kill.
"""

from __future__ import annotations

import enum
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dagster_rebalance.cli.app import INTERRUPTED
from dagster_rebalance.core.model.errors import DagsterRebalanceError
from proofs.chaos.bad import Bad  # noqa: TC001 - typer reads the annotation
from proofs.chaos.parts import PARTITIONS, all_parts
from proofs.chaos.play import Play
from proofs.chaos.report import Report, make_report
from proofs.chaos.sinks import Sink
from proofs.chaos.stalls import clock
from proofs.interrupts import Interrupts

if TYPE_CHECKING:
    from proofs.chaos.parts import Parts

_FAILED = 1
_PROBLEMS_SHOWN = 20


class Protocol(enum.Enum):
    """The group protocols."""

    CONSUMER = "consumer"
    CLASSIC = "classic"


class Storage(enum.Enum):
    """The storages of Dagster."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"


def chaos(
    faults: Annotated[int, typer.Option(min=1, help="Number of faults.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the faults.")] = 1,
    protocol: Annotated[Protocol, typer.Option(help="The group protocol.")] = Protocol.CONSUMER,
    partitions: Annotated[
        int, typer.Option(min=1, help="Initial number of partitions, such as 200.")
    ] = PARTITIONS,
    output: Annotated[
        Path,
        typer.Option(help="The file for the report; after a failure the logs are next to it."),
    ] = Path("build/chaos.json"),
    *,
    storage: Annotated[Storage, typer.Option(help="The storage of Dagster.")] = Storage.SQLITE,
    streaming: Annotated[
        bool, typer.Option(help="Streaming runs of one code location are the members.")
    ] = False,
    spark: Annotated[
        bool, typer.Option(help="Runs use Spark Connect, whose server is killed, too.")
    ] = False,
    sink: Annotated[
        Sink, typer.Option(help="The output. delta and iceberg imply --spark; arrow-* needs none.")
    ] = Sink.PARQUET,
    bad: Annotated[
        Bad | None,
        typer.Option(
            help="Some records are bad: the asset sets them aside, or raises. Replayed at the end."
        ),
    ] = None,
) -> None:
    """Kill, suspend and break real brokers, members, runs and Dagster at random.

    The command then checks that nothing is lost or doubled.
    """
    interrupts = Interrupts()
    interrupts.install()
    console = Console(highlight=False, soft_wrap=True)
    began_at = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{clock(time.time())}[/dim]  {escape(text)}")

    code = 0
    spark = (spark or sink.is_of_spark_alone) and not sink.is_of_arrow
    has_sink = spark or sink.is_of_arrow
    try:
        with_postgres = storage is Storage.POSTGRES
        with all_parts(
            protocol=protocol.value,
            partitions=partitions,
            is_streaming=streaming,
            sink=sink if has_sink else None,
            with_postgres=with_postgres,
            bad=bad,
            step=say,
            at_end=interrupts.end,
        ) as parts:
            play = Play(parts, seed, say)
            try:
                play.run(faults)
                report = make_report(parts, play)
            except DagsterRebalanceError:
                say(f"the logs are in {_keep_logs(parts, output)}")
                raise
            played = {
                "seed": seed,
                "protocol": protocol.value,
                "partitions": partitions,
                "streaming": streaming,
                "spark": spark,
                "sink": sink.value if has_sink else "files",
                "storage": storage.value,
                "bad": bad.value if bad else None,
            }
            said = report.as_json(played, seconds=time.monotonic() - began_at)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(said, indent=2) + "\n")
            _tell(report, console)
            say(f"the report is in {output}")
            if report.wrong:
                code = _FAILED
                say(f"the logs are in {_keep_logs(parts, output)}")
    except KeyboardInterrupt:
        code = INTERRUPTED
    say(
        "everything that was started is gone"
        + (", stopped before its end" if code == INTERRUPTED else "")
    )
    raise typer.Exit(code)


def _keep_logs(parts: Parts, output: Path) -> Path:
    folder = output.with_name(f"{output.stem}-logs")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for log in parts.logs:
        shutil.copy(log, folder / f"{log.parent.name}-{log.name}")
    return folder


def _tell(report: Report, console: Console) -> None:
    figures = Table(title="Faults on real parts", title_justify="left", show_header=False)
    for name, value in (
        ("faults", sum(report.faults.values())),
        ("records", report.output.records),
        ("lost", len(report.output.lost)),
        ("doubled", len(report.output.doubled) + report.twice_succeeded),
        ("commits by a member without the partition", len(report.unowned)),
        ("stalls over 2 s that nothing explains", len(report.stalls.stalls)),
        ("partition-seconds in which a stall would be reported", round(report.stalls.watched_s)),
        ("commits, each shown once by Dagster", report.commits),
    ):
        figures.add_row(name, f"{value:,}")
    console.print(figures)
    for title, counts in (
        ("faults", report.faults),
        ("holds by outcome", report.holds),
        ("runs", report.runs),
        ("dead letters", report.letters),
    ):
        console.print(
            f"{title}: "
            + (", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none")
        )
    for problem in report.wrong[:_PROBLEMS_SHOWN]:
        console.print(f"[bold red]FAILED[/bold red]  {escape(problem)}")
    if len(report.wrong) > _PROBLEMS_SHOWN:
        console.print(f"... and {len(report.wrong) - _PROBLEMS_SHOWN} more")
