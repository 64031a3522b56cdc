"""The schema registry: its requests, and the errors for its failures."""

from __future__ import annotations

import base64
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance import ConfigurationError, SchemaRegistryResource, UndecodableError
from dagster_rebalance.core.model.errors import BrokerError
from dagster_rebalance.kafka.schema_registry import Registry
from dagster_rebalance.testing.local.host import free_port
from tests.decoding.http_registry import PASSWORD, TOKEN, USER, HttpRegistry
from tests.decoding.records import ORDER, avro, proto_file, proto_message

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK = {"max.retries": "1", "retries.wait.ms": "1", "retries.max.wait.ms": "2"}


def asked(registry: HttpRegistry, **settings: Any) -> Registry:  # noqa: ANN401 - of a resource
    return SchemaRegistryResource(url=registry.url, client_config=QUICK, **settings).registry()


def test_each_schema_is_fetched_once(registry: HttpRegistry) -> None:
    registry.register("money", {"type": "record", "name": "Money", "fields": []})
    ids = [
        registry.register(
            subject,
            {"type": "record", "name": "O", "doc": subject, "fields": []},
            references=[("Money", "money", 1)],
        )
        for subject in ("a-value", "b-value")
    ]
    now = [0.0]
    client = Registry({"url": registry.url}, clock=lambda: now[0])
    for _ in range(3):
        for schema_id in ids:
            assert client.by_id("AVRO", schema_id).references[0][0] == "Money"
        client.of_subject("AVRO", "a-value", None)
        with pytest.raises(UndecodableError, match="no schema with the id 99"):
            client.by_id("AVRO", 99)
    assert len(registry.requests) == len(set(registry.requests)) == 5
    now[0] = 31.0
    with pytest.raises(UndecodableError):
        client.by_id("AVRO", 99)
    assert len(registry.requests) == 6


def test_id_is_looked_up_in_the_context_of_its_subject(registry: HttpRegistry) -> None:
    """Each context counts its ids from 1."""
    of_default, of_eu = (
        {"type": "record", "name": "O", "fields": [{"name": "x", "type": kind}]}
        for kind in ("long", "string")
    )
    assert registry.register("orders-value", of_default) == 1
    assert registry.register(":.eu:orders-value", of_eu) == 1
    resource = SchemaRegistryResource(url=registry.url)
    topics = frozenset({"orders"})
    default, eu = (
        encoding.decoder("value", topics)
        for encoding in (resource.avro(), resource.avro(subject=":.eu:orders-value"))
    )
    for _ in range(2):
        assert eu.open().try_decode(avro(1, of_eu, {"x": "7"})) == ({"x": "7"}, None)
        assert default.open().try_decode(avro(1, of_default, {"x": 7})) == ({"x": 7}, None)
    registry.register("orders-value", {**of_default, "doc": "of the default context alone"})
    with pytest.raises(UndecodableError, match="no schema with the id 2"):
        eu.writer(2)
    assert "alone" in default.writer(2).text


def test_ids_of_several_topics_are_looked_up_without_subject(registry: HttpRegistry) -> None:
    schema_id = registry.register("orders-value", ORDER)
    encoding = SchemaRegistryResource(url=registry.url).avro(reader=json.dumps(ORDER))
    encoding.decoder("value", frozenset({"orders", "refunds"})).writer(schema_id)
    encoding.decoder("value", frozenset({"orders"})).writer(schema_id)
    by_id = [path.partition("?")[2] for path in registry.requests if "/ids/" in path]
    assert by_id == ["", "subject=orders-value"]


