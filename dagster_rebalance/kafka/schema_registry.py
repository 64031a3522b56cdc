"""Read schemas of a schema registry, with confluent-kafka's client; each schema once.

Distinguishes a missing schema, which is a fault of the record, from a registry that could not be
queried. A login never appears in a message or a result.
"""

from __future__ import annotations

import base64
import time
import weakref
from concurrent.futures import wait
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dagster_rebalance.core.model.errors import BrokerError, ConfigurationError, UndecodableError
from dagster_rebalance.decoding.wire_format import SchemaText, SchemaType
from dagster_rebalance.kafka.client.owner_thread import OwnerThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DEFAULTS = {"timeout": 10, "max.retries": 2, "retries.wait.ms": 200, "retries.max.wait.ms": 2000}
_NUMBERS = frozenset({*_DEFAULTS, "cache.capacity", "cache.latest.ttl.sec"})
_NO_SUCH_ID = 40403
_NO_SUCH_SUBJECT = frozenset({40401, 40402})
_MISSING_FOR_S = 30.0
_LIMIT_S = 60.0
"""The limit of a whole answer: the client's own limit restarts with each received byte."""
_UNAUTHORIZED = frozenset({401, 403})
_PASSING = frozenset({408, 429})
_SERVER_ERRORS = 500
_BUILT_IN = (
    *(f"google.protobuf.{name}_pb2" for name in ("any", "api", "descriptor", "duration", "empty")),
    *(f"google.protobuf.{name}_pb2" for name in ("field_mask", "source_context", "struct")),
    *(f"google.protobuf.{name}_pb2" for name in ("timestamp", "type", "wrappers")),
    *(f"google.type.{name}_pb2" for name in ("date", "datetime", "decimal", "latlng", "money")),
    *(f"google.type.{name}_pb2" for name in ("dayofweek", "interval", "timeofday")),
    "confluent_kafka.schema_registry.confluent.meta_pb2",
    "confluent_kafka.schema_registry.confluent.types.decimal_pb2",
)
"""The files that Protobuf schemas import without a reference, registered by an import."""


