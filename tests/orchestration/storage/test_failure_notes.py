"""Tests of the text of an error."""

from __future__ import annotations

import importlib
from typing import Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.run_snapshot import FailureCause
from dagster_rebalance.core.runs.retry import FailedAttempt
from dagster_rebalance.orchestration.storage.failure_notes import (
    FailureNotes,
    cause_of_error,
    cause_of_event,
    record_cause,
    recorded_cause,
    text_of_error,
)
from tests.orchestration.parts import span


class NoTextError(Exception):
    """An error whose `str()` raises, like a Py4J error after the end of its JVM."""

    def __str__(self) -> str:
        raise ConnectionError


def fail(problem: BaseException, cause: BaseException | None) -> None:
    raise problem from cause


def raised(problem: BaseException, cause: BaseException | None = None) -> BaseException:
    with pytest.raises(type(problem)) as caught:
        fail(problem, cause)
    return caught.value


def said(problem: BaseException) -> str:
    return text_of_error(problem).partition(" (test_failure_notes.py:")[0]


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (NoTextError(), "NoTextError, which has no text"),
        (dg.RetryRequested(max_retries=2), "RetryRequested"),
        (dg.Failure("bad"), "Failure: bad"),
        (dg.Failure(metadata={"row": 17, "file": "a.csv"}), "Failure: row: 17, file: a.csv"),
    ],
)
def test_text_of_error_has_type_message_and_metadata(problem: BaseException, text: str) -> None:
    assert said(raised(problem)) == text


def test_text_of_error_has_causes() -> None:
    """`raise dg.RetryRequested(...) from error` has no message."""
    retry = raised(dg.RetryRequested(), ConnectionError("refused"))
    assert said(retry) == "RetryRequested; caused by ConnectionError: refused"
    assert said(raised(RuntimeError("not written"), retry)) == (
        "RuntimeError: not written; caused by RetryRequested; caused by ConnectionError: refused"
    )


def test_text_of_error_has_notes() -> None:
    problem: Any = ValueError("bad")
    problem.__notes__ = ["order 17"]  # as add_note, which Python 3.10 lacks
    assert said(raised(problem)) == "ValueError: bad, order 17"


def test_text_of_error_has_members_of_exception_group() -> None:
    """The frames of a group are those of asyncio."""

    class Group(Exception):  # noqa: N818 - as ExceptionGroup, which Python 3.10 lacks
        exceptions = (raised(ValueError("order 17")), raised(OSError("full")))

    text = text_of_error(Group("errors in a TaskGroup (2 sub-exceptions)"))
    assert text.startswith(
        "Group: errors in a TaskGroup (2 sub-exceptions); caused by ValueError: order 17; "
        "caused by OSError: full (test_failure_notes.py:"
    )
    assert " in fail, " in text


class FullError(OSError):
    """An error of a library whose name tells nothing."""


def handled(problem: BaseException, before: BaseException) -> BaseException:
    """An error that was raised while another one was handled."""
    problem.__context__ = before
    return problem


@pytest.mark.parametrize(
    ("problem", "cause"),
    [
        (ValueError("order 17"), FailureCause.RECORDS),
        (raised(ValueError("order 17"), KeyError("price")), FailureCause.RECORDS),
        (raised(ValueError("order 17"), ConnectionError("refused")), FailureCause.ENVIRONMENT),
        (handled(KeyError("rate"), TimeoutError("slow")), FailureCause.ENVIRONMENT),
        (raised(handled(KeyError("rate"), TimeoutError("slow")), None), FailureCause.RECORDS),
        (FullError("disk"), FailureCause.ENVIRONMENT),
        (dg.Failure("7 rows"), FailureCause.RECORDS),
    ],
)
def test_cause_of_error_is_that_of_its_chain(problem: BaseException, cause: FailureCause) -> None:
    assert cause_of_error(problem) is cause


def class_of(path: str) -> type[BaseException]:
    """The class of an error of a library."""
    module, _, name = path.rpartition(".")
    found: type[BaseException] = getattr(importlib.import_module(module), name)
    return found


