"""A deployment reports the state of its code locations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.deployment import CodeLocation, DagsterDeployment

if TYPE_CHECKING:
    from pathlib import Path

CODE = """import dagster as dg

@dg.op(config_schema={"number": int})
def count() -> None: ...

@dg.job
def counting() -> None:
    count()

defs = dg.Definitions(jobs=[counting])
"""


@pytest.mark.e2e
def test_location_with_broken_code_recovers_with_a_reload(tmp_path: Path) -> None:
    module = tmp_path / "shop.py"
    module.write_text(CODE)
    shop = CodeLocation("shop", "shop", tmp_path, reloads=True)
    with DagsterDeployment(tmp_path / "home", [shop]) as dagster:
        assert dagster.ui.broken_locations() == []
        config = {"ops": {"count": {"config": {"number": "two"}}}}
        with pytest.raises(
            DagsterRebalanceError, match=r'refused launchRun: Invalid scalar.*"two"'
        ):
            dagster.ui.launch("shop", "counting", config)
        module.write_text("nonsense")
        dagster.ui.reload("shop")
        assert dagster.ui.broken_locations() == ["shop"]
        module.write_text(CODE)
        dagster.ui.reload("shop")
        assert dagster.ui.broken_locations() == []
