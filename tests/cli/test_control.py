"""`dagster-rebalance pause`, `stop`, `resume` and `retry`, as a person types them."""

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
from dagster_rebalance.orchestration.storage.directives import DirectiveStore
from dagster_rebalance.orchestration.storage.member_lease import NOBODY
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.cli.typed import typed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An instance in which members of two groups have had partitions."""
    home = tmp_path_factory.mktemp("home")
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        for group_id, topic in (("shop", "orders"), ("billing", "invoices")):
            catalogue = Catalogue(instance, GroupAssets.of(group_id), NOBODY)
            catalogue.add_partitions([TopicPartition(topic, number) for number in range(3)])
            catalogue.record_joined()
    return home


@pytest.fixture
def shop(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectiveStore]:
    """The orders of a group of that instance, which `DAGSTER_HOME` names."""
    (home / "dagster.yaml").touch()
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with dg.DagsterInstance.get() as instance:
        yield DirectiveStore(instance, GroupAssets.of("shop").order_book_name)


def test_a_partition_is_paused_and_resumed(shop: DirectiveStore) -> None:
    """It says what it did, and how to take it back."""
    said = typed("pause", "orders:1", "--group", "shop", "-r", "the warehouse is away", "--by", "a")
    assert said.exit_code == 0
    assert "orders-1 paused by a since " in said.output
    assert "dagster-rebalance resume orders:1" in said.output
    assert [str(order).split(" since ")[0] for order in shop.read()] == ["paused by a"]
    assert "Not paused before: orders-0, orders-2." in (
        typed("resume", "--all", "--group", "shop").output
    )
    assert [order.partitions for order in shop.read()] == ["*"]


def test_a_partition_may_be_named_as_tables_show_it(shop: DirectiveStore) -> None:
    """As for `status`, `explain` and `reset`; the order is kept in the one form."""
    said = typed("pause", "orders-1", "--group", "shop", "-r", "away", "--by", "a")
    assert "orders-1 paused by a since " in said.output
    assert shop.read()[-1].partitions == "orders:1"


def test_who_gives_an_order_is_the_login_unless_it_is_said(
    shop: DirectiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared server the login says little; in a container there may be none."""
    monkeypatch.setenv("LOGNAME", "grace")
    typed("stop", "orders", "--group", "shop", "--reason", "away")
    assert shop.read()[-1].by == "grace"

    def nobody() -> str:
        raise OSError

    monkeypatch.setattr("getpass.getuser", nobody)
    with pytest.raises(ConfigurationError, match="say who you are"):
        typed("stop", "orders", "--group", "shop", "--reason", "away")


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["pause", "orders:1", "-r", "x"], "several consumer groups: say --group with one of bill"),
        (["pause", "orders:9", "-r", "x", "--group", "shop"], "matches no partition of group shop"),
        (["pause", "-r", "x", "--group", "shop"], "say which partitions to pause"),
        (["stop", "orders", "--all", "-r", "x"], "give either partitions or --all, not both"),
        (["resume", "--all", "--group", "shopp"], "Its groups: billing, shop"),
        (["pause", "--all", "--group", "shop", "-r", " "], "give a reason"),
    ],
)
def test_a_slip_of_the_hand_is_answered_with_a_sentence(arguments: list[str], problem: str) -> None:
    """A traceback tells a person nothing."""
    with pytest.raises(ConfigurationError, match=problem):
        typed(*arguments)


def test_without_an_instance_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thing that people forget."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    with pytest.raises(ConfigurationError, match=r"DAGSTER_HOME is not set: .* export"):
        typed("resume", "--all")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="Is that the DAGSTER_HOME of the members"):
        typed("resume", "--all")


