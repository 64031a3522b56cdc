"""A Kafka with TLS, passwords, certificates and ACLs.

The needed rights are enough, and a missing one is named.

The least rights are those of docs/security.md. Every refusal must come within seconds, from `check`
or from the first polls, and say what to do: a member that hangs is a partition that stands still.
"""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.core.model.events import PartitionsLost
from dagster_rebalance.core.model.offsets import (
    LogPosition,
    OffsetAndMetadata,
    OffsetRange,
    TopicPartition,
)
from dagster_rebalance.kafka.client.settings import validated
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer
from dagster_rebalance.kafka.reading.range_reader import RangeReader
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.kafka.contract.stages import Actor, KafkaStage, pass_time, play

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from confluent_kafka import Message

    from dagster_rebalance.testing.secured import SecuredKafka

pytestmark = pytest.mark.broker

PROTOCOLS = ("consumer", "classic")
LEAST = {"topic": "READ", "group": "READ"}
"""The rights of a member."""
RECORDS = 20
KEY_FORM = ("-topk8", "-v1", "PBE-SHA1-3DES")
"""Kafka's Java client cannot read OpenSSL's default form (PBES2): PBES2 SecretKeyFactory not
available."""
KEY_PASSWORD = "swordfish-of-the-key"  # noqa: S105 - of a key that lives as long as a test
PATIENCE_S = 120.0
REFUSED_WITHIN_S = 60.0
"""Far less than a limit that is waited for to its end, and enough for a busy machine."""


@dataclass(frozen=True)
class Door:
    """A topic with records and a user with some rights on it.

    The user has some rights on the group of the same name as well.
    """

    kafka: SecuredKafka
    name: str

    @property
    def partition(self) -> TopicPartition:
        return TopicPartition(self.name, 0)

    def allow(
        self, *, topic: str | None = LEAST["topic"], group: str | None = LEAST["group"]
    ) -> None:
        if topic is not None:
            self.kafka.allow(self.name, topic, topic=self.name)
        if group is not None:
            self.kafka.allow(self.name, group, group=self.name)

    def consumer(
        self,
        protocol: str = "consumer",
        *,
        fetch: bool = False,
        wrong: Mapping[str, str] | None = None,
        without: tuple[str, ...] = (),
    ) -> RebalanceAwareConsumer:
        config = {
            **self._config(without),
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
        }
        return RebalanceAwareConsumer(
            {**config, **(wrong or {})}, fetch=fetch, discovery_interval_s=1.0
        )

    def read(self, wrong: Mapping[str, str] | None = None) -> list[Message]:
        config = {**self._config(), "log_level": 0, **(wrong or {})}
        with closing(RangeReader(validated(config, hold_limit_s=10))) as reader:
            return list(reader.read([OffsetRange(self.name, 0, 0, RECORDS)], PATIENCE_S))

    def _config(self, without: tuple[str, ...] = ()) -> dict[str, str]:
        access = self.kafka.client_config(self.name)
        return {
            **{name: value for name, value in access.items() if not name.startswith(without)},
            "group.id": self.name,
        }


@pytest.fixture
def door(secured_kafka: SecuredKafka) -> Door:
    made = Door(secured_kafka, unique_name("door"))
    secured_kafka.add_user(made.name, 'a "pass\\word" of {0} %s')
    fill(secured_kafka, made.name)
    return made


def fill(kafka: SecuredKafka, topic: str) -> None:
    kafka.create_topic(topic)
    producer = Producer(kafka.client_config())
    for number in range(RECORDS):
        producer.produce(topic, f"{number}".encode())
    assert producer.flush(120) == 0


def refusal(action: Callable[[], object]) -> str:
    began = time.monotonic()
    with pytest.raises(BrokerError) as refused:
        action()
    assert time.monotonic() - began < REFUSED_WITHIN_S
    return str(refused.value)


