"""Which Dagster, which group, which Kafka and which partitions a command means.

Owns the options that commands share, and what is meant where one is left out. Dagster is the
instance that `DAGSTER_HOME` names. Kafka is where the members have left word that it is. How to log
in stands in a file of the person who asks, with the brokers that it is meant for, so that no secret
is on a command line, in a list of processes, or in Dagster's storage.
"""

from __future__ import annotations

import getpass
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import dagster as dg
import typer

from dagster_rebalance.core.model.directives import selection
from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    DagsterRebalanceError,
)
from dagster_rebalance.core.reporting.group_status import Owners
from dagster_rebalance.orchestration.operators.directives import groups_of, partitions_of
from dagster_rebalance.orchestration.operators.group_sensors import sensors_of
from dagster_rebalance.orchestration.operators.group_snapshot import GroupSeen, look_on
from dagster_rebalance.orchestration.reporting.catalogue import Catalogue
from dagster_rebalance.orchestration.reporting.group_settings import GroupSettings
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.runs.queries import RunLedger
from dagster_rebalance.orchestration.storage.member_lease import NOBODY
from dagster_rebalance.orchestration.storage.names import GroupAssets

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from dagster_rebalance.core.model.offsets import TopicPartition
    from dagster_rebalance.core.reporting.group_status import SensorState
    from dagster_rebalance.kafka.cluster.group_admin import GroupAdmin
    from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer

Partitions: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        help="orders:3 (or orders-3) for a partition, orders for a topic, or a pattern such as "
        "'ord*'.",
        show_default=False,
    ),
]
Everything: TypeAlias = Annotated[bool, typer.Option("--all", help="All partitions of the group.")]
Group: TypeAlias = Annotated[
    str, typer.Option(help="The consumer group. By default the only one of the instance.")
]
By: TypeAlias = Annotated[
    str, typer.Option(help="Who you are. By default the name of your login.", show_default=False)
]
Reason: TypeAlias = Annotated[
    str, typer.Option("--reason", "-r", help="Why, for those who see it.")
]
BootstrapServer: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Brokers as host:port. By default those that the members use.", show_default=False
    ),
]
CommandConfig: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="A file with settings of librdkafka, one name=value a line: brokers and login. "
        "A variable may name it, too (docs/commands.md).",
        envvar="DAGSTER_REBALANCE_COMMAND_CONFIG",
        show_envvar=False,  # its name is too long for a terminal with 80 columns
        dir_okay=False,
        exists=True,
        show_default=False,
    ),
]
_STORAGES = {"dagster", "dagster_mysql", "dagster_postgres", "psycopg2", "sqlalchemy", "sqlite3"}
"""Whose errors come out of Dagster's storage; the databases are no dependencies of this package."""
_MEMBERS_OWN = {"group.id": "--group says which group is meant", "group.protocol": "no member"}


@dataclass(frozen=True)
class Target:
    """What a command is about.

    Attributes:
        instance: The Dagster instance of the members.
        kafka: The group, as far as its members have left word, and how to reach it.
        catalogue: What is recorded of the group.
    """

    instance: dg.DagsterInstance
    kafka: KafkaConsumerResource
    catalogue: Catalogue


@contextmanager
def open_target(group: str, bootstrap_server: str, command_config: Path | None) -> Iterator[Target]:
    """Find out which group is meant, and how to reach it. Nothing is connected to Kafka yet.

    Raises:
        BrokerError: Kafka did not answer what was asked within the block.
        ConfigurationError: There is no such group or instance, or the settings cannot work.
    """
    with open_instance() as instance:
        name = group or only_group(instance)
        assets = GroupAssets.of(name)
        known_topics = {p.topic for p in partitions_of(instance, assets, name)}
        left = GroupSettings(instance, assets.settings_name).read()
        group_id = str(left.get("group_id", name))
        if GroupAssets.of(group_id) != assets:  # who can write there chooses no other group
            group_id = name
        client = client_config(command_config)
        servers = bootstrap_server or client.get("bootstrap.servers", "")
        if command_config is not None and not servers:
            # Who can write to Dagster's storage must not choose where a login is sent.
            msg = (
                f"{command_config} has no bootstrap.servers: add where that login goes, or give "
                "--bootstrap-server"
            )
            raise ConfigurationError(msg)
        servers = servers or left.get("bootstrap_servers", "")
        if not servers:
            msg = (
                f"the members of group {name} have not left word of their brokers: give "
                "--bootstrap-server"
            )
            raise ConfigurationError(msg)
        client.pop("bootstrap.servers", None)
        settings = {
            "topics": sorted(known_topics),
            **left,
            "group_id": group_id,
            "bootstrap_servers": servers,
            # No member is made of it, and every broker knows this one.
            "group_protocol": "classic",
            "client_config": client,
        }
        try:
            kafka = KafkaConsumerResource(**settings)
        except ValueError as error:
            msg = (
                f"this version does not understand the settings that members of group {name} have "
                f"left; a newer one may have written them: {error}"
            )
            raise ConfigurationError(msg) from error
        with told_of_logins(command_config):
            yield Target(instance, kafka, Catalogue(instance, assets, NOBODY))


