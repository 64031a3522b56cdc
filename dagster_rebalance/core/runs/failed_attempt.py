"""Error of a failed attempt, as one short line for ticks, checks and commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dagster_rebalance.core.model.printable import escaped, one_line
from dagster_rebalance.core.model.run import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dagster_rebalance.core.model.run import RunSnapshot

_MOST_CHARACTERS = 400
_MOST_CAUSES = 2
_MOST_PLACES = 3
_MOST_PLACE_CHARACTERS = 80


class Place(NamedTuple):
    """Frame of a traceback."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        file = self.file.replace("\\", "/").rpartition("/")[2]
        return one_line(escaped(f"{file}:{self.line} in {self.function}"))[:_MOST_PLACE_CHARACTERS]


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """The last failed attempt on a range.

    Attributes:
        run_id: The streaming run of the attempt.
        error: Its error, as from `error_text`.
    """

    run_id: str
    attempt: int
    error: str


def error_text(error: str, places: Iterable[Place] = (), causes: Sequence[str] = ()) -> str:
    """Format type and message of an error, its frames (outermost first) and its causes in one line.

    Example:
        `ValueError: order 17 has no price (assets.py:41 in clean, assets.py:30 in orders)`
    """
    parts = [error, *causes[-_MOST_CAUSES:]]
    most = _MOST_CHARACTERS // len(parts)
    text = "; caused by ".join(_shortened(part, most) for part in parts)
    innermost = [*places][: -_MOST_PLACES - 1 : -1]
    return f"{text} ({', '.join(map(str, innermost))})" if innermost else text


def _shortened(error: str, most: int) -> str:
    text = one_line(escaped(error))
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def with_error(
    runs: Iterable[RunSnapshot], failed: FailedAttempt | None
) -> tuple[RunSnapshot, ...]:
    """Set the run and the error of the last failed attempt in the runs of a claimed range.

    A batch id counts the attempts before it and does not name their runs. An attempt whose process
    died has left no error.
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
