"""Cache of the jars of the local Kafka and of Spark's libraries.

jgo downloads a set of jars once. Each use verifies that the set is complete and that each jar has
its pinned hash (`pins/`) or, without a pin, the hash of its download. A mirror is set in Maven's
settings or in an environment variable.
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
"""The variable with the folder of the jars; by default it is in the user's cache folder."""

REPOSITORY_VARIABLE = "DAGSTER_REBALANCE_MAVEN"
"""The variable with the address of a Maven repository to use as a mirror."""

REQUEST_LIMIT_S = 60
AT_ONCE = 8
MANIFEST = "manifest.sha256"
PINS = Path(__file__).parent / "pins"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Coordinates of one artifact in a Maven repository."""

    organisation: str
    artifact: str
    version: str


@dataclass(frozen=True, slots=True)
class JarSet:
    """Artifacts that are used together, with their dependencies.

    Attributes:
        name: Name of the folder in the cache, and of the pin.
        artifacts: The artifacts without dependencies.
        excluded: Organisations whose artifacts are available already.
    """

    name: str
    artifacts: tuple[Coordinates, ...]
    excluded: tuple[str, ...] = ()


def print_on_stderr(sentence: str) -> None:
    """Print a progress message."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def cache_folder() -> Path:
    """Return DAGSTER_REBALANCE_CACHE, or `dagster-rebalance` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dagster-rebalance"


def pyspark_folder() -> Path:
    """Return the folder of the installed pyspark, without importing it.

    Raises:
        ConfigurationError: pyspark is not installed.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        msg = (
            "The local Spark needs pyspark, which is not installed. Install the extra: "
            "pip install 'dagster-rebalance[spark,testing]'"
        )
        raise ConfigurationError(msg)
    return Path(spec.origin).parent


