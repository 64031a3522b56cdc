"""Directives of operators: issue, storage, display, and effect on runs and members."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.core.model.claims import decode
from dagster_rebalance.core.model.directives import Action, Directive
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.operators.launchpad import (
    build_kafka_control_job,
    build_kafka_letters_job,
    build_kafka_rerun_job,
)
from dagster_rebalance.orchestration.operators.requests import (
    DirectiveRequest,
    groups_of,
    issue_directive,
)
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.checks import (
    STOPPED_CHECK,
    build_stopped_check,
)
from dagster_rebalance.orchestration.storage.dynamic_partitions import DirectiveStore
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.testing.fixtures import unique_name
from tests.orchestration.bench import SETTINGS, Bench
from tests.orchestration.parts import EACH_STORAGE, kafka_in_memory, tp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dagster_rebalance.core.model.claims import Claim
    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource


@pytest.fixture(params=EACH_STORAGE)
def instance(request: pytest.FixtureRequest) -> dg.DagsterInstance:
    found: dg.DagsterInstance = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def group_id(instance: dg.DagsterInstance) -> str:
    group_id = unique_name("group")
    Catalogue(instance, GroupAssets.of(group_id), NO_MEMBER).add_partitions([tp(0), tp(1), tp(2)])
    return group_id


def order(action: Action, partitions: str = "orders:0", reason: str = "away") -> Directive:
    return Directive(action, partitions, "ada", 1_700_000_000.0, reason)


def book_of(instance: dg.DagsterInstance, group_id: str) -> DirectiveStore:
    return DirectiveStore(instance, GroupAssets.of(group_id).directives_name)


def wanted(
    action: Action, *partitions: str, reason: str = "away", by: str = "ada"
) -> DirectiveRequest:
    return DirectiveRequest(action, partitions, by, reason)


# The book


def test_directives_are_read_in_the_order_of_their_issue(
    instance: dg.DagsterInstance, group_id: str
) -> None:
    book = book_of(instance, group_id)
    given = [
        order(Action.PAUSE, "orders"),
        order(Action.RESUME, "orders:1", reason=""),
        order(Action.STOP, "orders:2", reason='ünïcode ... "quotes"\n\x00\U0001f6d1' * 9),
    ]
    for one in given:
        book.add([one])
    assert book.read() == tuple(given)
    book.add([given[0]])
    book.tidy()
    assert book.read() == (given[1], given[2], given[0])


def test_longest_directive_fits(instance: dg.DagsterInstance) -> None:
    """Postgres takes no key of more than 2,704 bytes."""
    longest = Directive(
        Action.PAUSE, "o" * 249 + ":" + "0" * 20, "\U0001f6d1" * 60, 1.0, "\U0001f6d1" * 300
    )
    book = book_of(instance, "g" * 200)
    book.add([longest])
    assert book.read() == (longest,)


def test_superseded_directives_are_removed(instance: dg.DagsterInstance, group_id: str) -> None:
    book = book_of(instance, group_id)
    for number in range(5):
        book.add([order(Action.PAUSE, f"orders:{number}")])
    book.add([order(Action.RESUME, "*")])
    book.tidy()
    assert book.read() == (order(Action.RESUME, "*"),)


def test_unreadable_directive_is_an_error(instance: dg.DagsterInstance, group_id: str) -> None:
    name = GroupAssets.of(group_id).directives_name
    instance.add_dynamic_partitions(name, ['1 ["drain", "orders", "ada", 1.0, "why"]'])
    with pytest.raises(ValueError, match="cannot be read: a newer version may have written it"):
        DirectiveStore(instance, name).read()


def test_manual_check_reports_an_unreadable_directive(
    instance: dg.DagsterInstance,
) -> None:
    kafka = kafka_in_memory()
    group = GroupAssets.of(kafka.group_id)
    instance.add_dynamic_partitions(
        group.directives_name, ['1 ["drain", "orders", "ada", 1.0, "why"]']
    )
    check = build_stopped_check(
        group.offsets, "kafka", lambda storage: Catalogue(storage, group, NO_MEMBER)
    )
    job = dg.Definitions(asset_checks=[check], resources={"kafka": kafka})
    result = job.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    (evaluation,) = result.get_asset_check_evaluations()
    assert not evaluation.passed
    assert evaluation.severity is dg.AssetCheckSeverity.ERROR
    assert "a newer version may have written it" in str(evaluation.description)


# Giving orders


def test_directive_is_stored_shown_and_answered(
    instance: dg.DagsterInstance, group_id: str
) -> None:
    said = issue_directive(instance, group_id, wanted(Action.PAUSE, "orders:0", "orders:[12]"))
    assert said.startswith("orders-0..2 paused by ada since ")
    assert said.endswith(
        ": away. Within seconds no new batch starts, and running batches finish and are committed. "
        "To continue: dagster-rebalance resume orders:0 'orders:[12]'"
    )
    kept = book_of(instance, group_id).read()
    assert [(one.partitions, one.by, one.reason) for one in kept] == [
        ("orders:0", "ada", "away"),
        ("orders:[12]", "ada", "away"),
    ]
    (record,) = instance.fetch_observations(GroupAssets.of(group_id).group, limit=5).records
    assert record.asset_observation is not None
    shown = {name: value.value for name, value in record.asset_observation.metadata.items()}
    assert (shown["event"], shown["by"], shown["reason"]) == ("pause", "ada", "away")
    assert shown["partitions"] == ["orders-0", "orders-1", "orders-2"]
    assert shown.keys() >= {"what", "members", "open_holds", "receipts"}, "as in other events"


def test_resume_names_partitions_that_were_not_paused(
    instance: dg.DagsterInstance, group_id: str
) -> None:
    issue_directive(instance, group_id, wanted(Action.STOP, "orders:1"))
    said = issue_directive(
        instance, group_id, wanted(Action.RESUME, "orders:1", "orders:2", reason="")
    )
    assert said.endswith(
        "Within seconds they continue from their committed offsets. Not paused before: orders-2."
    )


@pytest.mark.parametrize(
    ("partitions", "problem"),
    [
        (("orders:7",), "orders:7 matches no partition of group .*, which has orders-0..2"),
        (("orders:0", "payments"), "payments matches no partition of group"),
        (("orders-7",), "orders-7 matches no partition of group .* Write topic:number"),
        ((), "name the partitions to pause: orders:3, a topic, a pattern, or *"),
        (("orders 1",), "'orders 1' cannot name partitions"),
    ],
)
def test_directive_that_matches_nothing_is_refused(
    instance: dg.DagsterInstance, group_id: str, partitions: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        issue_directive(instance, group_id, wanted(Action.PAUSE, *partitions))
    assert book_of(instance, group_id).read() == ()


def test_unknown_group_is_refused_with_the_known_ones(
    instance: dg.DagsterInstance, group_id: str
) -> None:
    Catalogue(instance, GroupAssets.of(group_id), NO_MEMBER).record_left("it ends")
    assert group_id in groups_of(instance)
    with pytest.raises(ConfigurationError, match=f"group orphan has never been .*{group_id}"):
        issue_directive(instance, "orphan", wanted(Action.PAUSE, "*"))


def test_unrelated_assets_and_keys_do_not_disturb_directives(
    instance: dg.DagsterInstance, group_id: str
) -> None:
    instance.report_runless_asset_event(dg.AssetMaterialization(["kafka"]))
    groups_of(instance)
    instance.add_dynamic_partitions(GroupAssets.of(group_id).partitions_name, ["all of them"])
    assert "orders-1 paused by ada" in issue_directive(
        instance, group_id, wanted(Action.PAUSE, "orders:1")
    )


def test_directive_that_cannot_be_shown_applies(
    instance: dg.DagsterInstance, group_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        message = "database is locked"
        raise OSError(message)

    monkeypatch.setattr(dg.DagsterInstance, "report_runless_asset_event", fails)
    said = issue_directive(instance, group_id, wanted(Action.PAUSE, "orders:1"))
    assert said.startswith("orders-1 paused by ada")
    assert said.endswith("could not show it on the asset of the group: database is locked")
    assert [one.partitions for one in book_of(instance, group_id).read()] == ["orders:1"]


# The job


def launch(
    instance: dg.DagsterInstance, kafka: KafkaConsumerResource, config: dict[str, object]
) -> dg.ExecuteInProcessResult:
    job = build_kafka_control_job(name="kafka_batches_control")
    definitions = dg.Definitions(jobs=[job], resources={"kafka": kafka})
    return definitions.resolve_job_def("kafka_batches_control").execute_in_process(
        instance=instance,
        run_config={"ops": {"kafka_batches_control_request": {"config": config}}},
        raise_on_error=False,
    )


def test_job_issues_a_directive(instance: dg.DagsterInstance) -> None:
    """It needs no broker."""
    kafka = kafka_in_memory()
    Catalogue(instance, GroupAssets.of(kafka.group_id), NO_MEMBER).add_partitions([tp(0)])
    config: dict[str, object] = {"action": "stop", "partitions": ["orders"], "reason": "away"}
    assert launch(instance, kafka, {**config, "by": "ada"}).success
    (kept,) = book_of(instance, kafka.group_id).read()
    assert (kept.action, kept.partitions, kept.by) == (Action.STOP, "orders", "ada")
    retry: dict[str, object] = {"action": "retry", "partitions": ["orders:0"], "by": "ada"}
    assert launch(instance, kafka, retry).success
    retries = DirectiveStore(instance, GroupAssets.of(kafka.group_id).retries_name).read()
    assert [(one.action, one.partitions) for one in retries] == [(Action.RETRY, "orders:0")]
    refused = launch(instance, kafka, config)
    (failed,) = [event for event in refused.all_events if event.is_step_failure]
    assert "give your name" in str(failed.event_specific_data)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "set action (pause, stop, resume or retry), partitions (orders:3"),
        ({"action": "choose", "by": "ada"}, "set action (pause, stop, resume or retry)"),
        ({"partitions": ["orders"], "by": "ada"}, "set action (pause, stop, resume or retry)"),
        ({"action": "resume", "by": "ada"}, "name the partitions to resume: orders:3"),
    ],
)
def test_form_that_is_not_filled_in_is_valid_and_fails_with_the_missing_fields(
    instance: dg.DagsterInstance, config: dict[str, object], problem: str
) -> None:
    """The launchpad opens with the default config, and would mark missing fields as errors."""
    refused = launch(instance, kafka_in_memory(), config)
    (failed,) = [event for event in refused.all_events if event.is_step_failure]
    assert problem in str(failed.event_specific_data)


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (build_kafka_control_job, {"action": "stop", "partitions": ["orders"]}),
        (build_kafka_rerun_job, {"partitions": ["orders"]}),
        (build_kafka_letters_job, {"action": "discard"}),
    ],
)
@pytest.mark.parametrize(
    "name", ["by", "reason", "partitions", "runs_at_once", "cancel", "since", "keys", "topic"]
)
def test_form_reads_no_environment_variable(
    instance: dg.DagsterInstance,
    build: Callable[..., dg.JobDefinition],
    config: dict[str, object],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a user with the right to launch runs could read each secret of a run."""
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    job = dg.Definitions(jobs=[build(name="form")], resources={"kafka": kafka_in_memory()})
    variable = {"env": "KAFKA_PASSWORD"}
    given = {**config, name: [variable] if name in {"partitions", "keys"} else variable}
    with pytest.raises(dg.DagsterInvalidConfigError) as refused:
        job.resolve_job_def("form").execute_in_process(
            instance=instance, run_config={"ops": {"form_request": {"config": given}}}
        )
    assert "hunter2" not in str(refused.value)


