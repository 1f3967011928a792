"""A cluster: groups of nodes, the network from a node outwards, sites joined by slow links, and what running it costs.

It is written as NxDEVICE, as the name of a preset, or as a file:

    name = "two-generations"
    software = "torch 2.13, nccl 2.27"

    [[groups]]
    device = "h100"               # a name in the catalogue, the path of a device's file, or a table
    nodes = 32

    [[groups]]
    device = "a100"
    nodes = 16
    nic_bytes_per_s = 12.5e9      # of one device; the default is the catalogue's

    [[network]]                   # outside the node, inner tiers first; default: one tier as fast as the NICs
    name = "leaf"
    devices = 256
    bandwidth_bytes_per_s = 50e9  # of one device
    latency_s = 8e-6

In place of `network`, a table `topology` says how the nodes are joined (`plan.hardware.topology`).
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from argosy.config.dump import dump
from argosy.config.layers import Source, preset_names, preset_path, table_layer
from argosy.config.lines import read_toml
from argosy.config.load import build
from argosy.config.section import Section
from argosy.errors import UserError, near_names
from argosy.files import atomic_write, expanded
from argosy.plan.hardware.devices import Device, device_names, find_device, is_path
from argosy.plan.hardware.measurements import Measurements
from argosy.plan.hardware.topology import Topology, hosts_of

STORAGE_BYTES_PER_S_PER_DEVICE = 2e12 / 16_384
"""Llama 3 had a file system of 2 TB/s sustained for 16,384 GPUs (Dubey et al. 2024, section 3.3.1)."""

MOST_CLUSTER_DEVICES = 2**20
"""Larger clusters are not known, and ways to cut so many devices take long to count."""

Category = Literal["compute", "network", "optimizer", "rest", "memory"]
"""Calibration factors: each corrects a part of a step's time, or memory beyond the state of the model."""


class NetworkTier(Section):
    """One level of the network. It joins the units of the level below."""

    name: str
    """node, leaf, spine, site, ..."""
    devices: PositiveInt
    """Devices in one unit of this level."""
    bandwidth_bytes_per_s: PositiveFloat
    """Bandwidth of one device into this level when all send at once, one direction, before oversubscription."""
    latency_s: PositiveFloat
    """Latency of a message between two devices whose paths meet at this level."""
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    """Bandwidth below this level over bandwidth through it."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that one device has when all send at once."""
        return self.bandwidth_bytes_per_s / self.oversubscription


class Factor(Section):
    """Measured over predicted time (or bytes) of one category, as finished runs found it."""

    value: PositiveFloat
    """Predictions are multiplied by this."""
    std: NonNegativeFloat
    """Standard error of `value`."""


class SiteLink(Section):
    """A slow link between two sites."""

    sites: Annotated[tuple[str, str], BeforeValidator(lambda ends: tuple(ends) if isinstance(ends, list) else ends)]
    """The two sites that it joins."""
    bandwidth_bytes_per_s: PositiveFloat
    """Total bandwidth, one direction; the devices of a site share it."""
    latency_s: PositiveFloat
    """Latency of one way."""


def _as_device(value: object) -> object:
    """Find the device of a name, or read one from a table."""
    try:
        if isinstance(value, str):
            return find_device(value)
        return Device.of_table(value, Source("")) if isinstance(value, dict) else value
    except UserError as error:
        raise ValueError(str(error).rstrip(".")) from None


def _as_written(device: Device) -> object:
    """Return the name under which the catalogue has this very device, else all of the device."""
    name = device.name.lower()
    known = name in device_names() and find_device(name) == device
    return device.name if known else device.model_dump(mode="json", exclude_none=True)


class NodeGroup(Section):
    """Nodes that are alike. The fast link joins the devices of a node: a machine, or an NVLink domain of several."""

    device: Annotated[Device, BeforeValidator(_as_device), PlainSerializer(_as_written)]
    """A name in the catalogue, the path of a device's file, or a table of its keys."""
    nodes: PositiveInt
    """Number of nodes."""
    devices_per_node: PositiveInt = Field(default_factory=lambda given: given["device"].devices_per_node)
    """Devices of one node; default: as in the catalogue."""
    link_bytes_per_s: PositiveFloat = Field(default_factory=lambda given: given["device"].link_bytes_per_s)
    """Bandwidth of one device to the others of its node, one direction."""
    nic_bytes_per_s: PositiveFloat = Field(default_factory=lambda given: given["device"].nic_bytes_per_s)
    """Share of one device in its node's network bandwidth, one direction."""
    site: str = "here"
    """Site of the nodes."""

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


