"""Requests of `GroupAdmin`, without a broker."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, TopicPartition
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.cluster import admin_connection, group_admin
from dagster_rebalance.kafka.cluster.group_admin import GroupAdmin
from tests.kafka.admins import use_admin

if TYPE_CHECKING:
    from collections.abc import Callable

TP = TopicPartition("orders", 0)


class FakeAdmin:
    """An admin client whose requests are answered in a later poll; short ones time out."""

    def __init__(self, answer: object, polls: int = 0) -> None:
        self._answer = answer
        self._polls = polls
        self._future: Future[Any] = Future()
        self.limits_s: list[float] = []

    def poll(self, _timeout_s: float) -> None:
        self._polls -= 1
        if self._polls == 0:
            self._future.set_result(self._answer)

    def describe_consumer_groups(
        self, _groups: object, *, request_timeout: float
    ) -> dict[str, Future[Any]]:
        self.limits_s.append(request_timeout)
        if request_timeout < 3:
            self._future.set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        elif self._polls == 0:
            self._future.set_result(self._answer)
        return {"shop": self._future}

    alter_consumer_group_offsets = describe_consumer_groups


def group_of(admin: FakeAdmin) -> GroupAdmin:
    """Return a `GroupAdmin` that uses the fake client, and has no committed offset."""
    config = {"bootstrap.servers": "memory:1", "group.id": "shop"}
    group = GroupAdmin(validated(config, hold_limit_s=1.0))
    use_admin(group, admin)
    vars(group)["_committed"] = lambda *_: {TP: None}
    return group


def description(*members: object) -> object:
    """Return a stable group, as confluent-kafka describes it."""
    return SimpleNamespace(state=ConsumerGroupState.STABLE, members=members)


def test_members_escape_control_characters_in_client_ids() -> None:
    member = SimpleNamespace(
        member_id="m-1", client_id="\x1b]0;owned\x07", host="/10.0.0.1", assignment=None,
        target_assignment=None,
    )  # fmt: skip
    (found,) = group_of(FakeAdmin(description(member))).members()
    assert found.address == r"\x1b]0;owned\x07@10.0.0.1"


REQUESTS: dict[str, tuple[object, Callable[[GroupAdmin], object]]] = {
    "members": (description(), GroupAdmin.members),
    "move": (
        SimpleNamespace(topic_partitions=[]),
        lambda group: group.move({TP: OffsetAndMetadata(3)}, shown={TP: None}),
    ),
}


@pytest.fixture
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_admin, "_STEP_S", 0.001)


@pytest.mark.usefixtures("_short_steps")
@pytest.mark.parametrize("call", REQUESTS)
def test_group_request_with_a_late_answer_is_sent_once(call: str) -> None:
    """A late answer to a request that timed out makes librdkafka 2.16 abort the process."""
    answer, request = REQUESTS[call]
    admin = FakeAdmin(answer, polls=4)
    request(group_of(admin))
    assert admin.limits_s == [pytest.approx(10.0, abs=5.0)]


@pytest.mark.usefixtures("_short_steps")
@pytest.mark.parametrize("call", REQUESTS)
def test_group_request_of_a_refused_client_stops_before_its_time_out(call: str) -> None:
    answer, request = REQUESTS[call]
    admin = FakeAdmin(answer, polls=4)
    group = group_of(admin)
    vars(group)["_recent_errors"].append(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    with pytest.raises(BrokerError, match="wrong password"):
        request(group)
    assert len(admin.limits_s) == 1


class FailingAdmin(FakeAdmin):
    """An admin client whose requests fail with the errors, one after the other."""

    def __init__(self, answer: object, *codes: int) -> None:
        super().__init__(answer)
        self._codes = list(codes)

    def poll(self, _timeout_s: float) -> None:
        pass

    def describe_consumer_groups(
        self, _groups: object, *, request_timeout: float
    ) -> dict[str, Future[Any]]:
        self._future = Future()
        if not self._codes:
            return super().describe_consumer_groups(_groups, request_timeout=request_timeout)
        self.limits_s.append(request_timeout)
        self._future.set_exception(KafkaException(KafkaError(self._codes.pop(0))))
        return {"shop": self._future}

    alter_consumer_group_offsets = describe_consumer_groups


@pytest.mark.parametrize(
    ("code", "is_kept"),
    [(KafkaError._TIMED_OUT, False), (KafkaError.GROUP_AUTHORIZATION_FAILED, True)],
)
@pytest.mark.parametrize("call", REQUESTS)
def test_client_of_an_unanswered_group_request_is_dropped(
    call: str, code: int, *, is_kept: bool
) -> None:
    """A broker that becomes available to it later makes librdkafka 2.16 abort the process."""
    answer, request = REQUESTS[call]
    admin = FailingAdmin(answer, code)
    group = group_of(admin)
    with pytest.raises(BrokerError):
        request(group)
    assert (vars(group)["_held"].client is admin) is is_kept


@pytest.mark.parametrize("call", REQUESTS)
def test_group_request_on_a_broken_connection_is_sent_again(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, request = REQUESTS[call]
    admin = FailingAdmin(answer, KafkaError._TRANSPORT)
    monkeypatch.setattr(admin_connection, "create_client", lambda *_: admin)
    request(group_of(admin))
    assert len(admin.limits_s) == 2
