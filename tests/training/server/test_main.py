"""A server does what workers may ask for and the first server says; nothing else ends it. It waits for its port."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.observe.events import read_lines
from argosy.processes.secret import secret_of
from argosy.sync import messages as say
from argosy.sync.layout import ServerLayout
from argosy.sync.links import KeyPair, settle, zeromq
from argosy.sync.messages import packed, unpacked
from argosy.training.server import main
from parameter_servers import asynchronous, serving, work
from wrong_messages import altered


@contextmanager
def worker(run: RunConfig, run_dir: Path, number: int) -> Iterator[Any]:
    """A socket of a worker that knows the run's secret, connected to a server."""
    zmq = zeromq()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    settle(socket)
    secret = secret_of(run_dir)
    keys = KeyPair.of(secret, "worker")
    socket.curve_serverkey = KeyPair.of(secret, "server").public
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    host, port = ServerLayout(run).addresses[number]
    socket.connect(f"tcp://{host}:{port}")
    try:
        yield socket
    finally:
        socket.close(linger=1000)
        context.term()


def hello(run: RunConfig) -> say.Hello:
    layout = ServerLayout(run)
    return say.Hello(version=say.VERSION, site="B", session="s", model=layout.model, run=layout.identity)


def answer(socket: Any) -> say.Message:
    assert socket.poll(10_000)
    return unpacked(socket.recv_multipart())[0]


ORDERS = [
    say.Begin(epoch="e", version=0), say.Begin(epoch="e", version=10**6), say.CheckServer(epoch="e", version=3),
    say.Apply(epoch="e", update=0, lease="l", rate=1.0, save=True), say.Finish(),
]  # fmt: skip


def test_a_worker_tells_no_server_what_only_the_first_one_may(corpus: Path, tmp_path: Path) -> None:
    run = asynchronous(corpus, 2)
    with serving(run, tmp_path):
        for number in (0, 1):
            with worker(run, tmp_path, number) as socket:
                for order in ORDERS:
                    socket.send_multipart(packed(order))
                    assert isinstance(answer(socket), say.HelloNeeded)
                    socket.send_multipart(packed(hello(run)))
                    assert isinstance(answer(socket), say.Welcome)
                    socket.send_multipart(packed(order))
                    refused = answer(socket)
                    assert isinstance(refused, say.Refused) and "nothing that server" in refused.why
        assert work(run, tmp_path, "A")
    events = list(read_lines(tmp_path / "events/server-1.jsonl"))
    assert [event["event"] for event in events].count("servers_begin") == 1


def said_by_a_worker(run: RunConfig) -> list[say.ServerMessage]:
    return [
        hello(run), say.Ping(), say.AskForWork(ask=1), say.PullWeights(ask=2, epoch="e", version=0),
        say.PushPiece(lease="l", at=0),
        say.Commit(ask=3, lease="l", losses=[1.0], norms=[1.0]), say.BadGradient(ask=4, lease="l", why="w"),
        say.Scored(version=2, loss=1.0, bits_per_byte=1.0), *ORDERS,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_wrong_messages_of_a_worker_end_no_server(corpus: Path, tmp_path: Path, seed: int) -> None:
    luck, run = random.Random(seed), asynchronous(corpus, 2)
    said = [json.loads(packed(message)[0]) for message in said_by_a_worker(run)]
    with serving(run, tmp_path):
        for number in (0, 1):
            with worker(run, tmp_path, number) as socket:
                for _ in range(300):
                    if luck.random() < 0.2:
                        socket.send_multipart(packed(hello(run)))
                    head = json.dumps(altered(luck.choice(said), luck)).encode()
                    data = luck.randbytes(luck.choice([0, 1, 4096]))
                    frames = luck.choice([[head], [head, data], [head, data, data], [data], [b""]])
                    socket.send_multipart(frames)
                socket.send_multipart(packed(hello(run)))
                while not isinstance(answer(socket), say.Welcome):
                    pass
                socket.send_multipart(packed(say.Bye()))
        assert work(run, tmp_path, "A")


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_port_that_somebody_leaves_is_waited_for(taken):
    said: list[str] = []
    address = ("127.0.0.1", taken.getsockname()[1])
    threading.Timer(0.3, taken.close).start()
    main.wait_for_port(address, lambda: False, said.append)
    assert len(said) == 1 and f"port {address[1]} is in use" in said[0]
    socket.create_server(address).close()


def test_a_port_that_stays_taken_is_named(taken, monkeypatch):
    monkeypatch.setattr(main, "PORT_S", 0.3)
    number = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"sync.servers: cannot listen at port {number} .*in use"):
        main.wait_for_port(("127.0.0.1", number), lambda: False, lambda _: None)


def test_a_server_that_is_to_end_does_not_wait(taken):
    main.wait_for_port(("127.0.0.1", taken.getsockname()[1]), lambda: True, lambda _: None)
