"""`KafkaBatch`: the resource that an asset takes its batch from.

Owns the check that a run makes before it works: by then Dagster shows it as started, so any other
run of the batch can see it. A run that must not work marks itself as refused, so that it does not
count as a failed attempt, and fails with the reason.
"""

# No `from __future__ import annotations` here: Dagster recognises a nested resource by its
# evaluated annotation.
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import dagster as dg
from pydantic import Field, PrivateAttr
from typing_extensions import Self

from dagster_rebalance.core.batches.pipes_payload import SentBatch
from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.errors import BatchRefusedError, BrokerError, IllegalStateError
from dagster_rebalance.core.model.offsets import OffsetRange, is_topic_name
from dagster_rebalance.core.runs.rerun_batch import rerun_of
from dagster_rebalance.core.runs.start_check import refusal, rerun_refusal
from dagster_rebalance.kafka.client.settings import isolation_level
from dagster_rebalance.kafka.reading.range_reader import DEFAULT_TIMEOUT_S, RangeReader
from dagster_rebalance.orchestration.batch.arrow import decoded_schema, pyarrow, record_batches
from dagster_rebalance.orchestration.batch.decoded import (
    DecodedMessage,
    Decoding,
    Letters,
    check_letter_topic,
    decoded_batches,
    decoded_messages,
    with_known_schemas,
)
from dagster_rebalance.orchestration.batch.for_testing import GivenMessages
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource
from dagster_rebalance.orchestration.resources.schema_registry import Encoding
from dagster_rebalance.orchestration.resources.secrets import check_no_secrets
from dagster_rebalance.orchestration.runs.forks import apart
from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
from dagster_rebalance.orchestration.runs.queries import RunLedger
from dagster_rebalance.orchestration.runs.signals import Interruptions
from dagster_rebalance.orchestration.storage.directives import DirectiveStore
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.range_owners import RangeOwners
from dagster_rebalance.orchestration.storage.reruns import RerunStore
from dagster_rebalance.orchestration.storage.run_events import RunEvent, record_run_event
from dagster_rebalance.orchestration.storage.run_tags import (
    BATCH_TAG,
    MOST_REFUSAL_CHARACTERS,
    REFUSAL_TAG,
    REFUSED_TAG,
    read_range,
    spelled,
)
from dagster_rebalance.spark.session.jobs import jvm_has_died

if TYPE_CHECKING:
    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.core.model.commands import Claimed
    from dagster_rebalance.decoding.decoder import Decoder


class HasSparkSession(Protocol):
    """This protocol names anything with a Spark session.

    `KafkaSparkResource`, dagster-pyspark's resources, and a resource of the user's own can have
    one.
    """

    @property
    def spark_session(self) -> "SparkSession":
        """The session."""


