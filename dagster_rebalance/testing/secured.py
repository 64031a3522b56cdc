"""A Kafka with TLS, SCRAM-SHA-512 passwords, client certificates on a second listener, and ACLs.

Each cluster has new certificates. The controllers use plaintext on 127.0.0.1: clients do not
connect to them.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from dagster_rebalance.core.model.errors import DagsterRebalanceError
from dagster_rebalance.testing.broker import REQUEST_LIMIT_S, KafkaCluster, settle
from dagster_rebalance.testing.deadline import wait_until
from dagster_rebalance.testing.local.host import free_port
from dagster_rebalance.testing.local.java import find_java
from dagster_rebalance.testing.local.kafka_node import Access, admin_of
from dagster_rebalance.testing.processes import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dagster_rebalance.testing.local.kafka_node import KafkaNode

ADMIN = "admin"
MECHANISM = "SCRAM-SHA-512"
_LISTENER = "SASL_SSL"
_CERTIFICATE_LISTENER = "SSL"
_ITERATIONS = 4096
_KEYTOOL_LIMIT_S = 120.0
_DAYS = "30"
_KEY = "kafka"
"""Alias of the nodes' key, which also signs the users' certificates because the nodes trust it."""
_STORE_PASSWORD = "DAGSTER_REBALANCE_STORE_PASSWORD"  # noqa: S105 - the name of a variable


@dataclass
class SecuredKafka(KafkaCluster):
    """A `KafkaCluster` with TLS, passwords, certificates and ACLs. Its user `admin` has all rights.

    Example:
        ```python
        with SecuredKafka() as kafka:
            kafka.create_topic("orders")
            kafka.add_user("etl", "a password")
            kafka.allow("etl", "READ", topic="orders", group="orders-etl")
            client_config = {**kafka.client_config("etl"), "group.id": "orders-etl"}

            kafka.add_certificate("reports")  # instead of a password
            kafka.allow("reports", "READ", topic="orders", group="reports")
            mutual_tls = {**kafka.client_config("reports"), "group.id": "reports"}
        ```
    """

    _passwords: dict[str, str] = field(
        init=False, repr=False, default_factory=lambda: {ADMIN: secrets.token_hex(16)}
    )
    _certificate: Path = field(init=False, default=Path())
    _store_password: str = field(
        init=False, repr=False, default_factory=lambda: secrets.token_hex(16)
    )
    _user_stores: dict[str, Path] = field(init=False, default_factory=dict)
    _certificate_addresses: list[str] = field(init=False, default_factory=list)

    @property
    def certificate(self) -> Path:
        """The PEM file of the CA for clients."""
        return self._certificate

    def client_config(self, user: str = ADMIN) -> dict[str, str]:
        """Return the librdkafka settings of a user, with the password or the certificate."""
        if user in self._user_stores:
            return {
                "bootstrap.servers": ",".join(self._certificate_addresses),
                "security.protocol": _CERTIFICATE_LISTENER,
                "ssl.ca.location": str(self._certificate),
                "ssl.keystore.location": str(self._user_stores[user]),
                "ssl.keystore.password": self._store_password,
            }
        return {**super().client_config(), **self._credentials(user)}

    def add_user(self, name: str, password: str) -> None:
        """Add a user with a password, and wait until the login works. Grant rights with `allow`.

        Raises:
            BrokerError: Kafka refused.
        """
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, _ITERATIONS)
        change = UserScramCredentialUpsertion(name, scram, password.encode())
        settle(self._admin.alter_user_scram_credentials([change])[name], f"add user {name}")
        self._passwords[name] = password
        wait_until(
            lambda: all(
                _accepts_login(node.address, self._credentials(name))
                for node in self._nodes.values()
            ),
            timeout_s=REQUEST_LIMIT_S,
            what=f"the login of user {name}",
        )

    def add_certificate(self, name: str) -> None:
        """Add a user with a key and a certificate, in a PKCS#12 file that `client_config` names.

        Kafka identifies the user by the subject, as `User:CN=<name>`; `allow` takes the name.
        """
        store = self._certificate.with_name(f"{name}.p12")
        signing = self._certificate.with_name(f"{name}-signing.p12")
        # A copy: a restarted node must find only its own key in its store.
        shutil.copy(self._store, signing)
        log = store.with_suffix(".log")
        key = ["-keyalg", "EC", "-validity", _DAYS, "-dname", f"CN={name}"]
        pair = ["-genkeypair", "-alias", name, *_in_store(signing), "-signer", _KEY, *key]
        _keytool(pair, self._store_password, log)
        source = ["-srcalias", name, "-srckeystore", str(signing)]
        target = ["-destkeystore", str(store), "-deststoretype", "PKCS12"]
        passwords = ["-srcstorepass:env", _STORE_PASSWORD, "-deststorepass:env", _STORE_PASSWORD]
        _keytool(["-importkeystore", *source, *target, *passwords], self._store_password, log)
        self._user_stores[name] = store

    def allow(
        self, user: str, *operations: str, topic: str | None = None, group: str | None = None
    ) -> None:
        """Allow a user operations (READ, DESCRIBE, ...) on a topic, on a group, or both.

        Raises:
            BrokerError: Kafka refused.
        """
        acls = self._acls(user, operations, topic, group)
        for acl, future in self._admin.create_acls([AclBinding(*acl) for acl in acls]).items():
            settle(future, f"allow {user} {acl.operation} on {acl.name}")
        filters = [AclBindingFilter(*acl) for acl in acls]
        wait_until(
            lambda: all(map(self._has_acl, filters)),
            timeout_s=REQUEST_LIMIT_S,
            what=f"the ACLs of user {user}",
        )

    def forbid(
        self, user: str, *operations: str, topic: str | None = None, group: str | None = None
    ) -> None:
        """Revoke rights that `allow` has granted.

        Raises:
            BrokerError: Kafka refused.
        """
        acls = self._acls(user, operations, topic, group)
        filters = [AclBindingFilter(*acl) for acl in acls]
        for acl_filter, future in self._admin.delete_acls(filters).items():
            settle(future, f"forbid {user} {acl_filter.operation} on {acl_filter.name}")
        wait_until(
            lambda: not any(map(self._has_acl, filters)),
            timeout_s=REQUEST_LIMIT_S,
            what=f"the end of the ACLs of user {user}",
        )

    def _has_acl(self, acl_filter: AclBindingFilter) -> bool:
        described = self._admin.describe_acls(acl_filter, request_timeout=REQUEST_LIMIT_S)
        return bool(described.result())

    def _acls(
        self, user: str, operations: Collection[str], topic: str | None, group: str | None
    ) -> list[tuple[str, str, str, str, str, str, str]]:
        resources = [
            (kind, name) for kind, name in (("TOPIC", topic), ("GROUP", group)) if name is not None
        ]
        principal = f"User:CN={user}" if user in self._user_stores else f"User:{user}"
        return [
            (kind, name, "LITERAL", principal, "*", operation, "ALLOW")
            for kind, name in resources
            for operation in operations
        ]

    def _credentials(self, user: str) -> dict[str, str]:
        return {
            "security.protocol": _LISTENER,
            "ssl.ca.location": str(self._certificate),
            "sasl.mechanism": MECHANISM,
            "sasl.username": user,
            "sasl.password": self._passwords[user],
        }

    @property
    def _store(self) -> Path:
        """The file with the nodes' key."""
        return self._certificate.with_name("keystore.p12")

    def _format(self) -> None:
        for node in self._nodes.values():
            port = free_port()
            self._certificate_addresses.append(f"127.0.0.1:{port}")
            node.access = replace(
                node.access, settings={**node.access.settings, **_listeners(node, port)}
            )
        super()._format()

    def _make_access(self, folder: Path) -> Access:
        self._certificate = folder / "certificate.pem"
        _make_certificate(self._store, self._store_password, self._certificate)
        password = self._passwords[ADMIN]
        jaas = (
            f'org.apache.kafka.common.security.scram.ScramLoginModule required username="{ADMIN}" '
            f'password="{password}";'
        )
        settings = {
            "inter.broker.listener.name": _LISTENER,
            "sasl.enabled.mechanisms": MECHANISM,
            "sasl.mechanism.inter.broker.protocol": MECHANISM,
            f"listener.name.{_LISTENER.lower()}.{MECHANISM.lower()}.sasl.jaas.config": jaas,
            "ssl.keystore.type": "PKCS12",
            "ssl.keystore.location": str(self._store),
            "ssl.keystore.password": self._store_password,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self._certificate),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:ANONYMOUS",  # the controllers are anonymous
        }
        # Others on this machine can see the command line: the password is for this cluster only.
        admin_user = ["--add-scram", f"{MECHANISM}=[name={ADMIN},password={password}]"]
        return Access(
            protocol=_LISTENER,
            settings=settings,
            format_options=admin_user,
            login=self._credentials(ADMIN),
        )


