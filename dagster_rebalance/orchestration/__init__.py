"""The Dagster side: the sensor, the resources of runs, and the member that lives in the code server.

Owns everything that talks to Dagster. Decisions are the core's; Kafka is reached through `consumer` alone.
Must never import private modules of Dagster, or create a member on import, in a run, or for a preview.
"""
