"""Forms of jobs that take what is written in them, and nothing else.

Every text and number of a `dg.Config` may be `{"env": "NAME"}` in the launchpad: Dagster then puts
in the variable of the run's process, and what a person fills in is shown. Whoever may launch runs
could read each secret that way.
"""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import dagster as dg

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def plain_schema(form: type[dg.Config]) -> dict[str, dg.Field]:
    """The schema of a form, in types that look up no variable.

    Args:
        form: Its fields are texts, numbers, flags, choices, and lists of texts.
    """
    return {name: _field(name, field) for name, field in form.model_fields.items()}


def _field(name: str, field: FieldInfo) -> dg.Field:
    default = {} if field.is_required() else {"default_value": field.default}
    return dg.Field(_plain(name, field.annotation), description=field.description, **default)


def _plain(name: str, annotation: Any) -> Any:  # noqa: ANN401 - a type, or one of Dagster's
    given = get_args(annotation)
    if get_origin(annotation) is Literal:
        return dg.Enum(f"{name}_choice", [dg.EnumValue(choice) for choice in given])
    if NoneType in given:
        (one,) = set(given) - {NoneType}
        return dg.Noneable(one)
    return list(given) if get_origin(annotation) is list else annotation
