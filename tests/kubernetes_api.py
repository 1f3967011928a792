"""The part of Kubernetes' API server that leases need: objects with versions, and conflicts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PREFIX = "/apis/coordination.k8s.io/v1/namespaces/training/leases"


class Api(ThreadingHTTPServer):
    """Leases of the namespace `training`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.lock, self.version = threading.Lock(), 1
        self.forbidden = False
        self.kubeconfig = folder / "kubeconfig.json"
        cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server_port}"}}
        context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [cluster],
                    "contexts": [context],
                    "users": [{"name": "me", "user": {"token": "t"}}],
                }
            )
        )

    def edit(self, name: str, **labels: str) -> None:
        """Change an object's labels, as somebody else would."""
        with self.lock:
            self.version += 1
            metadata = self.objects[name]["metadata"]
            metadata |= {"labels": labels, "resourceVersion": str(self.version)}


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        with self.server.lock:
            found = self.server.objects.get(self._name())
        self._answer(404 if found is None else 200, found)

    def do_POST(self) -> None:
        sent = self._body()
        name = sent["metadata"]["name"]
        with self.server.lock:
            is_there = name in self.server.objects
            made = sent if is_there or not self._is_allowed() else self._stored(name, sent)
        self._answer(409 if is_there else 201, made)

    def do_PUT(self) -> None:
        sent, name = self._body(), self._name()
        with self.server.lock:
            known = self.server.objects.get(name)
            if known is None:
                code = 404
            elif sent["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                code = 409
            else:
                code, known = 200, self._stored(name, sent)
        self._answer(code, known)

    def _stored(self, name: str, sent: dict[str, Any]) -> dict[str, Any]:
        self.server.version += 1
        sent["metadata"] |= {"resourceVersion": str(self.server.version), "namespace": "training"}
        self.server.objects[name] = json.loads(json.dumps(sent))
        return sent

    def _is_allowed(self) -> bool:
        return not self.server.forbidden and self.path.partition("?")[0].startswith(PREFIX)

    def _name(self) -> str:
        return self.path.partition("?")[0].removeprefix(PREFIX).strip("/")

    def _body(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, code: int, body: dict[str, Any] | None) -> None:
        if not self._is_allowed():
            code = 403 if self.server.forbidden else 404
        if code >= 400:
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        send_json(self, code, body)

    def log_message(self, *_: Any) -> None:
        pass


def send_json(handler: BaseHTTPRequestHandler, code: int, body: Any) -> None:
    """Answer a request with `body` as JSON."""
    data = json.dumps(body).encode()
    handler.send_response(code)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@contextmanager
def kubernetes_api(folder: Path, port: int = 0) -> Iterator[Api]:
    """The server, running."""
    with Api(folder, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
