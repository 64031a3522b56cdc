"""`batch_tick` and `dagster_bytes`: what a group with many partitions costs Dagster.

They measure the ticks of a sensor whose member has many active partitions, and the growth of
Dagster's SQLite files.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.deployment import AT_ONCE, QUEUED, CodeLocation, DagsterDeployment
from dagster_rebalance.testing.fixtures import unique_name
from proofs.bench.entries import Entry, Goal, Sample
from proofs.bench.streams import (
    BATCHES,
    LOCATION,
    PEER,
    PROJECT,
    ROOT,
    Body,
    loaded_run,
    turned_on,
    wait_for_commits,
)
from proofs.witness.producer import NumberedProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dagster_rebalance.testing.broker import KafkaCluster

_ACTIVE, _PER_SECOND = 1_000, 2_000
_LAUNCHES = {"the run queue": QUEUED, "runs that start within the tick": AT_ONCE}
"""The run coordinators. The queue is Dagster's default."""
_START_LIMIT_S, _SETTLE_S = 240.0, 15.0
_TICKS_KEPT = 1_000
_BYTES_GOALS = {8: 20, 1_000: 60}
"""Maximum megabytes in a day, by number of partitions."""
_BYTES_PER_SECOND = 1_000
_DAY_S = 86_400


def measure_ticks(
    kafka: KafkaCluster, *, seconds: float, step: Callable[[str], None]
) -> list[Entry]:
    """Let Dagster's daemon evaluate the sensor of per-batch runs, beside that of an empty asset."""
    entries: list[Entry] = []
    for how, settings in _LAUNCHES.items():
        step(f"batch_tick, starting per-batch runs with {_ACTIVE:,} active partitions, {how}")
        ours, peer = _ticks(kafka, settings, seconds, step)
        entries += ticks_entries(how, ours, peer)
    return entries


def _ticks(
    kafka: KafkaCluster, settings: Mapping[str, Any], seconds: float, step: Callable[[str], None]
) -> list[list[dict[str, Any]]]:
    """Return the ticks of both sensors."""
    topic = unique_name("ticked")
    kafka.create_topic(topic, _ACTIVE)
    # Without a wait, each of the first plans takes only the partitions that have records so far, so
    # a tick requests as many runs as may be in flight.
    body = Body(kafka.bootstrap_servers, topic, _ACTIVE, topic, ranges_per_run=_ACTIVE, waits=True)
    location = CodeLocation(LOCATION, PROJECT, ROOT, body.environment)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as home,
        DagsterDeployment(Path(home) / "home", [location], settings=dict(settings)) as dagster,
        NumberedProducer(
            kafka.bootstrap_servers, topic, partitions=_ACTIVE, per_second=_PER_SECOND
        ),
        turned_on(dagster, BATCHES),
    ):
        wait_for_commits(kafka, body, BATCHES, timeout_s=_START_LIMIT_S)
        since = time.time()
        step(f"batch_tick, measuring for {seconds:g} s")
        dagster.ui.start_sensor(LOCATION, f"{PEER}_sensor")
        time.sleep(seconds)
        dagster.ui.stop_sensor(LOCATION, f"{PEER}_sensor")
        found = [
            dagster.ui.ticks(LOCATION, f"{name}_sensor", _TICKS_KEPT) for name in (BATCHES, PEER)
        ]
    kafka.delete_topic(topic)
    return [[one for one in ticks if one["timestamp"] >= since] for ticks in found]


def ticks_entries(
    how: str, ours: Sequence[Mapping[str, Any]], peer: Sequence[Mapping[str, Any]]
) -> Iterator[Entry]:
    """Return the durations of the completed ticks, with and without run requests.

    `how` is the run coordinator. The part of the peer is Dagster's own: it evaluates a sensor that
    has a resource and does nothing, and creates a run of an empty asset.
    """
    if not any(one["endTimestamp"] for one in ours):
        msg = "the sensor has completed no tick"
        raise DagsterRebalanceError(msg)
    for what, with_runs in (("without a run request", False), ("with run requests", True)):
        mine, others = (_completed(ticks, with_runs=with_runs) for ticks in (ours, peer))
        if mine:
            alone_s = median(map(_seconds, others)) if others else None
            runs = sum(len(one["runIds"]) for one in mine)
            yield Entry(
                "batch_tick",
                f"a tick {what}, {_ACTIVE:,} active partitions, {how}, beside an empty asset",
                "s",
                "s",
                Goal("<=", 0.5),
                [Sample(_seconds(one), alone_s, _seconds(one)) for one in mine],
                f"{len(mine)} ticks, {runs} runs, by Dagster's times",
            )


def _completed(ticks: Sequence[Mapping[str, Any]], *, with_runs: bool) -> list[Mapping[str, Any]]:
    return [one for one in ticks if one["endTimestamp"] and bool(one["runIds"]) is with_runs]


def _seconds(tick: Mapping[str, Any]) -> float:
    return float(tick["endTimestamp"] - tick["timestamp"])


def measure_bytes(
    kafka: KafkaCluster, *, seconds: float, step: Callable[[str], None]
) -> list[Entry]:
    """Measure the growth of Dagster's SQLite files under streaming runs, scaled to a day."""
    entries = []
    for partitions, goal in _BYTES_GOALS.items():
        step(f"dagster_bytes, {partitions:,} partitions, for {seconds:g} s")
        with loaded_run(
            kafka, partitions, per_second=_BYTES_PER_SECOND, waits=True, rows=True
        ) as loaded:
            time.sleep(_SETTLE_S)
            before, since = sqlite_bytes(loaded.home), time.monotonic()
            time.sleep(seconds)
            grown, passed_s = sqlite_bytes(loaded.home) - before, time.monotonic() - since
        entries.append(bytes_entry(partitions, goal, grown, passed_s))
    return entries


def bytes_entry(partitions: int, goal: float, grown: int, seconds: float) -> Entry:
    """Return the growth in a number of seconds, scaled to a day."""
    return Entry(
        "dagster_bytes",
        f"{partitions:,} partitions, {_BYTES_PER_SECOND:,} records/s, SQLite",
        "MB in a day",
        "kB",
        Goal("<=", goal),
        [Sample(grown / 1e3, None, grown / 1e6 * _DAY_S / seconds)],
        f"in {seconds:.0f} s",
    )


def sqlite_bytes(home: Path) -> int:
    """Return the size of the pages in use in all SQLite files, with those of the write-ahead logs.

    The files of the logs would also count pages that were written repeatedly.
    """
    total = 0
    for file in home.rglob("*.db"):
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=60)) as database:
            count, free, size = (
                database.execute(f"PRAGMA {what}").fetchone()[0]
                for what in ("page_count", "freelist_count", "page_size")
            )
        total += (count - free) * size
    return total
