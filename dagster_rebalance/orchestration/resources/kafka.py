"""`KafkaConsumerResource`: the settings of a group member, its holds and its batches.

Dagster builds a new resource for each tick and each run, so the resource owns no consumer and no
thread. No message shows a secret.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import dagster as dg
from pydantic import ConfigDict, Field, field_validator, model_validator

from dagster_rebalance.core.batches.engine_settings import (
    DeadlinePolicy,
    EngineSettings,
    ForeignMetadata,
    HoldBudget,
    LeavePolicy,
    LossPolicy,
)
from dagster_rebalance.core.batches.planning import BatchLimits, runs_at_once, wait_limits
from dagster_rebalance.core.batches.record_filter import RecordPredicate
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.letters import LetterLimit
from dagster_rebalance.core.model.offsets import is_topic_name
from dagster_rebalance.core.model.topics import StartTime, Topics, is_internal, parse_start
from dagster_rebalance.core.runs.liveness import Liveness
from dagster_rebalance.core.runs.retry import RetryBackoff
from dagster_rebalance.core.transport_security import insecurity
from dagster_rebalance.kafka.client.settings import CALLBACKS, validated, with_login
from dagster_rebalance.kafka.cluster.group_admin import GroupAdmin
from dagster_rebalance.kafka.consumer.consumer import RebalanceAwareConsumer
from dagster_rebalance.kafka.producers.dead_letter_producer import DeadLetterProducer
from dagster_rebalance.kafka.reading.range_reader import RangeReader
from dagster_rebalance.orchestration.resources.client_settings import (
    Function,
    as_texts,
    function_named,
    refuse_unknown_settings,
)

if TYPE_CHECKING:
    ClientSettings: TypeAlias = dict[str, Any]
else:
    ClientSettings: TypeAlias = dict[str, str]  # all that Dagster resolves variables in

BRANCH_VARIABLE = "DAGSTER_CLOUD_IS_BRANCH_DEPLOYMENT"
"""Dagster+ sets it in each process of a branch deployment, which runs the code of a pull request
with production's settings, and so with its consumer group."""
_SPARK_PREFIX = "kafka."
_POSITIVE = (
    "hold_limit_s",
    "max_records_per_range",
    "max_records_per_batch",
    "max_ranges_per_run",
    "max_runs_in_flight",
    "max_claims_per_partition",
    "min_records",
    "max_attempts",
    "records_per_minute",
    "retry_delay_limit_s",
    "lease_s",
    "heartbeat_timeout_s",
    "start_timeout_s",
    "batch_timeout_s",
)
_MAY_BE_ZERO = {
    "metrics_partitions": "for no lag metrics by partition",
    "record_every_s": "for one record per commit",
    "shutdown_timeout_s": "to leave without draining",
}
"""Settings that may be 0, with the meaning of 0."""
_MIN_LAG_EVERY_S = 10.0
_STREAM_BATCH_TIMEOUT_S = 3600.0
"""The default age of a streaming run, at which it must leave anyway."""
_STREAM_RECORD_EVERY_S = 600.0
"""With 8 busy partitions, the records are below 20 MB of SQLite a day."""
_RECORDS_PER_MINUTE = 60.0
_STREAM_RECORDS_PER_MINUTE = 4.0
"""With any number of partitions, the records are below 60 MB of SQLite a day."""
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
_NO_ENGINE_SETTINGS = {*_CLIENT_FIELDS.values(), "client_config", "branch_group_id"} - {
    "start_from"
}
_IntEnvVar = type(dg.EnvVar.int("Dagster exports no name for it"))
_ALIASES = {"metadata.broker.list": "bootstrap.servers", "sasl.mechanisms": "sasl.mechanism"}


