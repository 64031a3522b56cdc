"""The log of a member: each occurrence is one record, with its name and fields as attributes.

Any formatter that shows the attributes of a record shows them: JSON for a log store, or one of
OpenTelemetry. What the names are and what each has is decided by `core.model.member_events`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.member_events import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_rebalance.core.model.member_events import Occurrence

logger = logging.getLogger(__name__)


class MemberLog:
    """Writes what happens to one member.

    Args:
        of_each: What each record says of the member: its `group_id` and `member`, and the
            `member_run_id` of a streaming run.
    """

    def __init__(self, of_each: Mapping[str, str] | None = None) -> None:
        self._of_each = dict(of_each or {})

    def write(self, occurrence: Occurrence) -> None:
        """Write one record, if anybody wants it."""
        level = occurrence.level
        if logger.isEnabledFor(level):
            fields = {name: plain(value) for name, value in occurrence.fields.items()}
            extra = {"event_name": occurrence.what.value, **self._of_each, **fields}
            logger.log(level, "%s", occurrence.text, extra=extra)
