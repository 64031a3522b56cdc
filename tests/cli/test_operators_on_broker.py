"""`status`, `explain`, `reset` and `produce` on a real Kafka, with both group protocols."""

from __future__ import annotations

import json
import threading
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.claims import Claim, LastCommit, StoredPartition, decode, encode
from dagster_rebalance.core.model.commands import RecordCommit
from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    DagsterRebalanceError,
)
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.orchestration.operators import pruning
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.group_settings import public_settings
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.heartbeats import format_partitions
from dagster_rebalance.orchestration.storage.member_lease import MemberIdentity
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.run_tags import RunEvent, record_run_event
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from tests.cli.command_line import invoke
from tests.orchestration.parts import batch_request, give_sign, make_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dagster_rebalance.core.model.run_snapshot import RunSnapshot
    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory
    from dagster_rebalance.testing.secured import SecuredKafka

pytestmark = pytest.mark.broker
PARTITIONS, RECORDS = 3, 30


class Shop:
    """A group of real members, and its records in Dagster."""

    def __init__(self, instance: dg.DagsterInstance, kafka: KafkaCluster, topic: str) -> None:
        self.instance = instance
        self.kafka = kafka
        self.topic = topic
        self.resource = KafkaConsumerResource(
            bootstrap_servers=kafka.bootstrap_servers, group_id=topic, topics=[topic]
        )
        self.partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        self._committed: dict[int, OffsetAndMetadata] = {}

    def catalogue(self, location: str) -> Catalogue:
        """Return the catalogue of the member in a code location."""
        host = MemberIdentity(location, "sensor", location)
        return Catalogue(
            self.instance, GroupAssets.of(self.topic), host, public_settings(self.resource)
        )

    def record_earlier_member(self) -> None:
        """Record a member that owned all partitions."""
        catalogue = self.catalogue("blue")
        catalogue.add_partitions(self.partitions)
        catalogue.record_joined()

    @contextmanager
    def members(self, protocol: str, *names: str) -> Iterator[None]:
        """Run members in a thread that delays all revokes."""
        stop = threading.Event()
        consumers: list[tuple[str, RebalanceAwareConsumer]] = []
        known: dict[str, frozenset[TopicPartition]] = {}

        def poll() -> None:
            while not stop.is_set():
                for name, consumer in consumers:
                    consumer.poll(0.05)
                    consumer.delay_revoke(consumer.get_to_be_revoked_partitions())
                    assignment = consumer.assignment()
                    if assignment - known.get(name, frozenset()):
                        self.catalogue(name).record_assigned(assignment, consumer.member_id)
                    known[name] = assignment

        thread = threading.Thread(target=poll)
        try:
            for name in names:
                config = {**self.kafka.client_config(), "group.id": self.topic}
                consumer = RebalanceAwareConsumer(
                    {**config, "group.protocol": protocol}, fetch=False
                )
                consumer.subscribe([self.topic])
                consumers.append((name, consumer))
                if len(consumers) == 1:
                    thread.start()
                    wait_until(
                        lambda: len(known.get(names[0], ())) == PARTITIONS or None,
                        timeout_s=120,
                        what="the first member to own all",
                    )
            yield
        finally:
            stop.set()
            thread.join()
            for _, consumer in consumers:
                consumer.close()

    def commit(self, number: int, stored: OffsetAndMetadata) -> None:
        """Commit an offset for the group, which has no members."""
        partition = self.partitions[number]
        shown = {partition: self._committed.get(number)}
        self.resource.group().move({partition: stored}, shown=shown)
        self._committed[number] = stored

    def stored(self, number: int) -> OffsetAndMetadata | None:
        """Return the committed offset of a partition."""
        with self.resource.connect() as consumer:
            return consumer.committed([self.partitions[number]])[self.partitions[number]]

    def output(self, *arguments: str) -> str:
        """Return the output of a command for the group."""
        result = invoke(*arguments, "--group", self.topic)
        assert result.exit_code == 0, result.output
        return result.output

    def rows(self) -> list[dict[str, Any]]:
        """Return the partitions of `status --json`."""
        rows: list[dict[str, Any]] = json.loads(self.output("status", "--json"))["partitions"]
        return rows


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    """Return an empty instance, which `DAGSTER_HOME` names."""
    (tmp_path / "dagster.yaml").touch()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance:
        yield instance


