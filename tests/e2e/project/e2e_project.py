"""The code location of the end-to-end tests, with assets that the test controls.

Each scenario has one consumer group per rebalance protocol.

A run works until the test opens the gate of its group, and fails as often as the test requests. It
appends one line per range to a file. While it works on a range, another file contains its process
id; a run that finds such a file of a live process reports an overlap.
"""

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rebalance import KafkaConsumerResource, build_kafka_batch_defs

ROOT = Path(os.environ["E2E_ROOT"])
SETTINGS: dict[str, dict[str, Any]] = {
    "handover": {"max_ranges_per_run": 1},
    "queued": {"max_ranges_per_run": 1},
    "idle": {},
    "deadline": {"hold_limit_s": 12.0, "hold_commit_slice_s": 6.0, "max_ranges_per_run": 1},
    "fenced": {"max_ranges_per_run": 1},
    "grown": {"max_ranges_per_run": 1},
    "failing": {"max_attempts": 3, "retry_delay_s": 1.0},
    "hopeless": {"max_attempts": 1, "retry_stopped": False},
    "poisoned": {
        "max_attempts": 1,
        "on_failure": "dead_letter",
        "dead_letter_topic": "dead_letters",
    },
    "ordered": {"max_ranges_per_run": 1},
    "previewed": {},
    "paired": {},
    "reloaded": {},
    "killed": {"max_ranges_per_run": 1},
    "dying": {"heartbeat_timeout_s": 12.0},
    "interrupted": {"shutdown_timeout_s": 40.0},
    "late": {},
    "ended": {
        "heartbeat_timeout_s": 24.0,
        "max_ranges_per_run": 1,
        "max_runs_in_flight": 8,
        "lease_s": 120.0,
    },
    "handled": {"max_ranges_per_run": 1, "max_runs_in_flight": 8},
    "valued": {"max_ranges_per_run": 1, "max_attempts": 1, "retry_stopped": False},
    "secured": {},
    "refused": {"sasl_password": dg.EnvVar("KAFKA_WRONG_PASSWORD")},
}
SECURITY: dict[str, Any] = {
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "SCRAM-SHA-512",
    "sasl_username": dg.EnvVar("KAFKA_USERNAME"),
    "sasl_password": dg.EnvVar("KAFKA_PASSWORD"),
    "ssl_ca_location": dg.EnvVar("KAFKA_CA"),
}
LINGER_S = 2.0
"""Shorter than a sixth of the shortest heartbeat timeout above, at which runs are killed."""
ASSETS = dict.fromkeys(("paired", "handled"), ("first", "second"))


class SlowKafka(KafkaConsumerResource):
    """The same, but a tick that has its answer takes as long as the test wants to give it."""

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Delay the end of a tick beyond Dagster's timeout."""
        while (ROOT / self.group_id / "slow").exists():
            time.sleep(0.1)


def _asset(
    group: str, name: str, batch_key: str, deps: Sequence[dg.AssetsDefinition] = ()
) -> dg.AssetsDefinition:
    folder = ROOT / group

    @dg.asset(name=f"{group}_{name}", required_resource_keys={batch_key}, deps=deps)
    def work(context: dg.AssetExecutionContext) -> None:
        batch = getattr(context.resources, batch_key)
        with _at_work(
            folder, name, [range_.key for range_ in batch.offset_ranges], context.run.run_id
        ):
            (folder / "working" / context.run.run_id).write_text(str(os.getpid()))
            while (folder / "closed").exists():
                time.sleep(0.1)
            for failure in (folder / "failures").iterdir():
                try:
                    failure.unlink()
                except FileNotFoundError:  # a run beside this one has taken it
                    continue
                message = "the test wants this run to fail"
                raise RuntimeError(message)
            for range_ in batch.offset_ranges:
                with (folder / "output" / f"{name}.{range_.key}").open("a") as output:
                    output.write(f"{context.run.run_id} {uuid.uuid4()}\n")

    return work


def _valued(group: str, batch_key: str) -> list[dg.AssetsDefinition]:
    """An asset that takes the value of another, with one that waits for the test in between."""

    @dg.asset(name=f"{group}_raw", required_resource_keys={batch_key})
    def raw(context: dg.AssetExecutionContext) -> list[str]:
        batch = getattr(context.resources, batch_key)
        return [record.value().decode() for record in batch.messages()]

    between = _asset(group, "work", batch_key, deps=[raw])

    @dg.asset(
        name=f"{group}_cleaned",
        ins={"raw": dg.AssetIn(raw.key)},
        deps=[between],
        required_resource_keys={batch_key},
    )
    def cleaned(context: dg.AssetExecutionContext, raw: list[str]) -> None:
        batch = getattr(context.resources, batch_key)
        (range_,) = batch.offset_ranges
        (ROOT / group / "output" / f"cleaned.{range_.key}").write_text("\n".join(raw))

    return [raw, between, cleaned]


@contextmanager
def _at_work(folder: Path, name: str, keys: list[str], run_id: str) -> Iterator[None]:
    """Register this process as working on ranges, and report all others that do.

    An interrupted process lingers on request.
    """
    process = f"{os.getpid()}.{_started(os.getpid())}.{run_id}"
    mine = [folder / "at_work" / f"{name}.{key}.{process}" for key in keys]
    for path in mine:
        path.touch()
    for path in mine:
        _, key, *_ = path.name.split(".")
        for other in path.parent.glob(f"{name}.{key}.*"):
            _, _, pid, started, _ = other.name.split(".")
            if other not in mine and _started(pid) == started:
                (folder / "company" / path.name).write_text(
                    f"{path.name} beside {other.name} at {time.time():.1f}"
                )
    try:
        yield
    finally:
        time.sleep(LINGER_S if (folder / "lingers").exists() else 0.0)
        for path in mine:
            path.unlink()


def _started(pid: int | str) -> str:
    """Return the start of a process, or "" without one: the system reuses pids."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _group(group: str) -> dg.Definitions:
    scenario, protocol = group.split("_")
    kafka = SlowKafka(
        bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
        group_id=group,
        topics=[group],
        max_records_per_range=10,
        max_wait_s=0,
        client_config={"session.timeout.ms": "10000", "heartbeat.interval.ms": "1000"}
        if protocol == "classic"
        else {},
        **{
            "group_protocol": protocol,
            "lease_s": 40.0,
            **(SECURITY if "KAFKA_PASSWORD" in os.environ else {}),
            **SETTINGS[scenario],
        },
    )
    return build_kafka_batch_defs(
        kafka=kafka,
        assets=_valued(group, f"batch_{group}")
        if scenario == "valued"
        else [_asset(group, name, f"batch_{group}") for name in ASSETS.get(scenario, ("work",))],
        name=group,
        kafka_key=f"kafka_{group}",
        batch_key=f"batch_{group}",
        job_tags={"e2e/queue": group if scenario in {"queued", "ended", "handled"} else "free"},
    )


defs = dg.Definitions.merge(*map(_group, os.environ["E2E_GROUPS"].split(",")))
