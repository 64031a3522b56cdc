"""The Dagster side holds the sensor, the resources of runs, and the member in the code server.

This package owns everything that talks to Dagster. The core makes the decisions; only `consumer`
talks to Kafka. The package must never import private modules of Dagster, or create a member on
import, in a run, or for a preview.
"""
