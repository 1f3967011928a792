"""The run's own /metrics, for a Prometheus server to scrape. Needs no package.

It listens on loopback unless told otherwise; on any other address a scrape needs the token.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from argosy.config.launch import OWN_HOSTS, SHORTEST_TOKEN, host_of, is_loopback
from argosy.errors import UserError
from argosy.sinks.sink import About, Record, Sink
from argosy.watch.nodes import NodeSeries
from argosy.watch.prometheus import CONTENT_TYPE, LatestFacts, exposition

METRICS_TOKEN_VARIABLE = "ARGOSY_METRICS_TOKEN"
"""Environment variable of the scrape token: a request says `Authorization: Bearer` and this."""
SCRAPE_LIMIT_S = 5.0
"""A request that has not come by then is dropped."""
MOST_REQUESTS = 16
"""Most requests that are answered at a time. The connections of others are closed."""
MOST_EXPORTED_NODES = 256
"""The machines of a larger run are left to `argosy watch`."""


def token_for(host: str) -> str:
    """Return the scrape token; empty if anybody on this machine may scrape.

    Raises: UserError if `host` needs one, and it is not there or too short.
    """
    token = os.environ.get(METRICS_TOKEN_VARIABLE, "")
    if not token and is_loopback(host):
        return ""
    if len(token) < SHORTEST_TOKEN:
        raise UserError(
            f"observe.prometheus.host = {host!r}: others can reach it, so it needs a token of {SHORTEST_TOKEN} "
            f"characters or more. Set {METRICS_TOKEN_VARIABLE}, for example to what `openssl rand -hex 16` prints."
        )
    return token


class Prometheus(Sink):
    """Answers a Prometheus server."""

    def __init__(self, about: About):
        super().__init__(about)
        settings = about.config["observe"]["prometheus"]
        plan, model = about.plan_text, about.config["model"].get("preset") or ""
        steps = about.config["train"]["steps"] or self.state.get("steps")
        self._latest = LatestFacts(about.name, plan, model, steps)
        self._latest.step = self.state.get("step", {})
        self._latest.evaluation = self.state.get("evaluation", {})
        self._latest.events = Counter(self.state.get("events", {}))
        self._nodes: dict[str, NodeSeries] = {}
        self._text = ""
        self._server = _serve(settings["host"], settings["port"], token_for(settings["host"]), lambda: self._text)
        host, port = self._server.server_address[:2]
        self.state["address"] = f"http://{host!s}:{port}/metrics"
        self.tick()

    def steps(self, records: Sequence[Record]) -> None:
        self._latest.step = self.state["step"] = records[-1]

    def evaluations(self, records: Sequence[Record]) -> None:
        self._latest.evaluation = self.state["evaluation"] = records[-1]

    def events(self, records: Sequence[Record]) -> None:
        self._latest.events.update(str(record.get("event")) for record in records)
        for record in records:
            if record.get("event") == "length":
                self._latest.steps = self.state["steps"] = record["steps"]
        self.state["events"] = dict(self._latest.events)

    def rewind(self, step: int) -> None:
        """Show what is left: until the next line, the steps that are done."""
        self._latest.step = self.state["step"] = {"step": step - 1} if step else {}
        if self._latest.evaluation.get("step", -1) >= step:
            self._latest.evaluation = self.state["evaluation"] = {}

    def tick(self) -> None:
        for path in sorted((self.about.folder / "nodes").glob("*.jsonl"))[:MOST_EXPORTED_NODES]:
            self._nodes.setdefault(path.stem, NodeSeries(path)).refresh()
        self._latest.nodes = {node: series.last for node, series in self._nodes.items()}
        self._text = exposition([self._latest])

    def close(self, report: Record | None) -> None:
        self._server.shutdown()
        self._server.server_close()


def _serve(host: str, port: int, token: str, text: Any) -> ThreadingHTTPServer:
    """Answer GET /metrics in threads. Raises: OSError if the address cannot be had."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True
        places = threading.BoundedSemaphore(MOST_REQUESTS)

        def process_request(self, request: Any, client_address: Any) -> None:
            if not self.places.acquire(blocking=False):
                self.shutdown_request(request)
                return
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no more threads can be started
                self.places.release()
                raise

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            # A handler's timeout is that of each read: a client that sends a byte now and then would keep its place.
            guard = threading.Timer(SCRAPE_LIMIT_S, _shut, (request,))
            guard.daemon = True
            try:
                guard.start()
                super().process_request_thread(request, client_address)
            finally:
                guard.cancel()
                self.places.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing of a client that has gone."""

    class Handler(BaseHTTPRequestHandler):
        timeout = SCRAPE_LIMIT_S
        server_version, sys_version = "argosy", ""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self._answer(404, "Only /metrics is here.\n")
            elif token and not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
                self._answer(401, f"Say `Authorization: Bearer` and the token of {METRICS_TOKEN_VARIABLE}.\n")
            elif not token and host_of(self.headers.get("Host", "")) not in OWN_HOSTS:
                self._answer(403, "This address is for this machine alone.\n")  # DNS rebinding from a browser
            else:
                self._answer(200, text())

        def _answer(self, status: int, body: str) -> None:
            payload = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(payload)))
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a scrape every few seconds is no news."""

    expected = f"Bearer {token}".encode()
    try:
        server = Server((host, port), Handler)
    except (OSError, OverflowError) as problem:
        raise OSError(f"observe.prometheus: cannot listen on {host}, port {port}: {problem}") from None
    threading.Thread(target=server.serve_forever, args=(0.1,), name="argosy-metrics", daemon=True).start()
    return server


def _shut(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
