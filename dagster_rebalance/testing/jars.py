"""This module fetches the jars of the local Kafka and of Spark's Kafka connector, once.

It checks them each time a caller uses them. It owns the cache of jars and what may be in it. It
uses a set of jars only when the set is complete and each jar has the hash that was pinned for it
(`pins/`), or that it had when it was fetched. The Ivy that pyspark ships fetches them and follows
the machine's own settings: no address of a repository stands here.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from dagster_rebalance.core.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.java import find_java
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CACHE_VARIABLE = "DAGSTER_REBALANCE_CACHE"
"""Names the folder for jars; without it they are in the user's cache folder."""

IVY_SETTINGS_VARIABLE = "DAGSTER_REBALANCE_IVY_SETTINGS"
"""Names an ivysettings.xml, where jars must come from a mirror."""

FETCH_LIMIT_S = 900
MANIFEST = "manifest.sha256"
PINS = Path(__file__).parent / "pins"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Names one artifact in a Maven repository."""

    organisation: str
    artifact: str
    version: str


@dataclass(frozen=True, slots=True)
class JarSet:
    """Artifacts that are used together, with all that they depend on.

    Attributes:
        name: The folder's name in the cache, and the pin's.
        artifacts: What is asked for.
        excluded: Organisations whose artifacts are there already.
    """

    name: str
    artifacts: tuple[Coordinates, ...]
    excluded: tuple[str, ...] = ()


def tell_on_stderr(sentence: str) -> None:
    """The progress of a fetch, as lines."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def cache_folder() -> Path:
    """Return the folder of the jars.

    It is DAGSTER_REBALANCE_CACHE, or `dagster-rebalance` in the user's cache folder.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dagster-rebalance"


def pyspark_folder() -> Path:
    """Where pyspark is installed, without importing it.

    Raises:
        ConfigurationError: It is not installed.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        msg = (
            "The local Kafka and Spark need pyspark, which is not installed. Install the extra: "
            "pip install 'dagster-rebalance[testing]'"
        )
        raise ConfigurationError(msg)
    return Path(spec.origin).parent


def fetch(jars: JarSet, *, tell: Callable[[str], None] = tell_on_stderr) -> list[Path]:
    """The jars of the set: from the cache when they are there and sound, else fetched.

    Several processes may ask at once.

    Args:
        jars: What is asked for.
        tell: Gets a sentence for each step of a fetch; nothing when the cache has the jars.

    Raises:
        DagsterRebalanceError: They cannot be fetched, or are not what was pinned.
    """
    folder = cache_folder() / jars.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{jars.name}.lock")):
        problem = _problem(folder, jars)
        if problem is None:
            return sorted(folder.glob("*.jar"))
        if folder.exists():
            tell(f"{jars.name}: {problem}; fetching all again")
            shutil.rmtree(folder)
        partial = folder.with_name(f"{jars.name}.partial")
        _run_ivy(jars, partial, tell)
        fetched = partial / "jars"
        (fetched / MANIFEST).write_text(
            "".join(f"{digest}  {name}\n" for name, digest in _hashes(fetched).items())
        )
        if problem := _problem(fetched, jars):
            shutil.rmtree(partial)
            msg = (
                f"The jars fetched for {jars.name} cannot be used: {problem}. Try again, or look "
                "at what your repository serves."
            )
            raise DagsterRebalanceError(msg)
        fetched.rename(folder)
        shutil.rmtree(partial)
        return sorted(folder.glob("*.jar"))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _hashes(folder: Path) -> dict[str, str]:
    return {
        jar.name: hashlib.sha256(jar.read_bytes()).hexdigest()
        for jar in sorted(folder.glob("*.jar"))
    }


def _read_manifest(path: Path) -> dict[str, str]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {name: digest for digest, name in rows}


def _problem(folder: Path, jars: JarSet) -> str | None:
    """What is wrong with a fetched set, or None.

    The manifest is written last, so without it a fetch was cut short.
    """
    if not (folder / MANIFEST).exists():
        return "the fetch was cut short"
    pin = PINS / f"{jars.name}.sha256"
    expected = _read_manifest(pin if pin.exists() else folder / MANIFEST)
    found = _hashes(folder)
    wrong = [name for name, digest in expected.items() if name in found and found[name] != digest]
    if missing := sorted(expected.keys() - found.keys()):
        return f"missing: {', '.join(missing)}"
    if wrong:
        return f"not the file that was expected: {', '.join(wrong)}"
    if unknown := sorted(found.keys() - expected.keys()):
        return f"not expected: {', '.join(unknown)}"
    return None


def _ivy_file(jars: JarSet) -> str:
    dependencies = "".join(
        f"<dependency org={quoteattr(a.organisation)} name={quoteattr(a.artifact)} "
        f"rev={quoteattr(a.version)} conf='default->default'/>"
        for a in jars.artifacts
    )
    excluded = "".join(
        f"<exclude org={quoteattr(organisation)}/>" for organisation in jars.excluded
    )
    return (
        "<ivy-module version='2.0'><info organisation='local' module='jars'/><configurations><conf "
        "name='default'/></configurations>"
        f"<dependencies>{dependencies}{excluded}</dependencies></ivy-module>"
    )


def _run_ivy(jars: JarSet, partial: Path, tell: Callable[[str], None]) -> None:
    """Leaves the jars in `partial/jars`.

    What an earlier, cut short fetch has brought is used again: Ivy checks its own cache.
    """
    shutil.rmtree(partial / "jars", ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    log = partial / "ivy.log"
    log.unlink(missing_ok=True)
    (partial / "ivy.xml").write_text(_ivy_file(jars))
    ivy = next((pyspark_folder() / "jars").glob("ivy-*.jar"))
    settings = os.environ.get(IVY_SETTINGS_VARIABLE)
    command: list[str | Path] = [
        find_java().path,
        "-jar",
        ivy,
        "-cache",
        partial / "ivy",
        "-ivy",
        partial / "ivy.xml",
    ]
    command += ["-settings", settings] if settings else []
    command += ["-retrieve", f"{partial}/jars/[artifact]-[revision](-[classifier]).[ext]"]
    tell(f"{jars.name}: fetching into {cache_folder()} (once)")
    with ChildProcess(f"the fetch of {jars.name}", command, log=log) as ivy_process:
        seen = 0

        def is_over() -> bool:
            nonlocal seen
            text = log.read_text(errors="replace")
            found, loaded = text.count("\tfound "), text.count("[SUCCESSFUL ]")
            if found + loaded > seen:
                seen = found + loaded
                tell(
                    f"{jars.name}: {loaded} of {found} jars"
                    if loaded
                    else f"{jars.name}: {found} dependencies found"
                )
            return not ivy_process.is_running

        wait_until(
            is_over,
            timeout_s=FETCH_LIMIT_S,
            what=f"the jars of {jars.name}; {log} has the details",
            interval_s=1,
        )
        if ivy_process.exit_code != 0:
            msg = (
                f"The jars of {jars.name} could not be fetched. Is the network there? Behind a "
                "mirror, name an ivysettings.xml in "
                f"{IVY_SETTINGS_VARIABLE}. Ivy says:\n{ivy_process.tail(15)}"
            )
            raise DagsterRebalanceError(msg)
