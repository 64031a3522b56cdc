"""Offers: asked for again and again under one key, until a run exists."""

from __future__ import annotations

from dataclasses import replace

from dagster_rebalance.core.claims import StoredPartition, encode
from dagster_rebalance.core.ledger import OffsetLedger
from dagster_rebalance.core.offers import Offer, batches_under_way, offers_of
from dagster_rebalance.core.owned_partition import OwnedPartition
from dagster_rebalance.core.ownership import Phase
from dagster_rebalance.core.runs import GaveUp, InFlight, Progress, Succeeded, ToRequest
from tests.core.world import span, tp


def owned(number: int, *work: tuple[str, int, Progress], phase: Phase = Phase.OWNED) -> OwnedPartition:
    """A partition at offset 0 with claims (batch id, until, progress)."""
    ledger = OffsetLedger(tp(number), 1, 0)
    for batch_id, until, progress in work:
        ledger = ledger.claim(batch_id, until)
        ledger = ledger.note(1, ledger.entries[-1].range, progress)
    return OwnedPartition(tp(number), 1, phase, stored=encode(StoredPartition(0)), ledger=ledger)


def test_the_ranges_of_a_batch_at_the_same_attempt_are_one_run() -> None:
    """In order of their partitions, so that the key does not depend on the order of assignment."""
    both = [owned(1, ("b", 5, ToRequest())), owned(0, ("b", 9, ToRequest()))]
    assert offers_of(both) == (Offer("b", 1, (span(0, 0, 9), span(1, 0, 5))),)
    assert offers_of(both)[0].run_key == offers_of(reversed(both))[0].run_key


def test_ranges_of_a_batch_at_different_attempts_are_runs_of_their_own() -> None:
    """After a rebalance a part of a batch may have been asked for more often."""
    parts = [owned(0, ("b", 9, ToRequest(1))), owned(1, ("b", 5, ToRequest(2)))]
    assert offers_of(parts) == (Offer("b", 1, (span(0, 0, 9),)), Offer("b", 2, (span(1, 0, 5),)))


def test_the_run_key_changes_with_the_attempt_and_with_the_ranges() -> None:
    """Dagster ignores a key that it has seen, for ever."""
    offer = Offer("b", 1, (span(0, 0, 9),))
    keys = {
        offer.run_key,
        replace(offer, attempt=2).run_key,
        replace(offer, ranges=(span(0, 0, 8),)).run_key,
        replace(offer, batch_id="c").run_key,
    }
    assert len(keys) == 4
    assert offer.run_key == Offer("b", 1, (span(0, 0, 9),)).run_key
    assert offer.run_key.startswith("b.")


def test_only_what_no_run_works_on_is_offered() -> None:
    """And only while the partition may plan."""
    assert offers_of([owned(0, ("a", 1, Succeeded("r")), ("b", 2, InFlight(("r",))), ("c", 3, GaveUp(("r",))))]) == ()
    for phase in set(Phase) - {Phase.OWNED}:
        assert offers_of([owned(0, ("a", 1, ToRequest()), phase=phase)]) == ()


def test_a_batch_with_a_claim_still_being_written_is_not_offered() -> None:
    """Else a run for a part of it and a run for the whole of it could both start, and refuse each other."""
    written = owned(0, ("b", 9, ToRequest()))
    unwritten = owned(1)
    unwritten = replace(unwritten, pending=unwritten.claim_write("b", 5, now=0.0))
    assert offers_of([written, unwritten]) == ()
    assert offers_of([written, owned(1, ("b", 5, ToRequest()))]) == (Offer("b", 1, (span(0, 0, 9), span(1, 0, 5))),)
    assert offers_of([written, replace(unwritten, phase=Phase.DRAINING)]) == (Offer("b", 1, (span(0, 0, 9),)),)


def test_batches_under_way_are_those_that_take_room() -> None:
    """What a stopped or draining partition does not ask for must not keep the others from working."""
    pending = owned(5)
    partitions = [
        owned(0, ("requested", 1, ToRequest()), ("works", 2, InFlight(("r",)))),
        owned(1, ("failed", 1, GaveUp(("r",))), ("behind", 2, ToRequest()), phase=Phase.STOPPED),
        owned(2, ("draining", 1, InFlight(("r",))), ("left", 2, ToRequest()), phase=Phase.DRAINING),
        owned(3, ("done", 1, Succeeded("r"))),
        replace(pending, pending=pending.claim_write("claiming", 5, now=0.0)),
        replace(pending, pending=pending.first_write(0.0)),
    ]
    assert batches_under_way(partitions) == {"requested", "works", "draining", "claiming"}
