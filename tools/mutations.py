"""The edits of a mutation run: plausible mistakes in one place of a module.

An edit replaces the text of one node, so a survivor can be shown as a diff.
"""

from __future__ import annotations

import ast
import copy
import difflib
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
REMOVABLE = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)
# Types decide nothing at run time. In an f-string, positions are wrong before Python 3.12.
WITHOUT_EDITS = (ast.Import, ast.ImportFrom, ast.JoinedStr)
FIELDS_WITHOUT_EDITS = {"annotation", "returns", "decorator_list", "bases"}


@dataclass(frozen=True)
class Mutation:
    """One edit of one file.

    Attributes:
        path: The file, relative to the project.
        kind: The kind of edit.
        lines: Line numbers of the edited statement, without its body.
        before: Text of the file.
        after: Text with the edit.
    """

    path: str
    kind: str
    lines: range
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The edit, for a person."""
        before, after = self.before.splitlines(), self.after.splitlines()
        return "\n".join(
            difflib.unified_diff(before, after, self.path, self.kind, n=1, lineterm="")
        )

    @property
    def key(self) -> tuple[str, str, str]:
        """The file, its changed lines and their replacement, independent of line numbers."""
        changed = [line for line in self.diff.splitlines()[2:] if line[0] in "+-"]
        removed, added = (
            " ".join(line[1:].strip() for line in changed if line[0] == sign) for sign in "-+"
        )
        return self.path, removed, added


def mutations(path: str, text: str) -> list[Mutation]:
    """All edits of a file that may be made, in the order of its text."""
    raw = text.encode()
    starts = [0, *accumulate(map(len, raw.splitlines(keepends=True)))]
    found = []
    for node, statement in _places(ast.parse(text)):
        begin, end = (starts[line - 1] + column for line, column in _span(node))
        for kind, replacement in _edits(node, raw[begin:end].decode()):
            after = (raw[:begin] + replacement.encode() + raw[end:]).decode()
            found.append(Mutation(path, kind, _own_lines(statement), text, after))
    return found


def _places(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, ast.stmt]]:
    """Yield each editable node with its statement."""

    def walk(
        node: ast.AST, statement: ast.stmt | None
    ) -> Iterator[tuple[ast.expr | ast.stmt, ast.stmt]]:
        if isinstance(node, WITHOUT_EDITS) or _is_words(node):
            return
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, (ast.expr, ast.stmt)) and statement is not None:
            yield node, statement
        for name, value in ast.iter_fields(node):
            if name not in FIELDS_WITHOUT_EDITS:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from walk(child, statement)

    return walk(tree, None)


def _is_words(node: ast.AST) -> bool:
    """Whether a statement is there for readers and type checkers alone."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        return any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        )
    return False


def _span(node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _own_lines(statement: ast.stmt) -> range:
    body: list[ast.AST] = getattr(statement, "body", None) or getattr(statement, "cases", [])
    inner = (
        body[0].pattern
        if body and isinstance(body[0], ast.match_case)
        else body[0]
        if body
        else None
    )
    until = (
        inner.lineno
        if isinstance(inner, (ast.stmt, ast.pattern))
        else (statement.end_lineno or 0) + 1
    )
    return range(statement.lineno, max(until, statement.lineno + 1))


def _edits(node: ast.expr | ast.stmt, text: str) -> Iterator[tuple[str, str]]:
    """Yield the edits of a node: the kind, and the replacement."""
    if isinstance(node, REMOVABLE):
        yield "statement removed", "pass"
    elif (
        isinstance(node, ast.Return)
        and node.value is not None
        and ast.unparse(node.value) != "None"
    ):
        yield "returns nothing", "return None"
    elif isinstance(node, ast.Assign) and isinstance(
        node.targets[0], (ast.Attribute, ast.Subscript)
    ):
        yield "statement removed", "pass"
    elif isinstance(node, ast.Call):
        yield from _without_an_argument(node)
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node)
    elif isinstance(node, ast.expr):
        yield from _other_operators(node, text)
    test = getattr(node, "test", None)
    if isinstance(test, ast.expr) and not isinstance(test, (ast.Compare, ast.UnaryOp)):
        yield "condition negated", _with_test_negated(node, test, text)


def _with_test_negated(node: ast.expr | ast.stmt, test: ast.expr, text: str) -> str:
    # A statement's text begins in the middle of a line, its later lines do not.
    lines = [
        " " * node.col_offset + text.splitlines(keepends=True)[0],
        *text.splitlines(keepends=True)[1:],
    ]
    starts = [0, *accumulate(len(line.encode()) for line in lines)]
    begin, end = (starts[line - node.lineno] + column for line, column in _span(test))
    raw = "".join(lines).encode()
    return (raw[node.col_offset : begin] + b"not (" + raw[begin:end] + b")" + raw[end:]).decode()


def _without_an_argument(call: ast.Call) -> Iterator[tuple[str, str]]:
    for index in range(len(call.keywords)):
        shorter = copy.copy(call)
        shorter.keywords = call.keywords[:index] + call.keywords[index + 1 :]
        yield "argument dropped", ast.unparse(shorter)
    if call.args:
        shorter = copy.copy(call)
        shorter.args = call.args[:-1]
        yield "argument dropped", ast.unparse(shorter)


def _other_constants(node: ast.Constant) -> Iterator[tuple[str, str]]:
    value = node.value
    if isinstance(value, bool):
        yield "constant changed", repr(not value)
    elif isinstance(value, int):
        yield "constant changed", repr(value + 1)
    elif isinstance(value, float):
        yield "constant changed", repr(value * 2 or 1.0)
    elif isinstance(value, (str, bytes)) and value:
        yield "constant changed", repr(value[:0])


def _other_operators(node: ast.expr, text: str) -> Iterator[tuple[str, str]]:
    changed = copy.copy(node)
    if isinstance(changed, ast.Compare):
        operators = changed.ops
        for index, operator in enumerate(operators):
            changed.ops = [
                *operators[:index],
                COMPARISONS[type(operator)](),
                *operators[index + 1 :],
            ]
            yield "comparison changed", f"({ast.unparse(changed)})"
    elif isinstance(changed, ast.BoolOp):
        changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
        yield "and/or changed", f"({ast.unparse(changed)})"
    elif isinstance(changed, ast.BinOp) and type(changed.op) in ARITHMETIC:
        changed.op = ARITHMETIC[type(changed.op)]()
        yield "arithmetic changed", f"({ast.unparse(changed)})"
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        yield "not dropped", text.removeprefix("not").lstrip()