class RecordFilter(dg.Config):
    """Conditions that a record must all fulfil to be processed. At least one is needed.

    Example:
        ```python
        only = RecordFilter(header_in={"kind": ["order", "refund"]}, tombstones=False)
        ```
    """

    header_equals: dict[str, str] = Field(
        default_factory=dict,
        description="Values by the name of a header. One of the headers with this name must have "
        "the value, in UTF-8. A header without a value equals no text.",
    )
    header_in: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Lists of values by the name of a header, which must have one of them.",
    )
    key_prefix: str | None = Field(
        default=None,
        description="The text with which the key begins, in UTF-8. Leaves out records without a "
        "key.",
    )
    tombstones: bool | None = Field(
        default=None,
        description="true: only records whose value is null. false: none of them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: object) -> object:
        if isinstance(values, Mapping):
            RecordPredicate.of(values)
        return values

    def predicate(self) -> RecordPredicate:
        """Return the filter as a predicate."""
        return RecordPredicate.of(dict(self))


class KafkaConsumerResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The settings of a member of a Kafka consumer group.

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
        description="Brokers for the first connection: host:port, separated by commas."
    )
    group_id: str = Field(
        description="The consumer group. Each code location with this group takes a share of "
        "the partitions."
    )
    topics: list[str] = Field(
        description="The topics to read. A text that begins with ^ is a pattern: `^orders` "
        "matches each topic whose name begins with orders, also later ones."
    )
    group_protocol: Literal["consumer", "classic"] = Field(
        default="consumer",
        description="`consumer` (KIP-848, brokers 4.0 and newer) or `classic` (cooperative-sticky) "
        "for older brokers.",
    )
    security_protocol: str | None = Field(
        default=None, description="For example SASL_SSL. Kafka's default is PLAINTEXT."
    )
    sasl_mechanism: str | None = Field(default=None, description="For example SCRAM-SHA-512.")
    sasl_username: str | None = Field(default=None, description="The user, as dg.EnvVar.")
    sasl_password: str | None = Field(
        default=None, repr=False, description="The password, as dg.EnvVar."
    )
    ssl_ca_location: str | None = Field(
        default=None, description="File with the CA certificates to trust."
    )
    client_config: ClientSettings = Field(
        default_factory=dict,
        repr=False,
        description="Further librdkafka settings, by librdkafka's names. Give a function as "
        "`module:function`. Names that begin with `kafka.` are for Spark's Kafka connector only.",
    )

    start_from: str = Field(
        default="earliest",
        description="Where a group without a committed offset starts: `earliest`, `latest`, or at "
        "a time with its zone, such as 2026-11-23T08:00:00Z.",
    )
    hold_limit_s: float = Field(
        default=300.0, description="Seconds that a revoke may be held while its runs drain."
    )
    hold_commit_slice_s: float = Field(
        default=10.0,
        description="Last seconds of a hold, reserved for cancelling runs and the last commit.",
    )
    on_deadline: Literal["cancel", "release"] = Field(
        default="cancel",
        description="Runs that are live at the deadline of a hold: `cancel` them, or `release` "
        "the partitions to the next owner, which adopts them.",
    )
    on_lost: Literal["leave", "cancel"] = Field(
        default="leave",
        description="Runs of lost partitions: `leave` them to the next owner, which adopts "
        "them, or `cancel` them.",
    )
    on_leave: Literal["release", "drain"] = Field(
        default="release",
        description="On a reload or deploy: `release` commits finished work and leaves live "
        "runs to the newer process; `drain` waits for them.",
    )
    foreign_metadata: Literal["refuse", "overwrite"] = Field(
        default="refuse",
        description="`refuse` or `overwrite` metadata of offsets that another application "
        "committed in this group.",
    )
    max_records_per_range: int = Field(
        default=100_000, description="Maximum number of offsets of one partition in a run."
    )
    max_records_per_batch: int = Field(
        default=1_000_000, description="Maximum number of offsets in a batch, of all partitions."
    )
    max_ranges_per_run: int = Field(default=8, description="Maximum number of partitions in a run.")
    max_runs_in_flight: int | None = Field(
        default=None,
        description="Maximum number of concurrent runs of a member. Default: 4, or 1 if each run "
        "has a local Spark.",
    )
    max_claims_per_partition: int = Field(
        default=1, description="Maximum number of concurrent batches of one partition."
    )
    min_records: int | None = Field(
        default=None,
        description="Records that a partition waits for before its next batch starts. Default: "
        "1,000, or 1 with `max_wait_s=0`.",
    )
    max_wait_s: float | None = Field(
        default=None,
        description="Seconds after which a batch starts with fewer than `min_records`. The "
        "first batch of a partition is never delayed. Default: 30 if `min_records` "
        "is above 1; 0.2 in streaming runs without it.",
    )
    claim_ahead: bool = Field(
        default=True,
        description="Whether a streaming run claims its next batch, if it is full, while one is "
        "at work. The next batch then begins before the commit of this one.",
    )
    max_attempts: int = Field(
        default=3,
        description="The number of runs that may fail on a range. Dagster's own retries are not "
        "counted.",
    )
    retry_delay_s: float = Field(
        default=5.0,
        description="Seconds before the second attempt of a range. The delay grows sixfold with "
        "each further run that does not succeed.",
    )
    retry_delay_limit_s: float = Field(default=900.0, description="Maximum retry delay in seconds.")
    retry_stopped: bool = Field(
        default=True,
        description="Whether a range whose attempts are exhausted, with on_failure=pause, is "
        "retried every retry_delay_limit_s.",
    )
    batch_timeout_s: float | None = Field(
        default=None,
        description="Seconds after which a running batch is interrupted, a failed attempt. If "
        "the asset ignores this, its process is ended. Default: 3600 in streaming "
        "runs, no limit in per-batch runs.",
    )
    on_failure: Literal["pause", "dead_letter", "bisect"] = Field(
        default="pause",
        description="If the attempts of a range are exhausted: `pause` stops its partition; "
        "`dead_letter` records the range in `dead_letter_topic` and continues; `bisect` does so "
        "with each record that raises.",
    )
    dead_letter_topic: str | None = Field(
        default=None,
        description="The topic of dead letters: of records that assets set aside, and those of "
        "on_failure. It must exist.",
    )
    max_dead_letters: str | None = Field(
        default=None,
        description="The dead letters of a partition within an hour beyond which it stops, such "
        "as `100`, or `1%` of its records. Not with on_failure=dead_letter.",
    )
    only: RecordFilter | None = Field(
        default=None,
        description="The records to process: a `RecordFilter`. Default: all.",
    )
    record_every_s: float | None = Field(
        default=None,
        description="Commits of a partition within this many seconds share one record in "
        "Dagster, and in streaming runs the results of an asset one "
        "materialization. 0: each has its own. Default: 0 in per-batch runs, 600 in "
        "streaming runs.",
    )
    records_per_minute: float | None = Field(
        default=None,
        description="Maximum records of the group in Dagster per minute. A waiting record "
        "includes the commits that follow. Default: 60 in per-batch runs, 4 in "
        "streaming runs.",
    )
    lag_every_s: float = Field(
        default=60.0,
        description="Interval in seconds at which one member reads the lag of the group. At "
        "least 10, or 0 for never.",
    )
    metrics_partitions: int = Field(
        default=100,
        description="A member with at most this many partitions has a lag metric, a time series, "
        "per partition. 0 for none.",
    )
    branch_group_id: str | None = Field(
        default=None,
        description="The group in a branch deployment of Dagster+. Without it, no member joins "
        "there.",
    )
    lease_s: float = Field(
        default=60.0,
        description="Seconds without a sensor tick after which the member drains and leaves. At "
        "least 4 sensor intervals.",
    )
    shutdown_timeout_s: float = Field(
        default=50.0, description="Seconds for draining when the code server shuts down."
    )
    heartbeat_timeout_s: float = Field(
        default=60.0,
        description="If a run that has begun sends no heartbeat for this many seconds, it is "
        "dead, and its batch is requested again. A run sends one every sixth of "
        "this time, and stops itself after two thirds of it without one.",
    )
    start_timeout_s: float = Field(
        default=300.0,
        description="If a launched run sends no first heartbeat for this many seconds, it is "
        "dead. Allow more than your platform needs to launch a run, import the code "
        "and start all resources before `kafka_batch`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_settings(cls, values: object) -> object:
        otherwise = "settings of librdkafka belong in client_config"
        return refuse_unknown_settings(cls, values, otherwise)

    @model_validator(mode="before")
    @classmethod
    def _refuse_variables_of_another_type(cls, values: object) -> object:
        settings = values if isinstance(values, dict) else {}
        for name, field in cls.model_fields.items():
            value, kind = settings.get(name), field.annotation
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
                    "cannot be a variable that Dagster reads later: give its value, such as "
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
    def _check_start(cls, value: object) -> object:
        if isinstance(value, str) and not isinstance(value, dg.EnvVar):
            parse_start(value)
        return value

    @field_validator("max_dead_letters", mode="before")
    @classmethod
    def _check_letter_limit(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and not isinstance(value, dg.EnvVar):
            LetterLimit.parse(value)
        return value

    @field_validator("bootstrap_servers", mode="before")
    @classmethod
    def _check_servers(cls, value: object) -> object:
        if isinstance(value, str) and not isinstance(value, dg.EnvVar):
            problem = insecurity({"bootstrap.servers": value})
            if problem is not None:
                raise ConfigurationError(problem)
        return value

    @model_validator(mode="before")
    @classmethod
    def _take_branch_group(cls, values: object) -> object:
        if _is_branch_deployment() and isinstance(values, dict) and values.get("branch_group_id"):
            return {**values, "group_id": values["branch_group_id"]}
        return values

    @field_validator("client_config", mode="before")
    @classmethod
    def _as_texts(cls, value: object) -> object:
        return as_texts("client_config", value)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Refuse functions in run config: the right to launch runs must not allow other code."""
        config = context.run.run_config if context.run else {}
        named = sorted(_functions_in(config.get("resources")))
        if named:
            msg = (
                f"the config of this run names a function for {named[0]} in client_config: only "
                "code may. Name it in the definition of the resource, and wrap the resource in "
                "PinnedResource (docs/security.md)"
            )
            raise ConfigurationError(msg)

    @property
    def why_not_to_join(self) -> str:
        """Why this process must not join the group; empty if it may."""
        if not _is_branch_deployment() or self.branch_group_id:
            return ""
        return (
            f"this is a branch deployment: it does not join group {self.group_id}, because it "
            "would take partitions away from production. To read here, set branch_group_id of "
            "the KafkaConsumerResource"
        )

    def check_client(self) -> None:
        """Refuse invalid Kafka client settings, unless they depend on environment variables.

        Raises:
            ConfigurationError: See `consumer_config`.
        """
        values = (self.security_protocol, *self.client_config.values())
        if not any(isinstance(value, dg.EnvVar) for value in values):
            self.consumer_config()

    def consumer_config(self) -> dict[str, Any]:
        """Return the settings of the Kafka client, including secrets.

        Raises:
            ConfigurationError: `client_config` sets a name that has its own field, or names a
                function that does not exist, or a setting is invalid.
        """
        config: dict[str, Any] = {
            name: value
            for name, field in _CLIENT_FIELDS.items()
            if (value := getattr(self, field)) is not None
        }
        if isinstance(parse_start(self.start_from), StartTime):
            config["auto.offset.reset"] = "error"  # the client has no start times
        for name in sorted(self.client_config):
            own = _ALIASES.get(name, name)
            if own in config:
                msg = (
                    f"client_config of group {self.group_id} sets {name}, which has its own field: "
                    f"{_CLIENT_FIELDS[own]}"
                )
                raise ConfigurationError(msg)
        for name, value in self.client_config.items():
            if name in CALLBACKS:
                config[name] = self._function(name)
            elif not name.startswith(_SPARK_PREFIX):
                config[name] = value
        if validated(config, hold_limit_s=self.hold_limit_s).is_eager:
            msg = (
                f"client_config of group {self.group_id} sets partition.assignment.strategy to an "
                "eager strategy: each hold would stop the whole group. Remove it to use "
                "cooperative-sticky; docs/upgrading.md describes how to migrate a group"
            )
            raise ConfigurationError(msg)
        return config

    def check_functions(self) -> None:
        """Import the functions that `client_config` names, except for those in variables.

        Raises:
            ConfigurationError: A function does not exist.
        """
        for name, value in self.client_config.items():
            if name in CALLBACKS and not isinstance(value, dg.EnvVar):
                self._function(name)

    def _function(self, name: str) -> Function:
        setting = f"{name} in client_config of group {self.group_id}"
        return function_named(setting, self.client_config[name])

    def spark_options(self) -> dict[str, Any]:
        """Return the settings of the client and of Spark for `read_ranges`, including secrets.

        Raises:
            BrokerError: `credentials_cb` failed.
            ConfigurationError: A setting is invalid.
        """
        for_spark = {n: v for n, v in self.client_config.items() if n.startswith(_SPARK_PREFIX)}
        return {**with_login(self.consumer_config()), **for_spark}

    def connect(self) -> RebalanceAwareConsumer:
        """Return a consumer that reads no records. It joins the group when it subscribes."""
        return RebalanceAwareConsumer(
            self.consumer_config(), hold_limit_s=self.hold_limit_s, fetch=False
        )

    def reader(self) -> RangeReader:
        """Return a reader of exact ranges. It connects at its first read and joins no group."""
        return RangeReader(validated(self.consumer_config(), hold_limit_s=self.hold_limit_s))

    def letter_reader(self) -> RangeReader:
        """Return a reader of dead letters, which transactions of other programs do not delay."""
        config = {**self.consumer_config(), "isolation.level": "read_uncommitted"}
        return RangeReader(validated(config, hold_limit_s=self.hold_limit_s))

    def group(self) -> GroupAdmin:
        """Return an admin that reads and moves the group's offsets without joining the group."""
        return GroupAdmin(validated(self.consumer_config(), hold_limit_s=self.hold_limit_s))

    def dead_letters(self) -> DeadLetterProducer | None:
        """Return a producer for the letters of failed ranges; None if they are not stored."""
        topic = self._topic_of_failed_ranges
        return None if topic is None else DeadLetterProducer(self.consumer_config(), topic)

    def letter_limit(self) -> LetterLimit | None:
        """Return the limit of dead letters; None without one.

        Raises:
            ConfigurationError: `max_dead_letters` is neither a number nor a share.
        """
        return None if self.max_dead_letters is None else LetterLimit.parse(self.max_dead_letters)

    def predicate(self) -> RecordPredicate | None:
        """Return which records are processed; None for all."""
        return None if self.only is None else self.only.predicate()

    @property
    def _topic_of_failed_ranges(self) -> str | None:
        return None if self.on_failure == "pause" else self.dead_letter_topic

    def engine_settings(
        self, *, streams: bool = False, has_local_spark: bool = False
    ) -> EngineSettings:
        """Return the settings of the engine.

        Args:
            streams: Whether they are for streaming runs.
            has_local_spark: Whether each run starts a local Spark.

        Raises:
            ConfigurationError: A value is invalid, or two contradict each other.
        """
        self._check_numbers()
        self._check_dead_letters()
        record_every_s = self.record_every_s
        if record_every_s is None:
            record_every_s = _STREAM_RECORD_EVERY_S if streams else 0.0
        records_per_minute = self.records_per_minute
        if records_per_minute is None:
            records_per_minute = _STREAM_RECORDS_PER_MINUTE if streams else _RECORDS_PER_MINUTE
        min_records, max_wait_s = wait_limits(
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
            claims_ahead=self.claim_ahead,
            has_filter=self.only is not None,
            max_attempts=self.max_attempts,
            backoff=RetryBackoff(self.retry_delay_s, self.retry_delay_limit_s, self.retry_stopped),
            dead_letter_topic=self._topic_of_failed_ranges,
            bisects=self.on_failure == "bisect",
            start_from=parse_start(self.start_from),
            foreign_metadata=ForeignMetadata(self.foreign_metadata),
            record_every_s=record_every_s,
            records_per_minute=records_per_minute,
            lag_every_s=self.lag_every_s,
            lease_s=self.lease_s,
            liveness=Liveness(
                heartbeat_timeout_s=self.heartbeat_timeout_s, start_timeout_s=self.start_timeout_s
            ),
        )

    def batch_limit_s(self, *, streams: bool = False) -> float:
        """Return how long a batch may run; infinite without a limit."""
        if self.batch_timeout_s is not None:
            return self.batch_timeout_s
        return _STREAM_BATCH_TIMEOUT_S if streams else float("inf")

    @property
    def has_literal_engine_settings(self) -> bool:
        """Whether all inputs of `engine_settings` are known before a run, without variables."""
        values = [value for name, value in iter(self) if name not in _NO_ENGINE_SETTINGS]
        return not any(isinstance(one, dg.EnvVar | _IntEnvVar) for one in (*values, *self.topics))

    def _check_numbers(self) -> None:
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and value <= 0:
                msg = f"{name}={value} of group {self.group_id} must be above 0"
                raise ConfigurationError(msg)
        for name, meaning in _MAY_BE_ZERO.items():
            if (value := getattr(self, name)) is not None and value < 0:
                msg = f"{name}={value:g} of group {self.group_id} must be at least 0 (0 {meaning})"
                raise ConfigurationError(msg)
        if self.lag_every_s != 0 and not _MIN_LAG_EVERY_S <= self.lag_every_s < float("inf"):
            msg = (
                f"lag_every_s={self.lag_every_s:g} of group {self.group_id} must be at least "
                f"{_MIN_LAG_EVERY_S:g}, or 0 for never: Dagster stores each observation"
            )
            raise ConfigurationError(msg)
        for name, value in iter(self):
            if isinstance(value, float) and math.isnan(value):
                msg = f"{name}=nan of group {self.group_id} must be a number"
                raise ConfigurationError(msg)

    def _check_dead_letters(self) -> None:
        topic = self.dead_letter_topic
        problem = None
        try:
            topics = Topics.of(self.topics)
        except ConfigurationError as error:
            msg = f"group {self.group_id}: {error}"
            raise ConfigurationError(msg) from error
        if self.on_failure != "pause" and topic is None:
            problem = (
                f"on_failure={self.on_failure!r} needs a dead_letter_topic: name one that "
                "exists and is not read with this group"
            )
        elif topic is not None and not is_topic_name(topic):
            problem = f"dead_letter_topic={topic[:249]!r} cannot be the name of a topic"
        elif topic is not None and is_internal(topic):
            problem = (
                f"dead_letter_topic={topic!r} is a topic of Kafka itself: name a topic that "
                "contains nothing else"
            )
        elif topic is None and self.max_dead_letters is not None:
            problem = (
                "max_dead_letters limits the records in dead_letter_topic, which has no value: "
                "name the topic, or remove max_dead_letters"
            )
        elif topic is not None and topics.have(topic):
            problem = (
                f"dead_letter_topic={topic!r} is one of topics, or matches a pattern there: dead "
                "letters would be read as input. Name another topic"
            )
        elif self.on_failure == "dead_letter" and self.max_dead_letters is not None:
            problem = (
                "max_dead_letters stops a partition, and on_failure='dead_letter' would make its "
                "whole range a dead letter instead: set on_failure to 'pause' or 'bisect'"
            )
        elif self.on_failure == "bisect" and self.max_attempts <= 1:
            problem = (
                "on_failure='bisect' needs max_attempts=2 or more: the first attempt has the "
                "ranges of several partitions, and only a further one shows which of them fails"
            )
        if problem is not None:
            msg = f"group {self.group_id}: {problem}"
            raise ConfigurationError(msg)
        self.letter_limit()


def _is_branch_deployment() -> bool:
    return os.environ.get(BRANCH_VARIABLE, "0") not in {"", "0"}


def _functions_in(config: object) -> Iterator[str]:
    """Yield the callbacks in each `client_config` of a run config."""
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if name == "client_config" and isinstance(value, Mapping):
            yield from CALLBACKS & value.keys()
        yield from _functions_in(value)
