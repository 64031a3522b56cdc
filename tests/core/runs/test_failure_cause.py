"""The cause of a failed attempt, by the names of its errors."""

from __future__ import annotations

import pytest

from dagster_rebalance.core.model.run_snapshot import FailureCause
from dagster_rebalance.core.runs.failure_cause import cause_of

STACK = "An error occurred while calling o93.save.\n: org.apache.spark.SparkException: Job aborted"


def cause(errors: list[tuple[str, str]]) -> FailureCause:
    """The cause of errors, each with the name of its class and those of superclasses."""
    return cause_of([(names.split(), message) for names, message in errors])


@pytest.mark.parametrize(
    "error",
    [
        ("ValueError", "order 17 has no price"),
        ("KeyError", "'price'"),
        ("JSONDecodeError", "Expecting value"),
        ("UndecodableError", "the value has no schema id"),
        ("DagsterRebalanceError", ""),
        ("Failure", "7 rows are invalid"),
        ("IntegrityError", "null value in column"),
        ("ArrowInvalid", "Could not convert"),
        ("Py4JJavaError", f"{STACK} due to stage failure: java.lang.NumberFormatException: x"),
        ("Py4JJavaError", f"{STACK}\n at org.apache.spark.sql.kafka010.KafkaBatch.read(K.scala:1)"),
        ("PythonException", "Traceback (most recent call last):\n  File 'a'\nValueError: no price"),
        ("", "an error without a name"),
        ("psycopg.errors.NotNullViolation psycopg.IntegrityError psycopg.Error", ""),
        ("psycopg.errors.NotNullViolation", ""),
        ("psycopg.errors.DivisionByZero psycopg.DataError psycopg.DatabaseError", ""),
        ("sqlalchemy.exc.StatementError sqlalchemy.exc.SQLAlchemyError", "TypeError"),
        ("_internal.SchemaMismatchError _internal.DeltaError", ""),
        ("botocore.exceptions.ParamValidationError botocore.exceptions.BotoCoreError", ""),
        ("confluent_kafka.serialization.SerializationError cimpl.KafkaException", ""),
        ("google.protobuf.message.DecodeError google.protobuf.message.Error", ""),
        ("app.ValidationError builtins.ValueError", ""),
        ("Py4JJavaError", f"{STACK}: java.sql.SQLDataException: too long"),
        ("connect.SparkRuntimeException connect.SparkConnectException Exception", "no number"),
        (
            "PythonException",
            "Traceback (most recent call last):\npsycopg.errors.UniqueViolation: x",
        ),
        ("gzip.BadGzipFile OSError", "BadGzipFile: Not a gzipped file (b'{')"),
        ("builtins.EOFError", "EOFError: Compressed file ended before the end-of-stream marker"),
        ("OSError", "OSError: Invalid data stream"),
        (
            "PythonException",
            "Traceback (most recent call last):\n  File 'a'\nEOFError: Expected 5 bytes, read 0",
        ),
    ],
)
def test_error_of_the_records(error: tuple[str, str]) -> None:
    assert cause([error]) is FailureCause.RECORDS
    assert cause([("DagsterExecutionStepExecutionError", ""), error]) is FailureCause.RECORDS


