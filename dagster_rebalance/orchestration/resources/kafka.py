"""`KafkaConsumerResource` says how a member joins its group, holds partitions and sizes batches.

It is a value with settings only: Dagster builds a new one for each tick and each run, so it owns no
consumer and no thread. Secrets stay in it and in the client that it configures; nothing here prints
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import dagster as dg
from pydantic import ConfigDict, Field, field_validator, model_validator

from dagster_rebalance.core.batches.planning import BatchLimits, runs_at_once, waits_for
from dagster_rebalance.core.batches.settings import (
    DeadlinePolicy,
    EngineSettings,
    ForeignMetadata,
    HoldBudget,
    LeavePolicy,
    LossPolicy,
)
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import is_topic_name
from dagster_rebalance.core.model.start_position import StartTime, start_of
from dagster_rebalance.core.model.topics import Topics
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.core.runs.retry import RetryPace
from dagster_rebalance.core.transport_security import insecurity
from dagster_rebalance.kafka.client.settings import CALLBACKS, validated, with_login
from dagster_rebalance.kafka.cluster.group_admin import GroupAdmin
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer
from dagster_rebalance.kafka.reading.range_reader import RangeReader
from dagster_rebalance.orchestration.resources.branch import is_branch_deployment
from dagster_rebalance.orchestration.resources.client_settings import (
    Function,
    as_texts,
    function_named,
)
from dagster_rebalance.orchestration.resources.unknown_settings import refuse_unknown_settings

if TYPE_CHECKING:
    ClientSettings: TypeAlias = dict[str, Any]
else:
    ClientSettings: TypeAlias = dict[str, str]  # all that Dagster looks for variables in

_FOR_SPARK = "kafka."
_POSITIVE = (
    "hold_limit_s",
    "max_records_per_range",
    "max_records_per_batch",
    "max_ranges_per_run",
    "max_runs_in_flight",
    "max_claims_per_partition",
    "min_records",
    "max_attempts",
    "retry_delay_limit_s",
    "lease_s",
    "heartbeat_timeout_s",
    "start_timeout_s",
    "batch_timeout_s",
)
_MAY_BE_ZERO = {
    "metrics_partitions": "for no metric of a single partition",
    "record_every_s": "for a record of each commit",
    "shutdown_timeout_s": "to leave without draining",
}
"""With what it means then."""
_SHORTEST_LAG_S = 10.0
_BATCH_TIMEOUT_S = 3600.0
"""Of streaming runs: their default age, after which they have to leave anyway."""
_RECORD_EVERY_S = 10.0
"""Of streaming runs, whose batches are short."""
_CLIENT_FIELDS = {
    "bootstrap.servers": "bootstrap_servers",
    "group.id": "group_id",
    "group.protocol": "group_protocol",
    "auto.offset.reset": "start_from",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_username",
    "sasl.password": "sasl_password",
    "ssl.ca.location": "ssl_ca_location",
}
_NO_DRIVER_SETTINGS = {
    *_CLIENT_FIELDS.values(),
    "client_config",
    "branch_group_id",
} - {"start_from"}
_IntEnvVar = type(dg.EnvVar.int("Dagster exports no name for it"))
_ALIASES = {"metadata.broker.list": "bootstrap.servers", "sasl.mechanisms": "sasl.mechanism"}


class KafkaConsumerResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A member of a Kafka consumer group, as a team configures it.

    Example:
        ```python
        kafka = KafkaConsumerResource(
            bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
            group_id="orders",
            topics=["orders"],
        )
        ```
    """

    # A value of the wrong type may be a secret, which pydantic would show.
    model_config = ConfigDict(hide_input_in_errors=True)

    bootstrap_servers: str = Field(
        description="Brokers to start from, as host:port, separated by commas."
    )
    group_id: str = Field(
        description=(
            "The consumer group. Each code location with this group takes a share of the "
            "partitions."
        )
    )
    topics: list[str] = Field(
        description=(
            "The topics to read. A text that begins with ^ is a pattern: `^orders` fits each topic "
            "whose name begins with orders, also one that is created later."
        )
    )
    group_protocol: Literal["consumer", "classic"] = Field(
        default="consumer",
        description=(
            "`consumer` (KIP-848, brokers 4.0 and newer) or `classic` (cooperative-sticky) for "
            "older brokers."
        ),
    )
    security_protocol: str | None = Field(
        default=None, description="For example SASL_SSL. Kafka's default is PLAINTEXT."
    )
    sasl_mechanism: str | None = Field(default=None, description="For example SCRAM-SHA-512.")
    sasl_username: str | None = Field(default=None, description="Give it as dg.EnvVar.")
    sasl_password: str | None = Field(default=None, repr=False, description="Give it as dg.EnvVar.")
    ssl_ca_location: str | None = Field(
        default=None, description="File with the certificates to trust."
    )
    client_config: ClientSettings = Field(
        default_factory=dict,
        repr=False,
        description=(
            "More librdkafka settings, by their own names; functions as `module:function`. Names "
            "that begin with `kafka.` are for Spark's Kafka connector alone."
        ),
    )

    start_from: str = Field(
        default="earliest",
        description=(
            "Where a group without a committed offset begins: `earliest`, `latest`, or at a time "
            "with its zone, such as 2026-11-23T08:00:00Z."
        ),
    )
    hold_limit_s: float = Field(
        default=300.0, description="Seconds that a revoke may be held while its runs drain."
    )
    hold_commit_slice_s: float = Field(
        default=10.0,
        description="The end of the hold that is kept for cancelling runs and the last commit.",
    )
    on_deadline: Literal["cancel", "release"] = Field(
        default="cancel",
        description=(
            "Runs still live at the deadline: `cancel` them, or `release` the partitions and let "
            "the next owner adopt them."
        ),
    )
    on_lost: Literal["leave", "cancel"] = Field(
        default="leave",
        description=(
            "Runs of partitions that were lost: `leave` them to be adopted by the next owner, or "
            "`cancel` them."
        ),
    )
    on_leave: Literal["release", "drain"] = Field(
        default="release",
        description=(
            "A reload or deploy: `release` commits what is done and leaves live runs to the newer "
            "process, `drain` waits for them."
        ),
    )
    foreign_metadata: Literal["refuse", "overwrite"] = Field(
        default="refuse",
        description=(
            "What to do with offsets that another application committed in this group with a text "
            "of its own."
        ),
    )
    max_records_per_range: int = Field(
        default=100_000, description="Offsets of one partition that one run processes."
    )
    max_records_per_batch: int = Field(
        default=1_000_000, description="Offsets of all partitions of a batch together."
    )
    max_ranges_per_run: int = Field(default=8, description="Partitions that one run processes.")
    max_runs_in_flight: int | None = Field(
        default=None,
        description=(
            "Runs of one member at the same time. By default 4, and 1 where each has a local Spark."
        ),
    )
    max_claims_per_partition: int = Field(
        default=1, description="Batches of one partition in flight at the same time."
    )
    min_records: int | None = Field(
        default=None,
        description=(
            "A partition waits until this many records are there ... By default 1,000 with a run "
            "for each batch, and 1 in streaming runs."
        ),
    )
    max_wait_s: float | None = Field(
        default=None,
        description=(
            "... but no longer than this, and not before its first batch. By default 30 where it "
            "waits at all."
        ),
    )
    max_attempts: int = Field(
        default=3,
        description=(
            "Attempts of a range: runs that may fail on it. Dagster's own retries are not counted."
        ),
    )
    retry_delay_s: float = Field(
        default=5.0,
        description=(
            "Wait before a range is tried again; six times as long after each further run that "
            "did not succeed ..."
        ),
    )
    retry_delay_limit_s: float = Field(default=900.0, description="... up to this.")
    retry_stopped: bool = Field(
        default=True,
        description=(
            "Whether a range whose attempts are exhausted, with on_failure=pause, is tried again "
            "every retry_delay_limit_s."
        ),
    )
    batch_timeout_s: float | None = Field(
        default=None,
        description=(
            "A batch that is at work for longer is interrupted, which is a failed attempt; where "
            "the asset ignores that, its process is ended. By default 3600 in streaming runs, and "
            "no limit with a run for each batch."
        ),
    )
    on_failure: Literal["pause", "dead_letter"] = Field(
        default="pause",
        description=(
            "When the attempts of a range are exhausted, `pause` stops its partition; "
            "`dead_letter` records the range in `dead_letter_topic`, and the partition goes on."
        ),
    )
    dead_letter_topic: str | None = Field(
        default=None,
        description="Gets a record for each range whose attempts are exhausted. It must exist.",
    )
    record_every_s: float | None = Field(
        default=None,
        description=(
            "The commits of a partition within this time are joined into one record. 0: each has "
            "its own. By default 0 with a run for each batch, and 10 in streaming runs."
        ),
    )
    lag_every_s: float = Field(
        default=60.0,
        description=(
            "How often one member observes the lag of the whole group; every fifth time while "
            "nothing changes. At least 10, or 0 for never."
        ),
    )
    metrics_partitions: int = Field(
        default=100,
        description=(
            "A member with up to this many partitions has a lag metric for each; 0 for none. "
            "Each is a time series of its own."
        ),
    )
    branch_group_id: str | None = Field(
        default=None,
        description=(
            "The group in a branch deployment of Dagster+. Without it, nothing joins there: it "
            "would take production's partitions."
        ),
    )
    lease_s: float = Field(
        default=60.0,
        description=(
            "After this time without a sensor tick the member drains and leaves. At least 4 sensor "
            "intervals."
        ),
    )
    shutdown_timeout_s: float = Field(
        default=50.0, description="Seconds for draining when the code server is shut down."
    )
    heartbeat_timeout_s: float = Field(
        default=60.0,
        description=(
            "A run that has begun and shows no new sign of life for this long is dead, and its "
            "batch is requested again. "
            "It gives a sign every sixth of this time, and stops itself when it could give none "
            "for two thirds of it."
        ),
    )
    start_timeout_s: float = Field(
        default=300.0,
        description=(
            "A run that was launched and has given no first sign of life for this long is dead: "
            "the time of the launcher, "
            "the code's import and all resources that start before `kafka_batch`. Above what your "
            "platform takes for these."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_settings(cls, values: object) -> object:
        otherwise = "settings of librdkafka belong into client_config"
        return refuse_unknown_settings(cls, values, otherwise)

    @model_validator(mode="before")
    @classmethod
    def _refuse_variables_of_another_type(cls, values: object) -> object:
        given = values if isinstance(values, dict) else {}
        for name, field in cls.model_fields.items():
            value, kind = given.get(name), field.annotation
            if not isinstance(value, dg.EnvVar | _IntEnvVar):
                continue
            if type(None) in get_args(kind):
                kind = get_args(kind)[0]
            variable = value.env_var_name
            problem = None
            if kind is int:
                if not isinstance(value, _IntEnvVar):
                    problem = f"is a number: give dg.EnvVar.int({variable!r})"
            elif kind is not str:
                problem = (
                    "cannot be a variable that Dagster reads later: give its value, say by "
                    f"os.environ[{variable!r}]"
                )
            elif isinstance(value, _IntEnvVar):
                problem = f"is a text: give dg.EnvVar({variable!r})"
            if problem is not None:
                msg = f"{name} of KafkaConsumerResource {problem}"
                raise ConfigurationError(msg)
        return values

    @field_validator("start_from", mode="before")
    @classmethod
    def _check_start(cls, given: object) -> object:
        if isinstance(given, str) and not isinstance(given, dg.EnvVar):
            start_of(given)
        return given

    @field_validator("bootstrap_servers", mode="before")
    @classmethod
    def _check_servers(cls, given: object) -> object:
        if isinstance(given, str) and not isinstance(given, dg.EnvVar):
            problem = insecurity({"bootstrap.servers": given})
            if problem is not None:
                raise ConfigurationError(problem)
        return given

    @model_validator(mode="before")
    @classmethod
    def _take_branch_group(cls, values: object) -> object:
        if is_branch_deployment() and isinstance(values, dict) and values.get("branch_group_id"):
            return {**values, "group_id": values["branch_group_id"]}
        return values

    @field_validator("client_config", mode="before")
    @classmethod
    def _as_texts(cls, given: object) -> object:
        return as_texts("client_config", given)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Let no run choose a function to be called: who may launch runs need not write code.

        Raises:
            ConfigurationError: The config of the run names one.
        """
        config = context.run.run_config if context.run else {}
        named = sorted(_functions_in(config.get("resources")))
        if named:
            msg = (
                f"the config of this run names a function for {named[0]} in client_config: only "
                "code may. Name it where the resource is made, and wrap the resource in "
                "FixedResource (docs/security.md)"
            )
            raise ConfigurationError(msg)

    @property
    def why_not_to_join(self) -> str:
        """Why nothing here may become a member of the group; empty when it may."""
        if not is_branch_deployment() or self.branch_group_id:
            return ""
        return (
            f"this is a branch deployment: it does not join group {self.group_id}, for it would "
            "take partitions away from production. To read here, give the KafkaConsumerResource "
            "a branch_group_id"
        )

    def check_client(self) -> None:
        """Refuse settings of the Kafka client that cannot work, as far as they are known.

        What a variable of the environment says may be another thing where the code runs.

        Raises:
            ConfigurationError: As `consumer_config`.
        """
        judged = (self.security_protocol, *self.client_config.values())
        if not any(isinstance(value, dg.EnvVar) for value in judged):
            self.consumer_config()

    def consumer_config(self) -> dict[str, Any]:
        """The settings of the Kafka client, secrets included.

        Raises:
            ConfigurationError: `client_config` sets what has a field of its own or names a function
                that does not exist, or a setting cannot work.
        """
        config: dict[str, Any] = {
            name: value
            for name, field in _CLIENT_FIELDS.items()
            if (value := getattr(self, field)) is not None
        }
        if isinstance(start_of(self.start_from), StartTime):
            config["auto.offset.reset"] = "error"  # the client knows ends only, and is not asked
        for name in sorted(self.client_config):
            own = _ALIASES.get(name, name)
            if own in config:
                msg = (
                    f"client_config of group {self.group_id} sets {name}, which has a field of its "
                    f"own: {_CLIENT_FIELDS[own]}"
                )
                raise ConfigurationError(msg)
        for name, value in self.client_config.items():
            if name in CALLBACKS:
                config[name] = self._function(name)
            elif not name.startswith(_FOR_SPARK):
                config[name] = value
        if validated(config, hold_limit_s=self.hold_limit_s).is_eager:
            msg = (
                f"client_config of group {self.group_id} sets partition.assignment.strategy to an "
                "eager one: each hold would stop the "
                "whole group. Remove it, for cooperative-sticky; docs/upgrading.md says how a "
                "group moves"
            )
            raise ConfigurationError(msg)
        return config

    def check_functions(self) -> None:
        """Find the functions that `client_config` names, but for those that a variable names.

        Raises:
            ConfigurationError: One does not exist.
        """
        for name, value in self.client_config.items():
            if name in CALLBACKS and not isinstance(value, dg.EnvVar):
                self._function(name)

    def _function(self, name: str) -> Function:
        setting = f"{name} in client_config of group {self.group_id}"
        return function_named(setting, self.client_config[name])

    def spark_options(self) -> dict[str, Any]:
        """What `read_ranges` takes, secrets included: the client's settings, and Spark's own.

        Raises:
            BrokerError: The function for user and password failed.
            ConfigurationError: A setting cannot work.
        """
        own = {
            name: value for name, value in self.client_config.items() if name.startswith(_FOR_SPARK)
        }
        return {**with_login(self.consumer_config()), **own}

    def connect(self) -> RebalanceAwareConsumer:
        """A consumer that reads no records. It is no member of the group before it subscribes.

        Raises:
            ConfigurationError: A setting cannot work.
        """
        return RebalanceAwareConsumer(
            self.consumer_config(), hold_limit_s=self.hold_limit_s, fetch=False
        )

    def reader(self) -> RangeReader:
        """What reads exact ranges. It connects with its first read, and never joins the group.

        Raises:
            ConfigurationError: A setting cannot work.
        """
        return RangeReader(validated(self.consumer_config(), hold_limit_s=self.hold_limit_s))

    def group(self) -> GroupAdmin:
        """What looks at the group from outside, and moves its offsets. It is no member.

        Raises:
            ConfigurationError: A setting cannot work.
        """
        return GroupAdmin(validated(self.consumer_config(), hold_limit_s=self.hold_limit_s))

    def dead_letters(self) -> DeadLetterProducer | None:
        """What sends to the dead-letter topic, if there is one.

        Raises:
            ConfigurationError: A setting cannot work.
        """
        return (
            None
            if self.dead_letter_topic is None
            else DeadLetterProducer(self.consumer_config(), self.dead_letter_topic)
        )

    def driver_settings(
        self, *, streams: bool = False, has_local_spark: bool = False
    ) -> EngineSettings:
        """The settings of the core.

        Args:
            streams: Whether they are for streaming runs.
            has_local_spark: Whether each run has a Spark of its own on its machine.

        Raises:
            ConfigurationError: A value makes no sense, or two do not fit each other.
        """
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and value <= 0:
                msg = f"{name}={getattr(self, name)} of group {self.group_id} must be above 0"
                raise ConfigurationError(msg)
        for name, meaning in _MAY_BE_ZERO.items():
            if (value := getattr(self, name)) is not None and value < 0:
                msg = f"{name}={value:g} of group {self.group_id} must be 0, {meaning}, or above"
                raise ConfigurationError(msg)
        record_every_s = self.record_every_s
        if record_every_s is None:
            record_every_s = _RECORD_EVERY_S if streams else 0.0
        if self.lag_every_s != 0 and not _SHORTEST_LAG_S <= self.lag_every_s < float("inf"):
            msg = (
                f"lag_every_s={self.lag_every_s:g} of group {self.group_id} must be at least "
                f"{_SHORTEST_LAG_S:g}, or 0 for never: Dagster stores each observation"
            )
            raise ConfigurationError(msg)
        for name, value in iter(self):
            if isinstance(value, float) and math.isnan(value):
                msg = f"{name}=nan of group {self.group_id} must be a number"
                raise ConfigurationError(msg)
        try:
            topics = Topics.of(self.topics)
        except ConfigurationError as error:
            msg = f"group {self.group_id}: {error}"
            raise ConfigurationError(msg) from error
        self._check_dead_letters(topics)
        min_records, max_wait_s = waits_for(
            self.min_records,
            self.max_wait_s,
            most=min(self.max_records_per_range, self.max_records_per_batch),
            streams=streams,
        )
        return EngineSettings(
            limits=BatchLimits(
                max_records_per_range=self.max_records_per_range,
                max_records_per_batch=self.max_records_per_batch,
                max_ranges_per_run=self.max_ranges_per_run,
                max_runs_in_flight=runs_at_once(
                    self.max_runs_in_flight, has_local_spark=has_local_spark
                ),
                max_claims_per_partition=self.max_claims_per_partition,
                min_records=min_records,
                max_wait_s=max_wait_s,
            ),
            budget=HoldBudget(self.hold_limit_s, self.hold_commit_slice_s),
            on_deadline=DeadlinePolicy(self.on_deadline),
            on_leave=LeavePolicy(self.on_leave),
            on_lost=LossPolicy(self.on_lost),
            max_attempts=self.max_attempts,
            pace=RetryPace(self.retry_delay_s, self.retry_delay_limit_s, self.retry_stopped),
            dead_letter_topic=self.dead_letter_topic,
            start_from=start_of(self.start_from),
            foreign_metadata=ForeignMetadata(self.foreign_metadata),
            record_every_s=record_every_s,
            lag_every_s=self.lag_every_s,
            lease_s=self.lease_s,
            pulse=Liveness(
                heartbeat_timeout_s=self.heartbeat_timeout_s, start_timeout_s=self.start_timeout_s
            ),
        )

    def batch_limit_s(self, *, streams: bool = False) -> float:
        """For how long a batch may be at work; infinite without a limit."""
        if self.batch_timeout_s is not None:
            return self.batch_timeout_s
        return _BATCH_TIMEOUT_S if streams else float("inf")

    @property
    def knows_driver_settings(self) -> bool:
        """Whether all that `driver_settings` looks at is known, and no variable, before a run."""
        given = [value for name, value in iter(self) if name not in _NO_DRIVER_SETTINGS]
        return not any(isinstance(one, dg.EnvVar | _IntEnvVar) for one in (*given, *self.topics))

    def _check_dead_letters(self, topics: Topics) -> None:
        topic = self.dead_letter_topic
        problem = None
        if self.on_failure == "dead_letter" and topic is None:
            problem = (
                "on_failure='dead_letter' needs a dead_letter_topic: name one that exists and "
                "that nobody reads with this group"
            )
        elif self.on_failure == "pause" and topic is not None:
            problem = (
                f"dead_letter_topic={topic!r} has no effect with on_failure='pause': remove it, or "
                "set on_failure to 'dead_letter'"
            )
        elif topic is not None and not is_topic_name(topic):
            problem = f"dead_letter_topic={topic[:249]!r} cannot be the name of a topic"
        elif topic is not None and topics.have(topic):
            problem = (
                f"dead_letter_topic={topic!r} is one of topics, or fits a pattern there: what "
                "failed would be read again as if it was work. Name another one"
            )
        if problem is not None:
            msg = f"group {self.group_id}: {problem}"
            raise ConfigurationError(msg)


def _functions_in(config: object) -> Iterator[str]:
    """The settings that name functions in any `client_config` of a run's config."""
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if name == "client_config" and isinstance(value, Mapping):
            yield from CALLBACKS & value.keys()
        yield from _functions_in(value)
