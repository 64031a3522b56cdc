"""Tags on the Spark jobs of a batch, and calls into Spark that a signal can interrupt.

A classic session calls the JVM over one socket per thread. If a signal raises an exception in the
middle of a call, its response stays unread: the thread's next call waits for the whole running job,
and each later call reads the previous response. py4j cleans up after `KeyboardInterrupt` only, not
after the exception with which Dagster cancels a run; `make_interruptible` adds this. With pyspark
4.0.0, a cancelled run otherwise hung until its Spark job ended.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

_MARK = "_dagster_rebalance_interruptible"
_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 2.0
"""Shorter than the time that the end of a run waits for its last event."""
_TAGGED: dict[str, SparkSession] = {}
"""The sessions that work on batches, by the tags of the batches."""
_CACHED: dict[str, list[DataFrame]] = {}
"""The frames that are cached for batches, by the tags of the batches."""


def is_connect(session: SparkSession) -> bool:
    """Whether this is a Spark Connect session."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def batch_tag(batch_id: str) -> str:
    """Return the tag on the Spark jobs of a batch, without commas, which separate tags."""
    return f"dagster-rebalance-{batch_id.replace(',', '_')}"


def tag_batch(session: SparkSession, batch_id: str) -> str:
    """Tag all Spark work that this thread starts from now on, and return the tag."""
    tag = batch_tag(batch_id)
    add_tag(session, tag)
    _TAGGED[tag] = session
    return tag


def show_causes(session: SparkSession) -> None:
    """Let the error of a Python function of Spark contain its causes.

    The causes decide whether a range is bisected. By default, Spark leaves them out.
    """
    session.conf.set("spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled", "false")


def cache_for_batch(frame: DataFrame, batch_id: str) -> DataFrame:
    """Cache a frame until the batch is settled."""
    cached = frame.persist()
    _CACHED.setdefault(batch_tag(batch_id), []).append(cached)
    return cached


def settle_batch(batch_id: str, *, is_done: bool) -> None:
    """Remove the tag of a batch from this thread, and its caches.

    Unless the batch is done, interrupt its work.
    """
    tag = batch_tag(batch_id)
    try:
        _remove_tag(tag, is_done=is_done)
    finally:
        for frame in _CACHED.pop(tag, ()):
            frame.unpersist()


def _remove_tag(tag: str, *, is_done: bool) -> None:
    session = _TAGGED.pop(tag, None)
    if session is None:
        return
    try:
        if not is_done:
            interrupt(session, tag)
    finally:
        if is_connect(session):
            with suppress(KeyError):  # tags are per thread, and another thread has this one
                session.removeTag(tag)
        else:
            session.sparkContext.removeJobTag(tag)


def add_tag(session: SparkSession, tag: str) -> None:
    """Tag all Spark work that this thread starts from now on."""
    if is_connect(session):
        session.addTag(tag)
    else:
        # Not session.addTag(): those tags are per thread in a classic session, so no other thread
        # could cancel jobs by them.
        session.sparkContext.addJobTag(tag)


def interrupt(session: SparkSession, tag: str) -> None:
    """Interrupt the Spark work with a tag in a session, from any thread of the process."""
    if is_connect(session):
        session.interruptTag(tag)
    else:
        session.sparkContext.cancelJobsWithTag(tag)


def has_classic_session() -> bool:
    """Whether the process has a classic session, which a new session would share."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None  # noqa: SLF001 - no public way to ask without starting one


def has_jvm() -> bool:
    """Whether the process has started the JVM of classic sessions, with its command line."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None  # noqa: SLF001 - no public way to ask without starting one


def jvm_has_died(*, ask: bool = True) -> bool:
    """Whether the JVM that this process started for classic sessions has ended.

    Only a new process can continue: a new JVM would lack the functions that user code registered.

    Args:
        ask: Whether to connect to a JVM that seems alive. A process closes its sockets shortly
            before it is reported as ended, so calls may fail earlier.
    """
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    gateway: Any = getattr(context, "_gateway", None)
    process = getattr(gateway, "proc", None)
    if process is None:
        return False
    if process.poll() is not None or not ask:
        return process.poll() is not None
    return not _answers(gateway.gateway_parameters)


def _answers(place: Any) -> bool:
    """Whether the JVM answers a login of py4j, or at least keeps the connection open.

    While a killed process ends, the system still accepts connections to it.
    """
    try:
        connection = socket.create_connection((place.address, place.port), _CONNECT_TIMEOUT_S)
    except OSError:
        return False
    with connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.sendall(f"A\n{place.auth_token}\n".encode())
            return bool(connection.recv(1))
        except TimeoutError:
            return True
        except OSError:
            return False


def is_stopped(session: Any) -> bool:
    """Whether a session was stopped, for example by an asset. Its JVM must be alive."""
    if is_connect(session):
        return bool(session.is_stopped)
    java = session.sparkContext._jsc  # noqa: SLF001 - None in a stopped session; no public way to ask
    return java is None or bool(java.sc().isStopped())


def make_interruptible(session: SparkSession) -> None:
    """Make calls of a classic session safe to interrupt by an exception of a signal handler."""
    if is_connect(session):
        return
    gateway: Any = session.sparkContext._gateway  # noqa: SLF001 - no public way to it
    client = gateway._gateway_client  # noqa: SLF001 - as above
    if getattr(client, _MARK, False):
        return
    send_command = client.send_command

    def send_or_disconnect(*args: Any, **kwargs: Any) -> Any:
        try:
            return send_command(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            # The next call of this thread opens a new connection, as after py4j's own clean-up for
            # KeyboardInterrupt.
            connection = client.get_thread_connection()
            if connection is not None:
                connection.close()
            raise

    client.send_command = send_or_disconnect
    setattr(client, _MARK, True)


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM at the end of the block.

    A new SparkContext replaces the SIGINT handler by a handler that calls the JVM in the middle of
    another call. This fails with a py4j error instead of cancelling the run (pyspark 4.0.0).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
