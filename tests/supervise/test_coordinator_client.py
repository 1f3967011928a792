"""An agent's client of the coordinator: where it starts one, when it calls again, what it gives up on."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint.fence import name_of
from argosy.config.dump import save_run
from argosy.config.launch import LaunchConfig
from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.errors import Retryable, RunFailed, UserError
from argosy.observe.events import Events, read_lines
from argosy.plan.plan import Plan
from argosy.processes.secret import SECRET_VARIABLE, listen
from argosy.supervise import coordinator_client as module
from argosy.supervise.coordinator_client import CoordinatorClient, check_descriptors
from argosy.supervise.messages import (
    AgentHello,
    FromCoordinator,
    HeartbeatReply,
    NodeHeartbeat,
    RunStopping,
    StartWorker,
)
from argosy.supervise.place import place_of
from peers import SECRET, Peer, PeerGone


class Client:
    """A client, driven as an agent does, and what it has greeted and been told."""

    def __init__(self, run_dir: Path, patience_s: float = 60.0, **launch: Any):
        run = RunConfig(launch=LaunchConfig(**launch), resilience=ResilienceConfig(coordinator_timeout_s=patience_s))
        save_run(run, run_dir / "run.toml")
        self.run_dir, self.greeted, self.heard = run_dir, list[str](), list[FromCoordinator]()
        self.selector, self.wants_to_ask = selectors.DefaultSelector(), False
        events = Events(run_dir, "agent")
        self.client = CoordinatorClient(run_dir, run, place_of(run_dir, run.launch, Plan(), events), events)
        self.said = list[str]()
        self.client.open(self.selector, self._greet, self.heard.append, self.said.append)

    def _greet(self, host: str) -> None:
        self.greeted.append(host)
        self.client.tell(AgentHello(folder=name_of(self.run_dir), name="a", host=host, slots=1))

    def turn_until(self, condition: Callable[[], Any], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            for key, _ in self.selector.select(0.01):
                key.data()
            self.wants_to_ask = self.client.keep(time.monotonic())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run_dir / "events/agent.jsonl") if event["event"] == kind]


def answered(elsewhere: socket.socket, client: Client, secret: bytes = SECRET) -> Peer:
    """The coordinator's end of the client's next connection, which has greeted it."""
    before = len(client.greeted)
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(lambda: Peer(elsewhere.accept()[0], listen(secret)))
        client.turn_until(lambda: len(client.greeted) > before)
        return peer.result(10)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())


@pytest.fixture
def elsewhere() -> Iterator[socket.socket]:
    """Where the coordinator of another machine is expected: the test is it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener


@pytest.fixture
def client(tmp_path: Path, elsewhere: socket.socket) -> Iterator[Client]:
    made = Client(tmp_path, 0.5, nodes=2, node="a", coordinator=f"127.0.0.1:{elsewhere.getsockname()[1]}")
    yield made
    made.client.close()


