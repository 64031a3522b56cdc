"""A Java that starts from an archive of its classes needs half the time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dagster_rebalance.testing.broker import KafkaCluster, kafka_jars
from dagster_rebalance.testing.local.jars import CACHE_VARIABLE, MANIFEST, fetch
from dagster_rebalance.testing.local.java import ClassArchive, Java


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return jars in a separate cache."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "tool-1"
    folder.mkdir(parents=True)
    (folder / MANIFEST).touch()
    return [folder / "tool.jar"]


@pytest.fixture
def java(tmp_path: Path) -> Java:
    """Return a Java with an archive of its standard classes."""
    home = tmp_path / "java"
    for file in ("bin/java", "lib/modules", "lib/server/classes.jsa"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    return Java(home / "bin" / "java", 17)


def test_class_archive_is_written_by_the_first_process_and_used_by_the_next(
    java: Java, jars: list[Path]
) -> None:
    archive = ClassArchive.of("tool-1", java, jars, ["-flag"])
    assert archive.path is not None
    assert archive.using == []
    (making,) = archive.making()
    made = Path(making.partition("=")[2])
    assert (made.parent, made == archive.path) == (archive.path.parent, False)
    assert archive.is_being_made
    older = archive.path.with_name("tool-1-0123.jsa")
    for path in (made, older):
        path.touch()
    archive.keep()
    following = ClassArchive.of("tool-1", java, jars, ["-flag"])
    assert following.using == [f"-XX:SharedArchiveFile={archive.path}", "-Xshare:auto"]
    assert following.making() == []
    assert not following.is_being_made
    assert not older.exists(), "the older archive is unused"


def test_killed_process_writes_no_class_archive(java: Java, jars: list[Path]) -> None:
    archive = ClassArchive.of("tool-1", java, jars, ())
    assert archive.making()
    archive.keep()
    assert archive.using == []
    assert ClassArchive.of("tool-1", java, jars, ()).making()


def test_class_archive_depends_on_java_flags_and_jars(java: Java, jars: list[Path]) -> None:
    first = ClassArchive.of("tool-1", java, jars, ()).path
    assert ClassArchive.of("tool-1", java, jars, ["-flag"]).path != first
    (java.home / "lib" / "modules").write_text("updated")
    assert ClassArchive.of("tool-1", java, jars, ()).path != first


def test_java_without_base_archive_gets_no_class_archive(java: Java, jars: list[Path]) -> None:
    (java.home / "lib" / "server" / "classes.jsa").unlink()
    archive = ClassArchive.of("tool-1", java, jars, ())
    assert (archive.path, archive.using, archive.making()) == (None, [], [])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the jars of Kafka and no archive."""
    wanted = kafka_jars(KafkaCluster().version)
    (jar, *_) = fetch(wanted)
    shutil.copytree(jar.parent, tmp_path / wanted.name)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.broker
def test_second_kafka_uses_the_class_archive_of_the_first(cache: Path) -> None:
    for archives in (0, 1):
        with KafkaCluster() as kafka:
            (pid,) = kafka.pids
            archive = f"{cache}/{kafka_jars(kafka.version).name}-"
            assert (archive in Path(f"/proc/{pid}/maps").read_text()) == bool(archives)
            assert len(list(cache.glob("*.jsa"))) == archives
    assert len(list(cache.glob("*.jsa*"))) == 1


@pytest.mark.broker
def test_killed_kafka_can_be_stopped_repeatedly(
    cache: Path,
) -> None:
    kafka = KafkaCluster().start()
    kafka.kill()
    kafka.stop()
    kafka.stop()
    assert list(cache.glob("*.jsa*")) == []
