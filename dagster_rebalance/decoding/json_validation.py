"""Validation of JSON values by a schema, in bounded time.

A record or a registered schema must never block the process.
jsonschema-rs validates a recursive schema once per part of a value, and matches patterns in linear
time. But a schema may reference its own parts so often that the number of steps doubles with each
level. The steps are counted before a record is validated.
"""

from __future__ import annotations

import json
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_rebalance.core.model.errors import UndecodableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dagster_rebalance.decoding.wire_format import SchemaText

    _Part = tuple[Any, Any]
    """A schema and the resolver of its references."""

_MAX_STEPS = 500_000_000
"""Steps per record, which take some seconds."""
_TOO_MANY_STEPS = f"its validation may take more than {_MAX_STEPS:,} steps"
_MAX_STEPS_TO_EXPLAIN = 100_000
"""Locating an error takes a hundred times as long as detecting it, and never ends for a schema that
contains itself several times."""
_MAX_LEVELS = 300
"""Nested lists and objects. jsonschema-rs recurses and would overflow the stack."""
_MAX_DEPTH = 50
"""Nested schemas for one value, for the same reason."""
_MAX_PATTERN_CHARACTERS = 1_000
_MAX_PATTERN_BYTES = 1 << 17
"""Size of a compiled pattern; the time per character grows with it."""
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_IN_PLACE_BY_NAME = ("dependencies", "dependentSchemas")
_BELOW = (
    *("items", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
)
_BELOW_BY_NAME = ("patternProperties",)
_ONE_EACH = ("properties", "prefixItems")
_UNEVALUATED = frozenset({"unevaluatedItems", "unevaluatedProperties"})
_STEPS_UNEVALUATED = 8
"""How often jsonschema-rs repeats the parts of a schema for these keywords, as measured."""
_LISTS = ("enum", "required", "properties", "patternProperties", "dependentRequired")
_NOT_ASSERTED = ("contentEncoding", "contentMediaType")
_SMALLEST = "1e-999999999"


class InexactFloat(float):
    """A number with more digits than a double; `text` has all of its digits."""

    text: str


def to_decimal(number: float) -> Decimal:
    """Return a number with all digits that it has in the JSON text."""
    return Decimal(number.text if isinstance(number, InexactFloat) else repr(number))


class JsonValidator:
    """Validates values by a schema; raises UndecodableError if the schema is invalid.

    With `is_ref_exclusive`, keywords beside a `$ref` are ignored, as up to draft 7.
    """

    def __init__(self, schema: SchemaText) -> None:
        import jsonschema_rs
        import referencing
        from jsonschema_specifications import REGISTRY
        from referencing.jsonschema import DRAFT7, specification_with

        try:
            self.root = _load(schema.text)
            known = {name: _load(text) for name, text in schema.references}
            dialect = self.root.get("$schema", "") if isinstance(self.root, dict) else ""
            draft = specification_with(str(dialect).rstrip("#"), default=DRAFT7)

            def retrieve(uri: str) -> Any:
                return REGISTRY.contents(uri) if uri in REGISTRY else _referenced(known, uri)

            def retrieve_resource(uri: str) -> Any:
                return referencing.Resource.from_contents(
                    retrieve(uri), default_specification=draft
                )

            registry: Any = referencing.Registry(retrieve=retrieve_resource)  # type: ignore[call-arg]
            resource = referencing.Resource.from_contents(self.root, default_specification=draft)
            self.resolver = registry.resolver_with_root(resource)
            self.is_ref_exclusive = "draft-0" in str(draft.name)
            self._cost = _cost_of(self.root, self.resolver, draft)
            make = getattr(jsonschema_rs, _VALIDATORS.get(draft.name, "Draft7Validator"))
            self._validator = make(
                self.root,
                validate_formats=False,
                registry=jsonschema_rs.Registry(
                    [(uri, REGISTRY.contents(uri)) for uri in REGISTRY], retriever=retrieve
                ),
                pattern_options=jsonschema_rs.RegexOptions(size_limit=_MAX_PATTERN_BYTES),
                keywords={"multipleOf": _MultipleOf},
            )
        except Exception as problem:
            text = f"{type(problem).__name__} {str(problem)[:500]}"
            msg = f"unusable JSON schema: {text}"
            raise UndecodableError(msg) from problem

    @property
    def steps(self) -> int:
        """The maximum number of times that a part of the schema is applied to one value."""
        return self._cost.steps

    def validate(self, value: object, text: bytes, *, is_exact: bool) -> None:
        """Validate a value, whose JSON is `text`; raise UndecodableError if it is invalid.

        `is_exact`: no number has more digits than a double. The reason of the error has the path
        and the rule, but not the value, which may be personal data.
        """
        opened = text.count(b"[") + text.count(b"{")
        if opened > _MAX_LEVELS and _is_too_deep(value):
            msg = f"it nests more than {_MAX_LEVELS} lists and objects in each other"
            raise UndecodableError(msg)
        steps = self._cost.steps * (text.count(b",") + opened + 1)
        if steps > _MAX_STEPS:  # some of the commas may be in strings
            steps = self._cost.steps * _count_values(value)
        if steps > _MAX_STEPS:
            raise UndecodableError(_TOO_MANY_STEPS)
        try:
            checked = value if is_exact else _for_validator(value)
            try:
                is_valid = self._validator.is_valid(checked)
            except UnicodeEncodeError:  # half of a surrogate pair, which JSON may have
                is_valid = self._validator.is_valid(_for_validator(value))
        except Exception as problem:
            msg = f"its schema is unusable: {type(problem).__name__} {problem}"
            raise UndecodableError(msg) from problem
        if not is_valid:
            is_explained = steps <= _MAX_STEPS_TO_EXPLAIN and self._cost.loops <= 1
            where = self._explain(_for_validator(value)) if is_explained else ""
            msg = f"it does not fit its schema{where}"
            raise UndecodableError(msg)

    def _explain(self, value: object) -> str:
        import jsonschema_rs

        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            path = (
                f"[{one}]" if isinstance(one, int) else f".{one}" for one in error.instance_path
            )
            return f": ${''.join(path)} against the rule {error.kind.name}"
        return ""


class _MultipleOf:
    """The rule multipleOf in exact decimals; jsonschema-rs calculates in doubles."""

    def __init__(self, _parent: object, step: Any, _path: object) -> None:
        self._step = Decimal(repr(step))

    def validate(self, instance: Any) -> None:
        """Raise ValueError if a number is not a multiple."""
        if isinstance(instance, bool) or not isinstance(instance, (int, float, Decimal)):
            return
        number = instance if isinstance(instance, Decimal) else Decimal(repr(instance))
        if _EXACT.remainder(number, self._step):
            raise ValueError


_EXACT = Context(prec=5_000, Emin=MIN_EMIN, Emax=MAX_EMAX)
"""Has the digits of the largest double in steps of the smallest, and of any Python integer."""
_VALIDATORS = {
    "draft-04": "Draft4Validator",
    "draft-06": "Draft6Validator",
    "draft2019-09": "Draft201909Validator",
    "draft2020-12": "Draft202012Validator",
}


def _referenced(known: dict[str, Any], uri: str) -> Any:
    """Return the referenced schema.

    In a schema with an $id, each $ref resolves to a URI, so names are compared with the end of the
    URI. If both a/b and b match, the longer name is used.
    """
    import referencing.exceptions

    matching = [name for name in known if f"/{uri}".endswith(f"/{name}")]
    if not matching:
        raise referencing.exceptions.NoSuchResource(uri)
    return known[max(matching, key=len)]


def _load(text: str) -> Any:
    return json.loads(text, object_hook=_without_unchecked_rules, parse_float=Decimal)


def _without_unchecked_rules(part: dict[str, Any]) -> dict[str, Any]:
    """Remove the rules of a schema that do not decide whether a value can be decoded."""
    properties = part.get("patternProperties")
    if isinstance(part.get("pattern"), str) and not _is_linear(part["pattern"]):
        del part["pattern"]
    if isinstance(properties, dict) and not all(map(_is_linear, properties)):
        # Other rules must not refuse the names that they allow.
        part["patternProperties"] = {"^": {}}
    for name in _NOT_ASSERTED:
        if isinstance(part.get(name), str):
            del part[name]
    return part


def _is_linear(pattern: str) -> bool:
    """Return whether a pattern is matched in linear time, without look-around or back-reference."""
    import jsonschema_rs

    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        return False
    options = jsonschema_rs.RegexOptions(size_limit=_MAX_PATTERN_BYTES)
    try:
        jsonschema_rs.Draft7Validator({"pattern": pattern}, pattern_options=options)
    except ValueError:
        return False
    return True


def _count_values(value: object) -> int:
    count, left = 0, [value]
    while left:
        count += 1
        left += _inner_values(left.pop())
    return count


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_LEVELS + 1):
        level = [inner for one in level for inner in _inner_values(one)]
    return bool(level)


