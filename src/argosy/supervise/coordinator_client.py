"""An agent's client of the coordinator: starts it where it should run, connects to it, notices when it does not answer.

Training goes on without a coordinator, and only its decisions have to wait; so nothing here waits for it.
"""

from __future__ import annotations

import fcntl
import selectors
import socket
import struct
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.checkpoint.store import how_to_go_on
from argosy.config.schema import RunConfig
from argosy.errors import Retryable, RunFailed, UserError
from argosy.observe.events import Events
from argosy.plan.plan import Plan
from argosy.processes.channel import Address, Channel, Gone, Message, call
from argosy.processes.child import Child

ASK_S = 0.5
"""How often the coordinator is asked for an answer, if only to learn that it is there."""
SILENCE_S = 20.0
"""A coordinator on another machine that does not answer for this long is called anew. This is longer than it waits for
an agent: a node that is cut off misses nothing meanwhile."""
HANG_S = 60.0
"""A coordinator on this machine, where no network can fail, is replaced after this long without an answer. It may have
to wait for a disk, or to search for a plan."""
MOST_FAILED_STARTS = 5
"""This many coordinators in a row died before they said anything: another would do the same."""
COORDINATOR = "argosy.supervise.coordinator"
SIOCGIFADDR = 0x8915  # linux/sockios.h


