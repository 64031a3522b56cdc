"""A deployment on a Kafka with TLS, passwords and ACLs: least rights, and no leaked secrets.

One story for all tests: a group whose first run fails, and one whose password is refused. Then
everything stored by Dagster or written by any process is searched for the passwords.
"""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from dagster_rebalance.testing.deployment import DagsterDeployment
from dagster_rebalance.testing.fixtures import unique_name
from tests.e2e.stage import SETTINGS, Group, Stage, locations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dagster_rebalance.testing.secured import SecuredKafka

pytestmark = [pytest.mark.e2e, pytest.mark.broker]

PASSWORD = "swordfish-of-the-etl-user"  # noqa: S105 - searched for
WRONG_PASSWORD = "guess-of-another-user"  # noqa: S105 - searched for
SNAPSHOT = b"ResourceDefSnap"
"""Part of each snapshot of a job; Dagster stores snapshots compressed."""


@dataclass(frozen=True)
class Story:
    """The results of the story."""

    statuses: list[str]
    refusal: dict[str, Any]
    root: Path
    kafka_logs: list[Path]


@pytest.fixture(scope="module")
def story(secured_kafka: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Play it, with no more rights than are needed."""
    root = tmp_path_factory.mktemp("secrets")
    user = unique_name("etl")  # other tests on the same Kafka have one of this name, too
    secured_kafka.add_user(user, PASSWORD)
    secrets = {"KAFKA_PASSWORD": PASSWORD, "KAFKA_WRONG_PASSWORD": WRONG_PASSWORD}
    login = {"KAFKA_USERNAME": user, "KAFKA_CA": str(secured_kafka.certificate), **secrets}
    served = locations(
        ["secured_consumer", "refused_consumer"],
        root,
        secured_kafka.bootstrap_servers,
        "blue",
        secrets=login,
    )
    with (
        DagsterDeployment(root / "home", served, settings=SETTINGS) as dagster,
        dagster.instance() as instance,
    ):
        stage = Stage(secured_kafka, dagster, root, instance)
        group, refused = (
            stage.group(scenario, "consumer", partitions=1) for scenario in ("secured", "refused")
        )
        secured_kafka.allow(user, "READ", topic=group.name, group=group.name)
        group.fail_next(1)
        group.open()
        group.turn_on("blue")
        refused.turn_on("blue")
        group.wait("all records to be committed", Group.is_done)
        group.check_exactly_once()
        refused.wait(
            "the tick to fail", lambda group: any(tick["error"] for tick in group.ticks("blue"))
        )
        (refusal, *_) = [tick for tick in refused.ticks("blue") if tick["error"]]
        return Story([run.status.value for run in group.runs()], refusal, root, secured_kafka.logs)


def test_deployment_works_with_read_on_topic_and_group(story: Story) -> None:
    """The rights of docs/security.md suffice for member, runs and check, also after a failure."""
    assert story.statuses == ["FAILURE", "SUCCESS"]


def test_refused_password_fails_the_tick_and_names_the_settings(story: Story) -> None:
    causes = " ".join(cause["message"] for cause in story.refusal["error"]["causes"])
    assert "Authentication failed" in causes
    assert "'sasl.username' and 'sasl.password'" in causes


def test_passwords_are_not_in_dagsters_storage_or_any_log(story: Story) -> None:
    written = dict(_everything_written(story))
    assert any(
        SNAPSHOT in content for name, content in written.items() if name.startswith("rows of")
    ), "Dagster's storage is not seen"
    assert any(b"the test wants this run to fail" in content for content in written.values()), (
        "errors are not seen"
    )
    for password in (PASSWORD, WRONG_PASSWORD):
        assert [name for name, content in written.items() if password.encode() in content] == []


def _everything_written(story: Story) -> Iterator[tuple[str, bytes]]:
    for path in [*story.root.rglob("*"), *story.kafka_logs]:
        if not path.is_file():
            continue
        content = path.read_bytes()
        yield str(path), content
        if content.startswith(b"SQLite format 3"):
            # Long values are spread over pages of the file, and Dagster compresses some.
            yield f"rows of {path}", b"\n".join(_values(path))


def _values(database: Path) -> Iterator[bytes]:
    with closing(sqlite3.connect(database)) as connection:
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        for table in tables:
            for row in connection.execute(f'SELECT * FROM "{table}"'):  # noqa: S608 - a name out of the database itself
                for value in row:
                    raw = value if isinstance(value, bytes) else str(value).encode()
                    yield raw
                    with suppress(zlib.error):
                        yield zlib.decompress(raw)