def _inner_values(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _for_validator(value: Any) -> Any:
    """Return a value with decimals for inexact numbers, and without halves of surrogate pairs."""
    if isinstance(value, dict):
        return {_for_validator(name): _for_validator(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_for_validator, value))
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, InexactFloat):
        try:
            return to_decimal(value)
        except ArithmeticError:
            return Decimal(_SMALLEST).copy_sign(Decimal(value))
    return value


class _Cost(NamedTuple):
    """The maximum cost of a schema for one value.

    Attributes:
        steps: Number of times that a part of the schema is applied to the value.
        loops: Number of references to a part that contains the schema. Such a part counts once,
            because jsonschema-rs caches its result.
        depth: Number of nested parts that are applied to the value.
    """

    steps: int = 1
    loops: int = 0
    depth: int = 0


def _cost_of(schema: Any, resolver: Any, draft: Any) -> _Cost:
    """Return the cost of a schema; raise ValueError if it is beyond a bound."""
    cost, deepest = _CostCounter(draft).count(schema, resolver)
    if cost.steps > _MAX_STEPS:
        raise ValueError(_TOO_MANY_STEPS)
    if deepest > _MAX_DEPTH:
        msg = f"it nests more than {_MAX_DEPTH} schemas for one value"
        raise ValueError(msg)
    return cost


