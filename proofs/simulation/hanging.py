"""Work with a long wait that does not block its caller.

`Clockwork.let_others` nests short waits, so a long one would block everything below it. Such work
has a thread, and exactly one thread runs at any time, so a seed stays deterministic.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from proofs.simulation.clockwork import Clockwork


class GivenUpError(BaseException):
    """Unwinds abandoned work at the end of a schedule."""


class Hanging:
    """Work that may wait without blocking its caller.

    Args:
        clockwork: Ends the waits.
        work: The function.
        resumed: Called with the continuation, at each wait.
    """

    def __init__(
        self,
        clockwork: Clockwork,
        work: Callable[[], None],
        resumed: Callable[[Callable[[], None]], None],
    ) -> None:
        self._clockwork = clockwork
        self._resumed = resumed
        self._work = work
        self._may_go_on, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_given_up = self._is_over = False
        self._raised: BaseException | None = None
        clockwork.hanging.append(self)
        threading.Thread(target=self._run, name="simulated hang", daemon=True).start()

    def go_on(self) -> None:
        """Work until the next wait or the end."""
        self._resumed(self._switch)

    def wait(self, seconds: float) -> None:
        """Wait; called by the work."""
        self._clockwork.after(seconds, None, self.go_on)
        self._has_paused.release()
        self._may_go_on.acquire()
        if self._is_given_up:
            raise GivenUpError

    def give_up(self) -> None:
        """End the thread."""
        self._is_given_up = True
        self._may_go_on.release()

    def _switch(self) -> None:
        if self._is_over:
            return
        self._may_go_on.release()
        self._has_paused.acquire()
        if self._is_over:
            self._clockwork.hanging.remove(self)
        if self._raised is not None:
            raise self._raised

    def _run(self) -> None:
        self._may_go_on.acquire()
        try:
            if not self._is_given_up:
                self._work()
        except GivenUpError:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised where the work was resumed
            self._raised = error
        self._is_over = True
        self._has_paused.release()
