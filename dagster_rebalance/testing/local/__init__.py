"""Internals of the kit: Java, jars, ports, folders, guarded processes, and one Kafka node."""
