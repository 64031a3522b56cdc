"""`KafkaBatch`: the batch of a run, as a resource of its assets.

A run performs its start check when its status is already STARTED, so other runs of the batch detect
it. A run that must not process the batch records REFUSED, which is not a failed attempt, and fails
with the reason.
"""

# No `from __future__ import annotations` here: Dagster recognizes a nested resource by its
# evaluated annotation.
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import dagster as dg
from pydantic import Field, PrivateAttr
from typing_extensions import Self

from dagster_rebalance.core.batches.pipes_payload import SentBatch, sent_positions
from dagster_rebalance.core.model.directives import in_force
from dagster_rebalance.core.model.errors import (
    BatchRefusedError,
    BrokerError,
    ConfigurationError,
    IllegalStateError,
)
from dagster_rebalance.core.model.letters import Letter, LetterStamp
from dagster_rebalance.core.model.offsets import OffsetRange, is_topic_name
from dagster_rebalance.core.runs.bisection import Part, whole_batch
from dagster_rebalance.core.runs.rerun_batch import rerun_of
from dagster_rebalance.core.runs.start_check import refusal, rerun_refusal
from dagster_rebalance.core.runs.stream_batch import StreamBatch
from dagster_rebalance.kafka.client.settings import isolation_level
from dagster_rebalance.kafka.reading.range_reader import DEFAULT_TIMEOUT_S, RangeReader
from dagster_rebalance.orchestration.batch.arrow_records import pyarrow, record_batches
from dagster_rebalance.orchestration.batch.letters import (
    BatchLetters,
    LetterProducers,
    Position,
    check_columns,
    checked,
    letters_at,
    letters_to_set_aside,
    offset_check,
    positions_in,
    with_reasons,
    without,
)
from dagster_rebalance.orchestration.batch.records import (
    DecodedMessage,
    Decoding,
    GivenMessages,
    PassedRecords,
    decoded_batches,
    decoded_messages,
    decoded_schema,
    with_known_schemas,
)
from dagster_rebalance.orchestration.batch.replayed import single_records
from dagster_rebalance.orchestration.resources.hardcoded_secrets import (
    check_no_secrets,
    without_secrets,
)
from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource, RecordFilter
from dagster_rebalance.orchestration.resources.registry import Encoding
from dagster_rebalance.orchestration.runs.coverage import Coverage
from dagster_rebalance.orchestration.runs.heartbeat import Heartbeat
from dagster_rebalance.orchestration.runs.run_ledger import RunLedger
from dagster_rebalance.orchestration.runs.signals import Interruptions, isolate_forks
from dagster_rebalance.orchestration.storage.dynamic_partitions import DirectiveStore, RerunStore
from dagster_rebalance.orchestration.storage.failure_notes import text_of_error
from dagster_rebalance.orchestration.storage.names import GroupAssets
from dagster_rebalance.orchestration.storage.range_owners import RangeOwners
from dagster_rebalance.orchestration.storage.run_tags import (
    BATCH_TAG,
    MAX_REFUSAL_CHARACTERS,
    REFUSAL_TAG,
    REFUSED_TAG,
    SET_ASIDE_TAG,
    RunEvent,
    attempt_of,
    format_range,
    parse_ranges,
    record_run_event,
    set_aside_of,
)
from dagster_rebalance.outputs.publication import note_failed_ranges
from dagster_rebalance.spark.spark_jobs import jvm_has_died

if TYPE_CHECKING:
    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.core.model.commands import Claimed


_BATCHES_KEPT = 4
_MOST_NAMED = 100
"""Limit of letters in a tag."""


@lru_cache(_BATCHES_KEPT)
def _parsed(texts: tuple[str, ...]) -> Mapping[OffsetRange, None]:
    """Return the ranges of a batch, in order: an asset may ask for each of a thousand ranges."""
    return dict.fromkeys(parse_ranges(texts))


def _has_columns(records: object) -> bool:
    return type(records).__module__.startswith(("pyarrow", "pyspark")) and hasattr(
        records, "schema"
    )


def _is_spark(rows: object) -> bool:
    return type(rows).__module__.startswith("pyspark")


def _spark_positions(
    frame: "DataFrame", error: str | None
) -> list[tuple[str, int, int, str | None]]:
    from dagster_rebalance.spark.set_aside import positions_in as positions_in_frame

    return positions_in_frame(frame, error)


class HasCustomMessages(Protocol):
    """The result of a client of Dagster Pipes."""

    def get_custom_messages(self) -> Sequence[Any]:
        """Return the messages of the job."""


