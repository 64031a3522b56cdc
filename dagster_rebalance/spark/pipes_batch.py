"""`PipesBatch`: the batch in an external process of Dagster Pipes, such as a job on a cluster.

The job needs neither Dagster nor a Kafka client. It supplies its own connection settings for Kafka,
because the Pipes context does not include them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.batches.pipes_payload import SentBatch
from dagster_rebalance.outputs.publication import note_failed_ranges
from dagster_rebalance.spark.ranges import read_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession


class PipesBatch(SentBatch):
    """The batch that an asset has sent with `extras=kafka_batch.pipes_extras()`.

    Example:
        ```python
        with open_dagster_pipes() as pipes:
            batch = PipesBatch.from_extras(pipes.extras)
            kafka = {"bootstrap.servers": os.environ["KAFKA_BROKERS"]}
            written = write_parquet_by_range(batch.dataframe(spark, kafka), "s3://lake/orders")
            pipes.report_asset_materialization(metadata=batch.metadata(row_count=written))
        ```
    """

    __slots__ = ()

    def dataframe(
        self,
        session: SparkSession,
        kafka_options: Mapping[str, object],
        *,
        options: Mapping[str, str] | None = None,
        allow_plaintext: bool = False,
    ) -> DataFrame:
        """Return a DataFrame over exactly the ranges of the batch, as `KafkaBatch.dataframe` does.

        Args:
            session: A classic or a Connect session, with Spark's Kafka connector.
            kafka_options: Settings of the connection to Kafka, login included, by librdkafka's
                names; keys that start with `kafka.` go to the connector unchanged. The default of
                `isolation.level` is that of the group.
            options: Further options of the connector, such as `includeHeaders`.
            allow_plaintext: Whether a Kafka login may be sent to a Spark Connect server on another
                machine without TLS.

        Raises:
            ConfigurationError: An option is invalid, or the session has no Kafka connector.
        """
        note_failed_ranges(self.failed_ranges)
        return read_ranges(
            session,
            self.offset_ranges,
            {"isolation.level": self.isolation_level, **kafka_options},
            connector_options=options,
            allow_plaintext=allow_plaintext,
        )

    def metadata(self, *, row_count: int | None = None) -> dict[str, Any]:
        """Return metadata of the materialization, for `report_asset_materialization`.

        Args:
            row_count: The number of written records, for Dagster's chart.
        """
        ranges = "\n".join(f"- `{range_}`" for range_ in self.offset_ranges)
        shown: dict[str, Any] = {
            "batch": self.batch_id,
            "ranges": {"raw_value": ranges, "type": "md"},
            "offsets": self.records,
        }
        return shown if row_count is None else {**shown, "dagster/row_count": row_count}
