"""The runs that `python -m proofs chaos` kills are the ones it means."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from proofs.chaos.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WORKER = """
import sys
from pathlib import Path
from proofs.chaos.exchange import Exchange
with Exchange(Path(sys.argv[1])).at_work("run-1"):
    print("at work", flush=True)
    for _ in sys.stdin:
        try:
            open("/dev/null").close()
            print(True, flush=True)
        except OSError:
            print(False, flush=True)
"""


@contextmanager
def _worker(exchange: Exchange) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, exchange.root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work\n"
        yield process


def test_run_at_work_is_found_and_killed(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    exchange.make()
    with _worker(exchange) as process:
        assert exchange.working() == {"run-1": process.pid}
        assert exchange.kill("run-1")
        assert process.wait() == -signal.SIGKILL
    assert not exchange.working()
    assert not exchange.kill("run-1")


def test_process_with_the_reused_pid_of_a_killed_run_is_not_killed(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    exchange.make()
    with _worker(exchange) as process:
        (note,) = (tmp_path / "working").iterdir()
        pid, began_at = map(int, note.read_text().split())
        note.write_text(f"{pid} {began_at - 1}")
        assert not exchange.working()
        assert not exchange.kill("run-1")
        assert process.poll() is None


def test_run_cut_off_opens_no_file_until_it_is_reconnected(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    exchange.make()
    with _worker(exchange) as process:
        assert exchange.cut_off("run-1")
        assert exchange.is_cut_off("run-1")
        assert _opens_files(process) == b"False\n"
        exchange.reconnect("run-1")
        assert not exchange.is_cut_off("run-1")
        assert _opens_files(process) == b"True\n"
    assert not exchange.cut_off("run-1")


def _opens_files(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"try\n")
    process.stdin.flush()
    return process.stdout.readline()
