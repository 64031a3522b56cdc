"""The Dagster instance, group, Kafka and partitions of a command.

`DAGSTER_HOME` names the Dagster instance, in which the members publish the broker addresses. A
login comes from a file of the operator, which also names its brokers, so no secret is on a command
line, in a process list, or in Dagster's storage.
"""

from __future__ import annotations

import getpass
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import dagster as dg

from dagster_rebalance.core.model.directives import resolve_selector
from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    DagsterRebalanceError,
)
from dagster_rebalance.core.reporting.group_status import Owners
from dagster_rebalance.orchestration.operators.requests import groups_of, partitions_of
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.group_settings import GroupSettings
from dagster_rebalance.orchestration.reporting.group_snapshot import GroupSnapshot, take_snapshot
from dagster_rebalance.orchestration.reporting.member_tables import sensors_of
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.storage.member_lease import NO_MEMBER
from dagster_rebalance.orchestration.storage.names import GroupAssets

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.reporting.group_status import SensorState
    from dagster_rebalance.kafka.cluster.group_admin import GroupAdmin
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer

_STORAGE_PACKAGES = {
    "dagster",
    "dagster_mysql",
    "dagster_postgres",
    "psycopg2",
    "sqlalchemy",
    "sqlite3",
}
"""Packages whose errors Dagster's storage raises; the database drivers are no dependencies."""
_REFUSED_SETTINGS = {
    "group.id": "--group names the group",
    "group.protocol": "the command joins no group",
}


@dataclass(frozen=True)
class Target:
    """The group that a command works on.

    Attributes:
        instance: The Dagster instance of the members.
        kafka: The published settings of the group, and the connection to its Kafka.
        catalogue: The records of the group in Dagster.
    """

    instance: dg.DagsterInstance
    kafka: KafkaConsumerResource
    catalogue: Catalogue


@contextmanager
def open_target(group: str, bootstrap_server: str, command_config: Path | None) -> Iterator[Target]:
    """Select the group and configure the connection to its Kafka; nothing is connected yet.

    Raises:
        BrokerError: A request to Kafka in the `with` block failed.
        ConfigurationError: There is no such group or instance, or a setting is invalid.
    """
    with open_instance() as instance:
        name = group or only_group(instance)
        assets = GroupAssets.of(name)
        kafka = _group_resource(instance, assets, name, bootstrap_server, command_config)
        with login_hint(command_config):
            yield Target(instance, kafka, Catalogue(instance, assets, NO_MEMBER))


def _group_resource(
    instance: dg.DagsterInstance,
    assets: GroupAssets,
    name: str,
    bootstrap_server: str,
    command_config: Path | None,
) -> KafkaConsumerResource:
    known_topics = {p.topic for p in partitions_of(instance, assets, name)}
    published = GroupSettings(instance, assets.settings_name).read()
    group_id = str(published.get("group_id", name))
    if GroupAssets.of(group_id) != assets:  # stored settings must not select another group
        group_id = name
    client = read_client_config(command_config)
    servers = bootstrap_server or client.get("bootstrap.servers", "")
    if command_config is not None and not servers:
        # A login is never sent to an address from Dagster's storage, which others can write.
        msg = (
            f"{command_config} has no bootstrap.servers: add the brokers that the login is for, or "
            "pass --bootstrap-server"
        )
        raise ConfigurationError(msg)
    servers = servers or published.get("bootstrap_servers", "")
    if not servers:
        msg = (
            f"the members of group {name} have not published their brokers: pass --bootstrap-server"
        )
        raise ConfigurationError(msg)
    client.pop("bootstrap.servers", None)
    settings = {
        "topics": sorted(known_topics),
        **published,
        "group_id": group_id,
        "bootstrap_servers": servers,
        # The command does not join the group, and every broker supports this protocol.
        "group_protocol": "classic",
        "client_config": client,
    }
    try:
        return KafkaConsumerResource(**settings)
    except ValueError as error:
        msg = (
            f"this version does not understand the settings that members of group {name} have "
            f"published; a newer version may have written them: {error}"
        )
        raise ConfigurationError(msg) from error


@dataclass(frozen=True)
class GroupReader:
    """Reads the state of a group, over connections that stay open between reads.

    Attributes:
        target: The group.
        consumer: The Kafka client, which does not join the group.
        runs: The runs of the group in Dagster.
    """

    target: Target
    consumer: RebalanceAwareConsumer
    runs: RunLedger

    def read(self) -> tuple[GroupSnapshot, Owners]:
        """Return the current state of the group, and the owners of its partitions.

        Raises:
            BrokerError: Kafka did not answer, or refused.
            ConfigurationError: The stored directives cannot be read.
            DagsterRebalanceError: Dagster's storage did not answer.
        """
        target = self.target
        with _storage_errors_translated():
            owners = Owners(self._group.members(), tuple(target.catalogue.assigned()))
            seen = take_snapshot(
                self.consumer,
                target.kafka.topics,
                self.runs,
                target.catalogue,
                settings=target.kafka.engine_settings(),
                owners=owners,
            )
        return seen, owners

    def sensors(self) -> tuple[SensorState, ...]:
        """Return the sensors that run members of the group.

        Raises:
            DagsterRebalanceError: Dagster's storage did not answer.
        """
        with _storage_errors_translated():
            group = GroupAssets.of(self.target.kafka.group_id).group
            return sensors_of(self.target.instance, group)

    @cached_property
    def _group(self) -> GroupAdmin:
        return self.target.kafka.group()


