"""Errors of a real Spark: the records or the environment of the run as the cause.

Spark Connect raises other classes than a classic session, and more of them have the same name.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions
from pyspark.sql.connect import functions as connect_functions
from pyspark.sql.types import IntegerType

from dagster_rebalance.core.model.run_snapshot import FailureCause
from dagster_rebalance.orchestration.storage.failure_notes import cause_of_error, text_of_error
from dagster_rebalance.spark.spark_jobs import is_connect, show_causes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
RECORDS, ENVIRONMENT = FailureCause.RECORDS, FailureCause.ENVIRONMENT


@pytest.mark.parametrize(
    ("expression", "cause"),
    [
        ("raise_error('no number')", RECORDS),
        ("CAST(concat('x', id) AS INT)", RECORDS),
        ("1 / (id - 1)", RECORDS),
        ("array(1)[int(id) + 7]", RECORDS),
        ("from_json('{', 'a INT', map('mode', 'FAILFAST'))", RECORDS),
        ("to_date(concat('x', id), 'yyyy')", RECORDS),
        ("price", ENVIRONMENT),
        ("CAST(id AS )", ENVIRONMENT),
    ],
)
def test_expression(session: SparkSession, expression: str, cause: FailureCause) -> None:
    session.conf.set("spark.sql.ansi.enabled", "true")
    with pytest.raises(Exception) as failure:  # noqa: PT011 - of Spark, whatever its class
        session.range(3).selectExpr(expression).collect()
    assert cause_of_error(failure.value) is cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("no number"), RECORDS),
        (KeyError("price"), RECORDS),
        (ConnectionRefusedError("the price service"), ENVIRONMENT),
        (MemoryError(), ENVIRONMENT),
    ],
)
def test_python_function(session: SparkSession, error: Exception, cause: FailureCause) -> None:
    def fail(_: int) -> int:
        raise error

    udf = (connect_functions if is_connect(session) else functions).udf
    with pytest.raises(Exception, match=type(error).__name__) as failure:
        session.range(3).select(udf(fail, IntegerType())("id")).collect()
    assert cause_of_error(failure.value) is cause


def test_cause_of_an_error_in_a_python_function(session: SparkSession) -> None:
    def fail(_: int) -> int:
        try:
            raise ConnectionResetError
        except OSError as error:
            message = "no price for order 17"
            raise LookupError(message) from error

    show_causes(session)
    udf = (connect_functions if is_connect(session) else functions).udf
    with pytest.raises(Exception, match="no price") as failure:
        session.range(3).select(udf(fail, IntegerType())("id")).collect()
    assert cause_of_error(failure.value) is ENVIRONMENT
    text = text_of_error(failure.value)
    assert "ConnectionResetError" in text
    assert "LookupError: no price for order 17" in text


def test_worker_that_dies(session: SparkSession) -> None:
    def die(_: int) -> int:
        os._exit(1)

    udf = (connect_functions if is_connect(session) else functions).udf
    with pytest.raises(Exception, match=r"worker exited unexpectedly|Connection reset") as failure:
        session.range(3).select(udf(die, IntegerType())("id")).collect()
    assert cause_of_error(failure.value) is ENVIRONMENT


def test_arrow_function(session: SparkSession) -> None:
    def fail(batches: Iterable[Any]) -> Iterable[Any]:
        for batch in batches:
            yield batch
            message = "no number"
            raise ValueError(message)

    with pytest.raises(Exception) as failure:  # noqa: PT011 - as above
        session.range(3).mapInArrow(fail, "id long").collect()
    assert cause_of_error(failure.value) is RECORDS


def test_file_that_is_gone(session: SparkSession, tmp_path: Path) -> None:
    session.range(3).write.parquet(str(tmp_path / "rows"))
    frame = session.read.parquet(str(tmp_path / "rows"))
    frame.count()
    for file in (tmp_path / "rows").glob("part-*"):
        file.unlink()
    with pytest.raises(Exception) as failure:  # noqa: PT011 - as above
        frame.collect()
    assert cause_of_error(failure.value) is ENVIRONMENT
