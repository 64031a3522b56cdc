"""`python -m proofs simulate`: the options and the output.

A violation is printed with its seed and the end of its trace, with exit code 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proofs.simulation.proof import fresh_seed, prove

if TYPE_CHECKING:
    from proofs.simulation.schedule import Played

_SHOWN = 40
_TOLD_EVERY = 500


def simulate(
    *,
    schedules: Annotated[int, typer.Option(min=1, help="Number of schedules.")] = 1000,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=("The seed of the first one; the others count on from it. Without it, a new one."),
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="The file for the figures.")] = Path(
        "build/sim.json"
    ),
) -> None:
    """Play random schedules of rebalances, crashes and failures.

    The command checks that nothing is lost, doubled or stalled.
    """
    first = fresh_seed() if seed is None else seed

    def told(played: Played) -> None:
        number = played.seed - first + 1
        if played.violation:
            typer.echo(
                "\n".join(
                    [
                        *played.trace[-_SHOWN:],
                        f"for the whole trace: python -m proofs life --seed {played.seed}",
                    ]
                )
            )
        elif number % _TOLD_EVERY == 0:
            typer.echo(f"{number} of {schedules} schedules", err=True)

    proof = prove(schedules, first, told=told)
    proof.write(output)
    typer.echo(
        f"{proof.schedules} schedules from seed {proof.seed}: {len(proof.violations)} violations, "
        f"{proof.rebalances} rebalances, "
        f"{proof.commits} commits, {len(proof.transitions) - len(proof.not_taken)} of "
        f"{len(proof.transitions)} transitions taken; "
        f"the figures are in {output}"
    )
    if proof.not_taken:
        typer.echo(f"never taken: {'; '.join(proof.not_taken)}")
    sys.exit(1 if proof.violations else 0)
