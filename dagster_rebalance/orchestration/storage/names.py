"""The assets that stand for a consumer group, and the names of what Dagster keeps for it.

Owns how a group id becomes a part of an asset key: everybody who looks for something of a group
finds it by these names.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import dagster as dg

_PART_SHOWN = 60
_PLAIN_PART = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class GroupAssets:
    """The assets that stand for a consumer group.

    Attributes:
        offsets: Its committed offsets; one partition for each topic-partition.
        group: Its members and holds.
        lag: Its lag over time.
    """

    offsets: dg.AssetKey
    group: dg.AssetKey
    lag: dg.AssetKey

    @classmethod
    def of(cls, group_id: str) -> GroupAssets:
        """The assets of a group, by its id."""
        part = _key_part(group_id)
        names = ("offsets", "group", "lag")
        return cls(*(dg.AssetKey(["kafka", part, name]) for name in names))

    @property
    def partitions_name(self) -> str:
        """The name under which Dagster keeps the partitions of the offsets asset."""
        return "/".join(self.offsets.path)

    @property
    def order_book_name(self) -> str:
        """The name under which Dagster keeps what people have ordered."""
        return f"dagster_rebalance/orders/{self.group.path[1]}"

    @property
    def retry_book_name(self) -> str:
        """The name under which Dagster keeps what people want to be tried again."""
        return f"dagster_rebalance/retries/{self.group.path[1]}"

    @property
    def rerun_book_name(self) -> str:
        """The name under which Dagster keeps the batches of reruns."""
        return f"dagster_rebalance/reruns/{self.group.path[1]}"

    @property
    def settings_name(self) -> str:
        """The name under which Dagster keeps the settings that members have left."""
        return f"dagster_rebalance/settings/{self.group.path[1]}"


def _key_part(group_id: str) -> str:
    """Return a group id as a part of an asset key.

    The part is the id itself if Dagster's selections and pages can take it; otherwise it is a
    cleaned id with a digest that tells it from others. Kafka takes anything for a group id:
    slashes, quotes, line ends, and thousands of characters.
    """
    if _PLAIN_PART.fullmatch(group_id):
        return group_id
    digest = hashlib.sha256(group_id.encode()).hexdigest()[:12]
    return f"{_NOT_PLAIN.sub('_', group_id)[:_PART_SHOWN]}-{digest}"
