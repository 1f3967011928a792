"""The topology of a cluster's network: the table `topology` of its file.

    [topology]
    kind = "fat-tree"             # or rail-optimized, rail-only, torus, dragonfly, optical
    nodes_per_leaf = 4
    oversubscription = 2.0
    hosts = "node[001-128]"       # names of the nodes, in the order in which they are cabled

What each kind is, and its source:

    fat-tree         leaf switches of some nodes, pods of leaves, a spine (Al-Fares et al. 2008)
    rail-optimized   the adapters of one rank of each node, a rail, meet in one leaf; spines join the rails (NVIDIA DGX
                     SuperPOD reference architecture)
    rail-only        no spine: what changes rails is forwarded inside a node (Wang et al. 2023, arXiv 2307.12169)
    torus            devices with two links in each dimension (Jouppi et al. 2023, arXiv 2304.01433)
    dragonfly        groups of routers, all joined to each other, and each group to each other one (Kim et al. 2008)
    optical          a circuit switch that is set for the job: `block`, a torus put together of blocks (Jouppi et al.
                     2023); `circuits`, so many neighbours for each node (TopoOpt: Wang et al. 2023, NSDI)

Several sites are no topology but `[[links]]`: the topology is that of each site.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from argosy.config.section import Section

TopologyKind = Literal["fat-tree", "rail-optimized", "rail-only", "torus", "dragonfly", "optical"]
Algorithm = Literal["ring", "tree", "hierarchical", "sharp"]
"""Ways to sum over nodes: `plan.cost.collectives.all_reduces` has what each costs."""
_LAYERS = ("nodes_per_leaf", "nodes_per_pod", "oversubscription", "pod_oversubscription", "switch_ports")
TOPOLOGY_KEYS: dict[TopologyKind, tuple[str, ...]] = {
    "fat-tree": _LAYERS,
    "rail-optimized": _LAYERS,
    "rail-only": ("switch_ports",),
    "torus": ("dims", "wrap", "link_bytes_per_s"),
    "dragonfly": ("nodes_per_router", "routers_per_group", "global_links", "link_bytes_per_s", "switch_ports"),
    "optical": ("block", "circuits", "link_bytes_per_s"),
}
"""The keys that each kind takes, beside those of all."""
OF_ALL = ("kind", "hosts", "switch_latency_s", "algorithms")
SWITCHED = ("fat-tree", "rail-optimized", "rail-only", "dragonfly")
"""Kinds with switches, which can sum."""
MOST_HOSTS = 1_000_000
_HOSTLIST = re.compile(r"([A-Za-z0-9_.-]*)(?:\[([0-9,-]+)\])?([A-Za-z0-9_.-]*)")


@dataclass(frozen=True)
class Level:
    """Units of the network that are alike: what one device of a unit has to all outside of it, if all send at once."""

    name: str
    devices: int
    """Devices of one unit."""
    ring: float
    """Share of a device's adapter that is left for a ring from unit to unit."""
    exchange: float
    """The same where all devices send to all."""