_PipesResult = TypeVar("_PipesResult", bound=HasCustomMessages)


class HasSparkSession(Protocol):
    """A resource with a Spark session: `KafkaSparkResource`, dagster-pyspark's, or the user's."""

    @property
    def spark_session(self) -> "SparkSession":
        """The session."""


class KafkaBatch(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The offsets that a run must process. The sensor fills it in.

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
        description="topic:partition:start:until of each range; further ranges of the topic may "
        "follow as ,partition:start:until. Filled in by the sensor.",
    )
    _reader: RangeReader | None = PrivateAttr(default=None)
    _spark_clients: str = PrivateAttr(default="")
    _interruptions: Interruptions | None = PrivateAttr(default=None)
    _letters: BatchLetters | None = PrivateAttr(default=None)
    _letter_topics: set[str] = PrivateAttr(default_factory=set)
    _replayed_topic: str = PrivateAttr(default="")
    _replayed: GivenMessages | None = PrivateAttr(default=None)
    _passed: PassedRecords | None = PrivateAttr(default=None)
    _begun: "Iterator[list[Message]] | None" = PrivateAttr(default=None)

    @classmethod
    def for_testing(
        cls,
        ranges: Iterable[OffsetRange],
        *,
        messages: Iterable["Message"] | None = None,
        batch_id: str = "test",
        only: RecordFilter | None = None,
    ) -> "KafkaBatch":
        """Return a batch for tests of an asset, without Kafka and without the start check.

        Pass it to the asset's function, or to `dg.materialize` among the resources.

        Args:
            ranges: The offsets that the asset must process.
            messages: The records that `messages`, `dataframe` and the decoding methods return, in
                the order of a real batch. Each must be in one of the ranges. Without messages,
                these methods raise. Letters are not stored, but collected in `letters`.
            batch_id: The id of the batch.
            only: The filter of the group.

        Raises:
            IllegalStateError: A message is in none of the ranges.
        """
        own = tuple(ranges)
        given = GivenMessages(own, messages)
        collected: dict[str, Letter] = {}

        class BatchForTesting(collecting_batch(collected)):  # type: ignore[misc] # a class of this call
            """A batch with the messages of a test."""

            def _read_all(
                self, wanted: Sequence[OffsetRange], _timeout_s: float
            ) -> Iterator[list["Message"]]:
                return ([message] for message in given.read(wanted))

            def _frame(
                self,
                spark: HasSparkSession,
                wanted: Sequence[OffsetRange],
                options: Mapping[str, str] | None,
            ) -> "DataFrame":
                return given.dataframe(spark.spark_session, wanted, options)

            @property
            def _letter_topic(self) -> str:
                return ""

            # Without the start check.
            yield_for_execution = dg.ConfigurableResource.yield_for_execution

        kafka = KafkaConsumerResource(
            bootstrap_servers="none",
            group_id="test",
            topics=sorted({range_.topic for range_ in own}),
            only=only,
        )
        return BatchForTesting(kafka=kafka, batch_id=batch_id, ranges=[*map(format_range, own)])

    @property
    def offset_ranges(self) -> tuple[OffsetRange, ...]:
        """The half-open ranges to process.

        Key the output by range: a retry or a rerun processes whole ranges with the same bounds.
        """
        return tuple(self._known)

    @property
    def _known(self) -> Mapping[OffsetRange, None]:
        return _parsed(tuple(self.ranges))

    @property
    def _claims(self) -> "list[Claimed]":
        try:
            return [(self.batch_id, range_) for range_ in self.offset_ranges]
        except ValueError:  # changed in the launchpad; the start check refuses the run
            return []

    @property
    def is_rerun(self) -> bool:
        """Whether an operator requested these ranges again, after the group has committed them.

        Output by range is replaced. Skip effects that cannot be replaced, such as e-mails.
        """
        return rerun_of(self.batch_id) != ""

    @property
    def failed_ranges(self) -> tuple[OffsetRange, ...]:
        """The larger ranges of which this batch is a part, and on which earlier attempts failed.

        With `on_failure="bisect"`, a failed range is attempted in parts. Outputs of this package
        replace what failed attempts have written. An output of your own, keyed by range, must
        delete these ranges.
        """
        part = Part.parse(self.batch_id)
        if part is None:
            return ()
        return tuple(chain.from_iterable(map(part.larger, self.offset_ranges)))

    @property
    def records(self) -> int:
        """The number of offsets in the ranges. Compaction and transactions leave fewer records."""
        return sum(len(range_) for range_ in self.offset_ranges)

    @property
    def set_aside_records(self) -> int:
        """The number of records that were set aside so far, also by an earlier attempt."""
        return 0 if self._letters is None else self._letters.count

    @property
    def left_out_records(self) -> int:
        """The number of records that `only` has left out so far, without those read in Spark."""
        return self._passed_records.left_out

    def is_left_out(self) -> bool:
        """Return whether `only` leaves out all records of the batch.

        The records are read up to the first other one. A streaming run calls no asset for a batch
        that is left out.

        Raises:
            BrokerError: See `messages`.
        """
        if self.kafka.only is None:
            return False
        lists = self._read(self.offset_ranges, DEFAULT_TIMEOUT_S)
        for first in lists:
            if first:
                self._begun = chain([first], lists)
                return False
        return True

    def dataframe(
        self,
        spark: HasSparkSession,
        *,
        ranges: OffsetRange | Iterable[OffsetRange] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> "DataFrame":
        """Return a Spark DataFrame over exactly the ranges of the batch.

        It has the columns of Spark's Kafka source, and `range_start` and `range_until`.

        Args:
            spark: The resource with the session.
            ranges: One or more ranges of the batch, such as those of one topic. An empty iterable
                gives no rows. Default: all ranges.
            options: Further options of Spark's Kafka connector, such as `includeHeaders`, or
                `minPartitions` for more tasks than ranges.

        Raises:
            ConfigurationError: A security setting has no equivalent in Spark, a login would be sent
                unencrypted, or an option would change which offsets are read.
            IllegalStateError: A range is not one of the batch.
        """
        from dagster_rebalance.spark.ranges import filtered_read

        self._begun = None
        wanted, only = self.chosen(ranges), self.kafka.predicate()
        return filtered_read(partial(self._frame, spark, wanted), options, only)

    def _frame(
        self,
        spark: HasSparkSession,
        wanted: Sequence[OffsetRange],
        options: Mapping[str, str] | None,
    ) -> "DataFrame":
        """Return all records of some ranges."""
        from dagster_rebalance.spark.ranges import joined_reads, read_ranges
        from dagster_rebalance.spark.spark_jobs import show_causes, tag_batch

        session = spark.spark_session
        tag_batch(session, self.batch_id)
        if self.kafka.on_failure == "bisect":
            show_causes(session)
        replayed = [range_ for range_ in wanted if self._is_replayed(range_)]
        left = [range_ for range_ in wanted if not self._is_replayed(range_)]
        given = None
        if replayed or not wanted:
            messages = self._replayed or GivenMessages((), ())
            given = messages.dataframe(session, replayed, options)
        if given is not None and not left:
            return given
        read = read_ranges(
            session,
            left,
            self._spark_options(spark),
            connector_options=options,
            allow_plaintext=getattr(spark, "allow_plaintext", False),
            clients=self._spark_clients,
        )
        return read if given is None else joined_reads(read, given, wanted)

    def _is_replayed(self, range_: OffsetRange) -> bool:
        """Whether the record of a range was read before the assets began (`single_records`)."""
        return self._replayed is not None and len(range_) == 1

    def _spark_options(self, spark: HasSparkSession) -> dict[str, Any]:
        # Other resources with a session have no options for Kafka.
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
        """Return the DataFrame of `dataframe` with headers, and with values, keys or both decoded.

        By default a record that cannot be decoded fails the batch. The value of a tombstone is
        null, and not an error.

        Args:
            spark: The resource with the session.
            value: The encoding of values: `registry.avro()`, `registry.protobuf()`,
                `registry.json_schema()` of a `SchemaRegistryResource`, or `plain_json(schema)`.
            key: The encoding of keys.
            dead_letters: A topic for undecodable records. They are stored there before this method
                returns, and are not in the DataFrame.
            keep_undecodable: Return undecodable records, too, instead of failing. Their column
                `undecodable` has the reason, the key and the value; it is null in all other rows.
            ranges: See `dataframe`.
            options: Further options of Spark's Kafka connector.

        Raises:
            BrokerError: Kafka or the registry did not answer, or a dead letter could not be stored.
            ConfigurationError: Settings contradict each other, or the reader's schema is missing
                or invalid. See also `dataframe`.
            IllegalStateError: A range is not one of the batch.
        """
        from dagster_rebalance.spark import decoded_frame as in_spark

        decoding = self._decoding(key, value, dead_letters, keep_undecodable=keep_undecodable)
        wanted = self.chosen(ranges)
        frame = self.dataframe(
            spark, ranges=wanted, options={**(options or {}), "includeHeaders": "true"}
        )
        decoders = decoding.decoders(self._topics(wanted))
        framed = [decoder.part for decoder in decoders if decoder.format != "plain_json"]
        if framed:
            records = self.dataframe(spark, ranges=wanted, options=options)
            decoders = with_known_schemas(decoders, in_spark.schema_ids(records, framed))
        if dead_letters is not None and wanted:
            found = in_spark.undecodable_records(frame, decoders)
            self._store(letters_at(found, self._read_again), dead_letters)
        return in_spark.decoded_frame(frame, decoders, decoding.on_undecodable)

    def _decoding(
        self,
        key: Encoding | None,
        value: Encoding | None,
        dead_letters: str | None,
        *,
        keep_undecodable: bool,
    ) -> Decoding:
        if dead_letters is not None:
            self._letter_topics.add(dead_letters)
        return Decoding.of(self.kafka, key, value, dead_letters, keep_undecodable=keep_undecodable)

    def messages(
        self,
        ranges: OffsetRange | Iterable[OffsetRange] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Iterator["Message"]:
        """Return the records of the batch as messages of confluent-kafka, without Spark.

        The messages are read lazily, so a large batch needs little memory. Messages of one
        partition are in the order of their offsets; partitions are read concurrently, in any order.
        After compaction and with transactions there are fewer messages than offsets: transaction
        markers have none, nor have aborted records unless `isolation.level` is `read_uncommitted`.

        Args:
            ranges: One or more ranges of the batch, for example to write one output per range. An
                empty iterable gives no records. Default: all ranges.
            timeout_s: Maximum seconds without progress. Set it above the time of a broker restart.

        Raises:
            BrokerError: Kafka no longer has all of the offsets, does not answer, or refuses. No
                record is skipped.
            IllegalStateError: A range is not one of the batch.
        """
        return chain.from_iterable(self._read(self.chosen(ranges), timeout_s))

    def _read(self, wanted: Sequence[OffsetRange], timeout_s: float) -> Iterator[list["Message"]]:
        begun, self._begun = self._begun, None
        if begun is not None and (tuple(wanted), timeout_s) == (
            self.offset_ranges,
            DEFAULT_TIMEOUT_S,
        ):
            return begun  # by is_left_out
        return self._passed_records.of(self._read_all(wanted, timeout_s))

    @property
    def _passed_records(self) -> PassedRecords:
        if self._passed is None:
            self._passed = PassedRecords(self.kafka.predicate(), self.offset_ranges)
        return self._passed

    def _read_all(
        self, wanted: Sequence[OffsetRange], timeout_s: float
    ) -> Iterator[list["Message"]]:
        lists: Iterator[list[Message]] = iter(())
        if self._replayed is not None:
            given = [range_ for range_ in wanted if self._is_replayed(range_)]
            lists = ([message] for message in self._replayed.read(given))
            wanted = [range_ for range_ in wanted if not self._is_replayed(range_)]
        if not wanted:
            return lists
        if self._reader is None:
            self._reader = self.kafka.reader()
        return chain(lists, self._reader.read_lists(wanted, timeout_s))

    def _topics(self, wanted: Iterable[OffsetRange]) -> frozenset[str]:
        """Return the topics whose schemas decode the wanted ranges.

        Without ranges, return the topics of the group that the batch does not have, if any.
        """
        own = frozenset(range_.topic for range_ in self.offset_ranges)
        named = frozenset(topic for topic in self.kafka.topics if is_topic_name(topic))
        return frozenset(range_.topic for range_ in wanted) or named - own or own

    def _read_again(self, ranges: Sequence[OffsetRange]) -> Iterator["Message"]:
        if self._replayed is not None:
            ranges = [own for own in self.offset_ranges if any(map(own.overlaps, ranges))]
        return chain.from_iterable(self._read_all(ranges, DEFAULT_TIMEOUT_S))

    @property
    def letters(self) -> tuple[Letter, ...]:
        """The letters that a batch of `for_testing` would have stored. Other batches keep none."""
        return ()

    def _store(self, letters: Iterable[Letter], topic: str) -> int:
        if self._letters is None:  # outside of a run
            self.store_letters_by(LetterProducers(self.kafka))
        return self._letters.store(letters, topic)  # type: ignore[union-attr]

    def set_aside(self, records: object, error: BaseException | str) -> int:
        """Store records that the asset does not process in `dead_letter_topic`.

        When this method returns, all in-sync replicas have the letters. The offsets of the batch
        are committed later. A repeated batch stores no second letter for a record.

        Args:
            records: A message of `messages` or `decoded_messages`, an iterable of them, a pyarrow
                `Table` or `RecordBatch` with the columns `topic`, `partition` and `offset` of
                `arrow`, or a Spark DataFrame with these columns of `dataframe` or `decoded`.
            error: The reason: an exception or a text. For rows, an exception, or the name of the
                column with the reasons.

        Returns:
            The number of records.

        Raises:
            BrokerError: A letter could not be stored, or Kafka no longer has one of the records.
            ConfigurationError: The group has no `dead_letter_topic`.
            IllegalStateError: A record is not in the batch, or a column is missing.
        """
        topic, check = self._letter_topic, offset_check(self.offset_ranges, self.batch_id)
        column = error if isinstance(error, str) else None
        reason = error if isinstance(error, str) else self._reason_of(error)
        if not _has_columns(records):
            letters = letters_to_set_aside(records, reason)
            return self._store(checked(letters, check), topic)
        rows: Any = records
        check_columns(rows.schema.names, column)
        found = _spark_positions(rows, column) if _is_spark(rows) else positions_in(rows, column)
        return self._set_aside_at(with_reasons(found, None if column else reason), topic)

    def good_rows(self, rows: Any, *, error: str) -> Any:  # noqa: ANN401 - a DataFrame or an Arrow table
        """Set aside the rows that have a reason, and return the other rows without this column.

        No row of a record that is set aside is returned, even if the record has several rows. Spark
        caches a DataFrame until the batch has ended, and computes it once. With Spark Connect it is
        computed twice; the first computation decides which records are set aside.

        Args:
            rows: As `records` of `set_aside`: a DataFrame, a `Table` or a `RecordBatch`.
            error: The column with the reasons. It is null in good rows.

        Raises:
            BrokerError: See `set_aside`.
            ConfigurationError: See `set_aside`.
            IllegalStateError: See `set_aside`.
        """
        topic = self._letter_topic
        if not _has_columns(rows):
            msg = (
                f"good_rows takes a DataFrame or an Arrow table, not a {type(rows).__name__}: set "
                "aside single records with kafka_batch.set_aside"
            )
            raise IllegalStateError(msg)
        check_columns(rows.schema.names, error)
        if _is_spark(rows):
            from dagster_rebalance.spark.set_aside import split

            good, found = split(rows, error, self.batch_id)
        else:
            bad = rows.filter(rows.column(error).is_valid())
            found = positions_in(bad, error)
            kept = [name for name in rows.schema.names if name != error]
            good = without(rows.filter(rows.column(error).is_null()), bad).select(kept)
        self._set_aside_at(with_reasons(found, None), topic)
        return good

    def _set_aside_at(self, positions: Iterable[Position], topic: str) -> int:
        check = offset_check(self.offset_ranges, self.batch_id)
        wanted = list(positions)
        for position in wanted:
            check(*position[:3])
        return self._store(letters_at(wanted, self._read_again), topic)

    @property
    def _letter_topic(self) -> str:
        topic = self.kafka.dead_letter_topic
        if topic is None:
            msg = (
                f"group {self.kafka.group_id} has no dead_letter_topic for records that are set "
                "aside: create a topic, and name it as dead_letter_topic of the Kafka resource"
            )
            raise ConfigurationError(msg)
        return topic

    def _reason_of(self, error: BaseException) -> str:
        return without_secrets(text_of_error(error), self.kafka)

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
        """Return the records of `messages`, each with its value, its key or both decoded.

        See `messages` and `decoded` for the arguments and errors. The dead letters of all records
        before the current message are already stored.

        Raises:
            UndecodableError: A record cannot be decoded, without `dead_letters` and
                `keep_undecodable`.
        """
        decoding = self._decoding(key, value, dead_letters, keep_undecodable=keep_undecodable)
        wanted = self.chosen(ranges)
        messages = self.messages(wanted, timeout_s=timeout_s)
        decoders = decoding.decoders(self._topics(wanted))
        store = None if dead_letters is None else partial(self._store, topic=dead_letters)
        return decoded_messages(messages, decoders, store, keep_undecodable=keep_undecodable)

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
        """Return the records of the batch as a `pyarrow.RecordBatchReader`, without Spark.

        It has the columns of `dataframe` with headers, and reads lazily. `read_all()` returns a
        `pyarrow.Table`. Polars, DuckDB, pandas and others accept the reader.

        See `messages` and `decoded` for the arguments. Reading raises `BrokerError` and
        `UndecodableError`. A decoded column is a struct. The dead letters of the record batches
        that were read are already stored.

        Raises:
            ConfigurationError: pyarrow is missing. See also `decoded`.
            UndecodableError: See `decoded_messages`.
        """
        decoding = self._decoding(key, value, dead_letters, keep_undecodable=keep_undecodable)
        wanted = self.chosen(ranges)
        decoders = decoding.decoders(self._topics(wanted))
        schema = decoded_schema(decoders, keeps_undecodable=keep_undecodable)
        batches = record_batches(self._read(wanted, timeout_s), wanted)
        if decoding.encodings:
            store = None if dead_letters is None else partial(self._store, topic=dead_letters)
            batches = decoded_batches(batches, decoders, store, decoding.on_undecodable)
        return pyarrow().RecordBatchReader.from_batches(schema, batches)

    def chosen(self, ranges: OffsetRange | Iterable[OffsetRange] | None) -> tuple[OffsetRange, ...]:
        """Return the given ranges of the batch; by default all.

        Raises:
            IllegalStateError: A range is not one of the batch.
        """
        if ranges is None:
            return self.offset_ranges
        wanted = (ranges,) if isinstance(ranges, OffsetRange) else tuple(ranges)
        for range_ in wanted:
            if range_ not in self._known:
                msg = (
                    f"{range_} is no range of batch {self.batch_id}: give some of its "
                    "offset_ranges, or omit ranges for all of them"
                )
                raise IllegalStateError(msg)
        return wanted

    def read_by(self, reader: RangeReader, spark_clients: str = "") -> Self:
        """Set the cached clients that read the records. Return the batch.

        Args:
            reader: Reads the messages.
            spark_clients: The name of cached Spark clients; empty for new ones.
        """
        self._reader = reader
        self._spark_clients = spark_clients
        return self

    def store_letters_by(
        self,
        producers: LetterProducers,
        *,
        run_id: str = "",
        attempt: int = 1,
        is_repeat: bool = True,
        on_first: Callable[[], None] = lambda: None,
    ) -> Self:
        """Set the producers of letters, and the attempt that stores them. Return the batch.

        Args:
            producers: The producers of the run.
            run_id: The run.
            attempt: The number of the attempt, from 1.
            is_repeat: Whether an earlier attempt may have stored letters of the batch.
            on_first: Is called before the first letter is stored.
        """
        note_failed_ranges(self.failed_ranges)
        if self._reader is None:
            self._reader = self.kafka.reader()
        stamp = partial(LetterStamp, self.kafka.group_id, self.batch_id, run_id, attempt)
        part = Part.parse(self.batch_id)
        self._letters = BatchLetters(
            producers,
            producers.reader,
            self.offset_ranges,
            stamp,
            is_repeat=is_repeat,
            bisected=None if part is None else part.bisected(self.offset_ranges[0]),
            limit=self.kafka.letter_limit(),
            on_first=on_first,
        )
        return self

    def close_processed_letters(self) -> str:
        """Mark the letters of earlier attempts on records that this one has processed.

        Call this method after the success of a repeated batch or a rerun. Returns a warning, or "".
        """
        letters = self._letters
        # A tick marks the letters of a rerun if its run names the others.
        if letters is None or (self.is_rerun and len(letters.keys) <= _MOST_NAMED):
            return ""
        own = {self.kafka.dead_letter_topic, self._replayed_topic, *self._letter_topics}
        try:
            for topic in sorted(filter(None, own)):
                letters.close_processed(topic)
        except Exception as error:  # noqa: BLE001 - the batch has succeeded
            return (
                f"letters of earlier attempts on batch {self.batch_id} are not marked as replayed, "
                f"so a replay would process their records again: {error}"
            )
        return ""

    def pipes_extras(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the batch as extras of a Dagster Pipes client; the job reads it with `PipesBatch`.

        Call this method directly before the client: from then on, the run detects interrupts, even
        if the client suppresses them. If the job sets records aside, use `run_pipes`.

        Args:
            more: Further extras, without secrets: Pipes may store its context in environment
                variables, logs and readable files. Pass logins to the job directly.

        Raises:
            ConfigurationError: An item of `more` has the name of a secret, contains a secret of the
                group's login, or has a name that the batch uses.
        """
        return self._pipes_extras(more, takes_letters=False)

    def run_pipes(
        self,
        run: Callable[..., _PipesResult],
        *,
        extras: Mapping[str, Any] | None = None,
        **arguments: Any,  # noqa: ANN401 - those of the client
    ) -> _PipesResult:
        """Run a job of Dagster Pipes, and store the letters of the records that it sets aside.

        The job must set records aside in `with batch.letters(pipes)` (see `PipesBatch.letters`),
        which also reports that there are none. When this method returns, all in-sync replicas have
        the letters.

        Example:
            ```python
            done = kafka_batch.run_pipes(pipes.run, context=context, command=command)
            return done.get_materialize_result()
            ```

        Args:
            run: The method `run` of a client.
            extras: Further extras; see `pipes_extras`.
            arguments: The arguments of `run`, such as `context`.

        Returns:
            The result of `run`.

        Raises:
            BrokerError: See `set_aside`.
            ConfigurationError: See `set_aside` and `pipes_extras`.
            IllegalStateError: A message about letters is missing, or a record is not in the batch.
        """
        topic = self._letter_topic
        done = run(extras=self._pipes_extras(extras, takes_letters=True), **arguments)
        self._set_aside_at(sent_positions(done.get_custom_messages()), topic)
        return done

    def _pipes_extras(
        self, more: Mapping[str, Any] | None, *, takes_letters: bool
    ) -> dict[str, Any]:
        settings = self.kafka.consumer_config()
        sent = SentBatch(
            self.batch_id,
            self.kafka.group_id,
            self.offset_ranges,
            isolation_level(settings),
            takes_letters=takes_letters,
            only=self.kafka.predicate(),
        ).extras
        check_no_secrets(more or {}, {**self.kafka.client_config, **settings}, taken=sent)
        if self._interruptions is not None:
            self._interruptions.watch()
        return {**(more or {}), **sent}

    def metadata(self, *, row_count: int | None = None) -> dict[str, Any]:
        """Return metadata for the materialization of an asset: the batch and its ranges.

        Args:
            row_count: The number of written records, for Dagster's chart, as returned by
                `write_parquet_by_range`. It differs from the number of offsets with transactions,
                compaction or a filter.
        """
        shown = {
            "batch": self.batch_id,
            "ranges": dg.MetadataValue.md(
                "\n".join(f"- `{range_}`" for range_ in self.offset_ranges)
            ),
            "offsets": self.records,
        }
        if self.set_aside_records:
            shown["set_aside"] = self.set_aside_records
        if self.left_out_records:
            shown["left_out"] = self.left_out_records
        return shown if row_count is None else {**shown, "dagster/row_count": row_count}

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["KafkaBatch"]:
        """Perform the start check, and send heartbeats while the steps work."""
        run, instance = context.run, context.instance
        if run is None or instance is None or not self.batch_id or not self.ranges:
            msg = (
                "This run has no batch of Kafka offsets. The sensor of this job requests runs with "
                "a batch: turn it on. To process a batch again after a failure, re-execute its "
                "run; to process past ranges again, use dagster-rebalance rerun or the rerun job "
                "of the group."
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
            # Without the event REFUSED, the owner of the batch waits for the timeout.
            with suppress(Exception):
                record_run_event(instance, run, RunEvent.REFUSED)
            raise
        if why_not is not None:
            self._refuse(instance, run, why_not)
        heartbeat.record_claims(self._claims)
        why_not = heartbeat.why_too_late()
        if why_not is not None:  # no thread has checked the lease so far
            RangeOwners(instance).erase(run.run_id, self._claims)
            self._refuse(instance, run, why_not)
        self._interruptions = Interruptions()
        with (
            heartbeat,
            isolate_forks(instance),
            closing(self.kafka.reader()) as reader,
            closing(LetterProducers(self.kafka)) as producers,
        ):
            if self._replayed_topic:
                self._replayed = single_records(
                    self.kafka, self._replayed_topic, self.offset_ranges, reader
                )
            self.read_by(reader).store_letters_by(
                producers,
                run_id=run.run_id,
                attempt=attempt_of(run),
                on_first=partial(self._mark_set_aside, instance, run.run_id),
            )
            yield self
            self._interruptions.check(run.run_id)
            self._name_set_aside(instance, run)
            is_later = attempt_of(run) > 1 or run.parent_run_id or self.is_rerun
            # A streaming run that has made the claim may have begun.
            is_taken_over = Part.parse(self.batch_id) or StreamBatch.parse(self.batch_id)
            if (is_later or is_taken_over) and self._has_processed_all(instance, run):
                warning = self.close_processed_letters()
                if warning and context.log is not None:
                    context.log.warning(warning)

    def _has_processed_all(self, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
        """Whether no step has failed, and none was skipped, which may have set records aside."""
        failures = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        return not failures and not Coverage(instance).is_partial(run)

    def _name_set_aside(self, instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
        """Record which letters a rerun leaves open, if they are few; otherwise all of them."""
        letters = self._letters
        if not self.is_rerun or letters is None or not letters.keys:
            return
        of_parent = set_aside_of(run, is_partial=Coverage(instance).is_partial(run))
        if of_parent is None or letters.has_letters_of_children:
            return
        keys = sorted(of_parent.union(letters.keys))
        if len(keys) <= _MOST_NAMED:
            instance.add_run_tags(run.run_id, {SET_ASIDE_TAG: " ".join((run.run_id, *keys))})

    def _mark_set_aside(self, instance: dg.DagsterInstance, run_id: str) -> None:
        """Record that a rerun did not process all of its records."""
        if self.is_rerun:
            instance.add_run_tags(run_id, {SET_ASIDE_TAG: run_id})

    def _refuse(self, instance: dg.DagsterInstance, run: dg.DagsterRun, why: str) -> NoReturn:
        record_run_event(instance, run, RunEvent.REFUSED)
        instance.add_run_tags(
            run.run_id, {REFUSED_TAG: run.run_id, REFUSAL_TAG: why[:MAX_REFUSAL_CHARACTERS]}
        )
        # The config is not shown: it may name a variable, which Dagster replaces by its value.
        msg = f"This run must not process batch {run.tags.get(BATCH_TAG) or '(none)'}: {why}"
        raise dg.Failure(msg, allow_retries=False) from BatchRefusedError(why)

    def _refusal(self, instance: dg.DagsterInstance, run_id: str) -> str | None:
        runs = RunLedger(instance, self.kafka.group_id).read(
            filter(None, [self.batch_id, whole_batch(self.batch_id)]),
            with_live=True,
            claims=self._claims,
        )
        own = next(
            (run for run in runs if run.run_id == run_id and run.batch_id == self.batch_id), None
        )
        if own is None:
            return (
                f"the batch id in its run config differs from its tag {BATCH_TAG}, by which the "
                "owner of the batch finds the run, or no sensor of group "
                f"{self.kafka.group_id} requests runs of its job"
            )
        why_not = self._other_ranges(own.ranges) or self._paused(instance)
        if why_not is not None:
            return why_not
        try:
            with self.kafka.connect() as consumer:
                committed = consumer.committed([range_.topic_partition for range_ in own.ranges])
        except BrokerError as error:
            # A refusal is no failed attempt: an outage of Kafka must not stop a partition.
            return f"its claim could not be read from Kafka: {error}"
        if rerun_of(self.batch_id):
            store = RerunStore(instance, GroupAssets.of(self.kafka.group_id).reruns_name)
            planned = next((one for one in store.read() if one.batch_id == self.batch_id), None)
            self._replayed_topic = "" if planned is None else planned.rerun.letters
            return rerun_refusal(own, runs, committed, planned)
        return refusal(own, runs, committed)

    def _other_ranges(self, found: Sequence[OffsetRange]) -> str | None:
        """Describe why the ranges are not those that other runs find in the run config."""
        try:
            own = self.offset_ranges
        except ValueError:  # it shows the text, which may be the value of an environment variable
            return (
                "the ranges in its run config cannot be read: each must be "
                "topic:partition:start:until. Re-execute the run that the sensor requested, with "
                "its run config unchanged"
            )
        return None if found and found == own else "its ranges are not those of its run config"

    def _paused(self, instance: dg.DagsterInstance) -> str | None:
        """Describe the pause or stop that applies to one of the ranges; None if there is none."""
        assets = GroupAssets.of(self.kafka.group_id)
        directives = DirectiveStore(instance, assets.directives_name).read()
        for partition in (range_.topic_partition for range_ in self.offset_ranges):
            directive = in_force(directives, partition)
            if directive is not None:
                return f"{partition} is {directive}"
        return None


def collecting_batch(collected: dict[str, Letter]) -> type[KafkaBatch]:
    """Return a class of batches that collect their letters by key, and store none.

    Dagster copies a resource by its class and its fields, which cannot hold the letters.
    """

    class CollectingBatch(KafkaBatch):
        """A batch that stores no letters."""

        @property
        def letters(self) -> tuple[Letter, ...]:
            return tuple(collected.values())

        @property
        def set_aside_records(self) -> int:
            return len(collected)

        def _store(self, letters: Iterable[Letter], topic: str) -> int:  # noqa: ARG002 - nothing is stored
            given = {letter.key: letter for letter in letters}
            collected.update(given)
            return len(given)

    return CollectingBatch
