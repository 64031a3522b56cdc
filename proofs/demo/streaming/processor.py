"""The processor of the runs: plain Python, a Spark Connect server, or a Spark cluster."""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, TypeAlias

from dagster_rebalance.testing.spark_cluster import SparkCluster
from dagster_rebalance.testing.spark_connect import SparkConnectServer

if TYPE_CHECKING:
    from collections.abc import Callable

SparkServer: TypeAlias = SparkConnectServer | SparkCluster


class Processor(enum.Enum):
    """The kinds; the value is shown as the name of the server."""

    PYTHON = ""
    CONNECT = "a Spark Connect server"
    CLUSTER = "a Spark cluster of a master and two workers"

    @classmethod
    def of(cls, *, spark: bool, cluster: bool) -> Processor:
        """Return the kind of the command-line options."""
        if cluster:
            return cls.CLUSTER
        return cls.CONNECT if spark else cls.PYTHON

    def server(self, tell: Callable[[str], None]) -> SparkServer | None:
        """Return the server, not started yet, if one is required."""
        if self is Processor.CLUSTER:
            return SparkCluster(tell=tell)
        return SparkConnectServer(tell=tell) if self is Processor.CONNECT else None


def environment(server: SparkServer | None) -> dict[str, str]:
    """Return the environment variables for the runs."""
    if isinstance(server, SparkCluster):
        settings = json.dumps(server.session_settings())
        return {"SPARK_MASTER": server.url, "SPARK_CONFIG": settings}
    return {"SPARK_CONNECT_URL": server.remote} if server else {}
