"""The sensor: results of ticks, and previews without side effects.

The member is a stand-in; test_members has real ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.definitions import build_kafka_batch_defs
from dagster_rebalance.orchestration.member.mailbox import Mail
from dagster_rebalance.orchestration.per_batch import batch_sensor as sensor_module
from dagster_rebalance.orchestration.per_batch.batch_sensor import build_kafka_batch_sensor
from dagster_rebalance.orchestration.per_batch.hosted_members import Members
from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource
from dagster_rebalance.orchestration.runs.ticks import MOST_REQUESTS_PER_TICK, is_real_tick
from dagster_rebalance.orchestration.storage.run_tags import run_config, run_tags
from tests.orchestration.parts import batch_request, kafka_in_memory, nothing, span

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dagster_rebalance.core.model.run_snapshot import BatchRequest
    from tests.orchestration.parts import KafkaInMemory


@dg.asset(required_resource_keys={"kafka_batch"})
def work() -> None:
    """Never executed."""


class StandIn:
    is_over = is_lost = False

    def __init__(self, *batch_requests: BatchRequest) -> None:
        self.mail = Mail(batch_requests, ("2 runs in flight", "lag 340"), "1 stopped")
        self.ticks = 0

    def tick(self, _patience_s: float = 0.0) -> tuple[Mail, list[str]]:
        self.ticks += 1
        return self.mail, ["12:00:00 assigned orders-0"]


class Sensor:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:  # noqa: ANN401 - settings of all kinds
        self.kafka: KafkaInMemory = kafka_in_memory(**settings)
        # Settings that cannot work reach a tick only through environment variables: the loaded
        # definitions have others.
        self.defs = build_kafka_batch_defs(kafka=kafka_in_memory(), assets=[work], name="orders")
        self.members = Members()
        self.instance: dg.DagsterInstance | None = None
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(sensor_module, "MEMBERS", self.members)

    def hosts(self, member: StandIn) -> None:
        make: Callable[..., object] = lambda *_, **__: member  # noqa: E731 - a stand-in for `_host`
        self.monkeypatch.setattr(sensor_module, "_host", make)

    def tick(self, home: Path | None = None, *, real: bool = True) -> Any:  # noqa: ANN401 - Dagster's class is private
        """Evaluate the sensor as the daemon or as a preview does.

        Returns what Dagster makes of it.
        """
        self.monkeypatch.setattr(sensor_module, "is_real_tick", lambda _context: real)
        made = self.defs.resolve_sensor_def("orders_sensor")
        storage = (
            dg.instance_for_test(temp_dir=str(home))
            if home
            else nullcontext(self.instance)
            if self.instance
            else dg.DagsterInstance.ephemeral()
        )
        with storage as instance:
            context = dg.build_sensor_context(
                instance=instance,
                definitions=self.defs,
                resources={"kafka": self.kafka},
                sensor_name="orders_sensor",
            )
            with context:
                return made.evaluate_tick(context)


@pytest.fixture
def sensor(monkeypatch: pytest.MonkeyPatch) -> Sensor:
    return Sensor(monkeypatch)


@pytest.mark.parametrize("batch_requests", [(), (batch_request("b1"),)])
def test_cursor_is_the_headline_of_the_member(
    sensor: Sensor, batch_requests: tuple[BatchRequest, ...]
) -> None:
    """The list of ticks shows cursors, and no reasons."""
    sensor.hosts(StandIn(*batch_requests))
    assert sensor.tick().cursor == "1 stopped"


@pytest.mark.parametrize(
    ("log_key", "real"),
    [
        (["repo", "sensor", "1234"], True),
        (["repo", "sensor", "20261121_051300"], False),
        ([], False),
        (None, False),
    ],
)
def test_tick_of_the_daemon_is_distinguished_from_a_preview(
    log_key: list[str] | None, *, real: bool
) -> None:
    context: Any = SimpleNamespace(log_key=log_key)
    assert is_real_tick(context) is real


def test_preview_starts_nothing(sensor: Sensor) -> None:
    result = sensor.tick(real=False)
    assert not result.run_requests
    assert "nothing is started" in str(result.skip_message)
    assert sensor.members._members == {}


def test_preview_shows_the_requests_without_a_tick(sensor: Sensor) -> None:
    member = StandIn(batch_request("b-1", span(0), span(1)))
    sensor.hosts(member)
    sensor.tick()
    result = sensor.tick(real=False)
    assert not result.run_requests
    run_key = member.mail.batch_requests[0].run_key
    what = f"would request {run_key} for orders-0 [0, 10), orders-1 [0, 10)"
    assert what in str(result.skip_message)
    assert "lag 340" in str(result.skip_message)
    assert member.ticks == 1


def test_batch_request_becomes_a_run_request(sensor: Sensor) -> None:
    wanted = batch_request("b-1", span(0), span(1), attempt=2)
    sensor.hosts(StandIn(wanted))
    result = sensor.tick()
    (request,) = result.run_requests
    assert request.run_key == wanted.run_key
    assert request.run_key.endswith(".2")
    assert request.run_config == run_config(wanted, "kafka_batch")
    assert run_tags(wanted, sensor.kafka.group_id).items() <= request.tags.items()


def test_batch_is_requested_again_by_the_next_tick(sensor: Sensor) -> None:
    """A tick that timed out drops its requests; Dagster ignores a known key."""
    sensor.hosts(StandIn(batch_request("b-1")))
    keys = [[request.run_key for request in sensor.tick().run_requests] for _ in range(2)]
    assert keys[0] == keys[1]


def test_tick_requests_a_limited_number_of_runs(sensor: Sensor) -> None:
    """Each request takes the daemon a quarter of a second."""
    sensor.hosts(StandIn(*(batch_request(f"b-{number}") for number in range(50))))
    assert len(sensor.tick().run_requests) == MOST_REQUESTS_PER_TICK


def test_skip_reason_is_the_summary_of_the_member(sensor: Sensor) -> None:
    sensor.hosts(StandIn())
    result = sensor.tick()
    assert not result.run_requests
    assert result.skip_message == "2 runs in flight; lag 340"


def test_tick_warns_of_a_temporary_storage(sensor: Sensor, tmp_path: Path) -> None:
    sensor.hosts(StandIn())
    home = tmp_path / ".tmp_dagster_home_x1"
    home.mkdir()
    said = sensor.tick(home).skip_message
    assert said.startswith("2 runs in flight; lag 340; DAGSTER_HOME is not set, so Dagster deletes")


def test_former_streaming_runs_of_the_location_are_asked_to_leave_once(
    sensor: Sensor, instance: dg.DagsterInstance
) -> None:
    """Their sensor went with its code."""
    sensor.hosts(StandIn())
    sensor.instance = instance
    group = sensor.kafka.group_id

    def live(**tags: str) -> str:
        made = instance.create_run_for_job(
            _default_executor,
            status=dg.DagsterRunStatus.STARTED,
            tags={f"dagster_rebalance/{name}": value for name, value in tags.items()},
        )
        return made.run_id

    ours = live(group=group, stream="unknown:kafka_stream_sensor")
    others = (
        live(group=group, stream="other:kafka_stream_sensor"),
        live(group=f"{group}-2", stream="unknown:kafka_stream_sensor"),
        live(group=group, batch="b-1"),
    )
    said = [sensor.tick().skip_message for _ in range(2)][1]
    assert f"; run {ours[:8]} of the earlier streaming form asked to leave" in said
    asked = [
        run_id
        for run_id in (ours, *others)
        for entry in instance.all_logs(run_id)
        if "dagster_rebalance [leave]" in entry.user_message + entry.message
    ]
    assert asked == [ours]


def test_lease_that_ends_between_two_ticks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sensor = Sensor(monkeypatch, lease_s=19.0)
    with pytest.raises(
        ConfigurationError,
        match=r"lease_s=19 .* must be at least 20 \(4 intervals of sensor orders_sensor\)",
    ):
        sensor.tick()
    assert sensor.members._members == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_records_per_range": 0}, "max_records_per_range=0"),
        ({"client_config": {"enable.auto.commit": "true"}}, "enable.auto.commit"),
        ({"client_config": {"max.poll.interval.ms": "1000"}}, "hold_limit_s=300"),
    ],
)
def test_settings_that_cannot_work_fail_the_first_tick(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    sensor = Sensor(monkeypatch, **settings)
    with pytest.raises(ConfigurationError, match=message):
        sensor.tick()
    assert sensor.members._members == {}


@dg.job(
    executor_def=dg.multiprocess_executor,
    resource_defs={"kafka_batch": dg.ResourceDefinition.none_resource()},
)
def _many_processes() -> None:
    nothing()


@dg.job(resource_defs={"kafka_batch": dg.ResourceDefinition.none_resource()})
def _default_executor() -> None:
    nothing()


def nothing_job(name: str, **settings: Any) -> dg.JobDefinition:  # noqa: ANN401 - settings of all kinds
    @dg.graph(name=name)
    def steps() -> None:
        nothing()

    given = {"resource_defs": {"kafka_batch": dg.ResourceDefinition.none_resource()}, **settings}
    return steps.to_job(executor_def=dg.in_process_executor, **given)


_UNSAID = dg.define_asset_job("unsaid", selection="*")


@pytest.mark.parametrize(
    "job", [_many_processes, _default_executor, _UNSAID], ids=lambda job: job.name
)
def test_job_with_a_process_for_each_step_is_refused(
    job: dg.JobDefinition | dg.UnresolvedAssetJobDefinition,
) -> None:
    """Between two steps no process would send a heartbeat."""
    with pytest.raises(
        ConfigurationError,
        match=f"the job {job.name} of sensor s .* executor_def=dg.in_process_executor",
    ):
        build_kafka_batch_sensor(name="s", job=job)


@dg.op
def _bare() -> None:
    """Takes no batch."""


@dg.job(
    executor_def=dg.in_process_executor,
    resource_defs={"kafka_batch": dg.ResourceDefinition.none_resource()},
)
def _half() -> None:
    nothing()
    _bare()


def test_job_with_a_step_without_the_batch_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^_bare of job _half does not take the resource 'kafka_batch'"
    ):
        build_kafka_batch_sensor(name="s", job=_half)


@pytest.mark.parametrize(
    "job",
    [
        dg.define_asset_job(
            "retried",
            selection="*",
            executor_def=dg.in_process_executor,
            op_retry_policy=dg.RetryPolicy(),
        ),
        nothing_job("retried", op_retry_policy=dg.RetryPolicy()),
    ],
    ids=["assets", "ops"],
)
def test_job_with_a_retry_policy_is_refused(
    job: dg.JobDefinition | dg.UnresolvedAssetJobDefinition,
) -> None:
    with pytest.raises(ConfigurationError, match=r"^job retried has a retry_policy"):
        build_kafka_batch_sensor(name="s", job=job)


def test_job_with_a_resource_configured_at_launch_is_refused() -> None:
    at_launch = dg.ResourceDefinition(str, config_schema={"day": str})
    job = nothing_job("waits", resource_defs={"kafka_batch": at_launch})
    with pytest.raises(ConfigurationError, match="the resource 'kafka_batch' of job waits is conf"):
        build_kafka_batch_sensor(name="s", job=job)


def test_job_that_runs_in_one_process_is_accepted() -> None:
    build_kafka_batch_sensor(
        name="s", job=_many_processes.with_executor_def(dg.in_process_executor)
    )


@pytest.mark.parametrize(
    ("settings", "is_local"),
    [
        ({}, True),
        ({"master": "local[2]"}, True),
        ({"spark_config": {"spark.master": "local[1]"}}, True),
        ({"master": "spark://cluster:7077"}, False),
        ({"spark_config": {"spark.master": "yarn"}}, False),
        ({"remote": "sc://server:15002"}, False),
    ],
)
def test_spark_is_local_by_its_master(settings: dict[str, Any], *, is_local: bool) -> None:
    assert KafkaSparkResource(**settings).is_local is is_local
