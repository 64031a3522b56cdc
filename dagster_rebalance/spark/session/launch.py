"""How a classic session is started: its settings in a file, its Python, and its jars.

pyspark puts each setting on the JVM's command line, which every user of the machine can read. Owns
the file, readable by this user alone and gone when the session has started, and the variable by
which `spark-submit` finds it. JVM options stand on the command line whatever is done, so a secret
among them is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
_FILE = "--properties-file"
_JVM_OPTIONS = "JavaOptions"
_PYTHON = "PYSPARK_PYTHON"
_REMOTE = "SPARK_REMOTE"
_PACKAGES = "spark.jars.packages"
_IVY = "spark.jars.ivy"
_IVY_OF_SPARK = ".ivy2.5.2"
_LOCK = "dagster-rebalance.lock"
_SECRET_OPTION = re.compile(r"-D\S*(password|secret|token|jaas)\S*=", re.IGNORECASE)


@contextmanager
def settings_in_a_file(config: Mapping[str, object]) -> Iterator[None]:
    """Let a JVM that pyspark starts inside find its settings in a private file.

    What stands in spark-defaults.conf is still read.

    Raises:
        ConfigurationError: A JVM option is a secret, or the environment names another file, which
            would not be read.
    """
    for key, value in config.items():
        if key.endswith(_JVM_OPTIONS) and _SECRET_OPTION.search(str(value)):
            msg = (
                f"{key} has a secret in it, which would be on the command line of a JVM: let the "
                "JVM read it from a file of its own."
            )
            raise ConfigurationError(msg)
    before = os.environ.get(_ARGUMENTS)
    if _FILE in (before or ""):
        msg = (
            f"{_ARGUMENTS} has {_FILE}, of which Spark takes one: give those settings in "
            "spark_config, or in conf/spark-defaults.conf."
        )
        raise ConfigurationError(msg)
    # Readable by its owner alone.
    handle, name = tempfile.mkstemp(prefix="dagster-rebalance-spark-", suffix=".conf")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.writelines(
                f"{_escaped(key)}={_escaped(str(value))}\n" for key, value in config.items()
            )
        os.environ[_ARGUMENTS] = (
            f"--load-spark-defaults {_FILE} {shlex.quote(name)} {before or 'pyspark-shell'}"
        )
        yield
    finally:
        if before is None:
            os.environ.pop(_ARGUMENTS, None)
        else:
            os.environ[_ARGUMENTS] = before
        Path(name).unlink()


@contextmanager
def one_fetch_at_a_time(config: Mapping[str, str]) -> Iterator[None]:
    """Let no other session of this machine start meanwhile that fetches into the same cache.

    Ivy does not bear two processes that fill one cache: one of them reads files that the other one
    has not written to their end. The lock lies in that cache, and ends with the process.
    """
    if not config.get(_PACKAGES):
        yield
        return
    folder = Path(config.get(_IVY) or Path.home() / _IVY_OF_SPARK)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def workers_of_this_python() -> Iterator[None]:
    """Let a session that starts inside work in the Python of this process.

    pyspark would take the first python3 of the PATH, which has other libraries than the environment
    of the run. Whoever has named one with PYSPARK_PYTHON keeps it.
    """
    if _PYTHON in os.environ:
        yield
        return
    os.environ[_PYTHON] = sys.executable
    try:
        yield
    finally:
        del os.environ[_PYTHON]


@contextmanager
def only_the_given_server() -> Iterator[None]:
    """Hide pyspark's own variable SPARK_REMOTE while a session starts inside.

    The resource names the server, or none. pyspark takes that variable for the wish for a server,
    also where it is empty, and starts no local session then.
    """
    hidden = os.environ.pop(_REMOTE, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[_REMOTE] = hidden


def _escaped(text: str) -> str:
    """Text as a Java properties file has it."""
    units = text.encode("utf-16-be")
    numbers = [int.from_bytes(units[index : index + 2], "big") for index in range(0, len(units), 2)]
    return "".join(
        chr(number) if chr(number).isascii() and chr(number).isalnum() else f"\\u{number:04x}"
        for number in numbers
    )
