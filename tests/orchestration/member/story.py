"""Stories of a member loop on the bench; `tests/story.py` describes their form.

Partitions and runs are numbers, and ranges look like `0[0,10)`. When another member joins a bench
of two partitions, partition 1 is the one that has to be given up.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, get_args

import dagster as dg
import pytest
from confluent_kafka import KafkaError

from dagster_rebalance.core.model import commands, errors, events
from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata
from dagster_rebalance.core.reporting.lag import GroupState
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from tests.orchestration.bench import SETTINGS, Bench, Status
from tests.orchestration.parts import status_of, tp
from tests.story import ScriptBase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dagster_rebalance.core.batches.engine_settings import EngineSettings
    from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition

FOREIGN = "text of another application"


class BenchScript(ScriptBase):
    """The bench of a story, with settings that the story may name."""

    def __init__(
        self, instance: dg.DagsterInstance, settings: Mapping[str, EngineSettings] | None = None
    ) -> None:
        self.instance = instance
        self.settings = {"SETTINGS": SETTINGS, **(settings or {})}
        self.bench: Bench
        self.runs: list[dg.DagsterRun] = []
        self.cancelled: list[tuple[str, bool]] = []
        self.notes: list[str] = []
        self.marked_at = 0.0

    def do_bench(self, *options: str) -> None:
        """Begin with options of `Bench`, such as `partitions=2`."""
        given: dict[str, Any] = {}
        for name, _, value in (option.partition("=") for option in options):
            given[name] = int(value) if value.isdigit() else value
        given["others"] = given.get("others", "").split()
        given["settings"] = self.settings[given.get("settings", "SETTINGS")]
        self.bench = Bench(self.instance, **given)

    # Time

    def do_turn(self, times: str = "1") -> None:
        self.bench.turn(int(times))

    def _step(self, step: str, where: str) -> None:
        """Carry out a step; `until` turns until an expectation holds."""
        if not step.startswith("until "):
            super()._step(step, where)
            return
        answer = ""
        for _ in range(1000):
            holds, answer = self._compare(step.removeprefix("until "))
            if holds:
                return
            self.bench.turn()
        pytest.fail(f"{where}\n  {answer}\n  {self.is_notes()}")

    def do_raises(self, kind: str, text: str, *step: str) -> None:
        """An action raises an error."""
        with pytest.raises(getattr(errors, kind), match=text):
            self._call("do", shlex.join(step))

    def do_runs_to_its_end(self) -> None:
        self.bench.member_loop.run()

    def do_without_ticks(self) -> None:
        self.bench.ticks = False

    def do_advance(self, seconds: str) -> None:
        self.bench.group.clock.advance(float(seconds))

    def do_mark(self) -> None:
        """Measure time, count writes and collect notes from here on."""
        self.marked_at = self.bench.group.clock()
        self.bench.consumer.writes.clear()
        self.bench.mailbox.take_notes()
        self.notes = []

    def is_took(self, least: str, most: str) -> bool:
        """Whether the time since the mark is between two limits."""
        return float(least) <= self.bench.group.clock() - self.marked_at < float(most)

    # Runs

    def do_offers(self, count: str = "1") -> None:
        self.bench.batch_requests(int(count))

    def do_run(self, status: str, *numbers: str) -> None:
        """Create runs of offered batches, the first one by default."""
        offers = [int(number) for number in numbers] or [0]
        self.runs += [self.bench.run(dg.DagsterRunStatus[status], number) for number in offers]

    def do_working(self, settings: str = "SETTINGS", partitions: str = "1") -> None:
        """A member with a started run on each partition."""
        self.do_bench(f"partitions={partitions}", f"settings={settings}")
        self.do_offers(partitions)
        self.do_run("STARTED", *map(str, range(int(partitions))))
        self.bench.until(lambda: not self.bench.mailbox.mail.batch_requests)

    def do_holding(self, settings: str = "SETTINGS") -> None:
        """A member with runs on two partitions, one of which it has to give up."""
        self.do_working(settings, "2")
        self.do_cancels_are_noted()
        self.do_another_joins()
        self.bench.until(lambda: self.bench.engine.holds)

    def do_fail_all(self, attempts: str, settings: str, partitions: str = "1") -> None:
        """The runs of all attempts on the first range of each partition fail."""
        self.do_bench(f"partitions={partitions}", f"settings={settings}", "records=20")
        for attempt in range(1, int(attempts) + 1):
            wanted = [attempt] * int(partitions)
            self.bench.until(
                lambda: [one.attempt for one in self.bench.mailbox.mail.batch_requests] == wanted  # noqa: B023
            )
            begun = [self.bench.run(Status.STARTED, number) for number in range(int(partitions))]
            self.runs += begun
            self.bench.until(lambda: not self.bench.mailbox.mail.batch_requests)
            for run in begun:
                self.bench.fail(run, f"attempt {attempt} met a poisoned record")

    def do_succeed(self, number: str = "0") -> None:
        self.bench.succeed(self.runs[int(number)])

    def do_fail(self, number: str) -> None:
        self.bench.fail(self.runs[int(number)])

    def do_cancels_are_noted(self) -> None:
        self.cancelled = self.bench.only_note_cancels()

    def is_cancelled(self) -> str:
        """The runs that were asked to end, marked if only those that have not started."""
        ids = [run.run_id for run in self.runs]
        rows = {(ids.index(run_id), unstarted) for run_id, unstarted in self.cancelled}
        return _list(f"{number}{' unstarted' * unstarted}" for number, unstarted in sorted(rows))

    def is_status(self, number: str = "0") -> str:
        return status_of(self.instance, self.runs[int(number)]).name

    def is_offered(self) -> str:
        requests = self.bench.mailbox.mail.batch_requests
        return _list(sorted(" ".join(map(_range, one.ranges)) for one in requests))

    def is_attempts(self) -> str:
        return _list(str(one.attempt) for one in self.bench.mailbox.mail.batch_requests)

    # Kafka

    def do_another_joins(self) -> None:
        self.other = self.bench.joined_by_another()

    def do_other_leaves(self) -> None:
        self.other.close()

    def do_share(self) -> None:
        """Another member joins and gets its partition."""
        self.do_turn()
        self.do_another_joins()

        def is_shared() -> bool:
            self.other.poll(0)
            return len(self.bench.engine.partitions) == 1 and bool(self.other.assignment())

        self.bench.until(is_shared)

    def do_assign(self, *numbers: str) -> None:
        self.bench.member.deliver(events.PartitionsAssigned(_tps(numbers)))

    def do_revoke(self, *numbers: str) -> None:
        self.bench.member.deliver(events.RevokeRequested(_tps(numbers)))

    def do_lose(self, *numbers: str) -> None:
        self.bench.member.deliver(events.PartitionsLost(_tps(numbers)))

    def do_fence(self) -> None:
        self.bench.group.fence(self.bench.member)

    def do_supersede(self) -> None:
        self.bench.group.supersede(self.bench.member)

    def do_stored(self, number: str, offset: str, metadata: str = "") -> None:
        """Another client commits an offset."""
        stored = OffsetAndMetadata(int(offset), FOREIGN if metadata == "foreign" else metadata)
        self.bench.group.committed[tp(int(number))] = stored

    def do_produce(self, number: str, records: str) -> None:
        self.bench.group.produce(tp(int(number)), int(records))

    def do_silence(self, *numbers: str) -> None:
        """The leaders of these partitions do not answer."""
        self.bench.group.silence(*_tps(numbers))

    def do_forbid(self, *topics: str) -> None:
        self.bench.group.forbid(*topics)

    def do_commits(self, answer: str) -> None:
        """The coordinator answers commits, or does not."""
        self.bench.group.answers_commits = answer == "answered"

    def do_loses_answer(self) -> None:
        """The answer to the next commit is lost."""
        self.bench.consumer.loses_answers = 1

    def do_slow_commits(self, seconds: str) -> None:
        self.bench.consumer.commit_s = float(seconds)

    def do_fails_commit(self, *numbers: str) -> None:
        """The next commit fails for some of its partitions."""
        self.bench.consumer.commits_fail = [frozenset(_tps(numbers))]

    def do_refuses(self, *rule: str) -> None:
        """Kafka refuses offsets of a partition (`1 reason`), or of none."""
        self.bench.consumer.refuses = {tp(int(rule[0])): rule[1]} if rule else {}

    def do_poll_fails(self, text: str, topic: str = "", retriable: str = "") -> None:
        error = errors.BrokerError(text, topics=topic.split(), retriable=bool(retriable))
        self.bench.consumer.polls_fail.append(error)

    def do_read_fails(self, times: str, text: str, retriable: str = "") -> None:
        """The next reads of committed offsets fail."""
        error = errors.BrokerError(text, retriable=bool(retriable))
        self.bench.consumer.committed_fails = [error] * int(times)

    def do_client_reports(self, text: str, retriable: str = "") -> None:
        self.bench.member.fail(errors.BrokerError(text, retriable=bool(retriable)))

    def do_never_delays(self) -> None:
        """The consumer gives up partitions although the engine holds them."""
        self.bench.consumer.ignores_delays = True

    def is_owner(self, number: str) -> str:
        is_own = self.bench.group.owner(tp(int(number))) is self.bench.member
        return "member" if is_own else "other"

    def is_offset(self, number: str = "0") -> int:
        return self.bench.offset(int(number))

    def is_claims(self, number: str = "0") -> str:
        claims = decode(self.bench.group.committed[tp(int(number))]).ranges(tp(int(number)))
        return _list(f"{_range(range_)} {batch_id}" for range_, batch_id in claims)

    def is_writes(self) -> str:
        """The written offsets since the mark."""
        return _list(
            " ".join(f"{one.partition}:{offset.offset}" for one, offset in sorted(write.items()))
            for write in self.bench.consumer.writes
        )

    def is_assignment(self) -> str:
        return _numbers(self.bench.consumer.assignment())

    # The engine and the loop

    def do_leave(self, reason: str, limit_s: str) -> None:
        self.bench.mailbox.send(events.LeaveRequested(reason, float(limit_s)))

    def do_abandoned(self, answer: str) -> None:
        self.bench.mailbox.is_abandoned = answer == "yes"

    def is_heard(self, *kinds: str) -> str:
        """The events of some kinds, as `PartitionsLost 0 SESSION`."""
        found = self.bench.engine.heard(*(getattr(events, kind) for kind in kinds))
        return _list(
            " ".join(
                [type(one).__name__, _numbers(getattr(one, "partitions", ()))]
                + ([one.reason.name] if isinstance(one, events.PartitionsLost) else [])
            )
            for one in found
        )

    def is_failed(self) -> bool:
        """Whether a write has failed."""
        return any(one.failed for one in self.bench.engine.heard(events.OffsetsWritten))

    def is_held(self) -> str:
        return _numbers(self.bench.engine.held)

    def is_owns(self) -> str:
        return _numbers(self.bench.engine.partitions)

    def is_phase(self, number: str = "0") -> str:
        owned = self.bench.engine.partitions.get(tp(int(number)))
        return "none" if owned is None else owned.phase.name

    def is_reason(self, number: str = "0") -> str:
        owned = self.bench.engine.partitions.get(tp(int(number)))
        return (owned.stop_reason if owned else "") or "none"

    def is_live(self, number: str = "0") -> bool:
        owned = self.bench.engine.partitions.get(tp(int(number)))
        return owned is not None and bool(owned.live_runs)

    def is_left(self) -> str:
        return str(self.bench.member_loop._left or "no")

    def is_has_left(self) -> bool:
        return self.bench.member_loop._left is not None

    # Dagster

    def do_catalogue(self, fault: str, times: str = "0") -> None:
        """Make the storage fail reads, shown assets, the next records of a kind, or nothing."""
        self.bench.catalogue.reads_fail = fault == "unreadable"
        self.bench.catalogue.shows_fail = fault == "unshown"
        self.bench.catalogue.stops_fail = int(times) if fault == "stops" else 0
        self.bench.catalogue.failures = int(times) if fault == "commits" else 0

    def do_joined(self, process: str = "process-1") -> None:
        """Dagster has the join of this process, or of a newer one."""
        who = MemberIdentity("blue", "sensor", process)
        Catalogue(self.instance, self.bench.assets, who).record_joined()

    def do_successor(self) -> None:
        """The member has left, and another one joins its group."""
        self.bench.consumer.close()
        self.bench = Bench(self.instance, group=self.bench.group)

    def do_show(self, *rule: str) -> None:
        """Another process shows a partition as stopped (`0 reason`), or none."""
        stopped = {tp(int(rule[0])): rule[1]} if rule else {}
        reported = frozenset(stopped if "reported" in rule else ())
        self.bench.catalogue.show_stopped(GroupState(stopped, reported=reported), {})

    def do_news(self) -> None:
        self.bench.member_loop._report.add_news()

    def is_kept(self) -> str:
        """The partitions whose shown state is kept."""
        return _numbers(self.bench.member_loop._report._kept)

    def is_current(self) -> bool:
        """Whether the report has no news to show."""
        return self.bench.member_loop._report.is_current

    def is_shown(self) -> int:
        """The number of partitions that are shown as stopped."""
        return self.bench.catalogue.shown_stops().partitions

    def is_partitions(self) -> str:
        name = self.bench.assets.partitions_name
        return _list(self.instance.get_dynamic_partitions(name))

    def is_recorded(self) -> str:
        return _list(f"{name} {start}-{until}" for name, start, until in self.bench.materialised())

    def is_events(self) -> str:
        return _list(str(event["event"]) for event in self.bench.observed())

    def is_event(self, name: str, key: str) -> object:
        """A value of the last event of a name."""
        return [one for one in self.bench.observed() if one["event"] == name][-1][key]

    def is_member_of_assigned_event(self) -> bool:
        return self.is_event("assigned", "member_id") == self.bench.member.member_id

    def is_outcomes(self) -> str:
        holds = [event for event in self.bench.observed() if event["event"] == "hold"]
        return _list(str(event["outcome"]) for event in holds)

    def evaluations(self) -> list[dg.AssetCheckEvaluation]:
        return evaluations(self.bench)

    def is_passed(self) -> str:
        found = self.evaluations()
        return str(found[0].passed) if found else "none"

    def is_check(self, name: str = "") -> str:
        """The description of the newest evaluation, or a value of its metadata."""
        found = self.evaluations()
        if not found:
            return "none"
        return str(found[0].metadata[name].value if name else found[0].description)

    def is_evaluations(self) -> int:
        return len(self.evaluations())

    def is_notes(self) -> str:
        self.notes += self.bench.mailbox.take_notes()
        text = "\n".join(self.notes)
        for number, run in enumerate(self.runs):
            text = text.replace(run.run_id[:8], f"run{number}")
        return text

    def is_noted(self, text: str) -> int:
        """How often a text was noted."""
        return self.is_notes().count(text)

    def is_command_names_in_notes(self) -> bool:
        return any(kind.__name__ in self.is_notes() for kind in get_args(commands.Command))

    def is_summary(self) -> str:
        return "\n".join(self.bench.mailbox.mail.summary)

    # Dead letters

    def do_letters(self, answer: str) -> None:
        """Kafka stores the letters under way, or refuses them."""
        refusal = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        self.bench.producer.end(*([] if answer == "stored" else [refusal]))

    def is_letters(self) -> int:
        return len(self.bench.producer.sent)

    def do_failures(self, answer: str) -> None:
        """Make Dagster report the error of a failed run, or make its storage unavailable."""
        self.bench.ledger.why_fails = answer == "unreadable"

    def is_failures_read(self) -> int:
        return self.bench.ledger.whys


def evaluations(bench: Bench) -> list[dg.AssetCheckEvaluation]:
    """The evaluations of the check of stopped partitions, newest first."""
    key = dg.AssetCheckKey(bench.assets.offsets, STOPPED_CHECK)
    log = bench.instance.event_log_storage
    records = log.get_asset_check_execution_history(key, limit=100)
    return [record.evaluation for record in records if record.evaluation is not None]


def _tps(numbers: Iterable[str]) -> tuple[TopicPartition, ...]:
    return tuple(tp(int(number)) for number in numbers)


def _numbers(partitions: Iterable[TopicPartition]) -> str:
    return " ".join(str(one.partition) for one in sorted(partitions)) or "none"


def _range(range_: OffsetRange) -> str:
    return f"{range_.partition}[{range_.start},{range_.until})"


def _list(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "none"
