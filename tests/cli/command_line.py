"""Run a command of the CLI in the process of the test."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from dagster_rebalance.cli.app import COMMANDS, build_app
from dagster_rebalance.core.model.errors import DagsterRebalanceError


def invoke(*arguments: str) -> Result:
    """Run a command; an error of the package is raised, as the console script receives it."""
    result = CliRunner().invoke(build_app(COMMANDS, arguments), list(arguments))
    if isinstance(result.exception, DagsterRebalanceError):
        raise result.exception
    return result
