"""By the version of its code a sensor knows that a streaming run has old code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.orchestration.resources.hardcoded_secrets import hidden_settings
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.streaming.versions import code_version

if TYPE_CHECKING:
    from collections.abc import Callable


def load(folder: Path, name: str, wanted: str = "body") -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, wanted)
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "assets.py").write_text("def body(): return 1\n")
    (tmp_path / "helpers.py").write_text("LIMIT = 1\n")
    return tmp_path


def test_code_version_ignores_the_folder_of_the_code(project: Path, tmp_path: Path) -> None:
    version = code_version([load(project, "assets")], "a")
    assert code_version([load(project, "assets")], "a") == version
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("assets.py", "helpers.py"):
        (copy / name).write_text((project / name).read_text())
    assert code_version([load(copy, "assets")], "a") == version


def test_code_version_ignores_the_order_of_the_folders_of_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two packages have files of the same name, and a deployment may put either one first."""
    versions = set()
    for first, second in (("a", "b"), ("b", "a")):
        folders = [tmp_path / f"{first}{second}" / name for name in (first, second)]
        bodies = []
        for folder, package in zip(folders, ("one_shop", "other_shop"), strict=True):
            (folder / package).mkdir(parents=True)
            (folder / package / "__init__.py").write_text(f"def body(): return '{package}'\n")
            with monkeypatch.context() as path:
                path.syspath_prepend(folder)
                sys.modules.pop(package, None)
                bodies.append(importlib.import_module(package).body)
        versions.add(code_version(bodies, "a"))
    assert len(versions) == 1


def test_change_of_an_imported_module_is_a_new_version(project: Path) -> None:
    body = load(project, "assets")
    before = code_version([body], "a")
    (project / "helpers.py").write_text("LIMIT = 2\n")
    assert code_version([body], "a") != before


@pytest.mark.parametrize("of", ["partial", "object", "method"])
def test_partial_and_callable_object_count_with_their_file(project: Path, of: str) -> None:
    (project / "workers.py").write_text(
        "class Worker:\n    def __call__(self): return 1\n    def work(self): return 1\n"
    )
    body, worker = load(project, "assets"), load(project, "workers", "Worker")()
    given = {"partial": partial(partial(body)), "object": worker, "method": worker.work}[of]
    before = code_version([given], "a")
    (project / "helpers.py").write_text("LIMIT = 2\n")
    assert code_version([given], "a") != before


def test_package_counts_as_a_whole(tmp_path: Path) -> None:
    deep = tmp_path / "team" / "assets"
    deep.mkdir(parents=True)
    for folder in (tmp_path / "team", deep):
        (folder / "__init__.py").write_text("")
    (deep / "orders.py").write_text("def body(): return 1\n")
    body = load(deep, "orders")
    before = code_version([body], "a")
    (tmp_path / "team" / "rates.py").write_text("RATE = 2\n")
    assert code_version([body], "a") != before


def test_folder_scaffolded_into_a_package_counts_with_it(tmp_path: Path) -> None:
    """`dg scaffold` writes no __init__.py beside work.py."""
    shop = tmp_path / "src" / "shop"
    orders = shop / "defs" / "orders"
    orders.mkdir(parents=True)
    for file in ("__init__.py", "definitions.py", "defs/__init__.py"):
        (shop / file).touch()
    (orders / "work.py").write_text("def body(): return 1\n")
    body = load(orders, "work")
    before = code_version([body], "a")
    (orders / "work.py").write_text("def body(): return 2\n")
    edited = code_version([body], "a")
    assert edited != before
    (shop / "definitions.py").write_text("RATE = 2\n")
    assert code_version([body], "a") != edited


def test_folder_scaffolded_deep_into_a_package_counts_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dg scaffold defs ... kafka/orders` makes two folders without an __init__.py."""
    shop = tmp_path / "scaffolded_shop"
    orders = shop / "defs" / "kafka" / "orders"
    orders.mkdir(parents=True)
    for file in ("__init__.py", "lib.py", "defs/__init__.py"):
        (shop / file).touch()
    (orders / "work.py").write_text("def body(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    body = importlib.import_module("scaffolded_shop.defs.kafka.orders.work").body
    before = code_version([body], "a")
    (shop / "lib.py").write_text("RATE = 2\n")
    assert code_version([body], "a") != before


def test_linked_file_counts_whatever_its_name(project: Path) -> None:
    """Build tools keep files in a store, named by a digest, and link modules to them."""
    stored = project / "store" / "4f0a9c11"
    stored.parent.mkdir()
    stored.write_text("def body(): return 1\n")
    (project / "linked.py").symlink_to(stored)
    body = load(project, "linked")
    before = code_version([body], "a")
    stored.write_text("def body(): return 2\n")
    assert code_version([body], "a") != before


def test_settings_and_image_are_part_of_the_version(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = load(project, "assets")
    before = code_version([body], "a")
    assert code_version([body], "b") != before
    monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", "team:2")
    assert code_version([body], "a") != before


def test_possible_secret_counts_by_its_name() -> None:
    """The version is a public tag: a short secret could be guessed from it."""
    given = KafkaConsumerResource(
        bootstrap_servers="here:1",
        group_id="shop",
        topics=["orders"],
        sasl_password="pw",  # noqa: S106 - refused by what builds definitions
        client_config={
            "ssl.key.password": "pw",
            "ssl.key.location": "/keys/shop",
            "sasl.oauthbearer.config": "clientSecret=pw",
            "sasl.oauthbearer.client.id": dg.EnvVar("CLIENT_ID"),
        },
    )
    assert list(hidden_settings(given)) == [
        ("sasl_password", "sasl_password", ""),
        ("client_config", "sasl.oauthbearer.client.id", "CLIENT_ID"),
        ("client_config", "sasl.oauthbearer.config", ""),
        ("client_config", "ssl.key.location", "/keys/shop"),
        ("client_config", "ssl.key.password", ""),
    ]


def test_this_package_is_part_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_version([], "a")
    read = Path.read_bytes

    def upgraded(file: Path) -> bytes:
        return b"new" if file.name == "stream_run.py" else read(file)

    monkeypatch.setattr(Path, "read_bytes", upgraded)
    assert code_version([], "a") != before


def test_code_without_a_file_counts_by_its_settings() -> None:
    body = eval("lambda: 1")  # noqa: S307 - code without a file
    assert code_version([body], "a") == code_version([], "a")
