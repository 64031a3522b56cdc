"""A DataFrame over exactly the offsets of some ranges, read through Spark's own Kafka connector.

This works in classic and in Connect sessions. Expressions are SQL or built with `functions_of`,
because pyspark's own functions depend on the process instead of the session. This module neither
queries Kafka for offsets nor commits, and a read with missing records fails.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
import uuid
import weakref
from collections import OrderedDict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.batches.range_progress import read_rounds
from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    DagsterRebalanceError,
    IllegalStateError,
    UndecodableError,
)
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.outputs.scratch import SHOWN_ROWS
from dagster_rebalance.spark.connect_sessions import connects_in_the_clear
from dagster_rebalance.spark.kafka_options import hide_secrets, is_secret, spark_kafka_options
from dagster_rebalance.spark.launch import kafka_connector_package
from dagster_rebalance.spark.spark_jobs import is_connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.core.batches.range_progress import Span
    from dagster_rebalance.core.batches.record_filter import RecordPredicate
    from dagster_rebalance.core.model.offsets import OffsetRange

# Metadata of the column `range_start`. The id tells two parts of one read from two reads.
READ_ID = "dagster_rebalance.read"
# Whether each task of the read has records of one range only.
IS_ONE_RANGE_A_TASK = "dagster_rebalance.one_range_a_task"
# The ranges of the read, each as text: Spark's metadata has no lists of several types.
READ_RANGES = "dagster_rebalance.ranges"

# Spark also has timestamps, also by partition, and gives some of them precedence over offsets.
_RESERVED = re.compile(r"(starting|ending|subscribe|assign).*|failondataloss", re.IGNORECASE)
_SPLITS_RANGES = re.compile(r"minPartitions|maxRecordsPerPartition", re.IGNORECASE)
_LOST_RECORDS = re.compile(
    r"[Cc]ould not read records in offset \[(\d+), (\d+)\) for topic partition (\S+)-(\d+)"
)
_LAST_START = "array_max(filter({}, bound -> bound <= `offset`))"
_FIRST_UNTIL = "array_min(filter({}, bound -> bound > `offset`))"
_NO_BOUND = "CAST(NULL AS BIGINT)"
# Spark caches its clients by this id, under which they never join a group or commit.
_GROUP_ID = "kafka.group.id"
# Random, because the options have secrets in them, and the id is widely visible.
_DIGEST_KEY = secrets.token_bytes(16)
_UNDECODABLE = re.compile(r"UndecodableError: (the record at .+)")
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_NO_CONNECTOR = re.compile(r"[Ff]ailed to find (the )?data source: kafka\b")
_UNREADABLE = {
    "UnknownTopicOrPartitionException": (
        "Kafka does not have a topic or partition of the batch: it was deleted after the batch was "
        "planned"
    ),
    r"long overflow\s+at [^\n]*multiplyExact[^\n]*\s+at [^\n]*millisToMicros": (
        "Spark's Kafka source cannot read a record of the batch (long overflow): its timestamp "
        "does not fit into microseconds, as when a producer writes nanoseconds. Read the batch "
        "without Spark, with kafka_batch.arrow() or kafka_batch.messages()"
    ),
}
_METADATA = re.compile(re.escape(f'{{"{READ_ID}": "'))
_MAX_READS = 1000

_with_connector: weakref.WeakSet[SparkSession] = weakref.WeakSet()
"""Sessions that have read from Kafka. A check takes a round trip, which delays a batch."""
_written: OrderedDict[str, set[str]] = OrderedDict()
"""The places to which parts of each read were written."""
_written_lock = threading.Lock()


def read_ranges(
    session: SparkSession,
    ranges: Sequence[OffsetRange],
    kafka_options: Mapping[str, object],
    *,
    connector_options: Mapping[str, str] | None = None,
    allow_plaintext: bool = False,
    clients: str = "",
) -> DataFrame:
    """Return a DataFrame over exactly the records of the ranges.

    Args:
        session: A classic or a Connect session, with the Kafka connector.
        ranges: Ranges of any topics and partitions. Several ranges of one partition are allowed if
            they do not overlap.
        kafka_options: Settings of the connection to Kafka, by librdkafka's names. Keys that start
            with `kafka.` are passed to the connector unchanged, except that `kafka.group.id` is
            only a prefix.
        connector_options: Further options of the connector, by Spark's names, such as
            `includeHeaders` or `minPartitions`.
        allow_plaintext: Whether a Kafka login may be sent to a Spark Connect server on another
            machine without TLS.
        clients: A name of Kafka clients in Spark. Reads with the same name and options share these
            clients and their prefetched records, so use a name only for reads of the same logs. By
            default, each read creates new clients.

    Returns:
        The connector's columns (`key`, `value`, `topic`, `partition`, `offset`, `timestamp`,
        `timestampType`), and `range_start` and `range_until`: the bounds of the record's range, by
        which output is keyed. The frame is lazy: its actions fail if Kafka no longer has all of the
        offsets (`explained_read_errors` explains the error).

    Raises:
        ConfigurationError: An option is invalid, or the session has no Kafka connector.
        IllegalStateError: There are no ranges, or they overlap.
    """
    rounds = read_rounds(ranges)
    further = _check_options(connector_options or {})
    kafka = spark_kafka_options(
        {
            **kafka_options,
            **{key: value for key, value in further.items() if key.startswith("kafka.")},
        }
    )
    group_id = kafka.pop(_GROUP_ID, "")
    if group_id or clients:
        # Clients with the user's id alone may have prefetched from a log that no longer exists.
        prefix = "-".join(filter(None, (group_id, clients or uuid.uuid4().hex)))
        kafka[_GROUP_ID] = f"{prefix}-{_digest(kafka)}"
    options = hide_secrets({**further, **kafka})
    if not allow_plaintext and any(map(is_secret, kafka)) and connects_in_the_clear(session):
        msg = (
            "the Kafka login would be sent to the Spark Connect server unencrypted: add "
            "use_ssl=true to the parameters of its URL. If another layer encrypts (a service "
            "mesh), set allow_plaintext."
        )
        raise ConfigurationError(msg)
    are_split = any(_SPLITS_RANGES.fullmatch(key) for key in further)
    is_one = not are_split and all(len(span) == 1 for spans in rounds for span in spans)
    metadata = {**_read_metadata(ranges), IS_ONE_RANGE_A_TASK: is_one}
    frames = [_read_round(session, spans, options, metadata) for spans in rounds]
    frame = frames[0]
    for other in frames[1:]:
        frame = frame.unionAll(other)
    if session not in _with_connector:
        with explained_read_errors():
            # A Connect session would otherwise report a missing connector only at the first action.
            _ = frame.schema
        _with_connector.add(session)
    return frame


def given_records(
    session: SparkSession,
    records: Iterable[tuple[object, ...]],
    ranges: Iterable[OffsetRange],
    connector_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return a DataFrame of the given records as `read_ranges` does, without a connector.

    A record has `key`, `value`, `topic`, `partition`, `offset`, `timestamp`, `timestampType`,
    `headers`, and the bounds of its range. Only the option `includeHeaders` has an effect.
    """
    columns = (
        "key binary, value binary, topic string, partition int, offset bigint, "
        "timestamp timestamp_ltz, timestampType int, "
        "headers array<struct<key string, value binary>>, range_start bigint, range_until bigint"
    )
    frame = session.createDataFrame(list(records), columns)
    options = {key.lower(): one for key, one in _check_options(connector_options or {}).items()}
    if options.get("includeheaders", "").lower() != "true":
        frame = frame.drop("headers")
    return frame.withMetadata("range_start", _read_metadata(ranges))


