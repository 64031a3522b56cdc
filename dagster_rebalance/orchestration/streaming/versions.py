"""Versions of a streaming run: of its code, and of the code and inputs of its materializations.

The sensor compares code versions and replaces runs whose version is old. The code version is a
digest of all Python files of the packages of the assets, of this package, the settings without
secrets, and the image that Dagster runs. The same code has the same version wherever it is; an
unrelated edit in a package replaces all runs of its assets. Other changes of a deployment (a
library, a secret) need an explicit version.

Dagster writes provenance tags when a step stores an output, which a streaming run does only once,
so this module computes them for each batch. From these tags, Dagster shows an asset as unsynced,
and `AutomationCondition.data_version_changed()` fires.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import time
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import dagster as dg

_IMAGE_VARIABLE = "DAGSTER_CURRENT_IMAGE"
_CHARACTERS = 12
_CODE_VERSION = "dagster/code_version"
_DATA_VERSION = "dagster/data_version"
_IS_OF_USER = "dagster/data_version_is_user_provided"
_INPUT_VERSION = "dagster/input_data_version"
_INPUT_EVENT = "dagster/input_event_pointer"
_NO_VERSION, _NO_EVENT = "INITIAL", "NULL"
"""Dagster's data version and event of an input without a record."""
_LOOK_S = 1.0
"""Maximum age of input versions. With many batches a second, reading them would take longer than a
batch. An outdated version shows the asset as unsynced until the next batch."""


def code_version(functions: Iterable[Callable[..., object]], settings: str) -> str:
    """Return the code version of functions and `settings`, which must have no secrets."""
    digest = hashlib.sha256(settings.encode())
    digest.update(os.environ.get(_IMAGE_VARIABLE, "").encode())
    files = {file for function in (*functions, code_version) for file in _files(function)}
    # By content, not by folder: several packages have a file of the same name.
    for name, content in sorted((name, file.read_bytes()) for name, file in files):
        digest.update(name.encode())
        digest.update(content)
    return digest.hexdigest()[:_CHARACTERS]


def _source_object(function: object) -> Any:  # noqa: ANN401 - a function or a class
    """Return the function or class whose source file defines a callable."""
    found = inspect.unwrap(function) if callable(function) else function
    if isinstance(found, partial):
        return _source_object(found.func)
    has_source = inspect.isfunction(found) or inspect.ismethod(found) or inspect.isclass(found)
    return found if has_source else type(found)


def _files(function: Callable[..., object]) -> Iterator[tuple[str, Path]]:
    """Yield all source files of the package of a function, or of its folder, by relative name.

    A deployment may put the same files elsewhere.
    """
    found = _source_object(function)
    source = inspect.getsourcefile(found)
    if source is None or not Path(source).is_file():
        return
    own = Path(source).resolve()
    # `dg scaffold` writes folders without an __init__.py inside a package: shop.defs.orders.work in
    # /code/shop/defs/orders/work.py is in the package /code/shop.
    names = tuple(found.__module__.split("."))
    is_named = len(names) > 1 and own.with_suffix("").parts[-len(names) :] == names
    folder = own.parents[len(names) - 2] if is_named else own.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    is_package = is_named or (folder / "__init__.py").exists()
    for file in {own, *(folder.rglob("*.py") if is_package else folder.glob("*.py"))}:
        yield str(file.relative_to(folder)), file


class Provenance:
    """The provenance tags of the materializations of one run.

    If an asset has no code version, the run id is its code version, as in Dagster. In each batch,
    `tags` must not be called for an asset before its upstream assets: it reads their data versions.
    """

    def __init__(
        self, instance: dg.DagsterInstance, run_id: str, specs: Iterable[dg.AssetSpec]
    ) -> None:
        self._instance = instance
        self._run_id = run_id
        self._specs = {spec.key: spec for spec in specs}
        self._inputs: dict[dg.AssetKey, tuple[str, str]] = {}
        self._looked_at = 0.0
        self._made: dict[dg.AssetKey, tuple[str, str]] = {}

    def look(self) -> None:
        """Read the versions of the inputs of a batch, before its assets are called."""
        if self._inputs and time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        outside = {
            dep.asset_key
            for spec in self._specs.values()
            for dep in spec.deps
            if dep.asset_key not in self._made
        }
        self._inputs = {key: self._recorded(key) for key in outside}

    def tags(
        self, key: dg.AssetKey, version: dg.DataVersion | None, batch_id: str
    ) -> dict[str, str]:
        """Return the tags of a materialization; `version` is the data version from its function.

        Without `version`, it is derived from code version, batch id and inputs: no upstream asset
        represents the records.
        """
        spec = self._specs[key]
        code = spec.code_version or self._run_id
        inputs = {dep.asset_key: self._input(dep.asset_key) for dep in spec.deps}
        texts = [code, batch_id, *(inputs[one][0] for one in sorted(inputs))]
        made = version.value if version else sha256("".join(texts).encode()).hexdigest()
        self._made[key] = (made, _NO_EVENT)
        return {
            _CODE_VERSION: code,
            _DATA_VERSION: made,
            **({_IS_OF_USER: "true"} if version else {}),
            **{f"{_INPUT_VERSION}/{one.to_user_string()}": inputs[one][0] for one in inputs},
            **{f"{_INPUT_EVENT}/{one.to_user_string()}": inputs[one][1] for one in inputs},
        }

    def _input(self, key: dg.AssetKey) -> tuple[str, str]:
        return self._made.get(key) or self._inputs.get(key, (_NO_VERSION, _NO_EVENT))

    def _recorded(self, key: dg.AssetKey) -> tuple[str, str]:
        record = self._instance.get_latest_data_version_record(key)
        if record is None:
            return _NO_VERSION, _NO_EVENT
        tags = record.event_log_entry.tags or {}
        return tags.get(_DATA_VERSION, _NO_VERSION), str(record.storage_id)
