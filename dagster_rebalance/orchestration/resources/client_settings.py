"""Settings of Kafka's and Spark's clients, which Dagster keeps as texts.

Owns that a text is all there is: numbers and words for yes and no become what the clients read, and
a function is named, so that it can stand in YAML and reaches the processes of runs. Never shows a
value that may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from dagster_rebalance.core.model.errors import ConfigurationError

Function = Callable[..., Any]
_FUNCTION = re.compile(r"(?P<module>\w+(?:\.\w+)*):(?P<function>\w+(?:\.\w+)*)", re.ASCII)


def as_text(value: object) -> object:
    """A number, a word for yes or no, or a path, as the clients read it. All else as it is."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if type(value) in {int, float} else value  # dg.EnvVar.int is an int, too


def as_texts(field: str, given: object) -> object:
    """The same for all settings of a mapping.

    Raises:
        ConfigurationError: One of them is a function, which has to be named.
    """
    if not isinstance(given, dict):
        return given
    for name, value in given.items():
        if callable(value):
            msg = (
                f"{field} has a function for {name}, which cannot reach the processes of runs: "
                "name it, as 'module:function'"
            )
            raise ConfigurationError(msg)
    return {name: as_text(value) for name, value in given.items()}


def function_named(setting: str, text: str) -> Function:
    """The function that a setting names.

    Args:
        setting: For messages.
        text: `module:function`.

    Raises:
        ConfigurationError: There is no such function.
    """
    named = _FUNCTION.fullmatch(text)
    if named is None:
        msg = (
            f"{setting} does not name a function: write 'module:function', such as "
            "'shop.logins:token'"
        )
        raise ConfigurationError(msg)
    try:
        found: object = attrgetter(named["function"])(import_module(named["module"]))
    except AttributeError as problem:
        msg = (
            f"{setting} names a function that module '{named['module']}' does not have, or not "
            "yet: it must stand above the definitions that name it"
        )
        raise ConfigurationError(msg) from problem
    except Exception as problem:
        # It may be a user and a password, where two texts are asked for.
        msg = (
            f"{setting} names a function as 'module:function', but its module cannot be imported "
            f"({type(problem).__name__}): install it, or correct its name; the code server and the "
            "runs import it"
        )
        raise ConfigurationError(msg) from problem
    if not callable(found):
        msg = f"{setting} names '{text}', which is a {type(found).__name__} and no function"
        raise ConfigurationError(msg)
    return found
