"""The contender Spark Structured Streaming: a query from a topic to Parquet or Delta Lake.

As in Spark's documentation, a file sink or a table, and a checkpoint make the output exact.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from proofs.bench.streams import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql.connect.streaming.query import StreamingQuery

    from dagster_rebalance.testing.broker import KafkaCluster

NAME = "structured_streaming"


def start(
    session: Any,  # noqa: ANN401 - of pyspark's Connect part, which says too little of its types
    kafka: KafkaCluster,
    topic: str,
    folder: str,
    *,
    options: dict[str, str] | None = None,
    sink: str = "parquet",
) -> StreamingQuery:
    """Start a query, or restart it from the checkpoint in its folder.

    Args:
        session: The session on the server.
        kafka: The Kafka.
        topic: The topic.
        folder: Folder of the output and the checkpoint.
        options: Additional options of the source.
        sink: The format of the output.
    """
    query: StreamingQuery = (
        session.readStream.format("kafka")
        .option("kafka.bootstrap.servers", kafka.bootstrap_servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .options(**(options or {}))
        .load()
        .selectExpr(*COLUMNS)
        .writeStream.format(sink)
        .option("path", f"{folder}/out")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .start()
    )
    return query


def micro_batches(query: StreamingQuery) -> dict[int, tuple[float, int]]:
    """Return the end time and the records of the last 100 micro-batches, by id.

    Raises:
        DagsterRebalanceError: The query has failed.
    """
    if (error := query.exception()) is not None:
        msg = f"Structured Streaming failed: {error}"
        raise DagsterRebalanceError(msg)
    return {
        one.batchId: (
            datetime.fromisoformat(one.timestamp.replace("Z", "+00:00")).timestamp()
            + one.durationMs["triggerExecution"] / 1000,
            one.numInputRows,
        )
        for one in query.recentProgress
        if one.numInputRows
    }
