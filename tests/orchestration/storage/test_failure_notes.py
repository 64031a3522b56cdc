"""The text of the error of a batch: a person finds the cause in it."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from dagster_rebalance.orchestration.storage.failure_notes import text_of_error


class NoTextError(Exception):
    """An error that cannot be shown, as one of a JVM that has died."""

    def __str__(self) -> str:
        """Fail."""
        raise ConnectionError


def fail(problem: BaseException, cause: BaseException | None) -> None:
    """Fail as the body of an asset does."""
    raise problem from cause


def raised(problem: BaseException, cause: BaseException | None = None) -> BaseException:
    """An error that has been raised."""
    with pytest.raises(type(problem)) as caught:
        fail(problem, cause)
    return caught.value


def said(problem: BaseException) -> str:
    """The text of an error without the places."""
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
def test_a_text_has_the_type_the_message_and_the_metadata(
    problem: BaseException, text: str
) -> None:
    """Dagster shows the metadata of a Failure, and a streaming run has no event for it."""
    assert said(raised(problem)) == text


def test_a_text_has_the_cause_of_an_error() -> None:
    """`raise dg.RetryRequested(...) from error` has no message."""
    retry = raised(dg.RetryRequested(), ConnectionError("refused"))
    assert said(retry) == "RetryRequested; caused by ConnectionError: refused"
    assert said(raised(RuntimeError("not written"), retry)) == (
        "RuntimeError: not written; caused by RetryRequested; caused by ConnectionError: refused"
    )


def test_a_text_has_the_notes_of_an_error() -> None:
    """A body adds the record that it was processing."""
    problem: Any = ValueError("bad")
    problem.__notes__ = ["order 17"]  # as add_note, which Python 3.10 lacks
    assert said(raised(problem)) == "ValueError: bad, order 17"


def test_a_text_has_the_errors_of_a_group_and_their_places() -> None:
    """The message of a group has their number alone, and its frames are those of asyncio."""

    class Group(Exception):  # noqa: N818 - as ExceptionGroup, which Python 3.10 lacks
        exceptions = (raised(ValueError("order 17")), raised(OSError("full")))

    text = text_of_error(Group("errors in a TaskGroup (2 sub-exceptions)"))
    assert text.startswith(
        "Group: errors in a TaskGroup (2 sub-exceptions); caused by ValueError: order 17; "
        "caused by OSError: full (test_failure_notes.py:"
    )
    assert " in fail, " in text
