"""This module fetches the jars of the local Kafka and of Spark's Kafka connector, once.

It checks them each time a caller uses them. It owns the cache of jars and what may be in it. It
uses a set of jars only when the set is complete and each jar has the hash that was pinned for it
(`pins/`), or that it had when it was fetched. jgo fetches them, which knows where: no address of a
repository stands here. A machine behind a mirror names that in Maven's own settings or a variable.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jgo.maven import Artifact, MavenContext

CACHE_VARIABLE = "DAGSTER_REBALANCE_CACHE"
"""Names the folder for jars; without it they are in the user's cache folder."""

REPOSITORY_VARIABLE = "DAGSTER_REBALANCE_MAVEN"
"""Holds the address of a Maven repository, where jars must come from a mirror."""

REQUEST_LIMIT_S = 60
AT_ONCE = 8
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
            "The local Spark needs pyspark, which is not installed. Install the extra: "
            "pip install 'dagster-rebalance[spark,testing]'"
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
        shutil.rmtree(partial, ignore_errors=True)
        fetched = _download(jars, partial, tell)
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


def _rows(path: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """The hash of each jar, and its path in a repository; manifests of 0.1.0 have only its name."""
    for line in path.read_text().splitlines():
        digest, place = line.split()
        yield digest, PurePosixPath(place)


def _read_manifest(path: Path) -> dict[str, str]:
    return {place.name: digest for digest, place in _rows(path)}


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


def _download(jars: JarSet, partial: Path, tell: Callable[[str], None]) -> Path:
    """Leave the jars and their manifest in a folder below `partial`, and return it."""
    tell(f"{jars.name}: fetching into {cache_folder()} (once)")
    fetched = partial / "jars"
    fetched.mkdir(parents=True)
    maven = _maven(partial / "repository")
    pin = PINS / f"{jars.name}.sha256"
    manifest = {}
    try:
        artifacts = _pinned(maven, pin) if pin.exists() else _resolved(maven, jars)
        for count, path in enumerate(_downloaded(artifacts), start=1):
            tell(f"{jars.name}: {count} of {len(artifacts)} jars")
            place = path.relative_to(maven.repo_cache).as_posix()
            manifest[place] = hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(fetched / path.name)
    except (OSError, RuntimeError, ValueError) as error:  # as jgo and requests raise them
        msg = (
            f"The jars of {jars.name} could not be fetched. Is the network there? Behind a mirror, "
            f"put its address into {REPOSITORY_VARIABLE}, or into settings.xml of Maven; a login "
            f"belongs into .netrc. What happened: {error}"
        )
        raise DagsterRebalanceError(msg) from error
    rows = (f"{digest}  {place}\n" for place, digest in sorted(manifest.items()))
    (fetched / MANIFEST).write_text("".join(rows))
    return fetched


def _maven(folder: Path) -> MavenContext:
    """What knows the machine's repository, Maven Central by default, and keeps files in `folder`.

    Raises:
        ConfigurationError: jgo is not installed, or the variable holds no address.
    """
    try:
        from jgo.maven import MavenContext
    except ImportError as error:
        msg = (
            "The local Kafka needs jgo to fetch its jars. Install the extra: pip install "
            "'dagster-rebalance[testing]'"
        )
        raise ConfigurationError(msg) from error
    address = os.environ.get(REPOSITORY_VARIABLE) or mirror(Path.home() / ".m2" / "settings.xml")
    if address and not address.startswith(("http://", "https://")):
        msg = f"{REPOSITORY_VARIABLE} must begin with http:// or https://, unlike {address!r}."
        raise ConfigurationError(msg)
    chosen = {"mirror": address.rstrip("/")} if address else None
    return MavenContext(
        repo_cache=folder, local_repos=[], remote_repos=chosen, timeout=REQUEST_LIMIT_S
    )


def mirror(settings: Path) -> str | None:
    """The address that Maven's settings give for Maven Central, if any.

    Raises:
        ConfigurationError: They cannot be read.
    """
    if not settings.is_file():
        return None
    try:
        tree = ET.parse(settings)  # noqa: S314 - the user's own file
    except (OSError, ET.ParseError) as error:
        msg = f"{settings}, which may name a mirror for jars, cannot be read: {error}."
        raise ConfigurationError(msg) from error
    for found in tree.iterfind("{*}mirrors/{*}mirror"):
        mirrored = {name.strip() for name in found.findtext("{*}mirrorOf", "").split(",")}
        if mirrored & {"*", "external:*", "central"} and "!central" not in mirrored:
            return found.findtext("{*}url", "").strip()
    return None


def _pinned(maven: MavenContext, pin: Path) -> list[Artifact]:
    """What a pin names. Nothing has to be asked for that, not even what needs what."""
    return [_artifact(maven, place) for _, place in _rows(pin)]


def _artifact(maven: MavenContext, place: PurePosixPath) -> Artifact:
    *group, artifact, version, file = place.parts
    classifier = file.removeprefix(f"{artifact}-{version}").removesuffix(".jar").removeprefix("-")
    return maven.project(".".join(group), artifact).at_version(version).artifact(classifier)


def _resolved(maven: MavenContext, jars: JarSet) -> list[Artifact]:
    """What is asked for, and all that it depends on."""
    excluded = [maven.project(organisation, "*") for organisation in jars.excluded]
    wanted = [
        maven.create_dependency(f"{a.organisation}:{a.artifact}:{a.version}", excluded)
        for a in jars.artifacts
    ]
    found = [dependency for part in maven.resolver.resolve(wanted) for dependency in part]
    return [d.artifact for d in found if d.scope in {None, "compile", "runtime"}]


def _downloaded(artifacts: Iterable[Artifact]) -> Iterator[Path]:
    """Each jar as soon as it is there."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        downloads = [threads.submit(artifact.resolve) for artifact in artifacts]
        try:
            for download in as_completed(downloads):
                yield download.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
