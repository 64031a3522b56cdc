"""What a streaming run tells of claims that it has left to others, and where its signs of life are.

Whoever finds a claim that names a streaming run asks whether that run is over. One that lives on
without the partition says here how its work on the claim ended, or that it has not ended yet, by
saying nothing. And people may delete a run while it works: then its number says where its signs of
life are. These notes are kept like `range_owners`, in places of their own: another run may work on
the same claim later, and note that.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from dagster_rebalance.core.runs.stream_batch import Outcome, StreamBatch
from dagster_rebalance.orchestration.storage.range_owners import Places, name_of, place

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import dagster as dg

    from dagster_rebalance.core.model.commands import Claimed

_SHARED_BY = 8
"""Claims whose names fall on one place share it: so many of them, the newest."""


class AbandonedClaims:
    """The notes of all streaming runs of an instance."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._places = Places(instance)

    def tell(self, outcomes: Mapping[Claimed, Outcome]) -> None:
        """Note how the work on claims ended, of those that were begun."""
        told: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for claim, outcome in outcomes.items():
            if outcome is Outcome.DROPPED:
                continue
            told[_place(claim)][name_of(claim)] = outcome.value
        stored = self._places.get(told)
        self._places.put(
            {
                where: _written({**_named(stored.get(where, "")), **ends})
                for where, ends in told.items()
            }
        )

    def read(self, claims: Iterable[Claimed]) -> dict[Claimed, Outcome]:
        """How the work on claims ended, of those of which the run has said so."""
        wanted = {claim: _place(claim) for claim in claims}
        stored = self._places.get(wanted.values())
        found = {}
        for claim, where in wanted.items():
            ends = _named(stored.get(where, ""))
            if name_of(claim) in ends:
                found[claim] = Outcome(ends[name_of(claim)])
        return found

    def tell_number(self, run_id: str, number: int) -> None:
        """Note where a streaming run gives its signs of life."""
        self._places.put({_place_of(run_id): f"{run_id} {number}"})

    def tell_begun(self, run_id: str, batch_id: str, at: float) -> None:
        """Note which batch a streaming run works on, and since when, in seconds since 1970."""
        self._places.put({_begun_by(run_id): f"{run_id} {batch_id} {at:.0f}"})

    def begun(self, run_ids: Collection[str]) -> dict[str, float]:
        """Since when batches are at work, of those that streaming runs have noted."""
        places = {run_id: _begun_by(run_id) for run_id in run_ids}
        stored = self._places.get(places.values())
        found = {}
        for run_id, where in places.items():
            whose, _, said = stored.get(where, "").partition(" ")
            batch_id, _, at = said.partition(" ")
            if whose == run_id and at.isdecimal():
                found[batch_id] = float(at)
        return found

    def forget(self, run_id: str) -> None:
        """Forget a deleted streaming run of which nothing works any more."""
        if self.number(run_id) is not None:
            self._places.put({_place_of(run_id): ""})

    def number(self, run_id: str) -> int | None:
        """Where a streaming run gives its signs of life; None when that is not known."""
        whose, _, number = (
            self._places.get([_place_of(run_id)]).get(_place_of(run_id), "").partition(" ")
        )
        return int(number) if whose == run_id and number.isdecimal() else None


def streamed(claims: Iterable[Claimed]) -> dict[Claimed, StreamBatch]:
    """Those of the claims that streaming runs have made."""
    return {claim: batch for claim in claims if (batch := StreamBatch.read(claim[0])) is not None}


def _named(text: str) -> dict[str, str]:
    """How the work on each claim ended that shares a place, the newest last."""
    words = text.split(" ")
    return dict(zip(words[1::2], words[::2], strict=False))


def _written(ends: Mapping[str, str]) -> str:
    newest = list(ends.items())[-_SHARED_BY:]
    return " ".join(word for name, outcome in newest for word in (outcome, name))


def _place(claim: Claimed) -> str:
    return place("left", name_of(claim))


def _begun_by(run_id: str) -> str:
    return place("begun", run_id)


def _place_of(run_id: str) -> str:
    return place("streams", run_id)
