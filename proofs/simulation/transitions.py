"""Count how often each transition of the ownership table is taken."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagster_rebalance.core.partitions import state_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

Taken = dict[str, int]


def name_of(step: tuple[state_machine.Phase, state_machine.Change]) -> str:
    """Return the name of a transition for the report: `owned, stop caused`."""
    return f"{step[0].value}, {step[1].value}"


class _Counted(dict[tuple[state_machine.Phase, state_machine.Change], state_machine.Phase]):
    def __init__(
        self,
        table: dict[tuple[state_machine.Phase, state_machine.Change], state_machine.Phase],
        taken: Taken,
    ) -> None:
        super().__init__(table)
        self._taken = taken

    def get(self, step, default=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - dict has it in overloads
        if step in self:
            self._taken[name_of(step)] += 1
        return super().get(step, default)


@contextmanager
def counted() -> Iterator[Taken]:
    """Count within the context."""
    table = state_machine.TRANSITIONS
    taken = {name_of(step): 0 for step in table}
    state_machine.TRANSITIONS = _Counted(table, taken)
    try:
        yield taken
    finally:
        state_machine.TRANSITIONS = table
