"""A component with its own attributes."""

from collections.abc import Sequence

import dagster as dg

from dagster_rebalance import KafkaBatch, KafkaBatchComponent


class TableComponent(KafkaBatchComponent):
    """Keeps a table up to date with a topic."""

    table: str

    def batch_assets(self, context: dg.ComponentLoadContext) -> Sequence[dg.AssetsDefinition]:
        @dg.asset(name=self.table)
        def table(kafka_batch: KafkaBatch) -> dg.MaterializeResult:
            # read kafka_batch.offset_ranges, and write into self.table by range
            return dg.MaterializeResult(metadata=kafka_batch.metadata())

        return [table]
