"""Settings of resources that do not exist: Dagster drops them without a word."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import BaseModel


def refuse_unknown_settings(resource: type[BaseModel], values: object, otherwise: str) -> object:
    """Return what a resource was given, if all of it are settings that it has.

    Args:
        resource: The class of the resource.
        values: What it was given.
        otherwise: What to say of a name that is like none of its settings.

    Raises:
        ConfigurationError: It has no setting of some name.
    """
    for name in values.keys() - resource.model_fields.keys() if isinstance(values, dict) else ():
        near = difflib.get_close_matches(name, resource.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else otherwise
        msg = f"{resource.__name__} has no setting {name!r}: {hint}"
        raise ConfigurationError(msg)
    return values
