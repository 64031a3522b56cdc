"""Stories: scripts of steps and expectations in a world that a subclass of `ScriptBase` provides.

A line has steps separated by ` | `. A step is an action (`revoke 0`), or an expectation: a query,
` = ` and its exact answer, or ` ~ ` (` !~ `) and a text that the answer contains (or does not).
An action is a method `do_<name>`, a query a method `is_<name>`; the other words are arguments.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from typing_extensions import Self

OPERATORS = (" !~ ", " ~ ", " = ")


def stories(text: str) -> pytest.MarkDecorator:
    """Parametrize a test by the stories of a text, each below a `## name`."""
    found = [one.partition("\n") for one in text.split("## ")[1:]]
    return pytest.mark.parametrize(
        "story", [pytest.param(body, id=name.strip()) for name, _, body in found]
    )


class ScriptBase:
    """Plays stories."""

    def play(self, story: str) -> Self:
        """Play a story, or the next part of one."""
        for number, line in enumerate(story.splitlines(), 1):
            for step in filter(None, map(str.strip, f" {line}".partition(" #")[0].split(" | "))):
                self._step(step, f"line {number}: {line.strip()}")
        return self

    def _step(self, step: str, where: str) -> None:
        """Carry out an action, or compare the answer to a query."""
        if any(operator in step for operator in OPERATORS):
            holds, answer = self._compare(step)
            assert holds, f"{where}\n  {answer}"
        else:
            self._call("do", step)

    def _compare(self, step: str) -> tuple[bool, str]:
        """Return whether an expectation holds, and the answer to its query."""
        operator = next(one for one in OPERATORS if one in step)
        query, _, expected = step.partition(operator)
        answer = str(self._call("is", query))
        holds = answer == expected if operator == " = " else expected in answer
        return holds is (operator != " !~ "), f"{query} is {answer!r}"

    def _call(self, kind: str, text: str) -> object:
        name, *arguments = shlex.split(text)
        return getattr(self, f"{kind}_{name}")(*arguments)
