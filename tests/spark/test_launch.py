"""Settings of the JVM of a classic session."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.spark.launch import (
    one_fetch_at_a_time,
    only_the_given_server,
    settings_in_a_file,
    workers_of_this_python,
)

SECRET = "sword fish=\\ : # ! \"quoted\" 'x' grüße 🐟"  # noqa: S105 - of the test


def test_workers_use_this_python_unless_pyspark_python_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    with workers_of_this_python():
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert "PYSPARK_PYTHON" not in os.environ
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3")
    with workers_of_this_python():
        assert os.environ["PYSPARK_PYTHON"] == "/usr/bin/python3"


@pytest.mark.parametrize("value", ["", "sc://elsewhere:15002"])
def test_spark_remote_is_unset_while_a_session_starts(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SPARK_REMOTE", value)
    with only_the_given_server():
        assert "SPARK_REMOTE" not in os.environ
    assert os.environ["SPARK_REMOTE"] == value
    monkeypatch.delenv("SPARK_REMOTE")
    with only_the_given_server():
        pass
    assert "SPARK_REMOTE" not in os.environ


def test_package_cache_is_locked_while_a_session_fetches(tmp_path: Path) -> None:
    config = {"spark.jars.packages": "a:b:1", "spark.jars.ivy": str(tmp_path / "ivy")}

    def is_free() -> bool:
        with (tmp_path / "ivy" / "dagster-rebalance.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with one_fetch_at_a_time(config):
        assert not is_free()
    assert is_free()


def test_session_without_packages_takes_no_lock(tmp_path: Path) -> None:
    with one_fetch_at_a_time({"spark.jars.ivy": str(tmp_path / "ivy")}):
        assert not (tmp_path / "ivy").exists()


@pytest.mark.spark
def test_command_line_of_the_jvm_has_no_secret(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.spark.private_settings"]
    environment = {**os.environ, "ETL_SECRET": SECRET, "TMPDIR": str(tmp_path)}
    child = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout.splitlines()[-1])
    assert "SparkSubmit" in seen["command"]
    assert "-Xmx512m" in seen["command"], "the JVM reads its own options from the file, too"
    assert "sword" not in seen["command"]
    assert seen["settings"]["spark.hadoop.fs.s3a.secret.key"] == SECRET
    assert (seen["settings"]["spark.master"], seen["settings"]["spark.app.name"]) == (
        "local[1]",
        "private",
    )
    assert seen["environment"] is None
    assert seen["workers"] == sys.executable, "which has the libraries of the run"
    assert seen["second"] == "3"
    assert not list(tmp_path.glob("*.conf"))


def test_settings_file_is_private_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--verbose pyspark-shell")
    with settings_in_a_file({"spark.a": SECRET}):
        arguments = os.environ["PYSPARK_SUBMIT_ARGS"].split()
        file = Path(arguments[2])
        assert arguments == [
            "--load-spark-defaults",
            "--properties-file",
            str(file),
            "--verbose",
            "pyspark-shell",
        ]
        assert file.stat().st_mode & 0o777 == 0o600
    assert os.environ["PYSPARK_SUBMIT_ARGS"] == "--verbose pyspark-shell"
    assert not file.exists()


def test_second_properties_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--properties-file /mine pyspark-shell")
    with (
        pytest.raises(ConfigurationError, match=r"spark-defaults\.conf"),
        settings_in_a_file({"spark.a": "b"}),
    ):
        pass


@pytest.mark.parametrize(
    "name",
    [
        "spark.driver.extraJavaOptions",
        "spark.executor.extraJavaOptions",
        "spark.driver.defaultJavaOptions",
    ],
)
def test_secret_in_jvm_options_is_refused(name: str) -> None:
    with (
        pytest.raises(ConfigurationError, match=f"{name} has a secret") as refused,
        settings_in_a_file({name: "-Xss4m -Djavax.net.ssl.trustStorePassword=hidden"}),
    ):
        pass
    assert "hidden" not in str(refused.value)
