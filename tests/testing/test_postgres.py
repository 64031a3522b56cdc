"""The Postgres of the kit: Dagster works on it, also through a proxy that can fall silent."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.fixtures import unique_name
from dagster_rebalance.testing.proxy import Proxy

if TYPE_CHECKING:
    from dagster_rebalance.testing.postgres import Postgres

pytestmark = pytest.mark.postgres


def test_postgres_holds_the_storage_of_dagster(postgres: Postgres) -> None:
    name = unique_name("instance").replace("-", "_")
    postgres.create_database(name)
    with dg.instance_for_test(overrides=postgres.dagster_settings(name)) as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization("orders"))
        assert len(instance.fetch_materializations(dg.AssetKey("orders"), limit=5).records) == 1
        assert "postgres" in type(instance.event_log_storage).__module__


def test_silent_proxy_forwards_later(postgres: Postgres) -> None:
    name = unique_name("silent").replace("-", "_")
    postgres.create_database(name)
    with (
        Proxy(postgres.port) as proxy,
        dg.instance_for_test(
            overrides=postgres.dagster_settings(name, port=proxy.port)
        ) as instance,
    ):
        proxy.fall_silent()
        accepted = proxy.accepted
        seen: list[int] = []
        reader = threading.Thread(
            target=lambda: seen.append(instance.get_runs_count()), daemon=True
        )
        reader.start()
        wait_until(lambda: proxy.accepted > accepted, timeout_s=120, what="a connection")
        assert reader.is_alive()
        assert not seen
        proxy.speak()
        reader.join(120)
        assert seen == [0]
