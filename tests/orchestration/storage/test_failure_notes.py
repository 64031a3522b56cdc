"""Tests of the text of an error."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.run_snapshot import FailureCause
from dagster_rebalance.core.runs.retry import FailedAttempt
from dagster_rebalance.orchestration.storage.failure_notes import (
    FailureNotes,
    cause_of_error,
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


@pytest.mark.parametrize("cause", FailureCause)
def test_note_keeps_the_cause_for_the_next_owner(cause: FailureCause) -> None:
    failed = FailedAttempt("run1", 2, "ValueError: order 17", cause)
    with dg.DagsterInstance.ephemeral() as instance:
        FailureNotes(instance, "etl").write([span(0)], failed)
        assert FailureNotes(instance, "etl").read([span(0), span(1)]) == {span(0): failed}