class Registry:
    """A schema registry.

    Args:
        settings: The settings of confluent-kafka's `SchemaRegistryClient`; numbers may be text.
        limit_s: The time limit of a whole response.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        limit_s: float = _LIMIT_S,
    ) -> None:
        self._settings = settings
        self._limit_s = limit_s
        self._clock = clock
        self._registry_client: Any = None
        self._close_client: Callable[[], object] = int
        # An id belongs to the context of its subject.
        self._by_id: dict[tuple[SchemaType, int, str | None], SchemaText] = {}
        self._kinds: dict[tuple[int, str | None], str] = {}
        self._versions: dict[tuple[SchemaType, str, int | None], Any] = {}
        self._missing: dict[tuple[int, str | None], float] = {}
        self.name = ", ".join(
            urlsplit(url.strip()).netloc.rpartition("@")[2]
            for url in str(settings.get("url", "")).split(",")
        )

    def by_id(self, kind: SchemaType, schema_id: int, subject: str | None = None) -> SchemaText:
        """Return the schema with an id, from the subject's context or else the default context.

        Raises:
            BrokerError: The registry could not be queried.
            ConfigurationError: The settings of the registry are invalid.
            UndecodableError: There is no such schema, it has another format, or it uses an
                unsupported feature. The producer of the record chose the id.
        """
        found = self._by_id.get((kind, schema_id, subject))
        if found is None:
            try:
                found = self._fetch(kind, schema_id, subject)
            except _UnusableError as problem:
                raise UndecodableError(str(problem)) from problem
            self._by_id[kind, schema_id, subject] = found
        return found

    def of_subject(self, kind: SchemaType, subject: str, version: int | None) -> SchemaText:
        """Return the schema of a version of a subject; by default, of the latest version.

        Raises:
            BrokerError: The registry could not be queried.
            ConfigurationError: There is no such schema, it has another format, or it uses an
                unsupported feature.
        """
        what = f"subject {subject}" if version is None else f"version {version} of {subject}"
        try:
            schema = self._version(kind, subject, version)
            if _kind(schema) != kind:
                msg = f"{what} has a schema of {_kind(schema)}, and {kind} is expected"
                raise ConfigurationError(msg)
            return self._whole(kind, schema, what)
        except _UnusableError as problem:
            raise ConfigurationError(str(problem)) from problem

    def close(self) -> None:
        """Close the connections. The next query opens new ones."""
        if self._registry_client is not None:
            self._close_client()
            self._registry_client = None

    def _fetch(self, kind: SchemaType, schema_id: int, subject: str | None) -> SchemaText:
        unknown = f"the registry has no schema with the id {schema_id}"
        place = schema_id, subject
        if self._clock() < self._missing.get(place, float("-inf")):
            raise UndecodableError(unknown)
        what = f"schema {schema_id}"
        with_format = {"fmt": "serialized"} if kind == "PROTOBUF" else {}
        if self._kinds.get(place, kind) == kind:
            try:
                schema = self._query(
                    kind,
                    what,
                    lambda registry: registry.get_schema(schema_id, subject, **with_format),
                )
            except _NotFoundError as problem:
                self._missing[place] = self._clock() + _MISSING_FOR_S
                raise UndecodableError(unknown) from problem
            self._kinds[place] = _kind(schema)
            if _kind(schema) == kind:
                return self._whole(kind, schema, what)
        msg = f"its schema {schema_id} is of {self._kinds[place]}, and {kind} is expected"
        raise UndecodableError(msg)

    def _version(self, kind: SchemaType, subject: str, version: int | None) -> Any:  # noqa: ANN401 - the client's own type
        if (kind, subject, version) in self._versions:
            return self._versions[kind, subject, version]
        fmt = "serialized" if kind == "PROTOBUF" else None
        try:
            found = self._query(
                kind,
                f"subject {subject}",
                lambda registry: (
                    registry.get_latest_version(subject, fmt=fmt)
                    if version is None
                    else registry.get_version(subject, version, deleted=True, fmt=fmt)
                ),
            ).schema
        except _NotFoundError as problem:
            msg = (
                f"the schema registry at {self.name} has no {'subject' if version is None else ''}"
                f"{'' if version is None else f'version {version} of subject'} {subject}: name the "
                "subject, or give the reader's schema"
            )
            raise _UnusableError(msg) from problem
        self._versions[kind, subject, version] = found
        return found

    def _whole(self, kind: SchemaType, schema: Any, what: str) -> SchemaText:  # noqa: ANN401 - the client's own type
        if schema.rule_set is not None and (
            schema.rule_set.domain_rules
            or schema.rule_set.migration_rules
            or getattr(schema.rule_set, "encoding_rules", None)
        ):
            msg = (
                f"{what} of the schema registry at {self.name} has rules (data contracts), which "
                "are not applied here: decode kafka_batch.messages() with confluent-kafka's "
                "own deserializer"
            )
            raise _UnusableError(msg)
        references = dict(self._references(kind, schema, set()))
        if kind == "PROTOBUF":
            references = _with_built_in(references, schema.schema_str, f"{what} at {self.name}")
        return SchemaText(schema.schema_str, tuple(references.items()))

    def _references(
        self,
        kind: SchemaType,
        schema: Any,  # noqa: ANN401 - the client's own type
        seen: set[str],
    ) -> Iterator[tuple[str, str]]:
        for reference in schema.references or ():
            if reference.name not in seen:
                seen.add(reference.name)
                found = self._version(kind, reference.subject, reference.version)
                yield from self._references(kind, found, seen)
                yield reference.name, found.schema_str

    def _query(self, kind: SchemaType, what: str, query: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - the client's own type
        try:
            answer = self._in_time(query, self._client)
        except (ConfigurationError, BrokerError):
            raise
        except Exception as problem:  # noqa: BLE001 - errors of HTTP, TLS or JSON
            raise self._error(what, problem) from None
        schema = getattr(answer, "schema", answer)
        if not getattr(schema, "schema_str", None):
            self.close()  # the client would cache the answer
            raise self._error(what, ValueError("the answer has no schema"))
        if _kind(schema) != kind:
            self.close()  # the client would return this text for another format, too
        return answer

    def _in_time(self, query: Callable[[Any], Any], client: Any) -> Any:  # noqa: ANN401 - the client's own types
        thread = OwnerThread("schema registry")
        answer = thread.submit(lambda: query(client))
        thread.stop()
        if not wait([answer], self._limit_s).done:
            self._registry_client = None  # it is in use; its finalizer closes it
            msg = f"no whole answer came within {self._limit_s:g} s"
            raise TimeoutError(msg)
        return answer.result()

    def _error(self, what: str, problem: Exception) -> Exception:
        status = getattr(problem, "http_status_code", None)
        code = getattr(problem, "error_code", None)
        if code == _NO_SUCH_ID or code in _NO_SUCH_SUBJECT:
            return _NotFoundError(what)
        begin = (
            f"{what} could not be read from the schema registry at {self.name}, and nothing was "
            "committed: "
        )
        if status in _UNAUTHORIZED:
            return BrokerError(
                f"{begin}it refuses the login or the right to read (HTTP {status}): check "
                "username and password, or token, and the rights on the subject"
            )
        if status is not None:
            is_passing = status in _PASSING or status >= _SERVER_ERRORS
            text = "" if code in (None, -1) else f", {str(problem)[:200]}"
            hint = "" if is_passing or text else ": is the url that of a schema registry?"
            return BrokerError(f"{begin}HTTP {status}{text}{hint}", retriable=is_passing)
        text = f"{type(problem).__name__} {str(problem)[:200]}".strip()
        if isinstance(problem, ValueError):  # no JSON, or not the JSON of a registry
            return BrokerError(f"{begin}it does not answer as a schema registry does ({text})")
        return BrokerError(f"{begin}{text}", retriable=True)

    @property
    def _client(self) -> Any:  # noqa: ANN401 - an optional library
        if self._registry_client is None:
            try:
                registry = import_module("confluent_kafka.schema_registry")
            except ImportError as problem:
                msg = (
                    "a schema registry needs more packages: install them with `pip install "
                    f"'dagster-rebalance[registry]'` ({problem})"
                )
                raise ConfigurationError(msg) from problem
            config = {**_DEFAULTS, **self._settings}
            try:
                for name in _NUMBERS & config.keys():
                    config[name] = float(config[name])
                client = registry.SchemaRegistryClient(config)
            except Exception as problem:  # noqa: BLE001 - of many kinds, such as TLS
                msg = (
                    f"the settings of the schema registry at {self.name} are invalid: "
                    f"{type(problem).__name__} {problem}"
                )
                raise ConfigurationError(msg) from None
            self._registry_client = client
            # A registry that was not closed, as in a test of an asset, leaves no socket open.
            self._close_client = weakref.finalize(self, getattr(client, "close", int))
        return self._registry_client


class _NotFoundError(Exception):
    """The registry has no such schema."""


class _UnusableError(Exception):
    """The schema uses an unsupported feature, or lacks a part."""


def _kind(schema: Any) -> str:  # noqa: ANN401 - the client's own type
    return schema.schema_type or "AVRO"  # a registry leaves it out


def _with_built_in(references: Mapping[str, str], text: str, what: str) -> dict[str, str]:
    """Return the files of a Protobuf schema, each after the files that it imports."""
    from google.protobuf import descriptor_pb2, descriptor_pool  # noqa: PLC0415 - optional

    found: dict[str, str] = {}

    def add_dependencies(serialised: str) -> None:
        file = descriptor_pb2.FileDescriptorProto()
        try:
            file.ParseFromString(base64.b64decode(serialised, validate=True))
        except Exception as problem:
            msg = (
                f"{what} is not a serialised Protobuf schema: the registry must support "
                "`?format=serialized` (Confluent's does)"
            )
            raise _UnusableError(msg) from problem
        for name in file.dependency:
            if name in found:
                continue
            inner = references.get(name) or built_in(name)
            add_dependencies(inner)
            found[name] = inner

    def built_in(name: str) -> str:
        for module in _BUILT_IN:
            with suppress(ImportError):  # some packages are optional
                import_module(module)
        try:
            file = descriptor_pool.Default().FindFileByName(name)
        except KeyError as problem:
            msg = f"{what} imports {name} without a reference to it"
            raise _UnusableError(msg) from problem
        return base64.b64encode(file.serialized_pb).decode()

    add_dependencies(text)
    return found
