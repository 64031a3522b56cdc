"""`dagster-rebalance rerun` without Kafka."""

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
from dagster_rebalance.orchestration.storage.dynamic_partitions import RerunStore
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.cli.command_line import invoke

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RERUN = Rerun("abc", "ada", "the fix", 1_700_000_000.0, 2, 3)
REMAINING = [
    RerunBatch(RERUN, number, (OffsetRange("orders", 0, number, number + 1),)) for number in (2, 3)
]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RerunStore]:
    """Set `DAGSTER_HOME`, and return the rerun store of a group with one rerun."""
    (tmp_path / "dagster.yaml").touch()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    kafka = KafkaConsumerResource(
        bootstrap_servers="localhost:1", group_id="shop", topics=["orders"]
    )
    with dg.DagsterInstance.get() as instance:
        assets = GroupAssets.of("shop")
        catalogue = Catalogue(instance, assets, NO_MEMBER, public_settings(kafka))
        catalogue.add_partitions([TopicPartition("orders", 0)])
        catalogue.record_joined()
        store = RerunStore(instance, assets.reruns_name)
        store.add(REMAINING)
        yield store


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("orders", "--since", "2026-11-23", "--yes", "--dry-run"), "either --yes or --dry-run"),
        (("orders", "--all", "--since", "2026-11-23"), "either partitions or --all"),
        (("--cancel", "abc", "--all"), "--cancel cancels a whole rerun"),
        (("--cancel", "abc", "--dry-run"), "at once: pass neither .* nor --dry-run"),
        (("--yes", "-r", "fix"), "name the partitions: orders:3, a topic"),
        (("--from-offset", "5"), "name the partitions: orders:3, a topic"),
        (("orders",), "name the part to process again, either by offsets"),
        (("orders", "--since", "soon"), "'soon' is not a time"),
        (("orders", "--from-offset", "5", "-r", " "), "give a reason for the rerun"),
        (("--cancel", "xyz"), "no unfinished rerun 'xyz'; unfinished: abc"),
    ],
)
@pytest.mark.usefixtures("store")
def test_rerun_with_wrong_arguments_is_refused(arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        invoke("rerun", *arguments)


def test_rerun_lists_and_cancels_unfinished_reruns(store: RerunStore) -> None:
    listed = "rerun abc by ada: the fix: 1 of 3 runs are done, requested at 2023-11-14 22:13:20 UTC"
    assert invoke("rerun").output == f"{listed}\n"
    cancelled = invoke("rerun", "--cancel", "abc").output
    assert cancelled.startswith("rerun abc by ada: the fix is cancelled: 1 of 3 runs were done")
    assert store.read() == ()
    assert invoke("rerun").output == "no unfinished rerun\n"
