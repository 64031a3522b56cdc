"""Common fixtures of all tests, and their order: quick tests first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from dagster_rebalance.testing.local.java import SHORT_LIVED
from tests.issuer import KafkaWithTokens

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["dagster_rebalance.testing.fixtures"]

ROOT = Path(__file__).parents[1]
# `make test` writes the archive. Java prints nothing about one that does not fit.
SPARK_CLASSES = ROOT / ".cache" / "spark-classes.jsa"
ARCHIVE = (f"-XX:SharedArchiveFile={SPARK_CLASSES}", "-Xlog:disable")
# Spark's scripts read these.
for variable in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
    flags = (*SHORT_LIVED, *(ARCHIVE if SPARK_CLASSES.exists() else ()))
    os.environ.setdefault(variable, " ".join(flags))

# No result depends on the load of the machine.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def secured_kafka() -> Iterator[KafkaWithTokens]:
    """The `SecuredKafka` of all tests, which also accepts the tokens of a running issuer."""
    # A restart on a busy machine ends no membership.
    patient = {"group.consumer.session.timeout.ms": "60000"}
    with (
        KafkaWithTokens(settings=patient) as kafka,
        kafka.issuer.served(kafka.key_and_certificate()),
    ):
        yield kafka


REAL_PARTS = ("e2e", "spark", "broker", "postgres", "package")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests without real parts first, then the longest ones, to balance the workers."""
    items.sort(
        key=lambda item: min(
            (
                REAL_PARTS.index(mark.name) + 1
                for mark in item.iter_markers()
                if mark.name in REAL_PARTS
            ),
            default=0,
        )
    )


TOGETHER = (
    ("e2e/members/test_handover.py", "e2e/members/test_processes.py"),
    ("e2e/runs/test_runs.py", "e2e/runs/test_without_kafka.py"),
    (
        "e2e/streaming/test_forms.py",
        "e2e/streaming/test_pipes.py",
        "e2e/streaming/test_reruns.py",
        "e2e/streaming/test_streaming.py",
    ),
    (
        "spark/test_batch_for_testing.py",
        "spark/test_decoded.py",
        "spark/test_ended_work.py",
        "spark/test_event_log.py",
        "spark/test_output.py",
        "spark/test_ranges_on_kafka.py",
        "spark/test_secured_kafka.py",
        "spark/test_two_writers.py",
        "testing/test_spark_connect.py",
    ),
    (
        "cli/test_operators_on_broker.py",
        "e2e/test_secrets.py",
        "kafka/client/test_credentials.py",
        "kafka/client/test_token_logins.py",
        "orchestration/streaming/test_logins.py",
    ),
    ("kafka/client/test_security.py", "orchestration/member/test_lost_topics.py"),
)
"""Files that share servers which are slow to start: Spark, a Kafka with logins, or Dagster."""
_FIRST = {f"tests/{file}": f"tests/{files[0]}" for files in TOGETHER for file in files}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:  # noqa: ANN401
    """With `--dist loadfile`, let the files that share servers run in one worker, too."""
    assert all((ROOT / file).exists() for file in _FIRST)
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped] # noqa: PLC0415

    class ByServer(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return _FIRST.get(file, file)

    return ByServer(config, log)


_INTERNAL_ERRORS: list[str] = []


def pytest_internalerror(excrepr: object) -> None:
    _INTERNAL_ERRORS.append(str(excrepr))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """After an internal error, show the failed tests, which pytest leaves out, and its cause."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not _INTERNAL_ERRORS or reporter is None:
        return
    reporter.summary_failures()
    reporter.summary_errors()
    reporter.short_test_summary()
    for line in _INTERNAL_ERRORS[0].splitlines()[-10:]:
        reporter.write_line(line)
    reporter.summary_stats()
