"""Torn writes: processes of runs are killed between two writes; writes of tags overtake others.

A run has no transaction: heartbeat, events, outputs and status are separate writes in this order. A
prefix of them must not count for more than it is: output without a recorded success is replaced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proofs.simulation.clockwork import Clockwork
    from proofs.simulation.run_life import RunLife
    from proofs.simulation.weather import Weather


class Torn:
    """Tears the writes of the runs of one Dagster instance."""

    def __init__(self, life: RunLife, clockwork: Clockwork, weather: Weather) -> None:
        self._life = life
        self._clockwork = clockwork
        self._weather = weather

    def kills(self, run_id: str) -> bool:
        """Draw whether a process is killed between its next writes."""
        return self._happens(run_id, "is killed between two of its writes")

    def loses_last_word(self, run_id: str) -> bool:
        """Draw whether a process ends without its last report, because the storage hangs."""
        return self._happens(run_id, "cannot say that it is finished")

    def loses_tag(self, run_id: str) -> bool:
        """Draw whether the tag of a retry is lost to another writer."""
        return self._happens(run_id, "loses the tag that announces its retry")

    def refuse_in_part(self, run_id: str, why_not: str) -> None:
        """Write the event of a refusal, and perhaps its tags; the run stays started."""
        if self._clockwork.happens(0.5):
            run = self._life.runs[run_id]
            self._life.runs[run_id] = replace(run, is_refused=True, refusal=why_not)

    def end_in_part(self, run_id: str) -> None:
        """Record some assets; the run stays started.

        All may be recorded, with the event of the success. The last asset may be incomplete, so it
        is processed again.
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
