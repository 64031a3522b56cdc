"""The first page of the documentation, executed from an empty folder with the wheel.

Three things differ from a user's: the Python is that of the tests, the broker has a free port, and
it comes from the checkout, as building pyspark for another environment takes a minute.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.testing.dagster_ui import DagsterUi
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.local.host import free_port
from dagster_rebalance.testing.processes import ChildProcess
from tests.docs.blocks import Block, all_blocks
from tests.package.environments import LOCK, UV

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [pytest.mark.package, pytest.mark.e2e, pytest.mark.timeout(900)]

PAGE = "docs/your-own-project.md"
PAGE_PORT, PAGE_PYTHON = "9092", "UV_PYTHON=3.13"
START_LIMIT_S = 200.0
WORK_LIMIT_S = 200.0
UVX = """\
#!/bin/sh
if [ "$1" = --from ]; then shift 2; exec {programs}/"$@"; fi
exec {uv} tool run "$@"
"""
MATERIALISATIONS = """query {
  assetOrError(assetKey: {path: ["orders"]}) {
    ... on Asset { assetMaterializations(limit: 1000) { metadataEntries {
      label ... on IntMetadataEntry { intValue }
    } } }
  }
}"""


class Terminal:
    """A shell that runs block after block, and keeps its folder and variables."""

    def __init__(self, folder: Path, env: Mapping[str, str], port: int) -> None:
        self.folder = folder
        self.env = dict(env)
        self.port = port
        self.python = f"UV_PYTHON={sys.executable}"
        self._left = folder.with_name("left")

    def text(self, block: Block) -> str:
        """Return the commands of a block for this machine."""
        return block.text.replace(PAGE_PORT, str(self.port)).replace(PAGE_PYTHON, self.python)

    def run(self, block: Block) -> str:
        """Execute a block, and return its output."""
        command = f"set -eu\n{self.text(block)}\npwd > '{self._left}'\nenv -0 >> '{self._left}'"
        done = subprocess.run(
            ["bash", "-c", command],  # noqa: S607 - whatever bash is there
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=550,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}"
        folder, _, variables = self._left.read_text().partition("\n")
        self.folder = Path(folder)
        self.env = dict(line.split("=", 1) for line in variables.split("\0") if line)
        return done.stdout

    def start(self, block: Block, name: str) -> ChildProcess:
        """Execute a block in a new terminal that stays open."""
        log = self._left.with_name(f"{name}.log")
        variables = [f"{key}={value}" for key, value in self.env.items()]
        command = ["env", "-i", *variables, "bash", "-c", f"exec {self.text(block)}"]
        return ChildProcess(name, command, log=log, cwd=self.folder)


@pytest.fixture
def terminal(built: Path, tmp_path: Path) -> Terminal:
    """Return a terminal in an empty folder, with the built wheel as the index."""
    programs, folder = tmp_path / "bin", tmp_path / "empty"
    for made in (programs, folder):
        made.mkdir()
    uvx = programs / "uvx"
    uvx.write_text(UVX.format(programs=Path(sys.executable).parent, uv=UV))
    uvx.chmod(0o755)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(
        "\n".join(re.findall(r"^[a-z0-9][^ ]*==[^\\\n]*", LOCK.read_text(), re.MULTILINE)) + "\n"
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VIRTUAL_ENV", "PYTHON", "DAGSTER_HOME", "KAFKA_", "PYTEST"))
    }
    env = {
        **inherited,
        "PATH": f"{programs}:{UV.parent}:{os.environ['PATH']}",
        "UV_CONSTRAINT": str(constraints),
        "UV_FIND_LINKS": str(built),
        "UV_PYTHON": sys.executable,
        "UV_PYTHON_DOWNLOADS": "never",
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    return Terminal(folder, env, free_port())


def test_first_project_works_as_documented(terminal: Terminal) -> None:
    scaffold, work, configure, broker, dev, produce, look, pause, resume = all_blocks(PAGE)
    terminal.run(scaffold)
    (terminal.folder / work.file).write_text(work.text)
    terminal.run(configure)
    with ExitStack() as servers:
        wait_for(servers.enter_context(terminal.start(broker, "broker")), "to stop")
        dagster = terminal.start(dev, "dagster")
        servers.callback(dagster.stop, timeout_s=60, first=signal.SIGINT)
        wait_for(dagster, "Serving dagster-webserver on ")
        terminal.run(produce)
        ui = DagsterUi(re.findall(r"dagster-webserver on (\S+)", dagster.log.read_text())[0])
        ui.start_sensor("shop", "orders_batches_sensor")
        wait_for_orders(terminal, 1000, dagster)
        wait_until(
            lambda: sum(materialised(ui)) == 1000 or None,
            timeout_s=WORK_LIMIT_S,
            what=lambda: f"1000 materialized orders; {materialised(ui)}",
        )
        assert "1000" in terminal.run(look).split()

        said = terminal.run(pause)
        assert "orders-3" in said
        assert "the warehouse is being moved" in said
        terminal.run(resume)
        wait_for_orders(terminal, 2000, dagster)


def test_first_project_page_uses_the_tested_dagster() -> None:
    (pinned,) = re.findall(r"^dagster==(\S+)", LOCK.read_text(), re.MULTILINE)
    assert f"create-dagster@{pinned} " in all_blocks(PAGE)[0].text


def wait_for(server: ChildProcess, text: str) -> None:
    """Wait until a server has logged that it is ready."""
    server.wait_until_ready(lambda: text in server.log.read_text(), timeout_s=START_LIMIT_S)


def wait_for_orders(terminal: Terminal, count: int, dagster: ChildProcess) -> None:
    """Wait until the files have so many orders, each once."""
    wait_until(
        lambda: len(orders(terminal)) == count or None,
        timeout_s=WORK_LIMIT_S,
        what=lambda: f"{count} orders; {len(orders(terminal))} are there; {dagster.tail()}",
        interval_s=0.5,
    )
    assert {json.loads(order)["order_id"] for order in orders(terminal)} == set(range(1000))


def orders(terminal: Terminal) -> list[str]:
    """The lines of all files."""
    files = Path(terminal.env["ORDERS_FOLDER"]).glob("*.jsonl")
    return [line for file in files for line in file.read_text().splitlines()]


def materialised(ui: DagsterUi) -> list[int]:
    """The rows of each materialization of the asset `orders` that Dagster shows."""
    events = ui.ask(MATERIALISATIONS)["assetOrError"].get("assetMaterializations", [])
    return [
        entry["intValue"]
        for event in events
        for entry in event["metadataEntries"]
        if entry["label"] == "dagster/row_count"
    ]
