"""URLs and ids of Connect sessions."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.connect.client import DefaultChannelBuilder
from pyspark.sql.connect.session import SparkSession as ConnectSession

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.spark.connect_sessions import (
    check_reachable,
    connect_session_id,
    connects_in_the_clear,
    remote_with_session,
    stop_session,
)
from dagster_rebalance.spark.ranges import read_ranges
from dagster_rebalance.testing.local.host import free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ID = "00112233-4455-6677-8899-aabbccddeeff"


def test_session_id_is_the_run_id() -> None:
    assert connect_session_id(ID) == ID


def test_session_id_is_derived_from_a_run_id_that_is_no_uuid() -> None:
    assert connect_session_id("run-1") == connect_session_id("run-1") != connect_session_id("run-2")
    assert str(uuid.UUID(connect_session_id("run-1"))) == connect_session_id("run-1")


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("sc://h", f"sc://h/;user_id=dagster;session_id={ID}"),
        ("sc://h:15002", f"sc://h:15002/;user_id=dagster;session_id={ID}"),
        ("sc://h:15002/", f"sc://h:15002/;user_id=dagster;session_id={ID}"),
        (
            "sc://h:1/;use_ssl=true;token=a%3Db",
            f"sc://h:1/;use_ssl=true;token=a%3Db;user_id=dagster;session_id={ID}",
        ),
        ("sc://h:1/;user_id=eve", f"sc://h:1/;user_id=eve;session_id={ID}"),
    ],
)
def test_url_keeps_its_parameters(remote: str, url: str) -> None:
    assert remote_with_session(remote, ID) == url


@pytest.mark.parametrize(
    "remote",
    [
        "http://h:1",
        "sc://",
        "sc://h:1/path",
        "local[*]",
        "sc://h:1/token=hidden",
        "sc://me:hidden@h:1",
        "hidden",
        "sc://h:hidden",
    ],
)
def test_invalid_connect_url_is_refused_without_showing_it(remote: str) -> None:
    with pytest.raises(ConfigurationError, match="sc://host:port") as refused:
        remote_with_session(remote, ID)
    assert "hidden" not in str(refused.value)


def test_session_id_in_the_url_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="session_id"):
        remote_with_session(f"sc://h/;session_id={ID}", ID)


def test_unreachable_server_is_reported_without_its_token() -> None:
    remote = f"sc://127.0.0.1:{free_port()}/;token=hidden"
    with pytest.raises(ConfigurationError, match=r"sc://127\.0\.0\.1") as unreachable:
        check_reachable(remote, timeout_s=0.2)
    with pytest.raises(ConfigurationError, match=r"sc://127\.0\.0\.1") as not_stopped:
        stop_session(remote, ID, timeout_s=0.2)
    assert "hidden" not in f"{unreachable.value}{not_stopped.value}"


@pytest.mark.parametrize(
    ("remote", "in_the_clear"),
    [
        ("sc://spark:15002", True),
        ("sc://10.0.0.7:15002/;user_id=etl", True),
        ("sc://127evil.example.com", True),
        ("sc://localhost:15002", False),
        ("sc://127.0.0.1:15002", False),
        ("sc://spark:15002/;use_ssl=true", False),
        ("sc://spark:15002/;token=hidden", False),
    ],
)
def test_session_to_another_machine_without_tls_is_in_the_clear(
    *, remote: str, in_the_clear: bool
) -> None:
    session = connected_to(remote)
    assert connects_in_the_clear(session) == in_the_clear


def test_login_is_not_sent_in_the_clear() -> None:
    config = {
        "bootstrap.servers": "kafka:9092",
        "security.protocol": "SASL_SSL",
        "kafka.sasl.jaas.config": "hidden",
    }
    with pytest.raises(ConfigurationError, match=r"use_ssl=true.*allow_plaintext") as refused:
        read_ranges(connected_to("sc://spark:15002"), [OffsetRange("orders", 0, 0, 5)], config)
    assert "hidden" not in str(refused.value)


def connected_to(remote: str) -> SparkSession:
    """Return a Connect session that has sent nothing."""
    session = ConnectSession.__new__(ConnectSession)
    session._client = SimpleNamespace(_builder=DefaultChannelBuilder(remote))  # type: ignore[assignment]
    return session  # type: ignore[return-value]
