"""The report: counts from the output, Kafka's log and Dagster's runs, not from the members."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby, permutations
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.letters import LetterFold
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange
from dagster_rebalance.core.runs.rerun_batch import rerun_of
from dagster_rebalance.orchestration.storage.run_tags import BATCH_TAG, GROUP_TAG, ranges_in
from proofs.chaos.bad import Bad
from proofs.chaos.exchange import GROUP, SENSOR, TOPIC
from proofs.chaos.faults import Kind
from proofs.chaos.letters import expected, wrong_letters, wrong_states
from proofs.chaos.reasons import Evidence, reasons
from proofs.chaos.stalls import History, Judgement, RunSeen, judge
from proofs.chaos.streams import FREEZES, Streams, claimed_by, range_of
from proofs.witness.offsets_topic import StoredOffset, commits_in, read_group
from proofs.witness.output import Output, compare_output
from proofs.witness.owners import changes_of_owner, stored_without_owning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dagster_rebalance.core.model.offsets import TopicPartition
    from proofs.chaos.faults import Fault
    from proofs.chaos.parts import Parts
    from proofs.chaos.play import Play
    from proofs.witness.catalogue import Recorded
    from proofs.witness.offsets_topic import GroupRecord

_TICKS = 10_000
_AFTERWARDS_S = 10.0
"""Time of a delayed member, or of its successor, to complete a write."""
_PAGE = 500
_TWICE = 2


@dataclass(frozen=True)
class Report:
    """The result of the play."""

    faults: Mapping[str, int]
    output: Output
    twice_succeeded: int
    commits: int
    shown: Shown
    unowned: Sequence[str]
    went_back: Sequence[str]
    stalls: Judgement
    holds: Mapping[str, int]
    runs: Mapping[str, int]
    letters: Mapping[str, int]
    streams: Streams | None = None
    wrong: list[str] = field(default_factory=list)

    def as_json(self, played: Mapping[str, object], *, seconds: float) -> dict[str, Any]:
        """Return the report with the settings of the play."""
        return {
            **played,
            "seconds": round(seconds, 1),
            "faults": dict(self.faults),
            "records": self.output.records,
            "lost": len(self.output.lost),
            "doubled": len(self.output.doubled) + self.twice_succeeded,
            "wrong": len(self.output.wrong),
            "unowned_commits": len(self.unowned),
            "offsets_went_back": len(self.went_back),
            "stalls_over_2s": len(self.stalls.stalls),
            "holds": dict(self.holds),
            "runs": dict(self.runs),
            "letters": dict(self.letters),
            **({} if self.streams is None else self.streams.figures),
            "commits": self.commits,
            "materialisations_missing": self.shown.missing,
            "materialisations_extra": self.shown.extra,
            "materialisations_repeated": self.shown.repeated,
            "watched_partition_seconds": round(self.stalls.watched_s, 1),
            "idle_partition_seconds_explained": {
                why: round(seconds, 1) for why, seconds in sorted(self.stalls.idle_s.items())
            },
            "problems": self.wrong,
        }


def make_report(parts: Parts, play: Play) -> Report:
    """Read the output, Kafka and Dagster, and count."""
    until = time.time()
    play.catalogue.read()
    log = read_group(parts.kafka.bootstrap_servers, GROUP)
    produced = parts.producer.confirmed
    letters, fold = play.letters.read() if play.letters is not None else ([], LetterFold())
    output = compare_output(expected(produced) if parts.bad else produced, parts.rows())
    commits, went_back = commits_in(one for one in log if isinstance(one, StoredOffset))
    records = [
        record
        for record in _runs(parts.instance)
        if not rerun_of(record.dagster_run.tags.get(BATCH_TAG, ""))
    ]
    runs = [_seen(record) for record in records]
    recorded = play.catalogue.recorded
    assigned = [event for event in play.catalogue.events if event.kind == "assigned"]
    names = {str(event.metadata["member_id"]): event.member for event in assigned}
    recorded_by: dict[OffsetRange, list[str]] = defaultdict(list)
    for one in recorded:
        for range_ in one.commits:
            recorded_by[range_] += [] if one.is_late else [one.member]
    unowned = stored_without_owning(log, recorded_by, names, claimed_by(log))
    repeated = shown_again(recorded, play.faults.done)
    twice = covered_twice([range_ for run, ranges in runs if run.succeeded for range_ in ranges])
    streams = (
        Streams.of(parts.exchange.bodies, play.faults.done, records, until)
        if parts.is_streaming
        else None
    )
    ticks = None if streams else {known: _ticks(parts, name) for known, name in names.items()}
    # The work of a deleted run is repeated; only that it was at work is of interest.
    deleted = [_seen(record, gone_at) for record, gone_at in play.faults.deleted]
    histories = _histories(play, log, [*runs, *deleted])
    if streams is not None:
        histories = [streams.history(history, names, until) for history in histories]
    evidence = Evidence(
        faults=play.faults.done,
        holds=play.catalogue.holds,
        assigned=assigned,
        left=[event for event in play.catalogue.events if event.kind == "left"],
        ticks=ticks or {},
        slow=parts.bystander.slow,
        is_classic=parts.protocol == "classic",
        is_streaming=parts.is_streaming,
    )
    judgement = judge(histories, ticks, list(reasons(evidence, histories, until)), until)
    noted = [range_of(path.name) for path in parts.exchange.noted.iterdir()]
    if parts.bad is Bad.BISECT:
        noted += [letter.range for letter in letters]
    made = [commit.range for commit in commits]
    reached = [(range_.topic_partition, range_.until) for range_ in made]
    wrong = [f"committed without the second asset: {one}" for one in uncovered(noted, reached)]
    for member_log in parts.member_logs:
        wrong += failures_in(member_log.read_text(errors="replace").splitlines())
    wrong += parts.fleeting.problems if parts.fleeting is not None else []
    if play.letters is not None:
        wrong += [*play.letters.problems, *wrong_letters(produced, letters), *wrong_states(fold)]
    wrong += [f"record {number} is lost" for number in output.lost]
    wrong += [f"record {number} is in the output more than once" for number in output.doubled]
    wrong += [
        f"a row that was not produced so: {row}, confirmed at {produced.get(row.number)}"
        for row in output.wrong
    ]
    wrong += [
        f"{count} offsets of {name} were worked on by two successful runs"
        for name, count in twice.items()
    ]
    shown = Shown.of(made, recorded, repeated, is_joined=parts.is_streaming)
    wrong += [*shown.problems, *(streams.problems if streams else ())]
    wrong += [*unowned, *went_back, *map(str, judgement.stalls)]
    return Report(
        faults=Counter(fault.kind.name.lower() for fault in play.faults.done),
        output=output,
        twice_succeeded=sum(twice.values()),
        commits=len(commits),
        shown=shown,
        unowned=unowned,
        went_back=went_back,
        stalls=judgement,
        holds=Counter(hold.outcome for hold in play.catalogue.holds),
        runs=Counter(record.dagster_run.status.value for record in records),
        letters={state.value: count for state, count in fold.counts.items() if count},
        streams=streams,
        wrong=wrong,
    )


@dataclass(frozen=True)
class Shown:
    """Dagster's records of the commits.

    Attributes:
        missing: Commits, or offsets, without a record.
        extra: Records without a commit, or repeated ones.
        repeated: Records that are repeated because of a fault.
        problems: The first two problems, as sentences.
    """

    missing: int
    extra: int
    repeated: int
    problems: Sequence[str]

    @classmethod
    def of(
        cls,
        made: Sequence[OffsetRange],
        recorded: Sequence[Recorded],
        repeated: Sequence[OffsetRange],
        *,
        is_joined: bool,
    ) -> Shown:
        """Compare commits and records.

        Args:
            made: The commits in Kafka.
            recorded: The records in Dagster.
            repeated: Records that are repeated because of a fault.
            is_joined: Whether a record may join commits. A late owner does not know their bounds,
                so offsets are compared.
        """
        if is_joined:
            return cls._of_offsets(made, recorded, repeated)
        commits, shown = Counter(made), Counter(one.range for one in recorded) - Counter(repeated)
        missing, extra = commits - shown, shown - commits
        problems = [f"not shown by Dagster: the commit of {one}" for one in missing.elements()]
        problems += [
            f"shown by Dagster, and not committed, or not so often: {range_}, by "
            + _recorders(one for one in recorded if one.range == range_)
            for range_ in extra.elements()
        ]
        return cls(missing.total(), extra.total(), len(repeated), problems)

    @classmethod
    def _of_offsets(
        cls,
        made: Sequence[OffsetRange],
        recorded: Sequence[Recorded],
        repeated: Sequence[OffsetRange],
    ) -> Shown:
        shown = list((Counter(one.range for one in recorded) - Counter(repeated)).elements())
        missing = uncovered(shown, [(one.topic_partition, one.until) for one in made])
        extra = [
            f"{count} offsets of {name}, by {_recorders(_overlapping(recorded, name))}"
            for name, count in covered_twice(shown).items()
        ]
        extra += uncovered(made, [(one.topic_partition, one.until) for one in shown])
        problems = [f"not shown by Dagster: the commit of {one}" for one in missing]
        problems += [
            f"shown by Dagster, and not committed, or not so often: {one}" for one in extra
        ]
        return cls(len(missing), len(extra), len(repeated), problems)


def _overlapping(recorded: Sequence[Recorded], name: str) -> list[Recorded]:
    """Return the records of a partition that overlap another one."""
    its = [one for one in recorded if str(one.range.topic_partition) == name]
    return [
        one
        for number, one in enumerate(its)
        if any(one.range.overlaps(other.range) for other in (*its[:number], *its[number + 1 :]))
    ]


def _recorders(recorded: Iterable[Recorded]) -> str:
    return ", ".join(
        f"{one.member}{' late' if one.is_late else ''} at {one.at:.2f} "
        f"[{one.range.start}, {one.range.until})"
        for one in recorded
    )


def _runs(instance: dg.DagsterInstance) -> Iterator[dg.RunRecord]:
    cursor = None
    while True:
        records = instance.get_run_records(
            dg.RunsFilter(tags={GROUP_TAG: GROUP}), limit=_PAGE, cursor=cursor
        )
        yield from records
        if len(records) < _PAGE:
            return
        cursor = records[-1].dagster_run.run_id


def _seen(
    record: dg.RunRecord, gone_at: float | None = None
) -> tuple[RunSeen, tuple[OffsetRange, ...]]:
    """Return a run with its ranges; an unfinished one lasts until its process is gone."""
    run, ended_at = record.dagster_run, record.end_time if record.end_time is not None else gone_at
    # One that executes a part of another run again leaves the range to be done.
    is_whole = run.status is dg.DagsterRunStatus.SUCCESS and run.step_keys_to_execute is None
    seen = RunSeen(record.create_timestamp.timestamp(), ended_at, is_whole)
    return seen, ranges_in(run.run_config, run.tags.get(BATCH_TAG, ""))


def failures_in(log: Iterable[str]) -> list[str]:
    """Return the members that ended with an error; no fault here justifies one."""
    found: list[str] = []
    for line in log:
        if line.startswith("the member ") and line.endswith(" failed"):
            found.append(line)
        elif (
            found
            and line.startswith("dagster_rebalance.core.model.errors.")
            and found[-1].endswith(" failed")
        ):
            found[-1] = f"{found[-1]}: {line.rpartition('Error: ')[2]}"
    return found


def shown_again(recorded: Sequence[Recorded], faults: Sequence[Fault]) -> list[OffsetRange]:
    """Return the commits that Dagster shows twice because of a fault.

    Their member was delayed between its check and its record, and its successor recorded them
    first.
    """
    by_range = defaultdict(list)
    for one in recorded:
        by_range[one.range].append(one)
    return [range_ for range_, its in by_range.items() if _is_repeated(its, faults)]


def _is_repeated(its: Sequence[Recorded], faults: Sequence[Fault]) -> bool:
    return len(its) == _TWICE and any(
        late.is_late and _holds_up(fault, first.member, late.at)
        for first, late in permutations(its)
        for fault in faults
    )


def _holds_up(fault: Fault, member: str, at: float) -> bool:
    """Return whether a fault may have delayed a write of a member beyond that of its successor."""
    its_own = fault.kind in {Kind.MEMBER_FROZEN, *FREEZES} and fault.target == member
    if not its_own and fault.kind not in {Kind.STORAGE_LOCKED, Kind.STORAGE_HANGS}:
        return False
    return fault.began_at <= at <= (fault.mended_at or at) + _AFTERWARDS_S


def uncovered(
    ranges: Iterable[OffsetRange], reached: Iterable[tuple[TopicPartition, int]]
) -> list[str]:
    """Return the offsets below a partition's committed offset that are in none of the ranges."""
    ends: dict[TopicPartition, int] = {}
    for partition, until in reached:
        ends[partition] = max(until, ends.get(partition, 0))
    missing = []
    for partition, end in sorted(ends.items()):
        at = 0
        for range_ in sorted(
            one for one in ranges if one.topic_partition == partition and one.start < end
        ):
            if range_.start > at:
                missing.append(f"{partition} [{at}, {range_.start})")
            at = max(at, range_.until)
        if at < end:
            missing.append(f"{partition} [{at}, {end})")
    return missing


