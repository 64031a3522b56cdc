"""`dagster-rebalance pause`, `stop`, `resume` and `retry`."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import dagster as dg
import pytest
import sqlalchemy

from dagster_rebalance.cli.app import COMMANDS, run
from dagster_rebalance.core.model.directives import Action
from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.storage.dynamic_partitions import DirectiveStore
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.cli.command_line import invoke

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an instance with the records of two groups."""
    home = tmp_path_factory.mktemp("home")
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        for group_id, topic in (("shop", "orders"), ("billing", "invoices")):
            catalogue = Catalogue(instance, GroupAssets.of(group_id), NO_MEMBER)
            catalogue.add_partitions([TopicPartition(topic, number) for number in range(3)])
            catalogue.record_joined()
    return home


@pytest.fixture
def shop(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectiveStore]:
    """Set `DAGSTER_HOME`, and return the directives of a group."""
    (home / "dagster.yaml").touch()
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with dg.DagsterInstance.get() as instance:
        yield DirectiveStore(instance, GroupAssets.of("shop").directives_name)


def test_pause_and_resume_store_directives_and_print_the_undo(shop: DirectiveStore) -> None:
    paused = invoke("pause", "orders:1", "--group", "shop", "-r", "warehouse down", "--by", "a")
    assert paused.exit_code == 0
    assert "orders-1 paused by a since " in paused.output
    assert "dagster-rebalance resume orders:1" in paused.output
    assert [str(directive).split(" since ")[0] for directive in shop.read()] == ["paused by a"]
    assert "Not paused before: orders-0, orders-2." in (
        invoke("resume", "--all", "--group", "shop").output
    )
    assert [directive.partitions for directive in shop.read()] == ["*"]


def test_pause_accepts_a_partition_as_tables_print_it(shop: DirectiveStore) -> None:
    paused = invoke("pause", "orders-1", "--group", "shop", "-r", "away", "--by", "a")
    assert "orders-1 paused by a since " in paused.output
    assert shop.read()[-1].partitions == "orders:1"


def test_stop_without_by_uses_the_login_name(
    shop: DirectiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "grace")
    invoke("stop", "orders", "--group", "shop", "--reason", "away")
    assert shop.read()[-1].by == "grace"

    def no_login() -> str:
        raise OSError

    monkeypatch.setattr("getpass.getuser", no_login)
    with pytest.raises(ConfigurationError, match="give your name"):
        invoke("stop", "orders", "--group", "shop", "--reason", "away")


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["pause", "orders:1", "-r", "x"], "several consumer groups: pass --group with one of bi"),
        (["pause", "orders:9", "-r", "x", "--group", "shop"], "matches no partition of group shop"),
        (["pause", "-r", "x", "--group", "shop"], "name the partitions to pause"),
        (["stop", "orders", "--all", "-r", "x"], "pass either partitions or --all, not both"),
        (["resume", "--all", "--group", "shopp"], "Groups of the instance: billing, shop"),
        (["pause", "--all", "--group", "shop", "-r", " "], "give a reason"),
    ],
)
def test_directive_with_wrong_arguments_is_refused(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        invoke(*arguments)


def test_resume_without_an_instance_names_dagster_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    with pytest.raises(ConfigurationError, match=r"DAGSTER_HOME is not set: .* export"):
        invoke("resume", "--all")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="Is that the DAGSTER_HOME of the members"):
        invoke("resume", "--all")


def test_resume_with_unreadable_storage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster.yaml").touch()
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "runs.db").write_text("no database")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"cannot be used: .*not a database"):
        invoke("resume", "--all")


def test_pause_without_a_reason_is_a_usage_error() -> None:
    result = invoke("pause", "orders")
    assert result.exit_code == 2
    assert "--reason" in result.output


def test_retry_is_stored_apart_from_the_directives(shop: DirectiveStore) -> None:
    """A member of an older version could not read its directives any more."""
    invoke("resume", "--all", "--group", "shop")
    invoke("pause", "orders:1", "--group", "shop", "-r", "the warehouse is away")
    before = shop.read()
    retried = invoke("retry", "orders", "--group", "shop", "--by", "a")
    assert retried.exit_code == 0
    assert "orders-0..2 retried by a at " in retried.output
    assert "Still paused or stopped by an operator: orders-1." in retried.output
    assert shop.read() == before
    with dg.DagsterInstance.get() as instance:
        invoke("retry", "orders", "--group", "shop", "--by", "b")
        catalogue = Catalogue(instance, GroupAssets.of("shop"), NO_MEMBER)
        *directives, retry = catalogue.directives()
        assert tuple(directives) == before
        assert (retry.action, retry.partitions, retry.by) == (Action.RETRY, "orders", "b")
        DirectiveStore(instance, GroupAssets.of("shop").retries_name).tidy(before=retry.at + 1)
        catalogue.directives()
        assert catalogue.directives() == before, "every second call reads the retries"
    invoke("resume", "--all", "--group", "shop")


@pytest.mark.parametrize("command", ["pause", "stop", "resume", "retry"])
def test_help_has_examples(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"dagster-rebalance {command} orders:3" in result.output


def test_pause_in_a_latin_1_terminal_escapes_its_output(
    shop: DirectiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    out = io.TextIOWrapper(written, "latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    arguments = ["pause", "orders:2", "--group", "shop", "-r", "to hall \N{RIGHTWARDS ARROW} 2"]
    monkeypatch.setattr(sys, "argv", ["dagster-rebalance", *arguments])
    with pytest.raises(SystemExit) as exited:
        run(COMMANDS)
    assert exited.value.code == 0
    out.flush()
    assert b"to hall \\u2192 2" in written.getvalue()
    assert "to hall \N{RIGHTWARDS ARROW} 2" in str(shop.read()[-1])


def test_undecodable_arguments_are_refused(
    shop: DirectiveStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = shop.read()
    arguments = ["pause", "orders:2", "--group", "shop", "-r", "caf\udce9"]
    monkeypatch.setattr(sys, "argv", ["dagster-rebalance", *arguments])
    with pytest.raises(SystemExit) as exited:
        run(COMMANDS)
    assert exited.value.code == 1
    assert "is not in the encoding of this terminal" in capsys.readouterr().err
    assert shop.read() == before


@pytest.mark.usefixtures("shop")
def test_pause_during_a_storage_outage_reports_the_database_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_: object, **__: object) -> None:
        statement = "SELECT 1"
        raise sqlalchemy.exc.OperationalError(statement, {}, Exception("it restarts"))

    monkeypatch.setattr(dg.DagsterInstance, "add_dynamic_partitions", away)
    with pytest.raises(DagsterRebalanceError, match=r"storage did not answer: it restarts\. Try"):
        invoke("pause", "orders:2", "--group", "shop", "-r", "away")