def joined_reads(read: DataFrame, given: DataFrame, ranges: Iterable[OffsetRange]) -> DataFrame:
    """Return the records of `read_ranges` and of `given_records` as one read of all the ranges."""
    return read.unionByName(given).withMetadata("range_start", _read_metadata(ranges))


def filtered_read(
    read: Callable[[Mapping[str, str] | None], DataFrame],
    connector_options: Mapping[str, str] | None,
    only: RecordPredicate | None,
) -> DataFrame:
    """Return the rows of a read that a filter processes, in the columns of the options.

    `read` returns all rows for some options of the connector.
    """
    if only is None:
        return read(connector_options)
    options = dict(connector_options or {})
    has_headers = any(
        key.lower() == "includeheaders" and value.lower() == "true"
        for key, value in options.items()
    )
    if not only.needs_headers or has_headers:
        return read(connector_options).where(only.sql)
    other = {key: value for key, value in options.items() if key.lower() != "includeheaders"}
    return read({**other, "includeHeaders": "true"}).where(only.sql).drop("headers")


def read_in_plan(frame: Any) -> Mapping[str, Any]:
    """Return the metadata of the one read in the plan of a Connect frame, without the server.

    The result is empty if the plan names no read, as that of a view, or several. An operation may
    have removed the metadata from the column.
    """
    plan = frame._plan.to_proto(frame.sparkSession.client)  # noqa: SLF001 - pyspark has no public way to a plan
    text = plan.SerializeToString().decode("latin-1")  # the metadata is ASCII
    found: dict[str, Mapping[str, Any]] = {}
    for start in _METADATA.finditer(text):
        with suppress(ValueError):
            metadata, _ = json.JSONDecoder().raw_decode(text, start.start())
            found[metadata[READ_ID]] = metadata
    return next(iter(found.values())) if len(found) == 1 else {}


