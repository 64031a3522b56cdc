"""Two writers of the same ranges at a random interleaving, either of which may be killed.

    .venv/bin/python -m tests.spark.two_writers --rounds 300 --seed 7

A round plays the file system calls of both writers one by one, in a random order. A killed writer
makes no further call, and cleans nothing up. A random reader reads after each call, and all
readers at the end. A zombie is a writer whose last calls come after the other has ended. Staging
does not depend on the other writer, so most rounds copy files that Spark staged once; with
`--whole`, each writer also stages.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_rebalance.outputs.publication import mounted_publisher
from dagster_rebalance.spark.parquet import _moves, _stage, write_parquet_by_range
from tests.spark.readers import LIBRARIES, Reader, by_spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import SparkSession

RANGES = ((0, 4), (4, 9), (9, 12))
TOPIC = "007"
WRITERS = ("before", "a", "b")
# Calls that change the files of a reader.
CALLS = ("makedirs", "replace", "rename", "unlink", "rmdir")
WAIT_S = 120.0


class Killed(BaseException):
    """The process of this writer was killed."""


@dataclass
class Writer:
    """A thread that writes, and waits before each of its calls for permission."""

    name: str
    kill_at: int | None
    calls: int = 0
    ended: bool = False
    error: BaseException | None = None
    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    stopped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def before_call(self) -> None:
        """Wait for permission, or be killed."""
        if self.calls == self.kill_at:
            raise Killed
        self.calls += 1
        self.stopped.release()
        if not self.may_go.acquire(timeout=WAIT_S):
            msg = f"{self.name} never got permission"
            raise TimeoutError(msg)

    def run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - recorded
            self.error = error
        self.ended = True
        self.stopped.release()


@dataclass
class Tally:
    rounds: int = 0
    calls: int = 0
    killed: int = 0
    overtaken: int = 0
    wrong: list[str] = field(default_factory=list)


class Staged:
    """The files that Spark staged once for each writer."""

    def __init__(self, session: SparkSession, folder: Path) -> None:
        self._folder = folder
        for name in WRITERS:
            _stage(_records(session, name), str(folder / name))

    def writes(self, root: Path) -> Callable[[str], object]:
        """Copy the staged files beside an output, and return a function that publishes them."""
        beside = root.parent / ".out-staging"
        shutil.copytree(self._folder, beside)
        files = {
            name: [path.as_uri() for path in (beside / name).rglob("*.parquet")] for name in WRITERS
        }

        def write(name: str) -> None:
            staging, output, moves = _moves(files[name], name)
            mounted_publisher()(output, list(moves), list(moves.values()), staging)

        return write


def play(session: SparkSession, rounds: int, seed: int, *, whole: bool) -> Tally:
    """Play rounds of two writers each with Spark, and return the findings of their readers."""
    with tempfile.TemporaryDirectory(prefix="two-writers-staged-") as name:
        staged = Staged(session, Path(name))

        def writes(root: Path) -> Callable[[str], object]:
            return partial(_write_whole, session, root) if whole else staged.writes(root)

        return play_writers(
            rounds, seed, writes, {**LIBRARIES, "spark": partial(by_spark, session)}
        )


def play_writers(
    rounds: int,
    seed: int,
    writes: Callable[[Path], Callable[[str], object]],
    readers: Mapping[str, Reader],
) -> Tally:
    """Play rounds of two writers each, and return the findings of their readers.

    `writes` returns the function by which a writer, given its name, writes to an output.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="two-writers-") as name:
        for number in range(rounds):
            chance = random.Random(f"{seed}-{number}")  # noqa: S311 - a draw, no secret
            root = Path(name) / str(number) / "out"
            root.parent.mkdir()
            _play_round(readers, root, chance, tally, writes(root))
            shutil.rmtree(root.parent)
    return tally


def _write_whole(session: SparkSession, root: Path, name: str) -> None:
    write_parquet_by_range(_records(session, name), str(root))


