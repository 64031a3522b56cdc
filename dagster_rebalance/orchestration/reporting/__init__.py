"""Reports in Dagster: events of the group's assets, and asset checks."""
