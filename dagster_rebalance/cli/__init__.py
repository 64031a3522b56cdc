"""The command `dagster-rebalance`.

Owns what a person sees in a terminal. Nothing in the package imports it. A command is a module of
its own that is loaded when it is called.
"""