def _play_round(
    readers: Mapping[str, Reader],
    root: Path,
    chance: random.Random,
    tally: Tally,
    write: Callable[[str], object],
) -> None:
    tally.rounds += 1
    was_there = chance.random() < 0.5
    if was_there:
        write("before")
    writers = [
        Writer(name, chance.randrange(9) if chance.random() < 0.5 else None) for name in ("a", "b")
    ]
    by_thread: dict[int, Writer] = {}

    def work(writer: Writer) -> None:
        by_thread[threading.get_ident()] = writer
        write(writer.name)

    order = ""
    with _calls_stop(by_thread):
        threads = [
            threading.Thread(target=writer.run, args=[partial(work, writer)]) for writer in writers
        ]
        for thread in threads:
            thread.start()
        for writer in writers:
            assert writer.stopped.acquire(timeout=WAIT_S), f"{writer.name} staged nothing"
        while alive := [writer for writer in writers if not writer.ended]:
            writer = chance.choice(alive)
            order += writer.name
            writer.may_go.release()
            assert writer.stopped.acquire(timeout=WAIT_S), f"{writer.name} hangs"
            _check(
                root,
                tally,
                order,
                dict([chance.choice(list(LIBRARIES.items()))]),
                is_whole=was_there,
            )
        for thread in threads:
            thread.join(WAIT_S)
    tally.calls += len(order)
    tally.killed += sum(isinstance(writer.error, Killed) for writer in writers)
    tally.overtaken += "ab" in order and "ba" in order
    for writer in writers:
        if writer.error and not isinstance(writer.error, Killed):
            tally.wrong.append(f"{order}: {writer.name} failed: {writer.error!r}")
    one_is_done = was_there or any(writer.error is None for writer in writers)
    _check(root, tally, f"{order}, at the end", readers, is_whole=one_is_done)


def _check(
    root: Path, tally: Tally, when: str, readers: Mapping[str, Reader], *, is_whole: bool
) -> None:
    """Each reader finds each record at most once, and each range as a whole or not at all."""
    if not list(root.rglob("*.parquet")):
        if is_whole:
            tally.wrong.append(f"{when}: nothing is there")
        return
    for name, read in readers.items():
        try:
            found = Counter(read(root))
        except Exception as error:  # noqa: BLE001 - a finding
            tally.wrong.append(f"{when}: {name} cannot read it: {error}")
            continue
        tally.wrong += [
            f"{when}: {name} finds {record} {count} times"
            for record, count in found.items()
            if count > 1
        ]
        for start, until in RANGES:
            there = sum((TOPIC, offset) in found for offset in range(start, until))
            if there != until - start and (there or is_whole):
                tally.wrong.append(f"{when}: {name} finds {there} of the range {start} to {until}")


def _records(session: SparkSession, value: str) -> Any:  # noqa: ANN401 - of either kind of session
    cases = " ".join(f"WHEN id < {until} THEN array({start}, {until})" for start, until in RANGES)
    return session.sql(
        f"SELECT '{TOPIC}' AS topic, 0 AS partition, id AS offset, '{value}' AS value, "  # noqa: S608
        f"(CASE {cases} END)[0] AS range_start, (CASE {cases} END)[1] AS range_until FROM "
        f"range({RANGES[-1][1]})"
    )


@contextmanager
def _calls_stop(by_thread: dict[int, Writer]) -> Iterator[None]:
    """Let each file system call of a writer wait for permission."""

    def stopping(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            writer = by_thread.get(threading.get_ident())
            if writer is not None:
                writer.before_call()
            return real(*args, **kwargs)

        return call

    real = {name: getattr(os, name) for name in CALLS}
    for name, call in real.items():
        setattr(os, name, stopping(call))
    try:
        yield
    finally:
        for name, call in real.items():
            setattr(os, name, call)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--session", choices=["classic", "connect"], default="classic")
    parser.add_argument("--whole", action="store_true", help="each writer reads and stages, too")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        tally = play(_session(given.session, stack), given.rounds, given.seed, whole=given.whole)
    for line in tally.wrong:
        print(line)  # noqa: T201
    print(  # noqa: T201
        f"seed {given.seed}, {given.session}: {tally.rounds} rounds, {tally.calls} interleaved "
        f"calls, {tally.overtaken} rounds in which "
        f"each overtook the other, {tally.killed} writers killed, {len(tally.wrong)} findings"
    )
    return 1 if tally.wrong else 0


def _session(kind: str, stack: ExitStack) -> Any:  # noqa: ANN401
    if kind == "connect":
        from pyspark.sql.connect.session import SparkSession as ConnectSession  # noqa: PLC0415

        from dagster_rebalance.testing.spark_connect import SparkConnectServer  # noqa: PLC0415

        server = stack.enter_context(SparkConnectServer())
        return ConnectSession.builder.remote(server.remote).create()
    from pyspark.sql import SparkSession  # noqa: PLC0415

    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    stack.callback(session.stop)
    return session


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
