"""Queries to the cluster: topics, offsets, groups, and the truncation of logs."""
