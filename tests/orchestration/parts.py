"""Helpers of the tests of the Dagster side.

They build a group in memory behind a real resource, and runs in any state in a real instance.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.claims import Claim, StoredPartition, encode
from dagster_rebalance.core.model.offsets import OffsetAndMetadata, OffsetRange, TopicPartition
from dagster_rebalance.core.model.run_snapshot import BatchRequest
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.storage.heartbeats import Heartbeats
from dagster_rebalance.orchestration.storage.run_tags import run_config, run_tags
from dagster_rebalance.testing.fake_group import FakeGroup, FakeMember
from dagster_rebalance.testing.fixtures import unique_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagster_rebalance.kafka.group_ports import GroupEvent
    from dagster_rebalance.testing.postgres import Postgres

EACH_STORAGE = ("on_sqlite", pytest.param("on_postgres", marks=pytest.mark.postgres))
"""Fixtures with an instance on each kind of storage, which differ in their code, their types and
their locks."""
GROUPS: dict[str, FakeGroup] = {}
"""The groups in memory, by id."""


class PatientMember(FakeMember):
    """A member whose polls take a moment, as those of a client, and leave time to other threads."""

    def poll(self, timeout_s: float) -> list[GroupEvent]:
        threading.Event().wait(0.005)
        return super().poll(timeout_s)


class KafkaInMemory(KafkaConsumerResource):
    def connect(self) -> RebalanceAwareConsumer:
        group = GROUPS[self.group_id]
        return RebalanceAwareConsumer(
            self.consumer_config(),
            hold_limit_s=self.hold_limit_s,
            fetch=False,
            member=PatientMember(group),
            cluster=group,
            clock=group.clock,
        )


def kafka_in_memory(partitions: int = 2, **settings: Any) -> KafkaInMemory:  # noqa: ANN401 - settings of all kinds
    group_id = unique_name("group")
    GROUPS[group_id] = FakeGroup({"orders": partitions})
    return KafkaInMemory(
        **{"bootstrap_servers": "memory:1", "group_id": group_id, "topics": ["orders"], **settings}
    )


@contextmanager
def new_on_postgres(postgres: Postgres) -> Iterator[dg.DagsterInstance]:
    name = unique_name("instance").replace("-", "_")
    postgres.create_database(name)
    with dg.instance_for_test(overrides=postgres.dagster_settings(name)) as made:
        yield made


LEAVES = [
    pytest.param(lambda: sys.exit(3), 3, id="exit"),
    pytest.param(lambda: sys.exit("nothing to do"), 1, id="exit with a text"),
    pytest.param(lambda: int("no number"), 1, id="error"),
    pytest.param(lambda: None, 0, id="return"),
]
"""How a process that a body has forked leaves that body, and its exit code."""


def fork_pools(number: int = 25) -> None:
    for _ in range(number):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, range(4)) == [0, 1, 2, 3]


def fork_and_leave(how: Callable[[], object]) -> int:
    """Fork a process that leaves its function in some way; return its exit code."""
    pid = os.fork()
    if pid == 0:
        how()
        return -1
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def tp(number: int) -> TopicPartition:
    return TopicPartition("orders", number)


def span(number: int, start: int = 0, until: int = 10) -> OffsetRange:
    return OffsetRange("orders", number, start, until)


def batch_request(batch_id: str, *ranges: OffsetRange, attempt: int = 1) -> BatchRequest:
    return BatchRequest(batch_id, attempt, ranges or (span(0),))


def claimed(offset: int, until: int, batch_id: str) -> OffsetAndMetadata:
    """What Kafka stores when one batch has claimed the offsets behind `offset`."""
    return encode(StoredPartition(offset, (Claim(until, batch_id),)))


@dg.op(required_resource_keys={"kafka_batch"})
def nothing() -> None:
    """Does nothing."""


def _any_batch(_context: dg.InitResourceContext) -> None:
    """Accept the config of a `KafkaBatch` without any check."""


@dg.job(resource_defs={"kafka_batch": dg.ResourceDefinition(_any_batch, config_schema=dict)})
def idle_job() -> None:
    nothing()


_ORIGIN = (
    "\n"
    '    {"__class__": "ExternalPipelineOrigin", "pipeline_name": "idle_job", '
    '"external_repository_origin":\n'
    '        {"__class__": "ExternalRepositoryOrigin", "repository_name": "r", '
    '"repository_location_origin":\n'
    '            {"__class__": "GrpcServerRepositoryLocationOrigin", "host": "127.0.0.1", '
    '"location_name": "l", "port": 1, "socket": null}}}\n'
)
"""Where a job lives, as Dagster stores it: without, it takes no run for queued."""


def make_run(
    instance: dg.DagsterInstance,
    wanted: BatchRequest,
    status: dg.DagsterRunStatus,
    *,
    group_id: str = "etl",
    tags: Mapping[str, str] | None = None,
    parent: dg.DagsterRun | None = None,
    location: str = "l",
) -> dg.DagsterRun:
    """Put a run that was asked for by an offer into the instance, in any state.

    With `parent`, the run is put there as Dagster puts a retry.
    """
    inherited = dict(parent.tags) if parent else {}
    origin: Any = dg.deserialize_value(
        _ORIGIN.replace('"location_name": "l"', f'"location_name": "{location}"')
    )
    run = instance.create_run_for_job(
        idle_job,
        status=status,
        tags={**run_tags(wanted, group_id), **inherited, **(tags or {})},
        run_config=run_config(wanted, "kafka_batch"),
        parent_run_id=parent.run_id if parent else None,
        root_run_id=(parent.root_run_id or parent.run_id) if parent else None,
        remote_job_origin=origin,
    )
    if status is dg.DagsterRunStatus.STARTED:  # a run that works has its start noted
        instance.report_dagster_event(
            dg.DagsterEvent(event_type_value="PIPELINE_START", job_name=run.job_name), run.run_id
        )
    return run


def give_sign(instance: dg.DagsterInstance, run: dg.DagsterRun, sign: str) -> None:
    record = instance.get_run_record_by_id(run.run_id)
    assert record is not None
    Heartbeats(instance).record(run, record.storage_id, sign)


def tags_of(instance: dg.DagsterInstance, run: dg.DagsterRun | str) -> Mapping[str, str]:
    now = instance.get_run_by_id(run if isinstance(run, str) else run.run_id)
    assert now is not None
    return now.tags


def status_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dg.DagsterRunStatus:
    now = instance.get_run_by_id(run.run_id)
    assert now is not None
    return now.status


def text_of(problem: pytest.ExceptionInfo[BaseException]) -> str:
    return f"{problem.value!s} {problem.value!r}"