def test_query_in_another_format_leaves_the_cache_valid(registry: HttpRegistry) -> None:
    message = proto_message("Order", id="int64")
    file = proto_file("shop", [message])
    schema_id = registry.register(
        "orders-value",
        'syntax = "proto3"; message Order { int64 id = 1; }',
        "PROTOBUF",
        serialized=base64.b64encode(file.SerializeToString()).decode(),
    )
    client = asked(registry)
    for _ in range(2):
        with pytest.raises(UndecodableError, match="is of PROTOBUF, and AVRO is expected"):
            client.by_id("AVRO", schema_id)
        with pytest.raises(ConfigurationError, match="of PROTOBUF, and JSON is expected"):
            client.of_subject("JSON", "orders-value", None)
        with pytest.raises(ConfigurationError, match="of PROTOBUF, and AVRO is expected"):
            client.of_subject("AVRO", "orders-value", 1)
    for _ in range(2):
        found = client.by_id("PROTOBUF", schema_id)
        assert client.of_subject("PROTOBUF", "orders-value", None) == found
        assert client.of_subject("PROTOBUF", "orders-value", 1) == found
    with pytest.raises(UndecodableError, match="is of PROTOBUF, and AVRO is expected"):
        client.by_id("AVRO", schema_id)
    assert len(registry.requests) == len(set(registry.requests))


HTML = "<html>secret-of-a-proxy</html>"


@pytest.mark.parametrize(
    ("answer", "words", "is_retriable"),
    [
        ((401, "application/json", '{"error_code": 401, "message": "no"}'), "the login", False),
        ((403, "text/html", HTML), r"the right to read \(HTTP 403\)", False),
        ((429, "application/json", '{"error_code": 429, "message": "slower"}'), "slower", True),
        ((503, "text/html", HTML), "HTTP 503", True),
        ((404, "text/html", HTML), "is the url that of a schema registry", False),
        ((200, "text/html", HTML), "does not answer as a schema registry does", False),
        ((200, "application/json", "{}"), "does not answer as a schema registry does", False),
    ],
)  # fmt: skip
def test_registry_failure_is_a_broker_error(
    *, registry: HttpRegistry, answer: tuple[int, str, str], words: str, is_retriable: bool
) -> None:
    """The records of an outage would otherwise become dead letters."""
    schema_id = registry.register("orders-value", ORDER)
    registry.answer = answer
    client = asked(registry)
    asks: tuple[Callable[[], object], ...] = (
        lambda: client.by_id("AVRO", schema_id),
        lambda: client.of_subject("AVRO", "orders-value", None),
    )
    for ask in asks:
        with pytest.raises(BrokerError, match=words) as caught:
            ask()
        assert caught.value.retriable is is_retriable
        assert "secret-of-a-proxy" not in str(caught.value)
    registry.answer = None
    assert client.by_id("AVRO", schema_id).text


def test_unreachable_registry_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    client = SchemaRegistryResource(url=url, client_config=QUICK).registry()
    with pytest.raises(
        BrokerError, match=f"at {url.removeprefix('http://')}.*ConnectError"
    ) as caught:
        client.by_id("AVRO", 1)
    assert caught.value.retriable


def test_slow_answer_times_out(registry: HttpRegistry) -> None:
    """The client's own limit restarts with each byte."""
    schema_id = registry.register("orders-value", ORDER)
    registry.is_free.clear()
    client = Registry({"url": registry.url}, limit_s=0.05)
    with pytest.raises(BrokerError, match=r"no whole answer came within 0\.05 s") as caught:
        client.by_id("AVRO", schema_id)
    assert caught.value.retriable
    registry.is_free.set()
    assert Registry({"url": registry.url}).by_id("AVRO", schema_id).text


