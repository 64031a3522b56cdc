"""Find a Java on this machine for the local Kafka and Spark, and archives of loaded classes.

`python -m dagster_rebalance.testing.local.java` prints the path, or what to install.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.testing.local.jars import MANIFEST, cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

OLDEST = 17
"""Kafka 4 and Spark 4 are compiled for Java 17."""

NEWEST = 23
"""Java 24 removed the security manager (JEP 486), which the Hadoop client of Spark needs."""

INSTALLED_IN = (Path("/usr/lib/jvm"), Path("/Library/Java/JavaVirtualMachines"))

SHORT_LIVED = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Flags for a process of seconds to minutes, for which an optimising compiler and a parallel
collector cost more than they save."""


@dataclass(frozen=True, slots=True)
class Java:
    """One Java on this machine."""

    path: Path
    major: int

    @property
    def home(self) -> Path:
        """The JAVA_HOME of this Java."""
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
        # java -version writes to stderr.
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
    """Return the first Java from 17 to 23 in JAVA_HOME, on PATH, or in the system's folders.

    Raises:
        ConfigurationError: There is none. The message names the Javas found, and how to install
            one.
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


@dataclass
class ClassArchive:
    """Archive of the classes of one program: Java starts in half the time (AppCDS, JEP 350).

    The first process with the flags of `making` writes the archive when it exits normally. Java
    ignores an archive of another class path or Java version.

    Attributes:
        name: The name of the program.
        path: The file; None if this Java supports no archive.
    """

    name: str
    path: Path | None
    _part: Path | None = field(init=False, default=None)

    @classmethod
    def of(cls, name: str, java: Java, jars: Sequence[Path], flags: Sequence[str]) -> ClassArchive:
        """Return the archive of a program for this Java, class path and flags."""
        # It extends the archive that most builds of Java include.
        base, modules = (java.home / "lib" / file for file in ("server/classes.jsa", "modules"))
        try:
            parts = [path.stat() for path in (base, modules, jars[0].with_name(MANIFEST))]
        except OSError:
            return cls(name, None)
        inputs = [str(java.path), *flags, *map(str, jars)]
        inputs += [f"{part.st_size} {part.st_mtime_ns}" for part in parts]
        digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]
        return cls(name, cache_folder() / f"{name}-{digest}.jsa")

    @property
    def using(self) -> list[str]:
        """JVM flags that use the archive; empty if it is missing or another user owns it."""
        try:
            is_own = self.path is not None and self.path.stat().st_uid == os.getuid()
        except OSError:
            return []
        return [f"-XX:SharedArchiveFile={self.path}", "-Xshare:auto"] if is_own else []

    def making(self) -> list[str]:
        """Return the flags with which a process writes the archive; none if it exists."""
        if self.path is None or self.path.exists():
            return []
        self._part = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        return [f"-XX:ArchiveClassesAtExit={self._part}"]

    @property
    def is_being_made(self) -> bool:
        """Whether a running process will write the archive when it is shut down."""
        return self._part is not None

    def keep(self) -> None:
        """Publish the archive of the ended process, and remove its predecessors."""
        part, self._part = self._part, None
        if part is None or self.path is None:
            return
        with suppress(FileNotFoundError):  # a killed process writes none
            part.rename(self.path)
            for other in self.path.parent.glob(f"{self.name}-*.jsa"):
                if other != self.path:
                    other.unlink(missing_ok=True)


def main() -> int:
    """Print the path for scripts."""
    try:
        sys.stdout.write(f"{find_java().path}\n")
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