def test_a_storage_that_cannot_be_read_is_answered_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database may be away just when somebody on call needs it."""
    (tmp_path / "dagster.yaml").touch()
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "runs.db").write_text("no database")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"cannot be used: .*not a database"):
        typed("resume", "--all")


def test_a_pause_without_a_reason_is_a_mistake_of_usage() -> None:
    """The exit code of all wrong usage is 2."""
    result = typed("pause", "orders")
    assert result.exit_code == 2
    assert "--reason" in result.output


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_help_of_each_command_is_whole_in_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's terminal has 80 columns; a word that does not fit would be cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    assert "…" not in typed(command, "--help").output


def test_the_lines_of_a_help_end_where_the_terminal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no lines of the source."""
    monkeypatch.setenv("COLUMNS", "250")
    said = "committed offsets stay as they are. Recorded ranges are repeated as a whole, with"
    assert said in typed("rerun", "--help").output


def test_a_retry_is_kept_apart_from_the_orders(shop: DirectiveStore) -> None:
    """An older member, which knows no retry, could not read its orders any more."""
    typed("resume", "--all", "--group", "shop")
    typed("pause", "orders:1", "--group", "shop", "-r", "the warehouse is away")
    before = shop.read()
    said = typed("retry", "orders", "--group", "shop", "--by", "a")
    assert said.exit_code == 0
    assert "orders-0..2 retried by a at " in said.output
    assert "Still paused or stopped by people: orders-1." in said.output
    assert shop.read() == before
    with dg.DagsterInstance.get() as instance:
        typed("retry", "orders", "--group", "shop", "--by", "b")
        catalogue = Catalogue(instance, GroupAssets.of("shop"), NOBODY)
        *orders, retry = catalogue.orders()
        assert tuple(orders) == before
        assert (retry.action, retry.partitions, retry.by) == (Action.RETRY, "orders", "b")
        DirectiveStore(instance, GroupAssets.of("shop").retry_book_name).tidy(before=retry.at + 1)
        catalogue.orders()
        assert catalogue.orders() == before, "every second look reads the retries"
    typed("resume", "--all", "--group", "shop")


@pytest.mark.parametrize("command", ["pause", "stop", "resume", "retry"])
def test_the_help_of_each_command_has_examples(command: str) -> None:
    """They stand on lines of their own, to be pasted."""
    result = typed(command, "--help")
    assert result.exit_code == 0
    assert f"dagster-rebalance {command} orders:3" in result.output


def test_an_order_is_told_in_whatever_encoding_a_terminal_has(
    shop: DirectiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in force: a traceback would say that it is not."""
    written = io.BytesIO()
    out = io.TextIOWrapper(written, "latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    arguments = ["pause", "orders:2", "--group", "shop", "-r", "to hall \N{RIGHTWARDS ARROW} 2"]
    monkeypatch.setattr(sys, "argv", ["dagster-rebalance", *arguments])
    with pytest.raises(SystemExit) as ended:
        run(COMMANDS)
    assert ended.value.code == 0
    out.flush()
    assert b"to hall \\u2192 2" in written.getvalue()
    assert "to hall \N{RIGHTWARDS ARROW} 2" in str(shop.read()[-1])


def test_what_is_no_text_is_refused_before_anything_is_done(
    shop: DirectiveStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No database can store it."""
    before = shop.read()
    arguments = ["pause", "orders:2", "--group", "shop", "-r", "caf\udce9"]
    monkeypatch.setattr(sys, "argv", ["dagster-rebalance", *arguments])
    with pytest.raises(SystemExit) as ended:
        run(COMMANDS)
    assert ended.value.code == 1
    assert "is not in the encoding of this terminal" in capsys.readouterr().err
    assert shop.read() == before


@pytest.mark.usefixtures("shop")
def test_a_storage_that_does_not_answer_any_more_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A database that restarts shows nobody its statements."""

    def away(*_: object, **__: object) -> None:
        statement = "SELECT 1"
        raise sqlalchemy.exc.OperationalError(statement, {}, Exception("it restarts"))

    monkeypatch.setattr(dg.DagsterInstance, "add_dynamic_partitions", away)
    with pytest.raises(DagsterRebalanceError, match=r"storage did not answer: it restarts\. Try"):
        typed("pause", "orders:2", "--group", "shop", "-r", "away")
