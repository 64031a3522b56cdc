"""External work of a run counts as finished only when each object confirms it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg
import pytest

from dagster_rebalance import (
    ExternalJobs,
    ExternalWork,
    KafkaBatch,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.runs.canceller import at_once
from dagster_rebalance.orchestration.runs.external_jobs import FRESH_S, WorkStopper, stopping
from tests.orchestration.parts import kafka_in_memory

if TYPE_CHECKING:
    from collections.abc import Callable


class Jobs(ExternalWork):
    def __init__(self, answer: Callable[[], object] = lambda: None) -> None:
        self.asked: list[str] = []
        self.answer = answer

    def stop(self, run_id: str) -> None:
        self.asked.append(run_id)
        self.answer()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_all_external_work_is_stopped() -> None:
    first, second = Jobs(), Jobs()
    WorkStopper([first, second], start=at_once)("run-1")
    assert first.asked == second.asked == ["run-1"]


def test_error_of_stop_is_raised_and_next_call_retries() -> None:
    def fail() -> NoReturn:
        msg = "the cluster is away"
        raise OSError(msg)

    jobs = Jobs(fail)
    stopper = WorkStopper([jobs], start=at_once)
    with pytest.raises(OSError, match="the cluster is away"):
        stopper("run-1")
    jobs.answer = lambda: None
    stopper("run-1")
    assert jobs.asked == ["run-1"] * 2


def test_slow_stop_times_out_and_is_not_called_twice() -> None:
    go_on, threads = threading.Event(), []
    jobs = Jobs(lambda: go_on.wait(120))

    def start(_name: str, work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()

    stopper = WorkStopper([jobs], wait_s=0.01, start=start)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="run run-1 is not stopped yet: Jobs did not answer"):
            stopper("run-1")
    go_on.set()
    for thread in threads:
        thread.join()
    stopper("run-1")  # the answer of the other call counts
    assert jobs.asked == ["run-1"]


def test_confirmation_counts_once_and_expires() -> None:
    """A streaming run begins more work under the same id."""
    clock, jobs = Clock(), Jobs()
    started: list[Callable[[], None]] = []
    stopper = WorkStopper(
        [jobs], wait_s=0.0, start=lambda _name, work: started.append(work), clock=clock
    )
    with pytest.raises(TimeoutError):
        stopper("run-1")
    started.pop()()
    stopper("run-1")
    with pytest.raises(TimeoutError):
        stopper("run-1")
    started.pop()()
    clock.now = FRESH_S + 1
    with pytest.raises(TimeoutError):
        stopper("run-1")
    assert len(started) == 1


def test_confirmation_of_earlier_call_is_ignored() -> None:
    clock, jobs = Clock(), Jobs()
    started: list[Callable[[], None]] = []
    stopper = WorkStopper(
        [jobs], wait_s=0.0, start=lambda _name, work: started.append(work), clock=clock
    )
    with pytest.raises(TimeoutError):
        stopper("run-1", since=0.0)
    started.pop()()
    clock.now = 1.0
    with pytest.raises(TimeoutError):
        stopper("run-1", since=1.0)
    started.pop()()
    stopper("run-1", since=1.0)
    assert jobs.asked == ["run-1"] * 2


def test_confirmation_wakes_the_caller() -> None:
    go_on = threading.Event()
    jobs = Jobs(lambda: go_on.wait(120))
    threading.Timer(0.01, go_on.set).start()
    WorkStopper([jobs], wait_s=30)("run-1")
    assert jobs.asked == ["run-1"]


class Listed(ExternalJobs):
    look_s = 0.0

    def __init__(self, *jobs: str, looks: int) -> None:
        self.jobs, self.looks = jobs, looks
        self.cancelled: list[str] = []

    def active(self, run_id: str) -> list[str]:
        self.looks -= 1
        return [job for job in self.jobs if job.startswith(run_id)] if self.looks > 0 else []

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)


def test_stop_waits_until_no_job_is_listed() -> None:
    jobs = Listed("run-1/a", "run-2/b", looks=3)
    WorkStopper([jobs], start=at_once)("run-1")
    assert jobs.cancelled == ["run-1/a"] * 2


def test_stop_of_jobs_that_do_not_end_times_out() -> None:
    jobs = Listed("run-1/a", looks=1_000_000)
    jobs.limit_s = 0.0
    with pytest.raises(TimeoutError, match="1 external jobs of run run-1 are still active"):
        jobs.stop("run-1")
    assert jobs.cancelled == []


class Spark:
    def __init__(self) -> None:
        self.stopped: list[str] = []

    def stop_abandoned_work(self, run_id: str) -> None:
        self.stopped.append(run_id)


def test_spark_jobs_are_stopped_even_if_other_work_continues() -> None:
    def fail() -> NoReturn:
        raise OSError

    spark: Any = Spark()
    with pytest.raises(OSError):  # noqa: PT011 - of any kind
        stopping(spark, WorkStopper([Jobs(fail)], start=at_once))("run-1")  # type: ignore[misc]
    assert spark.stopped == ["run-1"]


def test_stopping_without_external_work_is_none() -> None:
    spark: Any = Spark()
    assert stopping(None, None) is None
    stopping(spark, None)("run-1")  # type: ignore[misc]
    assert spark.stopped == ["run-1"]


@dg.asset
def orders(kafka_batch: KafkaBatch) -> None:
    """Works."""


@pytest.mark.parametrize("build", [build_kafka_batch_defs, build_kafka_stream_defs])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([Jobs], "has Jobs, which is not an object with a method stop"),
        ([Jobs(), "databricks"], "has str, which is not an object with a method stop"),
        (Jobs(), "is a Jobs: give a list of them"),
    ],
)
def test_object_without_stop_is_refused(
    build: Callable[..., dg.Definitions],
    given: Any,  # noqa: ANN401 - any value of a user
    says: str,
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        build(kafka=kafka_in_memory(), assets=[orders], external_work=given)
