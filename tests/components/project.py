"""A sandbox project with one component."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from textwrap import indent
from typing import TYPE_CHECKING

import pytest
from dagster.components.testing import create_defs_folder_sandbox

from dagster_rebalance import KafkaBatchComponent

if TYPE_CHECKING:
    from collections.abc import Iterator

    import dagster as dg

TYPE = "dagster_rebalance.KafkaBatchComponent"
WORK = '''\
import dagster as dg

from dagster_rebalance import KafkaBatch

NOT_CODE = 1


@dg.asset(tags={"from": "code"})
def orders(kafka_batch: KafkaBatch) -> None:
    """An asset."""


def returns(kafka_batch: KafkaBatch) -> None:
    """A function."""


class Jobs:
    """External work."""

    def stop(self, run_id: str) -> None:
        """Ends it."""


JOBS = Jobs()
'''


@contextmanager
def loaded(attributes: str, rest: str = "") -> Iterator[tuple[KafkaBatchComponent, dg.Definitions]]:
    """Load a component with these attributes, from line 3 of the file, and its definitions."""
    with create_defs_folder_sandbox() as sandbox:
        folder = sandbox.defs_folder_path / "shop"
        folder.mkdir()
        (folder / "work.py").write_text(WORK)
        (folder / "defs.yaml").write_text(
            f"type: {TYPE}\nattributes:\n{indent(attributes, '  ')}{rest}"
        )
        with sandbox.build_component_tree() as tree:
            yield tree.load_component(folder, KafkaBatchComponent), tree.build_defs()


def load_error(attributes: str) -> str:
    """Return the printed error of a component that does not load."""
    with pytest.raises(Exception, match="Error") as caught, loaded(attributes):
        pass
    return "".join(traceback.format_exception(caught.value))
