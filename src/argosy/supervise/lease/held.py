"""The coordinator's lease: its backend by the text of launch.lease, and a thread that renews it while it is held."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from argosy.checkpoint.fence import name_of
from argosy.config.launch import LeaseUrl
from argosy.supervise.lease.etcd import EtcdLease
from argosy.supervise.lease.kubernetes import KubernetesLease
from argosy.supervise.lease.lease import RENEW_S, SAFE_S, FolderLease, Lease, LeaseLost, LeaseUnreachable

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
        return _clock_s() < self._valid_until_s

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
        asked_s = _clock_s()
        self._lease.renew()
        self._valid_until_s = asked_s + SAFE_S


def _clock_s() -> float:
    """Return seconds of a clock that goes on while the machine sleeps, as CLOCK_MONOTONIC does not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def open_lease(text: str, run_dir: Path, token: str = "") -> Lease:
    """Return the lease of a run; `token`: of the process that has acquired it for this one.

    Raises: UserError if the backend's client is not installed, or not configured.
    """
    return _opened(LeaseUrl.parse(text), run_dir, name_of(run_dir), token)


def check_lease(text: str) -> None:
    """Raises: UserError if the backend's client is not installed, or not configured. Nothing is asked or written."""
    _opened(LeaseUrl.parse(text), Path(), "", "")


def _opened(url: LeaseUrl, run_dir: Path, run: str, token: str) -> Lease:
    if url.kind == "etcd":
        return EtcdLease(list(url.endpoints), url.prefix, run, url.is_tls, token)
    if url.kind == "kubernetes":
        return KubernetesLease(url.namespace, url.name, run, token)
    return FolderLease(run_dir, token)
