"""Processes of runs are killed between two of their writes, and writes of tags overtake each other.

A run has no transaction: its first sign, its marks, the events of its steps, its output and its
status are writes of their own, in this order. Owns what is there when only the first of them came
to pass. Nothing of it may count for more than it is: the output of a run that nobody shows as
succeeded is done again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proofs.simulation.clockwork import Clockwork
    from proofs.simulation.run_life import RunLife
    from proofs.simulation.weather import Weather


class Torn:
    """Tears what the runs of one Dagster instance write."""

    def __init__(self, life: RunLife, clockwork: Clockwork, weather: Weather) -> None:
        self._life = life
        self._clockwork = clockwork
        self._weather = weather

    def kills(self, run_id: str) -> bool:
        """Whether a process is killed between the writes that it is about to make."""
        return self._happens(run_id, "is killed between two of its writes")

    def loses_last_word(self, run_id: str) -> bool:
        """Whether a process cannot say that it is finished: the storage hangs, and it ends."""
        return self._happens(run_id, "cannot say that it is finished")

    def loses_tag(self, run_id: str) -> bool:
        """Whether the tag that announces a retry is lost: another writer read the tags before."""
        return self._happens(run_id, "loses the tag that announces its retry")

    def refuse_in_part(self, run_id: str, why_not: str) -> None:
        """The mark of a refusal is written, and perhaps its tags; the run is shown as started."""
        if self._clockwork.happens(0.5):
            run = self._life.runs[run_id]
            self._life.runs[run_id] = replace(run, is_refused=True, refusal=why_not)

    def end_in_part(self, run_id: str) -> None:
        """Some assets are made and recorded; the status is that of a run at work.

        All may be recorded, and the mark and the event of the success be there as well. Whether the
        one that was begun is there as a whole is for nobody to know, so it is done again.
        """
        life, chance = self._life, self._clockwork.chance
        run, process = life.runs[run_id], life.processes[run_id]
        asked = [asset for asset in self._weather.assets if asset not in run.left_out]
        done = chance.randint(0, len(asked))
        begun = asked[done : done + 1]
        made = asked[:done] if process.is_heard else []
        if run_id not in life.deleted:
            spoilt = [asset for asset in asked[: done + 1] if asset not in made]
            life.outputs.fail(run, made, spoilt, self._weather.assets)
        if process.is_heard:
            life.runs[run_id] = replace(run, done=frozenset(made), undone=frozenset(begun))
        if not begun:
            process.is_working = False
            process.has_finished = process.is_heard and self._clockwork.happens(0.7)

    def _happens(self, run_id: str, what: str) -> bool:
        torn = self._weather.torn
        happens = torn > 0 and self._clockwork.happens(torn)
        if happens:
            self._clockwork.tell(run_id, what)
        return happens
