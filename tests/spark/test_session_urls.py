"""How a run's Connect session is named."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.connect.client import DefaultChannelBuilder
from pyspark.sql.connect.session import SparkSession as ConnectSession

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange
from dagster_rebalance.spark.reading.ranges import read_ranges
from dagster_rebalance.spark.session.connect_sessions import (
    check_reachable,
    connect_session_id,
    connects_in_the_clear,
    remote_with_session,
    stop_session,
)
from dagster_rebalance.testing.local.host import free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ID = "00112233-4455-6677-8899-aabbccddeeff"


def test_the_session_of_a_run_has_the_runs_id() -> None:
    """Who knows the run can end its Spark work, with nothing else written down."""
    assert connect_session_id(ID) == ID


def test_a_run_id_that_is_no_uuid_still_gives_one_session() -> None:
    """Spark accepts UUIDs only; the same run must always get the same one."""
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
def test_the_url_keeps_its_parameters(remote: str, url: str) -> None:
    """A lost token or user would reach another session, or none."""
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
def test_what_is_no_connect_url_is_refused(remote: str) -> None:
    """The client of pyspark would try to reach it for minutes.

    It is not shown: a token in the wrong place is still one.
    """
    with pytest.raises(ConfigurationError, match="sc://host:port") as refused:
        remote_with_session(remote, ID)
    assert "hidden" not in str(refused.value)


def test_a_session_id_in_the_configuration_is_refused() -> None:
    """All runs would share the session: stopping one would stop all."""
    with pytest.raises(ConfigurationError, match="session_id"):
        remote_with_session(f"sc://h/;session_id={ID}", ID)


def test_a_server_that_does_not_answer_is_said_soon_and_without_its_token() -> None:
    """The client of pyspark would retry for minutes; a token does not belong into an error."""
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
def test_a_session_to_another_machine_without_tls_is_in_the_clear(
    *, remote: str, in_the_clear: bool
) -> None:
    """As pyspark itself decides whether to use TLS."""
    session = connected_to(remote)
    assert connects_in_the_clear(session) == in_the_clear


def test_no_login_is_sent_in_the_clear() -> None:
    """It is refused before anything is sent; who has something else that encrypts says so."""
    config = {
        "bootstrap.servers": "kafka:9092",
        "security.protocol": "SASL_SSL",
        "kafka.sasl.jaas.config": "hidden",
    }
    with pytest.raises(ConfigurationError, match=r"use_ssl=true.*allow_plaintext") as refused:
        read_ranges(connected_to("sc://spark:15002"), [OffsetRange("orders", 0, 0, 5)], config)
    assert "hidden" not in str(refused.value)


def connected_to(remote: str) -> SparkSession:
    """A Connect session that has sent nothing, with pyspark's own idea of how it is connected."""
    session = ConnectSession.__new__(ConnectSession)
    session._client = SimpleNamespace(_builder=DefaultChannelBuilder(remote))  # type: ignore[assignment]
    return session  # type: ignore[return-value]
