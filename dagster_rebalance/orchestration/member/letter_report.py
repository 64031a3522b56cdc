"""The report of the open dead letters of a group, from one member: the observer of the lag.

A thread reads the new records of the dead-letter topic, because a read may take longer than a turn
of the member loop. At most one read is in progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.core.reporting.open_letters import LetterPace, OpenLetters

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_rebalance.core.model.events import Event
    from dagster_rebalance.orchestration.member.dependencies import MemberDependencies
    from dagster_rebalance.orchestration.ports import NewLettersPort


class LetterReport:
    """The report of one member.

    Args:
        dependencies: The dependencies of the member loop.
        letters: Reads the dead-letter topic.
        is_observer: Whether this member reports for the group.
        show: Runs its first argument in the storage thread, and then its second argument with the
            result in the thread of the member loop.
        note: Receives a message when the letters cannot be read.
    """

    def __init__(
        self,
        dependencies: MemberDependencies,
        letters: NewLettersPort,
        is_observer: Callable[[], bool],
        show: Callable[[Callable[[], Any], Callable[[Any], Event | None]], None],
        note: Callable[[str], None],
    ) -> None:
        self._dependencies = dependencies
        self._letters = letters
        self._is_observer = is_observer
        self._show = show
        self._note = note
        self._pace = LetterPace()
        self._is_reading = False
        self._problem = ""
        self._answers: deque[OpenLetters | str] = deque()

    def step(self) -> None:
        """Begin a read that is due, and report the result of the last one.

        Call this in each turn of the member loop.
        """
        if self._answers:
            self._is_reading = False
            self._report(self._answers.popleft())
        now = self._dependencies.clock()
        if not self._is_reading and self._pace.is_due(now) and self._is_observer():
            self._pace = replace(self._pace, read_at=now)
            self._is_reading = True
            self._dependencies.start("reading dead letters", self._read)

    def _report(self, answer: OpenLetters | str) -> None:
        now = self._dependencies.clock()
        if isinstance(answer, str):
            if answer != self._problem:
                self._note(f"the open dead letters are not known: {answer}")
            self._problem = answer
            return
        self._problem = ""
        if self._is_observer() and self._pace.is_news(answer, now):
            catalogue = self._dependencies.catalogue
            self._show(lambda: catalogue.show_letters(answer), lambda _: self._shown(answer, now))

    def _shown(self, letters: OpenLetters, at: float) -> None:
        self._pace = replace(self._pace, shown=letters, shown_at=at)
        self._dependencies.engine.owe_records(2, self._dependencies.clock())

    # Thread of a read

    def _read(self) -> None:
        try:
            self._answers.append(self._letters.read())
        except DagsterRebalanceError as error:
            self._answers.append(str(error))
        except Exception as error:
            self._answers.append(f"{type(error).__name__}: {error}")
            raise
