"""The cache of jars: downloads, verification and errors.

jgo is real; its repository is a local folder, so no network is needed.
"""

from __future__ import annotations

import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.testing.broker import kafka_jars
from dagster_rebalance.testing.local import jars
from dagster_rebalance.testing.local.jars import Coordinates, JarSet, fetch

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOL = JarSet("tool-1.0", (Coordinates("org.example", "tool", "1.0"),), excluded=("org.present",))

SETTINGS = """
<settings xmlns="http://maven.apache.org/SETTINGS/1.2.0"><mirrors>
  <mirror><id>other</id><mirrorOf>elsewhere</mirrorOf><url>http://other.example</url></mirror>
  <mirror><id>own</id><mirrorOf>{0}</mirrorOf><url> http://own.example/maven </url></mirror>
</mirrors></settings>
"""

POM = """
<project><modelVersion>4.0.0</modelVersion><groupId>{0}</groupId><artifactId>{1}</artifactId><version>1.0</version>
<dependencies>{2}</dependencies></project>
"""


def publish(repository: Path, organisation: str, artifact: str, *needs: str) -> Path:
    """Put an artifact into the repository, and return its jar."""
    folder = repository / organisation.replace(".", "/") / artifact / "1.0"
    folder.mkdir(parents=True)
    dependency = (
        "<dependency><groupId>{}</groupId><artifactId>{}</artifactId>"
        "<version>1.0</version></dependency>"
    )
    dependencies = "".join(dependency.format(*need.split(":")) for need in needs)
    (folder / f"{artifact}-1.0.pom").write_text(POM.format(organisation, artifact, dependencies))
    jar = folder / f"{artifact}-1.0.jar"
    with zipfile.ZipFile(jar, "w") as content:
        content.writestr("what", artifact)
    return jar


