"""What a machine is, apart from its speed: its device's catalogue entry, memory, hosts, software."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch

from argosy.errors import UserError
from argosy.observe.peak import software
from argosy.parallel.world import World
from argosy.plan.hardware.devices import Device, find_device
from argosy.plan.hardware.host_memory import host_memory_bytes
from argosy.plan.hardware.local_machine import device_named


def catalogue_device(kind: str, name: str | None) -> Device:
    """Return the catalogue's entry of the device at hand: it has what no probe can measure (price, power, failures).

    kind: cpu or cuda. name: its name in the catalogue, or a device's file; None asks the driver.
    Raises: UserError if the catalogue does not know what the driver says.
    """
    if name is not None or kind == "cpu":
        return find_device(name or "cpu")
    said = torch.cuda.get_device_name()
    try:
        return find_device(device_named(said))
    except UserError as error:
        raise UserError(
            f"the driver calls the device {said!r}: {error} Say which it is with --device NAME or FILE.toml."
        ) from None


@dataclass(frozen=True)
class Machine:
    """The devices of a world, one for each process."""

    kind: str
    """cpu or cuda."""
    hosts: tuple[str, ...]
    """The host of each process."""
    memory_bytes: float
    """Memory of one device; a CPU's memory is divided among the processes."""
    software: str
    """Versions that speed depends on."""

    @property
    def nodes(self) -> int:
        """The number of hosts."""
        return len(set(self.hosts))

    @property
    def devices_per_node(self) -> int:
        """The number of processes on the node that has fewest."""
        return min(self.hosts.count(host) for host in self.hosts)


def machine_of(world: World) -> Machine:
    """Return the machine that `world` runs on; all its processes call it."""
    hosts = world.gather(socket.gethostname(), str)
    kind = world.device.type
    if kind == "cuda":
        memory_bytes = float(torch.cuda.get_device_properties(world.device).total_memory)
    else:
        memory_bytes = host_memory_bytes() / hosts.count(hosts[world.rank])
    return Machine(kind, tuple(hosts), memory_bytes, software(world.device))