@pytest.fixture
def shop(
    instance: dg.DagsterInstance, kafka_broker: KafkaCluster, kafka_topic: TopicFactory
) -> Shop:
    """Return a group without members, with some records in its topic."""
    shop = Shop(instance, kafka_broker, kafka_topic(PARTITIONS, prefix="orders"))
    shop.record_earlier_member()
    produced = invoke(
        "produce", shop.topic, str(RECORDS), "--bootstrap-server", kafka_broker.bootstrap_servers
    )
    assert produced.output == (
        f"{RECORDS} records in topic {shop.topic}, {PARTITIONS} partitions, 100 keys\n"
    )
    return shop


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_status_shows_owners_and_a_hold(shop: Shop, protocol: str) -> None:
    shop.commit(0, encode(StoredPartition(1, (Claim(2, "b-1"),))))
    rows = shop.rows()
    assert [row["owner"] for row in rows] == [""] * PARTITIONS
    assert sum(row["end"] for row in rows) == RECORDS
    assert [row["committed"] for row in rows] == [1, None, None]
    assert rows[0]["claims"] == [{"start": 1, "until": 2, "batch": "b-1"}]
    assert rows[0]["lag"] == rows[0]["end"] - 1
    with shop.members(protocol, "blue"):
        assert [row["owner"] for row in shop.rows()] == ["blue"] * PARTITIONS
        table = shop.output("status")
        assert table.startswith(f"group {shop.topic}: 1 member, 3 partitions, lag {RECORDS - 1}")
    with shop.members(protocol, "blue", "green"):
        held = wait_until(
            # Until its owner has received the revoke, Kafka only names the waiting member.
            lambda: next((row for row in shop.rows() if "held by blue" in row["hold"]), None),
            timeout_s=120,
            what=lambda: f"a hold among {shop.rows()}",
        )
        assert held["owner"] == ""
        assert ("waits for it" in held["hold"]) == (protocol == "consumer")
        sentences = shop.output("explain", f"{shop.topic}-{held['partition']}")
        assert "It has no owner at the moment: held by blue" in sentences


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_reset_moves_offsets_only_without_members(shop: Shop, protocol: str) -> None:
    shop.commit(0, encode(StoredPartition(2, (Claim(3, "b-1"),))))
    selector = f"{shop.topic}:0"
    with shop.members(protocol, "blue"):
        with pytest.raises(ConfigurationError, match=r"has 1 member \(blue\): turn its sensor off"):
            shop.output("reset", selector, "--to-earliest", "--yes")
        *_, refused, why = shop.output("reset", selector, "--to-earliest").splitlines()
        assert refused == "Nothing was moved, and --yes would be refused:"
        assert why.startswith("- the group has 1 member (blue): turn its sensor off, and cancel")
        with pytest.raises(BrokerError, match="were not moved: it has members again"):
            shop.commit(0, OffsetAndMetadata(0))
        assert shop.stored(0) == encode(StoredPartition(2, (Claim(3, "b-1"),)))
    shown = shop.output("reset", selector, "--to-earliest")
    moved = (
        f"{shop.topic}-0: 2 -> 0, 2 offsets again, drops 1 claim\n"
        f"Before you turn the sensors on, remove the output of {shop.topic}-0 from the new offset "
        "on: records are read again in ranges with different bounds, which do not replace it.\n"
    )
    assert shown == f"{moved}Nothing was moved: add --yes to move the offsets.\n"
    assert shop.stored(0) == encode(StoredPartition(2, (Claim(3, "b-1"),)))
    assert shop.output("reset", selector, "--to-earliest", "--yes", "--by", "ada") == (
        f"{moved}Moved {shop.topic}-0.\n"
    )
    stored = shop.stored(0)
    assert stored is not None
    read = decode(stored)
    assert (read.next_offset, read.claims) == (0, ())
    assert read.log.topic_id, "a recreated topic must be detected"
    (record,) = shop.instance.fetch_observations(GroupAssets.of(shop.topic).group, limit=1).records
    assert record.asset_observation is not None
    assert (
        record.asset_observation.description == f"ada moved the committed offsets of {shop.topic}-0"
    )


def test_explain_of_offsets_names_their_batches(shop: Shop) -> None:
    shop.commit(0, encode(StoredPartition(2, (Claim(3, "b-2"),))))
    work = OffsetRange(shop.topic, 0, 0, 2)
    commit = RecordCommit(work, 1, "b-1", "run-1", 0, None, None)
    shop.catalogue("blue").record_commits([commit])
    name = f"{shop.topic}-0"
    said = shop.output("explain", f"{shop.topic}:0@1", f"{shop.topic}-0@2")
    assert f"{name} offset 1: committed by run run-1, batch b-1, recorded at " in said
    assert f"{name} offset 2: not committed. batch b-2 has claimed its range [2, 3)" in said
    for wrong in (f"{shop.topic}@1", f"{shop.topic}:0@", f"{shop.topic}:0@-1"):
        with pytest.raises(ConfigurationError, match="is not the offset of one partition"):
            shop.output("explain", wrong)
    with pytest.raises(ConfigurationError, match="either partitions or offsets"):
        shop.output("explain", f"{shop.topic}:0@1", f"{shop.topic}:1")