def _accepts_login(address: str, credentials: Mapping[str, str]) -> bool:
    try:
        return bool(admin_of(address, credentials).list_topics(timeout=10).brokers)
    except KafkaException:
        return False


def _listeners(node: KafkaNode, port: int) -> dict[str, str]:
    """Return the settings of the password listener and the certificate listener."""
    addresses = f"{_LISTENER}://{node.address},{_CERTIFICATE_LISTENER}://127.0.0.1:{port}"
    protocols = (
        f"{_LISTENER}:{_LISTENER},"
        f"{_CERTIFICATE_LISTENER}:{_CERTIFICATE_LISTENER},CONTROLLER:PLAINTEXT"
    )
    return {
        "listeners": f"{addresses},CONTROLLER://127.0.0.1:{node.controller_port}",
        "advertised.listeners": addresses,
        "listener.security.protocol.map": protocols,
        f"listener.name.{_CERTIFICATE_LISTENER.lower()}.ssl.client.auth": "required",
    }


def _make_certificate(store: Path, password: str, certificate: Path) -> None:
    """Create the nodes' key in a store, and its self-signed certificate for clients."""
    common: list[str | Path] = ["-alias", _KEY, *_in_store(store)]
    names = ["-dname", "CN=127.0.0.1", "-ext", "san=ip:127.0.0.1,dns:localhost", "-ext", "bc:c"]
    log = store.with_suffix(".log")
    _keytool(["-genkeypair", *common, "-keyalg", "EC", "-validity", _DAYS, *names], password, log)
    _keytool(["-exportcert", *common, "-rfc", "-file", certificate], password, log)


def _in_store(store: Path) -> list[str | Path]:
    return ["-keystore", store, "-storetype", "PKCS12", "-storepass:env", _STORE_PASSWORD]


def _keytool(command: list[str | Path], password: str, log: Path) -> None:
    keytool = [find_java().path.with_name("keytool"), *command]
    with ChildProcess("keytool", keytool, log=log, env={_STORE_PASSWORD: password}) as process:
        if process.wait(_KEYTOOL_LIMIT_S) != 0:
            msg = f"no certificate could be created; keytool printed:\n{process.tail()}"
            raise DagsterRebalanceError(msg)
