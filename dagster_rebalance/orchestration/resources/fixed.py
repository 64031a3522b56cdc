"""`FixedResource`: a resource of a job that the config of a run cannot change.

Owns that who may launch a run may not redirect it: Dagster lets a run's config override each
setting of a resource, also with the value of an environment variable, so an address could be
replaced by one that collects the login.
"""

# No `from __future__ import annotations` here: Dagster recognises a nested resource by its
# evaluated annotation.
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

_FIXED: dict[int, tuple[Any, "FixedResource"]] = {}
"""By the id of the resource, which is kept so that its id stays its own."""


class FixedResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A fixed resource has no config schema.

    Assets, sensors and checks get the resource inside, configured once and for all.
    `build_kafka_batch_defs` gives its resources to the job in this way. Do the same in definitions
    of your own.

    Example:
        ```python
        resources = {"kafka": FixedResource(resource=kafka), "kafka_batch": KafkaBatch(kafka=kafka)}
        ```
    """

    resource: dg.ResourceDependency[dg.ConfigurableResource]  # type: ignore[type-arg]

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Any]:  # noqa: ARG002 - Dagster's signature
        """Hand the resource out. Dagster has set it up, and tears it down."""
        yield self.resource


def fixed(resource: Any) -> FixedResource:  # noqa: ANN401 - Dagster's resources have no common type that mypy knows
    """Return the one `FixedResource` of a resource.

    Dagster merges definitions that share the resource only if they share this as well.
    """
    return _FIXED.setdefault(id(resource), (resource, FixedResource(resource=resource)))[1]
