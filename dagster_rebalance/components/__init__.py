"""What `dg` offers: a component that builds the definitions of a group from YAML.

This package owns how YAML becomes the arguments of `build_kafka_batch_defs` and
`build_kafka_stream_defs`. It decides nothing about groups.
"""
