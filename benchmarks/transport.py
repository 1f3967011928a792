"""Our connection beside ZeroMQ: what carries weights and gradients between parameter servers and workers.

    python benchmarks/transport.py [--mb 256] [--repeats 5]

Two processes on one machine. For each transport: MB/s of `--mb` MB in pieces, from the first byte to the answer to the
last; and the time of a question of a few bytes and its answer. Medians, and the fastest and slowest. ZeroMQ is measured
if pyzmq is installed; its pieces are of 1 MiB, ours of 256 KiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from argosy.processes.connection import Connection
from argosy.processes.secret import call, listen
from argosy.sync.links import contexts
from argosy.sync.messages import MESSAGE_PIECE_BYTES

SECRET = b"a secret that only a benchmark knows, and no run"
QUESTIONS = 300
AHEAD_BYTES = 1 << 23
Send: TypeAlias = Callable[[bytes], None]
Receive: TypeAlias = Callable[[], bytes]


class Ours:
    """One end of a connection, with calls that wait."""

    def __init__(self, connected: socket.socket, is_server: bool, has_tls: bool):
        self._selector = selectors.DefaultSelector()
        tls = contexts(SECRET)[is_server] if has_tls else None
        self._connection = Connection(
            connected, (listen if is_server else call)(SECRET), self._selector, None, tls, not has_tls
        )
        self._frames: list[bytes] = []
        while not self._connection.is_proven:
            self._turn()

    def _turn(self) -> None:
        self._selector.select()
        self._frames += self._connection.take()
        assert not self._connection.problem, self._connection.problem

    def send(self, data: bytes) -> None:
        while self._connection.unsent_bytes >= AHEAD_BYTES:
            self._turn()
        self._connection.send(data, is_bulk=len(data) > 100)

    def receive(self) -> bytes:
        while not self._frames:
            self._turn()
        return self._frames.pop(0)


def ours(port: int, is_server: bool, has_tls: bool) -> tuple[Send, Receive]:
    if is_server:
        with socket.create_server(("127.0.0.1", port)) as listener:
            end = Ours(listener.accept()[0], is_server, has_tls)
    else:
        end = Ours(connected(port), is_server, has_tls)
    return end.send, end.receive


def connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)


def zeromq(port: int, is_server: bool, has_curve: bool) -> tuple[Send, Receive]:
    import zmq

    end: Any = zmq.Context.instance().socket(zmq.PAIR)
    end.setsockopt(zmq.SNDHWM, 0)
    end.setsockopt(zmq.RCVHWM, 0)
    if has_curve:
        private = bytes(range(32))
        from zmq.utils import z85

        key = z85.encode(private)
        end.curve_publickey, end.curve_secretkey = zmq.curve_public(key), key
        if is_server:
            end.curve_server = True
        else:
            end.curve_serverkey = zmq.curve_public(key)
    (end.bind if is_server else end.connect)(f"tcp://127.0.0.1:{port}")
    return end.send, end.recv


Opened = Callable[[int, bool], tuple[Send, Receive]]
TRANSPORTS: dict[str, tuple[Opened, int]] = {
    "ours": (partial(ours, has_tls=False), MESSAGE_PIECE_BYTES),
    "ours, TLS": (partial(ours, has_tls=True), MESSAGE_PIECE_BYTES),
    "ZeroMQ": (partial(zeromq, has_curve=False), 1 << 20),
    "ZeroMQ, CURVE": (partial(zeromq, has_curve=True), 1 << 20),
}


def serve(name: str, port: int, pieces: int, repeats: int) -> None:
    send, receive = TRANSPORTS[name][0](port, True)
    for _ in range(QUESTIONS):
        send(receive())
    for _ in range(repeats):
        began_s = time.process_time()
        for _ in range(pieces):
            receive()
        send(struct.pack(">d", time.process_time() - began_s))
    receive()


def measured(name: str, size: int, repeats: int) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each question, of each transfer, and the processor's of both ends in each transfer."""
    opened, piece_bytes = TRANSPORTS[name]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(name, port, size // piece_bytes, repeats), daemon=True
    )
    server.start()
    send, receive = opened(port, False)
    questions, transfers, busy = [], [], []
    for _ in range(QUESTIONS):
        began_s = time.perf_counter()
        send(b"question")
        receive()
        questions.append(time.perf_counter() - began_s)
    piece = secrets.token_bytes(piece_bytes)
    for _ in range(repeats):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(size // piece_bytes):
            send(piece)
        (its_cpu_s,) = struct.unpack(">d", receive())
        transfers.append(time.perf_counter() - began_s)
        busy.append(time.process_time() - began_cpu_s + its_cpu_s)
    send(b"end")
    server.join(5.0)
    return questions, transfers, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {asked.mb} MB, median of {asked.repeats}")
    for name in TRANSPORTS:
        try:
            questions, transfers, busy = measured(name, asked.mb << 20, asked.repeats)
        except ImportError:
            print(f"{name:15} pyzmq is not installed")
            continue
        rates = sorted((asked.mb << 20) / 1e6 / seconds for seconds in transfers)
        print(
            f"{name:15} {statistics.median(rates):6.0f} MB/s ({rates[0]:.0f} to {rates[-1]:.0f})   "
            f"{statistics.median(busy) / asked.mb * 1e9 / (1 << 20):5.2f} core-s a GB   "
            f"question {1e6 * statistics.median(questions):5.0f} us"
        )


if __name__ == "__main__":
    main()
