"""`PipesBatch`: the batch in an external process of Dagster Pipes, such as a job on a cluster.

The job needs neither Dagster nor a Kafka client. It supplies its own connection settings for Kafka,
because the Pipes context does not include them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.batches.pipes_payload import (
    SentBatch,
    end_message,
    position_messages,
)
from dagster_rebalance.core.model.errors import ConfigurationError, IllegalStateError
from dagster_rebalance.outputs.publication import note_failed_ranges
from dagster_rebalance.spark.ranges import filtered_read, read_ranges
from dagster_rebalance.spark.set_aside import positions_in, split

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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

        def read(connector_options: Mapping[str, str] | None) -> DataFrame:
            return read_ranges(
                session,
                self.offset_ranges,
                {"isolation.level": self.isolation_level, **kafka_options},
                connector_options=connector_options,
                allow_plaintext=allow_plaintext,
            )

        return filtered_read(read, options, self.only)

    @contextmanager
    def letters(self, pipes: Any) -> Iterator[PipesLetters]:
        """Yield the dead letters of this job, which the run of the batch stores.

        Example:
            ```python
            with batch.letters(pipes) as letters:
                checked = frame.withColumn("reason", reason_of(frame.value))
                write_parquet_by_range(letters.good_rows(checked, error="reason"), path)
            ```

        Args:
            pipes: The context of Dagster Pipes, as returned by `open_dagster_pipes`.

        Raises:
            ConfigurationError: The asset does not store the letters of the job.
        """
        if not self.takes_letters:
            msg = (
                "the run does not store letters of this job: let the asset start it with "
                "kafka_batch.run_pipes(client.run, ...)"
            )
            raise ConfigurationError(msg)
        letters = PipesLetters(self.batch_id, pipes)
        yield letters
        letters.end()

    def metadata(self, *, row_count: int | None = None, set_aside: int = 0) -> dict[str, Any]:
        """Return metadata of the materialization, for `report_asset_materialization`.

        Args:
            row_count: The number of written records, for Dagster's chart.
            set_aside: The number of records that were set aside (`letters.count`).
        """
        ranges = "\n".join(f"- `{range_}`" for range_ in self.offset_ranges)
        shown: dict[str, Any] = {
            "batch": self.batch_id,
            "ranges": {"raw_value": ranges, "type": "md"},
            "offsets": self.records,
        }
        if set_aside:
            shown["set_aside"] = set_aside
        return shown if row_count is None else {**shown, "dagster/row_count": row_count}


class PipesLetters:
    """The records that a job sets aside. The run stores their letters after the job.

    Attributes:
        count: The number of records so far.
    """

    def __init__(self, batch_id: str, pipes: Any) -> None:
        self.count = 0
        self._batch_id = batch_id
        self._pipes = pipes
        self._job = uuid.uuid4().hex

    def set_aside(self, records: object, error: BaseException | str) -> int:
        """Set records aside, and return their number.

        Args:
            records: A DataFrame with the columns `topic`, `partition` and `offset` of
                `PipesBatch.dataframe`, a message of confluent-kafka, or an iterable of messages.
            error: The reason: an exception or a text. For a DataFrame, an exception, or the name of
                the column with the reasons.

        Raises:
            IllegalStateError: The records are of another kind, or a row has no reason.
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        rows: Any = records
        if hasattr(records, "sparkSession"):
            is_column = isinstance(error, str)
            found = positions_in(rows, text if is_column else None)
            return self._send((*row, reason if is_column else text) for *row, reason in found)
        messages = [rows] if callable(getattr(rows, "offset", None)) else records
        if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
            msg = f"a {type(records).__name__} cannot be set aside: pass a DataFrame or messages"
            raise IllegalStateError(msg)
        return self._send((one.topic(), one.partition(), one.offset(), text) for one in messages)

    def good_rows(self, frame: DataFrame, *, error: str) -> DataFrame:
        """Set aside the rows that have a reason, and return the others without this column.

        Args:
            frame: As in `set_aside`.
            error: The column with the reasons. It is null in good rows.
        """
        good, found = split(frame, error, self._batch_id)
        self._send(found)
        return good

    def end(self) -> None:
        """Report the number of records. Without this report, the batch fails."""
        self._pipes.report_custom_message(end_message(self._job, self.count))

    def _send(self, positions: Iterable[Any]) -> int:
        wanted = list(positions)
        for topic, partition, offset, reason in wanted:
            if reason is None:
                msg = (
                    f"the row at {topic}-{partition} offset {offset} has no reason: set aside only "
                    "rows with a reason, or use good_rows"
                )
                raise IllegalStateError(msg)
        for message in position_messages(self._job, wanted):
            self._pipes.report_custom_message(message)
        self.count += len(wanted)
        return len(wanted)
