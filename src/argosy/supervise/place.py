"""The place of a run's coordinator, fixed or by a lease, and the address at which others reach this machine.

Nothing here waits: `address` returns None until it is known.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from argosy.checkpoint.fence import name_of
from argosy.config.launch import LaunchConfig, LeaseUrl, host_and_port, is_loopback, read_rank_map
from argosy.errors import UserError
from argosy.observe.events import Events
from argosy.plan.plan import Plan
from argosy.processes.connection import Address
from argosy.supervise.coordinator_client import CoordinatorPlace, CoordinatorProcess, FixedPlace
from argosy.supervise.lease.etcd import EtcdLease
from argosy.supervise.lease.kubernetes import KubernetesLease
from argosy.supervise.lease.lease import TTL_S, FolderLease, Holder, Lease, LeaseLost, LeaseUnreachable

LEASE_LOOK_S = 0.5
"""Time between two looks at the lease by an agent without a coordinator."""
LEASE_DOUBT_S = 3.0
"""A coordinator that does not answer for this long may have lost the lease: it is looked up then."""

T = TypeVar("T")


class LeaseHolder(NamedTuple):
    """The holder of the lease, and the token of the lease if this agent has just acquired it."""

    holder: Holder | None
    token: str


def check_place(launch: LaunchConfig) -> None:
    """Check what can be checked before anything is written. Raises: UserError if this machine cannot take part so."""
    check_coordinator(launch)
    read_rank_map(launch.rank_map)
    if launch.lease:
        _opened(LeaseUrl.parse(launch.lease), Path(), "", "")  # its client is there, and configured
        own_address(launch)


def place_of(run_dir: Path, launch: LaunchConfig, plan: Plan, events: Events) -> CoordinatorPlace:
    """Return the place that the run file says. Raises: UserError if the lease's backend cannot be used here."""
    owner = uuid.uuid4().hex
    process = CoordinatorProcess(run_dir, plan, owner, events, launch.nodes)
    return LeasedPlace(run_dir, launch, process, owner) if launch.lease else FixedPlace(launch, process)


def open_lease(text: str, run_dir: Path, token: str = "") -> Lease:
    """Return the lease of a run; `token`: of the process that has acquired it for this one.

    Raises: UserError if the backend's client is not installed, or not configured.
    """
    return _opened(LeaseUrl.parse(text), run_dir, name_of(run_dir), token)


def _opened(url: LeaseUrl, run_dir: Path, run: str, token: str) -> Lease:
    if url.kind == "etcd":
        return EtcdLease(list(url.endpoints), url.prefix, run, url.is_tls, token)
    if url.kind == "kubernetes":
        return KubernetesLease(url.namespace, url.name, run, token)
    return FolderLease(run_dir, token)


