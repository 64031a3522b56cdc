"""`dagster-rebalance letters` on a real Kafka."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from confluent_kafka import Producer

from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    DagsterRebalanceError,
)
from dagster_rebalance.core.model.letters import Letter, LetterKind, LetterState, StateChange
from dagster_rebalance.core.model.offsets import OffsetRange, TopicPartition
from dagster_rebalance.orchestration.operators.letter_payload import shown_payload
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.group_settings import public_settings
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from tests.cli.command_line import invoke
from tests.decoding.http_registry import http_registry
from tests.decoding.records import ORDER, avro, framed, proto_file, proto_message
from tests.decoding.test_protobuf import registered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dagster_rebalance.testing.broker import KafkaCluster
    from dagster_rebalance.testing.fixtures import TopicFactory

pytestmark = pytest.mark.broker
AT_MS = 1_700_000_000_000
ABOUT_RANGE = b'{"topic": "orders"}'


class Ward:
    """A group with dead letters, and its records in Dagster."""

    def __init__(
        self, instance: dg.DagsterInstance, kafka: KafkaCluster, orders: str, letters: str
    ) -> None:
        self.instance = instance
        self.kafka = kafka
        self.orders = orders
        self.letters = letters
        self.resource = KafkaConsumerResource(
            bootstrap_servers=kafka.bootstrap_servers,
            group_id=orders,
            topics=[orders],
            on_failure="dead_letter",
            dead_letter_topic=letters,
        )
        assets = GroupAssets.of(orders)
        catalogue = Catalogue(instance, assets, NO_MEMBER, public_settings(self.resource))
        catalogue.add_partitions([TopicPartition(orders, 0), TopicPartition(orders, 1)])
        catalogue.record_joined()

    def letter(self, offset: int, *, partition: int = 0, **more: Any) -> Letter:  # noqa: ANN401 - fields of a letter
        """Return the letter of a record."""
        range_ = OffsetRange(self.orders, partition, offset, offset + 1)
        of_each = {"group_id": self.orders, "batch_id": "b-1", "run_id": "run-00001", "attempt": 1}
        return replace(Letter(range_, "bad", b"{}", time_ms=AT_MS), **{**of_each, **more})

    def store(self, *found: Letter | StateChange) -> None:
        """Write records to the topic, each into the partition of its key."""
        producer = Producer({**self.kafka.client_config(), "partitioner": "murmur2_random"})
        for one in found:
            record = one.record
            headers: Any = record.headers
            producer.produce(self.letters, key=record.key, value=record.value, headers=headers)
        assert producer.flush(120) == 0

    def output(self, *arguments: str) -> str:
        """Return the output of a command for the group."""
        result = invoke("letters", *arguments, "--group", self.orders)
        assert result.exit_code == 0, result.output
        return result.output

    def listed(self, *arguments: str) -> dict[str, Any]:
        """Return the JSON of `letters list`."""
        found: dict[str, Any] = json.loads(self.output("list", "--json", *arguments))
        return found


@pytest.fixture
def ward(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kafka_broker: KafkaCluster,
    kafka_topic: TopicFactory,
) -> Iterator[Ward]:
    """Return a group with an empty dead-letter topic, in the instance of `DAGSTER_HOME`."""
    (tmp_path / "dagster.yaml").touch()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    orders, letters = kafka_topic(2, prefix="orders"), kafka_topic(2, prefix="dead")
    with dg.DagsterInstance.get() as instance:
        yield Ward(instance, kafka_broker, orders, letters)


def test_list_counts_by_partition_and_reason_and_lists_the_newest(ward: Ward) -> None:
    assert ward.output("list") == (
        f"topic {ward.letters}: 0 open, 0 replayed, 0 discarded\nno letter matches\n"
    )
    many = [
        ward.letter(at, reason=f"record {at} has no id\x1b[2J", time_ms=AT_MS + at)
        for at in range(30)
    ]
    bad = ward.letter(7, partition=1, reason="KeyError: 'x'", time_ms=AT_MS + 86_400_000)
    ward.store(*many, bad, many[3])
    closed = StateChange(many[3].key, LetterState.DISCARDED, "ada", "a test", AT_MS + 99)
    ward.store(closed)
    headline, _, first, second, _, _, *newest = ward.output("list", "--limit", "2").splitlines()
    assert headline == f"topic {ward.letters}: 30 open, 0 replayed, 1 discarded"
    assert " ".join(first.split()) == f"{ward.orders}-0 record 29 record # has no id [#J"
    assert " ".join(second.split()) == f"{ward.orders}-1 record 1 KeyError: 'x'"
    assert [line.split()[0] for line in newest] == [bad.key, many[29].key, "and"]
    assert "\x1b" not in "".join(newest)
    assert newest[-1] == "and 28 older letters: pass --limit"

    assert [one["key"] for one in ward.listed(f"{ward.orders}:1")["letters"]] == [bad.key]
    assert [one["key"] for one in ward.listed("--containing", "keyerror")["letters"]] == [bad.key]
    later = ward.listed("--since", "2023-11-15T10:00")
    assert [one["key"] for one in later["letters"]] == [bad.key]
    (shown,) = ward.listed("--state", "discarded")["letters"]
    assert {name: shown[name] for name in ("key", "start", "state", "by", "why")} == {
        "key": many[3].key,
        "start": 3,
        "state": "discarded",
        "by": "ada",
        "why": "a test",
    }
    assert len(ward.listed("--state", "all", "--limit", "99")["letters"]) == 31


def test_records_that_are_no_letters_are_counted_and_named(ward: Ward) -> None:
    producer = Producer(ward.kafka.client_config())
    producer.produce(ward.letters, key=b"x", value=b"\xff", partition=0)
    producer.produce(ward.letters, key=None, value=None, partition=1)
    assert producer.flush(120) == 0
    _, note, *_ = ward.output("list").splitlines()
    assert note.startswith("2 records are no letters; partition ")
    assert ward.listed()["malformed"] == 2


def test_show_prints_the_record_and_its_run(ward: Ward) -> None:
    raw = ward.letter(
        5,
        reason="not JSON\x1b[2J",
        value=b'{"id": 5, "item": "\xc3\xa4"}',
        record_key=b"\xff\x00",
        headers=(("trace", b"abc"), ("none", None)),
        timestamp_ms=AT_MS - 1000,
    )
    ward.store(raw, StateChange(raw.key, LetterState.REPLAYED, "ada", "fixed", AT_MS + 1, "run-2"))
    assert ward.output("show", raw.key).splitlines() == [
        f"letter {raw.key}: the record {ward.orders}-0 offset 5, replayed",
        "replayed by ada at 2023-11-14 22:13:20 UTC in run run-2: fixed",
        f"stored: 2023-11-14 22:13:20 UTC by group {ward.orders}, batch b-1, attempt 1",
        "run: run-00001 (in Dagster's UI: /runs/run-00001)",
        "reason: not JSON\\x1b[2J",
        "timestamp: 2023-11-14 22:13:19 UTC",
        "headers:",
        "  trace: abc",
        "  none: null",
        "key: ff 00",
        'value: {"id": 5, "item": "ä"}',
    ]
    failed = replace(
        ward.letter(10, reason="lost", value=ABOUT_RANGE, kind=LetterKind.RANGE),
        range=OffsetRange(ward.orders, 1, 10, 20),
    )
    ward.store(failed)
    first, *_, last = ward.output("show", failed.key).splitlines()
    assert first == f"letter {failed.key}: the range {ward.orders}-1 [10, 20), open"
    assert last == "reason: lost"
    missing = (
        f"{ward.letters} has no letter orders-9: .* --group {ward.orders} --topic {ward.letters}`"
    )
    with pytest.raises(ConfigurationError, match=missing):
        ward.output("show", "orders-9")


def test_show_decodes_records_with_the_registry(ward: Ward, tmp_path: Path) -> None:
    with http_registry() as registry:
        schema_id = registry.register(f"{ward.orders}-value", ORDER)
        file = proto_file("shop", [proto_message("Order", id="int64")])
        proto_id = registered(registry, f"{ward.orders}-key", file)
        good = ward.letter(
            1,
            value=avro(schema_id, ORDER, {"id": 5, "item": "tea"}),
            record_key=framed(proto_id, b"\x08\x07", b"\x00"),
        )
        bad = ward.letter(2, value=framed(schema_id, b""), record_key=framed(99, b""))
        ward.store(good, bad)
        shown = ward.output("show", good.key, "--registry", registry.url)
        assert '"item": "tea"' in shown
        assert '"id": 7' in shown
        assert "not decoded" not in shown
        config = tmp_path / "registry.properties"
        config.write_text(f"url={registry.url}\nusername=ada\npassword=secret\n")
        shown = ward.output("show", bad.key, "--registry-config", str(config))
        assert "key: 00 00 00 00 63\n  not decoded: the registry has no schema with the id 99" in (
            shown
        )
        assert "value: 00 00 00 00 01\n  not decoded: " in shown
    shown = ward.output("show", good.key, "--registry", registry.url)
    key = framed(proto_id, b"\x08\x07", b"\x00").hex(" ")
    assert f"key: {key}\n  not decoded: " in shown
    assert shown.count("not decoded: ") == 2, "the registry is down"
    config.write_text("username=ada\n")
    with pytest.raises(ConfigurationError, match="has no url: add the URL of the schema registry"):
        ward.output("show", good.key, "--registry-config", str(config))
    config.write_text("url=http://registry\nallow_plaintext=secret\n")
    with pytest.raises(ConfigurationError, match="settings of the schema registry") as refused:
        ward.output("show", good.key, "--registry-config", str(config))
    assert "secret" not in str(refused.value)


def test_letters_of_an_unknown_topic_are_refused(ward: Ward) -> None:
    with pytest.raises(BrokerError, match="no-such-topic"):
        ward.output("list", "--topic", "no-such-topic")
    kafka = ward.resource.model_copy(update={"dead_letter_topic": None, "on_failure": "pause"})
    Catalogue(
        ward.instance, GroupAssets.of(ward.orders), NO_MEMBER, public_settings(kafka)
    ).record_joined()
    with pytest.raises(ConfigurationError, match=r"has no dead_letter_topic: pass --topic"):
        ward.output("list")
    assert "0 open" in ward.output("list", "--topic", ward.letters)


def test_discard_closes_letters_and_is_shown_in_dagster(ward: Ward) -> None:
    letters = [ward.letter(at, reason="odd" if at % 2 else "even") for at in range(4)]
    ward.store(*letters)
    why = ("--why", "a load test", "--by", "ada")
    said = ward.output("discard", letters[0].key, *why, "--yes")
    assert said.endswith(f"\n1 letter of topic {ward.letters} discarded.\n")
    with pytest.raises(ConfigurationError, match=f"{letters[0].key} is already discarded by ada"):
        ward.output("discard", letters[0].key, *why)
    odd = ("discard", "--all", "--containing", "ODD", *why)
    assert ward.output(*odd) == (
        f"2 letters of topic {ward.letters} to discard\n"
        f"2 of {ward.orders}-0 (record): odd\n"
        "Nothing was discarded: add --yes to discard them.\n"
    )
    assert ward.listed()["open"] == 3, "a plan changes nothing"
    assert "2 letters of" in ward.output(*odd, "--yes")
    left = ward.listed("--state", "all")
    assert (left["open"], left["discarded"]) == (1, 3)
    assert {one["key"]: one["why"] for one in left["letters"]} == {
        **{letter.key: "a load test" for letter in letters},
        letters[2].key: "",
    }
    (record,) = ward.instance.fetch_observations(GroupAssets.of(ward.orders).group, limit=1).records
    assert record.asset_observation is not None
    shown = record.asset_observation
    assert shown.description == f"ada discarded 2 dead letters of {ward.orders}-0: a load test"
    assert shown.metadata["keys"].value == [letters[1].key, letters[3].key]
    ward.store(letters[1])
    assert ward.listed()["open"] == 2, "a letter that is stored again is open"


def test_discard_with_wrong_arguments_is_refused(ward: Ward) -> None:
    for problem, *arguments in (
        ("name either the keys of letters, or --all", "--why", "x"),
        ("name either the keys of letters, or --all", "orders-0-1", "--all", "--why", "x"),
        ("give a reason", "orders-0-1", "--why", " "),
        ("a reason may have at most", "orders-0-1", "--why", "x" * 2000),
        ("has no letter orders-0-1", "orders-0-1", "--why", "x"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            ward.output("discard", *arguments)


def test_discard_that_dagster_does_not_record_is_reported_as_done(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        msg = "disk full"
        raise OSError(msg)

    monkeypatch.setattr(Catalogue, "record_discarded", away)
    bad = ward.letter(1)
    ward.store(bad)
    with pytest.raises(DagsterRebalanceError, match=r"1 letter .* did not record it: disk full"):
        ward.output("discard", bad.key, "--why", "x", "--yes")
    assert ward.listed()["open"] == 0


def test_list_names_selectors_without_letters(ward: Ward) -> None:
    ward.store(ward.letter(1))
    found = ward.output("list", f"{ward.orders}:0", f"{ward.orders}:7", "--since", "1969-01-01")
    assert f"{ward.orders}-0-1" in found
    assert found.endswith(
        f"the topic has no letter of {ward.orders}:7 stored since 1969-01-01, in any state\n"
    )
    with pytest.raises(ConfigurationError, match="'orders:1@3' cannot name partitions"):
        ward.output("list", "orders:1@3")


def test_long_text_is_cut_by_the_bytes_that_are_counted() -> None:
    assert shown_payload("ä".encode() * 2_500) == "ä" * 2_000 + " ... and 1000 more bytes"
    assert shown_payload(b"a" + "ä".encode() * 2_000) == (
        "a" + "ä" * 1_999 + " ... and 2 more bytes"
    )
    assert shown_payload(b"\xff" * 4_001) == ("ff " * 4_000)[:-1] + " ... and 1 more bytes"