# Members


@pytest.fixture(scope="module")
def of_members() -> Iterator[dg.DagsterInstance]:
    """A separate instance: other tests leave live runs on the same partitions."""
    with dg.instance_for_test() as made:
        yield made


@pytest.fixture
def bench(of_members: dg.DagsterInstance) -> Iterator[Bench]:
    settings = dataclasses.replace(SETTINGS, directives_s=0.5)
    yield Bench(of_members, partitions=2, settings=settings)
    name = GroupAssets.of("etl").directives_name
    for text in of_members.get_dynamic_partitions(name):
        of_members.delete_dynamic_partition(name, text)


def claims_of(bench: Bench, number: int) -> tuple[Claim, ...]:
    stored = bench.group.committed.get(tp(number))
    return () if stored is None else decode(stored).claims


def check_of(bench: Bench) -> dg.AssetCheckEvaluation | None:
    key = dg.AssetCheckKey(bench.assets.offsets, STOPPED_CHECK)
    log = bench.instance.event_log_storage
    record = log.get_latest_asset_check_execution_by_key([key]).get(key)
    return record.evaluation if record else None


def shows(bench: Bench, paused: int) -> bool:
    shown = check_of(bench)
    return shown is not None and shown.metadata["paused_partitions"].value == paused


def test_member_obeys_a_directive_and_the_check_warns(bench: Bench) -> None:
    bench.batch_requests(2)
    issue_directive(bench.instance, "etl", wanted(Action.PAUSE, "orders:0"))
    bench.until(lambda: bench.engine.partitions[tp(0)].directive is not None)
    assert [
        batch_request.ranges[0].partition for batch_request in bench.mailbox.mail.batch_requests
    ] == [1]
    bench.until(lambda: shows(bench, 1))
    shown = check_of(bench)
    assert shown is not None
    assert not shown.passed
    assert shown.severity is dg.AssetCheckSeverity.WARN
    assert shown.description is not None
    assert shown.description.startswith("orders-0: paused by ada since ")
    paused = shown.metadata["paused"]
    assert isinstance(paused, dg.TableMetadataValue)
    assert paused.records[0].data["what_to_do"] == "dagster-rebalance resume orders:0"
    assert shown.metadata["stopped_partitions"].value == 0
    issue_directive(bench.instance, "etl", wanted(Action.RESUME, "orders:0", reason=""))
    bench.until(lambda: shows(bench, 0))
    shown = check_of(bench)
    assert shown is not None
    assert shown.passed
    bench.batch_requests(2)


