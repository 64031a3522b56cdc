"""docs/outputs.md, docs/parquet.md and values in docs/assets.md: each range is written once."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import psycopg2
import pytest
from confluent_kafka import Message
from deltalake import DeltaTable

from dagster_rebalance import (
    KafkaBatch,
    KafkaConsumerResource,
    OffsetRange,
    build_kafka_stream_defs,
)
from dagster_rebalance.spark.output import write_parquet_by_range
from tests.docs.blocks import ROOT, block_with, run_block
from tests.spark.lakes import connected, table_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from dagster_rebalance.testing.postgres import Postgres

PAGE = "docs/outputs.md"
LIMIT_S = 120.0
RANGES = (OffsetRange("orders", 1, 0, 10), OffsetRange("orders", 0, 5, 8))


def pasted(text: str, **replaced: str) -> dict[str, Any]:
    """Execute the block with a text, or a file, with `data` in place of `/data`.

    Returns its names.
    """
    is_file = text.startswith("docs/")
    block = (ROOT / text).read_text() if is_file else block_with(PAGE, "python", text)
    for old, new in replaced.items():
        block = block.replace(f'"/{old}', f'"{new}')
    names: dict[str, Any] = {"__name__": "pasted"}
    run_block(PAGE, block, names)
    return names


def batch(*values: tuple[int, int, str], key: str | None = None) -> KafkaBatch:
    """A batch of both ranges, with records as partition, offset and value."""
    messages = [
        Message(
            topic="orders",
            partition=partition,
            offset=offset,
            key=key.encode() if key is not None else None,
            value=value.encode(),
        )
        for partition, offset, value in values
    ]
    return KafkaBatch.for_testing(RANGES, messages=messages)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session that can write tables of both formats."""
    with table_server(tmp_path_factory.mktemp("lake")) as server, connected(server) as session:
        yield session


@pytest.mark.spark
def test_table_example_writes_each_range_once(session: SparkSession, tmp_path: Path) -> None:
    names = pasted("spark.output import write_delta", data=str(tmp_path))
    kafka = KafkaConsumerResource(bootstrap_servers="nowhere:9092", group_id="a", topics=["b"])
    dg.Definitions.validate_loadable(
        build_kafka_stream_defs(kafka=kafka, assets=[names["orders"]], spark=names["spark"])
    )
    spark = SimpleNamespace(spark_session=session)
    pen, cup, ink = ('{"id": 1, "item": "pen"}', '{"id": 2, "item": "cup"}', '{"id": 3}')
    for given in (batch((0, 5, pen), (1, 3, cup)), batch((0, 5, pen), (0, 7, ink))):
        names["orders"](kafka_batch=given, spark=spark)
    read = session.sql(f"SELECT offset, id, item FROM delta.`{tmp_path}/orders` ORDER BY ALL")  # noqa: S608
    assert [tuple(row) for row in read.collect()] == [(5, 1, "pen"), (7, 3, None)]


def test_arrow_example_writes_each_range_once(tmp_path: Path) -> None:
    names = pasted("arrow_orders", data=str(tmp_path))
    for given in (batch((0, 5, "pen"), (1, 3, "cup")), batch((0, 5, "pen"), (0, 7, "ink"))):
        dg.materialize([names["arrow_orders"]], resources={"kafka_batch": given})
    rows = DeltaTable(tmp_path / "arrow_orders").to_pyarrow_table().sort_by("offset").to_pylist()
    assert [(row["offset"], row["value"]) for row in rows] == [(5, b"pen"), (7, b"ink")]


def test_values_example_passes_values_between_assets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BROKERS", "nowhere:9092")
    names = pasted("docs/assets/values.py", data=str(tmp_path))
    written: list[object] = []
    names["write_by_range"] = lambda *given: written.append(given)

    @dg.asset(deps=[names["cleaned"]])
    def report() -> None:
        """It is behind the assets of the batch."""

    own = dg.Definitions(assets=[report], jobs=[names["behind"]])
    defs = dg.Definitions.merge(names["defs"], own)
    dg.Definitions.validate_loadable(defs)
    job = defs.resolve_job_def("reports")
    assert job.asset_layer.executable_asset_keys == {report.key}
    given = {"kafka_batch": batch((0, 5, " pen "), (1, 3, "cup"))}
    assert dg.materialize([names["raw"], names["cleaned"]], resources=given).success
    assert written == [(["pen", "cup"], RANGES)]


