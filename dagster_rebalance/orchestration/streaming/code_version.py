"""The version of the code of a streaming run, by which the sensor replaces runs with old code.

It is a digest of the source files of the assets, this package, the settings without secrets, and
the image that Dagster runs, so the same code has the same version when it is loaded again. Other
changes of a deployment (a library, a secret) need an explicit version.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_IMAGE_VARIABLE = "DAGSTER_CURRENT_IMAGE"
_CHARACTERS = 12


def code_version(functions: Iterable[Callable[..., object]], settings: str) -> str:
    """Return the version of some functions and their settings.

    Args:
        functions: Functions of the user.
        settings: Further parts of the version, without secrets.
    """
    digest = hashlib.sha256(settings.encode())
    digest.update(os.environ.get(_IMAGE_VARIABLE, "").encode())
    files = {file for function in (*functions, code_version) for file in _files(function)}
    for name, file in sorted(files):
        digest.update(name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:_CHARACTERS]


def _written(function: object) -> Any:  # noqa: ANN401 - a function or a class
    """Return the function or class in a source file behind a partial or a callable object."""
    found = inspect.unwrap(function) if callable(function) else function
    if isinstance(found, partial):
        return _written(found.func)
    has_source = inspect.isfunction(found) or inspect.ismethod(found) or inspect.isclass(found)
    return found if has_source else type(found)


def _files(function: Callable[..., object]) -> Iterator[tuple[str, Path]]:
    """Yield all source files of the package of a function, or of its folder, by relative name.

    A deployment may put the same files elsewhere.
    """
    found = _written(function)
    source = inspect.getsourcefile(found)
    if source is None or not Path(source).is_file():
        return
    own = Path(source).resolve()
    # What `dg scaffold` writes are folders without an __init__.py, inside of a package: the name of
    # the module tells how deep they are.
    names = tuple(found.__module__.split("."))
    is_named = len(names) > 1 and own.with_suffix("").parts[-len(names) :] == names
    folder = own.parents[len(names) - 2] if is_named else own.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    is_package = is_named or (folder / "__init__.py").exists()
    for file in {own, *(folder.rglob("*.py") if is_package else folder.glob("*.py"))}:
        yield str(file.relative_to(folder)), file
