"""A test of a delayed revoke, with a group in memory."""

from dagster_rebalance import RebalanceAwareConsumer
from dagster_rebalance.testing.fake_group import FakeGroup


def member_of(group: FakeGroup) -> RebalanceAwareConsumer:
    config = {"bootstrap.servers": "in memory", "group.id": "etl"}
    parts = {"member": group.member(), "cluster": group, "clock": group.clock}
    consumer = RebalanceAwareConsumer(config, fetch=False, **parts)
    consumer.subscribe(["orders"])
    consumer.poll(1.0)
    return consumer


def test_a_revoke_can_be_delayed():
    group = FakeGroup({"orders": 2})
    blue = member_of(group)
    green = member_of(group)
    blue.poll(1.0)
    to_be_revoked = blue.get_to_be_revoked_partitions()
    assert len(to_be_revoked) == 1
    assert blue.delay_revoke(to_be_revoked)
    blue.poll(1.0)
    green.poll(1.0)
    assert not green.assignment(), "it is held"
    blue.poll(1.0)
    green.poll(1.0)
    assert green.assignment() == to_be_revoked, "it was not delayed again, and so released"
