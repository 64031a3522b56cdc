"""Tokens of a user's function: its errors are told, and an issuer may be away for a moment."""

from __future__ import annotations

import re

import pytest

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.kafka.client.confluent import create_client
from dagster_rebalance.kafka.client.oauth import Token, Tokens
from dagster_rebalance.kafka.client.settings import validated

NOW = 1_000_000.0
SECRET = "the-token-itself"  # noqa: S105 - what must not be shown


class Issuer:
    """Gives tokens that are valid for 100 s, and can be away."""

    def __init__(self) -> None:
        self.now = NOW
        self.asked = 0
        self.is_away = False

    def __call__(self, config: str) -> Token:
        """Give one, or be away."""
        self.asked += 1
        if self.is_away:
            msg = f"no answer for {config}"
            raise TimeoutError(msg)
        return f"token {self.asked}", self.now + 100, "etl"


@pytest.fixture
def issuer() -> Issuer:
    """It has given nothing yet."""
    return Issuer()


@pytest.fixture
def tokens(issuer: Issuer) -> Tokens:
    """By the issuer's clock."""
    return Tokens(issuer, lambda: issuer.now)


def test_a_token_serves_all_clients_for_half_of_its_life(issuer: Issuer, tokens: Tokens) -> None:
    """A consumer has three clients; each asks by itself."""
    assert tokens("x") == tokens("x") == ("token 1", NOW + 100, "etl")
    issuer.now += 50
    assert tokens("x")[0] == "token 2"


def test_an_issuer_that_is_away_costs_nothing_while_the_last_token_is_valid(
    issuer: Issuer, tokens: Tokens
) -> None:
    """The client asks when a fifth of its life is left, and again and again."""
    tokens("x")
    issuer.is_away = True
    issuer.now += 99
    assert tokens("x")[0] == "token 1"
    issuer.now += 1
    with pytest.raises(
        BrokerError, match=r"'oauth_cb' raised TimeoutError: no answer for x; cannot"
    ):
        tokens("x")
    issuer.is_away = False
    assert tokens("x")[0] == "token 4"


def test_what_the_client_takes_beside_a_token_is_taken() -> None:
    """The name of the principal and extensions, as confluent-kafka has them."""
    for rest in ((), ("etl",), ("etl", {}), ("etl", {"traceId": "1 2"})):
        given = ("token", NOW + 9, *rest)
        assert Tokens(lambda _, given=given: given, lambda: NOW)("") == given


@pytest.mark.parametrize(
    "nonsense", [None, ("token 2", NOW - 1), ("token 2", NOW + 9, "p", {"a": 1})]
)
def test_nonsense_is_a_failure_that_the_last_token_outlives(nonsense: Token) -> None:
    """The client would ask no more, without a word."""
    given, now = [("token 1", NOW + 100), nonsense, ("token 3", NOW + 200)], [NOW]
    tokens = Tokens(lambda _: given.pop(0), lambda: now[0])
    tokens("")
    now[0] += 60
    assert tokens("")[0] == "token 1"
    assert tokens("")[0] == "token 3"


def test_a_client_is_not_made_without_a_token(issuer: Issuer, tokens: Tokens) -> None:
    """It would wait for ten seconds, and then say only that it has none. Waiting may help."""
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
def test_what_is_no_token_is_told_and_not_shown(given: Token, says: str) -> None:
    """With milliseconds the client would never ask again, and lose its connections one day."""
    with pytest.raises(ConfigurationError, match=re.escape(says)) as problem:
        Tokens(lambda _: given, lambda: NOW)("")
    assert SECRET not in str(problem.value)


def test_all_clients_of_a_configuration_share_their_tokens(issuer: Issuer) -> None:
    """Validated once more, as for its reader, it still does."""
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