def poll_until_refused(consumer: RebalanceAwareConsumer) -> None:
    until = time.monotonic() + REFUSED_WITHIN_S
    while time.monotonic() < until and not consumer.assignment():
        _poll(consumer)


def _poll(consumer: RebalanceAwareConsumer) -> None:
    try:
        consumer.poll(0.1)
    except BrokerError as error:
        if not error.retriable:
            raise


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_member_needs_only_read_on_topic_and_group(door: Door, protocol: str) -> None:
    door.allow()
    read = 0
    with door.consumer(protocol, fetch=True) as consumer:
        consumer.subscribe([door.name])
        consumer.check()

        def has_all() -> bool:
            nonlocal read
            read += len(consumer.poll(0.1))
            return read == RECORDS

        wait_until(
            has_all,
            timeout_s=120,
            what=lambda: f"{RECORDS} records; there are {read}",
            interval_s=0,
        )
        consumer.commit_sync({door.partition: OffsetAndMetadata(7, "text")})
        assert consumer.committed([door.partition]) == {
            door.partition: OffsetAndMetadata(7, "text")
        }
        position = consumer.cluster.log_ends([door.partition])[door.partition]
        assert consumer.cluster.truncated({door.partition: position}) == {door.partition: False}
        assert consumer.cluster.topic_ids([door.name]).keys() == {door.name}
        assert consumer.beginning_offsets([door.partition]) == {door.partition: 0}
        assert consumer.end_offsets([door.partition]) == {door.partition: RECORDS}
        assert consumer.offsets_for_times({door.partition: 0})[door.partition] is not None
        assert [info.partition for info in consumer.partitions_for(door.name)] == [0]
        with door.consumer(protocol) as other:
            other.subscribe([door.name])

            def is_held() -> bool:
                other.poll(0.05)
                consumer.poll(0.05)
                consumer.delay_revoke(consumer.get_to_be_revoked_partitions())
                return other.member_id != ""

            wait_until(is_held, timeout_s=120, what="a second member", interval_s=0)


def test_truncation_check_without_read_on_the_topic_raises(door: Door) -> None:
    """To take the position for verified could skip records."""
    door.allow(topic="DESCRIBE")
    with door.consumer() as consumer:
        said = refusal(lambda: consumer.cluster.truncated({door.partition: LogPosition(3, 0)}))
    assert "verifying the leader epochs of committed offsets" in said


def test_run_needs_only_describe_on_the_group(door: Door) -> None:
    door.allow(topic="READ", group="DESCRIBE")
    with door.consumer() as consumer:
        assert consumer.committed([door.partition]) == {door.partition: None}


def test_range_reader_needs_only_read_on_the_topic(door: Door) -> None:
    door.allow(topic="READ", group="DESCRIBE")
    assert len(door.read()) == RECORDS


@pytest.mark.parametrize("topic", [None, "DESCRIBE"])
def test_range_reader_without_read_on_the_topic_raises_before_the_timeout(
    door: Door, topic: str | None
) -> None:
    door.allow(topic=topic)
    message = refusal(door.read)
    assert door.name in message
    assert "ACL READ" in message


def test_range_reader_with_a_wrong_password_raises_before_the_timeout(door: Door) -> None:
    door.allow()
    assert "check 'security.protocol'" in refusal(lambda: door.read({"sasl.password": "wrong"}))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("group", [None, "DESCRIBE"])
def test_poll_without_read_on_the_group_names_the_acl(
    door: Door, protocol: str, group: str | None
) -> None:
    """With DESCRIBE alone the consumer protocol reports it as a fatal error."""
    door.allow(group=group)
    with door.consumer(protocol) as consumer:
        consumer.subscribe([door.name])
        consumer.check()
        message = refusal(lambda: poll_until_refused(consumer))
    assert f"group '{door.name}'" in message
    assert "grant the principal the ACL READ, which includes DESCRIBE, on the group" in message


