"""Griffe extension: show a builder with the fields of the settings class that it takes."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = "orchestration.builders"
MODULES = ("orchestration.definitions", "orchestration.per_batch.batch_sensor")


class Builders(griffe.Extension):
    """Replaces the parameters of functions that are decorated with `takes(Settings)`."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:  # noqa: ANN401 - griffe's own
        """Replace the parameters once the whole package is loaded."""
        for function, settings in _builders(pkg):
            fields = _fields(settings)
            arguments = sorted(fields.values(), key=lambda field: field.value is not None)
            parameters, lines = [], []
            for field in arguments:
                kind, description = _parts(field)
                lines.append(f"    {field.name}: {description}")
                parameters.append(
                    griffe.Parameter(
                        field.name,
                        annotation=kind,
                        kind=griffe.ParameterKind.keyword_only,  # type: ignore[arg-type]
                        default=None if field.value is None else str(field.value),
                    )
                )
            function.parameters = griffe.Parameters(*parameters)
            if function.docstring is not None:
                title = "Returns:" if "Returns:" in function.docstring.value else "Raises:"
                text = "\n".join(["Args:", *lines, "", title])
                function.docstring.value = function.docstring.value.replace(title, text, 1)


def _builders(pkg: griffe.Module) -> Iterator[tuple[griffe.Function, griffe.Class]]:
    for module in MODULES:
        for function in (one for one in pkg[module].functions.values() if not one.is_alias):
            for decorator in function.decorators:
                call = decorator.value
                if isinstance(call, griffe.ExprCall) and str(call.function) == "takes":
                    yield function, pkg[SETTINGS][str(call.arguments[0])]


def _fields(settings: griffe.Class) -> dict[str, griffe.Attribute]:
    """Return the fields of a class, those of its bases first."""
    fields: dict[str, griffe.Attribute] = {}
    for base in settings.bases:
        fields |= _fields(settings.parent[str(base)])  # type: ignore[index]
    own = settings.attributes.items()
    return fields | {name: one for name, one in own if "property" not in one.labels}


def _parts(field: griffe.Attribute) -> tuple[griffe.Expr, str]:
    """Return the type and the description in `Annotated[type, description]`."""
    kind, description = field.annotation.slice.elements  # type: ignore[union-attr]
    return kind, ast.literal_eval(str(description))
