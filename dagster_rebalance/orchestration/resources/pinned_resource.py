"""`PinnedResource`: a resource that the config of a run cannot change.

Dagster lets the config of a run override each setting of a resource, also with the value of an
environment variable. Without this class, a user who may launch runs could send the login of the
resource to another address.
"""

# No `from __future__ import annotations` here: Dagster recognises a nested resource by its
# evaluated annotation.
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

_PINNED: dict[int, tuple[Any, "PinnedResource"]] = {}
"""By the id of the resource, which stays alive for its id to stay unique."""


class PinnedResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A resource without a config schema, around another resource.

    Assets, sensors and checks receive the inner resource as the definitions configure it.
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