class _CostCounter:
    """Adds up the costs of all parts of a schema without recursion, which deep nesting forbids."""

    def __init__(self, draft: Any) -> None:
        self._draft = draft
        self._known: dict[int, _Cost] = {}
        self._parts: dict[int, tuple[list[_Part], list[_Part], list[list[_Part]]]] = {}

    def count(self, schema: Any, resolver: Any) -> tuple[_Cost, int]:
        """Return the cost of a schema, and the depth of its deepest part."""
        left = [(schema, resolver)]
        added = set()
        while left:
            one, its_resolver = left[-1]
            key = id(one)
            if not isinstance(one, dict) or key in added:
                left.pop()
            elif key not in self._parts:
                self._known[key] = _Cost(1, 1)  # for a schema that contains itself
                here, below, one_of = self._parts[key] = self._parts_of(one, its_resolver)
                inner = [*here, *below, *chain.from_iterable(one_of)]
                left += [part for part in inner if id(part[0]) not in self._known]
            else:
                left.pop()
                added.add(key)
                self._known[key] = self._sum(one)
        deepest = max((cost.depth for cost in self._known.values()), default=0)
        return self._cost(schema), deepest

    def _cost(self, schema: Any) -> _Cost:
        return self._known[id(schema)] if isinstance(schema, dict) else _Cost()

    def _sum(self, schema: dict[str, Any]) -> _Cost:
        parts, others, alternatives = self._parts[id(schema)]
        here = [self._cost(one) for one, _ in parts]
        below = [self._cost(one) for one, _ in others]
        for one_of in alternatives:  # a value has one name, or one index
            each = [self._cost(one) for one, _ in one_of]
            below.append(_Cost(*map(max, zip(_Cost(0), *each, strict=True))))
        times = _STEPS_UNEVALUATED if _UNEVALUATED & schema.keys() else 1
        own = 1 + sum(len(_items(schema.get(name))) for name in _LISTS)
        return _Cost(
            times * (own + sum(one.steps for one in here)) + sum(one.steps for one in below),
            times * sum(one.loops for one in here) + sum(one.loops for one in below),
            1 + max((one.depth for one in here), default=0),
        )

    def _parts_of(
        self, schema: dict[str, Any], resolver: Any
    ) -> tuple[list[_Part], list[_Part], list[list[_Part]]]:
        """Return the schemas for the value itself, for all values in it, and for one of these."""
        targets = [resolver.lookup(schema[name]) for name in _REFERENCES & schema.keys()]
        here = [(target.contents, target.resolver) for target in targets]
        return (
            here + self._with_resolvers(_parts(schema, _IN_PLACE, _IN_PLACE_BY_NAME), resolver),
            self._with_resolvers(_parts(schema, _BELOW, _BELOW_BY_NAME), resolver),
            [self._with_resolvers(_items(schema.get(name)), resolver) for name in _ONE_EACH],
        )

    def _with_resolvers(self, schemas: Iterable[Any], resolver: Any) -> list[_Part]:
        return [(one, self._resolver(one, resolver)) for one in schemas]

    def _resolver(self, schema: Any, resolver: Any) -> Any:
        if isinstance(schema, dict) and ("$id" in schema or "id" in schema):
            return resolver.in_subresource(self._draft.create_resource(schema))
        return resolver


def _parts(schema: dict[str, Any], names: Iterable[str], by_name: Iterable[str]) -> Iterator[Any]:
    for name in schema.keys() & set(names):
        yield from schema[name] if isinstance(schema[name], list) else [schema[name]]
    for name in by_name:
        yield from _items(schema.get(name))


def _items(part: Any) -> list[Any]:
    if isinstance(part, dict):
        return list(part.values())
    return part if isinstance(part, list) else []
