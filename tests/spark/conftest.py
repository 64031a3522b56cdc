"""A classic and a Connect session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession

from dagster_rebalance.spark.launch import workers_of_this_python
from dagster_rebalance.testing.local.jars import fetch
from dagster_rebalance.testing.spark_connect import kafka_connector
from tests.spark.lakes import connected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dagster_rebalance.testing.spark_connect import SparkConnectServer


@pytest.fixture(scope="module", params=["connect", "classic"])
def session(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    if request.param == "connect":
        server: SparkConnectServer = request.getfixturevalue("spark_connect_server")
        with connected(server) as on_server:
            yield on_server
        return
    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.jars": ",".join(map(str, fetch(kafka_connector()))),
    }
    with workers_of_this_python():
        classic = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    yield classic
    classic.stop()
