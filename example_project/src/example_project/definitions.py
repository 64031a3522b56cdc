"""The definitions in the folder `defs`."""

from __future__ import annotations

from pathlib import Path

import dagster as dg


@dg.definitions
def defs() -> dg.Definitions:
    """All definitions of the project."""
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
