"""Parts of the kit on this machine: Java, jars, ports, folders, and one Kafka node."""
