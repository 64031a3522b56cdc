"""Tokens for AWS MSK, by the IAM identity of the process (extra `msk`).

Owns what AWS's signer and the Kafka client call the same things. It signs a token by itself, with
what AWS's own chain finds: variables, a profile, the role of a pod or of a machine. Asks nobody but
those.
"""

from __future__ import annotations

import os

from dagster_rebalance.core.model.errors import ConfigurationError

_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def token(config: str) -> tuple[str, float]:
    """A token and when it expires, for `oauth_cb`.

    Args:
        config: The text of `sasl.oauthbearer.config`: `region=eu-west-1`. Without it, AWS_REGION or
            AWS_DEFAULT_REGION says the region.

    Raises:
        ConfigurationError: The signer is missing, or nobody says the region.
    """
    try:
        # An extra, which is imported by whoever uses it.
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider  # noqa: PLC0415
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
    found = next(filter(None, map(os.environ.get, _REGIONS)), None)
    if config.strip() or found is None:
        msg = (
            "the region of MSK is not known: set 'sasl.oauthbearer.config' to 'region=' and its "
            "name, such as region=eu-west-1, or leave it out and set AWS_REGION"
        )
        raise ConfigurationError(msg)
    return found
