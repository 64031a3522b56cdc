"""The error of a failed attempt, as text for people.

A text is one line, has the type and the message of an error and the places where it was raised, and
is short: it is part of ticks, checks and commands. This module owns that form, and which run a
failed attempt on a claimed range belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.printable import one_line, shown
from dagster_rebalance.core.model.run import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.core.model.run import RunSeen

_MOST_CHARACTERS = 400
_MOST_CAUSES = 2
_MOST_PLACES = 3
_MOST_PLACE_CHARACTERS = 80


class Place(NamedTuple):
    """A line of code that an error went through."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        file = self.file.replace("\\", "/").rpartition("/")[2]
        return one_line(shown(f"{file}:{self.line} in {self.function}"))[:_MOST_PLACE_CHARACTERS]


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """The last failed attempt on a range.

    Attributes:
        run_id: The streaming run that made it.
        attempt: Its number.
        error: What it failed with, as `error_text` words it.
    """

    run_id: str
    attempt: int
    error: str


def error_text(said: str, places: Iterable[Place] = (), causes: Sequence[str] = ()) -> str:
    """Return an error in one line.

    Example:
        `ValueError: order 17 has no price (assets.py:41 in clean, assets.py:30 in orders)`

    Args:
        said: The type and the message of the error.
        places: Where it went through, the outermost place first.
        causes: The types and the messages of the errors that led to it, the root cause last.
    """
    parts = [said, *causes[-_MOST_CAUSES:]]
    most = _MOST_CHARACTERS // len(parts)
    text = "; caused by ".join(_shortened(part, most) for part in parts)
    innermost = [*places][: -_MOST_PLACES - 1 : -1]
    return f"{text} ({', '.join(map(str, innermost))})" if innermost else text


def _shortened(said: str, most: int) -> str:
    text = one_line(shown(said))
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def with_error(runs: Iterable[RunSeen], failed: FailedAttempt | None) -> tuple[RunSeen, ...]:
    """Return the runs of a claimed range with the run and the error of the last failed attempt.

    The id of a batch counts the attempts before it, and does not name their runs. An attempt whose
    process died left nothing.

    Args:
        runs: The runs, as the batch shows them.
        failed: The last attempt that left its error; None where none did.
    """
    return tuple(
        replace(run, run_id=failed.run_id, error=failed.error)
        if failed is not None
        and run.state is RunState.FAILED
        and run.attempt == failed.attempt
        and not (run.has_died or run.is_live)
        else run
        for run in runs
    )
