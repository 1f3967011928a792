"""Whoever reaches the coordinator's port and does not belong to the run: all that they may try."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random

from argosy.processes.connection import Connection
from argosy.processes.secret import call


class Recorder:
    """Passes on what an agent and the coordinator say to each other, and keeps what the agent said."""

    def __init__(self, to: int):
        """`to`: the coordinator's port, on this machine."""
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.recorded = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                agent, _ = self._listener.accept()
                with suppress(ConnectionRefusedError):  # it has not begun yet: the agent calls again
                    coordinator = socket.create_connection(("127.0.0.1", self._to))
                    threading.Thread(target=self._pass, args=(agent, coordinator, self.recorded), daemon=True).start()
                    threading.Thread(target=self._pass, args=(coordinator, agent, bytearray()), daemon=True).start()
                    continue
                agent.close()

    @staticmethod
    def _pass(origin: socket.socket, to: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while data := origin.recv(1 << 16):
                kept += data
                to.sendall(data)
        for end in (origin, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def replay(port: int, recorded: bytes) -> None:
    """Say again what an agent said, whole and from each of several places on."""
    for first in (0, 32, 64, 96, 200):
        _say(port, recorded[first:])


def guess(port: int, *wrong: bytes) -> list[str]:
    """Call as an agent would, with secrets that are not the run's. Return what became of it."""
    problems = []
    for secret in wrong:
        with selectors.DefaultSelector() as selector:
            connection = Connection(socket.create_connection(("127.0.0.1", port)), call(secret), selector, None)
            while not connection.problem:
                selector.select(10)
                connection.take()
            assert not connection.is_proven
            problems.append(connection.problem)
            connection.close()
    return problems


def babble(port: int, seed: int, times: int) -> None:
    """Say random bytes, JSON without end, and frames that claim to be long."""
    random = Random(seed)
    texts = [b'{"kind":"hello"}\n', b"[" * 100_000, b'{"kind":"finish","exit_code":0,"why":""}\n', b"\xff\xff\xff\xff"]
    for _ in range(times):
        _say(port, *(random.choice([*texts, random.randbytes(random.randrange(1, 5000))]) for _ in range(3)))


@contextmanager
def half_open(port: int, count: int) -> Iterator[None]:
    """Hold connections that say nothing, or half of something."""
    with ExitStack() as held:
        for number in range(count):
            one = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            if number % 2:
                with suppress(OSError):
                    one.sendall(secrets.token_bytes(20))
        yield


def flood(port: int, count: int, seconds: float) -> None:
    """Connect so often in so many seconds; each connection says something wrong and is left open for a moment."""
    began, held = time.monotonic(), list[socket.socket]()
    for number in range(count):
        with suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            held[-1].sendall(b"x" * (number % 100))
        if len(held) > 50:
            held.pop(0).close()
        time.sleep(max(0.0, began + (number + 1) * seconds / count - time.monotonic()))
    for one in held:
        one.close()


def _say(port: int, *parts: bytes) -> None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as one:
        for part in parts:
            one.sendall(part)
        one.shutdown(socket.SHUT_WR)
        while one.recv(1 << 12):
            pass