@pytest.mark.parametrize("topic", [None, "DESCRIBE"])
def test_check_without_read_on_the_topic_names_the_acl(door: Door, topic: str | None) -> None:
    """With DESCRIBE alone, only the first claim would be refused."""
    door.allow(topic=topic)
    with door.consumer() as consumer:
        consumer.subscribe([door.name])
        message = refusal(consumer.check)
    assert f"topic '{door.name}'" in message
    assert "ACL READ" in message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_poll_without_rights_on_the_topic_names_the_acl(door: Door, protocol: str) -> None:
    door.allow(topic=None)
    with door.consumer(protocol, fetch=True) as consumer:
        consumer.subscribe([door.name])
        message = refusal(lambda: poll_until_refused(consumer))
    assert door.name in message
    assert "ACL READ, which includes DESCRIBE, on the topic" in message


def test_commit_without_read_on_the_topic_names_the_acl(door: Door) -> None:
    door.allow(topic="DESCRIBE")
    with door.consumer() as consumer:
        consumer.subscribe([door.name])
        poll_until_refused(consumer)
        message = refusal(lambda: consumer.commit_sync({door.partition: OffsetAndMetadata(1)}))
    assert f"{door.partition}" in message
    assert "ACL READ, which includes DESCRIBE, on the topic" in message


def test_committed_without_rights_on_the_group_names_the_acl(door: Door) -> None:
    """A run polls nothing, so its request only times out."""
    door.allow(group=None)
    with door.consumer() as consumer:
        message = refusal(lambda: consumer.committed([door.partition], timeout_s=PATIENCE_S))
    assert f"group '{door.name}'" in message
    assert "ACL READ, which includes DESCRIBE, on the group" in message


@pytest.mark.parametrize(
    ("right", "says"), [("WRITE", ""), ("DESCRIBE", "ACLs WRITE and DESCRIBE on the topic")]
)
def test_dead_letter_producer_needs_only_write_on_its_topic(
    door: Door, right: str, says: str
) -> None:
    door.allow(topic=right, group=None)
    letters = DeadLetterProducer(
        {**door.kafka.client_config(door.name), "group.id": door.name}, door.name
    )
    letters.send("orders-0-5-9", "{}")
    (delivery,) = wait_until(
        letters.deliveries, timeout_s=REFUSED_WITHIN_S, what="the end of the record"
    )
    letters.close()
    assert says in delivery.problem
    assert bool(says) == bool(delivery.problem)


def test_pattern_matches_only_visible_topics(door: Door) -> None:
    door.allow()
    hidden = f"{door.name}-hidden"
    fill(door.kafka, hidden)
    seen: set[str | None] = set()
    with door.consumer(fetch=True) as consumer:
        consumer.subscribe(re.compile(f"{door.name}.*"))
        consumer.check()

        def reads(topic: str) -> bool:
            seen.update(message.topic() for message in consumer.poll(0.1))
            return topic in seen

        wait_until(
            lambda: reads(door.name),
            timeout_s=120,
            what="the records of the allowed topic",
            interval_s=0,
        )
        for _ in range(15):
            reads(hidden)
        assert consumer.assignment() == {door.partition}
        door.kafka.allow(door.name, "READ", topic=hidden)
        wait_until(
            lambda: reads(hidden),
            timeout_s=120,
            what="the records of the topic that was hidden",
            interval_s=0,
        )


def test_pattern_with_an_unreadable_topic_names_it(door: Door) -> None:
    door.allow(topic="DESCRIBE")
    with door.consumer(fetch=True) as consumer:
        consumer.subscribe(re.compile(f"{door.name}.*"))

        def poll_on() -> None:
            until = time.monotonic() + REFUSED_WITHIN_S
            while time.monotonic() < until:
                _poll(consumer)

        message = refusal(poll_on)
    assert f"{door.partition}" in message
    assert "ACL READ, which includes DESCRIBE, on the topic" in message


