"""The groups of the test of bad records: one of each form of run, with the records of one topic.

The output of a range is a file with its good records. While `hold` exists, a run that has set
records aside writes its process id into the file `at_work`, and waits. Such a run also sets aside
the records `once`. Once `mended` exists, no record is bad, and a replay waits after it has written
its files.
"""

import os
import time

import dagster as dg

from dagster_rebalance import KafkaBatch
from tests.e2e.project.both_forms import ROOT, both_forms


def _process(group: str, batch: KafkaBatch) -> dg.MaterializeResult:  # type: ignore[type-arg]
    folder, set_aside = ROOT / group, 0
    is_mended = (ROOT / f"{group}_mended").exists()
    is_first = (ROOT / f"{group}_hold").exists()
    good: dict[str, list[str]] = {range_.key: [] for range_ in batch.offset_ranges}
    for range_ in batch.offset_ranges:
        for message in batch.messages(range_):
            value = (message.value() or b"").decode()
            is_bad = value.startswith("bad") and not is_mended
            if is_bad or (value.startswith("once") and is_first):
                set_aside += batch.set_aside(message, ValueError(f"{value} is no number"))
            else:
                good[range_.key].append(value)
    if set_aside:
        _wait(group)
    for key, values in good.items():
        (folder / key).write_text("\n".join(values))
    if batch.is_rerun:
        _wait(group)
    return dg.MaterializeResult(metadata=batch.metadata())


def _wait(group: str) -> None:
    while (ROOT / f"{group}_hold").exists():
        note = ROOT / f"{group}_at_work"
        if not note.exists():
            unfinished = ROOT / f"{group}_{os.getpid()}"
            unfinished.write_text(str(os.getpid()))
            unfinished.replace(note)
        time.sleep(0.1)


defs = both_forms("bad", _process, max_dead_letters="50%", retry_delay_s=1.0)
