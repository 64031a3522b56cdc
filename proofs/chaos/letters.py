"""The dead letters of a play: each bad record is stored once, and replayed with mended code.

Owns the violations: a bad record without a letter or with two of them, a letter of a good record, a
bad record in the output, and a letter whose state is not what became of its record.
"""

from __future__ import annotations

import json
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.core.model.letters import Letter, LetterFold, LetterKind, LetterState
from dagster_rebalance.orchestration.operators.letters import (
    LetterRequest,
    discard,
    plan_discard,
    plan_replay,
)
from dagster_rebalance.orchestration.operators.requests import Reruns
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.letter_topic import parsed_records
from dagster_rebalance.orchestration.storage.run_tags import RERUN_TAG
from proofs.chaos.bad import BAD, STAYS_BAD, Bad, is_bad, stays_bad
from proofs.chaos.exchange import GROUP, LETTERS, TOPIC
from proofs.witness.output import Row, compare_output

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_BY, _MENDED = "chaos", "the code is mended"


class Letters:
    """The dead letters of the group.

    Args:
        instance: The Dagster instance.
        bootstrap_servers: The brokers.
        bad: How the asset treats bad records.

    Attributes:
        kafka: The group.
        problems: Violations before the replay, as sentences.
    """

    def __init__(self, instance: dg.DagsterInstance, bootstrap_servers: str, bad: Bad) -> None:
        self.problems: list[str] = []
        self._instance = instance
        self._bad = bad
        self._rerun_id = ""
        self.kafka = KafkaConsumerResource(
            bootstrap_servers=bootstrap_servers,
            group_id=GROUP,
            topics=[TOPIC],
            dead_letter_topic=LETTERS,
        )
        self._reruns = Reruns(instance, self.kafka)

    def read(self) -> tuple[list[Letter], LetterFold]:
        """Return each letter as often as it was stored, and the states of the letters."""
        stored, fold = [], LetterFold()
        with closing(self.kafka.reader()) as reader:
            for place, found in parsed_records(reader.read_topic(LETTERS)):
                fold.add(place, found)
                if isinstance(found, Letter):
                    stored.append(found)
        return stored, fold

    def check(self, produced: Mapping[int, tuple[int, int | None]], rows: Iterable[Row]) -> None:
        """Check the letters and the output before the replay, once all records are committed."""
        self.problems += wrong_letters(produced, self.read()[0])
        output = compare_output(
            {number: place for number, place in produced.items() if not is_bad(number)}, rows
        )
        self.problems += [f"record {number} is lost before the replay" for number in output.lost]
        self.problems += [f"{row} is in the output before the replay" for row in output.wrong]

    def replay(self) -> bool:
        """Begin a replay, or another one of the letters that a failed one has left.

        Returns:
            Whether the letters of all mended records are replayed.
        """
        if not self._reruns.open_ones():
            _, fold = self.read()
            letters = [one.letter for one in fold.in_state(LetterState.OPEN) if one.letter]
            mended = [one.key for one in letters if not stays_bad(_number(one))]
            if not mended:
                return True
            with suppress(DagsterRebalanceError):  # a run of the group may still be at work
                self._begin(mended)
        elif any(run.is_failure_or_canceled for run in self._runs()):
            with suppress(DagsterRebalanceError):
                self._reruns.cancel(self._rerun_id)
        return False

    def _begin(self, mended: Sequence[str]) -> None:
        # A record that stays bad is set aside again. With bisection, it would halt the replay.
        keys = mended if self._bad is Bad.BISECT else ()
        request = LetterRequest(keys, not keys, containing="", by=_BY, why=_MENDED)
        plan = plan_replay(self._instance, self.kafka, request)
        self._rerun_id = plan.rerun.rerun_id
        self._reruns.begin(plan)

    def _runs(self) -> list[dg.DagsterRun]:
        wanted = dg.RunsFilter(tags={RERUN_TAG: self._rerun_id})
        return list(self._instance.get_runs(wanted))

    def discard(self) -> None:
        """Discard the letters that are still open, after the replay."""
        _, fold = self.read()
        if fold.counts[LetterState.OPEN]:
            why = "no code can process them"
            request = LetterRequest((), everything=True, containing="", by=_BY, why=why)
            discard(self._instance, self.kafka, plan_discard(self.kafka, request))


def expected(
    produced: Mapping[int, tuple[int, int | None]],
) -> dict[int, tuple[int, int | None]]:
    """Return the records that the output must have after the replay."""
    return {number: place for number, place in produced.items() if not stays_bad(number)}


def wrong_letters(
    produced: Mapping[int, tuple[int, int | None]], letters: Iterable[Letter]
) -> Iterator[str]:
    """Yield a sentence for each bad record without exactly one letter, and each other letter."""
    rows = []
    for letter in letters:
        range_, number = letter.range, _number(letter)
        why = STAYS_BAD if stays_bad(number) else BAD
        if letter.kind is LetterKind.RANGE or letter.group_id != GROUP or why not in letter.reason:
            yield f"a wrong letter {letter.key} of {letter.group_id}: {letter.reason}"
        rows.append(Row(number, range_.partition, range_.start, range_.start, range_.until))
    bad = {number: place for number, place in produced.items() if is_bad(number)}
    found = compare_output(bad, rows)
    yield from (f"bad record {number} has no letter" for number in found.lost)
    yield from (f"bad record {number} has more than one letter" for number in found.doubled)
    yield from (
        f"a letter of a record that is not bad, or at another place: {row}" for row in found.wrong
    )


def wrong_states(fold: LetterFold) -> Iterator[str]:
    """Yield a sentence for each letter whose state is wrong after the replay."""
    if fold.malformed:
        yield f"records that are no letters: {'; '.join(fold.malformed_shown)}"
    for entry in fold.entries.values():
        if entry.letter is None:  # a replay also marks the letter that its range may have
            continue
        is_lasting = stays_bad(_number(entry.letter))
        wanted = LetterState.DISCARDED if is_lasting else LetterState.REPLAYED
        if entry.state is not wanted:
            yield f"letter {entry.letter.key} is {entry.state.value}, and must be {wanted.value}"


def _number(letter: Letter) -> int:
    return int(json.loads(letter.value or b"{}").get("number", -1))
