"""Links to runs, in the metadata of what members report."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST = 8


def run_links(run_ids: Iterable[str]) -> dict[str, dg.DagsterRunMetadataValue]:
    """Links to the first few of these runs, since Dagster shows no links in the cells of a table.

    Args:
        run_ids: The runs; one that is there twice is linked once.
    """
    first = islice(dict.fromkeys(run_ids), _MOST)
    return {f"run {run_id[:8]}": dg.MetadataValue.dagster_run(run_id) for run_id in first}
