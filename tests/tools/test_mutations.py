"""Edits of the mutation runs, and their draw."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.mutants import Reach, drawn
from tools.mutations import mutations

MODULE = '''"""Words."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from queue import Queue

LIMIT_S = 30.0


def wait(queue: "Queue[int]", now: float, *, ready: bool = False) -> int:
    """Words."""
    if ready and now < LIMIT_S:
        queue.put(1, block=True)
    return 7 + 2
'''


def _edited(line: str) -> set[str]:
    """Return the edited versions of a line."""
    number = MODULE.splitlines().index(line)
    return {
        after
        for one in mutations("a.py", MODULE)
        if (after := one.after.splitlines()[number]) != line
    }


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("LIMIT_S = 30.0", {"LIMIT_S = 60.0"}),
        (
            "    if ready and now < LIMIT_S:",
            {
                "    if (ready or now < LIMIT_S):",
                "    if ready and (now <= LIMIT_S):",
                "    if not (ready and now < LIMIT_S):",
            },
        ),
        (
            "        queue.put(1, block=True)",
            {
                "        pass",
                "        queue.put(1)",
                "        queue.put(block=True)",
                "        queue.put(2, block=True)",
                "        queue.put(1, block=False)",
            },
        ),
        (
            "    return 7 + 2",
            {"    return None", "    return (7 - 2)", "    return 8 + 2", "    return 7 + 3"},
        ),
        ('    """Words."""', set()),
        ("    from queue import Queue", set()),
    ],
)
def test_every_expression_is_edited_except_texts_and_types(line: str, becomes: set[str]) -> None:
    assert _edited(line) == becomes


def test_edit_has_the_lines_of_its_statement_without_the_body() -> None:
    lines = {
        one.lines
        for one in mutations("a.py", MODULE)
        if one.kind in {"and/or changed", "condition negated"}
    }
    assert lines == {range(13, 14)}


def test_edit_is_recognized_after_lines_were_added_above_it() -> None:
    earlier, later = (
        mutations("a.py", MODULE),
        mutations("a.py", MODULE.replace("LIMIT_S =", "\nFIRST = None\nLIMIT_S =")),
    )
    assert [one.key for one in earlier] == [one.key for one in later]


def test_seed_draws_the_same_edits_of_each_kind() -> None:
    """A survivor is reproduced with its seed."""
    pool = mutations("a.py", MODULE)
    sample = drawn(pool, 7, seed=3)
    assert sample == drawn(pool, 7, seed=3)
    assert set(Counter(one.kind for one in sample).values()) == {1}
    assert len(drawn(pool, 1_000, seed=3)) == len(pool)


def test_the_tests_of_the_module_come_first_and_slow_ones_last() -> None:
    reached = frozenset(
        {"tests/test_b.py::test_slow", "tests/test_b.py::test_quick", "tests/test_a.py::test_own"}
    )
    reach = Reach(
        {"a.py": {15: reached}},
        {"tests/test_b.py::test_slow": 9.0, "tests/test_a.py::test_own": 1.0},
    )
    (edit,) = (one for one in mutations("a.py", MODULE) if one.kind == "returns nothing")
    assert reach.of(edit) == [
        "tests/test_a.py::test_own",
        "tests/test_b.py::test_quick",
        "tests/test_b.py::test_slow",
    ]


def test_edit_without_a_reaching_test_is_run_with_the_other_tests_of_its_module() -> None:
    reach = Reach({"a.py": {15: frozenset({"tests/test_a.py::test_own"})}}, {})
    assert all(reach.of(one) == ["tests/test_a.py::test_own"] for one in mutations("a.py", MODULE))