class Files(SimpleHTTPRequestHandler):
    """Serves a folder, and writes no line about it."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a repository with `tool`, its dependency `part`, and the excluded `there`."""
    folder = tmp_path / "repository"
    publish(folder, "org.example", "tool", "org.example:part", "org.present:there")
    publish(folder, "org.example", "part")
    monkeypatch.setenv(jars.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(jars, "PINS", tmp_path / "pins")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder))) as server:
        monkeypatch.setenv(jars.REPOSITORY_VARIABLE, f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder
        server.shutdown()
        thread.join()


def cached(tmp_path: Path) -> Path:
    """Where the set is once it is fetched."""
    return tmp_path / "cache" / TOOL.name


def test_jars_are_downloaded_with_dependencies_and_then_cached(repository: Path) -> None:
    told: list[str] = []
    first = fetch(TOOL, tell=told.append)
    assert [jar.name for jar in first] == ["part-1.0.jar", "tool-1.0.jar"]
    assert told
    told.clear()
    repository.rename(repository.with_name("gone"))
    assert fetch(TOOL, tell=told.append) == first
    assert told == []


@pytest.mark.usefixtures("repository")
def test_interrupted_download_is_repeated(tmp_path: Path) -> None:
    fetch(TOOL)
    (cached(tmp_path) / jars.MANIFEST).unlink()
    (cached(tmp_path) / "part-1.0.jar").unlink()
    told: list[str] = []
    assert len(fetch(TOOL, tell=told.append)) == 2
    assert told[0] == "tool-1.0: the download was interrupted; downloading all again"


@pytest.mark.usefixtures("repository")
def test_leftovers_of_a_killed_download_are_ignored(tmp_path: Path) -> None:
    partial = tmp_path / "cache" / f"{TOOL.name}.partial" / "jars"
    partial.mkdir(parents=True)
    (partial / "half-1.0.jar").write_bytes(b"half")
    assert [jar.name for jar in fetch(TOOL)] == ["part-1.0.jar", "tool-1.0.jar"]
    assert not partial.parent.exists()


@pytest.mark.usefixtures("repository")
def test_damaged_jar_in_the_cache_is_downloaded_again(tmp_path: Path) -> None:
    fetch(TOOL)
    jar = cached(tmp_path) / "part-1.0.jar"
    sound = jar.read_bytes()
    jar.write_bytes(sound[:-1])
    told: list[str] = []
    fetch(TOOL, tell=told.append)
    assert jar.read_bytes() == sound
    assert (
        told[0] == "tool-1.0: not the file that was expected: part-1.0.jar; downloading all again"
    )


def test_jar_that_differs_from_its_pin_is_refused(repository: Path, tmp_path: Path) -> None:
    fetch(TOOL)
    jars.PINS.mkdir()
    (cached(tmp_path) / jars.MANIFEST).rename(jars.PINS / f"{TOOL.name}.sha256")
    with (repository / "org/example/part/1.0/part-1.0.jar").open("ab") as jar:
        jar.write(b"!")
    with pytest.raises(
        DagsterRebalanceError,
        match=r"cannot be used: not the file that was expected: part-1\.0\.jar",
    ):
        fetch(TOOL)
    assert not cached(tmp_path).exists()


def test_pinned_jars_are_downloaded_without_resolution(repository: Path, tmp_path: Path) -> None:
    fetch(TOOL)
    jars.PINS.mkdir()
    (cached(tmp_path) / jars.MANIFEST).rename(jars.PINS / f"{TOOL.name}.sha256")
    for pom in repository.rglob("*.pom"):
        pom.unlink()
    told: list[str] = []
    assert [jar.name for jar in fetch(TOOL, tell=told.append)] == ["part-1.0.jar", "tool-1.0.jar"]
    assert told[-1] == "tool-1.0: 2 of 2 jars"


@pytest.mark.usefixtures("repository")
def test_missing_jar_is_reported_with_the_remedy() -> None:
    absent = JarSet("absent", (Coordinates("org.example", "absent", "1.0"),))
    with pytest.raises(
        DagsterRebalanceError, match=r"org\.example:absent(.|\n)*DAGSTER_REBALANCE_MAVEN"
    ):
        fetch(absent)


@pytest.mark.usefixtures("repository")
def test_unreachable_repository_is_reported_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(jars.REPOSITORY_VARIABLE, "http://127.0.0.1:1")
    with pytest.raises(DagsterRebalanceError, match=r"Check the network"):
        fetch(TOOL)


@pytest.mark.usefixtures("repository")
def test_invalid_repository_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jars.REPOSITORY_VARIABLE, "/etc/ivysettings.xml")
    with pytest.raises(ConfigurationError, match="must begin with http"):
        fetch(TOOL)


@pytest.mark.parametrize(
    ("mirrored", "address"),
    [
        ("central", "http://own.example/maven"),
        ("*", "http://own.example/maven"),
        ("external:*, !internal", "http://own.example/maven"),
        ("*,!central", None),
    ],
)
def test_mirror_in_mavens_settings_is_used(
    mirrored: str, address: str | None, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.xml"
    assert jars.mirror(settings) is None
    settings.write_text(SETTINGS.format(mirrored))
    assert jars.mirror(settings) == address


def test_unreadable_maven_settings_are_reported(tmp_path: Path) -> None:
    settings = tmp_path / "settings.xml"
    settings.write_text("<settings>")
    with pytest.raises(ConfigurationError, match=r"settings\.xml, which may name a mirror"):
        jars.mirror(settings)


def test_pin_of_the_broker_has_the_path_of_each_jar() -> None:
    pin = Path(jars.__file__).parent / "pins" / f"{kafka_jars('4.1.1').name}.sha256"
    places = [line.split()[1] for line in pin.read_text().splitlines()]
    assert len(places) == 46
    assert "org/apache/kafka/kafka_2.13/4.1.1/kafka_2.13-4.1.1.jar" in places


@pytest.mark.usefixtures("repository")
def test_concurrent_callers_download_once() -> None:
    told: list[str] = []
    found: list[list[Path]] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch(TOOL, tell=told.append)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert sum("downloading into" in sentence for sentence in told) == 1
