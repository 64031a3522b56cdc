"""The right Java is found, and a wrong one is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.testing.local import java
from dagster_rebalance.testing.local.java import find_java

if TYPE_CHECKING:
    from pathlib import Path


def make_java(home: Path, says: str) -> Path:
    """A program in the place of a Java that answers `java -version` with the given line."""
    path = home / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "says",
    [
        'openjdk version "17.0.15" 2025-04-15',
        'openjdk version "21" 2023-09-19',
        'java version "23.0.1"',
    ],
)
def test_java_from_17_to_23_is_accepted(tmp_path: Path, says: str) -> None:
    path = make_java(tmp_path, says)
    assert find_java({"JAVA_HOME": str(tmp_path)}, ()).path == path


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ('openjdk version "1.8.0_402"', "8"),
        ('openjdk version "25.0.1"', "25"),
        ("not a java", "does not run"),
    ],
)
def test_unsuitable_java_is_reported_with_the_remedy(tmp_path: Path, says: str, found: str) -> None:
    path = make_java(tmp_path, says)
    with pytest.raises(
        ConfigurationError,
        match=(
            rf"need Java 17 to 23; found: {path} \({found}\)"
            r".*apt-get install openjdk-17-jre-headless"
        ),
    ):
        find_java({"JAVA_HOME": str(tmp_path)}, ())


def test_missing_java_is_reported_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="found: none"):
        find_java({"PATH": ""}, ())


def test_suitable_java_is_found_after_an_unsuitable_one(tmp_path: Path) -> None:
    make_java(tmp_path / "default", 'openjdk version "25.0.1"')
    fits = make_java(tmp_path / "jvm" / "java-17", 'openjdk version "17.0.15"')
    found = find_java({"PATH": str(tmp_path / "default" / "bin")}, (tmp_path / "jvm",))
    assert (found.path, found.major, found.home) == (fits, 17, tmp_path / "jvm" / "java-17")


def test_java_command_prints_the_path_or_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(java, "INSTALLED_IN", ())
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java.main() == 1
    assert "need Java 17 to 23" in capsys.readouterr().err
    path = make_java(tmp_path, 'openjdk version "17.0.15"')
    assert java.main() == 0
    assert capsys.readouterr().out == f"{path}\n"
