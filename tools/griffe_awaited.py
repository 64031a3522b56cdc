"""Griffe extension: show the operations that `awaited` derives as coroutine functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = ("kafka.aio.async_operations", "kafka.aio.async_consumer")


class Awaited(griffe.Extension):
    """Replaces `name = awaited(Class.name)` by a function with the signature and docstring."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:  # noqa: ANN401 - griffe's own
        """Replace the attributes once the whole package is loaded."""
        for owner, name, operation in _derived(pkg):
            function = griffe.Function(
                name,
                parameters=operation.parameters,
                returns=operation.returns,
                docstring=operation.docstring,
            )
            function.labels.add("async")
            owner.set_member(name, function)


def _derived(pkg: griffe.Module) -> Iterator[tuple[griffe.Class, str, griffe.Function]]:
    for module in MODULES:
        for owner in pkg[module].classes.values():
            for name, attribute in list(owner.attributes.items()):
                call = attribute.value
                if isinstance(call, griffe.ExprCall) and str(call.function) == "awaited":
                    yield owner, name, pkg[module][str(call.arguments[0])]
