"""Fake admin clients for a connection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dagster_rebalance.kafka.cluster.admin_connection import AdminConnection

_Admin = TypeVar("_Admin")


def use_admin(connection: AdminConnection, admin: _Admin) -> _Admin:
    """Let a connection use a fake admin client."""
    vars(connection)["_held"] = SimpleNamespace(client=admin)
    return admin
