"""An agent's client of the coordinator: starts it if it runs here, connects to it, notices when it does not answer.

Training goes on without a coordinator, and only its decisions have to wait; so nothing here waits for it.
"""

from __future__ import annotations

import fcntl
import math
import resource
import selectors
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path
from typing import Protocol

from argosy.checkpoint.store import how_to_go_on
from argosy.config.launch import LaunchConfig, host_and_port
from argosy.config.schema import RunConfig
from argosy.errors import Retryable, RunFailed, UserError
from argosy.observe.events import Events
from argosy.plan.plan import Plan
from argosy.processes.child import Child
from argosy.processes.connection import Address, BadMessage, Connection, call, decoded, encoded, listener_of
from argosy.processes.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, client_context, secret_of
from argosy.processes.secret import call as handshake
from argosy.processes.supervisor import RestartPolicy, Restarts
from argosy.supervise.messages import AGENT_BEAT_S, FROM_COORDINATOR, ONE_VERSION, FromAgent, FromCoordinator

COORDINATOR_RESTARTS = RestartPolicy(most_failures=5)
"""If so many coordinators in a row die before they say anything, another would do the same."""
STARTS_APART_S = 2.0
"""Shortest time between two starts: one that speaks, and dies of a full disk, would die of it again at once."""
COORDINATOR = "argosy.supervise.coordinator"
SILENCE_S = 20.0
"""A coordinator on another machine that does not answer for this long is called anew. This is longer than it waits for
an agent: a node that is cut off misses nothing meanwhile."""
HANG_S = 60.0
"""A coordinator on this machine, where no network can fail, is replaced after this long without an answer. It may have
to wait for a disk, or to search for a plan."""
STOPPED_AFTER_S = 2.0
"""If `keep` is called later than this, this process was stopped."""
MOST_UNPROVEN = 3
"""This many times in a row what answered could not prove that it knows the run's secret: it is something else."""
COORDINATOR_AGAIN_S = 0.5
"""Time until it is called again after something else has answered, or hung up before it had proven anything."""
SIOCGIFADDR = 0x8915  # linux/sockios.h
IPV6_INTERFACES = Path("/proc/net/if_inet6")


class CoordinatorProcess:
    """The coordinator that an agent starts, and starts again when it has died.

    It listens on a socket that stays open here: an agent that calls while it is being replaced only has to wait.
    """

    def __init__(self, run_dir: Path, plan: Plan, owner: str, events: Events, nodes: int):
        """`owner`: the agent's name for whatever its coordinators claim. `nodes`: of the run."""
        self._nodes = nodes
        self._run_dir, self._plan, self._owner, self._events = run_dir, plan, owner, events
        self._listener: socket.socket | None = None
        self._child: Child | None = None
        self._was_started = self._is_heard = False
        self._start_from_s = -math.inf
        self._restarts = Restarts(COORDINATOR_RESTARTS)
        self.problem = ""
        """Why the system refused to start it, the last time; empty if it did not."""
        self.address: Address | None = None
        """Address at which it listens; None before `listen`."""

    @property
    def is_alive(self) -> bool:
        """True while it runs."""
        return self._child is not None and self._child.is_alive

    @property
    def is_starting(self) -> bool:
        """True while it runs and has said nothing yet."""
        return self.is_alive and not self._is_heard

    @property
    def may_start(self) -> bool:
        """True if it does not run, and was not started a moment ago."""
        return not self.is_alive and time.monotonic() >= self._start_from_s

    @property
    def has_ended(self) -> bool:
        """True if it was started, and does not run any more."""
        return self._child is not None and not self._child.is_alive

    def listen(self, address: Address) -> None:
        """Open its socket, if it is not open yet. Raises: OSError."""
        if self._listener is None:
            self._listener = listener_of(address)
            self.address = self._listener.getsockname()[:2]

    def start(self, lease: str = "") -> None:
        """Start it; `lease`: the token of the lease that it is to hold. Call `listen` before.

        If the system refuses, `problem` says why: there may be room for it later.
        Raises: RunFailed if several have died before they said anything; UserError if it could not hold connections
        to all nodes.
        """
        check_descriptors(self._nodes)
        assert self._listener is not None and self.address is not None
        descriptor = self._listener.fileno()
        log = self._run_dir / "logs" / "coordinator.log"  # it may outlive this agent: its output must not stay open
        if self._child is not None and self._restarts.ended(made_progress=self._is_heard) is None:
            raise RunFailed(
                f"the coordinator died {self._restarts.failures} times before it said anything: {log} says why"
            )
        self._child, self._start_from_s, self.problem = None, time.monotonic() + STARTS_APART_S, ""
        arguments = (str(self._run_dir), str(descriptor), str(self._plan), self._owner, lease)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as out:
                # It does not end with this agent: others may need it.
                self._child = Child(COORDINATOR, *arguments, pass_fds=[descriptor], stdout=out, stderr=out)
        except OSError as problem:
            self.problem = f"it cannot be started: {problem}"
            return
        self._events.write("coordinator_started", pid=self._child.pid, port=self.address[1], replaces=self._was_started)
        self._was_started, self._is_heard = True, False

    def heard(self) -> None:
        """Note that it has said something: it does not die at once."""
        self._is_heard = True

    def kill(self) -> None:
        """End it, if it runs."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Close its socket here; if it runs, it goes on listening."""
        if self._listener is not None:
            self._listener.close()
            self._listener = self.address = None