def content(frame: DataFrame) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of rows of a frame, and the first of them."""
    rows = frame.limit(SHOWN_ROWS).collect()
    return frame.count(), [row.asDict(recursive=True) for row in rows]


def functions_of(session: SparkSession) -> Any:
    """Return the module of column functions for this kind of session."""
    if is_connect(session):
        from pyspark.sql.connect import functions
    else:
        from pyspark.sql import functions  # type: ignore[no-redef]
    return functions


@contextmanager
def written_once(read_id: str | None, places: AbstractSet[str]) -> Iterator[None]:
    """Refuse to write a second part of one read over the first.

    A second read of the same ranges is a new read, because a retry must replace the output. If the
    block raises, its places count as not written. Without a read id, nothing is refused.
    """
    if read_id is None:
        yield
        return
    with _written_lock:
        known = _written.setdefault(read_id, set())
        again = sorted(places & known)
        if again:
            msg = (
                f"a part of the same read_ranges() was already written to {again[0]}: a second "
                "part would replace the first. Write the whole read in one call, or each part to a "
                "separate path or table. To write the same again, read it again."
            )
            raise IllegalStateError(msg)
        known |= places
        while len(_written) > _MAX_READS:
            _written.popitem(last=False)
    try:
        yield
    except BaseException:
        with _written_lock:
            known -= places
        raise


@contextmanager
def explained_read_errors() -> Iterator[None]:
    """Replace the error of a failed read of Kafka by one that explains its cause and remedy.

    Raises:
        BrokerError: Kafka no longer has some of the offsets, or the partition.
        ConfigurationError: The session has no Kafka connector, or the executors' Python lacks a
            library.
        UndecodableError: An undecodable record fails the batch.
    """
    try:
        yield
    except Exception as error:
        explained = _explain(str(error))
        if explained is None:
            raise
        raise explained from error


def _digest(kafka: Mapping[str, str]) -> str:
    """Return a digest of the options: a new login must not reuse the clients of an old one."""
    digest = hashlib.blake2b(digest_size=8, key=_DIGEST_KEY)
    digest.update(json.dumps(sorted(kafka.items())).encode())
    return digest.hexdigest()


def _read_metadata(ranges: Iterable[OffsetRange]) -> dict[str, object]:
    return {READ_ID: uuid.uuid4().hex, READ_RANGES: [json.dumps(one.fields) for one in ranges]}


def _check_options(connector_options: Mapping[str, str]) -> Mapping[str, str]:
    reserved = sorted(key for key in connector_options if _RESERVED.fullmatch(key))
    if reserved:
        msg = (
            f"the connector option(s) {', '.join(reserved)} cannot be set: the ranges of the batch "
            "decide them. Remove them."
        )
        raise ConfigurationError(msg)
    return connector_options


def _read_round(
    session: SparkSession,
    spans: Sequence[Span],
    options: Mapping[str, str],
    metadata: Mapping[str, object],
) -> DataFrame:
    by_topic: dict[str, list[Span]] = {}
    for span in spans:
        by_topic.setdefault(span[0].topic, []).append(span)
    offsets = {
        "assign": {topic: [span[0].partition for span in each] for topic, each in by_topic.items()},
        "startingOffsets": {
            topic: {str(span[0].partition): span[0].start for span in each}
            for topic, each in by_topic.items()
        },
        "endingOffsets": {
            topic: {str(span[0].partition): span[-1].until for span in each}
            for topic, each in by_topic.items()
        },
    }
    reader = session.read.format("kafka").options(**options).option("failOnDataLoss", "true")
    for key, value in offsets.items():
        reader = reader.option(key, json.dumps(value))
    with explained_read_errors():
        frame = reader.load()
    starts = _bound_of_row(by_topic, lambda one: one.start, _LAST_START)
    untils = _bound_of_row(by_topic, lambda one: one.until, _FIRST_UNTIL)
    expr = functions_of(session).expr
    # Not withMetadata, which requests the schema from a Connect server.
    bounded = frame.select(
        "*", expr(starts).alias("range_start", metadata=metadata), expr(untils).alias("range_until")
    )
    # A condition, because Spark omits a column that is not used. A NULL bound is not true.
    return bounded.where(
        "if(`offset` >= range_start AND `offset` < range_until, true, raise_error("
        "concat('offset ', `offset`, ' of ', `topic`, '-', `partition`, ' is in no range of "
        "the batch')))"
    )


def _bound_of_row(
    by_topic: Mapping[str, Sequence[Span]], bound: Callable[[OffsetRange], int], search: str
) -> str:
    """Return SQL for a bound of the range of a row.

    The bounds are in arrays indexed by partition, because a look-up by key would scan all bounds.
    `search` finds the bound of a row in the bounds of its partition. It is not needed if each
    partition has one range, which is the usual case.
    """
    cases = {}
    for topic, spans in by_topic.items():
        bounds = {span[0].partition: [f"{bound(one)}L" for one in span] for span in spans}
        numbers = range(max(bounds) + 1)
        is_one = all(len(span) == 1 for span in spans)
        if is_one:
            rows = [bounds[number][0] if number in bounds else _NO_BOUND for number in numbers]
        else:
            rows = [f"array({', '.join(bounds.get(number, ()))})" for number in numbers]
        element = f"element_at(array({', '.join(rows)}), `partition` + 1)"
        cases[topic] = element if is_one else search.format(element)
    if len(cases) == 1:  # saves the comparison of the topic in each row
        return cases.popitem()[1]
    whens = " ".join(f"WHEN {topic!r} THEN {case}" for topic, case in cases.items())
    return f"CASE `topic` {whens} END"


def _explain(text: str) -> DagsterRebalanceError | None:
    if undecodable := _UNDECODABLE.search(text):
        return UndecodableError(undecodable[1])
    if missing := _NO_MODULE.search(text):
        msg = (
            f"the Python of Spark's executors has no module {missing[1]}: install it there, or set "
            "PYSPARK_PYTHON to another Python. Decoding needs pyarrow and the library of the "
            "format (docs/decoding.md)"
        )
        return ConfigurationError(msg)
    if lost := _LOST_RECORDS.search(text):
        return _lost_records(lost[1], lost[2], TopicPartition(lost[3], int(lost[4])))
    for pattern, meaning in _UNREADABLE.items():
        if re.search(pattern, text):
            return BrokerError(f"{meaning}. Nothing was committed")
    if _NO_CONNECTOR.search(text):
        msg = (
            "the Spark session has no Kafka connector: start the Spark Connect server, or the "
            f"session, with `--packages {kafka_connector_package()}` (setting "
            "`spark.jars.packages`), in the version of that Spark."
        )
        return ConfigurationError(msg)
    return None


def _lost_records(start: str, until: str, partition: TopicPartition) -> BrokerError:
    msg = (
        f"Kafka does not have all of the offsets [{start}, {until}) of {partition}. Nothing was "
        "committed. Compare them with the log's bounds (kafka-get-offsets --topic "
        f"{partition.topic} --time earliest, and latest). If the log begins after {start}, "
        "retention deleted records before they were processed: they are gone. If it ends before "
        f"{until}, it was truncated (unclean leader election) or the topic was recreated: new "
        "records will get these offsets, and a committed offset after them would skip these. If "
        "the log holds the offsets, a transaction may still be open: its records become readable "
        "when it ends. Only if the records are really gone, set the group's committed offset of "
        "this partition to the next offset that the log has (dagster-rebalance reset), and set "
        "retention.ms above the longest time that a record waits."
    )
    return BrokerError(msg, partitions={partition: f"offset out of range: [{start}, {until})"})