@contextmanager
def connect_group(target: Target) -> Iterator[GroupReader]:
    """Connect to the Kafka of a group, to read its state."""
    with target.kafka.connect() as consumer:
        yield GroupReader(target, consumer, RunLedger(target.instance, target.kafka.group_id))


@contextmanager
def login_hint(command_config: Path | None) -> Iterator[None]:
    """Mention a missing login in errors: Kafka silently closes the connection of such a client.

    Raises:
        BrokerError: The same error, with the hint.
    """
    try:
        yield
    except BrokerError as error:
        if command_config is not None or not error.retriable:
            raise
        msg = (
            f"{error}; if this Kafka requires TLS or a login, pass --command-config "
            "(docs/commands.md)"
        )
        raise BrokerError(msg, retriable=error.retriable, partitions=error.partitions) from error


def read_client_config(path: Path | None) -> dict[str, str]:
    """Return the librdkafka settings in a file.

    Raises:
        ConfigurationError: The file is invalid. The message shows no value.
    """
    return read_settings(path, _REFUSED_SETTINGS)


def read_settings(path: Path | None, refused: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings in a file, one `name=value` per line; empty without a file.

    Raises:
        ConfigurationError: The file is invalid, or has a refused setting; `refused` has the
            reasons. The message shows no value.
    """
    if path is None:
        return {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ConfigurationError(msg) from error
    settings = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, sign, value = (part.strip() for part in text.partition("="))
        if not name or not sign or " " in name:
            msg = f"line {number} of {path} is not name=value"
            raise ConfigurationError(msg)
        if refused is not None and name in refused:
            msg = f"line {number} of {path} sets {name}: remove it; {refused[name]}"
            raise ConfigurationError(msg)
        settings[name] = value
    return settings


def select_partitions(
    selectors: Sequence[str] | None, partitions: Collection[TopicPartition], group_id: str
) -> list[TopicPartition]:
    """Return the partitions that match a selector, sorted.

    Raises:
        ConfigurationError: A selector matches nothing, or is ambiguous.
    """
    return sorted(
        {
            partition
            for selector in selectors or ()
            for partition in resolve_selector(selector, partitions, group_id).partitions
        }
    )


def login_name() -> str:
    """Return the login name, or "" if there is none, as in some containers."""
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return ""


@contextmanager
def open_instance() -> Iterator[dg.DagsterInstance]:
    """Open the instance that `DAGSTER_HOME` names.

    Raises:
        ConfigurationError: `DAGSTER_HOME` is not set, or Dagster cannot use the instance.
        DagsterRebalanceError: The storage of the instance stopped answering in the `with` block.
    """
    if not os.environ.get("DAGSTER_HOME"):
        msg = (
            "DAGSTER_HOME is not set: set it to the folder with the dagster.yaml of the members, "
            "for example export DAGSTER_HOME=/opt/dagster"
        )
        raise ConfigurationError(msg)
    try:
        instance = dg.DagsterInstance.get()
        instance.get_runs_count()
    except Exception as error:
        msg = f"Dagster's instance cannot be used: {error}"
        raise ConfigurationError(msg) from error
    with instance, _storage_errors_translated():
        yield instance


@contextmanager
def _storage_errors_translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _STORAGE_PACKAGES:
            raise
        # The message of the database: that of SQLAlchemy includes the whole statement.
        text = str(getattr(error, "orig", None) or error).partition("\n")[0]
        msg = f"Dagster's storage did not answer: {text}. Try again when it does"
        raise DagsterRebalanceError(msg) from error


def only_group(instance: dg.DagsterInstance) -> str:
    """Return the only consumer group of an instance.

    Raises:
        ConfigurationError: The instance has several groups, or none.
    """
    groups = groups_of(instance)
    if len(groups) == 1:
        return groups[0]
    msg = (
        f"this Dagster instance has several consumer groups: pass --group with one of "
        f"{', '.join(groups)}"
        if groups
        else f"the Dagster instance in {os.environ['DAGSTER_HOME']} has no consumer group: no "
        "member has ever joined one there. Is that the DAGSTER_HOME of the members?"
    )
    raise ConfigurationError(msg)
