"""Resource settings: client settings as text, functions by name, and `PinnedResource`.

Dagster stores the settings of the Kafka and Spark clients as text: numbers and booleans become text
as the clients read it. A function is given by its name, which works in YAML and in run processes.
No message shows a value, which may be a secret.

Run config can override each setting of a resource, also with the value of an environment variable.
Without `PinnedResource`, a user with the right to launch runs could redirect the resource's login
to another address.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_rebalance.core.model.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import BaseModel

Function = Callable[..., Any]
_FUNCTION = re.compile(r"(?P<module>\w+(?:\.\w+)*):(?P<function>\w+(?:\.\w+)*)", re.ASCII)
_PINNED: dict[int, tuple[Any, "PinnedResource"]] = {}
"""Wrappers by the id of the resource, which stays alive, so its id is unique."""


def refuse_unknown_settings(resource: "type[BaseModel]", values: object, otherwise: str) -> object:
    """Refuse arguments that are no settings of the resource: Dagster would ignore them."""
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
            f"{setting} names a function that module '{match['module']}' does not define, or not "
            "yet: define it above the definitions that name it"
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
        msg = f"{setting} names '{text}', which is a {type(function).__name__}, not a function"
        raise ConfigurationError(msg)
    return function


# No `from __future__ import annotations` here: Dagster recognizes a nested resource by its
# evaluated annotation.


class PinnedResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A resource that the definitions configure. A launchpad has nothing to fill in.

    Assets, sensors and checks receive the inner resource, and no config schema is shown for it.
    `build_kafka_batch_defs` wraps its resources in this way. Do the same in your own definitions.

    Example:
        ```python
        resources = {
            "kafka": PinnedResource(resource=kafka),
            "kafka_batch": KafkaBatch(kafka=kafka),
        }
        ```
    """

    resource: dg.ResourceDependency[dg.ConfigurableResource]  # type: ignore[type-arg]

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Any]:  # noqa: ARG002 - Dagster's signature
        """Yield the inner resource, which Dagster sets up and tears down."""
        yield self.resource


def pinned(resource: Any) -> PinnedResource:  # noqa: ANN401 - Dagster's resources have no common type that mypy knows
    """Return the one `PinnedResource` of a resource.

    Dagster merges definitions that share the resource only if they share the wrapper, too.
    """
    return _PINNED.setdefault(id(resource), (resource, PinnedResource(resource=resource)))[1]
