"""JSON with a schema: whether a value fits the schema that it was written with.

Owns that a check ends: whoever may write a record or register a schema must not hold the process.
jsonschema-rs validates. It evaluates a recursive part of a schema once for each place of a value,
and a pattern in time that is linear in the text. A schema may still repeat its parts at one place,
twice as often with each level; those steps are counted before a record is validated.
"""

from __future__ import annotations

import json
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_rebalance.core.model.errors import UndecodableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dagster_rebalance.decoding.schema import SchemaText

    _Part = tuple[Any, Any]
    """A schema, and what finds its references."""

MOST_STEPS = 500_000_000
"""Of one record: some seconds."""
_TOO_MANY_STEPS = f"to check it by its schema may take more than {MOST_STEPS:,} steps"
_MOST_STEPS_TO_EXPLAIN = 100_000
"""To find the place that does not fit takes a hundred times as long as to find that one does not,
and without end in a schema that is inside of itself several times."""
_MOST_LEVELS = 300
"""Of a value. The library's recursion would run over the end of the stack."""
_MOST_DEPTH = 50
"""Of schemas that look at one place from inside of each other, for the same reason."""
_LONGEST_PATTERN = 1_000
_PATTERN_BYTES = 1 << 17
"""Of a compiled pattern, by which the time for each character grows."""
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
_TIMES_UNEVALUATED = 8
"""How often the library looks again for what the parts of a schema have evaluated, as measured."""
_LISTS = ("enum", "required", "properties", "patternProperties", "dependentRequired")
_NOT_ASSERTED = ("contentEncoding", "contentMediaType")
_SMALLEST = "1e-999999999"


class Inexact(float):
    """A number with more digits than a double has."""

    text: str


def decimal_of(number: float) -> Decimal:
    """A number with the digits that its JSON has.

    Raises:
        ArithmeticError: It has an exponent that no decimal has.
    """
    return Decimal(number.text if isinstance(number, Inexact) else repr(number))


class Check:
    """Checks values by a schema.

    Args:
        schema: The schema, and what it refers to.

    Attributes:
        root: The schema as it is checked.
        resolver: Finds what it refers to.
        is_ref_alone: Whether what stands beside a `$ref` counts for nothing, as up to draft 7.

    Raises:
        UndecodableError: The schema cannot be used.
    """

    def __init__(self, schema: SchemaText) -> None:
        import jsonschema_rs
        import referencing
        from jsonschema_specifications import REGISTRY
        from referencing.jsonschema import DRAFT7, specification_with

        try:
            self.root = _loaded(schema.text)
            known = {name: _loaded(text) for name, text in schema.references}
            dialect = self.root.get("$schema", "") if isinstance(self.root, dict) else ""
            draft = specification_with(str(dialect).rstrip("#"), default=DRAFT7)

            def referred(uri: str) -> Any:
                if uri in REGISTRY:
                    return REGISTRY.contents(uri)
                return _referred(known, uri)

            def find(uri: str) -> Any:
                return referencing.Resource.from_contents(
                    referred(uri), default_specification=draft
                )

            registry: Any = referencing.Registry(retrieve=find)  # type: ignore[call-arg]
            resource = referencing.Resource.from_contents(self.root, default_specification=draft)
            self.resolver = registry.resolver_with_root(resource)
            self.is_ref_alone = "draft-0" in str(draft.name)
            self._cost = _cost_of(self.root, self.resolver, draft)
            make = getattr(jsonschema_rs, _VALIDATORS.get(draft.name, "Draft7Validator"))
            self._validator = make(
                self.root,
                validate_formats=False,
                registry=jsonschema_rs.Registry(
                    [(uri, REGISTRY.contents(uri)) for uri in REGISTRY], retriever=referred
                ),
                pattern_options=jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES),
                keywords={"multipleOf": _MultipleOf},
            )
        except Exception as problem:
            text = f"{type(problem).__name__} {str(problem)[:500]}"
            msg = f"not a JSON schema that can be used: {text}"
            raise UndecodableError(msg) from problem

    def __call__(self, value: object, text: bytes, *, is_exact: bool) -> None:
        """Check a value.

        Args:
            value: The value.
            text: Its JSON.
            is_exact: Whether no number has more digits than a double has.

        Raises:
            UndecodableError: It does not fit. The reason names the place and the rule, not the
                value: that may be a person's.
        """
        opened = text.count(b"[") + text.count(b"{")
        if opened > _MOST_LEVELS and _is_deep(value):
            msg = f"it nests more than {_MOST_LEVELS} lists and objects in each other"
            raise UndecodableError(msg)
        steps = self._cost.steps * (text.count(b",") + opened + 1)
        if steps > MOST_STEPS:  # some commas may be those of texts
            steps = self._cost.steps * _places(value)
        if steps > MOST_STEPS:
            raise UndecodableError(_TOO_MANY_STEPS)
        try:
            checked = value if is_exact else _for_the_library(value)
            try:
                is_valid = self._validator.is_valid(checked)
            except UnicodeEncodeError:  # half of a surrogate pair, which JSON may have
                is_valid = self._validator.is_valid(_for_the_library(value))
        except Exception as problem:
            msg = f"its schema cannot be used: {type(problem).__name__} {problem}"
            raise UndecodableError(msg) from problem
        if not is_valid:
            may_explain = steps <= _MOST_STEPS_TO_EXPLAIN and self._cost.loops <= 1
            where = self._place(_for_the_library(value)) if may_explain else ""
            msg = f"it does not fit its schema{where}"
            raise UndecodableError(msg)

    def _place(self, value: object) -> str:
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
    """The rule multipleOf for numbers with any digits: the library calculates in doubles.

    Args:
        _parent: The schema that has the rule.
        step: What a number must be a multiple of.
        _path: Where the rule is.
    """

    def __init__(self, _parent: object, step: Any, _path: object) -> None:
        self._step = Decimal(repr(step))

    def validate(self, instance: Any) -> None:
        """Refuse a number that is no multiple.

        Raises:
            ValueError: It is none.
        """
        if isinstance(instance, bool) or not isinstance(instance, (int, float, Decimal)):
            return
        number = instance if isinstance(instance, Decimal) else Decimal(repr(instance))
        if _EXACT.remainder(number, self._step):
            raise ValueError


