"""Worker processes that play chunks of schedules and return the results in order.

They end with the work, on Ctrl-C, and with their parent. Their number changes only the time.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

_Work = TypeVar("_Work")
_Shown = TypeVar("_Shown")


def spread(
    play: Callable[[_Work], _Shown], chunks: Sequence[_Work], *, workers: int | None = None
) -> Iterator[_Shown]:
    """Yield the result of each chunk, in the order of the chunks.

    With one core or one chunk, this process plays the chunks itself.
    """
    workers = min(workers or os.cpu_count() or 1, len(chunks))
    if workers <= 1:
        yield from map(play, chunks)
        return
    # Spawned, not forked: a schedule is its seed alone, and inherits nothing.
    context = get_context("spawn")
    lifeline, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _watch, (lifeline,))
    try:
        with _children_deaf_to_ctrl_c():
            # Not with `map`: on Ctrl-C it cancels the remaining futures in this thread, and the
            # thread of the pool fails on cancelled futures when its workers end.
            shown = deque(pool.submit(play, chunk) for chunk in chunks)
        while shown:
            yield shown.popleft().result()
    finally:
        held.close()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _children_deaf_to_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C in the workers, which inherit the mask; this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(lifeline: Connection) -> None:
    """End a worker when its lifeline closes, which happens at the latest with its parent."""

    def end() -> None:
        lifeline.poll(None)
        os._exit(1)

    Thread(target=end, daemon=True).start()
