"""The journal of a run: when its assets began and ended work on which batch.

The assets themselves write it, because a streaming run has one Dagster run for many batches. Every
run imports this module, so it imports almost nothing.
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
"""A batch may be interrupted between two assets, so it counts as idle there."""


@dataclass(frozen=True, slots=True)
class BodySeen:
    """A batch in a journal.

    Attributes:
        run_id: The run.
        batch_id: The batch.
        keys: Its ranges, each as `topic-partition-start-until`.
        began_at: Start of the first asset, in seconds since 1970.
        ended_at: End of the last asset, or of the last one that was followed by none; None if the
            journal ends inside an asset.
        is_done: Whether all assets succeeded.
    """

    run_id: str
    batch_id: str
    keys: tuple[str, ...]
    began_at: float
    ended_at: float | None = None
    is_done: bool = False


@dataclass
class Journal:
    """The journal of one run. It stays open, so a run that can open no files still writes it."""

    path: Path
    _batch_id: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._file = self.path.open("a", buffering=1)

    @contextmanager
    def step(self, batch_id: str, keys: Iterable[str], *, is_last: bool) -> Iterator[None]:
        """Write an event of one of the assets of a batch."""
        if batch_id != self._batch_id:
            self._batch_id = batch_id
            self._write(_BEGAN, batch_id, *keys)
        else:
            self._write(_GOES_ON, batch_id)
        try:
            yield
        except BaseException:
            self._write(_LEFT, batch_id)
            self._batch_id = ""
            raise
        self._write(_DONE if is_last else _RESTS, batch_id)

    def _write(self, *words: str) -> None:
        self._file.write(f"{time.time()} {' '.join(words)}\n")


def read_journals(folder: Path) -> list[BodySeen]:
    """Return all batches of all runs, those of each run in order."""
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
