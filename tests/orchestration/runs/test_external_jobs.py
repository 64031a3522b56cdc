"""Work that a run has begun elsewhere: asked for in threads, and over only when it says so."""

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
    """Notes who was asked, and answers as it is told."""

    def __init__(self, answer: Callable[[], object] = lambda: None) -> None:
        self.asked: list[str] = []
        self.answer = answer

    def stop(self, run_id: str) -> None:
        """Answer."""
        self.asked.append(run_id)
        self.answer()


class Clock:
    """Stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def test_all_that_is_named_is_asked() -> None:
    """A run may have begun jobs in several places."""
    first, second = Jobs(), Jobs()
    WorkStopper([first, second], start=at_once)("run-1")
    assert first.asked == second.asked == ["run-1"]


def test_an_error_means_that_the_work_may_go_on() -> None:
    """It reaches whoever needs the answer, and the next call asks again."""

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


def test_nobody_waits_for_an_answer_that_takes_long_and_it_is_asked_once() -> None:
    """A tick has a minute for everything; what is under way is not begun a second time."""
    go_on, threads = threading.Event(), []
    jobs = Jobs(lambda: go_on.wait(30))

    def start(_name: str, work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[-1].start()

    stopper = WorkStopper([jobs], wait_s=0.01, start=start)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="run run-1 is not over yet: Jobs did not answer"):
            stopper("run-1")
    go_on.set()
    for thread in threads:
        thread.join()
    stopper("run-1")  # what was answered meanwhile counts
    assert jobs.asked == ["run-1"]


def test_an_answer_counts_once_and_not_for_ever() -> None:
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


def test_an_answer_to_a_question_that_was_asked_before_says_nothing() -> None:
    """A streaming run has begun more since then, and a call that hung answers late."""
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


def test_an_answer_wakes_whoever_waits() -> None:
    """In a thread of its own, as in a code server."""
    go_on = threading.Event()
    jobs = Jobs(lambda: go_on.wait(30))
    threading.Timer(0.01, go_on.set).start()
    WorkStopper([jobs], wait_s=30)("run-1")
    assert jobs.asked == ["run-1"]


class Listed(ExternalJobs):
    """Jobs that end some looks after they were cancelled."""

    look_s = 0.0

    def __init__(self, *jobs: str, looks: int) -> None:
        self.jobs, self.looks = jobs, looks
        self.cancelled: list[str] = []

    def active(self, run_id: str) -> list[str]:
        """Those of one run, until they have ended."""
        self.looks -= 1
        return [job for job in self.jobs if job.startswith(run_id)] if self.looks > 0 else []

    def cancel(self, job: str) -> None:
        """Note it."""
        self.cancelled.append(job)


def test_jobs_are_over_when_none_is_listed_any_more() -> None:
    """A platform takes a cancel, and works on for a while."""
    jobs = Listed("run-1/a", "run-2/b", looks=3)
    WorkStopper([jobs], start=at_once)("run-1")
    assert jobs.cancelled == ["run-1/a"] * 2


def test_jobs_that_do_not_end_are_not_over() -> None:
    """The batch must wait for them."""
    jobs = Listed("run-1/a", looks=1_000_000)
    jobs.limit_s = 0.0
    with pytest.raises(TimeoutError, match="1 external jobs of run run-1 are still active"):
        jobs.stop("run-1")
    assert jobs.cancelled == []


class Spark:
    """Plays the Spark resource."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def stop_abandoned_work(self, run_id: str) -> None:
        """Note it."""
        self.stopped.append(run_id)


def test_spark_work_is_stopped_also_while_the_other_work_goes_on() -> None:
    """Neither keeps the other at work; both must be over."""

    def fail() -> NoReturn:
        raise OSError

    spark: Any = Spark()
    with pytest.raises(OSError):  # noqa: PT011 - of any kind
        stopping(spark, WorkStopper([Jobs(fail)], start=at_once))("run-1")  # type: ignore[misc]
    assert spark.stopped == ["run-1"]


def test_without_work_elsewhere_nothing_is_asked() -> None:
    """A run that works in its own process ends with it."""
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
        ([Jobs], "has Jobs, which is no object with a method stop"),
        ([Jobs(), "databricks"], "has str, which is no object with a method stop"),
        (Jobs(), "is a Jobs: give a list of them"),
    ],
)
def test_what_cannot_stop_is_refused_at_once(
    build: Callable[..., dg.Definitions],
    given: Any,  # noqa: ANN401 - what a user may give
    says: str,
) -> None:
    """Else it is found out when a run is dead and its work goes on."""
    with pytest.raises(ConfigurationError, match=says):
        build(kafka=kafka_in_memory(), assets=[orders], external_work=given)