_EXACT = Context(prec=5_000, Emin=MIN_EMIN, Emax=MAX_EMAX)
"""Has the digits of the largest double in steps of the smallest, and of any integer of Python's."""
_VALIDATORS = {
    "draft-04": "Draft4Validator",
    "draft-06": "Draft6Validator",
    "draft2019-09": "Draft201909Validator",
    "draft2020-12": "Draft202012Validator",
}


def _referred(known: dict[str, Any], uri: str) -> Any:
    """A schema that another one refers to.

    A schema with an $id makes an address of each name that it refers to. Of a/b and b, which both
    end it, the longer one is meant.
    """
    import referencing.exceptions

    ends = [name for name in known if f"/{uri}".endswith(f"/{name}")]
    if not ends:
        raise referencing.exceptions.NoSuchResource(uri)
    return known[max(ends, key=len)]


def _loaded(text: str) -> Any:
    return json.loads(text, object_hook=_as_checked, parse_float=Decimal)


def _as_checked(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema as the library is to check it.

    Some rules are left out: a value that does not fit them can be decoded.
    """
    properties = part.get("patternProperties")
    if isinstance(part.get("pattern"), str) and not _is_linear(part["pattern"]):
        del part["pattern"]
    if isinstance(properties, dict) and not all(map(_is_linear, properties)):
        part["patternProperties"] = {"^": {}}  # no other rule may refuse what they allow
    for name in _NOT_ASSERTED:
        if isinstance(part.get(name), str):
            del part[name]
    return part


def _is_linear(pattern: str) -> bool:
    """Whether a pattern is matched in linear time: one that looks around or back is not."""
    import jsonschema_rs

    if len(pattern) > _LONGEST_PATTERN:
        return False
    options = jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES)
    try:
        jsonschema_rs.Draft7Validator({"pattern": pattern}, pattern_options=options)
    except ValueError:
        return False
    return True


def _places(value: object) -> int:
    count, left = 0, [value]
    while left:
        count += 1
        left += _inner(left.pop())
    return count


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        level = [inner for one in level for inner in _inner(one)]
    return bool(level)


def _inner(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _for_the_library(value: Any) -> Any:
    """A value with decimals for inexact numbers, and without halves of surrogate pairs."""
    if isinstance(value, dict):
        return {_for_the_library(name): _for_the_library(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_for_the_library, value))
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Inexact):
        try:
            return decimal_of(value)
        except ArithmeticError:
            return Decimal(_SMALLEST).copy_sign(Decimal(value))
    return value


class _Cost(NamedTuple):
    """What a schema may cost at one place of a value.

    Attributes:
        steps: How often a part of it looks at the place, at most.
        loops: How often it comes to a part that it is inside of. That part counts once then: the
            library remembers what it has found of it.
        depth: How many parts look at one place from inside of each other.
    """

    steps: int = 1
    loops: int = 0
    depth: int = 0


def _cost_of(schema: Any, resolver: Any, draft: Any) -> _Cost:
    """What a schema may cost.

    Raises:
        ValueError: Too much.
    """
    cost, deepest = _Costs(draft).of(schema, resolver)
    if cost.steps > MOST_STEPS:
        raise ValueError(_TOO_MANY_STEPS)
    if deepest > _MOST_DEPTH:
        msg = f"it has more than {_MOST_DEPTH} schemas inside of each other for one place"
        raise ValueError(msg)
    return cost


class _Costs:
    """Adds up what the parts of a schema cost, without a recursion: it may be very deep.

    Args:
        draft: The specification of schemas that name none.
    """

    def __init__(self, draft: Any) -> None:
        self._draft = draft
        self._known: dict[int, _Cost] = {}
        self._parts: dict[int, tuple[list[_Part], list[_Part], list[list[_Part]]]] = {}

    def of(self, schema: Any, resolver: Any) -> tuple[_Cost, int]:
        """The cost of a schema, and the depth of its deepest part."""
        left = [(schema, resolver)]
        added = set()
        while left:
            one, its = left[-1]
            place = id(one)
            if not isinstance(one, dict) or place in added:
                left.pop()
            elif place not in self._parts:
                self._known[place] = _Cost(1, 1)  # should it be inside of itself
                here, below, one_of = self._parts[place] = self._parts_of(one, its)
                inner = [*here, *below, *chain.from_iterable(one_of)]
                left += [part for part in inner if id(part[0]) not in self._known]
            else:
                left.pop()
                added.add(place)
                self._known[place] = self._added_up(one)
        deepest = max((cost.depth for cost in self._known.values()), default=0)
        return self._cost(schema), deepest

    def _cost(self, schema: Any) -> _Cost:
        return self._known[id(schema)] if isinstance(schema, dict) else _Cost()

    def _added_up(self, schema: dict[str, Any]) -> _Cost:
        parts, others, names = self._parts[id(schema)]
        here = [self._cost(one) for one, _ in parts]
        below = [self._cost(one) for one, _ in others]
        for one_of in names:  # a place has one name, or one number
            each = [self._cost(one) for one, _ in one_of]
            below.append(_Cost(*map(max, zip(_Cost(0), *each, strict=True))))
        times = _TIMES_UNEVALUATED if _UNEVALUATED & schema.keys() else 1
        own = 1 + sum(len(_items(schema.get(name))) for name in _LISTS)
        return _Cost(
            times * (own + sum(one.steps for one in here)) + sum(one.steps for one in below),
            times * sum(one.loops for one in here) + sum(one.loops for one in below),
            1 + max((one.depth for one in here), default=0),
        )

    def _parts_of(
        self, schema: dict[str, Any], resolver: Any
    ) -> tuple[list[_Part], list[_Part], list[list[_Part]]]:
        """The schemas of the same place, of all places below, and those of one place each."""
        targets = [resolver.lookup(schema[name]) for name in _REFERENCES & schema.keys()]
        here = [(target.contents, target.resolver) for target in targets]
        return (
            here + self._inner(_parts(schema, _IN_PLACE, _IN_PLACE_BY_NAME), resolver),
            self._inner(_parts(schema, _BELOW, _BELOW_BY_NAME), resolver),
            [self._inner(_items(schema.get(name)), resolver) for name in _ONE_EACH],
        )

    def _inner(self, schemas: Iterable[Any], resolver: Any) -> list[_Part]:
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