@dataclass(frozen=True)
class Look:
    """Looks at a group, over connections that stay open between looks.

    Attributes:
        target: The group.
        consumer: Asks Kafka. It is no member.
        runs: Asks Dagster for runs.
    """

    target: Target
    consumer: RebalanceAwareConsumer
    runs: RunLedger

    def at_group(self) -> tuple[GroupSeen, Owners]:
        """The group now, and who has its partitions.

        Raises:
            BrokerError: Kafka did not answer, or refused.
            ConfigurationError: The orders of people cannot be read.
            DagsterRebalanceError: Dagster's storage did not answer.
        """
        target = self.target
        with _told_storage_errors():
            owners = Owners(self._group.members(), tuple(target.catalogue.assigned()))
            seen = look_on(
                self.consumer,
                target.kafka.topics,
                self.runs,
                target.catalogue,
                settings=target.kafka.driver_settings(),
                owners=owners,
            )
        return seen, owners

    def sensors(self) -> tuple[SensorState, ...]:
        """The sensors that keep members of the group.

        Raises:
            DagsterRebalanceError: Dagster's storage did not answer.
        """
        with _told_storage_errors():
            group = GroupAssets.of(self.target.kafka.group_id).group
            return sensors_of(self.target.instance, group)

    @cached_property
    def _group(self) -> GroupAdmin:
        return self.target.kafka.group()


@contextmanager
def looks(target: Target) -> Iterator[Look]:
    """Connect to what a look at a group needs.

    Raises:
        ConfigurationError: A setting cannot work.
    """
    with target.kafka.connect() as consumer:
        yield Look(target, consumer, RunLedger(target.instance, target.kafka.group_id))


@contextmanager
def told_of_logins(command_config: Path | None) -> Iterator[None]:
    """Say that no login was given where Kafka does not answer: it hangs up on such a client.

    Raises:
        BrokerError: The same error.
    """
    try:
        yield
    except BrokerError as error:
        if command_config is not None or not error.retriable:
            raise
        msg = (
            f"{error}; if this Kafka asks for TLS or a login, give --command-config "
            "(docs/commands.md)"
        )
        raise BrokerError(msg, retriable=error.retriable, partitions=error.partitions) from error


def client_config(path: Path | None) -> dict[str, str]:
    """The settings of librdkafka in a file.

    Raises:
        ConfigurationError: It cannot be read. The message shows no value.
    """
    if path is None:
        return {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ConfigurationError(msg) from error
    found = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, sign, value = (part.strip() for part in text.partition("="))
        if not name or not sign or " " in name:
            msg = f"line {number} of {path} is not name=value"
            raise ConfigurationError(msg)
        if name in _MEMBERS_OWN:
            msg = f"line {number} of {path} sets {name}: remove it; {_MEMBERS_OWN[name]}"
            raise ConfigurationError(msg)
        found[name] = value
    return found


def chosen(
    selectors: Sequence[str] | None, partitions: Collection[TopicPartition], group_id: str
) -> list[TopicPartition]:
    """The partitions that a person means, in order.

    Args:
        selectors: Each as in an order, or as a table shows a partition: `orders-3`.
        partitions: Those that there are.
        group_id: Their group.

    Raises:
        ConfigurationError: One of the selectors matches nothing, or two things.
    """
    typed = selectors or ()
    return sorted({p for one in typed for p in selection(one, partitions, group_id).partitions})


def login() -> str:
    """The name of the login; empty where there is none, as in some containers."""
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return ""


@contextmanager
def open_instance() -> Iterator[dg.DagsterInstance]:
    """The instance that `DAGSTER_HOME` names.

    Raises:
        ConfigurationError: There is none, Dagster cannot open it, or its storage does not answer.
        DagsterRebalanceError: Its storage does not answer any more.
    """
    if not os.environ.get("DAGSTER_HOME"):
        msg = (
            "DAGSTER_HOME is not set: it names the folder with the dagster.yaml of the members, "
            "for example export DAGSTER_HOME=/opt/dagster"
        )
        raise ConfigurationError(msg)
    try:
        instance = dg.DagsterInstance.get()
        instance.get_runs_count()
    except Exception as error:
        msg = f"Dagster's instance cannot be used: {error}"
        raise ConfigurationError(msg) from error
    with instance, _told_storage_errors():
        yield instance


@contextmanager
def _told_storage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _STORAGES:
            raise
        # What the database says; SQLAlchemy's own words have the whole statement in them.
        said = str(getattr(error, "orig", None) or error).partition("\n")[0]
        msg = f"Dagster's storage did not answer: {said}. Try again when it does"
        raise DagsterRebalanceError(msg) from error


def only_group(instance: dg.DagsterInstance) -> str:
    """The group of an instance that has one.

    Raises:
        ConfigurationError: It has several, or none.
    """
    groups = groups_of(instance)
    if len(groups) == 1:
        return groups[0]
    msg = (
        f"this Dagster instance has several consumer groups: say --group with one of "
        f"{', '.join(groups)}"
        if groups
        else f"the Dagster instance in {os.environ['DAGSTER_HOME']} has no consumer group: no "
        "member has ever joined one there. Is that the DAGSTER_HOME of the members?"
    )
    raise ConfigurationError(msg)
