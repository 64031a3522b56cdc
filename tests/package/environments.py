"""Environments with the built wheel and its requirements, in locked versions from uv's cache."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from email import message_from_string
from importlib.metadata import distribution
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.blocks import ROOT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from email.message import Message
    from pathlib import Path

UV = ROOT / ".cache" / "uv" / "bin" / "uv"
LOCK = ROOT / "requirements" / "dev.txt"


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command that must succeed, without the checkout on its path, and return its output."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def metadata(wheel: Path) -> Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def find_python(version: str) -> str:
    """The interpreter of a version on this machine, or nothing; none is downloaded."""
    command = ("python", "find", "--system", "--no-python-downloads", version)
    found = subprocess.run([UV, *command], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def environment(folder: Path, python: str) -> Path:
    """Make an empty environment; returns the folder of its programs."""
    folder.mkdir(parents=True)
    run(UV, "venv", "--quiet", "--python", python, folder / "venv", cwd=folder)
    return folder / "venv" / "bin"


def install(programs: Path, wheel: Path, *tools: str) -> None:
    """Install the wheel with all that uv finds it to need, and tools of a test."""
    options = ("--quiet", "--python", programs / "python", "--constraints", LOCK)
    run(UV, "pip", "install", *options, wheel, *tools, cwd=programs)


def install_extra(programs: Path, wheel: Path, extra: str) -> None:
    """Install the wheel and an extra's requirements, as locked.

    With hashes and without resolution, uv uses the pyspark that bootstrap has built instead of
    building it again, which takes a minute.
    """
    required = metadata(wheel).get_all("Requires-Dist", [])
    names = closure([Requirement(text) for text in required], {extra})
    entries = re.split(r"\n(?=[a-z0-9])", LOCK.read_text())
    wanted = programs / "wanted.txt"
    wanted.write_text("\n".join(e for e in entries if e.partition("==")[0] in names) + "\n")
    options = ("--quiet", "--python", programs / "python", "--build-constraints", LOCK)
    run(UV, "pip", "sync", *options, "--require-hashes", wanted, cwd=programs)
    run(UV, "pip", "install", *options, "--no-deps", wheel, cwd=programs)
    run(UV, "pip", "check", "--python", programs / "python", cwd=programs)


def closure(requirements: Iterable[Requirement], extras: Collection[str]) -> set[str]:
    """Return the names of all requirements of some requirements, by the installed packages."""
    found: dict[str, set[str]] = {}
    queue = [(requirement, frozenset(extras)) for requirement in requirements]
    while queue:
        requirement, chosen = queue.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in {"", *chosen}):
            continue
        name = canonicalize_name(requirement.name)
        known = found.get(name)
        if known is not None and requirement.extras <= known:
            continue
        found[name] = (known or set()) | requirement.extras
        further = distribution(name).requires or []
        queue += [(Requirement(text), frozenset(found[name])) for text in further]
    return set(found)
