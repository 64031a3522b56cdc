"""Which streaming runs a sensor starts and asks to leave, from what Dagster shows alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dagster_rebalance.core.runs.retry import RetryBackoff
from dagster_rebalance.core.streaming.replicas import Leave, Replicas, StreamingRun, reconcile

NOW = 100_000.0
TWO = Replicas(2, "v1", backoff=RetryBackoff(5.0, 900.0))


def run(name: str, slot: int | None, **said: object) -> StreamingRun:
    """A streaming run that works since ten minutes, unless told otherwise."""
    known: dict[str, object] = {
        "version": "v1",
        "created_at": NOW - 610,
        "started_at": NOW - 600,
        "has_joined": True,
    }
    return StreamingRun(run_id=name, slot=slot, **{**known, **said})  # type: ignore[arg-type]


def failed(name: str, slot: int, ago_s: float) -> StreamingRun:
    """A run that ended badly after a second."""
    return run(
        name,
        slot,
        created_at=NOW - ago_s - 2,
        started_at=NOW - ago_s - 1,
        ended_at=NOW - ago_s,
        has_failed=True,
        has_joined=False,
    )


def test_slot_without_a_run_is_started() -> None:
    assert [start.slot for start in reconcile(TWO, [], NOW).starts] == [0, 1]
    assert [start.slot for start in reconcile(TWO, [run("a", 0)], NOW).starts] == [1]


def test_working_runs_need_no_action() -> None:
    assert reconcile(TWO, [run("a", 0), run("b", 1)], NOW) == reconcile(Replicas(0, "v1"), [], NOW)


def test_start_has_the_same_key_until_dagster_has_the_run() -> None:
    (first, _) = reconcile(TWO, [], NOW).starts
    assert reconcile(TWO, [], NOW + 1).starts[0] == first
    after = reconcile(TWO, [run("a", 0, ended_at=NOW - 1)], NOW).starts[0]
    assert after.key != first.key


def test_slot_of_a_deleted_run_is_started_with_another_key() -> None:
    assert reconcile(TWO, [], NOW).starts[0].key != reconcile(TWO, [], NOW + 120).starts[0].key


@pytest.mark.parametrize(
    ("new", "asked"),
    [
        ({"started_at": None, "has_joined": False, "created_at": NOW - 3}, False),
        ({"started_at": NOW - 3, "has_joined": False, "created_at": NOW - 5}, False),
        ({"started_at": NOW - 3, "has_joined": True, "created_at": NOW - 5}, True),
        ({"started_at": NOW - 90, "has_joined": False, "ready_since": NOW - 31}, True),
        ({"started_at": NOW - 90, "has_joined": False, "ready_since": NOW - 29}, False),
        ({"started_at": NOW - 70, "has_joined": False}, False),
        (
            {
                "started_at": None,
                "has_joined": False,
                "queued_at": NOW - 61,
            },
            True,
        ),
        ({"started_at": None, "has_joined": False, "created_at": NOW - 61}, False),
        ({"started_at": None, "has_joined": False, "created_at": 0.0, "queued_at": NOW - 9}, False),
    ],
    ids=[
        "queued",
        "starting",
        "joined",
        "too many for the partitions",
        "may be given some soon",
        "does not reach Kafka",
        "stuck in the queue",
        "its image cannot be pulled",
        "the database has another zone",
    ],
)
def test_new_version_joins_before_the_old_run_leaves(
    new: dict[str, object], *, asked: bool
) -> None:
    old, other = run("old", 0), run("b", 1, version="v2")
    fleet = replace(TWO, version="v2")
    assert [start.slot for start in reconcile(fleet, [old, other], NOW).starts] == [0]
    found = reconcile(fleet, [old, other, run("new", 0, version="v2", **new)], NOW)
    assert found.starts == ()
    assert found.leaves == ((Leave("old", "run new has newer code"),) if asked else ())


def test_new_version_replaces_the_only_owner_of_the_only_partition() -> None:
    new = run("new", 0, version="v2", has_joined=False, ready_since=NOW - 31)
    found = reconcile(Replicas(1, "v2"), [run("old", 0), new], NOW)
    assert found.leaves == (Leave("old", "run new has newer code"),)


def test_run_that_never_leaves_does_not_block_other_replacements() -> None:
    fleet = Replicas(2, "v2", leave_limit_s=90.0)
    new = [run("c", 0, version="v2"), run("d", 1, version="v2")]
    for since_s, leaves in ((89.0, []), (90.0, ["b"])):
        live = [run("a", 0, leaving_since=NOW - since_s), run("b", 1), *new]
        found = reconcile(fleet, live, NOW)
        assert [leave.run_id for leave in found.leaves] == leaves
        assert found.notes == (f"run a is leaving for {since_s:.0f} s",)


def test_version_that_never_joins_replaces_nothing() -> None:
    fleet = replace(TWO, version="v2")
    new = {"version": "v2", "started_at": NOW - 900, "has_joined": False}
    live = [run("a", 0), run("b", 1), run("c", 0, **new), run("d", 1, **new)]
    assert reconcile(fleet, live, NOW).leaves == ()


def test_full_queue_costs_at_most_one_run() -> None:
    fleet = replace(TWO, version="v2")
    stuck = {"version": "v2", "started_at": None, "has_joined": False, "queued_at": NOW - 600}
    new = [run("c", 0, **stuck), run("d", 1, **stuck)]
    assert len(reconcile(fleet, [run("a", 0), run("b", 1), *new], NOW).leaves) == 1
    assert reconcile(fleet, [run("b", 1), *new], NOW).leaves == ()


def test_leaves_are_one_at_a_time() -> None:
    fleet = replace(TWO, version="v2")
    old = [run("a", 0), run("b", 1)]
    new = [run("c", 0, version="v2"), run("d", 1, version="v2")]
    assert [leave.run_id for leave in reconcile(fleet, [*old, *new], NOW).leaves] == ["a"]
    leaving = [replace(old[0], leaving_since=NOW - 5), old[1], *new]
    assert reconcile(fleet, leaving, NOW).leaves == ()
    assert reconcile(fleet, leaving, NOW).notes == ("run a is leaving",)
    assert [leave.run_id for leave in reconcile(fleet, [old[1], *new], NOW).leaves] == ["b"]


def test_version_that_never_works_replaces_nothing() -> None:
    fleet = replace(TWO, version="v2", runs=1)
    bad = [replace(failed(f"bad{n}", 0, 1000 - n), version="v2") for n in range(9)]
    found = reconcile(fleet, [run("good", 0), *bad], NOW)
    assert found.leaves == ()


def test_slot_with_failed_runs_waits_longer_each_time() -> None:
    one = replace(TWO, runs=1)
    assert reconcile(one, [failed("a", 0, 4)], NOW).starts == ()
    assert reconcile(one, [failed("a", 0, 6)], NOW).starts
    two = [failed("a", 0, 60), failed("b", 0, 20)]
    assert reconcile(one, two, NOW).starts == ()
    (note,) = reconcile(one, two, NOW).notes
    assert note == (
        "slot 0: 2 runs in a row failed, the last one is run b; the next one starts in 10 s"
    )


def test_run_that_worked_long_ends_the_row_of_failures() -> None:
    worked = run("a", 0, started_at=NOW - 2000, ended_at=NOW - 1, has_failed=True)
    fresh = [failed("b", 0, 3000), failed("c", 0, 2500), worked]
    assert reconcile(replace(TWO, runs=1), fresh, NOW).starts


def test_failures_of_another_version_do_not_count() -> None:
    old = [failed("a", 0, 2), failed("b", 0, 1)]
    assert reconcile(Replicas(1, "v2"), old, NOW).starts


def test_old_run_is_replaced() -> None:
    fleet = Replicas(1, "v1", max_run_s=500.0)
    assert [start.slot for start in reconcile(fleet, [run("a", 0)], NOW).starts] == [0]
    new = run("b", 0, created_at=NOW - 10, started_at=NOW - 5)
    assert reconcile(fleet, [run("a", 0), new], NOW).leaves == (
        Leave("a", "run b has taken its place"),
    )


@pytest.mark.parametrize("slot", [2, None])
def test_surplus_run_is_asked_to_leave(slot: int | None) -> None:
    found = reconcile(TWO, [run("a", 0), run("b", 1), run("c", slot)], NOW)
    assert found.leaves == (Leave("c", "2 runs are wanted"),)


def test_leaving_run_is_replaced_at_once() -> None:
    found = reconcile(TWO, [run("a", 0, leaving_since=NOW), run("b", 1)], NOW)
    assert [start.slot for start in found.starts] == [0]
