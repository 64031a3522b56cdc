"""A batch as a process on this machine."""

import dagster as dg

from dagster_rebalance import KafkaBatch


@dg.asset
def orders(
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, pipes: dg.PipesSubprocessClient
) -> dg.MaterializeResult:
    return pipes.run(
        context=context,
        command=["python", "orders_job.py"],
        extras=kafka_batch.pipes_extras({"table": "orders"}),
    ).get_materialize_result()
