"""A real server of `argosy watch` in a thread, and a client that sends what it is told to."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.watch.http import listening
from argosy.watch.serve import server_of
from waiting import PATIENT_S


@dataclass
class Answer:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


@dataclass
class Served:
    """A running server."""

    port: int

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Send this path as it is, without any tidying; `_` in names of headers stands for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENT_S)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        given = {"host": f"127.0.0.1:{self.port}"} | {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        if found.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        return Answer(answer.status, found, body)

    def connection(self) -> socket.socket:
        """A connection on which nothing has been said."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENT_S)

    def live(self, **headers: str) -> Iterator[dict[str, Any]]:
        """The news, as they come; beats are left out."""
        with self.connection() as line:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            line.sendall(f"GET /api/live HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
            for text in line.makefile("rb"):
                if text.startswith(b"data: ") and text.strip() != b"data: {}":
                    yield json.loads(text[6:])


@contextmanager
def served(root: Path, token: str = "") -> Iterator[Served]:
    """Serve the runs under `root` at a free port."""
    with listening("127.0.0.1", 0) as listener:
        server = server_of(root, listener, token)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            yield Served(listener.getsockname()[1])
        finally:
            server.end()
            thread.join(20)
            assert not thread.is_alive()
