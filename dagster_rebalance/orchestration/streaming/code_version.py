"""The version of the code of a streaming run: by it a sensor knows that its runs have old code.

Owns that the same code, loaded again, has the same version. It is a digest of the source files that
the assets come from, of this package, of the settings that are no secrets, and of the image that
Dagster runs. What else a team deploys (another library, a secret) it does not see: a team can give
a version of its own.
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
    """The version of some functions and their settings.

    Args:
        functions: Functions of the user.
        settings: What else makes a difference. It must not have secrets in it.
    """
    digest = hashlib.sha256(settings.encode())
    digest.update(os.environ.get(_IMAGE_VARIABLE, "").encode())
    files = {file for function in (*functions, code_version) for file in _files(function)}
    for name, file in sorted(files):
        digest.update(name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:_CHARACTERS]


def _written(function: object) -> Any:  # noqa: ANN401 - a function or a class
    """What stands in a source file: not a partial, nor an object that can be called."""
    found = inspect.unwrap(function) if callable(function) else function
    if isinstance(found, partial):
        return _written(found.func)
    has_source = inspect.isfunction(found) or inspect.ismethod(found) or inspect.isclass(found)
    return found if has_source else type(found)


def _files(function: Callable[..., object]) -> Iterator[tuple[str, Path]]:
    """All source files of the package that a function comes from, or of its folder, by name.

    The names are relative: a deploy may put the same files elsewhere.
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
