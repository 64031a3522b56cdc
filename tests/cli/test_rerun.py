"""`dagster-rebalance rerun`, as a person types it: what needs no Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.core.runs.rerun_batch import Rerun, RerunBatch
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.group_settings import public_settings
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.member_lease import NOBODY
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.reruns import RerunStore
from tests.cli.typed import typed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RERUN = Rerun("abc", "ada", "the fix", 1_700_000_000.0, 2, 3)
LEFT = [
    RerunBatch(RERUN, number, (OffsetRange("orders", 0, number, number + 1),)) for number in (2, 3)
]


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RerunStore]:
    """The book of a group with one rerun, in an instance that `DAGSTER_HOME` names."""
    (tmp_path / "dagster.yaml").touch()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    kafka = KafkaConsumerResource(
        bootstrap_servers="localhost:1", group_id="shop", topics=["orders"]
    )
    with dg.DagsterInstance.get() as instance:
        assets = GroupAssets.of("shop")
        catalogue = Catalogue(instance, assets, NOBODY, public_settings(kafka))
        catalogue.add_partitions([TopicPartition("orders", 0)])
        catalogue.record_joined()
        book = RerunStore(instance, assets.rerun_book_name)
        book.add(LEFT)
        yield book


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("orders", "--since", "2026-11-23", "--yes", "--dry-run"), "either --yes or --dry-run"),
        (("orders", "--all", "--since", "2026-11-23"), "either partitions or --all"),
        (("--cancel", "abc", "--all"), "--cancel ends a rerun as a whole"),
        (("--cancel", "abc", "--dry-run"), "and at once: give neither .* nor --dry-run"),
        (("--yes", "-r", "fix"), "say which partitions: orders:3, a topic"),
        (("--from-offset", "5"), "say which partitions: orders:3, a topic"),
        (("orders",), "say what to process again, either by offsets"),
        (("orders", "--since", "soon"), "'soon' is no time"),
        (("orders", "--from-offset", "5", "-r", " "), "give a reason for the rerun"),
        (("--cancel", "xyz"), "no rerun 'xyz' that is not finished; there are: abc"),
    ],
)
@pytest.mark.usefixtures("book")
def test_what_is_not_clear_is_refused(arguments: tuple[str, ...], problem: str) -> None:
    """With a sentence, before anything is asked of Kafka."""
    with pytest.raises(ConfigurationError, match=problem):
        typed("rerun", *arguments)


def test_reruns_that_are_not_finished_are_listed_and_cancelled(book: RerunStore) -> None:
    """Who has forgotten the id finds it."""
    listed = "rerun abc by ada: the fix: 1 of 3 runs are done, asked for at 2023-11-14 22:13:20 UTC"
    assert typed("rerun").output == f"{listed}\n"
    said = typed("rerun", "--cancel", "abc")
    assert said.output.startswith("rerun abc by ada: the fix is cancelled: 1 of 3 runs were done")
    assert book.read() == ()
    assert typed("rerun").output == "no rerun is under way\n"