@pytest.mark.parametrize(
    "error",
    [
        ("MemoryError", ""),
        ("OSError", "No space left on device"),
        ("PermissionError", "/data"),
        ("requests.exceptions.ConnectionError", "refused"),
        ("ConnectTimeout", ""),
        ("ReadTimeout", ""),
        ("gaierror", "Name or service not known"),
        ("OperationalError", "server closed the connection"),
        ("EndpointConnectionError", ""),
        ("ServiceUnavailable", ""),
        ("KafkaException", "_TRANSPORT"),
        ("BrokerError", ""),
        ("TooManyLettersError", ""),
        ("CommitFailedException", ""),
        ("DagsterExecutionInterruptedError", ""),
        ("DagsterInvalidConfigError", ""),
        ("KeyboardInterrupt", ""),
        ("SystemExit", "1"),
        ("CancelledError", ""),
        ("Py4JNetworkError", "Answer from Java side is empty"),
        ("Py4JJavaError", f"{STACK}: java.lang.OutOfMemoryError: Java heap space"),
        ("Py4JJavaError", f"{STACK}: ExecutorLostFailure (executor 1 exited)"),
        ("Py4JJavaError", f"{STACK}\nCaused by: java.net.ConnectException: refused"),
        ("SparkConnectGrpcException", "<_MultiThreadedRendezvous of RPC that terminated"),
        ("PythonException", "Traceback (most recent call last):\n  File 'a'\nTimeoutError: slow"),
        ("RuntimeError", "[Errno 32] Broken pipe"),
        ("app.StoreDown builtins.ConnectionError builtins.OSError", ""),
        ("psycopg.errors.ReadOnlySqlTransaction psycopg.InternalError psycopg.Error", ""),
        ("psycopg.errors.ReadOnlySqlTransaction", ""),
        (
            "sqlalchemy.exc.InternalError sqlalchemy.exc.DBAPIError sqlalchemy.exc.StatementError",
            "",
        ),
        ("httpx.ReadError", ""),
        ("pyiceberg.exceptions.ServerError pyiceberg.exceptions.RESTError", ""),
        ("_internal.TableNotFoundError _internal.DeltaError", ""),
        ("botocore.errorfactory.ThrottlingException botocore.exceptions.ClientError", ""),
        ("google.api_core.exceptions.TooManyRequests", ""),
        ("azure.core.exceptions.HttpResponseError", ""),
        ("redis.exceptions.ReadOnlyError redis.exceptions.ResponseError", ""),
        ("pymongo.errors.NotPrimaryError pymongo.errors.AutoReconnect", ""),
        ("aiohttp.client_exceptions.ServerDisconnectedError", ""),
        (
            "concurrent.futures.process.BrokenProcessPool concurrent.futures._base.BrokenExecutor",
            "",
        ),
        ("app.ValidationError builtins.OSError", ""),
        ("SparkConnectGrpcException", ""),
        ("SparkException", "Python worker exited unexpectedly (crashed)"),
        ("PySparkRuntimeError", "[PYTHON_VERSION_MISMATCH] Python in worker has another version"),
        ("SparkException", "[SPARK_JOB_CANCELLED] Job 4 cancelled"),
        ("SparkException", "[FAILED_READ_FILE.NO_HINT] Encountered error"),
        ("SparkException", "is bigger than spark.driver.maxResultSize (1024.0 MiB)"),
        ("AttributeError", "'NoneType' object has no attribute 'setCallSite'"),
        ("UnknownException", "(org.apache.iceberg.exceptions.ForbiddenException) Forbidden: no"),
        ("UnknownException", "(org.apache.spark.sql.delta.DeltaIOException) [DELTA_CANNOT_CREATE"),
        ("UnknownException", "(org.apache.spark.sql.delta.DeltaFileNotFoundException) missing"),
        ("UnknownException", "(io.delta.exceptions.ConcurrentAppendException) [DELTA_CONCURRENT"),
        ("Py4JJavaError", f"{STACK}: java.sql.SQLException: No suitable driver"),
        ("ModuleNotFoundError", "No module named 'prices'"),
        ("PythonException", "Traceback (most recent call last):\nssl.SSLCertVerificationError: x"),
        (
            "PythonException",
            "Traceback (most recent call last):\nnumpy._core._exceptions._ArrayMemoryError: Unable",
        ),
        ("PythonException", "Traceback (most recent call last):\n    | ConnectionResetError: x"),
        ("pyspark.errors.exceptions.captured.ParseException AnalysisException", ""),
        ("Py4JJavaError", f"{STACK}\nCaused by: java.nio.file.AccessDeniedException: /data"),
        ("Py4JJavaError", f"{STACK}: org.apache.hadoop.mapred.InvalidInputException: /data"),
        ("PythonException", "Traceback (most recent call last):\n  File 'a'\nMemoryError\n"),
        ("PythonException", "Traceback (most recent call last):\nhttpx.ReadError: closed"),
        ("EOFError", "EOFError"),
        ("PythonException", "Traceback (most recent call last):\n  File 'a'\nEOFError\n"),
    ],
)
def test_error_of_the_environment(error: tuple[str, str]) -> None:
    assert cause([error]) is FailureCause.ENVIRONMENT


def test_environment_anywhere_in_the_chain_counts() -> None:
    chain = [("ValueError", "no rate for EUR"), ("KeyError", ""), ("TimeoutError", "")]
    assert cause(chain) is FailureCause.ENVIRONMENT
    assert cause(chain[:2]) is FailureCause.RECORDS


def test_failure_without_errors_has_an_unknown_cause() -> None:
    assert cause_of([]) is FailureCause.UNKNOWN
