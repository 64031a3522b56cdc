"""Dagster Pipes: the extras of a batch, and interrupts, in real runs with a group in memory."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import dagster as dg
import pytest
from confluent_kafka import Message

from dagster_rebalance import ExternalWork, KafkaBatch, build_kafka_batch_defs
from dagster_rebalance.core.batches.pipes_payload import (
    EXTRAS_KEY,
    SentBatch,
    end_message,
    position_messages,
)
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.runs.signals import Interruptions
from dagster_rebalance.orchestration.storage.run_tags import (
    RunEvent,
    run_config,
    run_events_of,
    run_tags,
)
from tests.orchestration.parts import GROUPS, batch_request, claimed, kafka_in_memory, span, tp
from tests.orchestration.streaming.stage import QUICK, Stage, leave, then_leave

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "correct horse"  # noqa: S105 - it must be found nowhere


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_rebalance.orchestration.streaming.stream_run._WAIT_S", 0.01)


def batch_of(**kafka: Any) -> KafkaBatch:  # noqa: ANN401 - settings of all kinds
    resource = KafkaConsumerResource(
        bootstrap_servers="broker:9093",
        group_id="etl",
        topics=["orders"],
        security_protocol="SASL_SSL",
        sasl_mechanism="PLAIN",
        sasl_username="etl",
        sasl_password=SECRET,
        **kafka,
    )
    return KafkaBatch(kafka=resource, batch_id="b-1", ranges=["orders:0:5:9"])


def test_extras_have_no_login_and_no_address() -> None:
    extras = batch_of(client_config={"isolation.level": "read_uncommitted"}).pipes_extras()
    sent = SentBatch.from_extras(extras)
    assert sent == SentBatch("b-1", "etl", (span(0, 5, 9),), "read_uncommitted")
    for text in (SECRET, "broker", "SASL"):
        assert text not in str(extras)
    assert SentBatch.from_extras(batch_of().pipes_extras()).isolation_level == "read_committed"


def test_further_extras_are_added() -> None:
    more = {"table": "orders", "columns": ["a", "b"], "secret_scope_name": "kafka"}
    extras = batch_of().pipes_extras(more)
    assert {name: extras[name] for name in more} == more
    assert EXTRAS_KEY in extras


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"sasl.password": "x"}, "sasl.password"),
        ({"kafka": {"sasl.jaas.config": "x"}}, "kafka.sasl.jaas.config"),
        ({"kafka": {"url": f"sasl://etl:{SECRET}@broker"}}, "kafka.url"),
        ({"arguments": ["--login", SECRET]}, "arguments.1"),
    ],
)
def test_secret_among_extras_is_refused_and_not_shown(more: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match="is a secret") as refused:
        batch_of().pipes_extras(more)
    assert repr(name) in str(refused.value)
    assert SECRET not in str(refused.value)


def test_extra_with_name_of_the_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has a name that the batch uses"):
        batch_of().pipes_extras({EXTRAS_KEY: {}})


class Done(NamedTuple):
    """The result of a client."""

    messages: list[Any]

    def get_custom_messages(self) -> list[Any]:
        return self.messages


def job_with(*messages: object) -> Callable[..., Done]:
    """Return the method `run` of a client whose job reports messages."""

    def run(*, extras: dict[str, Any], task: str) -> Done:
        assert SentBatch.from_extras(extras).takes_letters
        assert (extras["table"], task) == ("orders", "etl")
        return Done([*messages])

    return run


def test_letters_of_a_job_are_stored_by_the_run() -> None:
    messages = [Message(topic="orders", partition=0, offset=at, value=b"x") for at in range(5, 9)]
    batch = KafkaBatch.for_testing([span(0, 5, 9)], messages=messages)
    run = partial(batch.run_pipes, extras={"table": "orders"}, task="etl")
    with pytest.raises(IllegalStateError, match="are not complete"):
        run(job_with())
    run(job_with(*position_messages("a", [("orders", 0, 6, "late")]), end_message("a", 1)))
    assert [(letter.key, letter.reason) for letter in batch.letters] == [("orders-0-6", "late")]
    assert batch.metadata()["set_aside"] == 1
    sent = [*position_messages("a", [("orders", 0, 9, "late")]), end_message("a", 1)]
    with pytest.raises(IllegalStateError, match="offset 9 is not in batch"):
        run(job_with(*sent))
    assert not SentBatch.from_extras(batch.pipes_extras()).takes_letters


def test_job_sets_nothing_aside_without_a_topic_for_it() -> None:
    with pytest.raises(ConfigurationError, match="has no dead_letter_topic"):
        batch_of().run_pipes(job_with())


# A run for each batch


class Polite:
    """A Pipes client that suppresses interrupts, as `PipesDatabricksClient.run` of 0.29."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def run(self, extras: dict[str, Any]) -> None:
        _ = extras
        with suppress(dg.DagsterExecutionInterruptedError):
            os.kill(os.getpid(), self.number)
            threading.Event().wait(120)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_client_that_suppresses_an_interrupt_does_not_succeed(
    instance: dg.DagsterInstance, batch_id: str, number: signal.Signals
) -> None:
    kafka = kafka_in_memory()
    GROUPS[kafka.group_id].committed[tp(0)] = claimed(0, 10, batch_id)
    returned: list[str] = []

    @dg.asset
    def orders(kafka_batch: KafkaBatch) -> None:
        for _ in range(2):  # a second client must not hide the signal to the first one
            Polite(number).run(kafka_batch.pipes_extras())
        returned.append("yes")

    job = build_kafka_batch_defs(kafka=kafka, assets=[orders]).resolve_job_def("kafka_batches")
    with pytest.raises(dg.DagsterExecutionInterruptedError, match="its output does not count"):
        job.execute_in_process(
            instance=instance,
            tags=run_tags(batch_request(batch_id), kafka.group_id),
            run_config=run_config(batch_request(batch_id), "kafka_batch"),
        )
    assert returned == ["yes"]
    assert not isinstance(signal.getsignal(number), partial)
    (run,) = instance.get_runs(limit=1)
    assert run.status in {dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.FAILURE}
    assert RunEvent.FINISHED in run_events_of(instance, run.run_id)


