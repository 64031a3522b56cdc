"""What a Python path in YAML leads to.

Owns the form of such a path. Whether the thing can be used, those say that use it.
"""

from importlib import import_module

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError


def found_at(context: dg.ResolutionContext, path: str) -> object:
    """What a path leads to: package.module.name, or .module.name from the folder of the file.

    Raises:
        ConfigurationError: It is no path, or the module has no such name.
    """
    module, _, name = path.rpartition(".")
    if not module.strip(".") or not name.isidentifier():
        msg = (
            f"{path!r} is no path of a function: write package.module.function, or "
            ".module.function for a module in the folder of this file"
        )
        raise ConfigurationError(msg)
    if module.startswith("."):
        load = dg.ComponentLoadContext.from_resolution_context(context)
        module = load.defs_relative_module_name(load.path) + module
    found = getattr(import_module(module), name, None)
    if found is None:
        msg = f"the module {module} has no {name!r}"
        raise ConfigurationError(msg)
    return found
