"""Two writers of the same ranges in a table, at a random interleaving, leave each row once.

A round plays the record batches of both writers one by one, in a random order. A writer that has
begun is overtaken by the other one, as a frozen former owner that continues. It may also fail at
any batch. Before the end of a round, both commit at the same time.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest

from dagster_rebalance.arrow.output import write_postgres
from dagster_rebalance.arrow.range_records import RangeRecords
from tests.arrow.given import SCHEMA, expected, records, span
from tests.arrow.sinks import TABLES, WRITERS, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 120.0
RANGES = [span(0, 4), span(4, 9), span(0, 6, partition=1)]
WHOLE = {value: expected((0, 9, value)) + expected((0, 6, value), partition=1) for value in "zab"}


class Killed(Exception):  # noqa: N818 - no error of the writer
    """The writer ends here."""


@dataclass
class Writer:
    """A thread that writes, and waits before each of its record batches for permission."""

    value: str
    kill_at: int | None
    begun: bool = False
    killed: bool = False
    ended: bool = False
    error: Exception | None = None
    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    stopped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def batches(self, whole: Any) -> Iterator[Any]:  # noqa: ANN401
        """Yield the batches of the first attempt."""
        for number, batch in enumerate(whole):
            self.stopped.release()
            assert self.may_go.acquire(timeout=LIMIT_S)
            if number == self.kill_at:
                self.killed = True
                raise Killed
            yield batch

    def run(self, kind: str, place: str) -> None:
        BY_THREAD[threading.get_ident()] = self
        batches = records(RANGES, self.value).to_batches(max_chunksize=4)
        try:
            WRITERS[kind](pa.RecordBatchReader.from_batches(SCHEMA, batches), place, RANGES)
        except Exception as error:  # noqa: BLE001 - compared below
            self.error = error
        self.ended = True
        self.stopped.release()


BY_THREAD: dict[int, Writer] = {}


@pytest.fixture
def _gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a writer wait while its library has the table open, before each batch."""
    reader = RangeRecords.reader

    def gated(self: RangeRecords, schema: Any = None) -> Any:  # noqa: ANN401
        whole, writer = reader(self, schema), BY_THREAD.get(threading.get_ident())
        if writer is None or writer.begun:
            return whole
        writer.begun = True
        return pa.RecordBatchReader.from_batches(whole.schema, writer.batches(whole))

    monkeypatch.setattr(RangeRecords, "reader", gated)


@pytest.mark.usefixtures("_gates")
@pytest.mark.parametrize("kind", TABLES)
def test_two_writers_at_any_interleaving_leave_each_row_once(
    kind: str, place_for: Callable[[str], str]
) -> None:
    place = place_for(kind)
    killed = overtaken = 0
    WRITERS[kind](records(RANGES, "z"), place, RANGES)
    for seed in range(12):
        chance = random.Random(seed)  # noqa: S311 - a draw, no secret
        before = rows(kind, place)
        writers = [
            Writer(value, chance.randrange(4) if chance.random() < 0.25 else None) for value in "ab"
        ]
        order = _play(writers, kind, place, chance)
        assert [one.error for one in writers if one.error and not one.killed] == []
        done = [one.value for one in writers if one.error is None]
        found = rows(kind, place)
        assert found in ([WHOLE[value] for value in done] or [before]), order
        killed += 2 - len(done)
        overtaken += "ab" in order and "ba" in order
    assert killed, "no writer was killed"
    assert overtaken, "the writers only took turns"


def _play(writers: list[Writer], kind: str, place: str, chance: random.Random) -> str:
    order = ""
    threads = [threading.Thread(target=one.run, args=(kind, place)) for one in writers]
    for thread in threads:
        thread.start()
    for writer in writers:
        assert writer.stopped.acquire(timeout=LIMIT_S)
    at_once = chance.randrange(8)
    while alive := [writer for writer in writers if not writer.ended]:
        going = alive if len(order) >= at_once else [chance.choice(alive)]
        for writer in going:
            order += writer.value
            writer.may_go.release()
        for writer in going:
            assert writer.stopped.acquire(timeout=LIMIT_S), f"{writer.value} hangs"
        assert rows(kind, place) in WHOLE.values(), order
    for thread in threads:
        thread.join(LIMIT_S)
    return order


@pytest.mark.parametrize("kind", TABLES)
def test_concurrent_writers_create_a_table_once(kind: str, place_for: Callable[[str], str]) -> None:
    place = place_for(kind)
    start = threading.Barrier(3)
    errors: list[BaseException] = []

    def work(partition: int) -> None:
        ranges = [span(0, 20, partition % 2)]
        try:
            start.wait(LIMIT_S)
            WRITERS[kind](records(ranges), place, ranges)
        except BaseException as error:  # noqa: BLE001 - compared below
            errors.append(error)

    writers = [threading.Thread(target=work, args=(partition,)) for partition in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(2 * LIMIT_S)
    assert errors == []
    assert rows(kind, place) == expected((0, 20, "a")) + expected((0, 20, "a"), partition=1)


@pytest.mark.postgres
def test_writers_that_name_a_table_differently_take_turns(place_for: Callable[[str], str]) -> None:
    place = place_for("postgres")
    with psycopg.connect(place) as database:  # both have deleted before one of them inserts
        database.execute(
            "CREATE FUNCTION shop.wait() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END'; CREATE TRIGGER wait AFTER DELETE ON "
            "shop.orders FOR EACH STATEMENT EXECUTE FUNCTION shop.wait()"
        )
    in_shop = f"{place}?options=-csearch_path%3Dshop"
    names = {"orders": in_shop, "shop.orders": place}
    start = threading.Barrier(len(names))

    def write(table: str, connection: str) -> None:
        start.wait(LIMIT_S)
        write_postgres(records(RANGES), table, RANGES, connection=connection)

    writers = [threading.Thread(target=write, args=one) for one in names.items()]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(LIMIT_S)
    assert rows("postgres", place) == WHOLE["a"]
