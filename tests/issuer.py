"""An issuer of tokens (OIDC, client credentials), and a Kafka that takes them besides passwords."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from dagster_rebalance.testing.secured import SecuredKafka

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dagster_rebalance.testing.local.kafka_node import Access

_KEY_ID = "the-only-key"
_BEARER = "org.apache.kafka.common.security.oauthbearer"


def _plain(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@dataclass
class Issuer:
    """Issues signed tokens to known clients.

    Attributes:
        clients: Secrets of the clients, by name.
        lifetime_s: Validity of a token.
        issued: The clients that got tokens, in order.
        url: The token endpoint, while `served`.
    """

    clients: dict[str, str] = field(default_factory=dict, repr=False)
    lifetime_s: float = 60.0
    issued: list[str] = field(default_factory=list)
    url: str = ""
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def token(self, client: str) -> str:
        """A token for a client."""
        now = int(time.time())
        claims = {"sub": client, "iat": now, "exp": now + int(self.lifetime_s), "scope": "kafka"}
        parts = ({"alg": "HS256", "kid": _KEY_ID, "typ": "JWT"}, claims)
        text = ".".join(_plain(json.dumps(part).encode()) for part in parts)
        self.issued.append(client)
        return f"{text}.{_plain(hmac.new(self._key, text.encode(), hashlib.sha256).digest())}"

    @property
    def keys(self) -> str:
        """Return the keys by which brokers verify tokens."""
        return json.dumps(
            {"keys": [{"kty": "oct", "kid": _KEY_ID, "alg": "HS256", "k": _plain(self._key)}]}
        )

    @contextmanager
    def served(self, certificate: Path) -> Iterator[None]:
        """Issue tokens at `url`, over TLS with a certificate whose key is in the same file."""
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                scheme, _, login = self.headers.get("Authorization", "").partition(" ")
                client, _, secret = base64.b64decode(login).decode().partition(":")
                is_known = scheme == "Basic" and issuer.clients.get(client) == secret
                said = (
                    {
                        "access_token": issuer.token(client),
                        "token_type": "Bearer",
                        "expires_in": int(issuer.lifetime_s),
                    }
                    if is_known
                    else {"error": "invalid_client"}
                )
                answer = json.dumps(said).encode()
                self.send_response(200 if is_known else 401)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Nothing of it belongs into the output of tests."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, name="issuer", daemon=True)
        thread.start()
        self.url = f"https://127.0.0.1:{server.server_port}/token"
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@dataclass
class KafkaWithTokens(SecuredKafka):
    """A `SecuredKafka` whose listener for passwords takes the tokens of an issuer, too."""

    issuer: Issuer = field(default_factory=Issuer)

    def bearer_config(self) -> dict[str, str]:
        """Return the client settings for a token."""
        return {
            "bootstrap.servers": self.bootstrap_servers,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "ssl.ca.location": str(self.certificate),
        }

    def key_and_certificate(self) -> Path:
        """The nodes' key and certificate in one file, for a server beside them."""
        file = self.certificate.with_name("server.pem")
        if not file.exists():
            command = ["openssl", "pkcs12", "-in", str(self._store), "-nodes", "-passin", "env:P"]
            shown = subprocess.run(
                command, env={"P": self._store_password}, check=True, capture_output=True
            )
            file.write_bytes(shown.stdout)
        return file

    def _make_access(self, folder: Path) -> Access:
        access = super()._make_access(folder)
        keys = folder / "keys.json"
        keys.write_text(self.issuer.keys)
        listener = "listener.name.sasl_ssl.oauthbearer"
        settings = {
            "sasl.enabled.mechanisms": f"{access.settings['sasl.enabled.mechanisms']},OAUTHBEARER",
            f"{listener}.sasl.jaas.config": f"{_BEARER}.OAuthBearerLoginModule required;",
            f"{listener}.sasl.server.callback.handler.class": (
                f"{_BEARER}.OAuthBearerValidatorCallbackHandler"
            ),
            "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
        }
        return replace(access, settings={**access.settings, **settings})

    def _format(self) -> None:
        for node in self._nodes.values():
            allowed = node.access.settings["sasl.oauthbearer.jwks.endpoint.url"]
            command, *rest = node.java
            node.java = [
                command,
                f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={allowed}",
                *rest,
            ]
        super()._format()