def test_prune_shows_old_runs_and_deletes_them_on_request(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.commit(0, encode(StoredPartition(2)))
    runs = []
    for until in (2, 3):
        work = batch_request(f"b-{until}", OffsetRange(shop.topic, 0, until - 2, until))
        run = make_run(shop.instance, work, dg.DagsterRunStatus.STARTED, group_id=shop.topic)
        ended = dg.DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name=run.job_name)
        shop.instance.report_dagster_event(ended, run.run_id)
        runs.append(run.run_id)
    for days in ("3", "36500"):
        assert f"No run that ended more than {days} days ago" in shop.output(
            "prune", "--days", days
        )
    monkeypatch.setattr(pruning, "DAY_S", -1e5)
    shown = shop.output("prune")
    assert shown.startswith("1 run of a batch: ended from ")
    assert "1 stays: its ranges are not committed" in shown
    assert "Nothing was deleted" in shown
    assert len(shop.instance.get_runs()) == 2
    assert "Deleted 1 run." in shop.output("prune", "--delete")
    assert [run.run_id for run in shop.instance.get_runs()] == runs[1:]


def test_reset_of_partitions_with_a_live_run_is_refused(shop: Shop) -> None:
    shop.commit(0, encode(StoredPartition(0, (Claim(3, "b-1"),))))
    claimed = batch_request("b-1", OffsetRange(shop.topic, 0, 0, 3))
    run = make_run(shop.instance, claimed, dg.DagsterRunStatus.STARTED, group_id=shop.topic)
    with pytest.raises(ConfigurationError, match=f"run {run.run_id[:8]} may be working on"):
        shop.output("reset", "--all", "--to-latest", "--yes")
    run = shop.rows()[0]["runs"]
    assert run == [record.run_id for record in shop.instance.get_runs()]


@pytest.mark.parametrize("streams", [False, True])
def test_reset_with_unreadable_claims_is_refused_until_the_failed_run_has_ended(
    shop: Shop, *, streams: bool
) -> None:
    shop.commit(0, OffsetAndMetadata(0, "not ours"))
    work = batch_request("b-1", OffsetRange(shop.topic, 1 if streams else 0, 0, 3))
    run = make_run(shop.instance, work, dg.DagsterRunStatus.STARTED, group_id=shop.topic)
    says = f"0/60.0 {format_partitions(frozenset(shop.partitions[:1]))} " if streams else "0/60.0 "
    give_sign(shop.instance, run, f"{says}elsewhere")
    record_run_event(shop.instance, run, RunEvent.BEGAN)
    shop.instance.report_run_failed(run, "its node is gone")
    move = ("reset", f"{shop.topic}:0", "--to-latest", "--yes")
    with pytest.raises(
        ConfigurationError,
        match=f"run {run.run_id[:8]} may be working on .*It counts as dead in 1[12][0-9] s",
    ):
        shop.output(*move)
    assert shop.stored(0) == OffsetAndMetadata(0, "not ours")
    record_run_event(shop.instance, run, RunEvent.FINISHED)
    assert f"Moved {shop.topic}-0." in shop.output(*move)


