"""Entry point of the command line: load the requested command and report errors.

`python -m proofs` passes its own table of commands.
"""

from __future__ import annotations

import inspect
import io
import logging
import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

try:
    import typer
except ModuleNotFoundError:
    sys.exit(
        "dagster-rebalance needs typer, which is not installed. Install the extra: pip install "
        "'dagster-rebalance[cli]'"
    )

import dagster_rebalance
from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INTERRUPTED = 130
"""The exit code that shells use for a program ended by Ctrl-C."""

COMMANDS = dict.fromkeys(
    (
        "broker",
        "explain",
        "letters discard",
        "letters list",
        "letters replay",
        "letters show",
        "pause",
        "probe",
        "produce",
        "prune",
        "rerun",
        "reset",
        "resume",
        "retry",
        "status",
        "stop",
    ),
    "dagster_rebalance.cli.declarations",
)
"""The module of each command; the function has the command's name, with underscores."""
_GROUPS = {"letters": "List, show, replay and discard dead letters."}


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - Typer's signature of a callback
    if wanted:
        typer.echo(f"dagster-rebalance {dagster_rebalance.__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Inspect and operate consumer groups whose records Dagster processes."""


def build_app(commands: Mapping[str, str], arguments: Sequence[str]) -> typer.Typer:
    """Return the Typer app with the command that `arguments` name, or else with all commands."""
    app = _typer()
    app.callback()(_root)
    groups: dict[str, typer.Typer] = {}
    for name in [one for one in commands if one.split()[0] in arguments[:1]] or commands:
        command = getattr(import_module(commands[name]), name.replace(" ", "_"))
        summary = inspect.cleandoc(command.__doc__).partition("\n\n")[0]
        group, _, last = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = _typer()
            app.add_typer(groups[group], name=group, help=_GROUPS[group])
        groups.get(group, app).command(last, short_help=summary)(command)
    return app


def _typer() -> typer.Typer:
    # Markup would import rich, which takes longer than the rest of a help text.
    return typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def run(commands: Mapping[str, str]) -> None:
    """Run the command that `sys.argv` names.

    An error of this package is printed as one sentence with exit code 1. Ctrl-C exits with 130,
    also during imports.
    """
    # Suppresses the repeated log lines of the Kafka client: the resulting error is printed once.
    logging.getLogger("dagster_rebalance.librdkafka").addHandler(logging.NullHandler())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # printing works in any encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        _check_encoding(sys.argv[1:])
        build_app(commands, sys.argv[1:])()
    except DagsterRebalanceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _check_encoding(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if re.search("[\ud800-\udfff]", argument):  # how Python keeps undecodable bytes
            msg = f"{argument!r} is not in the encoding of this terminal"
            raise ConfigurationError(msg)


def main() -> None:
    """Run the console script."""
    run(COMMANDS)