def test_new_member_reads_directives_before_it_claims(bench: Bench) -> None:
    Catalogue(bench.instance, bench.assets, NO_MEMBER).add_partitions([tp(0), tp(1)])
    issue_directive(bench.instance, "etl", wanted(Action.STOP, "*"))
    bench.turn(100)
    assert all(owned.directive is not None for owned in bench.engine.partitions.values())
    assert len(bench.engine.partitions) == 2
    assert bench.mailbox.mail.batch_requests == ()
    assert [claims_of(bench, number) for number in (0, 1)] == [(), ()]


def test_unreadable_directives_stop_claims(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> tuple[Directive, ...]:
        message = "database is locked"
        raise OSError(message)

    monkeypatch.setattr(bench.catalogue, "directives", fails)
    bench.turn(100)
    assert bench.engine.partitions
    assert bench.mailbox.mail.batch_requests == ()
    monkeypatch.undo()
    bench.batch_requests(2)


def test_invalid_directive_fails_the_check(bench: Bench) -> None:
    bench.batch_requests(2)
    unknown = '1 ["drain", "orders", "ada", 1.0, "why"]'
    bench.instance.add_dynamic_partitions(bench.assets.directives_name, [unknown])
    bench.until(lambda: (shown := check_of(bench)) is not None and not shown.passed)
    shown = check_of(bench)
    assert shown is not None
    assert shown.severity is dg.AssetCheckSeverity.ERROR
    assert "a newer version may have written it" in str(shown.description)
