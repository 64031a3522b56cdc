"""`SchemaRegistryResource`: a schema registry, and the encodings of topics.

A run process fetches each schema once. Spark receives schemas as text, and no registry login.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of resources.

import re
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import dagster as dg
from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from dagster_rebalance.core.model.errors import ConfigurationError, UndecodableError
from dagster_rebalance.decoding.decoder import Decoder, Format, KnownSchemas
from dagster_rebalance.decoding.wire_format import SchemaText, SchemaType
from dagster_rebalance.kafka.schema_registry import Registry
from dagster_rebalance.orchestration.resources.client_settings import (
    as_texts,
    refuse_unknown_settings,
)

_TYPES: dict[Format, SchemaType] = {"avro": "AVRO", "protobuf": "PROTOBUF", "json": "JSON"}
_SECURED = ("basic.auth.", "bearer.auth.", "sasl.", "ssl.")
_OWN = {
    "url": "url",
    "basic.auth.user.info": "username and password",
    "ssl.ca.location": "ssl_ca_location",
}


@dataclass(frozen=True)
class Encoding:
    """The encoding of keys or values of some topics, made by `SchemaRegistryResource`.

    Attributes:
        format: The format of the payloads.
        reader: The reader's schema as text, if given.
        subject: The subject of the reader's schema. Default: the subject of the topic.
        version: The version of that subject. Default: the latest.
        message: The full name of the Protobuf message.
        registry: The registry; None for JSON without a registry.
    """

    format: Format
    reader: str | None = None
    subject: str | None = None
    version: int | None = None
    message: str = ""
    registry: Registry | None = None

    def decoder(self, part: Literal["key", "value"], topics: frozenset[str]) -> Decoder:
        """Return the decoder of the keys or values of some topics."""
        if self.registry is None:
            decoder = Decoder(part, self.format, SchemaText(self.reader or ""), KnownSchemas())
        else:
            registry, kind = self.registry, _TYPES[self.format]
            schema = self._schema(registry, kind, part, topics)
            subject = self._subject(part, topics)
            decoder = Decoder(
                part,
                self.format,
                schema,
                lambda of: registry.by_id(kind, of, subject),
                self.message,
            )
        try:
            decoder.open()
        except UndecodableError as problem:
            which = f"the reader's schema of the {part} of {', '.join(sorted(topics))}"
            if self.subject is not None:
                which += f" (subject {self.subject}, version {self.version or 'latest'})"
            msg = f"{which}: {problem}"
            raise ConfigurationError(msg) from problem
        except ImportError as problem:
            msg = (
                f"decoding {self.format} needs more packages: install them with `pip install "
                f"'dagster-rebalance[registry]'` ({problem})"
            )
            raise ConfigurationError(msg) from problem
        return decoder

    def _schema(
        self, registry: Registry, kind: SchemaType, part: str, topics: frozenset[str]
    ) -> SchemaText:
        if self.reader is not None:
            return SchemaText(self.reader)
        subject = self._subject(part, topics)
        if subject is None:
            msg = (
                f"the records may be of {', '.join(sorted(topics))}, whose schemas may differ: "
                "decode the ranges of one topic at a time (ranges=), or name the subject or the "
                "reader's schema"
            )
            raise ConfigurationError(msg)
        return registry.of_subject(kind, subject, self.version)

    def _subject(self, part: str, topics: frozenset[str]) -> str | None:
        """Return the subject of the records; None if they may be of several topics."""
        if self.subject is None and len(topics) == 1:
            return f"{next(iter(topics))}-{part}"
        return self.subject


def plain_json(schema: str) -> Encoding:
    """Return the encoding of JSON without a schema registry.

    Args:
        schema: A JSON schema as text. Each record is validated against it.
    """
    return Encoding("plain_json", reader=schema)


class SchemaRegistryResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A schema registry with Confluent's API.

    Example:
        ```python
        registry = SchemaRegistryResource(
            url="https://registry.example.com",
            username=dg.EnvVar("REGISTRY_USER"),
            password=dg.EnvVar("REGISTRY_PASSWORD"),
        )

        @dg.asset
        def orders(
            kafka_batch: KafkaBatch, spark: KafkaSparkResource, registry: SchemaRegistryResource
        ) -> None:
            frame = kafka_batch.decoded(spark, value=registry.avro())
            write_parquet_by_range(frame, "/data/orders")
        ```
    """

    # A value of the wrong type may be a secret, which pydantic would show.
    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = Field(description="The URL, or several URLs separated by commas, tried in turn.")
    username: str | None = Field(default=None, description="The user, as dg.EnvVar.")
    password: str | None = Field(
        default=None, repr=False, description="The password, as dg.EnvVar."
    )
    token: str | None = Field(
        default=None,
        repr=False,
        description="A bearer token instead of username and password, as dg.EnvVar.",
    )
    ssl_ca_location: str | None = Field(
        default=None, description="File with the CA certificates to trust."
    )
    allow_plaintext: bool = Field(
        default=False,
        description="Allow a login to a url without TLS, for a connection that a service mesh "
        "encrypts.",
    )
    client_config: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Further settings of confluent-kafka's SchemaRegistryClient, by its names.",
    )

    _registry: Registry | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_settings(cls, values: object) -> object:
        return refuse_unknown_settings(
            cls, values, "settings of the registry's client belong in client_config"
        )

    @field_validator("client_config", mode="before")
    @classmethod
    def _as_texts(cls, given: object) -> object:
        return as_texts("client_config of the schema registry", given)

    def avro(
        self, *, reader: str | None = None, subject: str | None = None, version: int | None = None
    ) -> Encoding:
        """Return the encoding of Avro in Confluent's wire format.

        Args:
            reader: The reader's schema as text. Default: the schema of the subject.
            subject: The subject of the reader's schema. Default: `<topic>-value` or `<topic>-key`.
            version: The version of that subject. Default: the latest.
        """
        return Encoding("avro", reader, subject, version, registry=self.registry())

    def protobuf(
        self, *, message: str = "", subject: str | None = None, version: int | None = None
    ) -> Encoding:
        """Return the encoding of Protobuf in Confluent's wire format.

        Args:
            message: The full name of the message. Default: the first message of the schema.
            subject: See `avro`.
            version: See `avro`.
        """
        return Encoding(
            "protobuf", None, subject, version, message=message, registry=self.registry()
        )

    def json_schema(
        self, *, reader: str | None = None, subject: str | None = None, version: int | None = None
    ) -> Encoding:
        """Return the encoding of JSON with a registered schema. See `avro` for the arguments."""
        return Encoding("json", reader, subject, version, registry=self.registry())

    def registry(self) -> Registry:
        """Return the client of the registry, which caches schemas until the run ends.

        Raises:
            ConfigurationError: A setting is given twice, two settings exclude each other, or the
                address contains a login.
        """
        if self._registry is None:
            self._registry = Registry(self._client_config())
        return self._registry

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002 - Dagster's signature
        """Close the connections."""
        if self._registry is not None:
            self._registry.close()

    def _problem(self) -> str | None:
        taken = sorted(self.client_config.keys() & _OWN.keys())
        problem = None
        if taken:
            problem = f"client_config sets {taken[0]}, which has its own field: " + ", ".join(
                _OWN[name] for name in taken
            )
        elif ":" in (self.username or ""):
            problem = "a username cannot contain a colon (HTTP basic authentication)"
        elif "@" in self.url:
            problem = "url contains a login: give it as username and password, by dg.EnvVar"
        elif (self.username is None) != (self.password is None):
            problem = "one of username and password is missing: give both"
        elif self.token is not None and self.username is not None:
            problem = "both a token and a username are set: remove one of them"
        elif self._is_login_in_the_clear():
            problem = (
                "url has an http:// address on another machine, to which a login would be sent "
                "unencrypted, and no certificate checked: make it https://. If a service mesh "
                "encrypts the connection, set allow_plaintext"
            )
        return problem

    def _client_config(self) -> dict[str, Any]:
        problem = self._problem()
        if problem is not None:
            msg = f"SchemaRegistryResource: {problem}"
            raise ConfigurationError(msg)
        config: dict[str, Any] = {"url": self.url, **self.client_config}
        if self.username is not None:
            config["basic.auth.user.info"] = f"{self.username}:{self.password}"
        if self.token is not None:
            config["bearer.auth.credentials.source"] = "STATIC_TOKEN"
            config["bearer.auth.token"] = self.token
            config.setdefault("bearer.auth.logical.cluster", "")  # only for Confluent Cloud
        if self.ssl_ca_location is not None:
            config["ssl.ca.location"] = self.ssl_ca_location
        return config

    def _is_login_in_the_clear(self) -> bool:
        is_secured = any((self.username, self.token, self.ssl_ca_location)) or any(
            name.startswith(_SECURED) for name in self.client_config
        )
        return (
            is_secured and not self.allow_plaintext and any(map(_in_the_clear, self.url.split(",")))
        )


def _in_the_clear(url: str) -> bool:
    """Whether requests to an address cross a network without TLS."""
    address = urlsplit(url.strip())
    host = address.hostname or ""
    is_local = host in {"localhost", "::1"} or re.fullmatch(r"127(\.\d+){3}", host)
    return address.scheme == "http" and not is_local
