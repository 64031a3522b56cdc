"""Dagster's launcher refuses runs while the command wants that, as a cluster without room would."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dagster as dg

from proofs.chaos.exchange import FOLDER_VARIABLE, Exchange


class RefusingLauncher(dg.DefaultRunLauncher):
    """Launches runs as Dagster does by default, or refuses."""

    def launch_run(self, context: Any) -> None:  # noqa: ANN401 - Dagster exports no name for it
        """Launch a run.

        Raises:
            RuntimeError: Launches are refused at present.
        """
        if Exchange(Path(os.environ[FOLDER_VARIABLE])).refuses_launches:
            problem = "the launch of this run is refused because a fault was wanted"
            raise RuntimeError(problem)
        super().launch_run(context)
