"""The assets of a consumer group, and the names of its records in Dagster's storage."""

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
    """The assets of a consumer group.

    Attributes:
        offsets: The asset for committed offsets, with one partition per topic-partition.
        group: The asset for members and holds.
        lag: The asset for the lag over time.
        letters: The asset for the open dead letters over time.
    """

    offsets: dg.AssetKey
    group: dg.AssetKey
    lag: dg.AssetKey
    letters: dg.AssetKey

    @classmethod
    def of(cls, group_id: str) -> GroupAssets:
        """Return the assets of a group, by its id."""
        part = _key_part(group_id)
        names = ("offsets", "group", "lag", "dead_letters")
        return cls(*(dg.AssetKey(["kafka", part, name]) for name in names))

    @property
    def partitions_name(self) -> str:
        """The dynamic partitions of the offsets asset."""
        return "/".join(self.offsets.path)

    @property
    def directives_name(self) -> str:
        """The dynamic partitions with the directives: pause, stop and resume."""
        return f"dagster_rebalance/orders/{self.group.path[1]}"

    @property
    def retries_name(self) -> str:
        """The dynamic partitions with the directives to retry."""
        return f"dagster_rebalance/retries/{self.group.path[1]}"

    @property
    def reruns_name(self) -> str:
        """The dynamic partitions with the batches of reruns."""
        return f"dagster_rebalance/reruns/{self.group.path[1]}"

    @property
    def settings_name(self) -> str:
        """The dynamic partitions with the settings of the members."""
        return f"dagster_rebalance/settings/{self.group.path[1]}"


def _key_part(group_id: str) -> str:
    """Return a group id as a part of an asset key.

    Kafka accepts any text as a group id: slashes, quotes, line ends, thousands of characters. If
    Dagster's selections and pages cannot use an id, it is cleaned, and a digest keeps it unique.
    """
    if _PLAIN_PART.fullmatch(group_id):
        return group_id
    digest = hashlib.sha256(group_id.encode()).hexdigest()[:12]
    return f"{_NOT_PLAIN.sub('_', group_id)[:_PART_SHOWN]}-{digest}"
