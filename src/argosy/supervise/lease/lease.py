"""The lease of the coordinator's place: at most one process holds it at a time, and all agents can look up which.

A lease that is not renewed ends, and another may acquire it. So a process may believe that it holds one which has just
ended: it stood still, or its clock is slow. What it does then is stopped by fencing, not by time: a backend lets it
begin a generation only if it still holds the lease at that moment (`Lease.check`), and the run's folder lets nobody
begin one that has begun (`checkpoint.fence`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from argosy.processes.connection import Address

TTL_S = 8.0
"""A lease that was not renewed for this long ends."""
RENEW_S = 1.5
"""How often its holder renews it."""
SAFE_S = 6.0
"""The holder stops after this long without a renewal that was answered, counted from when it asked for that: before the
lease ends, also where two clocks differ by a few percent."""


class LeaseLost(Exception):
    """This process does not hold the lease any more."""


class LeaseUnreachable(Exception):
    """The backend does not answer, or not as it should: nothing is known, and nothing may have been changed."""


@dataclass(frozen=True)
class Holder:
    """A coordinator that holds the lease, or wants to."""

    owner: str
    """Name of the agent that started it, made up by it. An agent has one living coordinator at most."""
    host: str
    port: int

    @property
    def address(self) -> Address:
        """Where agents reach it."""
        return self.host, self.port

    @classmethod
    def parse(cls, text: str) -> Holder:
        """Return the holder that `str` wrote. Raises: Unreachable if it is none."""
        try:
            owner, host, port = text.split()
            return cls(owner, host, int(port))
        except ValueError:
            raise LeaseUnreachable(f"the lease's holder is {text!r}, which argosy has not written") from None

    def __str__(self) -> str:
        return f"{self.owner} {self.host} {self.port}"


class Watched:
    """A holder's record, which changes with each renewal, as another process sees it.

    Clocks of machines are not compared: whoever waits counts by its own clock how long the record has not changed. So
    does Kubernetes' leader election (client-go, tools/leaderelection).
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._since_s = 0.0

    def has_ended(self, record: object) -> bool:
        """Return True if `record`, as it is now, has not changed for `TTL_S` of looking."""
        now_s = time.monotonic()
        if record != self._seen:
            self._seen, self._since_s = record, now_s
        return now_s - self._since_s >= TTL_S


class Lease(Protocol):
    """One backend's lease of one run. Each call may wait for the backend, for seconds; one call at a time.

    An agent acquires it, and hands it to the coordinator that it starts: `token` says what the other process has to
    know to go on holding it. Every method raises Unreachable.
    """

    token: str
    """Empty until this process holds the lease."""

    def holder(self) -> Holder | None:
        """Return the coordinator that holds the lease; None if it is free."""
        ...

    def acquire(self, me: Holder) -> bool:
        """Take the lease if it is free, or held by an earlier coordinator of `me.owner`, which is dead.

        Return True if that succeeded.
        """
        ...

    def renew(self) -> None:
        """Keep the lease for another `TTL_S`. Raises: LeaseLost."""
        ...

    def check(self, generation: int) -> None:
        """Note that this process begins `generation`, if it holds the lease at this moment. Raises: LeaseLost."""
        ...

    def release(self) -> None:
        """Give the lease up, if this process still holds it: it is free at once."""
        ...
