"""A server does what workers may ask for and the first server says; nothing else ends it."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.errors import StorageError
from argosy.faults import FAULTS_VARIABLE
from argosy.launch.servers import SERVER_MODULE
from argosy.observe.events import read_lines
from argosy.processes.child import ChannelClosed, Child
from argosy.processes.connection import WireRecord
from argosy.sync import messages as say
from argosy.sync.layout import ServerLayout
from argosy.sync.ledger import UpdateLedger
from argosy.sync.messages import framed
from argosy.training.server import main
from argosy.training.server.main import ParameterServer
from argosy.training.server.shard import ServerShard
from parameter_servers import Peer, asynchronous, serving, work
from wrong_messages import altered


@contextmanager
def worker(run: RunConfig, run_dir: Path, site: str = "B") -> Iterator[Peer]:
    peer = Peer(run, run_dir, site)
    try:
        yield peer
    finally:
        peer.links.close()


ORDERS = [
    say.GoToVersion(generation="e", version=0), say.GoToVersion(generation="e", version=10**6),
    say.CheckServer(generation="e", version=3),
    say.Apply(generation="e", update=0, lease="l", rate=1.0, save=True), say.Finish(),
]  # fmt: skip


def test_a_worker_tells_no_server_what_only_the_first_one_may(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.sync.links.REFUSED_AGAIN_S", 0.0)
    monkeypatch.setattr("argosy.sync.links.LINK_AGAIN_S", 0.0)
    run = asynchronous(corpus, 2)
    with serving(run, tmp_path):
        with worker(run, tmp_path) as peer:
            for name in ("server-1", "server-2"):
                for order in ORDERS:
                    assert peer.answer(name, order) is None
            kinds = {order.kind for order in ORDERS}
            assert {re.findall(r"(?:answers|takes) no (\w+)", why)[0] for why in peer.refusals} == kinds
        assert work(run, tmp_path, "A")
    events = list(read_lines(tmp_path / "events/server-1.jsonl"))
    assert [event["event"] for event in events].count("servers_begin") == 1


def said_by_a_worker(hello: say.PartHello) -> list[WireRecord]:
    return [
        hello, say.Ping(), say.AskForWork(ask=1), say.PullWeights(ask=2, generation="e", version=0),
        say.PushPiece(lease="l", at=0),
        say.Commit(ask=3, lease="l", losses=[1.0], norms=[1.0]), say.BadGradient(ask=4, lease="l", why="w"),
        say.Scored(version=2, loss=1.0, bits_per_byte=1.0), say.WorkerLeaves(), *ORDERS,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_wrong_messages_of_a_worker_end_no_server(
    corpus: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.sync.links.REFUSED_AGAIN_S", 0.0)
    monkeypatch.setattr("argosy.sync.links.LINK_AGAIN_S", 0.0)
    luck, run = random.Random(seed), asynchronous(corpus, 2)
    with serving(run, tmp_path):
        with worker(run, tmp_path) as peer:
            said = [json.loads(framed(message)) for message in said_by_a_worker(peer.hello)]
            for name in ("server-1", "server-2"):
                for _ in range(40):
                    peer.meet(name)
                    for _ in range(5):
                        head = json.dumps(altered(luck.choice(said), luck)).encode()
                        data = luck.randbytes(luck.choice([0, 1, 4096]))
                        frame = luck.choice([head, head + b"\n" + data, data])
                        if (link := peer.links.sites.get(name)) is not None:
                            link.connection.send(frame)
                    peer.turn()
        assert work(run, tmp_path, "A")


def test_a_gradient_of_a_worker_that_has_left_is_applied(corpus: Path, tmp_path: Path) -> None:
    """The first server's order and the worker's goodbye are on different ways: either may come first."""
    run = asynchronous(corpus, 2)
    tmp_path.mkdir(exist_ok=True)
    save_run(run, tmp_path / "run.toml")
    layout = ServerLayout(run)
    with socket.create_server(layout.addresses["server-1"]) as listener:
        server, ending = ParameterServer(run, tmp_path, 1), threading.Event()
        first = Peer(run, tmp_path, "server-1", listener)
        thread = threading.Thread(target=server.serve, args=(ending.is_set,))
        thread.start()
        try:
            begun = first.answer("server-2", say.GoToVersion(generation="e", version=0))
            assert begun == say.ServerStatus(generation="e", version=0)
            with worker(run, tmp_path) as peer:
                data = layout.wire.encode(np.ones(layout.flats[1].elements, np.float32))
                answer = peer.answer("server-2", say.PushPiece(lease="l", at=0), data.tobytes())
                assert answer == say.PieceReceived(lease="l", at=0)
                peer.links.tell("server-2", say.WorkerLeaves())
            first.links.tell("server-2", say.Apply(generation="e", update=0, lease="l", rate=0.1, save=False))
            done = first.answer("server-2", say.CheckServer(generation="e", version=1))
            assert done == say.ServerStatus(generation="e", version=1)
        finally:
            first.links.tell("server-2", say.Finish())
            until = time.monotonic() + 5.0
            while thread.is_alive() and time.monotonic() < until:
                first.turn()
            ending.set()
            thread.join(30.0)
            server.close()
            first.links.close()


def test_servers_that_are_to_end_have_the_ledger_on_the_disk_before_they_save(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, done = asynchronous(corpus), list[str]()
    save_run(run, tmp_path / "run.toml")
    monkeypatch.setattr(UpdateLedger, "sync", lambda ledger: done.append("ledger"))
    monkeypatch.setattr(ServerShard, "save", lambda shard: done.append("checkpoint"))
    server = ParameterServer(run, tmp_path, 0)
    server.serve(lambda: True)
    server.close()
    assert done == ["ledger", "checkpoint"]


def test_a_server_that_is_to_end_before_the_first_one_has_spoken_has_nothing_to_save(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = asynchronous(corpus, 2)
    save_run(run, tmp_path / "run.toml")
    monkeypatch.setattr(main, "FIRST_SERVER_WORD_S", 0.0)
    server = ParameterServer(run, tmp_path, 1)
    assert not server.serve(lambda: True) and server.is_alone
    server.close()


def test_a_server_that_has_missed_the_first_one_s_last_word_ends_where_it_sees_the_last_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = asynchronous(corpus, 2, sync={"patience_s": 0.1})
    save_run(run, tmp_path / "run.toml")
    saved = iter([3, run.train.steps])
    monkeypatch.setattr(main, "saved_step", lambda run_dir: next(saved, run.train.steps))
    server = ParameterServer(run, tmp_path, 1)
    assert server.serve(lambda: False) and not server.is_alone
    server.close()


def test_a_run_whose_last_state_cannot_be_saved_has_not_finished(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = asynchronous(corpus)
    save_run(run, tmp_path / "run.toml")
    monkeypatch.setenv(FAULTS_VARIABLE, "enospc@save")
    server = ParameterServer(run, tmp_path, 0)
    server._shard.version = run.train.steps
    with pytest.raises(StorageError, match=f"after step {run.train.steps} could not be saved .*No space left"):
        server.serve(lambda: True)
    server.close()
    finish = list(read_lines(tmp_path / "events/server-1.jsonl"))[-1]
    assert (finish["event"], finish["exit_code"], finish["finished"]) == ("finish", StorageError.exit_code, False)


def test_a_server_that_is_back_hears_what_it_missed_before_what_is_new(corpus: Path, tmp_path: Path) -> None:
    """Else the newest update would be one that does not follow, and all servers would go back to a checkpoint."""
    run = asynchronous(corpus, 2)
    save_run(run, tmp_path / "run.toml")
    server = ParameterServer(run, tmp_path, 0)
    server._tell_server("server-2", say.GoToVersion(generation="e", version=0))
    layout = ServerLayout(run)
    second = Peer(run, tmp_path, "server-2", socket.create_server(layout.addresses["server-2"]))
    while "server-2" not in server._links.sites:
        server._links.turn(0.02)  # its hello is taken in with the next turn
        second.turn()
    server._tell_server("server-2", say.Finish())
    server._hear_server("server-2", second.hello)
    while len(second.heard) < 2:
        second.turn()
    assert [type(message) for message in second.heard] == [say.GoToVersion, say.Finish]
    server.close()
    second.links.close()


def test_a_server_goes_on_when_nobody_reads_what_it_prints(corpus: Path, tmp_path: Path) -> None:
    """The command that holds it was killed, or what the command was piped into."""
    save_run(asynchronous(corpus), tmp_path / "run.toml")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as out:
        server = Child(SERVER_MODULE, str(tmp_path), "0", stdout=out, stderr=out)
    said: list[str] = []
    with pytest.raises(ChannelClosed):
        while True:
            server.channel.send("finish")
            said += [message["kind"] for message in server.hear(0.5)]
    server.reap()
    assert said == ["done"]
