"""Finds the command that was asked for, and says errors as sentences.

Owns the list of this program's commands; `python -m proofs` brings a list of its own. Each command
is a function of a module of its own that is imported only when it is needed, so that no command
waits for the imports of another.
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
"""The exit code that a shell gives to a program that Ctrl-C ended."""

COMMANDS = {
    "broker": "dagster_rebalance.cli.broker",
    "explain": "dagster_rebalance.cli.status",
    "pause": "dagster_rebalance.cli.control",
    "produce": "dagster_rebalance.cli.produce",
    "rerun": "dagster_rebalance.cli.rerun",
    "reset": "dagster_rebalance.cli.reset",
    "resume": "dagster_rebalance.cli.control",
    "retry": "dagster_rebalance.cli.control",
    "status": "dagster_rebalance.cli.status",
    "stop": "dagster_rebalance.cli.control",
}
"""Each command's module; the function in it has the command's name."""


def _tell_version(wanted: bool) -> None:  # noqa: FBT001 - Typer's signature of a callback
    if wanted:
        typer.echo(f"dagster-rebalance {dagster_rebalance.__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Kafka partitions for Dagster runs: drained before they are handed over."""


def build_app(commands: Mapping[str, str], arguments: Sequence[str]) -> typer.Typer:
    """Return the Typer app with the command that the arguments name.

    When they name none, it has all commands.
    """
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    for name in commands.keys() & set(arguments[:1]) or commands:
        command = getattr(import_module(commands[name]), name)
        app.command(name, help=_flowing(command.__doc__))(command)
    return app


def _flowing(text: str) -> str:
    """The help of a command, whose lines end where the terminal does.

    Typer keeps the ends of lines in all paragraphs but the first.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        paragraph if paragraph.startswith("\b") else paragraph.replace("\n", " ")
        for paragraph in paragraphs
    )


def run(commands: Mapping[str, str]) -> None:
    """Run a command.

    An error of this package is a sentence and exit code 1, never a traceback; Ctrl-C neither, even
    in imports.
    """
    # What the Kafka client logs again and again is said once, by the error that follows from it.
    logging.getLogger("dagster_rebalance.librdkafka").addHandler(logging.NullHandler())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what was done is told in any encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        _check_text(sys.argv[1:])
        build_app(commands, sys.argv[1:])()
    except DagsterRebalanceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _check_text(arguments: Sequence[str]) -> None:
    """Check that a database can store what a person has typed.

    Raises:
        ConfigurationError: It is no text.
    """
    for argument in arguments:
        if re.search("[\ud800-\udfff]", argument):  # how Python keeps bytes that are no text
            msg = f"{argument!r} is not in the encoding of this terminal"
            raise ConfigurationError(msg)


def main() -> None:
    """The console script."""
    run(COMMANDS)
