"""The journal of a run says when the function of its assets began and ended with which batch.

A streaming run has no Dagster run for each batch, and no member is asked. So the assets themselves
write down when they work, and on what. Owns the form of the journal. Imports next to nothing: every
run waits for it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_BEGAN, _DONE, _LEFT = "began", "done", "left"
_RESTS, _GOES_ON = "rests", "goes_on"
"""Between two assets nothing is at work: a batch may be interrupted there."""


@dataclass(frozen=True, slots=True)
class BodySeen:
    """A batch at work, as its assets wrote it down.

    Attributes:
        run_id: The run.
        batch_id: The batch.
        keys: Its ranges, each as `topic-partition-start-until`.
        began_at: When the first asset began, in seconds since 1970.
        ended_at: When the last one was done, one raised, or one was done and no other followed;
            None when nothing was written any more.
        is_done: Whether all assets came to their end.
    """

    run_id: str
    batch_id: str
    keys: tuple[str, ...]
    began_at: float
    ended_at: float | None = None
    is_done: bool = False


@dataclass
class Journal:
    """The journal of one run. It stays open: a run that can open no file any more writes on.

    Attributes:
        path: Its file, which is named after the run.
    """

    path: Path
    _batch_id: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._file = self.path.open("a", buffering=1)

    @contextmanager
    def step(self, batch_id: str, keys: Iterable[str], *, is_last: bool) -> Iterator[None]:
        """Write down what becomes of one of the assets of a batch."""
        if batch_id != self._batch_id:
            self._batch_id = batch_id
            self._write(_BEGAN, batch_id, *keys)
        else:
            self._write(_GOES_ON, batch_id)
        try:
            yield
        except BaseException:
            self._write(_LEFT, batch_id)
            raise
        self._write(_DONE if is_last else _RESTS, batch_id)

    def _write(self, *words: str) -> None:
        self._file.write(f"{time.time()} {' '.join(words)}\n")


def read_journals(folder: Path) -> list[BodySeen]:
    """All batches of all runs, those of each run in their order."""
    return [body for path in sorted(folder.iterdir()) for body in _read(path)]


def _read(path: Path) -> Iterator[BodySeen]:
    at_work: BodySeen | None = None
    rests_at: float | None = None
    for line in path.read_text().splitlines():
        at, word, batch_id, *keys = line.split(" ")
        if word == _BEGAN:
            if at_work is not None:
                yield replace(at_work, ended_at=rests_at)
            at_work, rests_at = BodySeen(path.name, batch_id, tuple(keys), float(at)), None
        elif word in {_GOES_ON, _RESTS}:
            rests_at = float(at) if word == _RESTS else None
        elif at_work is not None:
            yield replace(at_work, ended_at=float(at), is_done=word == _DONE)
            at_work = None
    if at_work is not None:
        yield replace(at_work, ended_at=rests_at)
