"""A process with a classic session of the Spark resource.

It prints, as JSON, what its JVM was started with and what Spark knows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from dagster_rebalance.orchestration.resources.spark import KafkaSparkResource

SETTINGS = {
    "spark.ui.enabled": False,
    "spark.driver.memory": "512m",
    "spark.jars": "file:///spark-sql-kafka-0-10.jar",  # keeps the connector from being fetched
    "spark.hadoop.fs.s3a.secret.key": os.environ["ETL_SECRET"],
}


def command_line_of_the_jvm() -> str:
    """Return the command line of the one child process, which every user can read."""
    (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return Path(f"/proc/{child}/cmdline").read_text()


session = KafkaSparkResource(
    spark_config=SETTINGS, master="local[1]", app_name="private"
).spark_session
context = session.sparkContext
seen = {
    "command": command_line_of_the_jvm(),
    "settings": {
        name: context.getConf().get(name) for name in [*SETTINGS, "spark.master", "spark.app.name"]
    },
    "environment": os.environ.get("PYSPARK_SUBMIT_ARGS"),
    "workers": context.pythonExec,
}
session.stop()
again = KafkaSparkResource(
    spark_config=SETTINGS | {"spark.sql.shuffle.partitions": 3}, master="local[1]"
).spark_session
seen["second"] = again.conf.get("spark.sql.shuffle.partitions")
again.stop()
print(json.dumps(seen))  # noqa: T201 - the test reads it