class CoordinatorPlace(Protocol):
    """The place of a run's coordinator."""

    process: CoordinatorProcess
    """The coordinator that this agent starts, if it is to start one."""
    key: str
    """The key that says where it is, and its value."""
    name: str
    """Name of the coordinator there in messages."""
    remedy: str
    """Remedy in messages, if it cannot be reached."""

    @property
    def problem(self) -> str:
        """Why there is no address; empty if there is, or nobody has taken the place."""
        ...

    def address(self, now: float) -> Address | None:
        """Return its address; None if there is none yet. Start it first, if it should run here and does not.

        Raises: UserError, RunFailed.
        """
        ...

    def reached(self, address: Address) -> None:
        """Note the numeric address at which it was reached."""
        ...

    def has_moved(self, now: float, address: Address, silent_s: float) -> bool:
        """Return True if the coordinator at `address`, which has not answered for a while, is not the right one."""
        ...


class FixedPlace:
    """The place that launch.coordinator names; without it, this machine."""

    def __init__(self, launch: LaunchConfig, process: CoordinatorProcess):
        self.process, self._launch = process, launch
        self.key = f"launch.coordinator = {launch.coordinator}"
        self.name = f"the coordinator at {launch.coordinator or 'this machine'}"
        self.remedy = "Restore the network, or start `argosy train` there again."
        self._address = host_and_port(launch.coordinator) if launch.coordinator else None
        self._reached_at: Address | None = None

    def address(self, now: float) -> Address | None:
        """Return its address, and start the coordinator if that is one of this machine."""
        if self.process.address is None:
            self._listen()
        if self.process.address is None:
            return self._address
        if self.process.may_start:
            self.process.start()
        return self.process.address if self.process.is_alive else None

    @property
    def problem(self) -> str:
        """Why it could not be started here."""
        return self.process.problem

    def reached(self, address: Address) -> None:
        """Note the numeric address: resolving a name takes long when the network is down."""
        self._reached_at = address

    def has_moved(self, now: float, address: Address, silent_s: float) -> bool:
        """Return False: it stays where it is."""
        return False

    def _listen(self) -> None:
        address = self._reached_at or self._address or ("127.0.0.1", self._launch.port)
        try:
            self.process.listen(address)
        except OSError as problem:
            if self._address is not None:  # another machine's address, or another agent of this machine was faster
                return
            raise UserError(
                f"launch.port = {address[1]} is in use on this machine. Try launch.port = 0, which takes a free one."
            ) from problem


