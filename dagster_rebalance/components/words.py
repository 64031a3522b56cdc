"""The words of a YAML file, before YAML makes numbers and truths of them.

YAML 1.1 reads `no` as false, `010` as 8, `1_0` as 10 and `1.10` as 1.1. For a setting that is a
text these are silent changes, and which settings are texts only the client knows.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import dagster as dg

_Place = tuple[int, int]


def written_word(context: dg.ResolutionContext) -> str | None:
    """The word that stands in the file as the value that is resolved; None outside of a file."""
    tree = context.source_position_tree
    place = tree.lookup(context.path) if tree is not None else None
    if place is None or not Path(place.filename).is_file():
        return None
    words = _words(Path(place.filename).read_text(encoding="utf-8"))
    return words.get((place.start.line, place.start.col))


@lru_cache(maxsize=4)
def _words(text: str) -> Mapping[_Place, str]:
    """The words of all values, by the places of their keys."""
    return dict(pair for node in yaml.compose_all(text, yaml.SafeLoader) for pair in _pairs(node))


def _pairs(node: yaml.Node | None) -> Iterator[tuple[_Place, str]]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _pairs(item)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(value, yaml.ScalarNode):
                yield (key.start_mark.line + 1, key.start_mark.column + 1), value.value
            else:
                yield from _pairs(value)
