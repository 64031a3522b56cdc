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
from dagster_rebalance.orchestration.streaming.code_version import code_version

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


def test_the_same_code_has_the_same_version_wherever_it_is(project: Path, tmp_path: Path) -> None:
    """A reload changes nothing, and neither does a deploy of the same files."""
    version = code_version([load(project, "assets")], "a")
    assert code_version([load(project, "assets")], "a") == version
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("assets.py", "helpers.py"):
        (copy / name).write_text((project / name).read_text())
    assert code_version([load(copy, "assets")], "a") == version


def test_a_change_of_what_the_asset_imports_is_a_new_version(project: Path) -> None:
    """Not the function alone makes the output."""
    body = load(project, "assets")
    before = code_version([body], "a")
    (project / "helpers.py").write_text("LIMIT = 2\n")
    assert code_version([body], "a") != before


@pytest.mark.parametrize("of", ["partial", "object", "method"])
def test_a_partial_and_a_callable_object_count_with_the_file_that_they_come_from(
    project: Path, of: str
) -> None:
    """Dagster makes assets of them, too."""
    (project / "workers.py").write_text(
        "class Worker:\n    def __call__(self): return 1\n    def work(self): return 1\n"
    )
    body, worker = load(project, "assets"), load(project, "workers", "Worker")()
    given = {"partial": partial(partial(body)), "object": worker, "method": worker.work}[of]
    before = code_version([given], "a")
    (project / "helpers.py").write_text("LIMIT = 2\n")
    assert code_version([given], "a") != before


def test_a_package_counts_as_a_whole(tmp_path: Path) -> None:
    """From wherever in it the asset comes."""
    deep = tmp_path / "team" / "assets"
    deep.mkdir(parents=True)
    for folder in (tmp_path / "team", deep):
        (folder / "__init__.py").write_text("")
    (deep / "orders.py").write_text("def body(): return 1\n")
    body = load(deep, "orders")
    before = code_version([body], "a")
    (tmp_path / "team" / "rates.py").write_text("RATE = 2\n")
    assert code_version([body], "a") != before


def test_a_folder_that_was_scaffolded_into_a_package_counts_with_it(tmp_path: Path) -> None:
    """`dg scaffold` writes no __init__.py beside work.py: an edited one must replace the runs."""
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


def test_a_folder_that_was_scaffolded_deep_into_a_package_counts_with_it(
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


def test_a_file_that_a_link_leads_to_counts_whatever_its_name(project: Path) -> None:
    """Build tools keep files in a store, named by a digest, and link modules to them."""
    stored = project / "store" / "4f0a9c11"
    stored.parent.mkdir()
    stored.write_text("def body(): return 1\n")
    (project / "linked.py").symlink_to(stored)
    body = load(project, "linked")
    before = code_version([body], "a")
    stored.write_text("def body(): return 2\n")
    assert code_version([body], "a") != before


def test_settings_and_the_image_are_part_of_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is new in the image makes new runs, too."""
    body = load(project, "assets")
    before = code_version([body], "a")
    assert code_version([body], "b") != before
    monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", "team:2")
    assert code_version([body], "a") != before


def test_of_what_may_be_a_secret_the_name_counts_alone() -> None:
    """The version is a tag, which everybody sees: a short secret could be guessed from it."""
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


def test_this_package_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade changes what a streaming run does; runs of the old one must not go on."""
    before = code_version([], "a")
    read = Path.read_bytes

    def upgraded(file: Path) -> bytes:
        return b"new" if file.name == "run.py" else read(file)

    monkeypatch.setattr(Path, "read_bytes", upgraded)
    assert code_version([], "a") != before


def test_code_without_a_file_has_its_settings_alone() -> None:
    """Typed in at a prompt."""
    body = eval("lambda: 1")  # noqa: S307 - code without a file
    assert code_version([body], "a") == code_version([], "a")
