"""Tell a lost connection to Dagster's storage from a refusal of the storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import exc

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_CAUSES = 10


def is_lost_connection(error: BaseException) -> bool:
    """Whether the connection to Dagster's storage was lost, or could not be opened.

    A library may wrap the error of SQLAlchemy, and a rollback may fail on the same connection.
    """
    return any(map(_is_of_connection, _chain(error)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):  # a chain may be a ring
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_of_connection(error: BaseException) -> bool:
    """Whether an error is that of a connection.

    The class is not enough: Postgres reports also a row that is too large for an index as an
    `OperationalError`. An error without a statement comes from opening a connection or a commit.
    """
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        return True
    if isinstance(error, exc.OperationalError | exc.InterfaceError):
        return error.statement is None
    return isinstance(error, exc.TimeoutError)
