"""The Spark session of a run: local, on a cluster, or on a Spark Connect server.

A session starts at its first use, and never in a sensor. The end of a run stops its Spark jobs. A
session that existed before the run, or that another step of the run needs, is not closed.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of resources at run time.

import logging
import threading
import uuid
from contextlib import ExitStack
from importlib import util
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from dagster_rebalance.core.model.errors import ConfigurationError, DagsterRebalanceError
from dagster_rebalance.orchestration.resources.client_settings import (
    as_text,
    as_texts,
    refuse_unknown_settings,
)
from dagster_rebalance.spark import connect_sessions, spark_jobs
from dagster_rebalance.spark.launch import (
    explained_start,
    kafka_connector_package,
    one_fetch_at_a_time,
    only_the_given_server,
    settings_in_a_file,
    table_packages,
    workers_of_this_python,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0
_PACKAGES = "spark.jars.packages"
_BUILDER_SETTINGS = ("spark.master", "spark.app.name")
"""pyspark puts these settings on a command line; all other settings go into a file."""


class KafkaSparkResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A Spark session that can read Kafka, created through dagster-pyspark.

    A cancelled or failed run stops its Spark jobs. On a Spark Connect server, the session has the
    id of the run, so the jobs of a killed run are stopped before its batch is processed again.

    Example:
        ```python
        spark = KafkaSparkResource(remote="sc://spark.example.com:15002")

        @dg.asset
        def orders(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> None:
            write_parquet_by_range(kafka_batch.dataframe(spark), "/data/orders")
        ```
    """

    remote: str | None = Field(
        default=None,
        repr=False,
        description="URL of a Spark Connect server: sc://host:port, then parameters as "
        "/;key=value. Empty for none.",
    )
    master: str | None = Field(
        default=None,
        description="Spark master of a session without Spark Connect. Default: local[*].",
    )
    app_name: str = Field(default="dagster-rebalance", description="The name in Spark's UI.")
    spark_config: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Spark settings, flat or nested. Give secrets as dg.EnvVar.",
    )
    kafka_options: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Options of Spark's Kafka connector (`kafka.X`) that replace the translated "
        "settings.",
    )
    allow_plaintext: bool = Field(
        default=False,
        description="Allow a Kafka login to a `remote` without TLS, for a connection that a "
        "service mesh encrypts.",
    )

    # A value of the wrong type may be a secret, which pydantic would show.
    model_config = ConfigDict(hide_input_in_errors=True)

    _session: Any = PrivateAttr(default=None)
    _lost_sessions: list[Any] = PrivateAttr(default_factory=list)
    _session_id: str | None = PrivateAttr(default=None)
    _is_own_session: bool = PrivateAttr(default=True)
    _run_id: str | None = PrivateAttr(default=None)
    _tag: str = PrivateAttr(default_factory=lambda: f"dagster-rebalance-{uuid.uuid4()}")

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - of all kinds
        # Not a validator: Dagster resolves variables in these arguments, which must be flat.
        if isinstance(settings.get("spark_config"), dict):
            settings["spark_config"] = spark_settings(settings["spark_config"])
        super().__init__(**settings)
        if not self.remote and util.find_spec("pyspark"):  # a code server may lack pyspark
            table_packages(self.spark_config)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_settings(cls, values: object) -> object:
        return refuse_unknown_settings(cls, values, "settings of Spark belong in spark_config")

    @model_validator(mode="before")
    @classmethod
    def _refuse_a_master_beside_a_server(cls, values: object) -> object:
        both = [values.get("remote"), values.get("master")] if isinstance(values, dict) else []
        # Variables are checked in the run, for which Dagster builds the resource again.
        if both and all(both) and not any(isinstance(one, dg.EnvVar) for one in both):
            msg = (
                "the Spark resource has both `remote` and `master`, but a Spark Connect server has "
                "its own master. Remove one of them."
            )
            raise ConfigurationError(msg)
        return values

    @field_validator("kafka_options", mode="before")
    @classmethod
    def _as_texts(cls, options: object) -> object:
        return as_texts("kafka_options", options)

    @field_validator("kafka_options")
    @classmethod
    def _only_kafka_options(cls, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if not name.startswith("kafka."):
                msg = (
                    f"kafka_options of the Spark resource has {name!r}: the options of Kafka's "
                    "client all begin with `kafka.`"
                )
                raise ConfigurationError(msg)
        return options

    @property
    def spark_session(self) -> "SparkSession":
        """The SparkSession. It starts at the first use, which takes seconds.

        A session that was stopped, or lost in a restart of the Spark Connect server, is replaced.
        The new session has the same id, with which any process of the group can stop its jobs.

        Raises:
            ConfigurationError: dagster-pyspark is missing, the settings contradict each other, or
                no server answers at `remote`.
        """
        # pyspark stops a Spark Connect session if the server has another session of that id.
        if self._session is not None and spark_jobs.is_stopped(self._session):
            self._forget_session()
        if self._session is not None:
            current: SparkSession = self._session
            return current
        session = self._connect() if self.remote else self._start()
        spark_jobs.make_interruptible(session)
        spark_jobs.add_tag(session, self._tag)
        self._session = session
        return session

    def stop_abandoned_work(self, run_id: str) -> None:
        """Stop all Spark jobs of a run whose process is gone, from any process.

        The server then refuses further jobs of the run. Without Spark Connect, this does nothing:
        the driver is a child of the run's process and ends with it.

        Raises:
            ConfigurationError: The server did not answer, so the jobs may still run.
        """
        if self.remote:
            session_id = connect_sessions.connect_session_id(run_id)
            connect_sessions.stop_session(self.remote, session_id)

    def interrupt_work(self) -> None:
        """Stop all current Spark jobs of this process; the session stays open."""
        if self._session is not None:
            spark_jobs.interrupt(self._session, self._tag)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Store the run id. No session starts here, because each sensor tick sets up resources."""
        self._run_id = context.run.run_id if context.run else None

    @property
    def is_local(self) -> bool:
        """Whether each run starts a local Spark."""
        master = self.master or self.spark_config.get("spark.master", "local")
        return not self.remote and master.startswith("local")

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Stop the Spark jobs of the run, and close its session."""
        if self.remote and self._session_id:
            self._disconnect(self.remote, self._session_id, is_over=_is_over(context))
        elif self._session is not None and not spark_jobs.jvm_has_died():
            self._end_local_work()
        self._session = self._session_id = None
        self._lost_sessions.clear()

    def _end_local_work(self) -> None:
        if not spark_jobs.is_stopped(self._session):
            self.interrupt_work()
        if self._is_own_session:
            self._session.stop()

    def _forget_session(self) -> None:
        lost, self._session = self._session, None
        # Keep a reference: a garbage-collected session shuts down threads that all sessions share
        # (pyspark 4.0, reattach.py).
        self._lost_sessions.append(lost)
        lost.stop()  # closes its channel, and removes it as the default session of the process

    def _connect(self) -> "SparkSession":
        remote = self.remote or ""
        session_id = connect_sessions.connect_session_id(self._run_id or str(uuid.uuid4()))
        url = connect_sessions.remote_with_session(remote, session_id)
        make_session = _session_maker()
        connect_sessions.check_reachable(remote)
        self._session_id = session_id
        session: Any = make_session({**self.spark_config, "spark.remote": url})
        if not spark_jobs.is_connect(session) or session.session_id != session_id:
            msg = (
                "this process already has another Spark session, which pyspark returns instead of "
                "one with the run's id: its jobs could not be stopped from other processes. Stop "
                "that session first. In assets, use only the session of the resource."
            )
            raise ConfigurationError(msg)
        connected: SparkSession = session
        return connected

    def _start(self) -> "SparkSession":
        make_session = _session_maker()
        self._is_own_session = not spark_jobs.has_classic_session()
        config = self._classic_config()
        packages = config.get(_PACKAGES)
        with spark_jobs.signal_handlers_kept(), ExitStack() as stack:
            if config["spark.master"].startswith("local"):
                stack.enter_context(workers_of_this_python())
            if not spark_jobs.has_jvm():
                stack.enter_context(one_fetch_at_a_time(config))
                stack.enter_context(settings_in_a_file(config))
                config = {name: config[name] for name in _BUILDER_SETTINGS}
            try:
                session: SparkSession = make_session(config)
            except Exception as error:
                explained = explained_start(error, packages)
                if explained is None:
                    raise
                raise explained from error
        return session

    def _classic_config(self) -> dict[str, str]:
        config = {"spark.master": "local[*]", **self.spark_config, "spark.app.name": self.app_name}
        if self.master:
            config["spark.master"] = self.master
        own = [config.get(_PACKAGES), config.get("spark.jars")]
        added = table_packages(config)
        if not any("spark-sql-kafka" in str(jars) for jars in own if jars):
            added.append(kafka_connector_package())
        if added:
            config[_PACKAGES] = ",".join(filter(None, [config.get(_PACKAGES), *added]))
        return config

    def _disconnect(self, remote: str, session_id: str, *, is_over: bool) -> None:
        try:
            if is_over:
                connect_sessions.stop_session(remote, session_id)
            else:
                connect_sessions.interrupt_tag(remote, session_id, self._tag)
        except DagsterRebalanceError:
            # The run ends with the status of its steps. The owner of its batch stops these jobs
            # before a new attempt.
            logger.warning(
                "the Spark jobs of run %s could not be stopped at its end",
                self._run_id,
                exc_info=True,
            )
        if self._session is not None:
            _within(CLOSE_LIMIT_S, self._session.client.close)


def _session_maker() -> "Callable[[dict[str, Any]], Any]":
    try:
        from dagster_pyspark import LazyPySparkResource
    except ImportError as error:
        msg = (
            "the Spark resource needs dagster-pyspark and pyspark: install them with `pip install "
            "'dagster-rebalance[spark]'`."
        )
        raise ConfigurationError(msg) from error

    def make(config: dict[str, Any]) -> Any:  # noqa: ANN401 - a session of either kind
        with only_the_given_server():
            return LazyPySparkResource(spark_config=config).spark_session

    return make


def spark_settings(nested: "Mapping[str, Any]", prefix: str = "") -> dict[str, str]:
    """Return Spark settings by their full names, from flat or nested ones."""
    settings: dict[str, str] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value.keys() != {"env"}:
            settings.update(spark_settings(value, f"{name}."))
        elif isinstance(text := as_text(value), str):
            settings[name] = text  # an EnvVar is a str
        else:
            msg = (
                f"spark_config has a {type(value).__name__} for {name}: give text, a number, or "
                "dg.EnvVar with the name of a variable"
            )
            raise ConfigurationError(msg)
    return settings


def _is_over(context: dg.InitResourceContext) -> bool:
    """Whether no step of the run needs its session any more.

    With a multiprocess executor, the process of each step tears its resources down.
    """
    run, instance = context.run, context.instance
    if run is None or instance is None or run.execution_plan_snapshot_id is None:
        return True
    now = instance.get_run_by_id(run.run_id)
    if now is None or now.is_finished or now.status == dg.DagsterRunStatus.CANCELING:
        return True
    plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    ended = {
        step.step_key: step.status
        for step in instance.get_run_step_stats(run.run_id)
        if step.end_time is not None
    }
    skipped = {
        key for key, status in ended.items() if status is not None and status.value == "FAILURE"
    }
    while (
        following := {key for key, upstream in plan.step_deps.items() if upstream & skipped}
        - skipped
    ):
        skipped |= following  # Dagster starts no step downstream of a failed one
    return skipped.union(ended).issuperset(plan.step_keys_to_execute)


def _within(limit_s: float, close: "Callable[[], object]") -> None:
    """Close a client in a thread: if its server is gone, it retries for minutes."""
    closing = threading.Thread(target=close, name="close-spark-connect", daemon=True)
    closing.start()
    closing.join(limit_s)