def fetch(jars: JarSet, *, tell: Callable[[str], None] = print_on_stderr) -> list[Path]:
    """Return the jars of a set from the cache, and download them if necessary.

    Several processes may call it concurrently. `tell` receives the progress of a download.

    Raises:
        DagsterRebalanceError: The download failed, or the jars are not the pinned ones.
    """
    folder = cache_folder() / jars.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{jars.name}.lock")):
        problem = _problem(folder, jars)
        if problem is None:
            return sorted(folder.glob("*.jar"))
        if folder.exists():
            tell(f"{jars.name}: {problem}; downloading all again")
            shutil.rmtree(folder)
        partial = folder.with_name(f"{jars.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        downloaded = _download(jars, partial, tell)
        if problem := _problem(downloaded, jars):
            shutil.rmtree(partial)
            msg = (
                f"The downloaded jars of {jars.name} cannot be used: {problem}. Try again, or "
                "check what your repository serves."
            )
            raise DagsterRebalanceError(msg)
        downloaded.rename(folder)
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
    """Yield each jar's hash and its path in a repository; manifests of 0.1.0 have only its name."""
    for line in path.read_text().splitlines():
        digest, jar = line.split()
        yield digest, PurePosixPath(jar)


def _problem(folder: Path, jars: JarSet) -> str | None:
    if not (folder / MANIFEST).exists():  # written last
        return "the download was interrupted"
    pin = PINS / f"{jars.name}.sha256"
    expected = {
        jar.name: digest for digest, jar in _rows(pin if pin.exists() else folder / MANIFEST)
    }
    actual = _hashes(folder)
    if missing := sorted(expected.keys() - actual.keys()):
        return f"missing: {', '.join(missing)}"
    if wrong := [name for name, digest in expected.items() if actual[name] != digest]:
        return f"not the file that was expected: {', '.join(wrong)}"
    if unexpected := sorted(actual.keys() - expected.keys()):
        return f"not expected: {', '.join(unexpected)}"
    return None


def _download(jars: JarSet, partial: Path, tell: Callable[[str], None]) -> Path:
    """Download the jars and write their manifest into a folder below `partial`, and return it."""
    tell(f"{jars.name}: downloading into {cache_folder()} (once)")
    downloaded = partial / "jars"
    downloaded.mkdir(parents=True)
    maven = _maven(partial / "repository")
    pin = PINS / f"{jars.name}.sha256"
    manifest = {}
    try:
        artifacts = _pinned(maven, pin) if pin.exists() else _resolved(maven, jars)
        for count, path in enumerate(_downloaded(artifacts), start=1):
            tell(f"{jars.name}: {count} of {len(artifacts)} jars")
            jar = path.relative_to(maven.repo_cache).as_posix()
            manifest[jar] = hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(downloaded / path.name)
    except (OSError, RuntimeError, ValueError) as error:  # from jgo and requests
        msg = (
            f"The jars of {jars.name} could not be downloaded: {error}. Check the network. Behind "
            f"a mirror, set its address in {REPOSITORY_VARIABLE}, or in Maven's settings.xml; a "
            "login goes into .netrc."
        )
        raise DagsterRebalanceError(msg) from error
    rows = (f"{digest}  {jar}\n" for jar, digest in sorted(manifest.items()))
    (downloaded / MANIFEST).write_text("".join(rows))
    return downloaded


def _maven(folder: Path) -> MavenContext:
    """Return a Maven client that stores its files in `folder`.

    The client reads from the repository that `REPOSITORY_VARIABLE` or the user's settings.xml
    names, or from Maven Central.

    Raises:
        ConfigurationError: jgo is not installed, or the variable is not an address.
    """
    try:
        from jgo.maven import MavenContext
    except ImportError as error:
        msg = (
            "The local Kafka needs jgo to download its jars. Install the extra: pip install "
            "'dagster-rebalance[testing]'"
        )
        raise ConfigurationError(msg) from error
    address = os.environ.get(REPOSITORY_VARIABLE) or mirror(Path.home() / ".m2" / "settings.xml")
    if address and not address.startswith(("http://", "https://")):
        msg = f"{REPOSITORY_VARIABLE} must begin with http:// or https://, not {address!r}."
        raise ConfigurationError(msg)
    mirrors = {"mirror": address.rstrip("/")} if address else None
    return MavenContext(
        repo_cache=folder, local_repos=[], remote_repos=mirrors, timeout=REQUEST_LIMIT_S
    )


def mirror(settings: Path) -> str | None:
    """Return the mirror of Maven Central in Maven's settings, if any.

    Raises:
        ConfigurationError: The settings cannot be read.
    """
    if not settings.is_file():
        return None
    try:
        tree = ET.parse(settings)  # noqa: S314 - the user's own file
    except (OSError, ET.ParseError) as error:
        msg = f"{settings}, which may name a mirror for jars, cannot be read: {error}."
        raise ConfigurationError(msg) from error
    for entry in tree.iterfind("{*}mirrors/{*}mirror"):
        mirrored = {name.strip() for name in entry.findtext("{*}mirrorOf", "").split(",")}
        if mirrored & {"*", "external:*", "central"} and "!central" not in mirrored:
            return entry.findtext("{*}url", "").strip()
    return None


def _pinned(maven: MavenContext, pin: Path) -> list[Artifact]:
    """Return the artifacts of a pin, without requests for their dependencies."""
    return [_artifact(maven, jar) for _, jar in _rows(pin)]


def _artifact(maven: MavenContext, jar: PurePosixPath) -> Artifact:
    *group, artifact, version, file = jar.parts
    classifier = file.removeprefix(f"{artifact}-{version}").removesuffix(".jar").removeprefix("-")
    return maven.project(".".join(group), artifact).at_version(version).artifact(classifier)


def _resolved(maven: MavenContext, jars: JarSet) -> list[Artifact]:
    """Return the artifacts with their dependencies."""
    excluded = [maven.project(organisation, "*") for organisation in jars.excluded]
    requested = [
        maven.create_dependency(f"{a.organisation}:{a.artifact}:{a.version}", excluded)
        for a in jars.artifacts
    ]
    resolved = [dependency for part in maven.resolver.resolve(requested) for dependency in part]
    return [d.artifact for d in resolved if d.scope in {None, "compile", "runtime"}]


def _downloaded(artifacts: Iterable[Artifact]) -> Iterator[Path]:
    """Download the jars concurrently, and yield each one when it is complete."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        downloads = [threads.submit(artifact.resolve) for artifact in artifacts]
        try:
            for download in as_completed(downloads):
                yield download.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
