"""The cause of a failed attempt: the records, or the environment of the run.

With `on_failure="bisect"`, a range is halved, and a record becomes a dead letter, only if the
records are the cause. A wrong "environment" stops a partition until the next attempt. A wrong
"records" makes a dead letter of a good record. So all errors along the chain count: an error of a
network, storage, process or JVM anywhere in it is a cause in the environment. An error of a client
library is one, too, unless the library documents it as an error of the data.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.run_snapshot import FailureCause

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_JAVA_ERROR = re.compile(
    r"\b((?:[a-z_][a-z0-9_]*\.)+[A-Z][A-Za-z0-9_$]*(?:Exception|Error|Failure|Failed|Killed))\b"
)
_TRACEBACK = "Traceback (most recent call last)"
_DATA = r"(?:gzip\.)?BadGzipFile: |EOFError: \S|OSError: Invalid data stream"
_DATA_ERROR = re.compile(_DATA)
"""Errors of truncated and malformed values (gzip, bz2, pickle, Avro). Their superclasses are those
of files and connections. The EOFError of a closed pipe has no message."""
_PYTHON_ERROR = re.compile(
    rf"^[\s|]*(?!{_DATA})((?:[A-Za-z_]\w*\.)*_?[A-Z]\w*)(?::\s|$)", re.MULTILINE
)
_MARKS = re.compile(
    r"_MultiThreadedRendezvous|_InactiveRpcError|INVALID_HANDLE|ExecutorLostFailure|OutOfMemory|"
    r"Connection refused|Connection reset|Broken pipe|No space left on device|"
    r"SparkContext was shut|Python worker exited unexpectedly|PYTHON_VERSION_MISMATCH|"
    r"OPERATION_CANCELED|JOB_CANCELLED|FAILED_READ_FILE|spark\.driver\.maxResultSize|"
    r"can't start new thread|'NoneType' object has no attribute '(?:sc|setCallSite)'"
)
"""Texts of Spark and Python, whose errors have one class for many causes. The last one is that of a
stopped SparkContext."""

_IGNORED = frozenset({"DagsterExecutionStepExecutionError", "DagsterRebalanceError"})
"""Dagster's wrapper of the error of an asset function, and a base class."""

