"""Tokens for AWS MSK, created locally by AWS's signer."""

from __future__ import annotations

import base64
import sys
import time

import pytest

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError
from dagster_rebalance.kafka.client.msk_iam import token
from dagster_rebalance.kafka.client.oauth import Tokens


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "swordfish")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


def signed(text: str) -> str:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()


def test_token_is_signed_for_the_region_and_expires_within_an_hour() -> None:
    text, expires_at = Tokens(token)("region=eu-west-1")
    assert "kafka.eu-west-1.amazonaws.com" in signed(text)
    assert "AKIDEXAMPLE" in signed(text)
    assert "swordfish" not in signed(text)
    assert time.time() < expires_at < time.time() + 3600


def test_token_takes_the_region_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-2")
    assert "kafka.us-east-2.amazonaws.com" in signed(token("")[0])


@pytest.mark.parametrize("config", ["", "region=", "eu-west-1"])
def test_token_without_a_region_names_the_setting(config: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'sasl\.oauthbearer\.config' to 'region='"):
        token(config)
    with pytest.raises(BrokerError, match="region=eu-west-1"):
        Tokens(token)(config)


def test_token_without_the_signer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'dagster-rebalance\[msk\]'"):
        token("region=eu-west-1")
