"""The backends of the lease, by the text of launch.lease."""

from __future__ import annotations

from pathlib import Path

from argosy.checkpoint.owner import name_of
from argosy.config.address import LeaseUrl
from argosy.supervise.lease.etcd import EtcdLease
from argosy.supervise.lease.folder import FolderLease
from argosy.supervise.lease.kubernetes import KubernetesLease
from argosy.supervise.lease.lease import Lease


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
