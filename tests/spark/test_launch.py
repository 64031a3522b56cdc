"""How settings reach the JVM of a classic session."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.spark.session.launch import (
    one_fetch_at_a_time,
    only_the_given_server,
    settings_in_a_file,
    workers_of_this_python,
)

SECRET = "sword fish=\\ : # ! \"quoted\" 'x' grüße 🐟"  # noqa: S105 - what is looked for


def test_a_python_for_workers_that_somebody_has_named_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the variable is gone where nobody had set it: it is of the process."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    with workers_of_this_python():
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert "PYSPARK_PYTHON" not in os.environ
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3")
    with workers_of_this_python():
        assert os.environ["PYSPARK_PYTHON"] == "/usr/bin/python3"


@pytest.mark.parametrize("value", ["", "sc://elsewhere:15002"])
def test_the_variable_of_pyspark_is_hidden_while_a_session_starts(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Pyspark starts no local session where it is set, also to nothing."""
    monkeypatch.setenv("SPARK_REMOTE", value)
    with only_the_given_server():
        assert "SPARK_REMOTE" not in os.environ
    assert os.environ["SPARK_REMOTE"] == value
    monkeypatch.delenv("SPARK_REMOTE")
    with only_the_given_server():
        pass
    assert "SPARK_REMOTE" not in os.environ


def test_sessions_that_fill_one_cache_of_packages_start_one_after_the_other(tmp_path: Path) -> None:
    """Ivy reads files that another process has not written to their end, and the run fails."""
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


def test_a_session_that_fetches_nothing_waits_for_nobody(tmp_path: Path) -> None:
    """Its jars are there already."""
    with one_fetch_at_a_time({"spark.jars.ivy": str(tmp_path / "ivy")}):
        assert not (tmp_path / "ivy").exists()


@pytest.mark.spark
def test_no_secret_is_on_the_command_line_of_the_jvm(tmp_path: Path) -> None:
    """Every user of a machine can read it.

    All settings arrive all the same, also in a second session of the process.
    """
    command = [sys.executable, "-m", "tests.spark.private_settings"]
    environment = {**os.environ, "ETL_SECRET": SECRET, "TMPDIR": str(tmp_path)}
    child = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout.splitlines()[-1])
    assert "SparkSubmit" in seen["command"]
    assert "-Xmx512m" in seen["command"], "what the JVM itself needs is read from the file, too"
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


def test_the_file_is_for_its_owner_alone_and_short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has secrets in it. Arguments of the user's own stay behind it."""
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


def test_a_file_that_spark_would_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark takes the last one alone."""
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
def test_a_secret_among_the_options_of_a_jvm_is_refused(name: str) -> None:
    """They are on a command line whatever is done, also when they come from the environment."""
    with (
        pytest.raises(ConfigurationError, match=f"{name} has a secret") as refused,
        settings_in_a_file({name: "-Xss4m -Djavax.net.ssl.trustStorePassword=hidden"}),
    ):
        pass
    assert "hidden" not in str(refused.value)
