"""Real instances for all tests of the Dagster side.

Making one takes seconds, so tests share them and keep apart by unique groups and batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.orchestration.runs import heartbeat
from dagster_rebalance.orchestration.streaming import stream_run
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.parts import batch_request, make_run, new_on_postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.postgres import Postgres


@pytest.fixture(scope="session", autouse=True)
def _patient_ends() -> Iterator[None]:
    """Let the end of a run wait for its last event on a busy machine: tests read it."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (heartbeat, stream_run):
            patched.setattr(module, "LAST_EVENT_LIMIT_S", 120.0)
        yield


@pytest.fixture(scope="session")
def on_sqlite() -> Iterator[dg.DagsterInstance]:
    """An instance on SQLite, without run retries, as Dagster has it by default."""
    with dg.instance_for_test() as made:
        yield made


@pytest.fixture
def instance(on_sqlite: dg.DagsterInstance) -> dg.DagsterInstance:
    """The instance of a test, unless its module wants it on each kind of storage."""
    return on_sqlite


@pytest.fixture(scope="session")
def on_postgres(postgres: Postgres) -> Iterator[dg.DagsterInstance]:
    with new_on_postgres(postgres) as made:
        yield made


@pytest.fixture(scope="session")
def retrying_instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test(overrides={"run_retries": {"enabled": True}}) as made:
        yield made


@pytest.fixture
def batch_id() -> str:
    return unique_name("b")


@pytest.fixture
def run(instance: dg.DagsterInstance, batch_id: str) -> dg.DagsterRun:
    """A started run of the batch."""
    return make_run(instance, batch_request(batch_id), dg.DagsterRunStatus.STARTED)
