"""Tokens from a function: its errors, and an issuer that is unavailable for a moment."""

from __future__ import annotations

import re

import pytest

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.kafka.client.confluent import create_client
from dagster_rebalance.kafka.client.oauth import Token, Tokens
from dagster_rebalance.kafka.client.settings import validated

NOW = 1_000_000.0
SECRET = "the-token-itself"  # noqa: S105 - a secret of the test


class Issuer:
    """Gives tokens that are valid for 100 s, and can be away."""

    def __init__(self) -> None:
        self.now = NOW
        self.asked = 0
        self.is_away = False

    def __call__(self, config: str) -> Token:
        self.asked += 1
        if self.is_away:
            msg = f"no answer for {config}"
            raise TimeoutError(msg)
        return f"token {self.asked}", self.now + 100, "etl"


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def tokens(issuer: Issuer) -> Tokens:
    return Tokens(issuer, lambda: issuer.now)


def test_tokens_share_a_token_for_half_of_its_life(issuer: Issuer, tokens: Tokens) -> None:
    assert tokens("x") == tokens("x") == ("token 1", NOW + 100, "etl")
    issuer.now += 50
    assert tokens("x")[0] == "token 2"


def test_tokens_return_the_last_token_while_the_issuer_is_unavailable(
    issuer: Issuer, tokens: Tokens
) -> None:
    tokens("x")
    issuer.is_away = True
    issuer.now += 99
    assert tokens("x")[0] == "token 1"
    issuer.now += 1
    with pytest.raises(
        BrokerError, match=r"'oauth_cb' raised TimeoutError: no answer for x; check"
    ):
        tokens("x")
    issuer.is_away = False
    assert tokens("x")[0] == "token 4"


def test_tokens_accept_a_principal_and_extensions() -> None:
    for rest in ((), ("etl",), ("etl", {}), ("etl", {"traceId": "1 2"})):
        given = ("token", NOW + 9, *rest)
        assert Tokens(lambda _, given=given: given, lambda: NOW)("") == given


@pytest.mark.parametrize(
    "nonsense", [None, ("token 2", NOW - 1), ("token 2", NOW + 9, "p", {"a": 1})]
)
def test_tokens_return_the_last_token_instead_of_an_invalid_one(nonsense: Token) -> None:
    given, now = [("token 1", NOW + 100), nonsense, ("token 3", NOW + 200)], [NOW]
    tokens = Tokens(lambda _: given.pop(0), lambda: now[0])
    tokens("")
    now[0] += 60
    assert tokens("")[0] == "token 1"
    assert tokens("")[0] == "token 3"


def test_create_client_without_a_token_raises_a_retriable_error(
    issuer: Issuer, tokens: Tokens
) -> None:
    """The client would wait for ten seconds, and then report only that it has no token."""
    issuer.is_away = True
    with pytest.raises(BrokerError, match="no answer for scope=x") as problem:
        create_client(dict, {"oauth_cb": tokens, "sasl.oauthbearer.config": "scope=x"})
    assert problem.value.retriable


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (SECRET, "must return a token and when it expires"),
        (None, "must return a token"),
        ((SECRET,), "must return a token"),
        ((SECRET, "soon"), "must return a token"),
        ((SECRET, NOW - 5), "expired 5 s ago"),
        ((SECRET, NOW * 1000), "not in milliseconds"),
        ((SECRET, float("nan")), "must return a token and when it expires"),
        (("", NOW + 9), "must return a token"),
        ((f"{SECRET}\n", NOW + 9), "must return a token"),
        ((SECRET, NOW + 9, 5), "only the name of the principal"),
        ((SECRET, NOW + 9, "etl", {"a": 1}), "only the name of the principal"),
        ((SECRET, NOW + 9, "etl", {"auth": "x"}), "only the name of the principal"),
        ((SECRET, NOW + 9, "etl", {"a b": "x"}), "only the name of the principal"),
        ((SECRET, NOW + 9, "etl", {}, "more"), "only the name of the principal"),
    ],
)
def test_tokens_report_an_invalid_token_without_showing_it(given: Token, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)) as problem:
        Tokens(lambda _: given, lambda: NOW)("")
    assert SECRET not in str(problem.value)


def test_settings_share_the_tokens_of_one_configuration(issuer: Issuer) -> None:
    config = {
        "bootstrap.servers": "kafka:9092",
        "group.id": "etl",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": issuer,
    }
    settings = validated(config, hold_limit_s=10)
    again = validated(settings.user, hold_limit_s=10)
    assert isinstance(settings.member()["oauth_cb"], Tokens)
    assert again.connection()["oauth_cb"] is settings.member()["oauth_cb"]
