"""README.md: its examples load and run."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import metadata
from typing import Any

import dagster as dg
import pytest

from dagster_rebalance import (
    KafkaConsumerResource,
    KafkaSparkResource,
    OffsetAndMetadata,
    RebalanceAwareConsumer,
    TopicPartition,
    build_kafka_batch_defs,
)
from dagster_rebalance.core.model.commands import HoldOutcome
from dagster_rebalance.orchestration.reporting.checks import STOPPED_CHECK
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.fake_group import FakeGroup
from tests.docs.blocks import ROOT, block_with, blocks, run_block

README = "README.md"
MOST_LINES = 30


def _run(block: str) -> dict[str, Any]:
    """Execute a block as a module, and give back its names."""
    names: dict[str, Any] = {"__name__": "readme"}
    run_block(README, block, names)
    return names


def test_readme_definitions_load_and_are_short() -> None:
    block = block_with(README, "python", "build_kafka_batch_defs(")
    assert len(block.splitlines()) < MOST_LINES
    defs: dg.Definitions = _run(block)["defs"]
    dg.Definitions.validate_loadable(defs)
    assert [sensor.name for sensor in defs.sensors or ()] == ["kafka_batches_sensor"], (
        "the README names it"
    )


def test_readme_secrets_come_from_the_environment() -> None:
    lines = blocks(README, "python")[0].splitlines()
    given = [
        line for line in lines if re.search(r"username|password|bootstrap_servers|remote", line)
    ]
    assert len(given) == 4
    assert all("dg.EnvVar(" in line for line in given)


def test_readme_pages_exist() -> None:
    text = (ROOT / README).read_text()
    group = GroupAssets.of("GROUP")
    for name in (
        "/".join(group.offsets.path),
        "/".join(group.group.path),
        STOPPED_CHECK,
    ):
        assert f"`{name.replace('GROUP', '<group>')}`" in text
    holds = (ROOT / "docs" / "held-revoke.md").read_text()
    assert all(f"`{outcome.value}`" in holds for outcome in HoldOutcome)


def test_example_test_of_the_guide_passes() -> None:
    example = (ROOT / "docs/testing/delayed_revoke.py").read_text()
    _run(example)["test_a_revoke_can_be_delayed"]()


class Work:
    """Background work that takes some polls per partition, and records its calls."""

    def __init__(self, consumer: RebalanceAwareConsumer, polls: int) -> None:
        self.consumer = consumer
        self.polls_left = polls
        self.busy_until = polls // 2
        self.aborted: set[TopicPartition] = set()

    def goes_on(self) -> bool:
        """Whether to poll again."""
        self.polls_left -= 1
        return self.polls_left >= 0

    def start(self, records: list[object]) -> None:
        """The group in memory has no records."""
        assert records == []

    def abort(self, partitions: frozenset[TopicPartition]) -> None:
        self.aborted |= partitions

    def is_busy(self, _partition: TopicPartition) -> bool:
        """Busy in the first half."""
        return self.polls_left > self.busy_until

    def finished(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """All that is assigned is finished up to the number of polls."""
        return {tp: OffsetAndMetadata(100 - self.polls_left) for tp in self.consumer.assignment()}


def _member(group: FakeGroup) -> RebalanceAwareConsumer:
    config = {"bootstrap.servers": "in memory", "group.id": "etl"}
    return RebalanceAwareConsumer(
        config, fetch=False, member=group.member(), cluster=group, clock=group.clock
    )


def test_readme_consumer_loop_holds_commits_and_releases() -> None:
    process = _run(block_with(README, "python", "delay_revoke({"))["process"]
    group = FakeGroup({"orders": 2})
    blue, green = _member(group), _member(group)
    process(blue, Work(blue, 2))
    green.subscribe(["orders"])
    green.poll(1.0)
    work = Work(blue, 20)
    process(blue, work)
    green.poll(1.0)
    assert len(blue.assignment()) == len(green.assignment()) == 1
    (given,) = green.assignment()
    committed = blue.committed([given])[given]
    assert committed is not None
    assert committed.offset > 100 - 20, "it was committed while it was held"
    assert not work.aborted


def test_readme_commands_exist() -> None:
    shown = re.findall(r"^make ([a-z-]+)", "".join(blocks(README, "sh")), re.MULTILINE)
    assert shown == ["demo", "test"]
    for target in shown:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)  # noqa: S607 - whatever make is there


def test_readme_extras_exist() -> None:
    extras = metadata("dagster-rebalance").get_all("Provides-Extra") or []
    assert extras
    text = (ROOT / README).read_text()
    assert set(re.findall(r"'\.\[(\w+)\]'", text)) <= set(extras)
    assert all(extra in text for extra in extras)


@pytest.mark.parametrize(
    "file",
    [
        *(path.name for path in ROOT.glob("*.md")),
        *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ],
)
def test_links_between_files_have_a_target(file: str) -> None:
    folder = (ROOT / file).parent
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / file).read_text())
    for link in (link for link in links if "://" not in link):
        assert (folder / link).exists(), link


def test_several_groups_load_in_one_code_location_as_documented() -> None:
    spark = KafkaSparkResource()

    def one(group: str) -> dg.Definitions:
        @dg.asset(name=f"{group}_table", required_resource_keys={f"{group}_batch"})
        def table() -> None:
            """Reads a batch."""

        kafka = KafkaConsumerResource(
            bootstrap_servers="kafka:9092", group_id=group, topics=[group]
        )
        return build_kafka_batch_defs(
            kafka=kafka,
            assets=[table],
            spark=spark,
            name=group,
            kafka_key=f"{group}_kafka",
            batch_key=f"{group}_batch",
        )

    both = dg.Definitions.merge(one("orders"), one("returns"))
    dg.Definitions.validate_loadable(both)
    assert {sensor.name for sensor in both.sensors or ()} == {"orders_sensor", "returns_sensor"}
