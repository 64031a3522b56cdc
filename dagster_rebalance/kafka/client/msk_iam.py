"""Tokens for AWS MSK, from the IAM identity of the process (extra `msk`).

AWS's signer creates the token locally, with the identity that AWS's default chain finds: variables,
a profile, or the role of a pod or machine.
"""

from __future__ import annotations

import os

from dagster_rebalance.core.model.errors import ConfigurationError


def token(config: str) -> tuple[str, float]:
    """Return a token and its expiry, for `oauth_cb`.

    Args:
        config: The text of `sasl.oauthbearer.config`: `region=eu-west-1`. Without it, AWS_REGION or
            AWS_DEFAULT_REGION has the region.

    Raises:
        ConfigurationError: The signer is missing, or the region is not configured.
    """
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider  # noqa: PLC0415 - an extra
    except ImportError as error:
        msg = (
            "tokens for MSK need AWS's signer: install it with `pip install "
            "'dagster-rebalance[msk]'`"
        )
        raise ConfigurationError(msg) from error
    text, expires_at_ms = MSKAuthTokenProvider.generate_auth_token(_region(config))
    return text, expires_at_ms / 1000


def _region(config: str) -> str:
    name, _, value = config.strip().partition("=")
    if name.strip() == "region" and value.strip():
        return value.strip()
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if config.strip() or not region:
        msg = (
            "the region of MSK is not known: set 'sasl.oauthbearer.config' to 'region=' and its "
            "name, such as region=eu-west-1, or leave it out and set AWS_REGION"
        )
        raise ConfigurationError(msg)
    return region