def test_signals_are_recorded_once_and_passed_on() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        noted = Interruptions()
        noted.watch()
        handler = signal.getsignal(signal.SIGTERM)
        noted.watch()
        assert signal.getsignal(signal.SIGTERM) is handler
        assert isinstance(handler, partial)
        noted.check("run-1")
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert heard == [signal.SIGTERM]
    with pytest.raises(dg.DagsterExecutionInterruptedError, match="run run-1"):
        noted.check("run-1")


def test_thread_sets_no_handlers() -> None:
    noted = Interruptions()
    thread = threading.Thread(target=noted.watch)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


# Streaming runs


class Jobs(ExternalWork):
    def __init__(self, answer: Callable[[], object] = lambda: None) -> None:
        self.active: list[str] = []
        self.asked: list[str] = []
        self.answer = answer

    def stop(self, run_id: str) -> None:
        self.asked.append(run_id)
        self.answer()
        self.active.clear()


def test_batch_with_suppressed_interrupt_is_repeated(
    instance: dg.DagsterInstance,
) -> None:
    jobs = Jobs()

    def body(stage: Stage, batch: KafkaBatch) -> None:
        assert batch.pipes_extras()
        if len(stage.batches) > 1:
            assert not jobs.active, "the next attempt has begun beside the first one"
            leave()
            return
        jobs.active.append(batch.batch_id)
        with suppress(dg.DagsterExecutionInterruptedError):
            stage.lose_partitions()

    stage = Stage(instance, body, external_work=[jobs])
    run_id = stage.run()
    assert stage.batches == [(span(0, 0, 3),)] * 2
    assert stage.attempts == [1, 1]
    assert stage.committed() == 3
    assert jobs.asked == [run_id], "a batch that succeeded has nothing left"
    shown = {said.get("batch") for said in stage.shown(dg.AssetKey("orders"))}
    assert shown & set(stage.ids) == {stage.ids[1]}, "a cancelled batch has no materialization"


def test_client_that_cannot_end_its_job_is_no_failed_attempt(
    instance: dg.DagsterInstance,
) -> None:
    """`PipesSubprocessClient` raises if its process does not end in time."""

    def body(stage: Stage, _batch: KafkaBatch) -> None:
        try:
            stage.lose_partitions()
        except dg.DagsterExecutionInterruptedError:
            msg = "the process did not end"
            raise TimeoutError(msg) from None

    stage = Stage(instance, then_leave(body))
    stage.run()
    assert stage.attempts == [1, 1]
    assert stage.committed() == 3


def test_next_attempt_waits_for_end_of_first_job(
    instance: dg.DagsterInstance,
) -> None:
    refusals = [OSError("the cluster is away")] * 3

    def answer() -> None:
        if refusals:
            raise refusals.pop()

    jobs = Jobs(answer)

    def body(stage: Stage, batch: KafkaBatch) -> None:
        if len(stage.batches) > 1:
            assert not jobs.active, "the next attempt has begun beside the first one"
            leave()
            return
        jobs.active.append(batch.batch_id)
        msg = "the status of the job could not be read"
        raise OSError(msg)

    stage = Stage(instance, body, external_work=[jobs], **QUICK)
    run_id = stage.run()
    assert jobs.asked == [run_id] * 4
    assert stage.committed() == 3
    notes = [entry.user_message for entry in instance.all_logs(run_id)]
    assert any(
        "has not ended, so the batch is not finished: the cluster is away" in n for n in notes
    )


def test_streaming_run_stops_jobs_of_other_runs(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    class Ledger(RunLedger):
        def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - as the real one
            super().__init__(*args, **settings)
            given.append(settings["stop_work"])

    monkeypatch.setattr("dagster_rebalance.orchestration.streaming.stream_run.RunLedger", Ledger)
    jobs = Jobs()
    stage = Stage(instance, lambda *_: leave(), external_work=[jobs])
    stage.run()
    (stop_work,) = given
    stop_work("another run")
    assert jobs.asked == ["another run"]


def test_run_that_ends_before_its_job_fails(instance: dg.DagsterInstance) -> None:
    def refuse() -> NoReturn:
        leave()
        msg = "the cluster is away"
        raise OSError(msg)

    def body(_stage: Stage, _batch: KafkaBatch) -> NoReturn:
        msg = "the status of the job could not be read"
        raise OSError(msg)

    stage = Stage(
        instance,
        body,
        external_work=[Jobs(refuse)],
        shutdown_timeout_s=0.2,
        hold_limit_s=1.0,
        hold_commit_slice_s=0.1,
    )
    with pytest.raises(IllegalStateError, match="had not ended when its run had to end"):
        stage.run()
    (run,) = instance.get_runs(limit=1)
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert run_events_of(instance, run.run_id) >= {RunEvent.TAKEN_BACK, RunEvent.FINISHED}
    assert len(stage.batches) == 1
