"""A real Postgres for tests, in a temporary folder and without `fsync`.

It needs the programs of Postgres (Debian: `postgresql`) and, for Dagster, `dagster-postgres`.
Postgres refuses to run as root: the user `nobody` runs it instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.local.host import free_port
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

_START_LIMIT_S = 120.0
_DEBIAN = Path("/usr/lib/postgresql")
_CLIENT = ("-h", "127.0.0.1", "-U", "dagster", "-p")
_SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "timezone=UTC")


class Postgres:
    """A Postgres server on a port of 127.0.0.1, as a context manager.

    Example:
        ```python
        with Postgres() as postgres:
            settings = postgres.dagster_settings("shop")
            with dg.instance_for_test(overrides=settings) as instance:
                ...
        ```
    """

    def __init__(self) -> None:
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="dagster_rebalance_postgres_"))
        self._server: ChildProcess | None = None

    @property
    def server(self) -> ChildProcess:
        """The running server, to suspend or kill it.

        Raises:
            DagsterRebalanceError: The server is not started.
        """
        if self._server is None:
            msg = "this Postgres is not started: use it as a context manager"
            raise DagsterRebalanceError(msg)
        return self._server

    def create_database(self, name: str) -> None:
        """Create an empty database."""
        _run("createdb", *_CLIENT, str(self.port), name)

    def url(self, database: str, *, port: int | None = None) -> str:
        """Return the SQLAlchemy URL of a database, optionally through a proxy on another port."""
        # SQLAlchemy 2.1 selects another driver if the scheme is only `postgresql`.
        return f"postgresql+psycopg2://dagster@127.0.0.1:{port or self.port}/{database}"

    def dagster_settings(self, database: str, *, port: int | None = None) -> dict[str, Any]:
        """Return the `dagster.yaml` of an instance with its storage in an existing database."""
        return {"storage": {"postgres": {"postgres_url": self.url(database, port=port)}}}

    def lock_tables(self, database: str, tables: Iterable[str]) -> Callable[[], None]:
        """Block writes to tables, but not reads, until the returned function is called."""
        command = [*_as_nobody(), _program("psql"), "-X", "-q", *_CLIENT, str(self.port), database]
        psql = subprocess.Popen(
            command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        def release() -> None:
            psql.communicate("COMMIT;\n")

        if psql.stdin is not None and psql.stdout is not None:
            psql.stdin.write(
                f"BEGIN; LOCK TABLE {', '.join(tables)} IN EXCLUSIVE MODE;\n\\echo locked\n"
            )
            psql.stdin.flush()
            psql.stdout.readline()
        return release

    def __enter__(self) -> Self:
        """Create the server's files, start it, and wait until it answers."""
        data = ["-D", str(self._folder / "data")]
        if os.geteuid() == 0:
            shutil.chown(self._folder, "nobody")
        created = ["-U", "dagster", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"]
        _run("initdb", *data, *created)
        settings = [part for setting in _SETTINGS for part in ("-c", setting)]
        listens = ["-p", str(self.port), "-k", str(self._folder), "-h", "127.0.0.1"]
        self._server = ChildProcess(
            "Postgres",
            [*_as_nobody(), _program("postgres"), *data, *listens, *settings],
            log=self._folder / "server.log",
            cwd=self._folder,
        )
        self._server.wait_until_ready(self._answers, timeout_s=_START_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop_at_once()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        with suppress(DagsterRebalanceError):
            _run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port))
            return True
        return False


def _program(name: str) -> str:
    """Return the path of a Postgres program; Debian keeps most of them out of PATH."""
    program = shutil.which(name) or next(
        (str(path) for path in sorted(_DEBIAN.glob(f"*/bin/{name}"), reverse=True)), None
    )
    if program is None:
        msg = (
            f"Postgres' program {name} was not found: install Postgres (Debian: apt-get install "
            "postgresql)"
        )
        raise DagsterRebalanceError(msg)
    return program


def _as_nobody() -> list[str]:
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]


def _run(name: str, *arguments: str) -> None:
    command = [*_as_nobody(), _program(name), *arguments]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode != 0:
        msg = f"{name} of Postgres failed: {done.stdout}{done.stderr}".strip()
        raise DagsterRebalanceError(msg)
