"""Column names and types that every reader of a Parquet output can read.

Readers use the schema of one file for all files of an output, so records must fit the existing
files. A type is compared by its shape: the name of an atomic type in Spark, or a nested structure:
a tuple of names and shapes for a struct, and a list for an array or a map.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_INTEGERS = ("byte", "short", "integer", "long")
_DECIMAL = re.compile(r"decimal\((\d+),(-?\d+)\)")
_MAX_DIFFERENCES = 5
"""Differences in a message; a schema may have hundreds of columns."""


def refuse_ambiguous_names(shape: Any) -> None:
    """Raise IllegalStateError if names of columns or of fields are equal except for capitals."""
    for first, second in _ambiguous_names(shape, ""):
        if first == second:
            msg = (
                f"the records have two columns {first!r}: rename one of them. Nothing was written."
            )
            raise IllegalStateError(msg)
        msg = (
            f"the names {first!r} and {second!r} differ only in capitals, which Spark and most "
            "other readers ignore: the output could not be read. Rename one of them. Nothing was "
            "written."
        )
        raise IllegalStateError(msg)


def _ambiguous_names(shape: Any, path: str) -> Iterator[tuple[str, str]]:
    known: dict[str, str] = {}
    if isinstance(shape, tuple):
        for field, inner in shape:
            name = f"{path}{field}"
            if name.lower() in known:
                yield known[name.lower()], name
            known[name.lower()] = name
            yield from _ambiguous_names(inner, f"{name}.")
    elif isinstance(shape, list):
        for inner in shape[1:]:
            yield from _ambiguous_names(inner, path)


def refuse_misfits(
    now: Mapping[str, tuple[Any, str]], then: Mapping[str, tuple[Any, str]], output: str
) -> None:
    """Refuse columns that do not fit those of the files of an output.

    Both are given by name, each as its shape and its type in messages.
    """
    found = list(differences(now, then, "the files"))
    if not found:
        return
    more = len(found) - _MAX_DIFFERENCES
    shown = "; ".join(found[:_MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    msg = (
        f"the records do not fit the files of {output}: {shown}. Readers take the schema of one "
        "file for all, so they could read none of them. Cast or keep these columns, write to a new "
        "path, or write to a table (write_delta, write_iceberg), whose schema can change. Nothing "
        "was written."
    )
    raise IllegalStateError(msg)


def concurrent_schemas(output: str, error: IllegalStateError) -> IllegalStateError:
    """Return the error for files that two concurrent writers wrote with different columns."""
    return IllegalStateError(
        f"two writers created {output} at the same moment with different schemas, and "
        f"both have written: delete the files of one of them. {error}"
    )


def differences(
    now: Mapping[str, tuple[Any, str]], then: Mapping[str, tuple[Any, str]], place: str
) -> Iterator[str]:
    """Yield how the columns of records do not fit those of a place.

    Both are given by name, each as its shape and its type in messages.
    """
    for name in [*then, *(name for name in now if name not in then)]:
        if name not in now:
            yield f"column {name!r} is missing"
        elif name not in then:
            yield f"column {name!r} is new"
        elif not _widens(now[name][0], then[name][0]):
            yield f"column {name!r} is {now[name][1]}, and {then[name][1]} in {place}"


def _widens(now: Any, then: Any) -> bool:
    """Whether each value of one type is a value of the other."""
    if now == "null":
        return True
    if isinstance(now, str) and isinstance(then, str):
        return _atom_widens(now, then)
    if type(now) is not type(then) or len(now) != len(then):
        return False
    if isinstance(now, tuple):  # a cast matches the fields of a struct by position
        return all(
            one[0] == other[0] and _widens(one[1], other[1])
            for one, other in zip(now, then, strict=True)
        )
    if isinstance(now, list):
        return all(map(_widens, now, then))
    return bool(now == then)


def _atom_widens(now: str, then: str) -> bool:
    if now in _INTEGERS and then in _INTEGERS:
        return _INTEGERS.index(now) <= _INTEGERS.index(then)
    one, other = _DECIMAL.fullmatch(now), _DECIMAL.fullmatch(then)
    if one and other:
        digits, scale, most, longest = map(int, (*one.groups(), *other.groups()))
        return scale <= longest and digits - scale <= most - longest
    return now == then or (now, then) == ("float", "double")
