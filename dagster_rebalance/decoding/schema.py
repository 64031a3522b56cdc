"""A schema of a registry with all that it refers to, as plain data that may travel.

Owns the form in which schemas reach whoever decodes: nothing in it can reach the registry, so no
login travels with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SchemaType = Literal["AVRO", "PROTOBUF", "JSON"]


@dataclass(frozen=True)
class SchemaText:
    """A schema.

    Attributes:
        text: As its format has it; Protobuf as a serialised file, in base64.
        references: The schemas that it refers to, directly or not, each behind those that it needs
            itself: the name by which it is referred to, and its text.
    """

    text: str
    references: tuple[tuple[str, str], ...] = ()
