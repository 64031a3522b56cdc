"""This tool plays held revokes with several confluent-kafka clients on all supported brokers.

The clients are the oldest supported one, the locked one and the newest. Owns the environments for
it, one for each client in `.cache/compat`, which hold what these tests need and no more: neither
Dagster nor Spark. The tests are those of the suite. Run by `make compat`; writes build/compat.json
and ends with 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from dagster_rebalance.testing.broker import KAFKA_VERSION, VERSION_VARIABLE, kafka_jars
from dagster_rebalance.testing.local.jars import fetch

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".cache" / "uv" / "bin" / "uv"
ENVIRONMENTS = ROOT / ".cache" / "compat"
REPORT = ROOT / "build" / "compat.json"

BROKERS = (KAFKA_VERSION, "3.9.1")
PROTOCOLS = ("classic", "eager", "consumer", "no broker")
NEEDED = ("hypothesis", "pytest", "pytest-timeout", "typing-extensions")
TESTS = (
    "contract",
    "member/test_leave.py",
    "member/test_hold_deadline.py",
    "member/test_eager.py",
    "consumer/test_rebalance_story.py",
)
# Names of parameters stand in brackets, with dashes between them. The mock is the client's own, and
# the fake needs none.
NOT_PLAYED = "not mock- and not [fake"
NO_CONSUMER_PROTOCOL = " and not [consumer and not -consumer"
WHY_SKIPPED = "the consumer protocol is not for production before Kafka 4.0"
LIMIT_S = 480
SHOWN_AFTER_S = 60


@dataclass
class Row:
    """The results of one client on one broker with one protocol."""

    client: str
    librdkafka: str
    broker: str
    protocol: str
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    skipped: str = ""


def uv(*arguments: str | Path, text: str | None = None) -> str:
    """Run uv and return its output; its errors go to the terminal."""
    done = subprocess.run(
        [UV, *arguments], input=text, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def clients() -> dict[str, str]:
    """The versions to play with, and why."""
    supported = next(
        line.strip(' ",')
        for line in (ROOT / "pyproject.toml").read_text().splitlines()
        if '"confluent-kafka>=' in line
    )
    options = (
        "pip",
        "compile",
        "-",
        "--no-header",
        "--no-annotate",
        "--no-deps",
        "--python",
        sys.executable,
        "--quiet",
    )
    reasons: dict[str, list[str]] = {}
    for why, resolution in (("oldest", "lowest-direct"), ("locked", ""), ("newest", "highest")):
        found = (
            uv(*options, "--resolution", resolution, text=supported)
            if resolution
            else f"=={version('confluent-kafka')}"
        )
        reasons.setdefault(found.strip().partition("==")[2], []).append(why)
    return {client: ", ".join(whys) for client, whys in reasons.items()}


def environment(client: str) -> Path:
    """The Python of an environment with this client, made when it is not there."""
    python = ENVIRONMENTS / client / "bin" / "python"
    if not python.exists():
        uv(
            "venv",
            "--quiet",
            "--clear",
            "--no-python-downloads",
            "--python",
            sys.executable,
            ENVIRONMENTS / client,
        )
    wanted = [f"confluent-kafka=={client}", *(f"{name}=={version(name)}" for name in NEEDED)]
    uv("pip", "install", "--quiet", "--python", python, *wanted)
    return python


def librdkafka(python: Path) -> str:
    """The version of librdkafka in an environment."""
    code = "import confluent_kafka; print(confluent_kafka.libversion()[0])"
    return subprocess.run(
        [python, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def play(client: str, broker: str) -> list[Row]:
    """Run the tests in one environment on one broker."""
    python = environment(client)
    results = ENVIRONMENTS / f"{client}-{broker}.xml"
    results.unlink(missing_ok=True)
    has_consumer_protocol = not broker.startswith("3.")
    chosen = NOT_PLAYED if has_consumer_protocol else NOT_PLAYED + NO_CONSUMER_PROTOCOL
    # A client that waits for ever with Python's lock in its hand cannot be interrupted by pytest:
    # this shows where it stands.
    options = [
        "-v",
        "--tb=short",
        "-o",
        f"faulthandler_timeout={SHOWN_AFTER_S}",
        f"--junit-xml={results}",
    ]
    command: list[str | Path] = [python, "-m", "pytest", *options, "-k", chosen]
    command += [f"tests/kafka/{test}" for test in TESTS]
    log = results.with_suffix(".log")
    ended = finish(command, broker, log)
    library = librdkafka(python)
    rows = {protocol: Row(client, library, broker, protocol) for protocol in PROTOCOLS}
    for case in ET.parse(results).iter("testcase") if results.exists() else ():  # noqa: S314 - pytest wrote it just now
        count(rows[protocol_of(case.attrib["classname"], case.attrib["name"])], case)
    if not has_consumer_protocol:
        rows["consumer"].skipped = WHY_SKIPPED
    if ended != "passed":
        print(
            f"{ended}; {log} ends with:\n"
            + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        )
        # Without results nobody knows which protocol it was.
        rows["no broker"].failed += not any(row.failed for row in rows.values())
    return list(rows.values())


def finish(command: Sequence[str | Path], broker: str, log: Path) -> str:
    """Run the tests, and return the result."""
    env = {**os.environ, VERSION_VARIABLE: broker}
    with log.open("w") as told:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=env,
                stdout=told,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not over after {LIMIT_S} s"
    return "passed" if done.returncode == 0 else "failed"


def count(row: Row, case: ET.Element) -> None:
    """Add one test to its row."""
    went_wrong = any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
    row.passed += not went_wrong
    row.failed += went_wrong
    row.seconds = round(row.seconds + float(case.attrib["time"]), 1)


def protocol_of(module: str, test: str) -> str:
    """The protocol that a test is about, by its parameters."""
    parameters = test.partition("[")[2].rstrip("]").split("-")
    if "range" in parameters or module.endswith("test_eager"):
        return "eager"
    return next(
        (protocol for protocol in ("classic", "consumer") if protocol in parameters), "no broker"
    )


def show(rows: list[Row], reasons: dict[str, str]) -> None:
    """The matrix, for a person."""
    table = Table(
        "confluent-kafka", "librdkafka", "Kafka", "protocol", "passed", "failed", "seconds"
    )
    for row in rows:
        client = f"{row.client} ({reasons[row.client]})"
        if row.skipped:
            table.add_row(
                client, row.librdkafka, row.broker, row.protocol, f"skipped: {row.skipped}", "", ""
            )
        else:
            figures = (
                str(row.passed),
                f"[red]{row.failed}[/]" if row.failed else "0",
                f"{row.seconds:.0f}",
            )
            table.add_row(client, row.librdkafka, row.broker, row.protocol, *figures)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> int:
    """Play the matrix."""
    options = argparse.ArgumentParser(
        prog="make compat", description="Held revokes with several clients and brokers."
    )
    options.add_argument(
        "--client", action="append", help="a version of confluent-kafka, instead of the usual three"
    )
    options.add_argument(
        "--broker", action="append", help=f"a version of Kafka, instead of {' and '.join(BROKERS)}"
    )
    chosen = options.parse_args()
    reasons = dict.fromkeys(chosen.client, "chosen") if chosen.client else clients()
    brokers = chosen.broker or BROKERS
    for broker in brokers:
        # Fetched by this environment, the first time.
        fetch(kafka_jars(broker))
    started_at, rows = time.monotonic(), []
    for client in reasons:
        for broker in brokers:
            print(f"confluent-kafka {client} on Kafka {broker} ...", flush=True)
            rows += play(client, broker)
    failed = sum(row.failed for row in rows)
    REPORT.parent.mkdir(exist_ok=True)
    report = {
        "clients": reasons,
        "failed": failed,
        "seconds": round(time.monotonic() - started_at),
        "rows": [asdict(row) for row in rows],
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    show(rows, reasons)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
