"""What an agent does when its coordinator does not answer, and when it is not needed any more."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from argosy.config.launch import LaunchConfig
from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.errors import Retryable, signals_to
from argosy.plan.plan import Plan
from argosy.processes.child import Channel, ForkEntry, Message, channel_to_parent, process_state
from argosy.processes.fork_server import ForkServer
from argosy.processes.secret import SECRET_VARIABLE, listen
from argosy.resilience import node_health
from argosy.resilience.node_health import Health
from argosy.supervise import coordinator_client as module
from argosy.supervise import node_workers
from argosy.supervise.agent import Agent, waiting_in_words
from argosy.supervise.nodes import RankState
from argosy.supervise.scratch import scratch_folder
from peers import SECRET, Peer
from waiting import PATIENT_S


class Forks:
    """A fork server whose processes are the test's: `forked` are their ends of the channels, by key."""

    has_forked = True
    pid = 0

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        self.forked: dict[str, Channel] = {}
        self.is_heard = threading.Event()

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def take(self) -> list[Message]:
        self._ends[0].recv(1)
        self.is_heard.set()
        return []

    def says_something(self) -> None:
        self._ends[1].send(b"!")

    def fork(self, key: str, entry: ForkEntry, environment: Mapping[str, str], *, at_once: bool = False) -> Channel:
        ours, theirs = socket.socketpair()
        self.forked[key] = Channel(theirs)
        return Channel(ours)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Where the coordinator is expected: the test is it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener


@pytest.fixture
def forks() -> Forks:
    return Forks()


@pytest.fixture
def agent(tmp_path: Path, server: socket.socket, monkeypatch: pytest.MonkeyPatch, forks: Forks) -> Agent:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    launch = LaunchConfig(nodes=2, node="a", coordinator=f"127.0.0.1:{server.getsockname()[1]}")
    run = RunConfig(launch=launch, resilience=ResilienceConfig(coordinator_timeout_s=0.5))
    return Agent(tmp_path, run, Plan.parse("dp_replicate=2"), forks)  # type: ignore[arg-type]


def test_a_coordinator_that_never_answers_is_given_up(agent, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.2)
    with pytest.raises(Retryable, match=r"could not be reached for 0\.5 s .*The same command goes on"):
        agent.run()


def test_a_signal_at_its_end_does_not_keep_it_from_removing_what_is_in_memory(agent, monkeypatch):
    """SLURM sends TERM twice: a run that has nothing to save is at its end by then."""

    @contextmanager
    def folder() -> Iterator[Path]:
        with scratch_folder() as path:
            try:
                yield path
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("argosy.supervise.agent.scratch_folder", folder)
    came: list[int] = []
    with signals_to(lambda number, _: came.append(number), signal.SIGTERM), pytest.raises(Retryable):
        agent.run()
    assert not came, "it would have died"


def test_it_does_not_wait_for_an_answer_to_its_call(agent, forks, monkeypatch):
    """Where there is no way to the coordinator, that takes long, and its workers are still there."""
    unanswered: Future[socket.socket] = Future()
    monkeypatch.setattr(module, "call", lambda address: unanswered)

    def run() -> None:
        with pytest.raises(Retryable):
            agent.run()

    thread = threading.Thread(target=run)
    thread.start()
    forks.says_something()
    assert forks.is_heard.wait(PATIENT_S)
    time.sleep(0.6)  # longer than it is patient
    unanswered.set_exception(TimeoutError())
    thread.join(PATIENT_S)
    assert not thread.is_alive()


def test_a_worker_that_waits_for_a_world_does_not_hold_up_the_end(agent, forks, server):
    """That of a spare node, which nobody needed."""
    thread = threading.Thread(target=agent.run)
    thread.start()
    coordinator = Peer(server.accept()[0], listen(SECRET))
    coordinator.say("start", slot=0)
    while "worker 0" not in forks.forked:
        assert thread.is_alive()
    forks.forked["worker 0"].send("ready", generation=0, why="")
    while coordinator.receive()["kind"] != "ready":
        pass
    coordinator.say("finish", exit_code=0, why="", error="")
    thread.join(PATIENT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("states", "generation", "words"),
    [
        (set(), 0, "starting the processes"),
        ({RankState.STARTING, RankState.READY}, 0, "starting the processes"),
        ({RankState.READY}, 0, "waiting for all 2 nodes"),
        ({RankState.RUNNING, RankState.READY}, 1, ""),
        ({RankState.READY}, 1, "recovering, waiting for all 2 nodes"),
    ],
)
def test_it_says_what_it_waits_for_until_a_worker_is_in_a_world(states, generation, words):
    assert waiting_in_words(states, generation, nodes=2) == words


