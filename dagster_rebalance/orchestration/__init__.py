"""The Dagster side holds the sensor, the resources of runs, and the member in the code server.

This package owns everything that talks to Dagster. The core makes the decisions; only `consumer`
talks to Kafka. The package must never import private modules of Dagster, or create a member on
import, in a run, or for a preview.
"""

from dagster_shared.libraries import DagsterLibraryRegistry

from dagster_rebalance import __version__

# Dagster shows the version beside those of its own libraries, which have one in common.
DagsterLibraryRegistry.register("dagster-rebalance", __version__, is_dagster_package=False)
