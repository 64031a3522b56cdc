"""Run the tests of Spark with the newest supported release of each minor of Spark.

Each release has an environment in `.cache/spark` with the locked packages and another pyspark. Run
by `make spark-matrix`; writes build/spark-matrix.json and exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from dagster_rebalance.spark.launch import FETCHED
from tools.compat import ROOT, uv

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENTS = ROOT / ".cache" / "spark"
LOCK = ROOT / "requirements" / "dev.txt"
REPORT = ROOT / "build" / "spark-matrix.json"
LIMIT_S = 2400
_PIN = re.compile(r"^[a-z0-9][^\\\n]*==[^\\\n]*", re.MULTILINE)


@dataclass
class Row:
    """The test results with one release of Spark."""

    spark: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: int = 0


def environment(spark: str) -> Path:
    """The Python of an environment with this release, made when it is not there."""
    folder = ENVIRONMENTS / spark
    python = folder / "bin" / "python"
    if not python.exists():
        uv("venv", "--quiet", "--no-python-downloads", "--python", sys.executable, folder)
    pins = [
        pin for pin in _PIN.findall(LOCK.read_text()) if not pin.startswith(("pyspark==", "py4j=="))
    ]
    wanted = "\n".join([*pins, f"pyspark[connect]=={spark}"])
    options = ("--quiet", "--python", python, "--editable", ROOT, "--requirements", "-")
    uv("pip", "install", *options, text=wanted)
    return python


def play(spark: str, tests: list[str]) -> Row:
    """Run the tests in one environment."""
    python = environment(spark)
    results = ENVIRONMENTS / f"{spark}.xml"
    results.unlink(missing_ok=True)
    command: list[str | Path] = [python, "-m", "pytest", "-q", "--tb=short"]
    command += [f"--junit-xml={results}", *tests]
    began_at = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=False)
    row = Row(spark, seconds=round(time.monotonic() - began_at))
    for case in ET.parse(results).iter("testcase") if results.exists() else ():  # noqa: S314 - pytest wrote it just now
        tags = {child.tag for child in case}
        row.failed += bool(tags & {"failure", "error"})
        row.skipped += "skipped" in tags
        row.passed += not tags & {"failure", "error", "skipped"}
    if done.returncode and not row.failed:
        row.failed = 1  # it did not get as far as to say what failed
    return row


def main() -> int:
    """Play the matrix."""
    options = argparse.ArgumentParser(
        prog="make spark-matrix", description="The tests of Spark with several releases of Spark."
    )
    options.add_argument(
        "--spark", action="append", help=f"a version, instead of {', '.join(FETCHED)}"
    )
    options.add_argument("tests", nargs="*", default=["tests/spark"], help="which tests to run")
    chosen = options.parse_args()
    rows = []
    for spark in chosen.spark or FETCHED:
        print(f"Spark {spark} ...", flush=True)
        rows.append(play(spark, chosen.tests))
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    table = Table("Spark", "passed", "failed", "skipped", "seconds")
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    Console().print(table)
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
