"""The code location of the benchmarks of streaming runs: one body in both forms.

Its settings are in the environment (`proofs.bench.streams`).
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
from pyarrow import compute

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    KafkaSparkResource,
    build_kafka_batch_defs,
    build_kafka_stream_defs,
)
from dagster_rebalance.arrow import output as arrow
from dagster_rebalance.spark.output import write_parquet_by_range
from proofs.bench.streams import (
    AT_WORK,
    BAD,
    BATCHES,
    BOUNDS,
    COLUMNS,
    DELTA,
    GATE,
    HOLD,
    ICEBERG_TABLE,
    MENDED,
    PARQUET,
    PEER,
    STREAM,
    VERSION,
    Body,
)
from proofs.chaos.sinks import catalog

BODY = Body.from_environment()
_BATCH_WAIT_S = 10.0
"""A third of the default: more ticks of a measured phase request a run."""
_GATE_LOOK_S = 0.02
AS_STREAMS = {"spark.sql.sources.useV1SourceList": "avro,csv,json,orc,parquet,text"}
"""Spark reads Kafka as Structured Streaming does (docs/reading.md)."""
SPARK = KafkaSparkResource(remote=BODY.remote, spark_config=AS_STREAMS) if BODY.remote else None


PLAY = Path(BODY.play)
CODE = (PLAY / VERSION).read_text() if BODY.play else "1"
FINDS_BAD = bool(BODY.dead) and CODE != MENDED
NO_NUMBER = "no number"
_BISECTED: dict[str, Any] = {"on_failure": "bisect", "max_attempts": 2, "retry_delay_s": 0}


def _kafka(form: str) -> KafkaConsumerResource:
    return KafkaConsumerResource(
        bootstrap_servers=BODY.brokers,
        group_id=f"{BODY.group}-{form}",
        topics=[BODY.topic],
        start_from="earliest" if BODY.remote or BODY.from_start else "latest",
        max_records_per_range=BODY.records_per_range,
        max_ranges_per_run=BODY.ranges_per_run,
        dead_letter_topic=BODY.dead or None,
        **_BISECTED if BODY.raises else {},
        max_wait_s=(None if form == STREAM else _BATCH_WAIT_S) if BODY.waits else 0,
    )


def _note_threads() -> None:
    """Write the ids of the threads of this run, by name, once."""
    file = Path(BODY.threads)
    if BODY.threads and not file.exists():
        file.write_text(json.dumps({one.name: one.native_id for one in threading.enumerate()}))


@contextmanager
def _behind_gate() -> Iterator[None]:
    """Begin when the gate is open, and then note that this process has done a batch."""
    gate = Path(BODY.gate)
    while BODY.gate and not (gate / GATE).exists():
        time.sleep(_GATE_LOOK_S)
    yield
    if BODY.gate:
        (gate / str(os.getpid())).touch()


@contextmanager
def _held(kafka_batch: KafkaBatch) -> Iterator[None]:
    """Wait at the end of a batch while a play holds it."""
    yield
    first = max(range_.start for range_ in kafka_batch.offset_ranges)
    with suppress(FileNotFoundError):  # it is held no longer
        while BODY.play and first >= int((PLAY / HOLD).read_text()):
            (PLAY / AT_WORK).write_text(str(os.getpid()))
            time.sleep(_GATE_LOOK_S)


_catalog = lru_cache(catalog)


def _write_from_arrow(kafka_batch: KafkaBatch) -> None:
    """Replace the ranges of a batch in the output."""
    records: pa.RecordBatchReader | pa.Table = _selected(kafka_batch)
    ranges = kafka_batch.offset_ranges
    if BODY.dead:
        rows = records.read_all()
        is_bad = compute.and_(compute.starts_with(rows["value"], BAD.encode()), FINDS_BAD)
        if not BODY.raises:
            reasons = compute.if_else(is_bad, NO_NUMBER, pa.scalar(None, pa.string()))
            rows = kafka_batch.good_rows(rows.append_column("reason", reasons), error="reason")
        elif compute.any(is_bad).as_py():
            raise ValueError(NO_NUMBER)
        records = rows
    if BODY.sink == PARQUET:
        arrow.write_parquet_by_range(records, BODY.output)
    elif BODY.sink == DELTA:
        arrow.write_delta(records, BODY.output, ranges)
    else:
        lake = _catalog(Path(BODY.output))
        arrow.write_iceberg(records, ICEBERG_TABLE, ranges, catalog=lake)


def _selected(kafka_batch: KafkaBatch) -> pa.RecordBatchReader:
    """Return the records with the columns that all contenders write."""
    records = kafka_batch.arrow()
    names = ["topic", "partition", "offset", "value"]
    if BODY.sink == PARQUET:
        names += BOUNDS
    if BODY.timestamps:
        names.append("timestamp")
    schema = pa.schema([records.schema.field(name) for name in names])
    return pa.RecordBatchReader.from_batches(schema, (batch.select(names) for batch in records))


def _asset(form: str) -> dg.AssetsDefinition:
    """Make the asset: it works through Spark or from Arrow, or only sleeps."""
    if BODY.sink:

        @dg.asset(name=f"{form}_orders")
        def converts(kafka_batch: KafkaBatch) -> None:
            with _behind_gate(), _held(kafka_batch):
                _write_from_arrow(kafka_batch)

        return converts

    if SPARK is None:

        @dg.asset(name=f"{form}_orders", metadata={"dagster_rebalance/sums": ["rows"]})
        def sleeps(kafka_batch: KafkaBatch) -> dg.MaterializeResult[None]:
            _note_threads()
            time.sleep(BODY.sleep_s)
            return dg.MaterializeResult(
                metadata={"rows": kafka_batch.records} if BODY.rows else None
            )

        return sleeps

    @dg.asset(name=f"{form}_orders")
    def writes(kafka_batch: KafkaBatch, spark: KafkaSparkResource) -> None:
        frame = kafka_batch.dataframe(spark).selectExpr(*COLUMNS, *BOUNDS)
        is_bad = f"value LIKE '{BAD}%' AND {FINDS_BAD}"
        if BODY.raises:
            value = f"if({is_bad}, raise_error('{NO_NUMBER}'), value) AS value"
            frame = frame.selectExpr(*COLUMNS[:-1], value, *BOUNDS)
        elif BODY.dead:
            reason = f"if({is_bad}, '{NO_NUMBER}', NULL) AS reason"
            frame = kafka_batch.good_rows(frame.selectExpr("*", reason), error="reason")
        with _held(kafka_batch):
            write_parquet_by_range(frame, BODY.output)

    return writes


@dg.asset(name=PEER)
def does_nothing() -> None:
    """Return at once."""


class PeerResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Nothing: for a sensor with a resource, Dagster opens its instance in each tick."""