@pytest.fixture
def forever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A coordinator that hangs as soon as it is started."""
    hung = tmp_path / "hung"
    hung.write_text("#!/bin/sh\nexec sleep 60\n")
    hung.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hung))
    monkeypatch.setattr(module, "HANG_S", 0.2)


def test_it_starts_a_coordinator_here_which_knows_the_agent_and_ends_with_it(tmp_path):
    agent = Client(tmp_path)
    agent.turn_until(lambda: HeartbeatReply() in agent.heard)
    (started,) = agent.events("coordinator_started")
    assert agent.greeted == ["127.0.0.1"] and agent.client.interface == "lo" and not started["replaces"]
    assert Path(f"/proc/{started['pid']}").exists()
    agent.client.close()
    assert not Path(f"/proc/{started['pid']}").exists()


def test_one_elsewhere_is_called_and_not_started(client, elsewhere):
    coordinator = answered(elsewhere, client)
    assert coordinator.receive()["kind"] == "hello"
    coordinator.say("start", slot=3)
    client.turn_until(lambda: client.heard)
    assert client.heard == [StartWorker(slot=3)] and not client.events("coordinator_started")
    coordinator.close()


def test_it_asks_again_only_once_it_was_answered(client, elsewhere):
    coordinator = answered(elsewhere, client)
    coordinator.say("heard")
    client.turn_until(lambda: client.wants_to_ask)
    client.client.ask(time.monotonic(), NodeHeartbeat())
    later = time.monotonic() + 10 * client.client.ask_s
    assert not client.client.keep(later)
    coordinator.say("heard")
    client.turn_until(lambda: len(client.heard) == 2)
    assert client.client.keep(later)
    coordinator.close()


def test_time_in_which_the_agent_itself_was_stopped_is_no_silence_of_the_coordinator(client, elsewhere):
    coordinator = answered(elsewhere, client)
    coordinator.say("heard")
    client.turn_until(lambda: client.wants_to_ask)
    now = time.monotonic()
    client.client.ask(now, NodeHeartbeat())
    for later in (60, 61, 62):
        client.client.keep(now + later)
    assert not client.events("coordinator_lost")
    for later in range(63, 63 + round(module.SILENCE_S)):
        client.client.keep(now + later)
    assert client.events("coordinator_lost"), "it did not answer since either"


def test_a_machine_on_which_the_coordinator_could_not_hold_all_connections_starts_none(tmp_path):
    agent = Client(tmp_path, nodes=2**40, coordinator="127.0.0.1:1")
    with pytest.raises(UserError, match="file descriptors"):
        agent.turn_until(lambda: False)
    assert not (tmp_path / "events/agent.jsonl").exists()


def test_a_coordinator_of_another_version_is_not_called_for_ever(client, elsewhere):
    coordinator = answered(elsewhere, client)
    coordinator.say("start", slot=3, novelty=1)
    with pytest.raises(UserError, match=r"launch\.coordinator.*\(start\.novelty: .*different versions of Argosy"):
        client.turn_until(lambda: False)
    coordinator.close()


def test_one_that_hangs_up_before_it_has_said_anything_is_called_again_after_a_while(client, elsewhere, monkeypatch):
    monkeypatch.setattr(module, "COORDINATOR_AGAIN_S", 3600.0)
    answered(elsewhere, client).close()
    client.turn_until(lambda: client.said)
    elsewhere.settimeout(0.1)
    for _ in range(20):
        client.client.keep(time.monotonic())
    with pytest.raises(TimeoutError):
        elsewhere.accept()


def test_it_calls_again_when_the_connection_breaks_and_says_so(client, elsewhere):
    for calls in range(1, 4):
        coordinator = answered(elsewhere, client)
        assert len(client.greeted) == calls
        coordinator.say("heard")
        coordinator.close()
    answered(elsewhere, client)
    assert len(client.events("coordinator_lost")) == len(client.said) == 3
    assert all(said.startswith("the coordinator is lost: ") for said in client.said)


def test_without_a_coordinator_nothing_that_is_told_raises(client, elsewhere):
    client.client.tell(RunStopping())
    answered(elsewhere, client).close()
    for _ in range(10):
        client.client.tell(RunStopping())


def test_one_that_is_not_there_is_given_up_but_not_by_a_run_that_ends(tmp_path):
    client = Client(tmp_path, 0.5, nodes=2, node="a", coordinator="192.0.2.1:9")  # of documents: no machine has it
    client.client.is_ending = True
    with pytest.raises(AssertionError):
        client.turn_until(lambda: False, seconds=1.0)
    client.client.is_ending = False
    with pytest.raises(Retryable, match=r"the coordinator at 192\.0\.2\.1:9 could not be reached for 0\.5"):
        client.turn_until(lambda: False)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTS_APART_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_one_that_dies_at_once_each_time_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    agent = Client(tmp_path)
    with pytest.raises(RunFailed, match=r"died 5 times before it said anything: .*coordinator\.log says why"):
        agent.turn_until(lambda: False)
    agent.client.close()


def test_one_that_speaks_and_dies_again_and_again_is_started_after_a_pause_and_never_given_up(tmp_path, monkeypatch):
    """As on a full disk, on which it can begin no world."""
    agent, starts = Client(tmp_path), 1 + module.COORDINATOR_RESTARTS.most_failures
    monkeypatch.setattr(module, "STARTS_APART_S", 0.3)
    for count in range(1, starts + 1):
        agent.turn_until(lambda count=count: len(agent.greeted) == count and agent.heard)
        agent.heard.clear()
        os.kill(agent.events("coordinator_started")[-1]["pid"], signal.SIGKILL)
    times = [event["time_s"] for event in agent.events("coordinator_started")]
    assert len(times) == starts and all(after - before > 0.25 for before, after in pairwise(times))
    agent.client.close()


def test_one_that_the_system_refuses_to_start_is_tried_again_until_there_is_room_or_no_more_patience(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "STARTS_APART_S", 0.05)
    (tmp_path / "logs").write_text("")  # no folder can be made there: as on a disk that fails
    agent, hasty = Client(tmp_path), Client(tmp_path, 0.2)
    with pytest.raises(Retryable, match=r"this machine could not be reached.*it cannot be started: .*File exists"):
        hasty.turn_until(lambda: False)
    hasty.client.close()
    agent.turn_until(iter([False, False, True]).__next__)
    (tmp_path / "logs").unlink()
    agent.turn_until(lambda: agent.greeted)
    agent.client.close()


@pytest.mark.usefixtures("forever", "at_once")
def test_one_that_hangs_here_is_replaced_at_the_same_port(tmp_path):
    """Where it runs: an agent there can tell a coordinator that hangs from a network that is cut."""
    agent = Client(tmp_path)
    with pytest.raises(RunFailed, match="died 5 times"):
        agent.turn_until(lambda: False)
    agent.client.close()
    started = agent.events("coordinator_started")
    assert [event["replaces"] for event in started] == [False, *[True] * 4]
    assert len({event["port"] for event in started}) == 1
    assert not any(Path(f"/proc/{event['pid']}").exists() for event in started)


def test_a_port_that_is_taken_is_the_users_to_change(tmp_path, elsewhere):
    agent = Client(tmp_path, port=elsewhere.getsockname()[1])
    with pytest.raises(UserError, match=r"launch\.port = \d+ is in use.*Try launch\.port = 0"):
        agent.turn_until(lambda: False)
    agent.client.close()


def test_one_that_hangs_up_before_it_proved_anything_is_called_again_after_a_while_and_not_missed(client, elsewhere):
    calls, end = 0, time.monotonic() + 5
    elsewhere.setblocking(False)
    with pytest.raises(Retryable, match="could not be reached"):
        while True:
            assert time.monotonic() < end
            client.turn_until(iter([False, True]).__next__)  # once
            with suppress(BlockingIOError):
                elsewhere.accept()[0].close()
                calls += 1
    assert 1 < calls < 12 and not client.events("coordinator_lost")


def test_one_that_does_not_know_the_secret_is_another_runs(elsewhere, tmp_path):
    client = Client(tmp_path, nodes=2, node="a", coordinator=f"127.0.0.1:{elsewhere.getsockname()[1]}")

    def stand_in() -> None:
        for _ in range(module.MOST_UNPROVEN):
            with pytest.raises(PeerGone):
                Peer(elsewhere.accept()[0], listen(b"the secret of some other run, not of this"))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(stand_in)
        with pytest.raises(UserError, match=r"does not know this run's secret.*a port of its own.*ARGOSY_SECRET"):
            client.turn_until(lambda: False)
    assert not client.greeted
    client.client.close()


def test_a_coordinator_that_cuts_the_connection_at_once_is_called_again(elsewhere, tmp_path, monkeypatch):
    address = elsewhere.getsockname()
    client, came = Client(tmp_path, nodes=2, coordinator=f"127.0.0.1:{address[1]}"), Future[socket.socket]()
    with monkeypatch.context() as patch:
        patch.setattr(module, "call", lambda address: came)
        client.client.keep(time.monotonic())
    came.set_result(socket.create_connection(address))
    cut = elsewhere.accept()[0]
    cut.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets the connection
    cut.close()
    answered(elsewhere, client)


def test_a_machine_that_allows_too_few_descriptors_is_named_with_the_number_that_is_needed(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2111))
    with pytest.raises(UserError, match=r"launch\.nodes = 2048: .* needs 2112 file descriptors, .* have 2111 \(ulimit"):
        check_descriptors(2048)
    check_descriptors(2047)
