"""Settings of Kafka's and Spark's clients, which Dagster stores as text.

Numbers and booleans become text as the clients read it. A function is named, which works in YAML
and reaches the processes of runs. No message shows a value, which may be a secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import BaseModel

Function = Callable[..., Any]
_FUNCTION = re.compile(r"(?P<module>\w+(?:\.\w+)*):(?P<function>\w+(?:\.\w+)*)", re.ASCII)


def refuse_unknown_settings(resource: type[BaseModel], values: object, otherwise: str) -> object:
    """Return the arguments of a resource if it has a setting for each: Dagster drops others.

    Args:
        resource: The class of the resource.
        values: The arguments.
        otherwise: The hint for a name that resembles no setting.
    """
    for name in values.keys() - resource.model_fields.keys() if isinstance(values, dict) else ():
        near = difflib.get_close_matches(name, resource.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else otherwise
        msg = f"{resource.__name__} has no setting {name!r}: {hint}"
        raise ConfigurationError(msg)
    return values


def as_text(value: object) -> object:
    """Return a number, a boolean or a path as text, and any other value unchanged."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if type(value) in {int, float} else value  # dg.EnvVar.int is an int, too


def as_texts(field: str, settings: object) -> object:
    """Apply `as_text` to all values of a mapping."""
    if not isinstance(settings, dict):
        return settings
    for name, value in settings.items():
        if callable(value):
            msg = (
                f"{field} has a function for {name}, which cannot reach the processes of runs: "
                "name it, as 'module:function'"
            )
            raise ConfigurationError(msg)
    return {name: as_text(value) for name, value in settings.items()}


def function_named(setting: str, text: str) -> Function:
    """Return the function that a setting names as `module:function`."""
    match = _FUNCTION.fullmatch(text)
    if match is None:
        msg = (
            f"{setting} does not name a function: write 'module:function', such as "
            "'shop.logins:token'"
        )
        raise ConfigurationError(msg)
    try:
        function: object = attrgetter(match["function"])(import_module(match["module"]))
    except AttributeError as error:
        msg = (
            f"{setting} names a function that module '{match['module']}' does not have, or not "
            "yet: it must stand above the definitions that name it"
        )
        raise ConfigurationError(msg) from error
    except Exception as error:
        # The text is not shown: it may be `user:password`.
        msg = (
            f"{setting} names a function as 'module:function', but its module cannot be imported "
            f"({type(error).__name__}): install it, or correct its name; the code server and the "
            "runs import it"
        )
        raise ConfigurationError(msg) from error
    if not callable(function):
        msg = f"{setting} names '{text}', which is a {type(function).__name__} and no function"
        raise ConfigurationError(msg)
    return function
