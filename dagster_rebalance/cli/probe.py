"""`dagster-rebalance probe`: loads the definitions, executes a probe, and prints its result.

Rows, keys and errors may contain text of other programs, so they are printed without control
characters.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import typer
import yaml

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import OffsetRange, in_short, parse_offsets
from dagster_rebalance.core.model.printable import escaped, one_line
from dagster_rebalance.orchestration.operators.letter_payload import shown_payload
from dagster_rebalance.orchestration.operators.probe import ProbeResult
from dagster_rebalance.orchestration.operators.probe import probe as execute_probe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

_LAZY = type(dg.definitions(lambda: dg.Definitions()))  # noqa: PLW0108 - it has no signature else
"""The class of functions with `@dg.definitions`."""
_NAME_IT = "pass -m with the module, or -f with the file, that has the Definitions"


def probe(
    offsets: Sequence[str],
    *,
    module: str,
    python_file: Path | None,
    job: str,
    scratch: str,
    as_json: bool,
) -> None:
    """Execute a probe; exit with 1 if the assets fail."""
    ranges = _ranges(offsets)
    defs = _definitions(module, python_file)
    with _folder(scratch) as folder:
        result = execute_probe(defs, ranges, folder, job=job)
    if as_json:
        typer.echo(json.dumps(_as_json(result), default=_text))
    else:
        for line in _described(result, ranges, is_kept=bool(scratch)):
            typer.echo(line)
    if result.error:
        raise typer.Exit(1)


def _range(text: str) -> OffsetRange:
    try:
        return parse_offsets(text)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _ranges(offsets: Sequence[str]) -> list[OffsetRange]:
    ranges = sorted({_range(text) for text in offsets})
    for first, second in pairwise(ranges):
        if first.topic_partition == second.topic_partition and second.start < first.until:
            msg = f"{first} and {second} overlap: name each offset once"
            raise ConfigurationError(msg)
    return ranges


@contextmanager
def _folder(scratch: str) -> Iterator[str]:
    if scratch:
        yield scratch
        return
    with tempfile.TemporaryDirectory(prefix="dagster_rebalance_probe_") as folder:
        yield folder


def _definitions(module: str, python_file: Path | None) -> dg.Definitions:
    """Load the definitions of a code location, by the names that `dagster dev` takes."""
    if module and python_file is not None:
        msg = "pass either -m or -f, not both"
        raise ConfigurationError(msg)
    hint = ""
    if not module and python_file is None:
        module, python_file = _default_location(Path.cwd())
        hint = f". Or {_NAME_IT}"
    for folder in (Path.cwd() / "src", Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    name = module or str(python_file)
    try:
        loaded = importlib.import_module(module) if module else _from_file(Path(name).resolve())
        return _definitions_in(loaded, name)
    except ConfigurationError:
        raise
    except Exception as error:
        msg = f"{name} cannot be loaded: {type(error).__name__}: {error}{hint}"
        raise ConfigurationError(msg) from error


def _default_location(folder: Path) -> tuple[str, Path | None]:
    """Return the module or the file that a project or a workspace names."""
    project, workspace = folder / "pyproject.toml", folder / "workspace.yaml"
    if project.is_file():
        with _errors_of(project):
            module = _module_of(tomllib.loads(project.read_text()))
        if module:
            return module, None
    if workspace.is_file():
        with _errors_of(workspace):
            places = (yaml.safe_load(workspace.read_text()) or {}).get("load_from") or []
            named = [place for one in places for place in _named(one, folder)]
        if len(named) == 1:
            return named[0]
        msg = f"{workspace} has {len(named)} code locations in modules or files: {_NAME_IT}"
        raise ConfigurationError(msg)
    msg = f"{folder} has neither a pyproject.toml with a code location nor a workspace.yaml: "
    raise ConfigurationError(msg + _NAME_IT)


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OSError, yaml.YAMLError) as error:
        is_form = isinstance(error, AttributeError | KeyError | TypeError)
        why = "it does not have the form that Dagster expects" if is_form else one_line(str(error))
        msg = f"{file} names no code location: {why}. Mend it, or {_NAME_IT}"
        raise ConfigurationError(msg) from error


def _module_of(project: Any) -> str:  # noqa: ANN401 - from TOML
    tool = project.get("tool", {})
    of_dg = tool.get("dg", {}).get("project", {})
    root = of_dg.get("root_module", "")
    return (
        tool.get("dagster", {}).get("module_name")
        or of_dg.get("code_location_target_module")
        or (f"{root}.definitions" if root else "")
    )


def _named(place: Any, folder: Path) -> Iterator[tuple[str, Path | None]]:  # noqa: ANN401 - from YAML
    for kind, key in (("python_module", "module_name"), ("python_package", "package_name")):
        one = place.get(kind)
        if one:
            yield (one if isinstance(one, str) else one[key]), None
    file = place.get("python_file")
    if file:
        yield "", folder / (file if isinstance(file, str) else file["relative_path"])


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        msg = f"{path} is no Python file: {_NAME_IT}"
        raise ConfigurationError(msg)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _definitions_in(module: ModuleType, name: str) -> dg.Definitions:
    given = {id(one): one for one in vars(module).values() if isinstance(one, dg.Definitions)}
    lazy = {id(one): one for one in vars(module).values() if isinstance(one, _LAZY)}
    if len(given) + len(lazy) != 1:
        msg = (
            f"{name} has {len(given) + len(lazy)} dg.Definitions, and a code location has one: "
            f"{_NAME_IT}"
        )
        raise ConfigurationError(msg)
    if given:
        return next(iter(given.values()))
    loaded = next(iter(lazy.values()))()
    if not isinstance(loaded, dg.Definitions):
        msg = f"{name} returns a {type(loaded).__name__}: return dg.Definitions"
        raise ConfigurationError(msg)
    return loaded


def _described(
    result: ProbeResult, ranges: Sequence[OffsetRange], *, is_kept: bool
) -> Iterator[str]:
    ended = "failed" if result.error else "succeeded"
    yield f"probe of {in_short(ranges)} through job {result.job}: {ended}, nothing was committed"
    for asset in result.assets:
        yield f"asset {asset.key}"
        for name, value in asset.metadata.items():
            yield f"  {one_line(name)}: {one_line(value)}"
    for name in result.failed_checks:
        yield f"failed check {one_line(name)}"
    for output in result.outputs:
        rows = "1 row" if output.rows == 1 else f"{output.rows} rows"
        place = " (rolled back)" if not output.place else f" in {output.place}" if is_kept else ""
        yield f"output {output.form} {one_line(output.name)}: {rows}{place}"
        for row in output.shown:
            yield f"  {_row(row)}"
    if not result.outputs:
        yield "no output of this package was written"
    if result.letters:
        number = len(result.letters)
        yield f"the group would store {number} dead letter{'s' * (number != 1)}"
    for letter in result.letters:
        yield f"  {letter.key}: {one_line(letter.reason)}"
    if result.error:
        yield escaped(result.error.rstrip())


def _row(row: Mapping[str, Any]) -> str:
    return escaped(json.dumps(row, default=_text, ensure_ascii=False))


def _text(value: object) -> str:
    return shown_payload(bytes(value)) if isinstance(value, bytes | bytearray) else str(value)


def _as_json(result: ProbeResult) -> dict[str, Any]:
    return {
        "job": result.job,
        "success": not result.error,
        "error": result.error,
        "assets": {asset.key: asset.metadata for asset in result.assets},
        "failed_checks": result.failed_checks,
        "outputs": [
            {
                "format": output.form,
                "name": output.name,
                "place": output.place,
                "rows": output.rows,
                "shown": output.shown,
            }
            for output in result.outputs
        ],
        "letters": [
            {"key": letter.key, "reason": letter.reason, **letter.range.fields}
            for letter in result.letters
        ],
    }