@pytest.mark.parametrize(
    ("login", "settings"),
    [("password", {"username": USER, "password": PASSWORD}), ("token", {"token": TOKEN})],
)
def test_login_is_used_and_never_shown(
    registry: HttpRegistry, login: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    schema_id = registry.register("orders-value", ORDER)
    registry.login = login
    resource = SchemaRegistryResource(url=registry.url, client_config=QUICK, **settings)
    assert resource.registry().by_id("AVRO", schema_id).text
    with pytest.raises(BrokerError, match="refuses the login") as caught:
        asked(registry).by_id("AVRO", schema_id)
    wrong = asked(registry, username="etl", password="wrong-password")  # noqa: S106 - of the test
    with pytest.raises(BrokerError, match="refuses the login") as caught_too:
        wrong.by_id("AVRO", schema_id)
    shown = f"{resource!r} {resource} {caught.value} {caught_too.value} {caplog.text}"
    for secret in (PASSWORD, TOKEN, "wrong-password"):
        assert secret not in shown


def test_unsupported_schema_is_refused(registry: HttpRegistry) -> None:
    """A record may name any id, so its schema is the record's fault; a subject is a setting."""
    other = registry.register("orders-value", '{"type": "object"}', "JSON")
    rules = {"domainRules": [{"name": "r", "kind": "TRANSFORM", "mode": "READ", "type": "ENCRYPT"}]}
    encrypted = registry.register("cards-value", ORDER, ruleSet=rules)
    client = asked(registry)
    with pytest.raises(UndecodableError, match="is of JSON, and AVRO is expected"):
        client.by_id("AVRO", other)
    with pytest.raises(ConfigurationError, match="has a schema of JSON, and AVRO"):
        client.of_subject("AVRO", "orders-value", None)
    with pytest.raises(UndecodableError, match="has rules"):
        client.by_id("AVRO", encrypted)
    with pytest.raises(ConfigurationError, match="has rules"):
        client.of_subject("AVRO", "cards-value", None)
    broken = registry.register("a-value", ORDER, references=[("Money", "money", 1)])
    with pytest.raises(UndecodableError, match="no version 1 of subject money"):
        client.by_id("AVRO", broken)
    with pytest.raises(ConfigurationError, match="has no subject nothing: name the subject"):
        client.of_subject("AVRO", "nothing", None)
    with pytest.raises(ConfigurationError, match="no version 9 of subject orders-value"):
        client.of_subject("AVRO", "orders-value", 9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "https://user:pass@registry"}, "url contains a login"),
        ({"username": "etl"}, "is missing: give both"),
        ({"username": "e:tl", "password": "p"}, "colon"),
        ({"username": "etl", "password": "p", "token": "t"}, "a token and a username"),
        ({"client_config": {"basic.auth.user.info": "u:p"}}, "has its own field: username"),
        ({"client_config": {"no.such": "x"}}, "Unrecognized properties: no.such"),
        ({"client_config": {"timeout": "soon"}}, "are invalid: ValueError"),
        ({"ssl_ca_location": "/no/such/file"}, "are invalid: FileNotFoundError"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        SchemaRegistryResource(**{"url": "https://registry", **settings}).registry().by_id(
            "AVRO", 1
        )
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize(
    "login",
    [
        {"username": "etl", "password": "p"},
        {"token": "t"},
        {"ssl_ca_location": "ca.pem"},
        {"client_config": {"bearer.auth.token": "t"}},
    ],
)
def test_login_without_tls_is_refused_for_other_machines(login: dict[str, Any]) -> None:
    for url in ("http://registry:8081", "https://a, HTTP://registry", "http://127.0.0.1.evil.com"):
        with pytest.raises(ConfigurationError, match=r"unencrypted.*https://.*allow_plaintext"):
            SchemaRegistryResource(url=url, **login).registry()
        SchemaRegistryResource(url=url, allow_plaintext=True, **login).registry()
        SchemaRegistryResource(url=url).registry()
    for url in ("https://registry", "http://localhost:8081", "http://127.0.0.1", "http://[::1]:1"):
        SchemaRegistryResource(url=url, **login).registry()


def test_missing_packages_name_the_extra(
    registry: HttpRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "confluent_kafka.schema_registry", None)
    ask: Callable[[], object] = lambda: asked(registry).by_id("AVRO", 1)  # noqa: E731 - typed
    with pytest.raises(ConfigurationError, match=r"dagster-rebalance\[registry\]"):
        ask()
