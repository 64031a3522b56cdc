"""The names of Avro's types, where their namespaces have to tell them apart."""

from __future__ import annotations


def simple_name(name: str) -> str:
    """A name without its namespace."""
    return name.rpartition(".")[2]


def as_simple_name(name: str) -> str:
    """A full name as a simple one: by those alone fastavro finds a type in another schema.

    The dot at its front keeps fastavro from putting a namespace there.
    """
    return "." + name.replace(".", "/")


def as_full_name(name: str) -> str:
    """The full name that has become a simple one; any other name as it is."""
    return name[1:].replace("/", ".") if name.startswith(".") else name