class LeasedPlace:
    """The place of the coordinator that holds the lease.

    An agent that finds the lease free starts a coordinator and gives it the lease."""

    def __init__(self, run_dir: Path, launch: LaunchConfig, process: CoordinatorProcess, owner: str):
        self.process, self._launch, self._owner = process, launch, owner
        self.key = f"launch.lease = {launch.lease}"
        self.name = f"the coordinator of {self.key}"
        self.remedy, self.problem = "Restore it, or the network to it and among the machines.", ""
        self.lease, self._lock = open_lease(launch.lease, run_dir), threading.Lock()
        self._search: Future[LeaseHolder] | None = None
        self._look: Future[Holder | None] | None = None
        self._search_from_s = self._look_from_s = 0.0

    def address(self, now: float) -> Address | None:
        """Look up the holder of the lease. If there is none, or it is one of this agent that died, acquire it."""
        if self._search is None and now >= self._search_from_s:
            self._search = self._in_thread(partial(self._find, self.process.may_start, self.process.is_starting))
        if self._search is None or not self._search.done():
            return None
        (holder, token), self._search = self._answer(self._search, LeaseHolder(None, "")), None
        self._search_from_s = now + LEASE_LOOK_S
        is_here = holder is not None and holder.owner == self._owner
        if token:
            self.process.start(token)
            if self.process.problem:  # the lease ends without it: another machine may have room for one
                self._search_from_s, self.problem = now + TTL_S + 2 * LEASE_LOOK_S, self.process.problem
        elif self.process.is_alive and not is_here and not self.problem:
            self.process.kill()  # it has lost the lease and does not end: perhaps it was stopped
        return None if holder is None or (is_here and not self.process.is_alive) else holder.address

    def reached(self, address: Address) -> None:
        """Do nothing: the lease has numeric addresses."""

    def has_moved(self, now: float, address: Address, silent_s: float) -> bool:
        """Return True if the coordinator at `address`, which has not answered for a while, has lost the lease."""
        if silent_s <= LEASE_DOUBT_S:
            self._look = None  # what was asked in an earlier silence may be about another coordinator
        elif self._look is None and now >= self._look_from_s:
            look = partial(self._holder, self.process.is_starting)
            self._look, self._look_from_s = self._in_thread(look), now + LEASE_LOOK_S
        if self._look is None or not self._look.done():
            return False
        holder, self._look = self._answer(self._look, None), None
        return not self.problem and (holder is None or holder.address != address)

    def _holder(self, is_starting: bool) -> Holder | None:
        """Look up the holder; keep the lease for a coordinator of this agent that is still starting.

        On a busy machine, or from a slow disk, its imports take longer than a lease lasts.
        """
        if is_starting:
            with suppress(LeaseLost):
                self.lease.renew()
        return self.lease.holder()

    def _find(self, may_acquire: bool, is_starting: bool) -> LeaseHolder:
        holder = self._holder(is_starting)
        if not may_acquire or (holder is not None and holder.owner != self._owner):
            return LeaseHolder(holder, "")
        self._listen()
        assert self.process.address is not None
        me = Holder(self._owner, *self.process.address)
        if self.lease.acquire(me):
            return LeaseHolder(me, self.lease.token)
        self.process.close()  # nobody is to call here
        return LeaseHolder(None, "")

    def _listen(self) -> None:
        if self.process.address is not None:
            return
        host, port = own_address(self._launch), self._launch.port
        try:
            self.process.listen((host, port))
        except OSError as problem:
            raise UserError(
                f"launch.address = {host}, launch.port = {port}: the coordinator cannot listen there ({problem}). "
                "Give an address of this machine, and a port that is free, or 0 for any."
            ) from None

    def _answer(self, asked: Future[T], otherwise: T) -> T:
        """Return what the backend has answered; `otherwise` if it does not answer. Raises: UserError."""
        try:
            self.problem = ""
            return asked.result()
        except LeaseUnreachable as problem:
            self.problem = str(problem)
            return otherwise

    def _in_thread(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            try:
                with self._lock:
                    future.set_result(function())
            except Exception as problem:  # whatever it is, the agent must not wait for ever
                future.set_exception(problem)

        try:
            threading.Thread(target=work, name="argosy-lease", daemon=True).start()
        except RuntimeError as problem:  # there can be no more threads
            future.set_exception(LeaseUnreachable(str(problem)))
        return future


KUBERNETES_HOST, KUBERNETES_PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
"""Environment variables of a pod: the API server."""
SLURM_LAUNCHER = "SLURM_LAUNCH_NODE_IPADDR"
"""Environment variable of a task of srun: the machine on which srun runs, which all nodes reach."""
ANY_PORT = 9
"""Port for an address to which nothing is sent."""


def own_address(launch: LaunchConfig) -> str:
    """Return the address at which others reach this machine: launch.address, or the one from which it reaches the
    lease's backend or the machine of srun, or that of its host name.

    Raises: UserError if that is a loopback address, and the run has several nodes.
    """
    if launch.address:
        return launch.address
    for server in _servers(launch.lease):
        found = address_towards(server)
        if found and not is_loopback(found):
            return found
    name = socket.gethostname()
    found = _resolved(name) or "127.0.0.1"
    if is_loopback(found) and launch.nodes > 1:
        raise UserError(
            f"launch.address is not given, and this machine's name {name} resolves to {found}, which other machines "
            "cannot reach. Give launch.address, the address at which they reach this one; 127.0.0.1 if all agents run "
            "on this machine."
        )
    return found


def check_coordinator(launch: LaunchConfig) -> None:
    """Raises: UserError if launch.coordinator is a name that each of several nodes takes for itself.

    Debian's /etc/hosts, for example, has 127.0.1.1 for the machine's own name. An address in figures is meant so: all
    agents run on one machine.
    """
    if launch.nodes == 1 or not launch.coordinator:
        return
    host, port = host_and_port(launch.coordinator)
    if _is_address(host):
        return
    found = _resolved(host)
    if found and is_loopback(found):
        raise UserError(
            f"launch.coordinator = {launch.coordinator}: {host} resolves to {found} on this machine, which other "
            f"machines cannot reach. Give its address on their network in place of the name, or mend /etc/hosts; "
            f"127.0.0.1:{port} if all agents run on this machine."
        )


def _servers(lease: str) -> list[Address]:
    url = LeaseUrl.parse(lease)
    if url.kind == "kubernetes" and (host := os.environ.get(KUBERNETES_HOST)):
        return [(host, int(os.environ.get(KUBERNETES_PORT, "443")))]
    if launcher := os.environ.get(SLURM_LAUNCHER):
        return [*url.endpoints, (launcher, ANY_PORT)]
    return list(url.endpoints)


def address_towards(server: Address) -> str:
    """Return the address of this machine from which packets to `server` go; empty if there is no way to it."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(*server, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as unconnected, suppress(OSError):
                unconnected.connect(address)  # of UDP: nothing is sent
                return str(unconnected.getsockname()[0])
    return ""


def _resolved(name: str) -> str:
    with suppress(OSError):
        return socket.gethostbyname(name)
    return ""


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
