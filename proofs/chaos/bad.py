"""The bad records of a play, by their numbers: some are mended by new code, and some stay bad.

Every run imports this module, so it imports almost nothing.
"""

from __future__ import annotations

import enum

EVERY = 2_003
"""One number in so many is bad. A prime: bad records are in all partitions."""
FIRST = 300
BAD, STAYS_BAD = "the number is bad", "the number stays bad"
"""The reasons of letters."""


class Bad(enum.Enum):
    """How the asset treats a bad record.

    With bisection, the job has one asset: a later one would make the parts of a range double.
    """

    SET_ASIDE = "set-aside"
    BISECT = "bisect"

    @property
    def settings(self) -> dict[str, str | int]:
        """The settings of the group."""
        # Each attempt on a bad range fails, and a run takes seconds to start.
        return {"on_failure": "bisect", "max_attempts": 3} if self is Bad.BISECT else {}


def is_bad(number: int) -> bool:
    """Return whether the first version of the code cannot process a number."""
    return number % EVERY == FIRST


def stays_bad(number: int) -> bool:
    """Return whether no version of the code can process a number."""
    return is_bad(number) and number // EVERY % 2 == 1


def why_bad(number: int, *, is_mended: bool) -> str | None:
    """Return why the code cannot process a number, or None."""
    if stays_bad(number):
        return STAYS_BAD
    return BAD if is_bad(number) and not is_mended else None


def why_bad_in_sql(number: str, *, is_mended: bool) -> str:
    """Return `why_bad` as an expression of Spark."""
    is_odd = f"{number} DIV {EVERY} % 2 = 1"
    mended = "NULL" if is_mended else f"'{BAD}'"
    is_bad_number = f"{number} % {EVERY} = {FIRST}"
    return (
        f"CASE WHEN {is_bad_number} AND {is_odd} THEN '{STAYS_BAD}' "
        f"WHEN {is_bad_number} THEN {mended} END"
    )