class CoordinatorClient:
    """The connection to the coordinator of a run, whichever process that is at the moment."""

    def __init__(self, run_dir: Path, run: RunConfig, place: CoordinatorPlace, events: Events):
        self._run_dir, self._launch, self._place, self._events = run_dir, run.launch, place, events
        self._patience_s = run.resilience.coordinator_timeout_s
        self._connection: Connection | None = None
        self._secret, self._tls = secret_of(run_dir), client_context(run_dir, run.launch)
        self._strangers, self._call_from_s = 0, 0.0
        self._was_heard = False
        """True once a coordinator has said something."""
        self._has_answered = False
        """True once that on this connection has."""
        self._address: Address | None = None
        """The address of the coordinator that is called, or connected."""
        self._call: Future[socket.socket] | None = None
        self._asked_s: float | None = None
        self._last_asked_s = 0.0
        self._lost_since: float | None = None
        self.ask_s = AGENT_BEAT_S
        """Time between two questions to it."""
        self._kept_s = math.inf
        self.is_ending = False
        """True once the run is to end: a coordinator that is gone then is not missed."""
        self.host = ""
        """This machine's address, as seen from there."""
        self.interface = ""
        """The network interface that leads to it, by name."""

    def open(
        self,
        selector: selectors.BaseSelector,
        greet: Callable[[str], None],
        obey: Callable[[FromCoordinator], None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Call `greet` with this machine's address whenever the coordinator was reached, and `obey` with each message.
        Both happen when `selector` reports the connection. say: told when the coordinator is lost."""
        self._selector, self._greet, self._obey, self._say = selector, greet, obey, say

    def keep(self, now: float) -> bool:
        """Do what is due; call this all the time. Return True if it is time to `ask`.

        Raises: Retryable if it could not be reached for resilience.coordinator_timeout_s; RunFailed if it dies at
        each start; UserError if its port is in use.
        """
        slept_s, self._kept_s = now - self._kept_s, now
        if self._asked_s is not None and slept_s > STOPPED_AFTER_S:
            self._asked_s += slept_s  # this process was stopped, and could hear no answer
        if self._connection is None:
            self._reach(now)
        elif self.is_ours and self._place.process.has_ended:
            self._lose("its process has ended")
        elif self._asked_s is not None:  # messages must not pile up while it does not answer
            self._check_silence(now, now - self._asked_s)
        else:
            return now - self._last_asked_s > self.ask_s
        return False

    def ask(self, now: float, message: FromAgent) -> None:
        """Send it a message that it has to answer."""
        self._last_asked_s = self._asked_s = now
        self.tell(message)

    def tell(self, message: FromAgent) -> None:
        """Send it a message, if it can be reached."""
        if self._connection is not None and self._connection.is_proven:
            self._connection.send(encoded(message))  # `_hear` finds out if that fails

    def close(self) -> None:
        """Disconnect. A coordinator that was started here ends, unless other machines may still need it."""
        if self._connection is not None:
            self._connection.close()
        if self._launch.nodes == 1 and not self._launch.lease:
            self._place.process.kill()  # else it ends once all agents have left
        self._place.process.close()

    @property
    def is_ours(self) -> bool:
        """True if the coordinator that is called, or connected, is the one that this agent has started."""
        return self._address is not None and self._address == self._place.process.address

    def _check_silence(self, now: float, silent_s: float) -> None:
        """Give up a coordinator that does not answer, and end one of this agent's."""
        assert self._address is not None
        limit_s = HANG_S if self.is_ours and self._place.process.is_alive else SILENCE_S
        if silent_s > limit_s:
            self._check_patience(now)
            self._lose(f"it did not answer for {limit_s:.0f} s")
            if limit_s == HANG_S:
                self._place.process.kill()
        elif self._place.has_moved(now, self._address, silent_s):
            self._lose("it has lost the lease")

    def _reach(self, now: float) -> None:
        """Call the coordinator, and start it first if it should run here and does not. Repeat this until it answers."""
        self._lost_since = self._lost_since or now
        if now < self._call_from_s:
            return
        if self._call is None:
            self._address = self._place.address(now)
            if self._address is None:
                self._check_patience(now)
                return
            self._call = call(self._address)
        if not self._call.done():
            return
        answered, self._call = self._call, None
        try:
            self._reached(answered.result(), now)
        except OSError:
            self._check_patience(now)

    def _reached(self, connected: socket.socket, now: float) -> None:
        """Use a connection. Raises: OSError if the other end has cut it already."""
        try:
            address, host = connected.getpeername()[:2], connected.getsockname()[0]
        except OSError:
            connected.close()
            raise
        connection = Connection(connected, handshake(self._secret), self._selector, self._hear, self._tls)
        if connection.problem:
            connection.close()
            raise ConnectionError(connection.problem)
        self._place.reached(address)
        self.host, self.interface = host, _interface_of(host)
        self._asked_s, self._connection, self._has_answered = now, connection, False

    def _check_patience(self, now: float) -> None:
        problem = self._place.problem
        if self._lost_since is not None and now - self._lost_since > self._patience_s and not self.is_ending:
            raise Retryable(
                f"{self._place.name} could not be reached for {self._patience_s:g} s "
                f"(resilience.coordinator_timeout_s){f': {problem}' if problem else ''}. {self._place.remedy} "
                + how_to_go_on(self._run_dir)
            )

    def _lose(self, why: str) -> None:
        connection = self._connection
        assert connection is not None
        connection.close()
        self._connection, self._lost_since = None, self._lost_since or self._asked_s
        if not self._has_answered:
            self._call_from_s = time.monotonic() + COORDINATOR_AGAIN_S
        if connection.is_proven and not self.is_ending:
            self._events.write("coordinator_lost", why=why)
            self._say(f"the coordinator is lost: {why}. Another one is looked for; training waits if it lost a node")

    def _hear(self) -> None:
        connection = self._connection
        assert connection is not None
        was_proven = connection.is_proven
        frames = connection.take()
        if connection.is_proven and not was_proven:
            self._strangers = 0
            self._greet(self.host)
        try:
            messages = [decoded(frame, FROM_COORDINATOR) for frame in frames]
        except BadMessage as problem:
            self._lose(f"it sent an invalid message: {problem}")
            if self._was_heard:
                return
            why = f"this machine's agent does not understand the coordinator ({problem}). {ONE_VERSION}"
            raise UserError(f"{self._place.key}: {why}") from None
        if messages:
            self._asked_s, self._lost_since, self._was_heard, self._has_answered = None, None, True, True
            if self.is_ours:
                self._place.process.heard()
        for message in messages:
            self._obey(message)
        if connection.problem:
            self._lose(connection.problem)
            if not connection.is_proven:
                self._not_reached(connection)

    def _not_reached(self, connection: Connection) -> None:
        """Something answered, and was not the coordinator. Give up if it does not know the secret, and never did."""
        now = time.monotonic()
        self._strangers, self._call_from_s = self._strangers + connection.is_stranger, now + COORDINATOR_AGAIN_S
        self._check_patience(now)
        if self._strangers >= MOST_UNPROVEN and not self._was_heard:
            raise UserError(
                f"{self._place.key}: {connection.problem}. If it is another run's, give "
                "this one a port of its own; if it is this run's, its --run-dir has to be on storage that all machines "
                f"see, or {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE} the same on all of them."
            )


def _interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; empty if none does."""
    if ":" in address:
        return _interface_of_ipv6(IPv6Address(address))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _interface_of_ipv6(address: IPv6Address) -> str:
    with suppress(OSError):  # a kernel without IPv6, or no Linux
        for line in IPV6_INTERFACES.read_text().splitlines():
            digits, *_, name = line.split()
            if IPv6Address(int(digits, 16)) == address:
                return name
    return ""


OTHER_DESCRIPTORS = 64
"""Descriptors of a coordinator besides a connection to each agent: log, events, planner, some that call."""


def check_descriptors(nodes: int) -> None:
    """Raises: UserError if a coordinator that is started here could not have a connection to each of so many nodes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nodes + OTHER_DESCRIPTORS
    if most != resource.RLIM_INFINITY and most < needed:
        raise UserError(
            f"launch.nodes = {nodes}: the coordinator needs {needed} file descriptors, and this machine lets a process "
            f"have {most} (ulimit -Hn). Raise that (LimitNOFILE in systemd, nofile in /etc/security/limits.conf), or "
            "name another machine in launch.coordinator."
        )
