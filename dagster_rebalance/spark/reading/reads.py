"""Which parts of a read this process has written where: each place takes one part of a read.

Owns that a second part is refused: it would replace the first one. Two reads of the same ranges are
two reads, as a replay must replace.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

_READS_REMEMBERED = 1000

_written: OrderedDict[str, set[str]] = OrderedDict()
_lock = threading.Lock()


@contextmanager
def written_once(read_id: str | None, places: AbstractSet[str]) -> Iterator[None]:
    """Refuse to write a second part of one read over the first.

    What fails inside has written nothing.

    Args:
        read_id: Of the read; None where it is not known, and nothing is refused.
        places: Where its records go.

    Raises:
        IllegalStateError: A part of it is in one of the places already.
    """
    if read_id is None:
        yield
        return
    with _lock:
        known = _written.setdefault(read_id, set())
        again = sorted(places & known)
        if again:
            msg = (
                f"what was read by one read_ranges() was written before to {again[0]}: a second "
                "part would replace the first. Write all of it in one call, or each part to a path "
                "or table of its own. To write the same again, read it again."
            )
            raise IllegalStateError(msg)
        known |= places
        while len(_written) > _READS_REMEMBERED:
            _written.popitem(last=False)
    try:
        yield
    except BaseException:
        with _lock:
            known -= places
        raise
