"""`python -m proofs life`: replay one schedule of the simulator with its trace."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from proofs.simulation.schedule import play_all_of


def life(
    *, seed: Annotated[int, typer.Option(min=0, help="The seed that `simulate` named.")]
) -> None:
    """Play one schedule again and print its trace."""
    played = play_all_of(seed)
    typer.echo("\n".join(played.trace))
    typer.echo(played.violation or "nothing was violated")
    sys.exit(1 if played.violation else 0)
