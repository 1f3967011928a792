"""A real server of S3's protocol (moto's), and a proxy in front of it that harms, slows or cuts what passes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from ports import free_port

PROGRAM = "moto_server"
needs_server = pytest.mark.skipif(
    shutil.which(PROGRAM) is None, reason="moto_server is not installed here (pipx install 'moto[server]')"
)
BUCKET = "data"
START_S = 60.0
KEYS = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "not-so-secret", "AWS_REGION": "us-east-1"}


class ObjectStore:
    """moto's server as a process, with one bucket."""

    def __init__(self, log: Path, initial_requests: int = 0):
        """initial_requests: after so many, the server asks for credentials and rights; 0: never."""
        self._log, self.port = log, free_port()
        self._variables = {"INITIAL_NO_AUTH_ACTION_COUNT": str(initial_requests)} if initial_requests else {}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        _ask(self.port, f"/{BUCKET}", "PUT")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers. What it held is gone."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._variables},
            )
        end = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                _ask(self.port, "/moto-api/", "GET")
                return
            assert time.monotonic() < end, self._log.read_text()
            time.sleep(0.1)

    def pause(self) -> None:
        """Let it answer nothing, as if the network were cut."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self.go_on()
            self._process.kill()
            self._process.wait()

    @contextmanager
    def user_without_rights(self) -> Iterator[dict[str, str]]:
        """The keys of a user who may do nothing."""
        _ask(self.port, "/moto-api/reset-auth", "POST", b"3", kind="text/plain")  # so many requests need no rights
        user = b"UserName=guest&Version=2010-05-08&Action="
        _ask(self.port, "/", "POST", user + b"CreateUser", service="iam")
        text = _ask(self.port, "/", "POST", user + b"CreateAccessKey", service="iam")
        _ask(self.port, "/moto-api/reset-auth", "POST", b"0", kind="text/plain")
        yield {
            "AWS_ACCESS_KEY_ID": text.partition("<AccessKeyId>")[2].partition("<")[0],
            "AWS_SECRET_ACCESS_KEY": text.partition("<SecretAccessKey>")[2].partition("<")[0],
        }

    def put(self, folder: Path, name: str) -> str:
        """Copy a folder there; return its URL."""
        store = S3Store(BUCKET, endpoint=self.endpoint, client_options={"allow_http": True}, **_KEYS)
        for path in folder.iterdir():
            if path.is_file() and not path.name.startswith("."):
                obstore.put(store, f"{name}/{path.name}", path)
        return f"s3://{BUCKET}/{name}"


_KEYS = {"access_key_id": KEYS["AWS_ACCESS_KEY_ID"], "secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"],
         "region": KEYS["AWS_REGION"]}  # fmt: skip


class Proxy:
    """Passes TCP connections on to a port.

    Args:
        port: where to.
        latency_s: added to each answer, once a request.
        bytes_per_s: most that passes towards the client, all connections together; 0: as much as can.
    """

    def __init__(self, port: int, latency_s: float = 0.0, bytes_per_s: float = 0.0):
        self._target, self._latency_s, self._rate = port, latency_s, bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.passed_bytes = 0
        self.flips = 0
        """Answers whose last byte is still to be flipped."""
        self.is_cut = False
        """Refuse whatever comes."""
        self._lock, self._free_at = threading.Lock(), 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                asked = threading.Event()
                threading.Thread(target=self._pass_on, args=(client, server, asked), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client, asked), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket, asked: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(2**16):
                asked.set()
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _answer(self, server: socket.socket, client: socket.socket, asked: threading.Event) -> None:
        with suppress(OSError):
            while (data := server.recv(2**18)) and not self.is_cut:
                if asked.is_set():
                    asked.clear()
                    time.sleep(self._latency_s)
                self._wait_for_room(len(data))
                if self.flips and len(data) > 2**15:
                    self.flips -= 1
                    data = data[:-1] + bytes([data[-1] ^ 1])
                client.sendall(data)
        for end in (server, client):
            with suppress(OSError):
                end.close()

    def _wait_for_room(self, size: int) -> None:
        with self._lock:
            self.passed_bytes += size
            if not self._rate:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self._rate
            wait_s = self._free_at - now
        time.sleep(wait_s)

    def close(self) -> None:
        self.is_cut = True
        self._listener.close()


@contextmanager
def environment(endpoint: str, **more: str) -> Iterator[None]:
    """Have the client library find the server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint, **more}.items():
            patch.setenv(name, value)
        yield


def _ask(
    port: int,
    path: str,
    method: str,
    data: bytes | None = None,
    service: str = "s3",
    kind: str = "application/x-www-form-urlencoded",
) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method, data=data)
    request.add_header("Authorization", f"AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/{service}/aws4_request")
    request.add_header("Content-Type", kind)
    with suppress(urllib.error.HTTPError):
        text: str = urllib.request.urlopen(request, timeout=5).read().decode()
        return text
    return ""
