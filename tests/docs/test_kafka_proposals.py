"""docs/kafka-proposals.md names the public surface that the proposals define."""

from __future__ import annotations

import re

import dagster_rebalance
from dagster_rebalance import RebalanceAwareConsumer
from tests.docs.blocks import ROOT

TABLE = (ROOT / "docs" / "kafka-proposals.md").read_text()
OTHERS = {"DeprecationWarning", "IllegalStateException", "KafkaConsumer", "SerializingProducer"}
"""Names of Python, of Java and of other clients."""


def test_names_of_the_surface_exist() -> None:
    for name in re.findall(r"`([A-Z]\w+)`", TABLE):
        assert hasattr(dagster_rebalance, name) or name in OTHERS, name
    for name in (
        "poll_with_rebalance",
        "get_to_be_revoked_partitions",
        "get_lost_partitions",
        "delay_revoke",
        "pause_pattern",
        "pause_all",
    ):
        assert f"`{name}" in TABLE
        assert hasattr(RebalanceAwareConsumer, name)
