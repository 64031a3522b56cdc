"""Finds a Java on this machine that the local Kafka and Spark can run on.

Owns the one answer to "which java?": JAVA_HOME, then PATH, then where systems install it. Never
installs anything. `python -m dagster_rebalance.testing.local.java` prints the path, or says what to
install.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OLDEST = 17
"""Kafka 4 and Spark 4 are compiled for Java 17."""

NEWEST = 23
"""Java 24 removed the security manager (JEP 486), which the Hadoop client inside Spark still asks
for."""

INSTALLED_IN = (Path("/usr/lib/jvm"), Path("/Library/Java/JavaVirtualMachines"))

SHORT_LIVED = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Flags for a Java of seconds to minutes, which wins back neither what the optimising compiler
takes nor what a parallel collector does."""


@dataclass(frozen=True, slots=True)
class Java:
    """One Java on this machine."""

    path: Path
    major: int

    @property
    def home(self) -> Path:
        """What JAVA_HOME must say for scripts to use this Java."""
        return self.path.resolve().parent.parent


def _candidates(env: Mapping[str, str], installed_in: tuple[Path, ...]) -> Iterator[Path]:
    if env.get("JAVA_HOME"):
        yield Path(env["JAVA_HOME"]) / "bin" / "java"
    if on_path := shutil.which("java", path=env.get("PATH", "")):
        yield Path(on_path)
    for folder in installed_in:
        yield from sorted(folder.glob("*/bin/java"))
        yield from sorted(folder.glob("*/Contents/Home/bin/java"))


def _major(path: Path) -> int | None:
    try:
        # java -version writes to stderr; `path` is an executable file named java in a place of the
        # user's own choosing.
        done = subprocess.run(
            [str(path), "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(found.group(1)) if found else None


def find_java(
    env: Mapping[str, str] | None = None, installed_in: tuple[Path, ...] | None = None
) -> Java:
    """The first Java from 17 to 23 in JAVA_HOME, on PATH, or where systems install it.

    Raises:
        ConfigurationError: There is none. The message names those found, and the command that
            installs one.
    """
    rejected: dict[Path, int | None] = {}
    for path in _candidates(
        os.environ if env is None else env, INSTALLED_IN if installed_in is None else installed_in
    ):
        real = path.resolve()
        if real in rejected or not os.access(real, os.X_OK):
            continue
        major = _major(real)
        if major is not None and OLDEST <= major <= NEWEST:
            return Java(real, major)
        rejected[real] = major
    found = (
        ", ".join(f"{path} ({major or 'does not run'})" for path, major in rejected.items())
        or "none"
    )
    msg = (
        f"The local Kafka and Spark need Java {OLDEST} to {NEWEST}; found: {found}. "
        "Install one (on Debian or Ubuntu: sudo apt-get install openjdk-17-jre-headless, or "
        "openjdk-21-jre-headless where there is no 17), "
        "or set JAVA_HOME to one."
    )
    raise ConfigurationError(msg)


def main() -> int:
    """Print the path of the Java, for scripts."""
    try:
        sys.stdout.write(f"{find_java().path}\n")
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
