"""Key-values of Dagster's run storage.

Dagster keeps them for its daemons: a write touches one value, a query reads many, and no page shows
them. They cannot be deleted, so records of one kind share a fixed number of keys, and each value
names the record that it belongs to. Dagster+ offers no key-values to user code.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from sqlalchemy import exc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import dagster as dg

SLOTS = 100_000
_MAX_CAUSES = 10


def slot_key(kind: str, name: str) -> str:
    """Return the key for a record of this kind and name, which several records may share."""
    return f"dagster_rebalance/{kind}/{zlib.crc32(name.encode()) % SLOTS}"


def owned(stored: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, str]:
    """Return `{owner: text}` for each `{owner: key}` whose value is `<owner> <text>`."""
    return {
        owner: text
        for owner, key in keys.items()
        for found, _, text in [stored.get(key, "").partition(" ")]
        if found == owner
    }


class KeyValues:
    """The key-values of an instance."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._storage = instance.run_storage

    def fetch(self, keys: Iterable[str]) -> Mapping[str, str] | None:
        """Return the stored values; None if Dagster has no key-values."""
        wanted = set(keys)
        stored: object = self._storage.get_cursor_values(wanted) if wanted else {}
        return stored if isinstance(stored, dict) else None

    def read(self, keys: Iterable[str]) -> Mapping[str, str]:
        """Return the stored values; empty if Dagster has no key-values."""
        return self.fetch(keys) or {}

    def read_owned(self, keys: Mapping[str, str]) -> dict[str, str]:
        """Return `owned` values, given `{owner: key}`."""
        return owned(self.read(keys.values()), keys)

    def set(self, key: str, value: str) -> bool:
        """Write one value. Return False if Dagster has no key-values."""
        # The storage of Dagster+ returns an error instead of raising it.
        error: object = self._storage.set_cursor_values({key: value})
        return error is None

    def write(self, values: Mapping[str, str]) -> None:
        """Write several values, in two statements if possible.

        On SQLite, Dagster drops new keys from a write that also has existing keys.
        """
        known = self.read(values).keys()
        for is_known in (True, False):
            part = {k: value for k, value in values.items() if (k in known) is is_known}
            if part:
                self._storage.set_cursor_values(part)
        stored = self.read(values)
        for key, value in values.items():
            if stored.get(key) != value:
                self._storage.set_cursor_values({key: value})


def is_lost_connection(error: BaseException) -> bool:
    """Whether the connection to Dagster's storage was lost, or could not be opened.

    A library may wrap the error of SQLAlchemy, and a rollback may fail on the same connection.
    """
    return any(map(_is_connection_error, _causes(error)))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):  # a chain may be a ring
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_connection_error(error: BaseException) -> bool:
    """Whether SQLAlchemy raised an error for a connection.

    The class is not enough: Postgres also reports a row that is too large for an index as an
    `OperationalError`. An error without a statement is from opening a connection or from a commit.
    """
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        return True
    if isinstance(error, exc.OperationalError | exc.InterfaceError):
        return error.statement is None
    return isinstance(error, exc.TimeoutError)
