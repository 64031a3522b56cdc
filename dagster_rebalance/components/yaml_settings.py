"""Settings of resources in YAML: templates, validation with file and line, and the JSON schema.

A setting that is exactly `{{ env.NAME }}` becomes a `dg.EnvVar` wherever Python accepts one. Its
value is not read here, so it appears in no snapshot, config or error.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import dagster as dg
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.orchestration.resources.client_settings import as_text

_VARIABLE = re.compile(r"\s*\{\{\s*env(?:\.(\w+)|\(\s*(?:'(\w+)'|\"(\w+)\")\s*\))\s*\}\}\s*")
_TEMPLATE_MARKS = ("{{", "{%")
_NO_PYTHON = "\uffff"
_TEXT = {"type": "string"}
_NUMBERS = {"number", "integer", "boolean"}
_TEMPLATE = {"type": "string", "pattern": r"\{[{%]"}


class Settings(dg.Resolvable, dg.Model):
    """The settings of a resource in YAML."""

    def given(self) -> dict[str, Any]:
        """Return the explicit settings, as arguments of the resource."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}


def settings_of(
    resource: type[dg.ConfigurableResource],  # type: ignore[type-arg]
    *,
    known_at_load: frozenset[str] = frozenset(),
) -> type[Settings]:
    """Return the model by which Dagster resolves the settings of a resource class from YAML.

    Settings in `known_at_load` are needed to build the definitions, so their variables are read at
    once.
    """
    fields: dict[str, Any] = {
        name: _field(name, field, is_late=name not in known_at_load)
        for name, field in resource.model_fields.items()
    }
    return create_model(resource.__name__, __base__=Settings, **fields)


def setting(annotation: Any, description: str, *, is_late: bool = False) -> dg.Resolver:
    """Return the resolver that validates one setting, so that an error shows its line.

    With `is_late`, `{{ env.NAME }}` stays a `dg.EnvVar` until it is used.
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
    # The default is for editors; the resource applies its own defaults.
    default = ... if field.is_required() else None if field.default_factory else field.default
    return Annotated[Any, resolver], default


def _client_settings(context: dg.ResolutionContext, value: Any) -> Any:
    """Resolve the settings of a client, flat or nested; numbers become text, as clients expect."""
    if isinstance(value, Mapping):
        return {name: _client_settings(context.at_path(name), value[name]) for name in value}
    if value is None:
        msg = "it has no value: set one, or remove it"
        raise ConfigurationError(msg)
    text = as_text(value)
    scalar = None if isinstance(value, str) else _yaml_scalar(context)
    if scalar is not None and scalar.lower() != text:
        msg = (
            "YAML changes this value: quote it to keep it as written, or write "
            "true, false, or the number in plain digits"
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
    is_block = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    if annotation is Any or get_origin(annotation) is UnionType or is_block:
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
    if not isinstance(value, str) or not any(mark in value for mark in _TEMPLATE_MARKS):
        return value
    variable = _VARIABLE.fullmatch(value)
    if variable is None:
        return _rendered(context, value)
    name = next(filter(None, variable.groups()))
    if is_late:
        return dg.EnvVar(name)
    if not os.environ.get(name):
        msg = f"the environment variable {name} is not set: it is needed when the code is loaded"
        raise ConfigurationError(msg)
    return os.environ[name]


def _rendered(context: dg.ResolutionContext, template: str) -> Any:
    """Render a template to text, or to an object such as a dg.EnvVar.

    Dagster evaluates a rendered template as Python: 12_3 would become 123, and 12e4567 infinity.
    The appended mark makes the text invalid Python.
    """
    rendered = context.resolve_value(template)
    if type(rendered).__module__ != "builtins":
        return rendered
    return str(context.resolve_value(template + _NO_PYTHON)).removesuffix(_NO_PYTHON)


def _checked(annotation: Any, value: object) -> object:
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        raise ConfigurationError(first["msg"]) from None


def _yaml_scalar(context: dg.ResolutionContext) -> str | None:
    """Return the current value as written in the YAML file; None outside of a file.

    YAML 1.1 reads `no` as false, `010` as 8, `1_0` as 10 and `1.10` as 1.1. Only the client knows
    which of its settings are texts.
    """
    tree = context.source_position_tree
    position = tree.lookup(context.path) if tree is not None else None
    if position is None or not Path(position.filename).is_file():
        return None
    scalars = _yaml_scalars(Path(position.filename).read_text(encoding="utf-8"))
    return scalars.get((position.start.line, position.start.col))


@lru_cache(maxsize=4)
def _yaml_scalars(text: str) -> Mapping[tuple[int, int], str]:
    """Return all scalars, by the line and column of their keys."""
    nodes = yaml.compose_all(text, yaml.SafeLoader)
    return dict(pair for node in nodes for pair in _scalar_positions(node))


def _scalar_positions(node: yaml.Node | None) -> Iterator[tuple[tuple[int, int], str]]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalar_positions(item)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(value, yaml.ScalarNode):
                yield (key.start_mark.line + 1, key.start_mark.column + 1), value.value
            else:
                yield from _scalar_positions(value)


@cache
def with_precise_schema(model: type[BaseModel]) -> type[BaseModel]:
    """Return the model with a JSON schema whose errors name the invalid value.

    Dagster's schema accepts text for each value, because the text may be a template: any word
    passes for a choice or a number, and an error in a block is reported as "neither a block nor
    text". This schema accepts text for a choice or a number only if the text is a template.
    """

    class Precise(model):  # type: ignore[valid-type,misc] # mypy wants a class, not a value
        @classmethod
        def model_json_schema(cls, *arguments: Any, **more: Any) -> dict[str, Any]:
            schema = super().model_json_schema(*arguments, **more)
            precise: dict[str, Any] = _precise(schema, schema.pop("$defs", {}))
            return precise

    Precise.__name__ = model.__name__
    return Precise


def _precise(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_precise(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **schema}
        del schema["$ref"]
    precise = {name: _precise(value, definitions) for name, value in schema.items()}
    options = precise.get("anyOf", [])
    blocks = [option for option in options if option.get("type") in {"object", "array"}]
    if len(blocks) == 1 and all(
        option.keys() == {"type"} for option in options if option not in blocks
    ):
        del precise["anyOf"]
        return {**blocks[0], **precise, "type": [option["type"] for option in options]}
    if any("enum" in option or option.get("type") in _NUMBERS for option in options):
        precise["anyOf"] = [_TEMPLATE if option == _TEXT else option for option in options]
    return precise