_peer_job = dg.define_asset_job(f"{PEER}_job", [does_nothing])


@dg.sensor(name=f"{PEER}_sensor", job=_peer_job, minimum_interval_seconds=5)
def _peer_sensor(
    context: dg.SensorEvaluationContext,
    peer: PeerResource,  # noqa: ARG001 - see there
) -> dg.SensorResult | dg.SkipReason:
    """Request the least that Dagster can run in every other tick."""
    number = int(context.cursor or 0) + 1
    context.update_cursor(str(number))
    if number % 2:
        return dg.SkipReason("every other tick")
    return dg.SensorResult(run_requests=[dg.RunRequest(run_key=str(number))])


defs = dg.Definitions.merge(
    build_kafka_stream_defs(
        kafka=_kafka(STREAM),
        assets=[_asset(STREAM)],
        spark=SPARK,
        name=STREAM,
        version=CODE,
        kafka_key="stream_kafka",
    ),
    build_kafka_batch_defs(
        kafka=_kafka(BATCHES),
        assets=[_asset(BATCHES)],
        spark=SPARK,
        name=BATCHES,
        kafka_key="batch_kafka",
    ),
    dg.Definitions(
        assets=[does_nothing],
        jobs=[_peer_job],
        sensors=[_peer_sensor],
        resources={PEER: PeerResource()},
    ),
)