@pytest.mark.parametrize(
    "path",
    [
        "psycopg.errors.ReadOnlySqlTransaction",
        "psycopg.errors.ConnectionFailure",
        "psycopg.errors.InvalidPassword",
        "psycopg.errors.InFailedSqlTransaction",
        "psycopg.errors.IoError",
        "psycopg2.errors.ReadOnlySqlTransaction",
        "sqlalchemy.exc.PendingRollbackError",
        "sqlalchemy.exc.ProgrammingError",
        "httpx.WriteError",
        "httpx.RemoteProtocolError",
        "urllib3.exceptions.PoolError",
        "botocore.exceptions.EndpointConnectionError",
        "botocore.exceptions.NoRegionError",
        "pyiceberg.exceptions.AuthorizationExpiredError",
        "pyiceberg.exceptions.ForbiddenError",
        "pyiceberg.exceptions.UnauthorizedError",
        "pyiceberg.exceptions.WaitingForLockException",
        "deltalake.exceptions.DeltaError",
        "deltalake.exceptions.TableNotFoundError",
        "confluent_kafka.error.ConsumeError",
        "concurrent.futures.process.BrokenProcessPool",
        "pyspark.errors.exceptions.connect.SparkConnectGrpcException",
        "pyspark.errors.exceptions.connect.SparkUpgradeException",
    ],
)
def test_error_of_a_client_library_has_a_cause_in_the_environment(path: str) -> None:
    error = class_of(path)
    assert cause_of_error(error.__new__(error)) is FailureCause.ENVIRONMENT


@pytest.mark.parametrize(
    "path",
    [
        "psycopg.errors.UniqueViolation",
        "psycopg.errors.InvalidTextRepresentation",
        "psycopg.DataError",
        "psycopg2.errors.NumericValueOutOfRange",
        "sqlalchemy.exc.IntegrityError",
        "sqlalchemy.exc.StatementError",
        "pyiceberg.exceptions.ResolveError",
        "deltalake.exceptions.SchemaMismatchError",
        "botocore.exceptions.ParamValidationError",
        "confluent_kafka.serialization.SerializationError",
        "google.protobuf.message.DecodeError",
        "pyarrow.ArrowInvalid",
        "json.JSONDecodeError",
    ],
)
def test_error_of_data_in_a_library_has_a_cause_in_the_records(path: str) -> None:
    error = class_of(path)
    assert cause_of_error(error.__new__(error)) is FailureCause.RECORDS


class StoreDown(ConnectionError):  # noqa: N818 - as a user may name it
    """An error of a user."""


@pytest.mark.parametrize(
    "error", [StoreDown("x"), class_of("psycopg.errors.IoError")("x"), ValueError("order 17")]
)
def test_per_batch_run_records_the_cause_of_a_streaming_run(error: Exception) -> None:
    @dg.asset
    def orders() -> None:
        raise error

    defs = dg.Definitions(
        [orders],
        jobs=[
            dg.define_asset_job("etl", hooks={record_cause}, executor_def=dg.in_process_executor)
        ],
    )
    with dg.DagsterInstance.ephemeral() as instance:
        job = defs.resolve_job_def("etl")
        done = job.execute_in_process(instance=instance, raise_on_error=False)
        run = instance.get_run_by_id(done.run_id)
        assert run is not None
        assert recorded_cause(run) is cause_of_error(error)
        retry = job.execute_in_process(instance=instance, raise_on_error=False, tags=run.tags)
        assert recorded_cause(retry.dagster_run.with_tags(run.tags)) is None
        (entry,) = instance.all_logs(done.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    if not isinstance(error, StoreDown):  # its text has no superclass
        assert cause_of_event(entry) is cause_of_error(error)


@pytest.mark.parametrize("cause", FailureCause)
def test_note_keeps_the_cause_for_the_next_owner(cause: FailureCause) -> None:
    failed = FailedAttempt("run1", 2, "ValueError: order 17", cause)
    with dg.DagsterInstance.ephemeral() as instance:
        FailureNotes(instance, "etl").write([span(0)], failed)
        assert FailureNotes(instance, "etl").read([span(0), span(1)]) == {span(0): failed}