class Topology(Section):
    """A topology of nodes, or of devices."""

    kind: TopologyKind
    """The shape of the topology."""
    nodes_per_leaf: NonNegativeInt = 0
    """Fat tree: nodes of a leaf switch. Rails: nodes whose adapters of a rail meet in one leaf switch."""
    nodes_per_pod: NonNegativeInt = 0
    """Fat tree, rails: nodes below one pod's spines; 0: there are no pods."""
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    """Fat tree, rails: bandwidth of a leaf to its nodes, over that to the spines."""
    pod_oversubscription: Annotated[float, Field(ge=1)] = 1.0
    """The same of a pod, over what its leaves have."""
    switch_ports: NonNegativeInt = 0
    """Ports of a switch, each as fast as an adapter; 0: unknown, so that they are not counted."""
    dims: tuple[PositiveInt, ...] = ()
    """Torus: devices in each dimension, e.g. [16, 16, 16]; the first is that of neighbouring devices."""
    wrap: bool = True
    """Torus: true if each dimension is a ring; false: a mesh."""
    link_bytes_per_s: PositiveFloat | None = None
    """Torus, optical blocks: one link of a device, one direction; default: the device's bandwidth over its links.
    Dragonfly: one link between groups; default: as fast as a device's adapter."""
    nodes_per_router: NonNegativeInt = 0
    """Dragonfly: nodes of a router."""
    routers_per_group: NonNegativeInt = 0
    """Dragonfly: routers of a group."""
    global_links: NonNegativeInt = 0
    """Dragonfly: links of a router to other groups."""
    block: tuple[PositiveInt, ...] = ()
    """Optical: devices of a block, e.g. [4, 4, 4]; the switch joins blocks to whatever torus the job wants."""
    circuits: NonNegativeInt = 0
    """Optical: neighbours that the switch gives each node at a time, which share its adapters' bandwidth."""
    hosts: str = ""
    """Names of the nodes in the order of the network, as SLURM writes them: node[001-128],spare[1-4]."""
    switch_latency_s: NonNegativeFloat = 0.5e-6
    """Seconds that one more switch, or device of a torus, on the way takes."""
    algorithms: tuple[Algorithm, ...] = ("ring", "tree")
    """Algorithms that sums over nodes may use; sharp: switches that sum (SHARP)."""

    @model_validator(mode="after")
    def _has_its_keys(self) -> Self:
        allowed = TOPOLOGY_KEYS[self.kind]
        fields = type(self).model_fields
        given = [key for key in fields if key not in OF_ALL and getattr(self, key) != fields[key].default]
        for key in [key for key in given if key not in allowed]:
            raise ValueError(f'{key} is no key of kind = "{self.kind}"; remove it, or choose from {", ".join(allowed)}')
        needed = {
            "fat-tree": ("nodes_per_leaf",),
            "rail-optimized": ("nodes_per_leaf",),
            "torus": ("dims",),
            "dragonfly": ("nodes_per_router", "routers_per_group", "global_links"),
        }
        for key in needed.get(self.kind, ()):
            if not getattr(self, key):
                raise ValueError(f'kind = "{self.kind}" needs {key}; add it')
        if self.kind == "optical" and bool(self.block) == bool(self.circuits):
            raise ValueError(
                "an optical switch needs either block, as [4, 4, 4], or circuits, the neighbours of a node; give one"
            )
        if self.pod_oversubscription > 1 and not self.nodes_per_pod:
            raise ValueError(
                f"pod_oversubscription = {self.pod_oversubscription:g} without nodes_per_pod, so that there are no "
                "pods; add it, or remove this"
            )
        if self.circuits and self.link_bytes_per_s:
            raise ValueError(
                "link_bytes_per_s means nothing with circuits, which share the nodes' adapters; remove it, or set "
                "groups.nic_bytes_per_s"
            )
        if not self.algorithms:
            raise ValueError('algorithms is empty; name at least one, as ["ring", "tree"]')
        if "sharp" in self.algorithms and self.kind not in SWITCHED:
            raise ValueError(
                f'algorithms has sharp, and kind = "{self.kind}" has no switches that could sum; remove it'
            )
        for name in ("dims", "block"):
            if len(getattr(self, name)) > 3:
                raise ValueError(f"{name} = {list(getattr(self, name))}: one to three dimensions are known; join some")
        list(hosts_of(self.hosts))
        return self

    def check(self, devices: int, devices_per_node: int, is_uniform: bool) -> None:
        """Raise ValueError if the topology does not add up with a site's devices."""
        nodes = devices // devices_per_node
        if not is_uniform:
            raise ValueError(
                "topology needs nodes of one size at sites of one size; leave it out, or make groups equal"
            )
        if self.kind == "torus" and math.prod(self.dims) != devices:
            raise ValueError(
                f"topology.dims = {list(self.dims)} hold {math.prod(self.dims)} devices, and a site has {devices}; "
                f"write dims whose product is {devices}, as {list(near_cube(devices, len(self.dims)))}"
            )
        if self.block and devices % math.prod(self.block):
            size = math.prod(self.block)
            raise ValueError(
                f"topology.block = {list(self.block)} has {size} devices, of which {devices} is no multiple; "
                f"take groups of {max(size, devices // size * size)} devices, or another block"
            )
        if self.is_torus:
            return
        if self.circuits >= max(2, nodes) and nodes > 1:
            raise ValueError(
                f"topology.circuits = {self.circuits}: a node has only {nodes - 1} others; write {nodes - 1} or less"
            )
        for key, unit in ("nodes_per_leaf", self.nodes_per_leaf), ("nodes_per_pod", self.nodes_per_pod):
            if unit > nodes:
                raise ValueError(f"topology.{key} = {unit}, and groups have {nodes} nodes; write {nodes} or less")
        if self.nodes_per_pod and self.nodes_per_pod % self.nodes_per_leaf:
            above = -(-self.nodes_per_pod // self.nodes_per_leaf) * self.nodes_per_leaf
            raise ValueError(
                f"topology.nodes_per_pod = {self.nodes_per_pod} is no multiple of nodes_per_leaf = "
                f"{self.nodes_per_leaf}; write {above}"
            )
        self._check_groups(nodes)
        self._check_ports(nodes, devices_per_node)

    def _check_groups(self, nodes: int) -> None:
        """Check that each group of a dragonfly reaches each other one (Kim et al. 2008: at most a h + 1 groups)."""
        if self.kind != "dragonfly":
            return
        size = self.nodes_per_router * self.routers_per_group
        if nodes % size:
            raise ValueError(
                f"topology: groups of nodes_per_router x routers_per_group = {size} nodes do not divide the {nodes} "
                f"nodes; take {max(1, nodes // size) * size} nodes, or other groups"
            )
        many, most = nodes // size, self.routers_per_group * self.global_links + 1
        if many > most:
            raise ValueError(
                f"topology: {many} groups cannot all be joined by routers_per_group x global_links = {most - 1} links "
                f"of each; write global_links = {-(-(many - 1) // self.routers_per_group)} or more"
            )

    def _check_ports(self, nodes: int, devices_per_node: int) -> None:
        if not self.switch_ports:
            return
        if self.kind == "rail-only":
            most = self.switch_ports**2 // 2  # two levels of a Clos network
            if nodes > most:
                raise ValueError(
                    f"topology.switch_ports = {self.switch_ports}: a rail of two levels of such switches joins {most} "
                    f"nodes, and groups have {nodes}; take larger switches, or fewer nodes"
                )
            return
        if self.kind == "dragonfly":
            down = self.nodes_per_router * devices_per_node
            needs = down + self.routers_per_group - 1 + self.global_links
            what = f"{down} adapters, {self.routers_per_group - 1} other routers and {self.global_links} global links"
            remedy = "larger switches, or less of these"
        else:
            down = self.nodes_per_leaf * (1 if self.kind == "rail-optimized" else devices_per_node)
            alone = self.nodes_per_leaf == nodes
            needs = down + (0 if alone else math.ceil(down / self.oversubscription))
            what = f"{down} adapters" + (f" and {needs - down} links to spines" if needs > down else "")
            remedy = "larger switches, a smaller nodes_per_leaf or more oversubscription"
        if needs > self.switch_ports:
            raise ValueError(
                f"topology.switch_ports = {self.switch_ports}: a switch has {what}, {needs} in all; take {remedy}"
            )

    @property
    def is_torus(self) -> bool:
        """True if devices are joined to each other, not nodes by adapters."""
        return self.kind == "torus" or bool(self.block)

    @property
    def keeps_rails(self) -> bool:
        """True if what goes to another rail is forwarded by the node's own links, so that it stays in its switches."""
        return self.kind in ("rail-optimized", "rail-only")

    def levels(self, devices: int, devices_per_node: int) -> tuple[Level, ...]:
        """Return the units outside the node, inner first, without the one that is the whole."""
        whole = self.oversubscription * self.pod_oversubscription
        found = []
        if self.kind in ("fat-tree", "rail-optimized"):
            found = [
                Level("leaf", self.nodes_per_leaf * devices_per_node, *2 * (1 / self.oversubscription,)),
                Level("pod", self.nodes_per_pod * devices_per_node, *2 * (1 / whole,)),
            ]
        elif self.kind == "dragonfly":
            found = [
                Level("router", self.nodes_per_router * devices_per_node, 1.0, 1.0),
                self._group(devices, devices_per_node),
            ]
        return tuple(level for level in found if devices_per_node < level.devices < devices)

    def _group(self, devices: int, devices_per_node: int) -> Level:
        """A group of a dragonfly. To one other group, as in a ring, there are its direct links, or half of all links by
        way of other groups (Valiant routing: Kim et al. 2008, section 4.2); here in units of a device's adapter."""
        unit = self.nodes_per_router * self.routers_per_group * devices_per_node
        links, others = self.routers_per_group * self.global_links, max(1, devices // unit - 1)
        return Level("group", unit, max(links // others, links / 2) / unit, links / unit)

    def grown(self, times: int) -> Topology:
        """Return the topology of so many times as many nodes, as far as that is known: a torus longer in one dim."""
        if self.kind != "torus":
            return self
        return self.model_copy(update={"dims": (*self.dims[:-1], self.dims[-1] * times)})

    def slurm(self, names: tuple[str, ...], per_node: int, prefix: str = "") -> str:
        """Return a topology.conf of SLURM's topology/tree for these machines, `per_node` to a node; the top is last.

        prefix: of the switches' names. Raises: ValueError where there is no tree.
        """
        if self.is_torus or self.circuits:
            raise ValueError(f'kind = "{self.kind}" is no tree, which is what topology.conf describes')
        units = {
            "leaf": self.nodes_per_leaf * per_node or len(names),
            "pod": self.nodes_per_pod * per_node,
            "router": self.nodes_per_router * per_node,
            "group": self.nodes_per_router * self.routers_per_group * per_node,
        }
        order = ("router", "group") if self.kind == "dragonfly" else ("leaf", "pod")
        lines, below, size_below = [], list(names), 1
        for unit in order:
            size = units[unit]
            if not size or (size <= size_below and unit != order[0]):
                continue
            each = size // size_below
            parts = [below[start : start + each] for start in range(0, len(below), each)]
            word = "Nodes" if size_below == 1 else "Switches"
            lines += [f"SwitchName={prefix}{unit}{place} {word}={','.join(part)}" for place, part in enumerate(parts)]
            below, size_below = [f"{prefix}{unit}{place}" for place in range(len(parts))], size
        if len(below) > 1:
            lines.append(f"SwitchName={prefix}spine Switches={','.join(below)}")
        return "\n".join([*(["# TopologyParam=Dragonfly in slurm.conf"] * (self.kind == "dragonfly")), *lines, ""])


def near_cube(devices: int, many: int) -> tuple[int, ...]:
    """Return `many` dimensions of about one length whose product is `devices`."""
    if many <= 1:
        return (devices,)
    root = round(devices ** (1 / many))
    first = next(n for n in range(max(1, root), 0, -1) if devices % n == 0)
    return tuple(sorted((first, *near_cube(devices // first, many - 1))))


def hosts_of(text: str) -> Iterator[str]:
    """Yield the names of a list as SLURM writes it: node[001-003,7],login. Raises: ValueError."""
    many = 0
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        found = _HOSTLIST.fullmatch(part.strip())
        if found is None:
            raise ValueError(f'hosts has "{part}", which is no list of names; write node[001-128],spare[1-4]')
        head, ranges, tail = found.groups()
        for one in (ranges or "").split(","):
            low, _, high = one.partition("-")
            if ranges and not (low.isdigit() and (high or low).isdigit() and int(low) <= int(high or low)):
                raise ValueError(f'hosts has "{part}", whose range "{one}" is none; write node[001-128]')
            for number in range(int(low), int(high or low) + 1) if ranges else (None,):
                many += 1
                if many > MOST_HOSTS:
                    raise ValueError(f"hosts has more than {MOST_HOSTS:,} names; name the nodes of groups alone")
                yield head + ("" if number is None else f"{number:0{len(low)}d}") + tail
