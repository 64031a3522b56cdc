"""Descriptions of a group, without a broker."""

from __future__ import annotations

from types import SimpleNamespace

from confluent_kafka import ConsumerGroupState

from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster.group_admin import GroupAdmin


def test_members_escape_control_characters_in_client_ids() -> None:
    member = SimpleNamespace(
        member_id="m-1", client_id="\x1b]0;owned\x07", host="/10.0.0.1", assignment=None,
        target_assignment=None,
    )  # fmt: skip
    seen = SimpleNamespace(state=ConsumerGroupState.STABLE, members=[member])
    answer = SimpleNamespace(result=lambda: seen)
    admin = SimpleNamespace(describe_consumer_groups=lambda *_, **__: {"shop": answer})
    config = {"bootstrap.servers": "memory:1", "group.id": "shop"}
    group = GroupAdmin(validated(config, hold_limit_s=1.0))
    vars(group)["_client"] = admin
    (found,) = group.members()
    assert found.address == r"\x1b]0;owned\x07@10.0.0.1"
