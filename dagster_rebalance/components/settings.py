"""Settings as YAML gives them: templated, checked one by one, refused with their file and line.

Owns which text is kept as the name of a variable: a setting that is nothing but `{{ env.NAME }}`
becomes a `dg.EnvVar`, where Python takes one, so that its value is in no snapshot, config or error.
Never reads the value of such a variable.
"""

import os
import re
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import dagster as dg
from pydantic import TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from dagster_rebalance.components.words import written_word
from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.resources.client_settings import as_text

_VARIABLE = re.compile(r"\s*\{\{\s*env(?:\.(\w+)|\(\s*(?:'(\w+)'|\"(\w+)\")\s*\))\s*\}\}\s*")
_MARKS = ("{{", "{%")
_NO_PYTHON = "\uffff"


class Settings(dg.Resolvable, dg.Model):
    """The settings of a resource that YAML names."""

    def given(self) -> dict[str, Any]:
        """As arguments of the resource."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}


def settings_of(
    resource: type[dg.ConfigurableResource],  # type: ignore[type-arg]
    *,
    known_at_load: frozenset[str] = frozenset(),
) -> type[Settings]:
    """The settings of a resource, by their own names, as Dagster resolves them from YAML.

    Args:
        resource: The class of the resource.
        known_at_load: Texts whose value the definitions need before anything runs.
    """
    fields: dict[str, Any] = {
        name: _field(name, field, is_late=name not in known_at_load)
        for name, field in resource.model_fields.items()
    }
    return create_model(resource.__name__, __base__=Settings, **fields)


def setting(annotation: Any, description: str, *, is_late: bool = False) -> dg.Resolver:
    """Resolve one setting, and check it by itself: what is wrong is then shown with its line.

    Args:
        annotation: The type that the setting must have in the end.
        description: What `dg` and editors show.
        is_late: Whether text may stay the name of a variable until it is used.
    """

    def resolve(context: dg.ResolutionContext, value: object) -> object:
        resolved = _resolved(context, value, annotation, is_late=is_late)
        return resolved if isinstance(resolved, dg.EnvVar) else _checked(annotation, resolved)

    return dg.Resolver(
        resolve,
        model_field_type=annotation,
        description=description,
        inject_before_resolve=False,
    )


def _field(name: str, field: FieldInfo, *, is_late: bool) -> tuple[Any, Any]:
    if get_origin(field.annotation) is dict:
        resolver = dg.Resolver(
            _client_settings,
            model_field_type=dict[str, Any],
            description=field.description,
            inject_before_resolve=False,
        )
    else:
        resolver = setting(field.annotation, field.description or name, is_late=is_late)
    # The default is for editors: what is not given is left to the resource.
    default = ... if field.is_required() else None if field.default_factory else field.default
    return Annotated[Any, resolver], default


def _client_settings(context: dg.ResolutionContext, value: Any) -> Any:
    """Settings of a client by their names, flat or nested; all clients take numbers as text.

    Raises:
        ConfigurationError: A setting has no value, or YAML has read another one than the word that
            stands in the file.
    """
    if isinstance(value, Mapping):
        return {name: _client_settings(context.at_path(name), value[name]) for name in value}
    if value is None:
        msg = "it has no value: give it one, or remove it"
        raise ConfigurationError(msg)
    text = as_text(value)
    word = None if isinstance(value, str) else written_word(context)
    if word is not None and word.lower() != text:
        msg = (
            "YAML reads something else than the word that stands here: put the word into quotes to "
            "have it as it stands, or write true, false, or the number in plain digits"
        )
        raise ConfigurationError(msg)
    return _text(context, text, is_late=True)


def _resolved(
    context: dg.ResolutionContext, value: Any, annotation: Any, *, is_late: bool = False
) -> Any:
    kinds = get_args(annotation)
    if value is None:
        return None
    if type(None) in kinds:
        return _resolved(context, value, kinds[0], is_late=is_late)
    if annotation is Any or get_origin(annotation) is UnionType:
        annotation = _kind_of(value)
        kinds = get_args(annotation)
    if annotation is str:
        return _text(context, value, is_late=is_late)
    if get_origin(annotation) is list and isinstance(value, list | tuple):
        return [
            _resolved(context.at_path(index), item, kinds[0]) for index, item in enumerate(value)
        ]
    if get_origin(annotation) is dict and isinstance(value, Mapping):
        return {
            name: _resolved(context.at_path(name), item, kinds[1]) for name, item in value.items()
        }
    return context.resolve_value(value)


def _kind_of(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict[str, Any]
    return list[Any] if isinstance(value, list | tuple) else type(value)


def _text(context: dg.ResolutionContext, value: Any, *, is_late: bool) -> Any:
    """A text; where it may be late, it can be a variable instead.

    Raises:
        ConfigurationError: The variable that is needed now is not set.
    """
    if not isinstance(value, str) or not any(mark in value for mark in _MARKS):
        return value
    variable = _VARIABLE.fullmatch(value)
    if variable is None:
        return _rendered(context, value)
    name = next(filter(None, variable.groups()))
    if is_late:
        return dg.EnvVar(name)
    if not os.environ.get(name):
        msg = f"the environment variable {name} is not set, and is needed when the code is loaded"
        raise ConfigurationError(msg)
    return os.environ[name]


def _rendered(context: dg.ResolutionContext, template: str) -> Any:
    """A template as text, or the object that it stands for, such as a dg.EnvVar.

    Dagster reads what it has rendered as Python: 12_3 would be 123, and 12e4567 infinite. Nothing
    that ends with the mark is Python.
    """
    found = context.resolve_value(template)
    if type(found).__module__ != "builtins":
        return found
    return str(context.resolve_value(template + _NO_PYTHON)).removesuffix(_NO_PYTHON)


def _checked(annotation: Any, value: object) -> object:
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        raise ConfigurationError(first["msg"]) from None
