"""The end of the demo judges the output, Kafka and Dagster, and reports in a table and in JSON.

Owns what is read for the checks, and the form of the report.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec
from rich.table import Table

from proofs.demo.checks import (
    DRAINED,
    Check,
    check_committed,
    check_holds,
    check_materialisations,
    check_output,
    is_retained,
)
from proofs.demo.parts import GROUP, PARTITIONS, TOPIC
from proofs.demo.view import painted, short
from proofs.witness.committed import committed_offsets
from proofs.witness.offsets_topic import commits_in, read_stored_offsets
from proofs.witness.output import Output, compare_output, parquet_rows

if TYPE_CHECKING:
    from pathlib import Path

    from confluent_kafka.admin import AdminClient

    from proofs.demo.parts import Parts
    from proofs.demo.state import Watcher
    from proofs.demo.view import View
    from proofs.witness.catalogue import HoldSeen

_LIMIT_S = 30.0


@dataclass(frozen=True)
class Report:
    """What came out."""

    produced: int
    output: Output
    commits: int
    materialisations: int
    holds: list[HoldSeen]
    retained_records: int
    checks: list[Check]

    @property
    def failed(self) -> list[Check]:
        """The checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    def as_json(self, *, seconds: float, protocol: str) -> dict[str, Any]:
        """The report for programs."""
        return {
            "records_produced": self.produced,
            "records_in_output": self.output.records,
            "lost": len(self.output.lost),
            "doubled": len(self.output.doubled),
            "commits": self.commits,
            "materialisations": self.materialisations,
            "holds": [asdict(hold) for hold in self.holds],
            "retained_records_during_holds": self.retained_records,
            "seconds": round(seconds, 1),
            "protocol": protocol,
            "checks": [asdict(check) for check in self.checks],
        }


def make_report(parts: Parts, watcher: Watcher) -> Report:
    """Read everything and judge it."""
    produced = parts.producer.confirmed
    output = compare_output(produced, parquet_rows(parts.output))
    stored = read_stored_offsets(parts.kafka.bootstrap_servers, GROUP)
    commits, went_back = commits_in(one for one in stored if one.topic == TOPIC)
    materialised = [one.range for one in watcher.recorded]
    holds = [
        replace(
            hold,
            retained_records=sum(
                len(commit.range) for commit in commits if is_retained(commit, hold)
            ),
        )
        for hold in watcher.holds
    ]
    drained = [hold for hold in holds if hold.outcome == DRAINED]
    committed = committed_offsets(
        parts.kafka.client_config(), GROUP, TOPIC, range(PARTITIONS), limit_s=_LIMIT_S
    )
    return Report(
        produced=len(produced),
        output=output,
        commits=len(commits),
        materialisations=len(materialised),
        holds=holds,
        retained_records=sum(
            len(commit.range)
            for commit in commits
            if any(is_retained(commit, hold) for hold in drained)
        ),
        checks=[
            check_output(output),
            check_committed(committed, _ends(watcher.admin)),
            check_materialisations(commits, went_back, materialised),
            check_holds(holds),
        ],
    )


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write the report for programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def tell(report: Report, view: View) -> None:
    """Show the report to a person."""
    figures = Table(title="The demo in figures", title_justify="left", show_header=False)
    for name, value in (
        ("records produced", report.produced),
        ("records in the output", report.output.records),
        ("lost", len(report.output.lost)),
        ("doubled", len(report.output.doubled)),
        ("commits in Kafka", report.commits),
        ("materialisations in Dagster", report.materialisations),
        ("records of retained partitions during holds", report.retained_records),
    ):
        figures.add_row(name, f"{value:,}")
    view.print(figures)
    receipts = Table(title="Hold receipts", title_justify="left")
    for column in (
        "member",
        "cause",
        "partitions",
        "outcome",
        "seconds",
        "runs",
        "records elsewhere meanwhile",
    ):
        receipts.add_column(column)
    for hold in report.holds:
        receipts.add_row(
            painted(hold.member),
            hold.cause,
            short(hold.partitions),
            hold.outcome,
            f"{hold.seconds:.1f}",
            str(hold.runs),
            f"{hold.retained_records:,}",
        )
    view.print(receipts)
    for check in report.checks:
        view.print(
            f"{'[green]passed[/green]' if check.passed else '[bold red]FAILED[/bold red]'}  "
            f"{check.name}: {check.detail}"
        )


def _ends(admin: AdminClient) -> dict[int, int]:
    asked = {TopicPartition(TOPIC, number): OffsetSpec.latest() for number in range(PARTITIONS)}
    answers = admin.list_offsets(asked, request_timeout=_LIMIT_S)
    return {
        partition.partition: int(answer.result(_LIMIT_S).offset)
        for partition, answer in answers.items()
    }