class CoordinatorClient:
    """The connection to the coordinator of a run, whichever process that is at the moment."""

    def __init__(self, run_dir: Path, run: RunConfig, plan: Plan, events: Events):
        self._run_dir, self._launch, self._plan, self._events = run_dir, run.launch, plan, events
        self._patience_s = run.resilience.coordinator_timeout_s
        self._channel: Channel | None = None
        self._server: Child | None = None
        self._is_heard = False
        self._failed_starts = 0
        self._listener: socket.socket | None = None
        self._address = _parsed(self._launch.coordinator)
        self._bound_to: Address | None = None
        self._call: Future[socket.socket] | None = None
        self._asked_s: float | None = None
        self._last_asked_s = 0.0
        self._lost_since: float | None = None
        self.is_ending = False
        """True once the run is to end: a coordinator that is gone then is not missed."""
        self.interface = ""
        """The network interface that leads to it, by name."""

    def open(
        self, selector: selectors.BaseSelector, greet: Callable[[str], None], obey: Callable[[str, Message], None]
    ) -> None:
        """Call `greet` with this machine's address whenever the coordinator was reached, and `obey` with each order and
        its facts. Both happen when `selector` reports the connection."""
        self._selector, self._greet, self._obey = selector, greet, obey

    def keep(self, now: float) -> bool:
        """Do what is due; call this all the time. Return True if it is time to `ask`.

        Raises: Retryable if it could not be reached for resilience.coordinator_timeout_s; RunFailed if it dies at
        each start; UserError if its port is in use.
        """
        if self._channel is None:
            self._reach(now)
        elif self._server is not None and not self._server.is_alive:
            self._start()  # a call that nobody answers yet goes through all the same
        elif self._asked_s is not None and now - self._asked_s > (limit_s := HANG_S if self._server else SILENCE_S):
            self._check_patience(now)
            self._lose(f"it did not answer for {limit_s:.0f} s")
            if self._server is not None:
                self._server.kill()
        else:  # messages must not pile up while it does not answer
            return self._asked_s is None and now - self._last_asked_s > ASK_S
        return False

    def ask(self, now: float, kind: str, **facts: Any) -> None:
        """Send it a message that it has to answer."""
        self._last_asked_s = self._asked_s = now
        self.tell(kind, **facts)

    def tell(self, kind: str, **facts: Any) -> None:
        """Send it a message, if it can be reached."""
        if self._channel is not None:
            with suppress(Gone):  # `_hear` finds out
                self._channel.send(kind, **facts)

    def close(self) -> None:
        """Disconnect. A coordinator that was started here ends, unless other machines may still need it."""
        if self._channel is not None:
            self._channel.close()
        if self._server is not None and self._launch.nodes == 1:
            self._server.kill()  # with several nodes it ends once all agents have left
        if self._listener is not None:
            self._listener.close()

    def _reach(self, now: float) -> None:
        """Call the coordinator, and start it first if it should run here and does not. Repeat this until it answers."""
        self._lost_since = self._lost_since or now
        if self._call is None:
            self._start()
            assert self._address is not None
            self._call = call(self._address)
        if not self._call.done():
            return
        answered, self._call = self._call, None
        if answered.exception() is None:
            self._reached(answered.result(), now)
        else:
            self._check_patience(now)

    def _reached(self, connection: socket.socket, now: float) -> None:
        host = connection.getsockname()[0]
        self.interface, self._bound_to = _interface_of(host), connection.getpeername()[:2]
        self._channel, self._asked_s = Channel(connection), now
        self._selector.register(self._channel, selectors.EVENT_READ, self._hear)
        self._greet(host)

    def _check_patience(self, now: float) -> None:
        if self._lost_since is not None and now - self._lost_since > self._patience_s and not self.is_ending:
            raise Retryable(
                f"the coordinator at {self._launch.coordinator} could not be reached for {self._patience_s:g} s "
                "(resilience.coordinator_timeout_s). Restore the network, or start `argosy train` there again. "
                + how_to_go_on(self._run_dir)
            )

    def _lose(self, why: str) -> None:
        assert self._channel is not None
        self._selector.unregister(self._channel)
        self._channel.close()
        self._channel, self._lost_since = None, self._lost_since or self._asked_s
        if not self.is_ending:
            self._events.write("coordinator_lost", why=why)

    def _hear(self) -> None:
        assert self._channel is not None
        try:
            messages = self._channel.take()
        except Gone as problem:
            self._lose(str(problem))
            return
        self._asked_s, self._lost_since, self._is_heard = None, None, True
        for message in messages:
            self._obey(message.pop("kind"), message)

    def _start(self) -> None:
        """Start the coordinator if it should run on this machine, and again if it has died.

        It listens on a socket that stays open here: an agent that calls while it is being replaced only has to wait.
        """
        self._listener = self._listener or self._open_listener()
        if self._listener is None or (self._server is not None and self._server.is_alive):
            return
        assert self._address is not None
        replaces, descriptor = self._server is not None, self._listener.fileno()
        log = self._run_dir / "logs" / "coordinator.log"  # it may outlive this agent: its output must not stay open
        self._failed_starts = self._failed_starts + 1 if replaces and not self._is_heard else 0
        if self._failed_starts == MOST_FAILED_STARTS:
            raise RunFailed(f"the coordinator died {self._failed_starts} times before it said anything: {log} says why")
        self._is_heard = False
        arguments = (str(self._run_dir), str(descriptor), str(self._plan))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            # It does not end with this agent: others may need it.
            self._server = Child(COORDINATOR, *arguments, pass_fds=[descriptor], stdout=out, stderr=out)
        self._events.write("coordinator_started", pid=self._server.pid, port=self._address[1], replaces=replaces)

    def _open_listener(self) -> socket.socket | None:
        """A socket for the coordinator; None if it is to be on another machine."""
        # Prefer the numeric address at which it was reached: resolving its name takes long when the network is down.
        address = self._bound_to or self._address or ("127.0.0.1", self._launch.port)
        try:
            listener = socket.create_server(address)
        except OSError as problem:
            if self._address is not None:  # another machine's address, or another agent of this machine was faster
                return None
            raise UserError(
                f"launch.port = {address[1]} is in use on this machine. Try launch.port = 0, which takes a free one."
            ) from problem
        self._address = listener.getsockname()[:2]
        return listener


def _parsed(text: str) -> Address | None:
    if not text:
        return None
    host, _, port = text.rpartition(":")
    return host, int(port)


def _interface_of(address: str) -> str:
    """Return the name of the network interface that has an IPv4 address; empty if none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
