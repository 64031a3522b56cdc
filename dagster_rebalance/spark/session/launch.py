"""The start of a classic session: its settings in a file, its Python, and its jars.

pyspark puts each setting on the JVM's command line, which every user of the machine can read. The
settings therefore go into a file that only this user can read, until the session has started. JVM
options always are on the command line, so a secret among them is refused.
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

_SUBMIT_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
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
    """Pass settings in a private file to a JVM that pyspark starts in the block.

    Spark still reads spark-defaults.conf.

    Raises:
        ConfigurationError: A JVM option is a secret, or the environment names another file.
    """
    for key, value in config.items():
        if key.endswith(_JVM_OPTIONS) and _SECRET_OPTION.search(str(value)):
            msg = (
                f"{key} has a secret, which would be on the command line of a JVM: give the JVM a "
                "file with it."
            )
            raise ConfigurationError(msg)
    before = os.environ.get(_SUBMIT_ARGUMENTS)
    if _FILE in (before or ""):
        msg = (
            f"{_SUBMIT_ARGUMENTS} has {_FILE}, which Spark accepts only once: give those settings "
            "in spark_config, or in conf/spark-defaults.conf."
        )
        raise ConfigurationError(msg)
    # mkstemp makes a file that only its owner can read.
    handle, name = tempfile.mkstemp(prefix="dagster-rebalance-spark-", suffix=".conf")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.writelines(
                f"{_escaped(key)}={_escaped(str(value))}\n" for key, value in config.items()
            )
        os.environ[_SUBMIT_ARGUMENTS] = (
            f"--load-spark-defaults {_FILE} {shlex.quote(name)} {before or 'pyspark-shell'}"
        )
        yield
    finally:
        if before is None:
            os.environ.pop(_SUBMIT_ARGUMENTS, None)
        else:
            os.environ[_SUBMIT_ARGUMENTS] = before
        Path(name).unlink()


@contextmanager
def one_fetch_at_a_time(config: Mapping[str, str]) -> Iterator[None]:
    """Lock Ivy's cache against other sessions of this machine that fetch packages.

    If two processes fill one cache, one of them reads files that the other is still writing.
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
    """Let a session that starts in the block use the Python of this process, with its libraries.

    pyspark would use the first python3 of the PATH. PYSPARK_PYTHON wins if it is set.
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
    """Unset SPARK_REMOTE while a session starts in the block.

    The resource decides whether there is a server. pyspark starts no local session if that variable
    is set, even if it is empty.
    """
    hidden = os.environ.pop(_REMOTE, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[_REMOTE] = hidden


def _escaped(text: str) -> str:
    """Escape text for a Java properties file."""
    units = text.encode("utf-16-be")
    numbers = [int.from_bytes(units[index : index + 2], "big") for index in range(0, len(units), 2)]
    return "".join(
        chr(number) if chr(number).isascii() and chr(number).isalnum() else f"\\u{number:04x}"
        for number in numbers
    )
