"""The Dagster side: the sensors, the resources of runs, and the members of a group.

Only this package accesses Dagster. The core makes the decisions, and only `kafka` accesses Kafka.
This package must never import private modules of Dagster, or create a member on import or for a
preview.
"""

from dagster_shared.libraries import DagsterLibraryRegistry

from dagster_rebalance import __version__

# Dagster shows the version next to its own libraries, which all have the same version.
DagsterLibraryRegistry.register("dagster-rebalance", __version__, is_dagster_package=False)
