"""Heartbeats of runs: text that the process of a run writes repeatedly, and members compare.

Runs share a fixed number of key-values, by their storage ids. If a run that starts ten thousand
runs later overwrites the slot of a run, the earlier run overwrites it again with its next
heartbeat. In Dagster+, without key-values, a heartbeat is an event in the log of its run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.orchestration.storage.key_values import KeyValues, owned

if TYPE_CHECKING:
    from collections.abc import Mapping

SLOTS = 10_000
_NO_PARTITIONS = "-"
_TOPIC = r"[A-Za-z0-9._-]+:[0-9]+(?:,[0-9]+)*"
_NUMBER = r"[0-9]+(?:/(?P<timeout_s>[0-9]+(?:\.[0-9]+)?(?:e\+[0-9]+)?))?"
"""The number of the heartbeat, and the timeout of its run."""
_PARTITIONS = re.compile(rf"{_NO_PARTITIONS}|{_TOPIC}(?:;{_TOPIC})*")
_TEXTS_KEPT = 32
_EVENT_PREFIX = "dagster_rebalance sign of life: "


class Heartbeats:
    """The heartbeats of all runs of an instance."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance
        self._values = KeyValues(instance)

    def record(self, run: dg.DagsterRun, number: int, heartbeat: str) -> None:
        """Replace the last heartbeat of a run; `number` is the storage id of the run."""
        if not self._values.set(_key(number), f"{run.run_id} {heartbeat}"):
            self._instance.report_engine_event(f"{_EVENT_PREFIX}{heartbeat}", run)

    def read(self, numbers: Mapping[str, int]) -> dict[str, str]:
        """Return the last heartbeat of each run that has one, given `{run id: storage id}`."""
        keys = {run_id: _key(number) for run_id, number in numbers.items()}
        stored = self._values.fetch(keys.values())
        if stored is None:
            return {run_id: text for run_id in numbers if (text := self._read_event(run_id))}
        return owned(stored, keys)

    def _read_event(self, run_id: str) -> str:
        entries = self._instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        messages = [entry.dagster_event.message or "" for entry in entries if entry.dagster_event]
        texts = [m.removeprefix(_EVENT_PREFIX) for m in messages if m.startswith(_EVENT_PREFIX)]
        return texts[-1] if texts else ""


@lru_cache(maxsize=1)
def format_partitions(partitions: frozenset[TopicPartition]) -> str:
    """Format partitions for the heartbeat of a run: `orders:0,1;payments:3`, or `-` for none.

    Heartbeats mostly name the same partitions. A frozen set computes its hash only once.
    """
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for partition in sorted(partitions):
        numbers[partition.topic].append(partition.partition)
    topics = (f"{topic}:{','.join(map(str, found))}" for topic, found in numbers.items())
    return ";".join(topics) or _NO_PARTITIONS


def partitions_in(heartbeat: str) -> frozenset[TopicPartition] | None:
    """Return the partitions that a streaming run may process; None if the heartbeat names none."""
    number, _, rest = heartbeat.partition(" ")
    text, _, process = rest.partition(" ")
    is_complete = re.fullmatch(_NUMBER, number) and process and " " not in process
    return _partitions_in(text) if is_complete else None


@lru_cache(maxsize=_TEXTS_KEPT)
def _partitions_in(text: str) -> frozenset[TopicPartition] | None:
    """Return the partitions of a heartbeat. Consecutive heartbeats of a run name the same."""
    if _PARTITIONS.fullmatch(text) is None:
        return None
    return frozenset(
        TopicPartition(topic, int(number))
        for part in text.split(";")
        if part != _NO_PARTITIONS
        for topic, _, numbers in [part.partition(":")]
        for number in numbers.split(",")
    )


def timeout_in(heartbeat: str) -> float:
    """Return the `heartbeat_timeout_s` that the run began with; 0 if the heartbeat has none."""
    match = re.match(_NUMBER, heartbeat)
    return float(match["timeout_s"] or 0) if match else 0.0


def process_in(heartbeat: str) -> str:
    """Return the identity of the process that sent a heartbeat; empty without a heartbeat."""
    return heartbeat.rpartition(" ")[2]


def _key(number: int) -> str:
    return f"dagster_rebalance/sign_of_life/{number % SLOTS}"
