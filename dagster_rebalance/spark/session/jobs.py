"""The tag of a batch on its Spark jobs, and calls into Spark that a signal can end.

A classic session calls the JVM over a socket per thread. An exception that a signal raises in the
middle of a call leaves the answer unread: the next call of that thread waits for the whole running
job, and every later one reads the answer before its own. py4j cleans up after `KeyboardInterrupt`
only, not after the exception that Dagster raises to cancel a run. `make_interruptible` mends that.
Measured with pyspark 4.0.0: without it a cancelled run hung until its Spark job ended by itself;
with it the exception arrives in 0.01 s.

Never stops jobs of another batch.
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

    from pyspark.sql import SparkSession

_MARK = "_dagster_rebalance_interruptible"
_ANSWER_LIMIT_S = 5.0
_TAGGED: dict[str, SparkSession] = {}
"""The sessions that work on batches, by the tags of those."""


def is_connect(session: SparkSession) -> bool:
    """Whether the session talks to a Spark Connect server."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def batch_tag(batch_id: str) -> str:
    """The tag on the Spark jobs of a batch.

    Spark separates tags by commas, so there are none in it.
    """
    return f"dagster-rebalance-{batch_id.replace(',', '_')}"


def tag_batch(session: SparkSession, batch_id: str) -> str:
    """Let all Spark work that this thread starts from now on carry the tag of a batch.

    Returns:
        The tag, as the Spark UI shows it.
    """
    tag = batch_tag(batch_id)
    add_tag(session, tag)
    _TAGGED[tag] = session
    return tag


def settle_batch(batch_id: str, *, is_done: bool) -> None:
    """Let what this thread starts from now on not carry the tag of a batch any more.

    What still works on a batch that is not done is stopped.
    """
    tag = batch_tag(batch_id)
    session = _TAGGED.pop(tag, None)
    if session is not None:
        try:
            if not is_done:
                interrupt(session, tag)
        finally:
            with suppress(KeyError):  # a Connect session keeps tags per thread: another has it
                remove_tag(session, tag)


def add_tag(session: SparkSession, tag: str) -> None:
    """Let all Spark work that this thread starts from now on carry a tag."""
    if is_connect(session):
        session.addTag(tag)
    else:
        # Not session.addTag(): a classic session keeps those tags per thread, so no other thread
        # could stop the jobs by them.
        session.sparkContext.addJobTag(tag)


def remove_tag(session: SparkSession, tag: str) -> None:
    """Let what this thread starts from now on not carry a tag any more."""
    if is_connect(session):
        session.removeTag(tag)
    else:
        session.sparkContext.removeJobTag(tag)


def interrupt(session: SparkSession, tag: str) -> None:
    """Stop the Spark work of the session that carries a tag, from any thread of the process."""
    if is_connect(session):
        session.interruptTag(tag)
    else:
        session.sparkContext.cancelJobsWithTag(tag)


def has_classic_session() -> bool:
    """Tell whether the process has a classic Spark session already.

    A new session would only be another name for it.
    """
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None  # noqa: SLF001 - no public way to ask without starting one


def has_jvm() -> bool:
    """Tell whether the process has started the JVM of classic sessions already.

    The command line of that JVM can then do no harm any more.
    """
    from pyspark import SparkContext

    return SparkContext._gateway is not None  # noqa: SLF001 - no public way to ask without starting one


def jvm_has_died(*, ask: bool = True) -> bool:
    """Tell whether the JVM that this process has started for classic sessions has ended.

    A new one in the same process would not know the functions that user code has registered in the
    old one, so only a new process goes on.

    Args:
        ask: Whether to connect to a JVM that looks alive. A process closes its sockets before it
            can be seen to have ended, so calls may fail a moment before that.
    """
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    gateway: Any = getattr(context, "_gateway", None)
    process = getattr(gateway, "proc", None)
    if process is None:
        return False
    if process.poll() is not None or not ask:
        return process.poll() is not None
    place = gateway.gateway_parameters
    try:
        socket.create_connection((place.address, place.port), _ANSWER_LIMIT_S).close()
    except OSError:
        return True
    return False


def is_stopped(session: Any) -> bool:
    """Tell whether a session works no more, while its JVM lives: a body has stopped it, say."""
    if is_connect(session):
        return bool(session.is_stopped)
    java = session.sparkContext._jsc  # noqa: SLF001 - None in a session that was stopped; no public way to ask
    return java is None or bool(java.sc().isStopped())


def make_interruptible(session: SparkSession) -> None:
    """Let any exception that a signal raises during a call of a classic session end it cleanly.

    A Connect session needs no help.
    """
    if is_connect(session):
        return
    gateway: Any = session.sparkContext._gateway  # noqa: SLF001 - no public way to it
    client = gateway._gateway_client  # noqa: SLF001 - as above
    if getattr(client, _MARK, False):
        return
    send_command = client.send_command

    def send_or_hang_up(*args: Any, **kwargs: Any) -> Any:
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

    client.send_command = send_or_hang_up
    setattr(client, _MARK, True)


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Undo what happens to the handlers of SIGINT and SIGTERM inside.

    A new SparkContext takes SIGINT for itself. Its handler calls the JVM in the middle of another
    call, which fails with an error of py4j instead of cancelling the run, and the jobs go on
    (pyspark 4.0.0).
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
