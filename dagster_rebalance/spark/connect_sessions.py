"""Spark Connect sessions with the id of their run, which any process can end.

A Connect server continues to work for minutes after its client was killed. Interrupting a session
stops its work, and releasing it leaves a tombstone: the server then refuses a client that is still
alive. Interrupting an unknown session creates it first, which also locks out a run that has not
connected yet (Spark 4.0). Requests go directly to the server within a time limit: pyspark's client
would retry for minutes, and a `SparkSession` would become the default session of the process.
"""

from __future__ import annotations

import re
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.spark.spark_jobs import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.connect.proto.base_pb2_grpc import SparkConnectServiceStub

USER_ID = "dagster"
TIMEOUT_S = 10.0
_STILL_ENDING = "is not within statuses"
_ADDRESS = re.compile(r"sc://[A-Za-z0-9._-]+(:\d+)?")
_NAMESPACE = uuid.UUID("6f0c1ee5-5f2c-4f0e-9a51-2a8d7a1d3b0e")


def connect_session_id(run_id: str) -> str:
    """Return the Connect session id of a run: its id, or a UUID derived from another kind of id."""
    try:
        return str(uuid.UUID(run_id))
    except ValueError:
        return str(uuid.uuid5(_NAMESPACE, run_id))


def remote_with_session(remote: str, session_id: str) -> str:
    """Return the URL of a Connect server with a session id and a user id added.

    A `user_id` in the URL takes precedence. A session belongs to one user: others cannot find it.
    """
    address, _, text = remote.partition(";")
    address = address.rstrip("/")
    if _ADDRESS.fullmatch(address) is None:
        # The URL is not shown, because it may have a token in the wrong place.
        msg = (
            "`remote` is not the URL of a Spark Connect server: write it as sc://host:port, then "
            "any parameters as /;key=value."
        )
        raise ConfigurationError(msg)
    parameters = [parameter for parameter in text.split(";") if parameter]
    keys = {parameter.partition("=")[0] for parameter in parameters}
    if "session_id" in keys:
        msg = (
            f"the URL of the Spark Connect server {address} has a session_id: remove it. Each run "
            "has a separate session."
        )
        raise ConfigurationError(msg)
    parameters += [] if "user_id" in keys else [f"user_id={USER_ID}"]
    return f"{address}/;{';'.join([*parameters, f'session_id={session_id}'])}"


def connects_in_the_clear(session: SparkSession) -> bool:
    """Whether this is a Connect session to another machine without TLS."""
    if not is_connect(session):
        return False
    connected: Any = session  # the two kinds share a parent in pyspark's code, but not in its types
    builder = connected.client._builder  # noqa: SLF001 - no public way to ask how a session is connected
    host = str(getattr(builder, "host", ""))
    return (
        not builder.secure and host != "localhost" and re.fullmatch(r"127(\.\d+){3}", host) is None
    )


def check_reachable(remote: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Raise ConfigurationError unless a Connect server answers within the time."""
    import grpc  # type: ignore[import-untyped]

    with _service(remote, str(uuid.uuid4())) as (builder, _):
        channel = builder.toChannel()
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError as error:
            msg = (
                f"no Spark Connect server answered at {_address(remote)} within {timeout_s:g} s: "
                "start it, or correct `remote`. A server with TLS needs the parameter "
                "`use_ssl=true`."
            )
            raise ConfigurationError(msg) from error
        finally:
            channel.close()


def stop_session(remote: str, session_id: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """End a session from any process: its work stops, and no client can submit more in it.

    A session that does not exist, or was ended before, is not an error. A write that already moves
    its finished files, or commits to a table, may still end after its range was processed again.
    `write_parquet_by_range`, `write_delta` and `write_iceberg` tolerate such a late write; any
    other output must tolerate it, too.

    Raises:
        ConfigurationError: The server did not answer, so the work may still run.
    """
    import grpc
    from pyspark.sql.connect.proto import base_pb2 as pb

    with _service(remote, session_id) as (builder, service), _explained_errors(remote, session_id):
        owner = pb.UserContext(user_id=builder.userId or USER_ID)
        interrupt = pb.InterruptRequest(
            session_id=session_id,
            user_context=owner,
            interrupt_type=pb.InterruptRequest.INTERRUPT_TYPE_ALL,
        )
        release = pb.ReleaseSessionRequest(session_id=session_id, user_context=owner)

        def interrupt_and_release() -> None:
            service.Interrupt(interrupt, timeout=timeout_s, metadata=builder.metadata())
            service.ReleaseSession(release, timeout=timeout_s, metadata=builder.metadata())

        try:
            interrupt_and_release()
        except grpc.RpcError as error:
            # Spark 4.0 closes the session to clients first, and then fails on an operation that is
            # still ending. If it is closed, a second interrupt answers SESSION_CLOSED.
            if _STILL_ENDING not in (error.details() or ""):
                raise
            interrupt_and_release()


def interrupt_tag(remote: str, session_id: str, tag: str) -> None:
    """Stop the work with a tag in a session, and leave the session open."""
    from pyspark.sql.connect.proto import base_pb2 as pb

    with _service(remote, session_id) as (builder, service), _explained_errors(remote, session_id):
        interrupt = pb.InterruptRequest(
            session_id=session_id,
            user_context=pb.UserContext(user_id=builder.userId or USER_ID),
            interrupt_type=pb.InterruptRequest.INTERRUPT_TYPE_TAG,
            operation_tag=tag,
        )
        service.Interrupt(interrupt, timeout=TIMEOUT_S, metadata=builder.metadata())


@contextmanager
def _service(
    remote: str, session_id: str
) -> Iterator[tuple[DefaultChannelBuilder, SparkConnectServiceStub]]:
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.connect.proto.base_pb2_grpc import SparkConnectServiceStub

    builder = DefaultChannelBuilder(remote_with_session(remote, session_id))
    channel = builder.toChannel()
    try:
        yield builder, SparkConnectServiceStub(channel)  # type: ignore[no-untyped-call]
    finally:
        channel.close()


@contextmanager
def _explained_errors(remote: str, session_id: str) -> Iterator[None]:
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        details = error.details() or ""
        if "SESSION_CLOSED" in details:
            return
        msg = (
            f"the Spark Connect server at {_address(remote)} did not end session {session_id} "
            f"({error.code().name}: {details[:200]}): its Spark work may still run. Try again when "
            "the server answers, or restart the server."
        )
        raise ConfigurationError(msg) from error


def _address(remote: str) -> str:
    """Return a URL without its parameters, which may include a token."""
    return remote.partition(";")[0].rstrip("/")
