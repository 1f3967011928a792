"""The coordinator's connections to the agents: who may come in, what they say, and which of them went silent.

Whoever reaches the port may connect, and holds a descriptor for a moment; what is wrong with a connection ends that one
alone, and none can make the others wait.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator

from argosy.errors import UserError
from argosy.processes.connection import BACKLOG, HELLO_S, BadMessage, Connection, WireRecord, decoded, encoded
from argosy.processes.secret import listen
from argosy.supervise.messages import FROM_AGENT, ONE_VERSION, AgentHello, EndRun, FromAgent

LEASE_S = 10.0
"""An agent that says nothing for this long counts as unreachable."""
MOST_UNKNOWN_AGENTS = 512
"""Most connections without a hello. One more closes the oldest of them."""
ACCEPTS = 64
"""Connections that are accepted in one turn."""
LONGEST_TURN_S = 1.0
"""A turn that took longer, as this process was stopped or busy, counts as this long: meanwhile agents could not be
heard, so their silence proves nothing."""
ACCEPT_PAUSE_S = 0.5
"""No connection is accepted for so long if this process has no descriptor left."""


class AgentConnection:
    def __init__(self, connected: socket.socket, address: str, connections: AgentConnections):
        self.address, self.name = address, ""
        """name: of the node, once it has said it."""
        self.since_s = self.heard_s = connections.awake_s
        self.is_dropped = False
        self.connection = Connection(connected, listen(connections.secret), connections.selector, self, connections.tls)


class AgentConnections:
    """All connections of one coordinator, and the socket on which new ones come."""

    def __init__(
        self, listener: socket.socket, secret: bytes, tls: ssl.SSLContext | None, left: Callable[[str, str], None]
    ):
        """`left(name, why)` is called when an agent's connection has ended."""
        self.secret, self.tls, self._left = secret, tls, left
        self._listener = listener
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self._is_accepting, self._accepts_from_s = True, 0.0
        self.awake_s = 0.0
        """Time in which this process looked at its connections."""
        self._turned_s = time.monotonic()
        self._agents: dict[str, AgentConnection] = {}
        self._by_silence: dict[AgentConnection, None] = {}
        """The agents, with the one first that was silent for longest."""
        self._returning: dict[str, str] = {}
        """Nodes whose connection ended while this process was stopped, and why: their agents call again."""
        self._slept_at_s = -LEASE_S
        """Last time that this process was stopped, in `awake_s`."""
        self._strangers: dict[AgentConnection, None] = {}
        """Connections without a hello, the oldest first."""
        self.refused, self.last_refusal = 0, ""
        """Number of connections that were closed before their hello, and why the last one was."""

    def __bool__(self) -> bool:
        return bool(self._agents or self._returning)

    def __len__(self) -> int:
        return len(self._agents)

    @property
    def names(self) -> list[str]:
        """The nodes whose agents are connected."""
        return list(self._agents)

    def turn(self, timeout_s: float) -> Iterator[tuple[AgentConnection, FromAgent]]:
        """Wait for something to happen, up to `timeout_s`; yield the messages that have come, with their connection.

        A message of a connection without a name is an `AgentHello`, for `admit`.
        """
        if not self._is_accepting and time.monotonic() > self._accepts_from_s:
            self._is_accepting = True
            self.selector.register(self._listener, selectors.EVENT_READ)
        events = self.selector.select(timeout_s)
        now_s = time.monotonic()
        self.awake_s += min(now_s - self._turned_s, LONGEST_TURN_S)
        if now_s - self._turned_s > LEASE_S:
            self._slept_at_s = self.awake_s
        self._turned_s = now_s
        for key, _ in events:
            if key.fileobj is self._listener:
                self._accept()
            elif not key.data.is_dropped:  # since this event was reported
                yield from self._hear(key.data)
        self._drop_silent()

    def admit(self, agent: AgentConnection, name: str) -> None:
        """Let `agent` speak for the node `name`; an older connection of that node ends."""
        if (old := self._agents.pop(name, None)) is not None:
            self.drop(old, "its agent came back")
        self._returning.pop(name, None)
        del self._strangers[agent]
        agent.name = name
        self._agents[name] = agent
        self._by_silence[agent] = None

    def tell(self, name: str, message: WireRecord) -> None:
        """Send an agent a message, if it is connected."""
        if (agent := self._agents.get(name)) is not None:
            self.answer(agent, message)

    def tell_all(self, message: WireRecord) -> None:
        for name in self.names:
            self.tell(name, message)

    def answer(self, agent: AgentConnection, message: WireRecord) -> None:
        """Send a message over a connection, whether it has a name or not."""
        agent.connection.send(encoded(message))
        self._drop_if_broken(agent)

    def drop(self, agent: AgentConnection, why: str) -> None:
        if agent.is_dropped:
            return
        agent.is_dropped = True
        agent.connection.close()
        self._by_silence.pop(agent, None)
        if agent in self._strangers:
            del self._strangers[agent]
            self.refused, self.last_refusal = self.refused + 1, f"{agent.address}: {why}"
        if self._agents.get(agent.name) is agent:
            del self._agents[agent.name]
            if self.awake_s - self._slept_at_s < LEASE_S:
                self._returning[agent.name] = why
            else:
                self._left(agent.name, why)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connected, (host, port, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left, or the other end is gone already
                self._make_room()
                return
            agent = AgentConnection(connected, f"{host}:{port}", self)
            self._strangers[agent] = None
            self._drop_if_broken(agent)
            if len(self._strangers) > MOST_UNKNOWN_AGENTS:
                self.drop(next(iter(self._strangers)), "too many connections sent no hello")

    def _make_room(self) -> None:
        """Close the oldest stranger; without any, accept nothing for a moment."""
        if self._strangers:
            self.drop(next(iter(self._strangers)), "no file descriptor is left for another connection")
        else:
            self.selector.unregister(self._listener)
            self._is_accepting, self._accepts_from_s = False, time.monotonic() + ACCEPT_PAUSE_S

    def _hear(self, agent: AgentConnection) -> Iterator[tuple[AgentConnection, FromAgent]]:
        frames = agent.connection.take()
        if agent in self._by_silence:
            agent.heard_s = self.awake_s
            del self._by_silence[agent]
            self._by_silence[agent] = None
        for frame in frames:
            if agent.is_dropped:
                return
            try:
                message = decoded(frame, FROM_AGENT)
            except BadMessage as problem:
                if not agent.name:  # it knows the secret, and calls again and again unless it is told
                    why = f"the coordinator does not understand this machine's agent ({problem}). {ONE_VERSION}"
                    self.answer(agent, EndRun(exit_code=UserError.exit_code, why=why, error=UserError.__name__))
                self.drop(agent, f"it sent an invalid message: {problem}")
                return
            if isinstance(message, AgentHello) == bool(agent.name):
                self.drop(agent, f"it sent {message.kind} at the wrong time")
                return
            yield agent, message
        self._drop_if_broken(agent)

    def _drop_if_broken(self, agent: AgentConnection) -> None:
        if agent.connection.problem:
            self.drop(agent, agent.connection.problem)

    def _drop_silent(self) -> None:
        while (agent := next(iter(self._by_silence), None)) and self.awake_s - agent.heard_s > LEASE_S:
            self.drop(agent, f"it sent nothing for {LEASE_S:.0f} s")
        while self._returning and self.awake_s - self._slept_at_s > LEASE_S:
            name, why = self._returning.popitem()
            self._left(name, why)
        while (agent := next(iter(self._strangers), None)) and self.awake_s - agent.since_s > HELLO_S:
            self.drop(agent, f"it sent no hello within {HELLO_S:.0f} s")