def covered_twice(ranges: Sequence[OffsetRange]) -> dict[str, int]:
    """Return the number of offsets of each partition that are in more than one range."""
    found = {}
    for partition, its_ranges in groupby(
        sorted(ranges, key=lambda one: (one.topic_partition, one.start)),
        lambda one: one.topic_partition,
    ):
        reached = count = 0
        for range_ in its_ranges:
            count += max(0, min(reached, range_.until) - range_.start)
            reached = max(reached, range_.until)
        if count:
            found[str(partition)] = count
    return found


def _ticks(parts: Parts, member: str) -> list[float]:
    """Return the start of each completed tick of a member's sensor."""
    found = parts.dagster.ui.ticks(member, SENSOR, limit=_TICKS)
    return sorted(
        float(tick["timestamp"]) for tick in found if tick["status"] in {"SUCCESS", "SKIPPED"}
    )


def _histories(
    play: Play,
    log: Sequence[GroupRecord],
    runs: Sequence[tuple[RunSeen, tuple[OffsetRange, ...]]],
) -> list[History]:
    owners = changes_of_owner(log)
    worked: dict[int, list[RunSeen]] = defaultdict(list)
    for run, ranges in runs:
        for range_ in ranges:
            worked[range_.partition].append(run)
    stored: dict[int, list[StoredOffset]] = defaultdict(list)
    for record in log:
        if isinstance(record, StoredOffset):
            stored[record.partition].append(record)
    return [
        History(
            name=f"{TOPIC}-{number}",
            ends=[(at, ends[number]) for at, ends in play.ends if number < len(ends)],
            commits=[(one.at, one.offset) for one in stored[number]],
            claims=list(claimed_in(stored[number])),
            runs=worked[number],
            owners=owners.get(number, []),
        )
        for number in range(len(play.ends[-1][1]))
    ]


def claimed_in(stored: Iterable[StoredOffset]) -> Iterator[tuple[float, int]]:
    """Return the end and the first claim of each batch. A part of a bisected range is a batch."""
    known = set()
    for one in stored:
        for claim in decode(OffsetAndMetadata(one.offset, one.metadata)).claims:
            batch = (claim.batch_id, claim.until)
            if batch not in known:
                known.add(batch)
                yield one.at, claim.until
