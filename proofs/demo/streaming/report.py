from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dagster_rebalance.testing.local.kafka_node import admin_of
from proofs.demo.checks import check_committed, check_output
from proofs.demo.streaming.checks import check_deploy, check_recorded
from proofs.demo.streaming.figures import Waits, claim_to_commit, figures_of
from proofs.demo.streaming.parts import GROUP, PARTITIONS, TOPIC
from proofs.witness.committed import committed_offsets, end_offsets
from proofs.witness.output import Output, compare_output
from proofs.witness.producer import produced_at

if TYPE_CHECKING:
    from proofs.demo.checks import Check
    from proofs.demo.streaming.acts import Play
    from proofs.demo.streaming.figures import ActFigures
    from proofs.demo.streaming.parts import Parts
    from proofs.demo.streaming.state import Watcher
    from proofs.demo.view import View

_LIMIT_S = 30.0


@dataclass(frozen=True)
class Report:
    """The result of the story.

    Attributes:
        produced: Confirmed records.
        committed: Committed records.
        output: The comparison of the output.
        commits: Commits in Kafka, each of one partition.
        again: In-flight records of the killed run that another run processed.
        claim_to_commit: Durations of all commits.
        acts: Figures of the acts.
        checks: Results of the checks.
    """

    produced: int
    committed: int
    output: Output
    commits: int
    again: int
    claim_to_commit: Waits
    acts: list[ActFigures]
    checks: list[Check]

    def as_json(self) -> dict[str, Any]:
        return {
            "records_produced": self.produced,
            "records_committed": self.committed,
            "records_in_output": self.output.records,
            "lost": len(self.output.lost),
            "doubled": len(self.output.doubled),
            "commits": self.commits,
            "records_taken_over_from_killed": self.again,
            "claim_to_commit": asdict(self.claim_to_commit),
            "acts": [asdict(act) for act in self.acts],
            "checks": [asdict(check) for check in self.checks],
        }

    def show(self, view: View) -> None:
        figures = Table(title="The demo in figures", title_justify="left", show_header=False)
        for name, value in (
            ("records produced", f"{self.produced:,}"),
            ("records committed", f"{self.committed:,}"),
            ("records in the output", f"{self.output.records:,}"),
            ("lost", f"{len(self.output.lost):,}"),
            ("done twice in the output", f"{len(self.output.doubled):,}"),
            ("commits in Kafka", f"{self.commits:,}"),
            ("records in hand at the kill, done again", f"{self.again:,}"),
            (
                "from the claim of a batch to its commit",
                f"p50 {self.claim_to_commit.p50_s:.2f} s, p99 {self.claim_to_commit.p99_s:.2f} s",
            ),
        ):
            figures.add_row(name, value)
        view.print(figures)
        acts = Table(title="From record to commit", title_justify="left")
        for column in ("act", "seconds", "records", "p50", "p99", "longest gap of a partition"):
            acts.add_column(column, justify="left" if column == "act" else "right")
        for act in self.acts:
            waits = act.record_to_commit
            acts.add_row(
                act.name,
                f"{act.seconds:.0f}",
                f"{act.records:,}",
                f"{waits.p50_s:.2f} s" if act.records else "",
                f"{waits.p99_s:.2f} s" if act.records else "",
                f"{act.longest_gap_s:.1f} s ({TOPIC}-{act.gap_partition})",
            )
        view.print(acts)


def make_report(parts: Parts, watcher: Watcher, play: Play) -> Report:
    """Read the output, Kafka and Dagster, and check them."""
    produced, work = parts.producer.confirmed, watcher.work
    output = compare_output(produced, parts.rows())
    client = parts.kafka.client_config()
    numbers = range(PARTITIONS)
    committed = committed_offsets(client, GROUP, TOPIC, numbers, limit_s=_LIMIT_S)
    ends = end_offsets(admin_of(parts.kafka.bootstrap_servers), TOPIC, numbers, limit_s=_LIMIT_S)
    times = produced_at(client, TOPIC, ends, limit_s=_LIMIT_S)
    killed = play.victim.run_id if play.victim else ""
    return Report(
        produced=len(produced),
        committed=sum(committed.values()),
        output=output,
        commits=len(work.done),
        again=sum(len(one.range) for one in work.again if one.run_id == killed),
        claim_to_commit=claim_to_commit(work.done),
        acts=[figures_of(act, work.done, times) for act in play.played],
        checks=[
            check_output(output),
            check_committed(committed, ends),
            check_recorded([one.range for one in watcher.catalogue.recorded], ends),
            check_deploy(play.left),
        ],
    )
