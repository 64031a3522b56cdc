"""`python -m proofs demo`: the options and the exit code.

All processes of the demo end with it, also after Ctrl-C or a kill.
"""

from __future__ import annotations

import enum
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from dagster_rebalance.cli.app import INTERRUPTED
from dagster_rebalance.core.model.errors import DagsterRebalanceError
from proofs.demo.per_batch.story import PerBatch
from proofs.demo.streaming.processor import Processor
from proofs.demo.streaming.story import Streaming
from proofs.demo.view import View
from proofs.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proofs.demo.story import Stage, Story

_FAILED = 1


class Protocol(enum.Enum):
    """The group protocols."""

    CONSUMER = "consumer"
    CLASSIC = "classic"


def demo(
    protocol: Annotated[Protocol, typer.Option(help="The group protocol.")] = Protocol.CONSUMER,
    records_per_second: Annotated[
        int, typer.Option(min=8, help="Records per second of the producer.")
    ] = 400,
    output: Annotated[
        Path,
        typer.Option(help="The file for the report; after a failure the logs are next to it."),
    ] = Path("build/demo.json"),
    *,
    per_batch: Annotated[
        bool,
        typer.Option(
            "--per-batch",
            help="The other story: one Dagster run per batch, with Spark. It takes minutes.",
        ),
    ] = False,
    spark: Annotated[
        bool,
        typer.Option(
            "--spark", help="Streaming runs process with Spark (Spark Connect), not plain Python."
        ),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="As --spark, but each run is the driver of an application on a Spark cluster.",
        ),
    ] = False,
    stay: Annotated[
        bool | None,
        typer.Option(help="Keep running at the end, for the UI. Default: in a terminal."),
    ] = None,
) -> None:
    """Watch streaming runs share a topic, through a deploy and a kill -9.

    Nothing is lost, and nothing is in the output twice.
    """
    interrupts = Interrupts()
    interrupts.install()
    code = 0
    story: Story = (
        PerBatch(protocol.value, records_per_second)
        if per_batch
        else Streaming(
            protocol.value, records_per_second, Processor.of(spark=spark, cluster=cluster)
        )
    )
    view = View(story.line_every_s)
    try:
        with view, story.stage(view.step, interrupts) as stage:
            if not _play(stage, view, interrupts, protocol=protocol.value, output=output):
                code = _FAILED
            if view.is_terminal if stay is None else stay:
                _stay(stage, view)
    except KeyboardInterrupt:
        code = INTERRUPTED
    view.say(
        "everything that was started is gone"
        + (", stopped before its end" if code == INTERRUPTED else "")
    )
    raise typer.Exit(code)


def _play(stage: Stage, view: View, interrupts: Interrupts, *, protocol: str, output: Path) -> bool:
    """Play and verify; return False if a check failed."""
    logs = output.with_name("demo-logs")
    try:
        report = stage.play(view, interrupts)
    except DagsterRebalanceError:
        _keep(stage.logs, logs)
        raise
    output.parent.mkdir(parents=True, exist_ok=True)
    said = report.as_json() | {"seconds": round(view.seconds, 1), "protocol": protocol}
    output.write_text(json.dumps(said, indent=2) + "\n")
    report.show(view)
    view.checks(report.checks)
    view.say(f"the report is in {output}")
    failed = [check.name for check in report.checks if not check.passed]
    if failed:
        _keep(stage.logs, logs)
        view.print(
            f"[bold red]The demo failed:[/bold red] {escape('; '.join(failed))}. "
            f"The logs are in {logs}"
        )
    return not failed


def _keep(logs: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for log in logs:
        shutil.copy(log, folder)


def _stay(stage: Stage, view: View) -> None:
    """Keep everything running until Ctrl-C."""
    view.print("\nLook at Dagster:")
    for what, address in stage.pages:
        view.print(f"  {what}: {address}")
    view.print("Ctrl-C ends everything.")
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        view.say("ending everything")
