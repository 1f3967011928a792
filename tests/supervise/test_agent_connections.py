"""Whoever reaches the port may knock; what is wrong with one connection ends that one, and the agents do not notice."""

from __future__ import annotations

import resource
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from argosy.processes.connection import TEXT_CHARS
from argosy.processes.secret import call, certificate_of
from argosy.supervise import agent_connections as module
from argosy.supervise import messages as say
from argosy.supervise.agent_connections import AgentConnections
from peers import SECRET, Peer, PeerGone


class Server:
    """The connections of a coordinator that admits everybody, and what was said."""

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext | None = None):
        self.address = listener.getsockname()
        self.left: list[tuple[str, str]] = []
        self.said: list[tuple[str, say.FromAgent]] = []
        self.connections = AgentConnections(listener, SECRET, tls, lambda name, why: self.left.append((name, why)))

    def turn(self, timeout_s: float = 0.02) -> None:
        for agent, message in self.connections.turn(timeout_s):
            self.said.append((agent.name, message))
            if isinstance(message, say.AgentHello):
                self.connections.admit(agent, message.name)

    def turn_until(self, condition: Callable[[], object]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.turn()
        raise AssertionError("it did not come to that")

    def agent(self, name: str) -> Peer:
        """An agent that was admitted."""
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(lambda: Peer(socket.create_connection(self.address), call(SECRET)))
            self.turn_until(coming.done)
        peer = coming.result()
        peer.say("hello", name=name, folder="f", host="h", slots=2)
        self.turn_until(lambda: name in self.connections.names)
        return peer

    def stranger(self, *sent: bytes) -> socket.socket:
        stranger = socket.create_connection(self.address)
        for data in sent:
            stranger.sendall(data)
        return stranger

    def still_hears(self, agent: Peer) -> bool:
        self.said.clear()
        agent.say("stopping")
        self.turn_until(lambda: self.said)
        return self.said[-1][1] == say.RunStopping()


@pytest.fixture
def server() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Server(listener)


@pytest.mark.parametrize(
    "sent",
    [b'{"kind": "hello"}\n' * 4, b"[" * 100_000, b"GET / HTTP/1.1\r\n\r\n" * 10, b"\x16\x03\x01" * 100, b"\0" * 64],
    ids=["a hello", "brackets", "a browser", "TLS", "zeros"],
)  # fmt: skip
def test_a_stranger_is_refused_and_learns_and_changes_nothing(server, sent):
    agent, stranger = server.agent("a"), server.stranger(sent)
    server.turn_until(lambda: server.connections.refused == 1)
    assert "does not know this run's secret" in server.connections.last_refusal
    assert server.said[1:] == [] and server.still_hears(agent)
    stranger.close()


@pytest.mark.parametrize("sent", [b"", b"some bytes"], ids=["nothing", "bytes"])
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
def test_a_connection_that_is_cut_before_it_is_accepted_ends_alone(sent, is_encrypted, tmp_path: Path):
    tls = certificate_of(tmp_path).context(is_server=True) if is_encrypted else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener, tls)
        stranger = server.stranger(sent)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets the connection
        stranger.close()
        server.turn_until(lambda: server.connections.refused == 1)


def test_who_does_not_say_who_it_is_is_not_waited_for_for_ever(server, monkeypatch):
    monkeypatch.setattr(module, "HELLO_S", 0.2)
    agent = server.agent("a")
    with server.stranger(), server.stranger(b"half"):
        silent = _proven(server)
        server.turn_until(lambda: server.connections.refused == 3)
        assert server.still_hears(agent) and not server.left
        with pytest.raises(PeerGone):
            silent.receive()


def _proven(server: Server) -> Peer:
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(lambda: Peer(socket.create_connection(server.address), call(SECRET)))
        server.turn_until(coming.done)
    return coming.result()


def test_the_oldest_of_too_many_strangers_goes_and_an_agent_still_comes_in(server, monkeypatch):
    monkeypatch.setattr(module, "MOST_UNKNOWN_AGENTS", 20)
    with ExitStack() as held:
        for _ in range(100):
            held.enter_context(server.stranger())
        server.turn_until(lambda: server.connections.refused == 80)
        assert server.still_hears(server.agent("a"))


def test_without_a_descriptor_left_the_agents_are_heard_and_later_others_too(server):
    agent = server.agent("a")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [server.stranger() for _ in range(3)]
    highest = max(end.fileno() for end in waiting)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        assert server.still_hears(agent)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for end in waiting:
            end.close()
    assert server.still_hears(server.agent("b"))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (("nothing", {}), "invalid message"),
        (("done", {"slot": "x"}), "invalid message"),
        (("hello", {"name": "b", "folder": "f", "host": "h", "slots": 1}), "wrong time"),
    ],
    ids=["unknown", "no number", "a second hello"],
)
def test_an_agent_that_says_what_is_no_message_is_dropped_alone(server, said, why):
    wrong, right = server.agent("wrong"), server.agent("right")
    kind, facts = said
    wrong.say(kind, **facts)
    server.turn_until(lambda: server.left)
    ((name, reason),) = server.left
    assert name == "wrong" and why in reason and server.still_hears(right)


def test_a_frame_without_end_is_refused_by_its_length_and_holds_no_memory(server):
    agent = server.agent("a")
    agent.socket.sendall(struct.pack(">I", 1 << 31))
    server.turn_until(lambda: server.left or agent.socket.sendall(bytes(32)))
    assert "are the most" in server.left[0][1]


def test_who_knows_the_secret_but_says_no_hello_first_is_refused(server):
    early = _proven(server)
    early.say("done", slot=0)
    server.turn_until(lambda: server.connections.refused == 1)
    assert not server.said


def test_an_agent_of_another_version_is_told_and_ends(server):
    other = _proven(server)
    other.say("hello", name="a", folder="f", host="h", slots=1, novelty=3)
    server.turn_until(lambda: server.connections.refused == 1)
    told = other.receive()
    assert told["kind"] == "finish" and told["exit_code"] == 2
    assert "(hello.novelty: " in told["why"] and "different versions of Argosy" in told["why"]


def test_an_agent_that_takes_nothing_is_dropped_and_holds_nobody_up(server):
    deaf, other = server.agent("deaf"), server.agent("other")
    message = say.LeaveWorld(generation=1, why="x" * TEXT_CHARS)
    server.turn_until(lambda: [server.connections.tell("deaf", message) for _ in range(100)] and server.left)
    assert "accepts no more" in server.left[0][1] and server.still_hears(other)
    deaf.close()


def test_an_agent_that_is_silent_for_longer_than_its_lease_has_left(server, monkeypatch):
    monkeypatch.setattr(module, "LEASE_S", 0.3)
    server.agent("silent")
    talker = server.agent("talker")
    while not server.left:
        assert server.still_hears(talker)
    assert [name for name, _ in server.left] == ["silent"]


def test_time_in_which_the_coordinator_stood_still_is_nobodys_silence(server, monkeypatch):
    agent = server.agent("a")
    clock = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock + 60)  # it was stopped for a minute
    agent.say("stopping")
    server.turn()
    server.turn()
    assert not server.left
