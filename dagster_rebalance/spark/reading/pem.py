"""Certificates and keys in PEM files, as the Java Kafka client wants them: as text, keys as PKCS#8.

Owns reading them and saying what is wrong with them. Never puts the contents of a key into a
message.
"""

from __future__ import annotations

from pathlib import Path

from dagster_rebalance.core.model.errors import ConfigurationError


def text(setting: str, location: str) -> str:
    """The text of the file that a setting names.

    Raises:
        ConfigurationError: It is not a file that can be read.
    """
    try:
        return Path(location).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        msg = (
            f"`{setting}` names {location}, which cannot be read as a PEM file ({reason}): name "
            "one file in PEM format."
        )
        raise ConfigurationError(msg) from error


def certificates(setting: str, location: str) -> str:
    """The certificates in the file that a setting names.

    Raises:
        ConfigurationError: There are none in it.
    """
    found = text(setting, location)
    if "-----BEGIN CERTIFICATE-----" not in found:
        msg = (
            f"`{setting}` names {location}, which holds no certificate in PEM format: convert it "
            "with `openssl x509 -outform PEM`."
        )
        raise ConfigurationError(msg)
    return found


def private_key(found: str) -> str:
    """A private key, checked to be in the only form that Java reads.

    Raises:
        ConfigurationError: It is not PKCS#8.
    """
    if "-----BEGIN PRIVATE KEY-----" in found or "-----BEGIN ENCRYPTED PRIVATE KEY-----" in found:
        return found
    msg = (
        "the private key for Kafka is not in PKCS#8 form, the only one that Spark's Kafka "
        "connector reads: "
        "convert it with `openssl pkcs8 -topk8 -in key.pem -out key.pkcs8.pem`."
    )
    raise ConfigurationError(msg)
