"""Resources with a resource inside."""

# No `from __future__ import annotations` here: Dagster recognizes a nested resource by its
# evaluated annotation.
from pathlib import Path
from typing import Any

import dagster as dg


class Where(dg.ConfigurableResource[Any]):
    path: str = "/data"


class Nested(dg.ConfigurableIOManager):
    where: dg.ResourceDependency[Where]

    def _file(self, key: dg.AssetKey) -> Path:
        return Path(self.where.path, key.path[-1])

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        self._file(context.asset_key).write_text(str(obj))

    def load_input(self, context: dg.InputContext) -> str:
        return self._file(context.asset_key).read_text()


class Lake(dg.ConfigurableResource[Any]):
    path: str


class House(dg.ConfigurableResource[Any]):
    lake: dg.ResourceDependency[Lake]
