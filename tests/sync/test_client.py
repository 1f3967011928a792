"""A worker says again on a new connection what may be lost with the old one, and takes nothing twice."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from argosy.config.schema import RunConfig
from argosy.errors import RunFailed
from argosy.sync import client
from argosy.sync import messages as say
from argosy.sync.layout import ServerLayout
from argosy.sync.links import keys_of
from argosy.sync.wire import F32
from parameter_servers import Peer, asynchronous

PIECE = 4096
Opened = Callable[[str], Peer]


@pytest.fixture
def run(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(client, "MESSAGE_PIECE_BYTES", PIECE)
    monkeypatch.setattr(client, "AHEAD_BYTES", 4 * PIECE)
    monkeypatch.setattr("argosy.sync.links.LINK_AGAIN_S", 0.0)
    return asynchronous(corpus, 2)


@pytest.fixture
def server(run: RunConfig, tmp_path: Path) -> Iterator[Opened]:
    """Be a server of this name, in place of the one of this name before."""
    made: dict[str, Peer] = {}

    def open_server(name: str) -> Peer:
        if name in made:
            made[name].links.close()
        made[name] = Peer(run, tmp_path, name, socket.create_server(ServerLayout(run).addresses[name]))
        return made[name]

    yield open_server
    for one in made.values():
        one.links.close()


@pytest.fixture
def vectors(run: RunConfig) -> list[F32]:
    return [np.zeros(flat.elements, np.float32) for flat in ServerLayout(run).flats]


@pytest.fixture
def worker(run: RunConfig, tmp_path: Path, vectors: list[F32]) -> Iterator[client.Client]:
    layout = ServerLayout(run.model_copy(update={"site": "A"}))
    found = client.Client(layout, keys_of(run, tmp_path)[0], vectors)
    yield found
    found.close()


def deal(first: Peer) -> None:
    work = first.hears(say.AskForWork)
    first.links.tell("A", say.DealtWork(ask=work.ask, generation="e", version=0, lease="l", item=3))


def weights(run: RunConfig, number: int) -> bytes:
    flat = ServerLayout(run).flats[number]
    return (np.arange(flat.elements, dtype=np.float32) + number).tobytes()


def send_weights(peer: Peer, data: bytes, pieces: int | None = None) -> None:
    """Answer a pull of the worker: with so many pieces, or all."""
    pull = peer.hears(say.PullWeights)
    for at in range(0, len(data), PIECE)[:pieces]:
        peer.links.tell("A", say.Weights(ask=pull.ask, version=0, at=at), data[at : at + PIECE])
        peer.turn()


def test_a_question_and_a_pull_are_repeated_on_a_new_connection(
    run: RunConfig, server: Opened, worker: client.Client, vectors: list[F32]
) -> None:
    asked = worker.next_task()
    server("server-1").hears(say.AskForWork)
    first, second = server("server-1"), server("server-2")
    deal(first)
    send_weights(first, b"\xff" * len(weights(run, 0)), pieces=3)  # of weights that are no more
    first = server("server-1")
    send_weights(first, weights(run, 0))
    send_weights(second, weights(run, 1))
    assert asked.result(20.0) == client.WorkerTask("dealt", 0, 3, "l")
    assert [vector.tobytes() for vector in vectors] == [weights(run, number) for number in (0, 1)]


def test_pieces_of_a_gradient_that_were_not_confirmed_are_sent_again(
    run: RunConfig, server: Opened, worker: client.Client
) -> None:
    gradients = [np.frombuffer(weights(run, number), np.float32) for number in (0, 1)]
    done = worker.deliver(client.WorkerTask("dealt", 0, 3, "l"), gradients, [1.0], [1.0])
    first, second = server("server-1"), server("server-2")
    confirmed = [first.hears(say.PushPiece).at for _ in range(2)]
    for at in confirmed:
        first.links.tell("A", say.PieceReceived(lease="l", at=at))
    for _ in range(20):
        first.turn()
    first = server("server-1")
    pieces = {peer: len(range(0, len(weights(run, number)), PIECE)) for number, peer in ((0, first), (1, second))}
    pieces[first] -= len(confirmed)
    for peer, count in pieces.items():
        for _ in range(count):
            at = peer.hears(say.PushPiece).at
            assert peer is second or at not in confirmed
            peer.links.tell("A", say.PieceReceived(lease="l", at=at))
    commit = first.hears(say.Commit)
    first.links.tell("A", say.Committed(ask=commit.ask, update=7))
    while not done.done():
        first.turn()
    assert done.result().update == 7


def test_a_run_that_has_failed_is_told_by_any_server(run: RunConfig, server: Opened, worker: client.Client) -> None:
    asked = worker.next_task()
    first, second = server("server-1"), server("server-2")
    second.meet("A")
    deal(first)
    second.links.tell("A", say.FailureNotice(why="no gradient was finite"))
    while not asked.done():
        second.turn()
        first.turn()
    with pytest.raises(RunFailed, match="server-2: no gradient was finite"):
        asked.result()


@pytest.mark.parametrize("is_bad", [False, True], ids=["gradient", "bad gradient"])
def test_a_gradient_is_not_wanted_where_the_servers_have_ended_with_the_run(
    run: RunConfig, tmp_path: Path, vectors: list[F32], is_bad: bool
) -> None:
    run = run.with_keys(sync={"patience_s": 0.1})
    layout = ServerLayout(run.model_copy(update={"site": "A"}))
    late = client.Client(layout, keys_of(run, tmp_path)[0], vectors, lambda: True)
    task = client.WorkerTask("dealt", 0, 3, "l")
    done = late.report_bad(task, "inf") if is_bad else late.deliver(task, vectors, [1.0], [1.0])
    assert done.result(20.0).update is None
    late.close()
