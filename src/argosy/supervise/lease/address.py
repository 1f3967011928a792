"""Addresses that other machines can reach: this machine's own, and that of launch.coordinator."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

from argosy.config.address import LeaseUrl
from argosy.config.schema import LaunchConfig
from argosy.errors import UserError
from argosy.processes.connection import Address

KUBERNETES_HOST, KUBERNETES_PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
"""Environment variables of a pod: the API server."""
SLURM_LAUNCHER = "SLURM_LAUNCH_NODE_IPADDR"
"""Environment variable of a task of srun: the machine on which srun runs, which all nodes reach."""
ANY_PORT = 9
"""Nothing is sent there."""


def own_address(launch: LaunchConfig) -> str:
    """Return the address at which others reach this machine: launch.address, or the one from which it reaches the
    lease's backend or the machine of srun, or that of its host name.

    Raises: UserError if that is a loopback address, and the run has several nodes.
    """
    if launch.address:
        return launch.address
    for server in _servers(launch.lease):
        found = _address_towards(server)
        if found and not _is_loopback(found):
            return found
    name = socket.gethostname()
    found = _resolved(name) or "127.0.0.1"
    if _is_loopback(found) and launch.nodes > 1:
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
    host, _, port = launch.coordinator.rpartition(":")
    if launch.nodes == 1 or not host or _is_address(host):
        return
    found = _resolved(host)
    if found and _is_loopback(found):
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


def _address_towards(server: Address) -> str:
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


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