class Cluster(Section):
    """The machines that a job can run on."""

    name: str = ""
    """Name, for people."""
    groups: tuple[NodeGroup, ...]
    """Groups of nodes; ranks are laid over them in this order."""
    network: tuple[NetworkTier, ...] = ()
    """Network tiers outside the node, inner first; none: one tier, as fast as the NICs."""
    topology: Topology | None = None
    """Topology of the nodes of a site; none: as `network` says."""
    links: tuple[SiteLink, ...] = ()
    """Links between sites."""
    storage_bytes_per_s: PositiveFloat = Field(
        default_factory=lambda given: STORAGE_BYTES_PER_S_PER_DEVICE * sum(g.devices for g in given["groups"])
    )
    """Rate at which all nodes together write checkpoints; default: 122 MB/s for each device."""
    pue: Annotated[float, Field(ge=1)] = 1.2
    """Power of the building over power of the computers (Uptime Institute 2024: 1.56 on average; hyperscalers 1.1)."""
    grid_kg_per_kwh: NonNegativeFloat = 0.445
    """CO2 of the electricity; the world's average in 2024 (IEA, Electricity 2025)."""
    price_per_device_h: PositiveFloat | None = None
    """Price that you pay for an hour of one device; none: the catalogue's range, in USD."""
    currency: str = "USD"
    """Currency of price_per_device_h."""
    software: str = ""
    """Software versions that the factors hold for."""
    factors: dict[Category, Factor] = Field(default_factory=dict)
    """Calibration factors, by category; `argosy plan --learn` writes them."""
    serving: dict[str, Factor] = Field(default_factory=dict)
    """Factors on constants of serving; `argosy plan --learn FILE.csv` writes them."""
    serving_engine: str = ""
    """Engine that they hold for."""
    measured: Measurements | None = None
    """Measurements of `argosy probe` beyond the devices' figures; none: there was no probe."""
    measured_at: dict[str, Measurements] = Field(default_factory=dict)
    """Site -> the same of its machine, which `argosy probe --site` gathers: alike in the files of all sites."""

    @field_validator("groups")
    @classmethod
    def _has_nodes(cls, groups: tuple[NodeGroup, ...]) -> tuple[NodeGroup, ...]:
        if not groups:
            raise ValueError("a cluster needs at least one, with device and nodes")
        return groups

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if (devices := self.devices) > (most := MOST_CLUSTER_DEVICES):
            raise ValueError(
                f"groups have {devices:,} devices, more than {most:,}; give fewer nodes or devices_per_node"
            )
        joined = {site for link in self.links for site in link.sites}
        if strangers := joined - self.sites.keys():
            raise ValueError(f"links names the site {min(strangers)!r}, and groups has {', '.join(self.sites)}")
        if alone := [site for site in self.sites if len(self.sites) > 1 and site not in joined]:
            raise ValueError(
                f"links joins nothing to the site {alone[0]!r}; add [[links]] with sites = [...] and its speed"
            )
        sizes = [self.devices_per_node, *(tier.devices for tier in self.network)]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"network must hold more devices from tier to tier, and has {sizes}, the node's first")
        if self.network and sizes[-1] < self.site_devices:
            raise ValueError(
                f"network ends in a tier of {sizes[-1]} devices, and a site has {self.site_devices}; "
                "add a tier that holds them all"
            )
        if self.topology is not None:
            self._check_topology(self.topology)
        if self.currency != "USD" and self.price_per_device_h is None:
            raise ValueError(
                f"currency is {self.currency}, and the catalogue's prices are in USD; add price_per_device_h"
            )
        return self

    def _check_topology(self, topology: Topology) -> None:
        if self.network:
            raise ValueError("topology and network are both given, and each says how nodes are joined; remove network")
        alike = len({group.devices_per_node for group in self.groups}) == 1 == len(set(self.sites.values()))
        topology.check(self.site_devices, self.devices_per_node, alike)
        memory = min(group.device.memory_bytes_per_s for group in self.groups)
        if topology.is_torus and (topology.link_bytes_per_s or 0.0) > memory:
            raise ValueError(
                f"topology.link_bytes_per_s = {topology.link_bytes_per_s:g} is more than the memory's {memory:g} "
                "bytes/s, which all that it sends comes from; give bytes/s, not bits/s, one way"
            )
        names = tuple(hosts_of(topology.hosts))
        machines = self.machines
        if names and len(names) != machines:
            raise ValueError(f"topology.hosts has {len(names)} names, and groups have {machines} machines; name each")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f'topology.hosts has "{twice}" twice; name each machine once')

    @cached_property
    def slowest(self) -> NodeGroup:
        """The group whose device has the slowest matmuls; the first one if several are equal."""
        return min(self.groups, key=lambda group: group.device.best_flops_per_s)

    @property
    def device(self) -> Device:
        """The slowest device: a job whose work is dealt out evenly waits for it."""
        return self.slowest.device

    def check_precision(self, precision: str, has_experts: bool) -> None:
        """Raise UserError if a device has no matmuls in a plan's precision. CPUs compute any format, some slowly."""
        for device in (group.device for group in self.groups):
            if device.kind != "cpu" and (problem := device.why_not_in(precision, has_experts)) is not None:
                raise UserError(problem)

    @property
    def uniform(self) -> bool:
        """True if all nodes are alike, at whatever site."""
        first = self.groups[0]
        return all(
            group.model_copy(update={"nodes": first.nodes, "site": first.site}) == first for group in self.groups
        )

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def devices_per_machine(self) -> int:
        """Devices that one host has; a node can be several, as of NVL72 racks and pods of TPUs."""
        return min(self.devices_per_node, self.device.devices_per_host)

    @property
    def machines(self) -> int:
        return self.devices // self.devices_per_machine

    @property
    def devices_per_node(self) -> int:
        """Devices of a node; of the smallest node if they differ."""
        return min(group.devices_per_node for group in self.groups)

    @property
    def sites(self) -> dict[str, int]:
        """Number of devices at each site, in the order of the groups."""
        return {
            site: sum(group.devices for group in self.groups if group.site == site)
            for site in dict.fromkeys(group.site for group in self.groups)
        }

    def of_site(self, name: str) -> Self:
        """Return the part of the cluster that is at one of its sites, with what was measured there if that is known."""
        groups = tuple(group for group in self.groups if group.site == name)
        node, devices = min(group.devices_per_node for group in groups), sum(group.devices for group in groups)
        network = tuple(tier for tier in self.network if node < tier.devices) if devices > node else ()
        topology = self.topology
        if topology is not None:
            topology = topology.model_copy(update={"hosts": ",".join(self.hosts_at(name))})
        measured = self.measured_at.get(name, self.measured)
        return self.changed(
            groups=groups, links=(), network=network, topology=topology, measured=measured, measured_at={}
        )

    def hosts_at(self, name: str) -> tuple[str, ...]:
        """Return the names of the machines at a site, in the order of the network; none if they are not known."""
        names = tuple(hosts_of(self.topology.hosts)) if self.topology is not None else ()
        before = list(self.sites).index(name)
        each = self.site_devices // self.devices_per_machine
        return names[before * each : (before + 1) * each]

    def changed(self, **keys: object) -> Self:
        """Return a copy in which some keys are others, checked as a whole. Raises: ValidationError."""
        kept = {key: getattr(self, key) for key in type(self).model_fields}
        return type(self).model_validate({**kept, **keys})

    @property
    def site_devices(self) -> int:
        return max(self.sites.values())

    @cached_property
    def tiers(self) -> tuple[NetworkTier, ...]:
        """The whole network, inner to outer: the node, `network`, and the links between sites.

        If groups differ, a tier is as fast as it is for the slowest. In the tier "site" each device has its share of
        the thinnest link, when all devices of the largest site send at once.
        """
        node = NetworkTier(
            name="node",
            devices=self.devices_per_node,
            bandwidth_bytes_per_s=min(group.link_bytes_per_s for group in self.groups),
            latency_s=max(group.device.link_latency_s for group in self.groups),
        )
        network = self.network or self._of_topology
        if not network and self.site_devices > self.devices_per_node:
            network = (self._flat,)
        if not self.links:
            return (node, *network)
        site = NetworkTier(
            name="site",
            devices=self.devices,
            bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in self.links) / self.site_devices,
            latency_s=max(link.latency_s for link in self.links),
        )
        return (node, *network, site)

    @property
    def _of_topology(self) -> tuple[NetworkTier, ...]:
        """The tiers that the levels of the topology come to."""
        if self.topology is None:
            return ()
        found, share, flat = [], 1.0, self._flat
        for level in self.topology.levels(self.site_devices, self.devices_per_node):
            update = {"name": level.name, "devices": level.devices, "oversubscription": max(1.0, 1 / share)}
            found.append(flat.model_copy(update=update))
            share = level.ring
        is_whole = self.site_devices > self.devices_per_node
        return (*found, flat.model_copy(update={"oversubscription": max(1.0, 1 / share)})) if is_whole else ()

    @property
    def _flat(self) -> NetworkTier:
        return NetworkTier(
            name="network",
            devices=self.site_devices,
            bandwidth_bytes_per_s=min(group.nic_bytes_per_s for group in self.groups),
            latency_s=max(group.device.nic_latency_s for group in self.groups),
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cluster that a user names.

        It is "256xh100", "32x8xh100" (nodes x devices x device), several of these joined by "+", the path of a file, or
        a preset.

        Raises: UserError with a remedy.
        """
        if text in preset_names("clusters"):
            return cls.load(preset_path("clusters", text))
        groups = [re.fullmatch(r"\s*(\d+)x(?:(\d+)x)?(.+?)\s*", part, re.IGNORECASE) for part in text.split("+")]
        if all(groups):
            return cls._of_groups(text, *(_group(*group.groups(), text=text) for group in groups if group))
        if is_path(text):
            return cls.load(expanded(text))
        raise UserError(
            f"cluster {text!r} is neither NxDEVICE, such as 8xh100, nor a .toml file, nor a preset; "
            f"{near_names(text, preset_names('clusters'))}"
        )

    @classmethod
    def of(cls, device: Device, count: int) -> Self:
        """Return so many devices, which the catalogue need not have, in nodes of their size. Raises: UserError."""
        text = f"{count}x{device.name}"
        return cls._of_groups(text, _group(str(count), None, device.name, text=text, device=device))

    @classmethod
    def _of_groups(cls, text: str, *groups: NodeGroup) -> Self:
        if (devices := sum(group.devices for group in groups)) > MOST_CLUSTER_DEVICES:
            raise UserError(
                f"cluster {text!r}: {devices:,} devices are more than {MOST_CLUSTER_DEVICES:,}. Give fewer."
            )
        return cls(name=text, groups=groups)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a cluster from a file. Raises: UserError that names every wrong key, with its line."""
        table, lines = read_toml(path)
        if not isinstance(groups := table.get("groups"), list):
            raise UserError(f'{path}: no [[groups]] of nodes; e.g. device = "h100", nodes = 4.')
        for group in groups:
            settle_device(group, "device", path.absolute().parent)
        return build(cls, table_layer(table, cls, Source(str(path), lines)))

    def save(self, path: Path) -> None:
        """Write the cluster's file, atomically; a device that is not in the catalogue is written in full."""
        with atomic_write(path) as file:
            file.write(dump(self).encode())


def settle_device(table: Any, key: str, folder: Path) -> None:
    """Make the path of a device's file, as a table of another file names it, relative to that file's folder."""
    if isinstance(table, dict) and isinstance(device := table.get(key), str) and is_path(device):
        table[key] = str(folder / expanded(device))


def _group(count: str, per_node: str | None, device_name: str, *, text: str, device: Device | None = None) -> NodeGroup:
    """Return the nodes of NxDEVICE, or of NODESxNxDEVICE; none: the device of that name. Raises: UserError."""
    device, number = device or find_device(device_name), int(count)
    if number == 0 or (per_node and int(per_node) == 0):
        raise UserError(f"cluster {text!r}: there must be at least one device. Try 8x{device_name}.")
    if per_node:
        return NodeGroup(device=device, nodes=number, devices_per_node=int(per_node))
    size = _node_size(number, device)
    if size is None:
        full = device.devices_per_node
        below, above = number // full * full, -(-number // full) * full
        raise UserError(
            f"cluster {text!r}: a node of {device.name} has {full} devices, and {number} is not a multiple of that. "
            f"Try {below}x{device_name} or {above}x{device_name}, or give the nodes: NODESxDEVICESx{device_name}."
        )
    return NodeGroup(device=device, nodes=number // size, devices_per_node=size)


def _node_size(number: int, device: Device) -> int | None:
    """Return the devices of each node if there are `number`: full nodes, or as much of each as whole hosts allow.

    Jobs on NVL72 racks commonly take 64 of the 72 devices, so that sizes are powers of two.
    """
    if number <= device.devices_per_node:
        return number
    sizes = range(device.devices_per_node, device.devices_per_host - 1, -device.devices_per_host)
    return next((size for size in sizes if number % size == 0), None)
