"""The coordinator's process and its socket, for the agent that starts it."""

from __future__ import annotations

import socket
from pathlib import Path

from argosy.errors import RunFailed
from argosy.observe.events import Events
from argosy.plan.plan import Plan
from argosy.processes.child import Child
from argosy.processes.connection import Address
from argosy.supervise.descriptors import check_descriptors

MOST_FAILED_STARTS = 5
"""This many coordinators in a row died before they said anything: another would do the same."""
COORDINATOR = "argosy.supervise.coordinator"


class CoordinatorProcess:
    """The coordinator that an agent starts, and starts again when it has died.

    It listens on a socket that stays open here: an agent that calls while it is being replaced only has to wait.
    """

    def __init__(self, run_dir: Path, plan: Plan, owner: str, events: Events, nodes: int = 1):
        """`owner`: the agent's name for whatever its coordinators claim. `nodes`: of the run."""
        self._nodes = nodes
        self._run_dir, self._plan, self._owner, self._events = run_dir, plan, owner, events
        self._listener: socket.socket | None = None
        self._child: Child | None = None
        self._was_started = self._is_heard = False
        self._failed_starts = 0
        self.address: Address | None = None
        """Where it listens; None before `listen`."""

    @property
    def is_alive(self) -> bool:
        """True while it runs."""
        return self._child is not None and self._child.is_alive

    @property
    def has_ended(self) -> bool:
        """True if it was started, and does not run any more."""
        return self._child is not None and not self._child.is_alive

    def listen(self, address: Address) -> None:
        """Open its socket, if it is not open yet. Raises: OSError."""
        if self._listener is None:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._listener = socket.create_server(address, family=family)
            self.address = self._listener.getsockname()[:2]

    def start(self, lease: str = "") -> None:
        """Start it; `lease`: the token of the lease that it is to hold. Call `listen` before.

        Raises: RunFailed if several have died before they said anything; UserError if it could not hold connections
        to all nodes.
        """
        check_descriptors(self._nodes)
        assert self._listener is not None and self.address is not None
        descriptor = self._listener.fileno()
        log = self._run_dir / "logs" / "coordinator.log"  # it may outlive this agent: its output must not stay open
        self._failed_starts = self._failed_starts + 1 if self._was_started and not self._is_heard else 0
        if self._failed_starts == MOST_FAILED_STARTS:
            raise RunFailed(f"the coordinator died {self._failed_starts} times before it said anything: {log} says why")
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = (str(self._run_dir), str(descriptor), str(self._plan), self._owner, lease)
        with log.open("ab") as out:
            # It does not end with this agent: others may need it.
            self._child = Child(COORDINATOR, *arguments, pass_fds=[descriptor], stdout=out, stderr=out)
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
