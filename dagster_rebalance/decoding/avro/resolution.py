"""Which part of a reader's schema of Avro stands for which part of a writer's.

Owns that choice. fastavro takes the first branch of a reader's union that can hold a writer's type,
a double for a long, and fails where one schema names a type that the other one defines in the same
place. So it gets two schemas of one form, in which nothing fits but what was chosen here.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from dagster_rebalance.decoding.avro.columns import branches_of, type_of
from dagster_rebalance.decoding.avro.logical_types import exact, register_exact
from dagster_rebalance.decoding.avro.named_types import NAMED, names_of, shared_names, simple_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    Defaults = Mapping[tuple[str, str], Any]

_BRANCH = "dagster-rebalance-branch"
"""A logical type of our own: a record around a branch, which takes no byte of a payload."""
_PROMOTIONS = {
    "int": ("long", "double", "float"),
    "long": ("double", "float"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
"""What each type may be read as, what keeps its digits first."""
_LEFT_OUT = {"aliases", "doc", "namespace"}
_NANOS = {"timestamp-nanos", "local-timestamp-nanos"}
"""Times that fastavro gives as numbers."""


def register() -> None:
    """Let fastavro read the logical types that these schemas have."""
    from fastavro.read import LOGICAL_READERS

    register_exact()
    LOGICAL_READERS[f"record-{_BRANCH}"] = _read_branch


def _read_branch(data: Any, schema: Any, _: object = None) -> Any:
    if "refused" in schema:
        raise ValueError(schema["refused"])
    return (schema["branch"], data["value"]) if "branch" in schema else data["value"]


def resolved(
    written: Any, wanted: Any, defaults: Defaults, *, with_branches: bool
) -> tuple[Any, Any, bool]:
    """A writer's and a reader's schema for fastavro, and whether the value is around what was read.

    What is no record in both is the field `value` of a record: fastavro reads a record in two
    thirds of the time without another one around it.

    Args:
        written: The writer's, parsed.
        wanted: The reader's, parsed. If it is the writer's, fastavro needs none: None is returned.
        defaults: The reader's, decoded, by the full name of the record and that of the field.
        with_branches: Whether a value of a named type in a union of several is a pair: the number
            of its branch (null not counted), and the value.
    """
    import fastavro

    resolution = _Resolution(written, wanted, defaults, with_branches=with_branches)
    both = resolution.both(written, wanted)
    is_around = not all(map(_is_record, both))
    if is_around:
        both = resolution.around(both, "payload")
    writer, reader = map(fastavro.parse_schema, both)
    for record in names_of(reader).values():
        for field in record.get("fields", ()):
            if "value" in field:  # fastavro must not check it as JSON
                field["default"] = field["value"]
    return writer, None if wanted is written else reader, is_around


def _is_record(schema: Any) -> bool:
    is_one = isinstance(schema, dict) and schema["type"] == "record"
    return is_one and "logicalType" not in schema


class _Resolution:
    """Goes through two schemas side by side. Of each pair, the writer's is the first."""

    def __init__(
        self, written: Any, wanted: Any, defaults: Defaults, *, with_branches: bool
    ) -> None:
        self._written = names_of(written)
        self._wanted = names_of(wanted)
        self._shared = shared_names(written) | shared_names(wanted)
        self._is_same = wanted is written
        self._defaults = defaults
        self._with_branches = with_branches
        self._names: dict[tuple[str, ...], str] = {}
        self._numbers = count(1)

    def both(self, written: Any, wanted: Any) -> tuple[Any, Any]:
        """Both schemas, in one form."""
        written, wanted = _found(written, self._written), _found(wanted, self._wanted)
        if isinstance(written, list) or isinstance(wanted, list):
            return self._union(written, wanted)
        if self._distance(written, wanted) is None or _has_other_unit(written, wanted):
            return self._refused(written, wanted)
        kind = type_of(written)
        if kind in NAMED:
            return self._named(written, wanted)
        both = _plain(written), _plain(wanted)
        for inner in {"items", "values"} & set(written if isinstance(written, dict) else ()):
            both[0][inner], both[1][inner] = self.both(written[inner], wanted[inner])
        return both

    def around(self, both: tuple[Any, Any], name: str, **more: Any) -> tuple[Any, Any]:
        """A record around both: no more than a name for them."""
        record = {"type": "record", "name": self._new_name(name), **more}
        writer, reader = ({**record, "fields": [{"name": "value", "type": one}]} for one in both)
        return writer, reader

    def _union(self, written: Any, wanted: Any) -> tuple[Any, Any]:
        branches = written if isinstance(written, list) else [written]
        choices = wanted if isinstance(wanted, list) else [wanted]
        is_unclear = len(branches_of(branches)) > 1 and not self._is_same
        pairs = []
        for branch in branches:
            chosen = self._chosen(branch, choices)
            if chosen is None:
                pairs.append(self._refused(branch, wanted))
                continue
            both = self.both(branch, chosen)
            more = self._number(chosen, choices)
            if more or (is_unclear and type_of(branch) != "null"):
                both = self.around(both, "branch", logicalType=_BRANCH, **more)
            pairs.append(both)
        if not isinstance(written, list):
            return pairs[0]
        return [writer for writer, _ in pairs], [reader for _, reader in pairs]

    def _number(self, chosen: Any, choices: list[Any]) -> dict[str, int]:
        of_several = branches_of(choices)
        is_named = type_of(_found(chosen, self._wanted)) in NAMED
        if not self._with_branches or len(of_several) == 1 or not is_named:
            return {}
        return {"branch": of_several.index(chosen)}

    def _chosen(self, branch: Any, choices: list[Any]) -> Any:
        """The nearest of the reader's branches; the first of several; None if nothing fits."""
        branch = _found(branch, self._written)
        fitting = [
            (distance, at)
            for at, one in enumerate(choices)
            if (distance := self._distance(branch, _found(one, self._wanted))) is not None
        ]
        return choices[min(fitting)[1]] if fitting else None

    def _distance(self, written: Any, wanted: Any) -> int | None:
        """How far a type is from the one that it is read as, 0 for the same; None: it is not."""
        kind, other = type_of(written), type_of(wanted)
        if kind in NAMED:
            if kind != other:
                return None
            if written["name"] == wanted["name"]:
                return 0
            return 1 if self._is_other_name(written["name"], wanted) else None
        promotions = (kind, *_PROMOTIONS.get(kind, ()))
        return promotions.index(other) if other in promotions else None

    def _is_other_name(self, name: str, wanted: Any) -> bool:
        aliases = wanted.get("aliases", ())
        space = wanted["name"].rpartition(".")[0]
        if name in {f"{space}.{one}" if space and "." not in one else one for one in aliases}:
            return True
        simple = simple_name(name)
        # By such a name alone, a type of another namespace could be taken for it.
        return simple not in self._shared and simple in {simple_name(wanted["name"]), *aliases}

    def _named(self, written: Any, wanted: Any) -> tuple[Any, Any]:
        of_both = written["name"], wanted["name"]
        if of_both in self._names:
            return self._names[of_both], self._names[of_both]
        name = self._names[of_both] = self._new_name(wanted["name"])
        both = {**_plain(written), "name": name}, {**_plain(wanted), "name": name}
        if "fields" in wanted:
            both[0]["fields"], both[1]["fields"] = self._fields(written, wanted)
        return both

    def _fields(self, written: Any, wanted: Any) -> tuple[list[Any], list[Any]]:
        """The fields of both, under the reader's names and in the writer's order."""
        names = {field["name"] for field in written["fields"]}
        left = {field["name"]: field for field in wanted["fields"]}
        renamed = {
            alias: name
            for name, field in left.items()
            if name not in names
            for alias in field.get("aliases", ())
        }
        writer, reader = [], []
        for field in written["fields"]:
            name = field["name"] if field["name"] in left else renamed.get(field["name"])
            if name not in left:
                writer.append(
                    {"name": field["name"], "type": self._alone(field["type"], "skipped")}
                )
                continue
            both = self.both(field["type"], left.pop(name)["type"])
            writer.append({"name": name, "type": both[0]})
            reader.append({"name": name, "type": both[1]})
        for name in left:
            of = wanted["name"], name
            more = {"default": None, "value": self._defaults[of]} if of in self._defaults else {}
            reader.append({"name": name, "type": "null", **more})
        return writer, reader

    def _refused(self, written: Any, wanted: Any) -> tuple[Any, Any]:
        """A type that the reader has no place for: a value of it cannot be read."""
        kinds = [_said(one) for one in (wanted if isinstance(wanted, list) else [wanted])]
        why = f"the reader's schema has {' or '.join(kinds)} where it has {_said(written)}"
        alone = self._alone(written, "refused")
        return self.around((alone, alone), "refused", logicalType=_BRANCH, refused=why)

    def _alone(self, schema: Any, place: str) -> Any:
        """A writer's schema without a reader's, for values that are refused or passed over."""
        if isinstance(schema, list):
            return [self._alone(branch, place) for branch in schema]
        schema = _found(schema, self._written)
        if isinstance(schema, str):
            return schema
        part = _plain(schema)
        if part["type"] in NAMED:
            # What is passed over is not in the reader's schema, so neither are the names in it.
            of = (schema["name"], "", place)
            if of in self._names:
                return self._names[of]
            part["name"] = self._names[of] = self._new_name(schema["name"])
        for inner in {"items", "values"} & set(part):
            part[inner] = self._alone(part[inner], place)
        if "fields" in part:
            part["fields"] = [
                {"name": field["name"], "type": self._alone(field["type"], place)}
                for field in part["fields"]
            ]
        return part

    def _new_name(self, name: str) -> str:
        return f"{simple_name(name)}_{next(self._numbers)}"


def _found(schema: Any, names: Mapping[str, Any]) -> Any:
    return names.get(schema, schema) if isinstance(schema, str) else schema


def _logical(schema: Any) -> str:
    return str(schema.get("logicalType", "")) if isinstance(schema, dict) else ""


def _has_other_unit(written: Any, wanted: Any) -> bool:
    """Whether the reader would take a writer's nanoseconds for what it has itself."""
    return _logical(written) in _NANOS and bool(_logical(wanted)) and _logical(wanted) not in _NANOS


def _said(schema: Any) -> str:
    return _logical(schema) if _logical(schema) in _NANOS else str(type_of(schema))


def _plain(schema: Any) -> Any:
    """A schema without its names and remarks."""
    if isinstance(schema, str):
        return schema
    kept = {
        name: one
        for name, one in schema.items()
        if name not in _LEFT_OUT and not name.startswith("__")
    }
    return exact(kept)
