"""In `python -m proofs demo` two members hand partitions over while Spark runs drain.

The demo runs on real parts, and checks the outcome. Owns the options and the exit code. Everything
that the demo starts is gone when it ends, also after Ctrl-C, and when it is killed.
"""

from __future__ import annotations

import enum
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from dagster_rebalance.cli.app import INTERRUPTED
from dagster_rebalance.core.errors import DagsterRebalanceError
from dagster_rebalance.testing.kafka_node import admin_of
from proofs.demo.acts import Play
from proofs.demo.parts import GROUP, all_parts
from proofs.demo.report import make_report, tell, write_json
from proofs.demo.state import Watcher
from proofs.demo.view import View
from proofs.interrupts import Interrupts

if TYPE_CHECKING:
    from proofs.demo.parts import Parts

_FAILED = 1


class Protocol(enum.Enum):
    """The group protocols."""

    CONSUMER = "consumer"
    CLASSIC = "classic"


def demo(
    protocol: Annotated[Protocol, typer.Option(help="The group protocol.")] = Protocol.CONSUMER,
    records_per_second: Annotated[
        int, typer.Option(min=8, help="What the producer produces.")
    ] = 400,
    output: Annotated[
        Path,
        typer.Option(help="Where the report is written; after a failure the logs are beside it."),
    ] = Path("build/demo.json"),
    *,
    stay: Annotated[
        bool | None,
        typer.Option(help="Stay up at the end, to look at the UI. Default: in a terminal."),
    ] = None,
) -> None:
    """Watch partitions move between two members while Spark runs drain.

    Nothing is lost, and nothing is done twice.
    """
    interrupts = Interrupts()
    interrupts.install()
    code = 0
    view = View()
    try:
        with (
            view,
            all_parts(
                protocol=protocol.value,
                records_per_second=records_per_second,
                step=view.step,
                at_end=interrupts.end,
            ) as parts,
        ):
            if not _play(parts, view, interrupts, protocol=protocol.value, output=output):
                code = _FAILED
            if view.is_terminal if stay is None else stay:
                _stay(parts, view)
    except KeyboardInterrupt:
        code = INTERRUPTED
    view.say(
        "everything that was started is gone"
        + (", stopped before its end" if code == INTERRUPTED else "")
    )
    raise typer.Exit(code)


def _play(parts: Parts, view: View, interrupts: Interrupts, *, protocol: str, output: Path) -> bool:
    """Play and judge; False when a check failed."""
    logs = output.with_name("demo-logs")
    try:
        watcher = Watcher(
            parts.instance,
            GROUP,
            parts.partitions,
            admin_of(parts.kafka.bootstrap_servers),
            interrupts,
        )
        Play(parts, watcher, view).run()
        report = make_report(parts, watcher)
    except DagsterRebalanceError:
        _keep_logs(parts, logs)
        raise
    write_json(report.as_json(seconds=view.seconds, protocol=protocol), output)
    tell(report, view)
    view.say(f"the report is in {output}")
    if report.failed:
        _keep_logs(parts, logs)
        view.print(
            "[bold red]The demo failed:[/bold red] "
            f"{escape('; '.join(check.name for check in report.failed))}. The logs are in {logs}"
        )
    return not report.failed


def _keep_logs(parts: Parts, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for log in [*(parts.folder / "home").glob("*.log"), *parts.kafka.logs, parts.spark.process.log]:
        shutil.copy(log, folder)


def _stay(parts: Parts, view: View) -> None:
    """Let a person look around, until Ctrl-C."""
    view.print(f"\nLook at the commits: {parts.asset_page('offsets')}")
    view.print(f"at the members and the hold receipts: {parts.asset_page('group')}")
    view.print(f"and at the sensor's ticks: {parts.sensor_page()}\nCtrl-C ends everything.")
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        view.say("ending everything")
