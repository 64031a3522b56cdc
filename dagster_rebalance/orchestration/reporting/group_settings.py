"""The settings of a group that its members store in Dagster for the CLI.

With them, a command needs neither the asset code nor the broker addresses, and counts attempts as
the members do. Secrets are not stored. Like directives, the settings are a dynamic partition key
that no asset uses: one query reads it, and it never expires.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import dagster as dg

    from dagster_rebalance.orchestration.resources.kafka import KafkaConsumerResource

_KEPT = (
    "group_id",
    "start_from",
    "foreign_metadata",
    "max_attempts",
    "retry_delay_s",
    "retry_delay_limit_s",
    "retry_stopped",
    "on_failure",
    "dead_letter_topic",
)
_KEPT_IF_SHORT = ("topics", "bootstrap_servers")
_MOST_BYTES = 2_000
"""Postgres takes no key of more than 2,704 bytes."""


def public_settings(kafka: KafkaConsumerResource) -> str:
    """Return the settings of a group as text, without secrets."""
    kept: dict[str, Any] = {name: getattr(kafka, name) for name in _KEPT}
    for name in _KEPT_IF_SHORT:
        longer = {**kept, name: getattr(kafka, name)}
        if len(_text(longer).encode()) <= _MOST_BYTES:
            kept = longer
    return _text(kept)


class GroupSettings:
    """The stored settings of one group, under the name of its dynamic partitions."""

    def __init__(self, instance: dg.DagsterInstance, name: str) -> None:
        self._instance = instance
        self._name = name

    def keep(self, settings: str) -> None:
        """Replace the settings."""
        known = self._instance.get_dynamic_partitions(self._name)
        if list(known) != [settings]:
            self._instance.add_dynamic_partitions(self._name, [settings])
        for old in known:
            if old != settings:
                self._instance.delete_dynamic_partition(self._name, old)

    def read(self) -> dict[str, Any]:
        """Return the settings; empty if none are stored, or they cannot be read."""
        known = self._instance.get_dynamic_partitions(self._name)
        try:
            found = json.loads(known[-1]) if known else {}
        except ValueError:
            return {}
        if not isinstance(found, dict):
            return {}
        known_names = {*_KEPT, *_KEPT_IF_SHORT}
        return {name: value for name, value in found.items() if name in known_names}


def _text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
