"""The group of the test of asset forms in streaming runs: a line per batch and asset."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import PrivateAttr

from dagster_rebalance import KafkaBatch, KafkaConsumerResource, build_kafka_stream_defs

ROOT = Path(os.environ["E2E_ROOT"], "forms")
CHILD = """
import os
from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    pipes.report_asset_materialization({"child": os.getpid()}, data_version="of the child")
    pipes.report_asset_check("whole", passed=True)
"""


def write(name: str, batch: KafkaBatch) -> None:
    """Note the batch."""
    with (ROOT / name).open("a") as output:
        output.writelines(f"{(message.value() or b'').decode()}\n" for message in batch.messages())


PIPES = dg.PipesSubprocessClient()


class Writer(dg.ConfigurableResource[Any]):
    """An async client, which lives as long as the run."""

    _queue: Any = PrivateAttr(default=None)

    @asynccontextmanager
    async def yield_for_execution(  # type: ignore[override] # Dagster takes both, and types one
        self, context: dg.InitResourceContext
    ) -> AsyncIterator["Writer"]:
        """Open the client, and close it."""
        self._queue = asyncio.Queue()
        writing = asyncio.create_task(self._write())
        yield self
        writing.cancel()
        (ROOT / "closed").touch()

    async def _write(self) -> None:
        while True:
            lines, done = await self._queue.get()
            with (ROOT / "by_client").open("a") as output:
                output.writelines(f"{line}\n" for line in lines)
            done.set_result(len(lines))

    async def write(self, lines: list[str]) -> int:
        """Write lines; how many are written."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self._queue.put((lines, done))
        return await asyncio.wait_for(done, 30)


@dg.asset
async def by_client(kafka_batch: KafkaBatch, writer: Writer) -> dg.MaterializeResult[Any]:
    """Works with the async client."""
    lines = [(message.value() or b"").decode() for message in kafka_batch.messages()]
    return dg.MaterializeResult(metadata={"written": await writer.write(lines)})


@dg.multi_asset(
    specs=[dg.AssetSpec("even", deps=[by_client]), dg.AssetSpec("odd", skippable=True)],
    check_specs=[dg.AssetCheckSpec("filled", asset="even")],
)
def even_and_odd(context: dg.AssetExecutionContext, kafka_batch: KafkaBatch):  # type: ignore[no-untyped-def] # noqa: ANN201 - several outputs
    """Makes two assets, one of them not for each batch."""
    write("even", kafka_batch)
    context.add_asset_metadata({"run": context.run.run_id}, asset_key="even")
    yield dg.MaterializeResult(asset_key="even")
    yield dg.AssetCheckResult(passed=kafka_batch.records > 0, asset_key=dg.AssetKey("even"))


@dg.asset(deps=["even"], check_specs=[dg.AssetCheckSpec("whole", asset="by_child", blocking=True)])
def by_child(  # type: ignore[no-untyped-def] # noqa: ANN201 - several outputs
    context: dg.AssetExecutionContext, kafka_batch: KafkaBatch, pipes: dg.PipesSubprocessClient
):
    """Lets a process work."""
    return pipes.run(
        context=context,
        command=[sys.executable, "-c", CHILD],
        extras=kafka_batch.pipes_extras(),
    ).get_results()


defs = build_kafka_stream_defs(
    kafka=KafkaConsumerResource(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id="forms",
        topics=["forms"],
        record_every_s=0.0,  # the test compares the results of each batch
        heartbeat_timeout_s=24.0,
        retry_delay_s=0.1,
    ),
    assets=[by_client, even_and_odd, by_child],
    name="forms",
    kafka_key="forms_kafka",
    resources={"writer": Writer(), "pipes": PIPES},
)
