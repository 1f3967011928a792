"""The lease of the coordinator's place: at most one process holds it at a time, and all agents can look up which.

A lease that is not renewed ends, and another may acquire it. So a process may believe that it holds one which has just
ended: it stood still, or its clock is slow. What it does then is stopped by fencing, not by time: a backend lets it
begin a generation only if it still holds the lease at that moment (`Lease.check`), and the run's folder lets nobody
begin one that has begun (`checkpoint.fence`). `FolderLease` is the backend that needs no service, and
`HeldLease` the thread that renews a lease while it is held.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from argosy.checkpoint.fence import Claims, NumberTaken
from argosy.processes.connection import Address

TTL_S = 8.0
"""A lease that was not renewed for this long ends."""
RENEW_S = 1.5
"""Time between two renewals by its holder."""
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
        """Address at which agents reach it."""
        return self.host, self.port

    @classmethod
    def parse(cls, text: str) -> Holder:
        """Return the holder that `str` wrote. Raises: LeaseUnreachable if it is none."""
        try:
            owner, host, port = text.split()
            return cls(owner, host, int(port))
        except ValueError:
            raise LeaseUnreachable(f"the lease's holder is {text!r}, which argosy has not written") from None

    def __str__(self) -> str:
        return f"{self.owner} {self.host} {self.port}"


class ObservedHolder:
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
    know to go on holding it. Every method raises LeaseUnreachable.
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


LEASE_FOLDER = ".coordinators"


class FolderLease:
    """A `Lease` in the run's folder; its token is a claim's number."""

    def __init__(self, run_dir: Path, token: str):
        self._folder = run_dir / LEASE_FOLDER
        self._claims = Claims(self._folder)
        self.token, self._renewals = token, 0
        self._watched = ObservedHolder()

    def holder(self) -> Holder | None:
        """Return the coordinator that holds the lease; None if it is free, or was not renewed in `TTL_S` of looking."""
        _, text = self._newest()
        return Holder.parse(text) if text else None

    def acquire(self, me: Holder) -> bool:
        number, text = self._newest()
        if text and Holder.parse(text).owner != me.owner:
            return False
        try:
            with _reachable():
                self._claims.take(number + 1, str(me))
                self._renewal(number).unlink(missing_ok=True)
        except NumberTaken:
            return False
        self.token = str(number + 1)
        return True

    def renew(self) -> None:
        self.check(0)
        self._renewals += 1
        path = self._renewal(int(self.token))
        # Over the number before, which is no longer: a disk that is full by now may have no room for it elsewhere.
        with _reachable(), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.write(str(self._renewals).encode())

    def check(self, generation: int) -> None:
        """Raises: LeaseLost if another has taken the lease. Which generation begins is noted by the fence alone."""
        with _reachable():
            if not self._claims.owner(int(self.token)):
                raise LeaseLost(f"another coordinator has taken the lease in {self._folder}")

    def release(self) -> None:
        with _reachable():
            self._claims.give_up(int(self.token))

    def _newest(self) -> tuple[int, str]:
        """Return the newest number, and what its holder has written; "" if it gave the lease up or let it end."""
        with _reachable():
            number = self._claims.newest()
            text = self._claims.owner(number) if number else ""
            path = self._renewal(number)
            has_ended = self._watched.has_ended((text, path.read_text() if path.exists() else ""))
        return number, "" if has_ended else text

    def _renewal(self, number: int) -> Path:
        return self._folder / f"renewed-{number:08d}"


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise LeaseUnreachable(str(problem)) from None


RENEW_AGAIN_S = 0.2
"""Time until an unreachable backend is asked again."""


class HeldLease:
    """Holds a lease that was acquired for this process, until it is lost, cannot be renewed, or `end` gives it up.

    A thread renews it, so that a coordinator that searches for a plan keeps its place; its agent replaces one that
    does not come back from that.
    """

    def __init__(self, lease: Lease):
        """Raises: LeaseLost, LeaseUnreachable if the lease cannot be renewed now."""
        self._lease, self._lock = lease, threading.Lock()
        self._ends, self._valid_until_s, self.problem = threading.Event(), 0.0, ""
        """problem: why it could not be renewed, the last time."""
        self._renew()
        threading.Thread(target=self._keep, name="argosy-lease", daemon=True).start()

    @property
    def is_held(self) -> bool:
        """True while no other can have the lease, as far as this machine's clock tells."""
        return clock_s() < self._valid_until_s

    def check(self, generation: int) -> None:
        """Note that this process begins `generation`; wait for a backend that does not answer while the lease lasts.

        Raises: LeaseLost.
        """
        while self.is_held:
            try:
                with self._lock:
                    self._lease.check(generation)
                return
            except LeaseUnreachable as problem:
                self.problem = str(problem)
                time.sleep(RENEW_AGAIN_S)
        raise LeaseLost(self.problem or "it was not renewed in time")

    def end(self) -> None:
        """Give the lease up, so that another can have it at once."""
        self._ends.set()
        with self._lock:
            is_held, self._valid_until_s = self.is_held, 0.0
            if is_held:
                try:
                    self._lease.release()
                except (LeaseLost, LeaseUnreachable) as problem:  # it ends by itself
                    self.problem = str(problem)

    def _keep(self) -> None:
        wait_s = RENEW_S
        while not self._ends.wait(wait_s):
            wait_s = RENEW_S
            try:
                with self._lock:
                    if not self.is_held:
                        return
                    self._renew()
            except LeaseLost as problem:
                self.problem, self._valid_until_s = str(problem), 0.0
                return
            except LeaseUnreachable as problem:
                self.problem, wait_s = str(problem), RENEW_AGAIN_S

    def _renew(self) -> None:
        asked_s = clock_s()
        self._lease.renew()
        self._valid_until_s = asked_s + SAFE_S


def clock_s() -> float:
    """Return seconds of a clock that goes on while the machine sleeps, as CLOCK_MONOTONIC does not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
