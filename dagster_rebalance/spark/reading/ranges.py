"""A DataFrame over exactly the offsets of some ranges, read through Spark's own Kafka connector.

Works on classic and Connect sessions alike: expressions are SQL text, or made by the functions of
their side (`functions_of`), because pyspark's own choose it by the process and not by the session.
Reads what it is told to; never asks Kafka which offsets there are, never commits, and never lets
data loss pass.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import uuid
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.batches.range_progress import read_rounds
from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    DagsterRebalanceError,
    UndecodableError,
)
from dagster_rebalance.core.model.offsets import TopicPartition
from dagster_rebalance.spark.reading.options import hidden, is_secret, spark_kafka_options
from dagster_rebalance.spark.session.connect_sessions import connects_in_the_clear
from dagster_rebalance.spark.session.connector import kafka_connector_package
from dagster_rebalance.spark.session.jobs import is_connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from dagster_rebalance.core.batches.range_progress import Span
    from dagster_rebalance.core.model.offsets import OffsetRange

# In the metadata of the column `range_start`: tells two parts of one read from two reads.
READ_ID = "dagster_rebalance.read"
# There, too: whether each task of the read has records of one range only.
IS_ONE_RANGE_A_TASK = "dagster_rebalance.one_range_a_task"
# And the ranges of the read, each as a text: Spark's metadata has no lists of several types.
READ_RANGES = "dagster_rebalance.ranges"

# Spark has offsets, timestamps and timestamps by partition, and gives some of them precedence.
_OURS = re.compile(r"(starting|ending|subscribe|assign).*|failondataloss", re.IGNORECASE)
_SPLITS_RANGES = re.compile(r"minPartitions|maxRecordsPerPartition", re.IGNORECASE)
_LOST_RECORDS = re.compile(
    r"[Cc]ould not read records in offset \[(\d+), (\d+)\) for topic partition (\S+)-(\d+)"
)
_LAST_START = "array_max(filter({}, bound -> bound <= `offset`))"
_FIRST_UNTIL = "array_min(filter({}, bound -> bound > `offset`))"
_NO_BOUND = "CAST(NULL AS BIGINT)"
# Spark keeps its clients by the id of their group, in which they never join or commit.
_CLIENTS = "kafka.group.id"
# Drawn, because the options have secrets in them, and the id is seen by many.
_DIGEST_KEY = secrets.token_bytes(16)
_UNDECODABLE = re.compile(r"UndecodableError: (the record at .+)")
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_UNREADABLE = {
    "UnknownTopicOrPartitionException": (
        "Kafka does not know a topic or partition of the batch: it was deleted after the batch was "
        "planned"
    ),
    r"long overflow\s+at [^\n]*multiplyExact[^\n]*\s+at [^\n]*millisToMicros": (
        "Spark's Kafka source cannot read a record of the batch (long overflow): its timestamp "
        "does not fit into microseconds, as when a producer writes nanoseconds. Read the batch "
        "without Spark, with kafka_batch.arrow() or kafka_batch.messages()"
    ),
}

_with_connector: weakref.WeakSet[SparkSession] = weakref.WeakSet()
"""The sessions that have read from Kafka. A look costs a round trip, which a batch can feel."""


def read_ranges(
    session: SparkSession,
    ranges: Sequence[OffsetRange],
    kafka_options: Mapping[str, object],
    *,
    connector_options: Mapping[str, str] | None = None,
    allow_plaintext: bool = False,
    clients: str = "",
) -> DataFrame:
    """A DataFrame over exactly the records of the ranges.

    Args:
        session: A classic or a Connect session, with the Kafka connector.
        ranges: Of any topics and partitions; several of one partition are allowed as long as they
            do not overlap.
        kafka_options: How to reach Kafka, by librdkafka's names; keys that start with `kafka.` go
            to the connector as they are, but `kafka.group.id` is only the beginning of the id.
        connector_options: Further options of the connector, by Spark's names, such as
            `includeHeaders` or `minPartitions`.
        allow_plaintext: Whether a Kafka login may be sent to a Spark Connect server on another
            machine without TLS.
        clients: Reads with the same text and the same options use the same Kafka clients in Spark,
            which have fetched records ahead: give it where the logs are the same. By default each
            read makes new ones.

    Returns:
        The connector's columns (`key`, `value`, `topic`, `partition`, `offset`, `timestamp`,
        `timestampType`), and `range_start` and `range_until`: the bounds of the range that the
        record belongs to, to key an output by. It is lazy: an action on it fails if Kafka no longer
        has all of the offsets (`explained_read_errors` says so in words).

    Raises:
        ConfigurationError: The options cannot work, or the session has no Kafka connector.
        IllegalStateError: There are no ranges, or they overlap.
    """
    rounds = read_rounds(ranges)
    further = _checked(connector_options or {})
    kafka = spark_kafka_options(
        {
            **kafka_options,
            **{key: value for key, value in further.items() if key.startswith("kafka.")},
        }
    )
    own = kafka.pop(_CLIENTS, "")
    if own or clients:
        # Never the user's own id as it is: clients of that name may have fetched from a log that
        # is gone.
        name = "-".join(filter(None, (own, clients or uuid.uuid4().hex)))
        kafka[_CLIENTS] = _clients(name, kafka)
    options = hidden({**further, **kafka})
    if not allow_plaintext and any(map(is_secret, kafka)) and connects_in_the_clear(session):
        msg = (
            "the Kafka login would travel to the Spark Connect server unencrypted: put "
            "use_ssl=true among the parameters of its URL. "
            "Where something else encrypts (a service mesh), say so with allow_plaintext."
        )
        raise ConfigurationError(msg)
    are_split = any(_SPLITS_RANGES.fullmatch(key) for key in further)
    is_one = not are_split and all(len(span) == 1 for spans in rounds for span in spans)
    about = {**_about(ranges), IS_ONE_RANGE_A_TASK: is_one}
    frames = [_read_round(session, spans, options, about) for spans in rounds]
    frame = frames[0]
    for other in frames[1:]:
        frame = frame.unionAll(other)
    if session not in _with_connector:
        with explained_read_errors():
            # A Connect session would look for the connector only at the first action, far from
            # here.
            _ = frame.schema
        _with_connector.add(session)
    return frame


def functions_of(session: SparkSession) -> Any:
    """The module of column functions for this kind of session."""
    if is_connect(session):
        from pyspark.sql.connect import functions
    else:
        from pyspark.sql import functions  # type: ignore[no-redef]
    return functions


def _clients(name: str, kafka: Mapping[str, str]) -> str:
    """The id by which Spark finds its clients again; a new login must not find old ones."""
    digest = hashlib.blake2b(digest_size=8, key=_DIGEST_KEY)
    digest.update(json.dumps(sorted(kafka.items())).encode())
    return f"{name}-{digest.hexdigest()}"


def given_records(
    session: SparkSession,
    records: Iterable[tuple[object, ...]],
    ranges: Iterable[OffsetRange],
    connector_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """A DataFrame as `read_ranges` makes it, over records that are given.

    Args:
        session: A classic or a Connect session; it needs no Kafka connector.
        records: `key`, `value`, `topic`, `partition`, `offset`, `timestamp`, `timestampType`,
            `headers`, and the bounds of the range.
        ranges: What the records are all of.
        connector_options: As for `read_ranges`; only `includeHeaders` has an effect.

    Raises:
        ConfigurationError: An option would change which offsets are read.
    """
    columns = (
        "key binary, value binary, topic string, partition int, offset bigint, "
        "timestamp timestamp_ltz, timestampType int, "
        "headers array<struct<key string, value binary>>, range_start bigint, range_until bigint"
    )
    frame = session.createDataFrame(list(records), columns)
    options = {key.lower(): value for key, value in _checked(connector_options or {}).items()}
    if options.get("includeheaders", "").lower() != "true":
        frame = frame.drop("headers")
    return frame.withMetadata("range_start", _about(ranges))


def _about(ranges: Iterable[OffsetRange]) -> dict[str, object]:
    return {READ_ID: uuid.uuid4().hex, READ_RANGES: [json.dumps(one.fields) for one in ranges]}


@contextmanager
def explained_read_errors() -> Iterator[None]:
    """Say what a failed read of Kafka means, and what to do, in this package's errors.

    Raises:
        BrokerError: Kafka no longer has some of the offsets, or the partition.
        ConfigurationError: The session has no Kafka connector, or the executors' Python no library.
        UndecodableError: A record cannot be decoded, and shall fail the batch.
    """
    try:
        yield
    except Exception as error:
        explained = _explained(str(error))
        if explained is None:
            raise
        raise explained from error


def _read_round(
    session: SparkSession,
    spans: Sequence[Span],
    options: Mapping[str, str],
    about: Mapping[str, object],
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
    starts = _lookup(by_topic, lambda one: one.start, _LAST_START)
    untils = _lookup(by_topic, lambda one: one.until, _FIRST_UNTIL)
    expr = functions_of(session).expr
    # Not withMetadata, which asks a Connect server for the schema.
    bounded = frame.select(
        "*",
        expr(starts).alias("range_start", metadata=about),
        expr(untils).alias("range_until"),
    )
    # A condition, because Spark leaves out a column that nobody reads. No bound is NULL, which is
    # not true.
    return bounded.where(
        "if(`offset` >= range_start AND `offset` < range_until, true, raise_error("
        "concat('offset ', `offset`, ' of ', `topic`, '-', `partition`, ' is in no range of "
        "the batch')))"
    )


def _lookup(
    by_topic: Mapping[str, Sequence[Span]], bound: Callable[[OffsetRange], int], chosen: str
) -> str:
    """Return SQL for a bound of the range of a row.

    The bounds are in arrays indexed by partition: a look-up by key would scan all of them. Where
    each partition has one range, which is the rule, nothing is searched: Spark would do it for each
    row.

    Args:
        by_topic: The spans of each topic.
        bound: Of a range.
        chosen: SQL that finds the bound among those of a partition, which stand in its braces.
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
        found = f"element_at(array({', '.join(rows)}), `partition` + 1)"
        cases[topic] = found if is_one else chosen.format(found)
    if len(cases) == 1:  # the read has no other topic, and Spark would compare the name of each row
        return cases.popitem()[1]
    whens = " ".join(f"WHEN {topic!r} THEN {case}" for topic, case in cases.items())
    return f"CASE `topic` {whens} END"