def test_reset_does_not_overwrite_a_newer_commit(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.commit(0, OffsetAndMetadata(1))
    read = RunLedger.written_off

    def commit_and_read(ledger: RunLedger) -> tuple[RunSnapshot, ...]:
        shop.commit(0, encode(StoredPartition(2, (Claim(3, "b-2"),))))
        return read(ledger)

    monkeypatch.setattr(RunLedger, "written_off", commit_and_read)
    with pytest.raises(BrokerError, match=r"has changed since it was shown.*run the command again"):
        shop.output("reset", f"{shop.topic}:0", f"{shop.topic}:1", "--to-latest", "--yes")
    assert shop.stored(0) == encode(StoredPartition(2, (Claim(3, "b-2"),)))
    assert shop.stored(1) is None


def test_reset_that_dagster_does_not_record_is_reported_as_done(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        msg = "disk full"
        raise OSError(msg)

    monkeypatch.setattr(Catalogue, "record_moves", away)
    with pytest.raises(
        DagsterRebalanceError, match=f"{shop.topic}-0 moved, but .* did not record it: disk full"
    ):
        shop.output("reset", f"{shop.topic}:0", "--to-offset", "2", "--yes")
    assert shop.rows()[0]["committed"] == 2


def test_reset_records_the_commits_of_a_killed_member_first(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each partition has at least 3 of the records, which have random keys.
    stored = encode(StoredPartition(3, last_commit=LastCommit(1, "b-1", "run-1")))
    shop.commit(0, stored)
    command = ("reset", f"{shop.topic}:0", "--to-current", "--yes")

    def away(*_: object, **__: object) -> None:
        msg = "database is locked"
        raise OSError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "record_commits", away)
        with pytest.raises(DagsterRebalanceError, match=r"nothing was moved.*database is locked"):
            shop.output(*command)
    assert shop.stored(0) == stored
    shop.output(*command)
    assert shop.stored(0) != stored
    offsets = GroupAssets.of(shop.topic).offsets
    (record,) = shop.instance.fetch_materializations(offsets, limit=10).records
    assert record.asset_materialization is not None
    metadata = record.asset_materialization.metadata
    assert [metadata[name].value for name in ("start", "until", "run")] == [1, 3, "run-1"]


def test_reset_to_a_timestamp_finds_the_offset(shop: Shop) -> None:
    ends = [row["end"] for row in shop.rows()]
    shop.output("reset", "--all", "--to-timestamp", "2999-01-01T00:00+01:00", "--yes")
    assert [row["committed"] for row in shop.rows()] == ends
    shop.output("reset", "--all", "--to-timestamp", "2001-01-01", "--yes")
    assert [row["committed"] for row in shop.rows()] == [0] * PARTITIONS
    with pytest.raises(ConfigurationError, match=r"has no offset 999: Kafka has 0 \(--to-earl"):
        shop.output("reset", f"{shop.topic}:0", "--to-offset", "999")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["status", "--bootstrap-server", "127.0.0.1:1"],
            "failed at 127.0.0.1:1: .*check that the b",
        ),
        (["explain", "orders-9"], "orders-9 matches no partition of group orders-"),
        (["reset", "--all", "--to-latest", "--to-earliest"], "pass exactly one of"),
        (["reset", "--to-latest"], "name the partitions to reset"),
        (["reset", "--all", "--to-timestamp", "noon"], "'noon' is not a time"),
        (["reset", "--all", "--to-latest", "--yes", "--dry-run"], "either --yes or --dry-run"),
    ],
)
def test_command_with_wrong_arguments_is_refused(
    shop: Shop, arguments: list[str], problem: str
) -> None:
    with pytest.raises(DagsterRebalanceError, match=problem):
        shop.output(*arguments)


def test_commands_with_a_login_file_need_only_the_documented_acls(
    instance: dg.DagsterInstance, secured_kafka: SecuredKafka, tmp_path: Path
) -> None:
    name, password = unique_name("operator"), uuid.uuid4().hex
    secured_kafka.create_topic(name, PARTITIONS)
    secured_kafka.add_user(name, password)
    secured_kafka.allow(name, "READ", topic=name)
    secured_kafka.allow(name, "DESCRIBE", group=name)
    shop = Shop(instance, secured_kafka, name)
    shop.record_earlier_member()
    file = tmp_path / "login"
    settings = secured_kafka.client_config(name)
    file.write_text("\n".join(f"{key}={value}" for key, value in settings.items()))
    login = ("--command-config", str(file))
    with pytest.raises(BrokerError, match="requires TLS or a login, pass --command-config"):
        shop.output("status")
    assert password in file.read_text()
    assert shop.output("status", *login).startswith(
        f"group {name}: no members, 3 partitions, lag 0"
    )
    assert shop.output("explain", name, *login).count("The group has no member") == 1
    move = ("reset", "--all", "--to-earliest", *login)
    assert "Nothing was moved" in shop.output(*move)
    with pytest.raises(BrokerError, match="authoriz") as refused:
        shop.output(*move, "--yes")
    assert password not in str(refused.value)
    secured_kafka.allow(name, "READ", group=name)
    assert f"Moved {name}-0..2." in shop.output(*move, "--yes")
    with pytest.raises(BrokerError, match="grant the principal the ACL WRITE on the topic"):
        invoke("produce", name, "5", *login)
    file.write_text(file.read_text().replace(password, "wrong"))
    with pytest.raises(BrokerError, match="check 'security"):
        shop.output("status", *login)
