"""The cause of a failed attempt: the records, or the environment of the run.

With `on_failure="bisect"`, a range is halved, and a record becomes a dead letter, only if the
records are the cause. A wrong "environment" stops a partition until the next attempt. A wrong
"records" makes a dead letter of a good record. So all errors along the chain count: an error of a
network, storage, process or JVM anywhere in it is a cause in the environment.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run_snapshot import FailureCause

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_JAVA_ERROR = re.compile(
    r"\b(?:[a-z_][a-z0-9_]*\.)+([A-Z][A-Za-z0-9_$]*(?:Exception|Error|Failure|Failed|Killed))\b"
)
_TRACEBACK = "Traceback (most recent call last)"
_PYTHON_ERROR = re.compile(r"^\s*(?:[A-Za-z_]\w*\.)*([A-Z]\w*): ", re.MULTILINE)
_MARKS = re.compile(
    r"_MultiThreadedRendezvous|_InactiveRpcError|INVALID_HANDLE|ExecutorLostFailure|OutOfMemory|"
    r"Connection refused|Connection reset|Broken pipe|No space left on device|SparkContext was shut"
)
"""Texts of Spark, whose errors have one class for many causes."""

_IGNORED = frozenset({"DagsterExecutionStepExecutionError", "DagsterRebalanceError"})
"""Dagster's wrapper of the error of an asset function, and a base class."""

_NAMES = frozenset(
    {
        # Process and memory
        "CancelledError", "GeneratorExit", "KeyboardInterrupt", "MemoryError",
        "SystemExit", "OutOfMemoryError", "ArrowMemoryError", "BrokenProcessPool",
        "ChildProcessError", "WorkerLostError", "CalledProcessError",
        # Operating system and network
        "OSError", "IOError", "EnvironmentError", "BlockingIOError", "BrokenPipeError",
        "FileExistsError", "FileNotFoundError", "IsADirectoryError", "NotADirectoryError",
        "PermissionError", "ProcessLookupError", "EOFError", "gaierror", "herror", "timeout",
        "SSLError", "HTTPError", "URLError", "IOException", "UncheckedIOException",
        "RequestException", "ClientError", "HTTPStatusError", "RequestError", "TransportError",
        "HTTPException", "RpcError", "InactiveRpcError", "GrpcError", "IncompleteRead",
        "ProtocolError", "MaxRetryError", "NewConnectionError", "RemoteDisconnected",
        # Databases, object stores and table formats
        "OperationalError", "InterfaceError", "AdminShutdown", "CrashShutdown",
        "CannotConnectNow", "TooManyConnections", "DeadlockDetected", "SerializationFailure",
        "LockNotAvailable", "QueryCanceled", "DiskFull", "BotoCoreError", "NoCredentialsError",
        "CommitFailedException", "CommitStateUnknownException", "CommitFailedError",
        "ConcurrentModificationException", "AzureError", "GoogleAPICallError", "RetryError",
        "SdkClientException", "AmazonS3Exception", "SdkException", "S3Exception",
        # Kafka and this package
        "KafkaException", "KafkaError", "BrokerError", "RebalanceInProgressError",
        "PartitionLostError", "ClaimError", "BatchRefusedError", "ConfigurationError",
        "IllegalStateError", "TooManyLettersError", "UnsupportedOperationError",
        # Dagster
        "RetryRequested", "RetryRequestedFromPolicy",
        # The JVM and Spark
        "Py4JNetworkError", "StackOverflowError", "NoClassDefFoundError",
        "SparkOutOfMemoryError", "ExecutorLostFailure",
        "ExecutorDeadException", "FetchFailed", "FetchFailedException",
        "MetadataFetchFailedException", "SparkUpgradeException", "TaskKilledException",
        "TaskKilled", "BlockNotFoundException",
    }
)  # fmt: skip
_ENDINGS = (
    "ConnectError",
    "ConnectException",
    "ConnectionError",
    "ConnectionException",
    "ConnectTimeout",
    "InterruptedError",
    "InterruptedException",
    "NetworkError",
    "NetworkException",
    "RefusedError",
    "ResetError",
    "AbortedError",
    "SocketException",
    "ReadTimeout",
    "Timeout",
    "TimeoutError",
    "TimeoutException",
    "TimedOutException",
    "Unavailable",
    "UnavailableError",
    "UnavailableException",
    "UnknownHostException",
)
_BEGINNINGS = ("Dagster", "Kafka")


def cause_of(errors: Iterable[tuple[str, str]]) -> FailureCause:
    """Return the cause of a failed attempt.

    Args:
        errors: Name and message of each error in the chain of causes. The name of a built-in
            superclass may be included. A message may name errors of a JVM or of another process.
            Without errors, the cause is unknown.
    """
    cause = FailureCause.UNKNOWN
    for name, message in errors:
        if _MARKS.search(message) or any(map(_is_of_environment, _names(name, message))):
            return FailureCause.ENVIRONMENT
        cause = FailureCause.RECORDS
    return cause


def _names(name: str, message: str) -> Iterator[str]:
    yield name.rpartition(".")[2]
    yield from _JAVA_ERROR.findall(message)
    if _TRACEBACK in message:
        yield from _PYTHON_ERROR.findall(message)


def _is_of_environment(name: str) -> bool:
    if name in _IGNORED:
        return False
    return name in _NAMES or name.endswith(_ENDINGS) or name.startswith(_BEGINNINGS)
