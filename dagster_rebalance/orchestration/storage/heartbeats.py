"""Signs of life: what the process of a run writes again and again, and a member compares.

They are kept in the values that Dagster's run storage keeps for its own daemons: a write touches
one value and nothing else, one query reads many, and people do not see them. Nobody can delete such
a value, so runs share a fixed number of them, in the order of their creation. A run whose place was
taken by a later one, ten thousand runs on, takes it back with its next sign.

Dagster+ has no such values for user code. There a sign is an event in the run's own log.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.offsets import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PLACES = 10_000
_NONE = "-"
_PART = r"[A-Za-z0-9._-]+:[0-9]+(?:,[0-9]+)*"
_NUMBER = r"[0-9]+(?:/(?P<timeout_s>[0-9]+(?:\.[0-9]+)?(?:e\+[0-9]+)?))?"
"""Which sign it is, and the time-out that its run was told."""
_SAID = re.compile(rf"{_NUMBER} (?P<partitions>{_NONE}|{_PART}(?:;{_PART})*) [^ ]+")
_IN_LOG = "dagster_rebalance sign of life: "


class Heartbeats:
    """The signs of life of all runs of an instance."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance

    def give(self, run: dg.DagsterRun, number: int, sign: str) -> None:
        """Write the sign of a run over its last one.

        `number` is the one that Dagster's storage has given the run.
        """
        stored: object = self._instance.run_storage.set_cursor_values(
            {_place(number): f"{run.run_id} {sign}"}
        )
        if stored is not None:  # the storage of Dagster+ returns an error instead of raising it
            self._instance.report_engine_event(f"{_IN_LOG}{sign}", run)

    def read(self, numbers: Mapping[str, int]) -> dict[str, str]:
        """The last sign of each run, by run id; without those that gave none."""
        if not numbers:
            return {}
        stored: object = self._instance.run_storage.get_cursor_values(
            {_place(number) for number in numbers.values()}
        )
        if not isinstance(stored, dict):
            return {run_id: sign for run_id in numbers if (sign := self._in_log(run_id))}
        signs = {}
        for run_id, number in numbers.items():
            whose, _, sign = stored.get(_place(number), "").partition(" ")
            if whose == run_id:
                signs[run_id] = sign
        return signs

    def _in_log(self, run_id: str) -> str:
        entries = self._instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        messages = [entry.dagster_event.message or "" for entry in entries if entry.dagster_event]
        return next(
            (text.removeprefix(_IN_LOG) for text in reversed(messages) if text.startswith(_IN_LOG)),
            "",
        )


def spelled_partitions(partitions: Iterable[TopicPartition]) -> str:
    """Partitions as a part of a sign: `orders:0,1;payments:3`."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for partition in sorted(partitions):
        numbers[partition.topic].append(partition.partition)
    return (
        ";".join(f"{topic}:{','.join(map(str, those))}" for topic, those in numbers.items())
        or _NONE
    )


def partitions_in(sign: str) -> frozenset[TopicPartition] | None:
    """The partitions that a sign names: on which its streaming run may work; None without any."""
    said = _SAID.fullmatch(sign)
    if said is None:
        return None
    return frozenset(
        TopicPartition(topic, int(number))
        for part in said["partitions"].split(";")
        if part != _NONE
        for topic, _, numbers in [part.partition(":")]
        for number in numbers.split(",")
    )


def timeout_in(sign: str) -> float:
    """The `heartbeat_timeout_s` that a run was told when it began; 0 where the sign has none."""
    number = re.match(_NUMBER, sign)
    return float(number["timeout_s"] or 0) if number else 0.0


def process_in(sign: str) -> str:
    """The process that gave a sign, by the name that it gave itself; empty without a sign."""
    return sign.rpartition(" ")[2]


def _place(number: int) -> str:
    return f"dagster_rebalance/sign_of_life/{number % PLACES}"