def _checked(connector_options: Mapping[str, str]) -> Mapping[str, str]:
    taken = sorted(key for key in connector_options if _OURS.fullmatch(key))
    if taken:
        msg = (
            f"the connector option(s) {', '.join(taken)} cannot be set: the ranges of the batch "
            "decide them. Remove them."
        )
        raise ConfigurationError(msg)
    return connector_options


def _explained(text: str) -> DagsterRebalanceError | None:
    undecodable = _UNDECODABLE.search(text)
    if undecodable is not None:
        return UndecodableError(undecodable[1])
    missing = _NO_MODULE.search(text)
    if missing is not None:
        msg = (
            f"the Python of Spark's executors has no module {missing[1]}: install it there, or "
            "name another Python with PYSPARK_PYTHON. Decoding needs pyarrow and the library of "
            "the format (docs/decoding.md)"
        )
        return ConfigurationError(msg)
    lost = _LOST_RECORDS.search(text)
    if lost is not None:
        start, until, partition = lost[1], lost[2], TopicPartition(lost[3], int(lost[4]))
        msg = (
            f"Kafka does not give all of the offsets [{start}, {until}) of {partition}. Nothing "
            "was committed. "
            f"Compare them with the log's bounds (kafka-get-offsets --topic {partition.topic} "
            "--time earliest, and latest). "
            f"If the log begins behind {start}, retention deleted records before they were "
            "processed: they are gone. "
            f"If it ends before {until}, it was truncated (unclean leader election) or the topic "
            "was made anew: new records will take "
            "these offsets, and an offset that is set past them would skip those. If the bounds "
            "hold them, a transaction may still be "
            "open: its records come when it ends. Only when the records are really gone, set the "
            "group's committed offset of this "
            "partition to where the log goes on (dagster-rebalance reset). Against "
            "retention, set retention.ms above "
            "the longest backlog."
        )
        return BrokerError(msg, partitions={partition: f"offset out of range: [{start}, {until})"})
    for sign, what in _UNREADABLE.items():
        if re.search(sign, text):
            return BrokerError(f"{what}. Nothing was committed")
    if re.search(r"[Ff]ailed to find (the )?data source: kafka\b", text):
        msg = (
            "the Spark session has no Kafka connector: start the Spark Connect server, or the "
            "session, with "
            f"`--packages {kafka_connector_package()}` (setting `spark.jars.packages`), in the "
            "version of that Spark."
        )
        return ConfigurationError(msg)
    return None
