"""The reference shows the signature and the documentation of derived operations."""

from __future__ import annotations

import griffe
import pytest

from tests.docs.blocks import ROOT
from tools.griffe_awaited import Awaited


@pytest.fixture(scope="module")
def package() -> griffe.Module:
    loaded = griffe.load(
        "dagster_rebalance", extensions=griffe.load_extensions(Awaited), search_paths=[ROOT]
    )
    assert isinstance(loaded, griffe.Module)
    return loaded


@pytest.mark.parametrize("name", ["committed", "delay_revoke", "pause_topics", "seek"])
def test_awaited_operation_is_shown_as_coroutine_function(
    package: griffe.Module, name: str
) -> None:
    shown = package["kafka.aio.async_consumer.AsyncRebalanceAwareConsumer"].all_members[name]
    original = package["kafka.consumer.consumer.RebalanceAwareConsumer"].all_members[name]
    assert "async" in shown.labels
    assert shown.signature() == original.signature()
    assert shown.docstring.value == original.docstring.value
