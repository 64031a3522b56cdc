"""Redirection of outputs by range to a scratch folder, for probes and tests.

Only the writers of `arrow.output` and `spark.output` in this process are redirected. They read the
columns of the real output, so records that would not fit are refused, and write nothing to it.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import IllegalStateError
from dagster_rebalance.outputs.layout import local_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SHOWN_ROWS = 5
"""Rows of an output that are kept, to be shown."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class ScratchOutput:
    """An output that was redirected.

    Attributes:
        form: The format, such as `Parquet`.
        name: The path or table that the asset named.
        place: The path or table that has the rows; empty for Postgres, which has rolled them back.
        rows: The number of rows.
        shown: The first rows.
    """

    form: str
    name: str
    place: str
    rows: int
    shown: tuple[Mapping[str, Any], ...]


@dataclass(slots=True)
class Scratch:
    """A scratch folder, and the outputs that were redirected to it.

    Attributes:
        folder: The folder: a path, or a URI that Spark and pyarrow can write to.
        outputs: The outputs, in the order of their first write.
    """

    folder: str
    outputs: list[ScratchOutput] = field(default_factory=list)
    _places: dict[tuple[str, str], str] = field(default_factory=dict)

    def place_of(self, form: str, name: str) -> str:
        """Return the path of an output in the folder; writes to one output share it."""
        text = _UNSAFE.sub("_", name).strip("_.")[-60:] or "output"
        folder = f"{self.folder}/{len(self._places)}-{_UNSAFE.sub('_', form).lower()}"
        place = self._places.setdefault((form, name), f"{folder}/{text}")
        if (parent := local_folder(place.rpartition("/")[0])) is not None:
            parent.mkdir(parents=True, exist_ok=True)
        return place

    def add(
        self,
        form: str,
        name: str,
        rows: int,
        shown: Iterable[Mapping[str, Any]],
        place: str = "",
    ) -> None:
        """Record an output. With a place, the rows are all that it has, or else further ones."""
        found = [(one.form, one.name) == (form, name) for one in self.outputs]
        if not any(found):
            self.outputs.append(ScratchOutput(form, name, place, rows, tuple(shown)))
            return
        at = found.index(True)
        before = self.outputs[at]
        if not place:
            rows, shown = before.rows + rows, (*before.shown, *shown)[:SHOWN_ROWS]
        self.outputs[at] = ScratchOutput(form, name, place, rows, tuple(shown))


_current: list[Scratch] = []


def current_scratch() -> Scratch | None:
    """Return the scratch folder of this process, if outputs are redirected."""
    return _current[-1] if _current else None


@contextmanager
def redirect_outputs(folder: str) -> Iterator[Scratch]:
    """Redirect the outputs by range of this process to a folder, in all threads.

    Parquet, Delta Lake and Iceberg are written there. The transaction of a Postgres table is rolled
    back.

    Example:
        ```python
        def test_orders_are_written(tmp_path):
            with redirect_outputs(str(tmp_path)) as scratch:
                orders(kafka_batch=KafkaBatch.for_testing(ranges, messages=messages))
            assert [output.rows for output in scratch.outputs] == [2]
        ```

    Args:
        folder: A path, or a URI that Spark and pyarrow can write to.

    Raises:
        IllegalStateError: Outputs are redirected already.
    """
    if _current:
        msg = f"outputs are redirected to {_current[-1].folder} already: end that redirection first"
        raise IllegalStateError(msg)
    _current.append(Scratch(folder.rstrip("/")))
    try:
        yield _current[-1]
    finally:
        _current.clear()
