"""The command-line interface `dagster-rebalance`."""
