"""The parts that servers share: the socket, the names and tokens of who may ask, a protocol that does not wait."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from typing import Literal

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from argosy.config.launch import SHORTEST_TOKEN
from argosy.errors import UserError
from argosy.processes.connection import BACKLOG, listener_of

TOKEN_BYTES = 32
WATCH_PORT = 8765
PORTS_TRIED = 50
"""Ports that are tried, from PORT on, if the user named none."""
REQUEST_LIMIT_S = 15.0
"""Most seconds in which a connection sends its whole request."""
MOST_CONNECTIONS = 400
MOST_OF_ADDRESS = 100
"""Most connections of one address: beyond, the one that has idled for longest is closed."""
MOST_HTTP_HEADER_BYTES = 2**14


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def token_of(variable: str) -> str:
    """Return the token in a variable of the environment, or nothing. Raises: UserError if it is easily guessed."""
    token = os.environ.get(variable, "").strip()
    if token and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise UserError(
            f"{variable}: too short, or not plain ASCII; {SHORTEST_TOKEN} characters or more are needed. "
            "Make one: openssl rand -hex 32"
        )
    return token


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request does not arrive: uvicorn itself waits for ever."""

    deadline: asyncio.TimerHandle | None = None
    idle_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request; where there are too many connections, close one that idles."""
        super().connection_made(transport)
        self._wait()
        others = [each for each in self.connections if each is not self and isinstance(each, PatientProtocol)]
        same = [each for each in others if each.address == self.address]
        if len(same) >= MOST_OF_ADDRESS:
            _close_one(same)
        elif len(others) >= MOST_CONNECTIONS - 1:
            _close_one(others)

    @property
    def address(self) -> str:
        """The machine at the other end; empty if it is not known."""
        return self.client[0] if self.client else ""

    @property
    def idles(self) -> bool:
        """True while no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Stop waiting once a request is whole, and begin again with a part of the next one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self._stop_waiting()
        elif self.deadline is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self.idle_since_s = self.loop.time()
        self.deadline = self.loop.call_later(REQUEST_LIMIT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def uvicorn_config(app: ASGIApp, lifespan: Literal["auto", "off"] = "auto") -> Config:
    """Return how uvicorn serves `app` to whoever asks."""
    return Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan=lifespan,
        loop="asyncio",
        log_level="error",
        access_log=False,  # it would show the token
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=MOST_HTTP_HEADER_BYTES,
        timeout_graceful_shutdown=2,
        proxy_headers=False,
    )


def _close_one(connections: list[PatientProtocol]) -> None:
    """Close the connection that has idled for longest: an idle one must not keep others out."""
    idle = [each for each in connections if each.idles]
    if idle:
        longest = min(idle, key=lambda each: each.idle_since_s)
        longest.connections.discard(longest)  # it counts no more, at once
        longest.transport.close()


def listening(host: str, port: int | None, first: int = WATCH_PORT) -> socket.socket:
    """Return a socket that listens at `host`; with port None, at the first free one from `first` on.

    Raises: UserError if the port is in use, or nothing can listen there.
    """
    if port is not None and not 0 <= port <= 65535:
        raise UserError(f"--port {port}: a port is a number from 0 to 65535. Try --port {WATCH_PORT}.")
    tried = [port] if port is not None else [*range(first, first + PORTS_TRIED), 0]
    for each in tried:
        try:
            return listener_of((host, each), BACKLOG)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE and port is None:
                continue
            raise _cannot_listen(host, each, problem) from None
    raise AssertionError("port 0 is always free")


def _cannot_listen(host: str, port: int, problem: OSError) -> UserError:
    if problem.errno == errno.EADDRINUSE:
        return UserError(f"--port {port}: another program listens there. Name another, or leave --port out.")
    if isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL:
        return UserError(f"--host {host}: no address of this machine. Try --host 0.0.0.0 for all that it has.")
    if problem.errno == errno.EACCES:
        return UserError(f"--port {port}: only root may listen there. Try --port {WATCH_PORT}.")
    return UserError(f"--host {host} --port {port}: cannot listen there ({problem.strerror}).")


def url(listener: socket.socket, host: str, token: str) -> str:
    """Return the address to open."""
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname(), "": socket.gethostname()}.get(host, host)
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
