"""Spark Connect sessions that can be found again by the id of the run that made them.

A Connect server goes on working for minutes after its client was killed. Since a run's session
carries the run's id, any process can end it: interrupting stops what it works on, and releasing
leaves a tombstone, so that a client that still lives is refused from then on. Interrupting a
session that the server does not know creates it first; so even a run that has not connected yet is
kept out (Spark 4.0).

Speaks to the server directly and within a time limit: pyspark's own client retries an unreachable
server for minutes. Never opens a `SparkSession`, which would become the default session of the
process.
"""

from __future__ import annotations

import re
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.spark.session.jobs import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.connect.proto.base_pb2_grpc import SparkConnectServiceStub

USER_ID = "dagster"
TIMEOUT_S = 10.0
_UNWINDING = "is not within statuses"
_ADDRESS = re.compile(r"sc://[A-Za-z0-9._-]+(:\d+)?")
_NAMESPACE = uuid.UUID("6f0c1ee5-5f2c-4f0e-9a51-2a8d7a1d3b0e")


def connect_session_id(run_id: str) -> str:
    """Return the Connect session id of a run.

    It is the run id, which in Dagster is a UUID, or else a UUID derived from it.
    """
    try:
        return str(uuid.UUID(run_id))
    except ValueError:
        return str(uuid.uuid5(_NAMESPACE, run_id))


def remote_with_session(remote: str, session_id: str) -> str:
    """The URL of a Connect server with a session id and a user id; its other parameters stay.

    Args:
        remote: `sc://host:port`, with or without parameters. A `user_id` in it wins over that of
            this library. Sessions belong to a user: only the same one finds the session again.
        session_id: A UUID.

    Raises:
        ConfigurationError: It is not such a URL, or has a session id of its own, which would make
            all runs share one session.
    """
    address, _, text = remote.partition(";")
    address = address.rstrip("/")
    if _ADDRESS.fullmatch(address) is None:
        # Not shown: a token that is in the wrong place is still one.
        msg = (
            "`remote` is not the URL of a Spark Connect server: write it as sc://host:port, then "
            "any parameters as /;key=value."
        )
        raise ConfigurationError(msg)
    parameters = [parameter for parameter in text.split(";") if parameter]
    keys = {parameter.partition("=")[0] for parameter in parameters}
    if "session_id" in keys:
        msg = (
            f"the URL of the Spark Connect server {address} names a session_id: remove it. Each "
            "run has a session of its own."
        )
        raise ConfigurationError(msg)
    parameters += [] if "user_id" in keys else [f"user_id={USER_ID}"]
    return f"{address}/;{';'.join([*parameters, f'session_id={session_id}'])}"


def connects_in_the_clear(session: SparkSession) -> bool:
    """Tell whether the session sends its data across a network without TLS.

    That is a Connect session whose server is not on this machine.
    """
    if not is_connect(session):
        return False
    connected: Any = session  # the two kinds share a parent in pyspark's code, but not in its types
    builder = connected.client._builder  # noqa: SLF001 - no public way to ask how a session is connected
    host = str(getattr(builder, "host", ""))
    return (
        not builder.secure and host != "localhost" and re.fullmatch(r"127(\.\d+){3}", host) is None
    )


def check_reachable(remote: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Make sure that a Connect server answers.

    Raises:
        ConfigurationError: It does not within the time.
    """
    import grpc  # type: ignore[import-untyped]

    with _service(remote, str(uuid.uuid4())) as (builder, _):
        channel = builder.toChannel()
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError as error:
            msg = (
                f"no Spark Connect server answered at {_address(remote)} within {timeout_s:g} s: "
                "start it, or correct `remote`. "
                "A server behind TLS needs `use_ssl=true` among its parameters."
            )
            raise ConfigurationError(msg) from error
        finally:
            channel.close()


def stop_session(remote: str, session_id: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """End a session from any process: its work stops at once, and no client can submit more in it.

    A session that does not exist, or was ended before, is no error. A write that was already moving
    its finished files into place, or committing to a table, may still end, after the replay of its
    range as well: `write_parquet_by_range`, `write_delta` and `write_iceberg` bear that, another
    output must.

    Raises:
        ConfigurationError: The server did not answer, so the work may still run.
    """
    import grpc
    from pyspark.sql.connect.proto import base_pb2 as pb

    with _service(remote, session_id) as (builder, service), _answered(remote, session_id):
        owner = pb.UserContext(user_id=builder.userId or USER_ID)
        everything = pb.InterruptRequest.INTERRUPT_TYPE_ALL
        interrupt = pb.InterruptRequest(
            session_id=session_id, user_context=owner, interrupt_type=everything
        )
        release = pb.ReleaseSessionRequest(session_id=session_id, user_context=owner)
        service.Interrupt(interrupt, timeout=timeout_s, metadata=builder.metadata())
        try:
            service.ReleaseSession(release, timeout=timeout_s, metadata=builder.metadata())
        except grpc.RpcError as error:
            # Spark 4.0 shuts the session to clients first, and then trips over an operation that is
            # still winding down. Interrupting once more tells: SESSION_CLOSED if it is shut.
            if _UNWINDING not in (error.details() or ""):
                raise
            service.Interrupt(interrupt, timeout=timeout_s, metadata=builder.metadata())
            service.ReleaseSession(release, timeout=timeout_s, metadata=builder.metadata())


def interrupt_tag(remote: str, session_id: str, tag: str) -> None:
    """Stop what carries a tag in a session, and leave the session to its other clients.

    Raises:
        ConfigurationError: The server did not answer, so the work may still run.
    """
    from pyspark.sql.connect.proto import base_pb2 as pb

    with _service(remote, session_id) as (builder, service), _answered(remote, session_id):
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
def _answered(remote: str, session_id: str) -> Iterator[None]:
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        details = error.details() or ""
        if "SESSION_CLOSED" in details:
            return
        msg = (
            f"the Spark Connect server at {_address(remote)} did not end session {session_id} "
            f"({error.code().name}: {details[:200]}): "
            "its Spark work may still run. Try again when the server answers, or restart the "
            "server."
        )
        raise ConfigurationError(msg) from error


def _address(remote: str) -> str:
    """The part of the URL without parameters: a token may be among those."""
    return remote.partition(";")[0].rstrip("/")