class KafkaBatch(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The offsets that a run has to process. The sensor fills it in.

    Example:
        ```python
        @dg.asset
        def orders(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> None:
            write_parquet_by_range(kafka_batch.dataframe(spark), "/data/orders")
        ```
    """

    kafka: dg.ResourceDependency[KafkaConsumerResource]
    batch_id: str = Field(default="", description="Filled in by the sensor.")
    ranges: list[str] = Field(
        default_factory=list,
        description="topic:partition:start:until of each range. Filled in by the sensor.",
    )
    _reader: RangeReader | None = PrivateAttr(default=None)
    _spark_clients: str = PrivateAttr(default="")
    _interruptions: Interruptions | None = PrivateAttr(default=None)

    @classmethod
    def for_testing(
        cls,
        ranges: Iterable[OffsetRange],
        *,
        messages: Iterable["Message"] | None = None,
        batch_id: str = "test",
    ) -> "KafkaBatch":
        """A batch for tests of an asset: without Kafka, and without the check of the run.

        Give it to the asset's function, or to `dg.materialize` among the resources.

        Args:
            ranges: The offsets that the asset is to process.
            messages: What `messages`, `dataframe` and what decodes return: records of these
                ranges, in the order of a real batch. Left out, all are refused. Dead letters go
                nowhere.
            batch_id: The id of the batch.

        Raises:
            IllegalStateError: A message lies in none of the ranges.
        """
        own = tuple(ranges)
        given = GivenMessages(own, messages)

        # Dagster copies a resource by its fields, which cannot hold messages; a copy keeps its
        # class.
        class BatchForTesting(KafkaBatch):
            """A batch whose messages are given."""

            def messages(
                self,
                ranges: OffsetRange | Iterable[OffsetRange] | None = None,
                *,
                timeout_s: float = DEFAULT_TIMEOUT_S,
            ) -> Iterator["Message"]:
                """The given messages."""
                _ = timeout_s
                return given.read(self.chosen(ranges))

            def dataframe(
                self,
                spark: HasSparkSession,
                *,
                ranges: OffsetRange | Iterable[OffsetRange] | None = None,
                options: Mapping[str, str] | None = None,
            ) -> "DataFrame":
                """The given messages, as Spark's Kafka source would have them."""
                return given.dataframe(spark.spark_session, self.chosen(ranges), options)

            def _write_letters(self, *_: object) -> None:
                """Write nothing: there is no Kafka."""

            def _letters(self, topic: str | None) -> Letters:
                return Letters(None, topic)

            # There is no run that could be refused.
            yield_for_execution = dg.ConfigurableResource.yield_for_execution

        kafka = KafkaConsumerResource(
            bootstrap_servers="none",
            group_id="test",
            topics=sorted({range_.topic for range_ in own}),
        )
        return BatchForTesting(kafka=kafka, batch_id=batch_id, ranges=[*map(spelled, own)])

    @property
    def offset_ranges(self) -> tuple[OffsetRange, ...]:
        """The half-open ranges to process.

        Key the output by range: a range is all that is ever done again, with the same bounds.
        """
        return tuple(read_range(text) for text in self.ranges)

    @property
    def _claims(self) -> "list[Claimed]":
        try:
            return [(self.batch_id, range_) for range_ in self.offset_ranges]
        except ValueError:  # spoilt by whoever launched the run, which refuses itself because of it
            return []

    @property
    def is_rerun(self) -> bool:
        """Whether a person has the ranges processed again, although the group has committed them.

        What is written by range is replaced. What cannot be, such as a message to somebody, may be
        left out.
        """
        return rerun_of(self.batch_id) != ""

    @property
    def records(self) -> int:
        """How many offsets the ranges cover.

        With transactions or compaction there are fewer records.
        """
        return sum(len(range_) for range_ in self.offset_ranges)

    def dataframe(
        self,
        spark: HasSparkSession,
        *,
        ranges: OffsetRange | Iterable[OffsetRange] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> "DataFrame":
        """A Spark DataFrame over exactly the ranges of the batch.

        It has the columns of Spark's Kafka source, and `range_start` and `range_until`.

        Args:
            spark: What has the session.
            ranges: Only this range of the batch, or these, such as those of one topic. None of them
                gives no rows. By default all.
            options: Further options of Spark's Kafka connector, such as `includeHeaders`, or
                `minPartitions` for more tasks than ranges.

        Raises:
            ConfigurationError: A security setting cannot be passed on to Spark, or would be in the
                clear on its way there; or an option would change which offsets are read.
            IllegalStateError: A range is not one of the batch.
        """
        from dagster_rebalance.spark.reading.ranges import given_records, read_ranges
        from dagster_rebalance.spark.session.jobs import tag_batch

        wanted = self.chosen(ranges)
        session = spark.spark_session
        tag_batch(session, self.batch_id)
        if not wanted:
            return given_records(session, (), (), options)
        return read_ranges(
            session,
            wanted,
            self._spark_options(spark),
            connector_options=options,
            allow_plaintext=getattr(spark, "allow_plaintext", False),
            clients=self._spark_clients,
        )

    def _spark_options(self, spark: HasSparkSession) -> dict[str, Any]:
        # A session of the user's own has no options for Kafka.
        return {**self.kafka.spark_options(), **getattr(spark, "kafka_options", {})}

    def decoded(
        self,
        spark: HasSparkSession,
        *,
        value: Encoding | None = None,
        key: Encoding | None = None,
        dead_letters: str | None = None,
        keep_undecodable: bool = False,
        ranges: OffsetRange | Iterable[OffsetRange] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> "DataFrame":
        """The DataFrame of `dataframe`, with headers, and with values, keys or both decoded.

        By default a record that cannot be decoded fails the batch. A record without a value (a
        tombstone) is none: its column is null.

        Args:
            spark: What has the session.
            value: How values are encoded: `registry.avro()`, `registry.protobuf()`,
                `registry.json_schema()` of a `SchemaRegistryResource`, or `plain_json(schema)`.
            key: The same for keys.
            dead_letters: A topic for records that cannot be decoded. They are stored there before
                this returns, and are not in the DataFrame. A replay stores them again: each letter
                has `<topic>-<partition>-<offset>` as its key.
            keep_undecodable: Instead, give them out as well: the column `undecodable` has the
                reason, the key and the value of such a record, and is null for all others.
            ranges: Only this range of the batch, or these, such as those of one topic. None of them
                gives no rows. By default all.
            options: Further options of Spark's Kafka connector.

        Raises:
            BrokerError: Kafka or the registry could not be asked, or a letter not be stored.
            ConfigurationError: Settings contradict each other, or the reader's schema is missing
                or cannot be used; or as of `dataframe`.
            IllegalStateError: A range is not one of the batch.
        """
        from dagster_rebalance.spark.reading import decoded_frame as in_spark

        decoding = Decoding.of(
            self.kafka,
            key=key,
            value=value,
            dead_letters=dead_letters,
            keep_undecodable=keep_undecodable,
        )
        wanted = self.chosen(ranges)
        frame = self.dataframe(
            spark, ranges=wanted, options={**(options or {}), "includeHeaders": "true"}
        )
        decoders = decoding.decoders(self._topics(wanted))
        framed = [decoder.part for decoder in decoders if decoder.format != "plain_json"]
        decoders = with_known_schemas(decoders, in_spark.schema_ids(frame, framed))
        if dead_letters is not None and wanted:
            self._write_letters(spark, frame, decoders, dead_letters)
        return in_spark.decoded_frame(frame, decoders, decoding.on_undecodable)

    def messages(
        self,
        ranges: OffsetRange | Iterable[OffsetRange] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Iterator["Message"]:
        """The records of the batch as confluent-kafka gives them, without Spark.

        They come as they are read, so a large batch needs little memory. Records of one partition
        come in the order of their offsets; the partitions are read side by side, in any order.
        There are fewer records than offsets where Kafka keeps marks of transactions, records of
        aborted ones (unless `isolation.level` is `read_uncommitted`), or has compacted.

        Args:
            ranges: Only this range of the batch, or these, to write one output after the other.
                None of them gives no records. By default all.
            timeout_s: How long reading may be without progress: brokers restart in this time.

        Raises:
            BrokerError: Kafka no longer has all of the offsets, does not answer, or refuses. None
                is skipped.
            IllegalStateError: A range is not one of the batch.
        """
        wanted = self.chosen(ranges)
        if not wanted:
            return iter(())
        if self._reader is None:
            self._reader = self.kafka.reader()
        return self._reader.read(wanted, timeout_s)

    def _topics(self, wanted: Iterable[OffsetRange]) -> frozenset[str]:
        """The topics whose schemas decode some ranges.

        No ranges are those of a topic that the batch has nothing of, where the group has one.
        """
        own = frozenset(range_.topic for range_ in self.offset_ranges)
        named = frozenset(topic for topic in self.kafka.topics if is_topic_name(topic))
        return frozenset(range_.topic for range_ in wanted) or named - own or own

    def _write_letters(
        self,
        spark: HasSparkSession,
        frame: "DataFrame",
        decoders: "Sequence[Decoder]",
        topic: str,
    ) -> None:
        from dagster_rebalance.spark.reading.decoded_frame import write_letters

        check_letter_topic(self.kafka, topic)
        write_letters(frame, decoders, topic, self._spark_options(spark))

    def _letters(self, topic: str | None) -> Letters:
        return Letters(self.kafka, topic)

    def decoded_messages(
        self,
        ranges: OffsetRange | Iterable[OffsetRange] | None = None,
        *,
        value: Encoding | None = None,
        key: Encoding | None = None,
        dead_letters: str | None = None,
        keep_undecodable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Iterator[DecodedMessage]:
        """The records of `messages`, each with its value, its key or both decoded.

        Args:
            ranges: As of `messages`.
            value: How values are encoded, as of `decoded`.
            key: The same for keys.
            dead_letters: As of `decoded`. The letters of what the loop has passed are stored.
            keep_undecodable: Instead, give such records out as well, with the reason.
            timeout_s: As of `messages`.

        Raises:
            BrokerError: As of `messages`; or the registry could not be asked, or a letter not be
                stored.
            ConfigurationError: As of `decoded`.
            IllegalStateError: A range is not one of the batch.
            UndecodableError: A record cannot be decoded, and nobody has said where it goes.
        """
        decoding = Decoding.of(
            self.kafka,
            key=key,
            value=value,
            dead_letters=dead_letters,
            keep_undecodable=keep_undecodable,
        )
        wanted = self.chosen(ranges)
        messages = self.messages(wanted, timeout_s=timeout_s)
        decoders = decoding.decoders(self._topics(wanted))
        letters = self._letters(dead_letters)
        return decoded_messages(messages, decoders, letters, keep_undecodable=keep_undecodable)

    def arrow(
        self,
        ranges: OffsetRange | Iterable[OffsetRange] | None = None,
        *,
        value: Encoding | None = None,
        key: Encoding | None = None,
        dead_letters: str | None = None,
        keep_undecodable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Any:  # noqa: ANN401 - pyarrow has no types
        """The records of the batch as a `pyarrow.RecordBatchReader`, without Spark.

        It has the columns of `dataframe` with headers, and reads as it is read; `read_all()` makes
        a `pyarrow.Table` of it. Polars, DuckDB, pandas and others take it as it is.

        Args:
            ranges: As of `messages`.
            value: How values are encoded, as of `decoded`; their column is then a struct.
            key: The same for keys.
            dead_letters: As of `decoded`. The letters of what was read are stored.
            keep_undecodable: As of `decoded`.
            timeout_s: As of `messages`.

        Raises:
            BrokerError: As of `decoded_messages`, while it is read.
            ConfigurationError: pyarrow is missing; or as of `decoded`.
            IllegalStateError: A range is not one of the batch.
            UndecodableError: A record cannot be decoded, and nobody has said where it goes.
        """
        decoding = Decoding.of(
            self.kafka,
            key=key,
            value=value,
            dead_letters=dead_letters,
            keep_undecodable=keep_undecodable,
        )
        wanted = self.chosen(ranges)
        decoders = decoding.decoders(self._topics(wanted))
        schema = decoded_schema(decoders, keeps_undecodable=keep_undecodable)
        batches = record_batches(self.messages(wanted, timeout_s=timeout_s), wanted)
        if decoding.encodings:
            letters = self._letters(dead_letters)
            batches = decoded_batches(batches, decoders, letters, decoding.on_undecodable)
        return pyarrow().RecordBatchReader.from_batches(schema, batches)

    def chosen(self, ranges: OffsetRange | Iterable[OffsetRange] | None) -> tuple[OffsetRange, ...]:
        """Some ranges of the batch; all of them where nothing is said.

        Raises:
            IllegalStateError: One is not a range of the batch.
        """
        own = self.offset_ranges
        if ranges is None:
            return own
        wanted = (ranges,) if isinstance(ranges, OffsetRange) else tuple(ranges)
        for range_ in wanted:
            if range_ not in own:
                msg = (
                    f"{range_} is no range of batch {self.batch_id}: give some of its "
                    "offset_ranges, or leave them out for all"
                )
                raise IllegalStateError(msg)
        return wanted

    def read_by(self, reader: RangeReader, spark_clients: str = "") -> Self:
        """Let what outlives the batch read its records. Returns the batch.

        Args:
            reader: Reads its messages.
            spark_clients: Names the clients of Spark that may read them; empty for new ones.
        """
        self._reader = reader
        self._spark_clients = spark_clients
        return self

    def pipes_extras(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The batch for a Dagster Pipes client, whose other side reads it with `PipesBatch`.

        Call it where the client is called: from there on the run knows when it is interrupted,
        also by a client that keeps that to itself.

        Args:
            more: Further extras. Pipes may put its context into variables of the environment, logs
                and files that many can read, so no secret travels: give a login on the other side.

        Raises:
            ConfigurationError: One of `more` is a secret by its name, or has a secret of the
                group's login in it; or it has the name under which the batch travels.
        """
        settings = self.kafka.consumer_config()
        sent = SentBatch(
            self.batch_id,
            self.kafka.group_id,
            self.offset_ranges,
            isolation_level(settings),
        ).extras
        check_no_secrets(more or {}, {**self.kafka.client_config, **settings}, taken=sent)
        if self._interruptions is not None:
            self._interruptions.watch()
        return {**(more or {}), **sent}

    def metadata(self, *, row_count: int | None = None) -> dict[str, Any]:
        """What is worth showing on the materialisation of an asset: the batch and its ranges.

        Args:
            row_count: How many records were written, for Dagster's chart. `write_parquet_by_range`
                returns it; the number of offsets is another one with transactions, compaction or
                a filter.
        """
        shown = {
            "batch": self.batch_id,
            "ranges": dg.MetadataValue.md(
                "\n".join(f"- `{range_}`" for range_ in self.offset_ranges)
            ),
            "offsets": self.records,
        }
        return shown if row_count is None else {**shown, "dagster/row_count": row_count}

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["KafkaBatch"]:
        """Check that the run may work, and show that it lives while it does."""
        run, instance = context.run, context.instance
        if run is None or instance is None or not self.batch_id or not self.ranges:
            msg = (
                "This run has no batch of Kafka offsets. Runs of this job are started by its "
                "sensor, which gives them one: turn it on. "
                "To process a batch again after a failure, re-execute its run; to process past "
                "ranges again, use dagster-rebalance rerun or the job of the group for that."
            )
            raise dg.Failure(msg, allow_retries=False)
        heartbeat = Heartbeat(
            instance,
            run,
            timeout_s=self.kafka.heartbeat_timeout_s,
            limit_s=self.kafka.batch_limit_s(),
        )
        heartbeat.has_lost_its_work = jvm_has_died
        heartbeat.begin()
        try:
            why_not = self._refusal(instance, run.run_id) or heartbeat.why_too_late()
        except Exception:
            # It has not worked. Without this word its owner waits for the time-out.
            with suppress(Exception):
                record_run_event(instance, run, RunEvent.REFUSED)
            raise
        if why_not is not None:
            self._refuse(instance, run, why_not)
        heartbeat.note_work(self._claims)
        why_not = heartbeat.why_too_late()
        if why_not is not None:  # until here no thread has watched the time
            RangeOwners(instance).erase(run.run_id, self._claims)
            self._refuse(instance, run, why_not)
        self._interruptions = Interruptions()
        with heartbeat, apart(instance), closing(self.kafka.reader()) as reader:
            yield self.read_by(reader)
            self._interruptions.check(run.run_id)

    def _refuse(self, instance: dg.DagsterInstance, run: dg.DagsterRun, why: str) -> NoReturn:
        record_run_event(instance, run, RunEvent.REFUSED)
        instance.add_run_tags(
            run.run_id, {REFUSED_TAG: run.run_id, REFUSAL_TAG: why[:MOST_REFUSAL_CHARACTERS]}
        )
        # Nothing of the config is shown: a launcher may have put the name of a variable there, and
        # Dagster its value in the place.
        msg = f"This run must not process batch {run.tags.get(BATCH_TAG) or '(none)'}: {why}"
        raise dg.Failure(msg, allow_retries=False) from BatchRefusedError(why)

    def _refusal(self, instance: dg.DagsterInstance, run_id: str) -> str | None:
        runs = RunLedger(instance, self.kafka.group_id).read(
            [self.batch_id], live_too=True, claims=self._claims
        )
        me = next(
            (run for run in runs if run.run_id == run_id and run.batch_id == self.batch_id), None
        )
        if me is None:
            return (
                f"the batch id in its run config is not that of its tag {BATCH_TAG}, by which its "
                "owner looks for it, "
                f"or its job is not the one that a sensor of group {self.kafka.group_id} requests"
            )
        if not me.ranges or me.ranges != self.offset_ranges:
            return "its ranges are not those of its run config"
        paused = self._paused(instance)
        if paused is not None:
            return paused
        try:
            with self.kafka.connect() as consumer:
                committed = consumer.committed([range_.topic_partition for range_ in me.ranges])
        except BrokerError as error:
            # A refusal is no failed attempt: an outage of Kafka must not stop a partition.
            return f"Kafka could not be asked whether its claim stands: {error}"
        if rerun_of(self.batch_id):
            book = RerunStore(instance, GroupAssets.of(self.kafka.group_id).rerun_book_name)
            planned = next((one for one in book.read() if one.batch_id == self.batch_id), None)
            return rerun_refusal(me, runs, committed, planned)
        return refusal(me, runs, committed)

    def _paused(self, instance: dg.DagsterInstance) -> str | None:
        """Why a person does not want any of the ranges to be worked on; None when nobody minds."""
        assets = GroupAssets.of(self.kafka.group_id)
        orders = DirectiveStore(instance, assets.order_book_name).read()
        for partition in (range_.topic_partition for range_ in self.offset_ranges):
            order = in_force(orders, partition)
            if order is not None:
                return f"{partition} is {order}"
        return None
