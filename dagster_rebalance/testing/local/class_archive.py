"""The archive of a program's classes lets Java start it in half the time (AppCDS, JEP 350).

Owns where an archive is, and for which Java and which jars it is good. The first process that is
given `ClassArchive.making` writes it when it ends in good order. Java itself ignores an archive
that does not fit.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_rebalance.testing.local.jars import MANIFEST, cache_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dagster_rebalance.testing.local.java import Java


@dataclass
class ClassArchive:
    """The archive of one program.

    Attributes:
        name: The program's.
        path: Where it is, or will be; None where this Java cannot have one.
    """

    name: str
    path: Path | None
    _part: Path | None = field(init=False, default=None)

    @classmethod
    def of(cls, name: str, java: Java, jars: Sequence[Path], flags: Sequence[str]) -> ClassArchive:
        """The archive of a program for a Java.

        Args:
            name: The program's.
            java: Runs it.
            jars: Its class path, as `jars.fetch` returns it.
            flags: What Java is told beside that.
        """
        # An archive is one on top of that which Java brings, and which not every build has.
        base, modules = (java.home / "lib" / file for file in ("server/classes.jsa", "modules"))
        try:
            parts = [path.stat() for path in (base, modules, jars[0].with_name(MANIFEST))]
        except OSError:
            return cls(name, None)
        seen = [str(java.path), *flags, *map(str, jars)]
        seen += [f"{part.st_size} {part.st_mtime_ns}" for part in parts]
        digest = hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]
        return cls(name, cache_folder() / f"{name}-{digest}.jsa")

    @property
    def using(self) -> list[str]:
        """What Java is told to use it. Nothing, unless it is there and this user's own."""
        try:
            is_mine = self.path is not None and self.path.stat().st_uid == os.getuid()
        except OSError:
            return []
        return [f"-XX:SharedArchiveFile={self.path}", "-Xshare:auto"] if is_mine else []

    def making(self) -> list[str]:
        """What one Java is told to make it at its end. Nothing, if there is one."""
        if self.path is None or self.path.exists():
            return []
        self._part = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        return [f"-XX:ArchiveClassesAtExit={self._part}"]

    @property
    def is_being_made(self) -> bool:
        """Whether a Java makes it that has to end in good order."""
        return self._part is not None

    def keep(self) -> None:
        """Use from now on what was made, and remove what it replaces. That Java has ended."""
        part, self._part = self._part, None
        if part is None or self.path is None:
            return
        with suppress(FileNotFoundError):  # a Java that was killed has made none
            part.rename(self.path)
            for other in self.path.parent.glob(f"{self.name}-*.jsa"):
                if other != self.path:
                    other.unlink(missing_ok=True)