_NAMES = frozenset(
    {
        # Process and memory
        "CancelledError", "GeneratorExit", "KeyboardInterrupt", "MemoryError",
        "SystemExit", "OutOfMemoryError", "ArrowMemoryError", "BrokenProcessPool",
        "BrokenExecutor", "ChildProcessError", "WorkerLostError", "CalledProcessError",
        "ImportError", "ModuleNotFoundError",
        # Operating system and network
        "OSError", "IOError", "EnvironmentError", "BlockingIOError", "BrokenPipeError",
        "FileExistsError", "FileNotFoundError", "IsADirectoryError", "NotADirectoryError",
        "PermissionError", "ProcessLookupError", "EOFError", "gaierror", "herror", "timeout",
        "SSLError", "HTTPError", "URLError", "IOException", "UncheckedIOException",
        "RequestException", "ClientError", "HTTPStatusError", "RequestError", "TransportError",
        "HTTPException", "RpcError", "InactiveRpcError", "GrpcError", "IncompleteRead",
        "ProtocolError", "MaxRetryError", "NewConnectionError", "RemoteDisconnected",
        "IncompleteReadError",
        # Databases, object stores and table formats
        "OperationalError", "InterfaceError", "DBAPIError", "AdminShutdown", "CrashShutdown",
        "CannotConnectNow", "TooManyConnections", "DeadlockDetected", "SerializationFailure",
        "LockNotAvailable", "QueryCanceled", "DiskFull", "BotoCoreError", "NoCredentialsError",
        "CommitFailedException", "CommitStateUnknownException", "CommitFailedError",
        "MetadataChangedException", "ProtocolChangedException", "SQLException",
        "SQLInvalidAuthorizationSpecException", "SQLSyntaxErrorException", "AzureError",
        "GoogleAPICallError", "RetryError",
        "SdkClientException", "AmazonS3Exception", "SdkException", "S3Exception", "DeltaError",
        # Kafka and this package
        "KafkaException", "KafkaError", "BrokerError", "RebalanceInProgressError",
        "PartitionLostError", "ClaimError", "BatchRefusedError", "ConfigurationError",
        "IllegalStateError", "TooManyLettersError", "UnsupportedOperationError",
        # Dagster
        "RetryRequested", "RetryRequestedFromPolicy",
        # The JVM and Spark. An analysis is of the query and its tables, not of their rows.
        "AnalysisException", "ExtendedAnalysisException", "Py4JNetworkError",
        "StackOverflowError", "NoClassDefFoundError", "NoSuchMethodError", "UnsatisfiedLinkError",
        "SparkFileAlreadyExistsException", "SparkOutOfMemoryError", "ExecutorLostFailure",
        "ExecutorDeadException", "FetchFailed", "FetchFailedException",
        "MetadataFetchFailedException", "SparkUpgradeException", "TaskKilledException",
        "TaskKilled", "BlockNotFoundException",
    }
)  # fmt: skip
_ENDINGS = (
    "CertVerificationError",
    "ClassNotFoundException",
    "ConnectError",
    "ConnectException",
    "ConnectionError",
    "ConnectionException",
    "ConnectTimeout",
    "FileNotFoundException",
    "IOException",
    "InterruptedError",
    "InterruptedException",
    "MemoryError",
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
_BEGINNINGS = ("Concurrent", "Dagster", "Kafka")

_CLIENTS = (
    # Databases
    "asyncpg.", "cassandra.", "clickhouse_connect.", "clickhouse_driver.", "databricks.",
    "elastic_transport.", "elasticsearch.", "mysql.", "MySQLdb.", "opensearchpy.", "oracledb.",
    "psycopg.", "psycopg2.", "psycopg_pool.", "pymongo.", "pymysql.", "pyodbc.", "redis.",
    "snowflake.", "sqlalchemy.", "sqlite3.", "trino.",
    # HTTP and RPC
    "aiohttp.", "grpc.", "http.client.", "httpcore.", "httpx.", "openai.", "requests.", "urllib3.",
    # Clouds, object stores, table formats and Kafka; google.protobuf only decodes
    "adlfs.", "aiobotocore.", "azure.", "boto3.", "botocore.", "confluent_kafka.", "gcsfs.",
    "google.api_core.", "google.auth.", "google.cloud.", "google.resumable_media.",
    "googleapiclient.", "pyiceberg.", "s3fs.", "s3transfer.",
)  # fmt: skip
"""Modules of client libraries."""

_JAVA_PACKAGES = (
    "java.io.",
    "java.net.",
    "java.nio.file.",
    "javax.net.",
    "org.apache.hadoop.",
    "org.apache.iceberg.",
)
"""Java packages of files, networks and catalogs: a text names only some superclasses."""

_SPARK_CONNECT = frozenset({"SparkConnectException", "SparkConnectGrpcException"})
"""Errors of the connection to Spark Connect, and superclasses of all errors that it reports."""

_LIBRARIES = (*_CLIENTS, "_internal.")
"""Also deltalake, whose classes have no other module."""

_DATA_NAMES = frozenset(
    {
        # PEP 249, and SQLAlchemy's error of a value that it cannot convert
        "DataError", "IntegrityError", "StatementError",
        # Postgres: classes 22, 23 and 44, and RAISE in a trigger. A text names no base class.
        "CharacterNotInRepertoire", "DatetimeFieldOverflow", "InvalidDatetimeFormat",
        "InvalidTextRepresentation", "NumericValueOutOfRange", "StringDataRightTruncation",
        "UntranslatableCharacter", "CheckViolation", "ExclusionViolation", "ForeignKeyViolation",
        "IntegrityConstraintViolationError", "NotNullViolation", "UniqueViolation",
        "WithCheckOptionViolation", "RaiseException",
        # Table formats: the schema of the rows
        "ResolveError", "SchemaMismatchError", "UnsupportedPyArrowTypeException",
        "ValidationError",
        # Documents, requests and serializers
        "DocumentTooLarge", "DuplicateKeyError", "InvalidArgument", "ParamValidationError",
        "SerializationError",
    }
)  # fmt: skip
"""Errors of the data in client libraries."""


def cause_of(errors: Iterable[tuple[Iterable[str], str]]) -> FailureCause:
    """Return the cause of a failed attempt.

    Args:
        errors: Names and message of each error in the chain of causes. The names are those of its
            class and of the superclasses, if they are known, in the order of Python's resolution
            and with their modules. A message may name errors of a JVM or of another process.
            Without errors, the cause is unknown.
    """
    cause = FailureCause.UNKNOWN
    for names, message in errors:
        if not _DATA_ERROR.match(message) and (
            _MARKS.search(message)
            or _is_of_environment(names)
            or any(_is_of_environment([name]) for name in _names_in(message))
        ):
            return FailureCause.ENVIRONMENT
        cause = FailureCause.RECORDS
    return cause


def _names_in(message: str) -> Iterator[str]:
    yield from _JAVA_ERROR.findall(message)
    if _TRACEBACK in message:
        yield from _PYTHON_ERROR.findall(message)


def _is_of_environment(names: Iterable[str]) -> bool:
    """Return whether the cause is in the environment; the first class with a known cause decides.

    The names are those of one error, from its class to its last superclass.
    """
    is_of_client = False
    for position, qualified in enumerate(names):
        name = qualified.rpartition(".")[2]
        if name in _SPARK_CONNECT:
            if position == 0:
                return True
            continue
        if name in _DATA_NAMES and qualified.startswith(_LIBRARIES):
            return False
        if _is_environment_name(name) or qualified.startswith(_JAVA_PACKAGES):
            return True
        is_of_client |= qualified.startswith(_CLIENTS)
    return is_of_client


def _is_environment_name(name: str) -> bool:
    if name in _IGNORED:
        return False
    return name in _NAMES or name.endswith(_ENDINGS) or name.startswith(_BEGINNINGS)
