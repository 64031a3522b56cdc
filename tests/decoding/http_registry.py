"""A schema registry over HTTP with the API that confluent-kafka's client uses, and its failures."""

from __future__ import annotations

import base64
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

USER, PASSWORD, TOKEN = "etl", "registry-pass:word", "registry-bearer-token"


@dataclass
class HttpRegistry:
    """The registry, as a test sees it.

    Attributes:
        url: Its address.
        login: The required login: none, a password or a token.
        answer: Instead of a schema: a status, a type and a body.
        is_free: Cleared, it keeps its answers to itself.
        requests: The paths that were asked for.
    """

    url: str = ""
    login: str = ""
    answer: tuple[int, str, str] | None = None
    is_free: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    contexts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def register(
        self,
        subject: str,
        schema: object,
        kind: str = "AVRO",
        references: Sequence[tuple[str, str, int]] = (),
        **more: object,
    ) -> int:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        named = [{"name": n, "subject": s, "version": v} for n, s, v in references]
        return self.add(subject, {"schema": text, "schemaType": kind, "references": named, **more})

    def add(self, subject: str, schema: dict[str, Any]) -> int:
        """Return the id of a schema, a new one for a new text."""
        schemas = self._of_context(subject)
        known = {json.dumps(one, sort_keys=True): at for at, one in enumerate(schemas, 1)}
        schema_id = known.get(json.dumps(schema, sort_keys=True))
        if schema_id is None:
            schemas.append(schema)
            schema_id = len(schemas)
        versions = self.subjects.setdefault(subject, [])
        if schema_id not in versions:
            versions.append(schema_id)
        return schema_id

    def is_allowed(self, authorization: str | None) -> bool:
        basic = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        wanted = {"": None, "password": f"Basic {basic}", "token": f"Bearer {TOKEN}"}[self.login]
        return wanted is None or authorization == wanted

    def _of_context(self, subject: str) -> list[dict[str, Any]]:
        """Return the schemas of a context: its subjects are named `:.context:subject`."""
        context = subject.split(":")[1] if subject.startswith(":.") else ""
        return self.contexts.setdefault(context, []) if context else self.schemas

    def found(
        self, path: Sequence[str], form: str = "", of: str = ""
    ) -> tuple[int, dict[str, Any]]:
        """Return the answer to a GET for a schema in a format, or of a subject."""
        match path:
            case ["schemas", "ids", number]:
                schemas = self._of_context(of)
                if not 0 < int(number) <= len(schemas):
                    return 404, {"error_code": 40403, "message": "Schema not found"}
                return 200, self._shown(schemas[int(number) - 1], form)
            case ["subjects", subject, "versions", version]:
                versions = self.subjects.get(subject)
                if versions is None:
                    return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
                at = len(versions) if version in {"latest", "-1"} else int(version)
                if at > len(versions):
                    return 404, {"error_code": 40402, "message": "Version not found."}
                about = {"subject": subject, "version": at, "id": versions[at - 1]}
                schema = self._of_context(subject)[versions[at - 1] - 1]
                return 200, {**about, **self._shown(schema, form)}
            case _:
                return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _shown(self, schema: dict[str, Any], form: str) -> dict[str, Any]:
        """Return a schema without the type of Avro, which Confluent's registry omits."""
        hidden = {"schemaType"} if schema["schemaType"] == "AVRO" else set()
        shown = {**schema, "schema": schema.get(form, schema["schema"])}
        return {name: value for name, value in shown.items() if name not in hidden and value}


@contextmanager
def http_registry() -> Iterator[HttpRegistry]:
    """Serve a registry on a free port."""
    registry = HttpRegistry()
    registry.is_free.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            registry.requests.append(self.path)
            asked = parse_qs(address.query)
            form, of = (asked.get(name, [""])[0] for name in ("format", "subject"))
            path = [unquote(part) for part in address.path.split("/")[1:]]
            self._answer(*registry.found(path, form, of))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            subject = unquote(self.path.split("/")[2])
            schema = {
                "schema": body["schema"],
                "schemaType": body.get("schemaType") or "AVRO",
                "references": body.get("references") or [],
            }
            self._answer(200, {"id": registry.add(subject, schema)})

        def _answer(self, status: int, answer: dict[str, Any]) -> None:
            registry.is_free.wait(30)
            kind, body = "application/vnd.schemaregistry.v1+json", json.dumps(answer)
            if not registry.is_allowed(self.headers.get("Authorization")):
                status, body = 401, json.dumps({"error_code": 401, "message": "Unauthorized"})
            elif registry.answer is not None:
                status, kind, body = registry.answer
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    registry.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