@pytest.fixture(scope="module")
def holder(secured_kafka: SecuredKafka) -> Door:
    made = Door(secured_kafka, unique_name("holder"))
    secured_kafka.add_certificate(made.name)
    fill(secured_kafka, made.name)
    made.allow()
    return made


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("form", ["PEM", "PKCS#12"])
def test_consumer_logs_in_with_a_certificate(
    holder: Door, protocol: str, form: str, tmp_path: Path
) -> None:
    """The settings are those of docs/logins.md, whose key has a password, and a single file."""
    settings = (
        pem_settings(holder.kafka.client_config(holder.name), tmp_path)
        if form == "PEM"
        else holder.kafka.client_config(holder.name)
    )
    config = {
        **settings,
        "group.id": holder.name,
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
    }
    with RebalanceAwareConsumer(config) as consumer:
        consumer.subscribe([holder.name])
        consumer.check()
        wait_until(lambda: consumer.poll(0.1), timeout_s=120, what="records", interval_s=0)
        consumer.commit_sync({holder.partition: OffsetAndMetadata(0, "text")})
        assert consumer.committed([holder.partition]) == {
            holder.partition: OffsetAndMetadata(0, "text")
        }


def test_certificate_has_the_rights_of_its_subject(holder: Door) -> None:
    other = unique_name("other")
    fill(holder.kafka, other)
    with holder.consumer() as consumer:
        consumer.subscribe([other])
        message = refusal(consumer.check)
    assert f"topic '{other}'" in message
    assert "ACL READ" in message


def test_check_without_a_valid_certificate_reports_the_reason(holder: Door, tmp_path: Path) -> None:
    """The broker ends the connection right after each handshake."""
    trusted = holder.kafka.client_config(holder.name)
    none = {name: value for name, value in trusted.items() if not name.startswith("ssl.keystore")}
    certificate = _authority(tmp_path / "another.pem")
    another = {
        **none,
        "ssl.certificate.location": str(certificate),
        "ssl.key.location": str(certificate.with_suffix(".key")),
    }
    for config in (none, another):
        with RebalanceAwareConsumer({**config, "group.id": holder.name}, fetch=False) as consumer:
            consumer.subscribe([holder.name])
            message = refusal(lambda: consumer.check(timeout_s=4.0))
        assert re.search(
            "ssl/tls alert (bad certificate|certificate unknown|certificate required|unknown ca)",
            message,
        )


@dataclass(frozen=True)
class Mistake:
    """A wrong setting and the parts of its message.

    Settings with the listed prefixes are left out together with it.
    """

    setting: str
    value: str
    says: tuple[str, ...]
    without: tuple[str, ...] = ()


