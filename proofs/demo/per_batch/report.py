from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from proofs.demo.checks import Check, check_committed, check_output
from proofs.demo.per_batch.board import painted
from proofs.demo.per_batch.checks import (
    DRAINED,
    check_holds,
    check_materialisations,
    is_retained,
)
from proofs.demo.per_batch.parts import GROUP, PARTITIONS, TOPIC
from proofs.demo.view import short
from proofs.witness.committed import committed_offsets, end_offsets
from proofs.witness.offsets_topic import commits_in, read_stored_offsets
from proofs.witness.output import Output, compare_output, parquet_rows

if TYPE_CHECKING:
    from proofs.demo.per_batch.parts import Parts
    from proofs.demo.per_batch.state import Watcher
    from proofs.demo.view import View
    from proofs.witness.catalogue import HoldSeen

_LIMIT_S = 30.0


@dataclass(frozen=True)
class Report:
    """The result of the story."""

    produced: int
    output: Output
    commits: int
    materialisations: int
    holds: list[HoldSeen]
    retained_records: int
    checks: list[Check]

    def as_json(self) -> dict[str, Any]:
        return {
            "records_produced": self.produced,
            "records_in_output": self.output.records,
            "lost": len(self.output.lost),
            "doubled": len(self.output.doubled),
            "commits": self.commits,
            "materialisations": self.materialisations,
            "holds": [asdict(hold) for hold in self.holds],
            "retained_records_during_holds": self.retained_records,
            "checks": [asdict(check) for check in self.checks],
        }

    def show(self, view: View) -> None:
        figures = Table(title="The demo in figures", title_justify="left", show_header=False)
        for name, value in (
            ("records produced", self.produced),
            ("records in the output", self.output.records),
            ("lost", len(self.output.lost)),
            ("doubled", len(self.output.doubled)),
            ("commits in Kafka", self.commits),
            ("materializations in Dagster", self.materialisations),
            ("records of retained partitions during holds", self.retained_records),
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
            "records elsewhere",
        ):
            receipts.add_column(column)
        for hold in self.holds:
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


def make_report(parts: Parts, watcher: Watcher) -> Report:
    """Read the output, Kafka and Dagster, and check them."""
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
            check_committed(
                committed, end_offsets(watcher.admin, TOPIC, range(PARTITIONS), limit_s=_LIMIT_S)
            ),
            check_materialisations(commits, went_back, materialised),
            check_holds(holds),
        ],
    )