def wait() -> None:
    """Entry of a worker that does nothing until its agent is gone."""
    channel_to_parent().receive()


def healthy() -> None:
    """Entry of a node check that finds nothing."""
    channel_to_parent().send("node_checked", health=asdict(Health()))


def hear(coordinator: Peer) -> dict[str, Any]:
    """Return the next message; a fork server that is started anew may take its time on a busy machine."""
    for _ in range(8):
        with suppress(TimeoutError):
            return coordinator.receive()
    raise TimeoutError


def take_until(coordinator: Peer, kind: str, slots: set[int]) -> None:
    """Take messages until there was one of this kind of each of `slots`."""
    while slots:
        message = hear(coordinator)
        if message["kind"] == kind:
            slots = slots - {message["slot"]}


@pytest.mark.parametrize("dies", ["before it is asked", "when it is asked", "after it was asked"])
def test_a_fork_server_that_dies_amid_a_request_is_replaced_and_the_request_made_again(
    tmp_path, server, monkeypatch, dies
):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    monkeypatch.setattr(node_workers, "WORKER_ENTRY", ForkEntry.of(wait))
    launch = LaunchConfig(nodes=2, node="a", coordinator=f"127.0.0.1:{server.getsockname()[1]}")
    run = RunConfig(launch=launch, resilience=ResilienceConfig(node_check_s=0))
    forks = ForkServer("colorsys")
    agent = Agent(tmp_path, run, Plan.parse("dp_replicate=4"), forks)
    thread = threading.Thread(target=agent.run)
    thread.start()
    coordinator = Peer(server.accept()[0], listen(SECRET))
    coordinator.say("start", slot=0)
    take_until(coordinator, "started", {0})
    if dies == "after it was asked":
        os.kill(forks.pid, signal.SIGSTOP)
    else:
        os.kill(forks.pid, signal.SIGKILL)
    if dies == "before it is asked":
        take_until(coordinator, "lost", {0})
    coordinator.say("start", slot=1)
    coordinator.say("open_store", generation=1)
    if dies == "after it was asked":
        while len(agent._workers) < 2 or agent._store is None:
            time.sleep(0.01)
        os.kill(forks.pid, signal.SIGKILL)
    missing = {0, 1}
    if dies != "before it is asked":
        heard: set[tuple[str, int | None]] = set()
        while ("lost", 0) not in heard or not heard & {("lost", 1), ("started", 1)}:
            message = hear(coordinator)
            heard.add((message["kind"], message.get("slot")))
        if ("lost", 1) in heard:
            coordinator.say("start", slot=1)
        else:  # the agent saw the death before it read the request
            missing = {0}
    coordinator.say("start", slot=0)
    take_until(coordinator, "started", missing)
    coordinator.say("finish", exit_code=0, why="", error="")
    thread.join(PATIENT_S)
    forks.close()
    assert not thread.is_alive()


def test_a_fork_server_that_is_dead_when_the_node_is_to_be_checked_is_replaced(tmp_path, server, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    monkeypatch.setattr(node_workers, "WORKER_ENTRY", ForkEntry.of(wait))
    monkeypatch.setattr(node_health, "NODE_CHECK", ForkEntry.of(healthy))
    launch = LaunchConfig(nodes=2, node="a", coordinator=f"127.0.0.1:{server.getsockname()[1]}")
    forks = ForkServer("colorsys")
    agent = Agent(tmp_path, RunConfig(launch=launch), Plan.parse("dp_replicate=4"), forks)
    os.kill(forks.pid, signal.SIGKILL)
    while process_state(forks.pid) not in ("", "Z"):
        time.sleep(0.01)
    thread = threading.Thread(target=agent.run)
    thread.start()
    coordinator = Peer(server.accept()[0], listen(SECRET))
    while hear(coordinator)["kind"] != "node_checked":
        pass
    coordinator.say("finish", exit_code=0, why="", error="")
    thread.join(PATIENT_S)
    forks.close()
    assert not thread.is_alive()