MISTAKES = {
    "password": Mistake(
        "sasl.password",
        "hunter2-is-wrong",
        ("Authentication failed", "'sasl.username' and 'sasl.password'"),
    ),
    "mechanism": Mistake(
        "sasl.mechanism",
        "SCRAM-SHA-256",
        ("supported mechanisms: SCRAM-SHA-512", "'sasl.mechanism'"),
    ),
    "authority": Mistake(
        "ssl.ca.location", "another.pem", ("certificate verify failed", "'ssl.ca.location'")
    ),
    "protocol": Mistake(
        "security.protocol", "PLAINTEXT", ("speak your 'security.protocol'",), ("ssl.", "sasl.")
    ),
    "login": Mistake("security.protocol", "SSL", ("speak your 'security.protocol'",), ("sasl.",)),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_connection_errors_are_reported_within_seconds(
    door: Door, kind: str, tmp_path: Path
) -> None:
    """`check`, a poll without it, and a run's first request find the error in different ways."""
    mistake = MISTAKES[kind]
    hangs_up = kind in {"protocol", "login"}
    limit_s = (
        4.0 if hangs_up else PATIENCE_S
    )  # brokers that just hang up are tried again for as long as it takes
    value = str(_authority(tmp_path / mistake.value)) if kind == "authority" else mistake.value
    with door.consumer(wrong={mistake.setting: value}, without=mistake.without) as consumer:
        messages = [refusal(lambda: consumer.committed([door.partition], timeout_s=limit_s))]
        consumer.subscribe([door.name])
        messages.append(refusal(lambda: consumer.check(timeout_s=limit_s)))
        if not hangs_up:
            messages.append(refusal(lambda: poll_until_refused(consumer)))
    for message in messages:
        for part in mistake.says:
            assert part in message
        assert "hunter2" not in message


def pem_settings(config: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The settings of docs/logins.md for a user with a PKCS#12 file.

    They name a certificate, and a key with a password that Java can read as well.
    """
    settings = dict(config)
    store, password = settings.pop("ssl.keystore.location"), settings.pop("ssl.keystore.password")
    certificate, plain, key = (folder / name for name in ("etl.pem", "plain.key", "etl.key"))
    opened: list[str | Path] = ["pkcs12", "-in", store, "-passin", f"pass:{password}"]
    convert: list[str | Path] = [
        "pkcs8",
        *KEY_FORM,
        "-in",
        plain,
        "-out",
        key,
        "-passout",
        f"pass:{KEY_PASSWORD}",
    ]
    for command in (
        [*opened, "-clcerts", "-nokeys", "-out", certificate],
        [*opened, "-nocerts", "-nodes", "-out", plain],
        convert,
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)  # noqa: S607 - the one that is installed
    files = {"ssl.certificate.location": str(certificate), "ssl.key.location": str(key)}
    return {**settings, **files, "ssl.key.password": KEY_PASSWORD}


def _authority(path: Path) -> Path:
    names = ["-subj", "/CN=another", "-keyout", str(path.with_suffix(".key")), "-out", str(path)]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        *names,
    ]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.mark.parametrize("sees", [True, False], ids=["seen", "hidden"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_hold_survives_a_withdrawn_right_on_one_topic(
    secured_kafka: SecuredKafka, protocol: str, *, sees: bool
) -> None:
    user, kept = unique_name("user"), unique_name("kept")
    closed = f"a-{unique_name('closed')}"
    secured_kafka.add_user(user, "a-password-of-a-test")
    for topic in (kept, closed):
        secured_kafka.create_topic(topic, 4)
        secured_kafka.allow(user, "READ", *(["DESCRIBE"] if sees else []), topic=topic)
    access = secured_kafka.client_config(user)
    stage = KafkaStage(access["bootstrap.servers"], kept, protocol)
    stage.config.update(access)
    secured_kafka.allow(user, "READ", group=stage.config["group.id"])
    mine = {TopicPartition(kept, number) for number in range(4)}
    theirs = {TopicPartition(closed, number) for number in range(4)}
    owner, other = Actor(stage), Actor(stage)
    try:
        owner.subscribe(closed)
        play(lambda: owner.owns == mine | theirs, owner, what="the whole assignment")
        owner.member.commit(dict.fromkeys(owner.owns, OffsetAndMetadata(1)))
        other.subscribe(closed)
        play(lambda: owner.member.held, owner, other, what="a revoke request")
        secured_kafka.forbid(user, "READ", topic=closed)
        pass_time(owner, other, polls=40)
        result = owner.member.commit(dict.fromkeys(owner.owns, OffsetAndMetadata(2)))
        assert result.committed == mine
        assert {error.topics for error in result.failed.values()} == {frozenset({closed})}
        assert not owner.partitions_of(PartitionsLost)
        with pytest.raises(BrokerError, match="ACL READ") if not sees else nullcontext() as refused:
            owner.member.committed(mine | theirs, 60.0)
        if refused is not None:
            assert refused.value.partitions.keys() == theirs

        def is_released() -> bool:
            if owner.member.held:
                owner.member.release()
            return not owner.member.held and mine <= owner.owns | other.owns

        owner.member.release()
        play(is_released, owner, other, what="an owner of each partition of the other topic")
        assert not mine.intersection(owner.partitions_of(PartitionsLost))
    finally:
        for each in (owner, other):
            each.member.close(5.0)
