"""The wheel and the sdist: metadata, README and version."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.docs.blocks import ROOT
from tests.package.environments import metadata, run

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

pytestmark = pytest.mark.package
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "dagster_rebalance")


def built_from(source: Path, target: Path) -> Message:
    """The metadata of a wheel that is built from another folder than the checkout."""
    hatchling = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target)
    run(*hatchling, cwd=source)
    (wheel,) = target.glob("*.whl")
    return metadata(wheel)


def copied(folder: Path) -> Path:
    """Copy the sources of a wheel without git."""
    folder.mkdir()
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def test_twine_accepts_wheel_and_sdist(built: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_wheel_metadata_is_complete(wheel: Path) -> None:
    found = metadata(wheel)
    for field in ("Summary", "Author", "License-Expression", "Keywords", "Requires-Python"):
        assert found[field], field
    assert found["Description-Content-Type"] == "text/markdown"


def test_readme_in_the_metadata_has_no_relative_links(wheel: Path) -> None:
    shown = str(metadata(wheel).get_payload())
    targets = re.findall(r"\]\(([^)]*)\)", shown)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "![" not in shown
    assert "docs/your-own-project.md" in shown
    assert "dg.EnvVar(" in shown


def test_wheel_has_only_the_package_and_sdist_the_tests(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        assert "dagster_rebalance/py.typed" in archive.namelist()
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dagster_rebalance"}
    with tarfile.open(sdist) as archive_:
        held = {name.partition("/")[2].partition("/")[0] for name in archive_.getnames()}
    assert {"tests", "docs", "proofs", "tools", "requirements", "Makefile"} <= held
    assert not held & {".venv", ".cache", "build"}


def test_version_is_that_of_the_tag(tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "a"), ("tag", "v3.2.1")):
        run(*git, *command, cwd=source)
    assert built_from(source, tmp_path / "dist")["Version"] == "3.2.1"


def test_copy_without_git_and_sdist_can_be_built(built: Path, tmp_path: Path) -> None:
    plain = built_from(copied(tmp_path / "plain"), tmp_path / "plain-dist")
    assert plain["Version"] == "0.2.0.dev0"
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    again = built_from(unpacked, tmp_path / "sdist-dist")
    assert f"dagster_rebalance-{again['Version']}" == unpacked.name