def test_iceberg_settings_are_accepted() -> None:
    config = pasted("iceberg.spark.SparkCatalog")["spark"]._classic_config()
    assert config["spark.sql.catalog.lake.type"] == "rest"
    assert "iceberg-spark-runtime-4." in config["spark.jars.packages"]


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_table_examples_work_with_the_added_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.docs.resolved_tables", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=850)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines()[-1] == "[(3, 2, 'cup'), (5, 1, 'pen')] [3, 5]"


@pytest.mark.spark
@pytest.mark.parametrize("provider", ["iceberg", "delta"])
def test_merge_example_keeps_the_newest_row(session: SparkSession, provider: str) -> None:
    names = pasted("docs/outputs/newest_row.py")
    if provider == "delta":
        names["TABLE"] = "customers"
    session.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    session.sql(
        f"CREATE TABLE {names['TABLE']} (id STRING, body STRING, partition INT, offset BIGINT) "
        f"USING {provider}"
    )
    spark = SimpleNamespace(spark_session=session)
    newest = []
    for values in (
        [(1, 3, "old"), (1, 2, "older")],
        [(1, 9, "new")],
        [(1, 3, "old again")],
        [(1, 9, "new again")],
    ):
        names["customers"](kafka_batch=batch(*values, key="ann"), spark=spark)
        newest += [tuple(row) for row in session.table(names["TABLE"]).collect()]
    assert newest == [
        ("ann", "old", 1, 3),
        ("ann", "new", 1, 9),
        ("ann", "new", 1, 9),
        ("ann", "new again", 1, 9),
    ]


@pytest.mark.spark
def test_compacted_copy_has_each_record_once_after_repeated_work(
    session: SparkSession, tmp_path: Path
) -> None:
    names = pasted("docs/parquet/compacted_copy.py")
    out, status = str(tmp_path / "out"), [{"topic": "orders", "partition": 0, "committed": 20}]
    status.append({"topic": "orders", "partition": 1, "committed": None})

    def write(start: int, until: int, value: str) -> None:
        rows = session.sql(
            f"SELECT 'orders' AS topic, 0 AS partition, id AS offset, '{value}' AS value, "  # noqa: S608
            f"{start}L AS range_start, {until}L AS range_until FROM range({start}, {until})"
        )
        write_parquet_by_range(rows, out)

    def copied(target: str) -> list[tuple[int, str]]:
        names["copy_compacted"](session, out, str(tmp_path / target), status)
        assert len(list((tmp_path / target).glob("*.parquet"))) == 1
        rows = session.read.parquet(str(tmp_path / target)).select("offset", "value").collect()
        return sorted((row["offset"], row["value"]) for row in rows)

    for start in (0, 10, 20):
        write(start, start + 10, "a")
    assert copied("first") == [(offset, "a") for offset in range(20)]
    write(10, 20, "b")
    write(20, 30, "b")
    status[0]["committed"] = 30
    assert copied("second") == [(offset, "a" if offset < 10 else "b") for offset in range(30)]


@pytest.mark.postgres
def test_database_example_writes_each_range_once(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres.create_database("shop")
    address = postgres.url("shop").replace("+psycopg2", "")
    monkeypatch.setenv("SHOP_DATABASE", address)
    names = pasted("docs/outputs/postgres.py")
    with closing(psycopg2.connect(address)) as shop, shop, shop.cursor() as at:
        at.execute('CREATE TABLE orders (topic TEXT, partition INT, "offset" BIGINT, body TEXT)')
    start = threading.Barrier(2)
    found: list[list[tuple[int, int]]] = []
    failed: list[BaseException] = []

    def read() -> list[tuple[int, int]]:
        with closing(psycopg2.connect(address)) as shop, shop, shop.cursor() as at:
            at.execute('SELECT partition, "offset" FROM orders ORDER BY 1, 2')
            return list(at.fetchall())

    def work(name: str) -> None:
        try:
            for _ in range(20):
                start.wait(LIMIT_S)
                names["orders"](kafka_batch=batch((0, 5, name), (0, 7, name), (1, 3, name)))
                start.wait(LIMIT_S)
                found.append(read())
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    runs = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for run in runs:
        run.start()
    for run in runs:
        run.join(LIMIT_S)
    assert failed == []
    assert found == 40 * [[(0, 5), (0, 7), (1, 3)]]
    again = {"kafka_batch": batch((0, 7, "again"))}
    assert dg.materialize([names["orders"]], resources=again).success
    assert read() == [(0, 7)]
