"""`python -m dagster_rebalance.cli`, where the console script is not on PATH."""

from dagster_rebalance.cli.app import main

main()
