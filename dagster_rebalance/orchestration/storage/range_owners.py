"""Records which run processes a claimed range. They survive the deletion of the run.

When a user deletes a run, Dagster removes its tags, its events and its storage id, but its process
may continue. So each run records its ranges before it processes them, and the owner of a partition
reads the records of runs that are no longer in Dagster. Streaming runs also record the outcomes of
abandoned claims. Dagster+ has no such records.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_rebalance.core.runs.stream_batch import BatchOutcome, StreamBatch
from dagster_rebalance.orchestration.storage.key_values import KeyValues, slot_key
from dagster_rebalance.orchestration.storage.run_tags import format_range

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import dagster as dg

    from dagster_rebalance.core.model.commands import Claimed

_AT_WORK, _FINISHED = "at_work", "finished"
_CLAIMS_PER_SLOT = 8
"""The newest outcomes of claims that share a slot."""


@dataclass(frozen=True, slots=True)
class ProcessingRun:
    """The run that last recorded a range.

    Attributes:
        run_id: The run.
        storage_id: The storage id of the run, by which its heartbeats are found.
        is_finished: Whether its process has reported that it is finished.
    """

    run_id: str
    storage_id: int
    is_finished: bool


class RangeOwners:
    """The range owners of all runs of an instance.

    A record may be overwritten by that of another claim: all claims share a fixed number of
    slots. Then a deleted run is not found, and `finish` records nothing for any claim of its run.
    """

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._values = KeyValues(instance)

    def begin(self, run_id: str, storage_id: int, claims: Collection[Claimed]) -> None:
        """Record that a run is about to process all of its claims."""
        self._write(ProcessingRun(run_id, storage_id, is_finished=False), claims)

    def _write(self, owner: ProcessingRun, claims: Collection[Claimed]) -> None:
        state = _FINISHED if owner.is_finished else _AT_WORK
        prefix = [owner.run_id, str(owner.storage_id), state]
        # A slot names only the claims that share it: a batch may have a claim on each of a
        # thousand partitions.
        names: defaultdict[str, list[str]] = defaultdict(list)
        for claim in claims:
            names[_owner_key(claim)].append(_name(claim))
        self._values.write({key: " ".join([*prefix, *found]) for key, found in names.items()})

    def finish(self, run_id: str, storage_id: int, claims: Collection[Claimed]) -> None:
        """Record that a run no longer processes its claims, unless another run took over any."""
        owners = self.read(claims)
        if all(claim in owners and owners[claim].run_id == run_id for claim in claims):
            self._write(ProcessingRun(run_id, storage_id, is_finished=True), claims)

    def erase(self, run_id: str, claims: Iterable[Claimed]) -> None:
        """Erase the records of a run that has ended."""
        owners = self.read(claims)
        self._values.write({_owner_key(c): "" for c, o in owners.items() if o.run_id == run_id})

    def read(self, claims: Iterable[Claimed]) -> dict[Claimed, ProcessingRun]:
        """Return the recorded owners of claimed ranges."""
        keys = {claim: _owner_key(claim) for claim in claims}
        stored = self._values.read(keys.values())
        owners = {}
        for claim, key in keys.items():
            run_id, storage_id, state, *names = (stored.get(key) or "- 0 -").split(" ")
            if _name(claim) in names:
                owners[claim] = ProcessingRun(run_id, int(storage_id), state == _FINISHED)
        return owners


class StreamingRunRecords:
    """The outcomes of abandoned claims, of all streaming runs of an instance.

    The next owner of a claim must detect whether the streaming run that made the claim still works
    on it. A claim without a record is being worked on while the run lists its partition as active.
    After that, it counts as not processed and is requested again: an outcome must never be recorded
    after the run has ceased to list the partition. The keys differ from those of `RangeOwners`,
    because another run may process the same claim later.
    """

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._values = KeyValues(instance)

    def record(self, outcomes: Mapping[Claimed, BatchOutcome]) -> None:
        """Record the outcomes of claims.

        `DROPPED` is never stored, because a missing record means the same.
        """
        new: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for claim, outcome in outcomes.items():
            if outcome is not BatchOutcome.DROPPED:
                new[_outcome_key(claim)][_name(claim)] = outcome.value
        stored = self._values.read(new)
        self._values.write(
            {
                key: _format_outcomes({**_parse_outcomes(stored.get(key, "")), **ended})
                for key, ended in new.items()
            }
        )

    def read(self, claims: Iterable[Claimed]) -> dict[Claimed, BatchOutcome]:
        """Return the recorded outcomes of claims."""
        keys = {claim: _outcome_key(claim) for claim in claims}
        stored = self._values.read(keys.values())
        outcomes = {}
        for claim, key in keys.items():
            ended = _parse_outcomes(stored.get(key, ""))
            if _name(claim) in ended:
                outcomes[claim] = BatchOutcome(ended[_name(claim)])
        return outcomes

    def record_storage_id(self, run_id: str, storage_id: int) -> None:
        """Record the storage id of a streaming run, by which its heartbeats are found."""
        self._values.write({_storage_id_key(run_id): f"{run_id} {storage_id}"})

    def record_start(self, run_id: str, batch_id: str, at: float) -> None:
        """Record the batch of a streaming run and its start, in seconds since 1970."""
        self._values.write({_start_key(run_id): f"{run_id} {batch_id} {at:.0f}"})

    def start_times(self, run_ids: Collection[str]) -> dict[str, float]:
        """Return the recorded start of the current batch of each run, by batch id."""
        started = self._values.read_owned({run_id: _start_key(run_id) for run_id in run_ids})
        parts = (text.partition(" ") for text in started.values())
        return {batch_id: float(at) for batch_id, _, at in parts if at.isdecimal()}

    def forget(self, run_id: str) -> None:
        """Erase the storage id of a deleted streaming run that has ended."""
        if self.storage_id(run_id) is not None:
            self._values.write({_storage_id_key(run_id): ""})

    def storage_id(self, run_id: str) -> int | None:
        """Return the recorded storage id of a streaming run; None if there is none."""
        storage_id = self._values.read_owned({run_id: _storage_id_key(run_id)}).get(run_id, "")
        return int(storage_id) if storage_id.isdecimal() else None


def stream_batches(claims: Iterable[Claimed]) -> dict[Claimed, StreamBatch]:
    """Return the batches of those claims that name a streaming run."""
    return {claim: batch for claim in claims if (batch := StreamBatch.parse(claim[0])) is not None}


def _parse_outcomes(text: str) -> dict[str, str]:
    """Return `{claim: outcome}` of a slot; the newest claim is the last."""
    parts = text.split(" ")
    return dict(zip(parts[1::2], parts[::2], strict=False))


def _format_outcomes(ended: Mapping[str, str]) -> str:
    newest = list(ended.items())[-_CLAIMS_PER_SLOT:]
    return " ".join(part for name, outcome in newest for part in (outcome, name))


def _name(claim: Claimed) -> str:
    batch_id, range_ = claim
    return f"{batch_id}:{format_range(range_)}"


def _owner_key(claim: Claimed) -> str:
    return slot_key("work", _name(claim))


def _outcome_key(claim: Claimed) -> str:
    return slot_key("left", _name(claim))


def _start_key(run_id: str) -> str:
    return slot_key("begun", run_id)


def _storage_id_key(run_id: str) -> str:
    return slot_key("streams", run_id)
