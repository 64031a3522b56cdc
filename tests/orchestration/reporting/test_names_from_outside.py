"""Group ids and topic names, which users choose.

Kafka accepts any group id and restricts the names of topics.

Both reach asset keys, tags, logs and definitions of Dagster, each of which has its own rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.events import LastRecorded
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.orchestration.definitions import build_kafka_batch_defs
from dagster_rebalance.orchestration.member.mailbox import Mail
from dagster_rebalance.orchestration.per_batch import batch_sensor as sensor_module
from dagster_rebalance.orchestration.per_batch.hosted_members import Members
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.orchestration.parts import batch_request, make_run

if TYPE_CHECKING:
    from collections.abc import Iterator

NASTY = (
    'a/../../b "x" {0} %s',
    "../../../etc/passwd",
    "$(touch /tmp/x); `id`",
    "{context.log} %(message)s %n",
    "line\nbreak\ttab\x00nul",
    "*",
    "grüße 群",
    "'; DROP TABLE runs; --",
    "g" * 5_000,
)


def defs_of(group_id: str, name: str = "orders") -> dg.Definitions:
    @dg.asset(name=f"work_{name}", required_resource_keys={f"batch_{name}"})
    def work() -> None:
        """Never executed."""

    kafka = KafkaConsumerResource(
        bootstrap_servers="kafka:9092", group_id=group_id, topics=["orders"]
    )
    return build_kafka_batch_defs(
        kafka=kafka, assets=[work], name=name, kafka_key=f"kafka_{name}", batch_key=f"batch_{name}"
    )


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.mark.parametrize("group_id", NASTY)
def test_any_group_id_loads_in_dagster(group_id: str) -> None:
    """Kafka takes anything for a group id."""
    dg.Definitions.validate_loadable(defs_of(group_id))


def test_similar_groups_load_in_one_code_location() -> None:
    """In names of ops, dots, dashes and slashes are the same."""
    alike = ("a-b", "a.b", "a_b", "a/b", "a b")
    merged = dg.Definitions.merge(
        *(defs_of(group_id, f"n{number}") for number, group_id in enumerate(alike))
    )
    dg.Definitions.validate_loadable(merged)
    assert len({GroupAssets.of(group_id).offsets for group_id in alike}) == len(alike)


def test_plain_group_id_is_part_of_the_asset_key() -> None:
    assert GroupAssets.of("orders-eu.v2_test").offsets.path == [
        "kafka",
        "orders-eu.v2_test",
        "offsets",
    ]


@pytest.mark.parametrize("group_id", NASTY)
def test_asset_key_of_any_group_is_short_and_plain(group_id: str) -> None:
    part = GroupAssets.of(group_id).offsets.path[1]
    assert len(part) <= 80
    assert set(part) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


@pytest.mark.parametrize("group_id", NASTY)
def test_runs_are_found_by_the_tag_of_any_group(
    instance: dg.DagsterInstance, group_id: str
) -> None:
    wanted = make_run(
        instance, batch_request("b-1"), dg.DagsterRunStatus.STARTED, group_id=group_id
    )
    make_run(instance, batch_request("b-2"), dg.DagsterRunStatus.STARTED, group_id=f"{group_id}%")
    assert [run.run_id for run in RunLedger(instance, group_id).read([], with_live=True)] == [
        wanted.run_id
    ]


@pytest.mark.parametrize("topic", ["...", "a...b", "..a", "-", "_", "a--0", "x" * 249])
@pytest.mark.parametrize("group_id", NASTY[:2])
def test_commit_of_any_topic_is_recorded_and_read(
    instance: dg.DagsterInstance, group_id: str, topic: str
) -> None:
    """Dots in a row mean a range of partitions in Dagster."""
    catalogue = Catalogue(instance, GroupAssets.of(group_id), MemberIdentity("blue", "sensor", "p"))
    span = OffsetRange(topic, 3, 5, 12)
    catalogue.add_partitions([span.topic_partition])
    commit = RecordCommit(
        range=span, epoch=1, batch_id="b", run_id="r", lag=0, claim_to_commit_s=None, drain_s=None
    )
    catalogue.record_commits([commit])
    assert catalogue.last_recorded([span.topic_partition]) == {
        span.topic_partition: LastRecorded(12, "r")
    }


@pytest.mark.parametrize("topic", ["", "..", "orders.*", "orders:0", "a/b", 'a"b', "x" * 250])
def test_invalid_topic_is_refused(topic: str) -> None:
    kafka = KafkaConsumerResource(
        bootstrap_servers="kafka:9092", group_id="etl", topics=["orders", topic]
    )
    with pytest.raises(ConfigurationError, match="cannot be the name of a topic"):
        kafka.engine_settings()


@pytest.mark.parametrize("group_id", NASTY)
def test_note_is_logged_without_formatting(
    group_id: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A note quotes brokers and groups."""
    note = f"12:00:00 group {group_id} has 100% of {{orders}}"

    class StandIn:
        is_over = is_lost = False

        def tick(self, _patience_s: float = 0.0) -> tuple[Mail, list[str]]:
            return Mail((), (f"summary of {group_id}",)), [note]

    monkeypatch.setattr(sensor_module, "MEMBERS", Members())
    monkeypatch.setattr(sensor_module, "_host", lambda *_, **__: StandIn())
    monkeypatch.setattr(sensor_module, "is_real_tick", lambda _context: True)
    defs = defs_of(group_id)
    kafka = KafkaConsumerResource(
        bootstrap_servers="kafka:9092", group_id=group_id, topics=["orders"]
    )
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(
            instance=instance,
            definitions=defs,
            resources={"kafka_orders": kafka},
            sensor_name="orders_sensor",
        )
        with context:
            skipped = defs.resolve_sensor_def("orders_sensor").evaluate_tick(context)
    assert skipped.skip_message == f"summary of {group_id}"
    assert note in capfd.readouterr().err
