"""The links of groups in a network whose topology is known, and the ways to place ranks onto it, as columns.

A group is a range of digits of the rank: `ranks` of them, `stride` apart. A placement writes the digits beyond a node
in another order, and so decides which ranks share a leaf, or lie along which dimension. Three parts of the rank can
change places: what a replica of the state is shared over (with what of tp and cp leaves the node), the replicas, and
the pipeline. Ranks of a node stay together: they are processes of one machine.

Switches. Of a group, a unit (leaf, pod, ...) holds the product over its digits of clip(unit/stride, 1, size) ranks. All
groups of an axis run at once, so that a ring enters and leaves a unit by the shares that all of its ranks there have in
what leaves it; of an all-to-all each rank has its own share alone.

Torus (Jouppi et al. 2023; Kumar et al. 2020). Along a dimension of k devices, a ring that closes uses both directions;
one along a part of it has one; of groups that interleave, each has its share of the links. A group that spans several
dimensions uses the links of all at once, with a part of the message along each. In an all-to-all of S bytes, a link of
a closed ring carries k S/8, of an open one k S/4, since messages travel k/4 devices on average in either of two
directions. With 16x16x16 and links of 45 GB/s that is 1.1 PB/s of all-reduces, and 23 TB/s through the middle: Google
prints 1.1 PB/s and 24 TB/s for a pod of TPU v4 (docs.cloud.google.com/tpu/docs/v4).

Circuits (TopoOpt: Wang et al. 2023, NSDI). Each of c circuits of a node goes to another node, and has 1/c of its
adapters' bandwidth. The job gives some to each part of the rank; a ring uses all that its part has. All-to-all over k
circuits of m nodes is forwarded by nodes between: k (m^(1/k) - 1)/2 on average, as in a directed torus of k dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.collectives import WIRE, Group, through
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.estimate import first_of
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.topology import Level, Topology
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.quantities import factorizations
from argosy.plan.workload import Numbers

RANK_PARTS = ("dp_shard", "dp_replicate", "pp")
"""Parts of the rank beyond a node, from the inner one outwards; `dp_shard` with what of tp and cp leaves the node."""
ORDERS = tuple(permutations(range(len(RANK_PARTS))))
"""Orders of the parts, inner first; the first one is that of the ranks themselves."""
_IS_INNER = np.array([[[o.index(j) < o.index(i) for j in range(3)] for i in range(3)] for o in ORDERS])
"""[order, i, j]: part j lies inside part i."""
MOST_SHAPES = 24
"""Shapes of a torus that a circuit switch is asked for, the most even first."""


@dataclass(frozen=True)
class Arrangement:
    """A way to place ranks onto a network."""

    order: int = 0
    """Place in `ORDERS`."""
    dims: tuple[int, ...] = ()
    """Torus: devices along each dimension, in the order in which ranks fill them."""
    circuits: tuple[int, ...] = ()
    """Circuits of a node for each of `RANK_PARTS`, if there are any."""


@dataclass(frozen=True)
class GroupStride:
    """The part of a group that lies in one part of the rank: `size` ranks, `start` devices apart on the network."""

    start: Numbers
    size: Numbers


@dataclass(frozen=True)
class Fabric:
    """A topology, with plans and how each is placed."""

    topology: Topology
    levels: tuple[Level, ...]
    devices: int
    """Devices of a site."""
    unit: int
    """Ranks that stay together: those of a node, or of a machine of a torus."""
    link_bytes_per_s: float
    """Torus: one link, one direction."""
    bounds: tuple[Numbers, ...] = (1, np.inf)
    """Ranks at which each part begins, and the last ends; as it stands here all ranks are one part."""
    starts: tuple[Numbers, ...] = (1,)
    """Devices at which it begins on the network."""
    dims: tuple[Numbers, ...] = ()
    shares: tuple[Numbers, ...] = (1.0,)
    """Share of a node's circuits that each part has."""

    @classmethod
    def of(cls, cluster: Cluster, link_bytes_per_s: Numbers) -> Fabric | None:
        """Return the network of a cluster; None if its file does not say how nodes are joined.

        link_bytes_per_s: a device's bandwidth to the others of its node, which are those of its links in a torus.
        """
        topology = cluster.topology
        if topology is None:
            return None
        dims = topology.dims or topology.block
        whole = cls(
            topology,
            topology.levels(cluster.site_devices, cluster.devices_per_node),
            cluster.site_devices,
            cluster.devices_per_machine if topology.is_torus else cluster.devices_per_node,
            topology.link_bytes_per_s or float(link_bytes_per_s) / (2 * max(1, len(dims))),
        )
        return replace(whole, dims=topology.dims or (whole._shapes()[0] if topology.block else ()))

    def arrangements(self) -> list[Arrangement]:
        """Return the ways to place ranks; the first one leaves them in their order."""
        topology, orders = self.topology, range(len(ORDERS))
        if topology.circuits:
            most = topology.circuits
            even = most // 2
            cuts = [(most - k, most - k, k) for k in (even, *(k for k in range(most) if k != even))]
            return [Arrangement(circuits=cut) for cut in cuts]
        if not topology.is_torus:
            return [Arrangement(order) for order in orders]
        first = topology.dims[:1]  # of a machine's devices, which stay neighbours
        rest = dict.fromkeys(permutations(topology.dims[1:]))
        shapes = [first + others for others in rest] if topology.dims else self._shapes()
        return [Arrangement(order, shape) for shape in shapes for order in orders[: 1 if len(shapes) > 6 else None]]

    def _shapes(self) -> list[tuple[int, ...]]:
        """Return the tori that the blocks of a site can be put together to, the most even ones first."""
        block = self.topology.block
        cut = factorizations(self.devices // math.prod(block), len(block))
        shapes = {tuple(many * size for many, size in zip(each, block, strict=True)) for each in cut}
        return sorted(shapes, key=lambda dims: (max(dims), dims))[:MOST_SHAPES]

    def placed(self, plans: Layouts, chosen: Sequence[Arrangement], rows: NDArray[np.int64]) -> Fabric:
        """Return the network with these plans on it, each placed by the arrangement of its row in `chosen`."""
        bounds, sizes = self._bounds_of(plans), self.sizes_of(plans)
        orders = np.array([one.order for one in chosen])[rows]
        inner = _IS_INNER[orders]
        starts = [
            self.unit * np.prod([np.where(inner[:, i, j], sizes[j], 1) for j in range(3)], axis=0) for i in range(3)
        ]
        dims = np.array([one.dims for one in chosen])[rows]
        shares: tuple[Numbers, ...] = (1.0,) * 3
        if self.topology.circuits:
            found = np.array([one.circuits for one in chosen])[rows] / self.topology.circuits
            shares = tuple(found.T)
        return replace(self, bounds=tuple(bounds), starts=tuple(starts), dims=tuple(dims.T), shares=shares)

    def parts_of(self, plans: Layouts) -> NDArray[np.int64]:
        """Return how many of `RANK_PARTS` have more than one rank beyond a node; with circuits, use nodes'."""
        bounds = self._bounds_of(plans)
        many = sum((bounds[i + 1] > bounds[i]).astype(np.int64) for i in range(3))
        return np.asarray(many + bool(self.topology.circuits))

    def sizes_of(self, plans: Layouts) -> list[NDArray[np.int64]]:
        """Return the sizes of `RANK_PARTS`, in units of the ranks that stay together."""
        bounds = self._bounds_of(plans)
        return [bounds[i + 1] // bounds[i] for i in range(3)]

    def _bounds_of(self, plans: Layouts) -> list[NDArray[np.int64]]:
        ends = plans.tp * plans.cp * plans.dp_shard, plans.tp * plans.cp * plans.dp, plans.world_size
        bounds = [np.full(len(plans), self.unit)]
        for end in ends:
            bounds.append(np.maximum(bounds[-1], end))
        return bounds

    def group(self, plain: Group, stride: Numbers, constants: Constants) -> Group:
        """Return a group at one site on this network: `plain` has its ranks, `stride` apart, with the bandwidths of a
        rank inside its node and to its switch."""
        if self.topology.is_torus:
            return self._on_torus(plain, stride, constants)
        on = self._on_circuits if self.topology.circuits else self._on_switches
        return on(plain, self._digits(plain.ranks, stride, self.unit), constants)

    def _digits(self, ranks: Numbers, stride: Numbers, smallest: Numbers) -> list[GroupStride]:
        """Return where the ranks lie on the network that are not next to each other in a node of `smallest` devices."""
        low, high = np.maximum(stride, smallest), np.maximum(np.asarray(ranks) * stride, smallest)
        if len(self.starts) == 1:
            return [GroupStride(low, np.maximum(1.0, high / low))]
        bounds = [np.full(1, smallest), *self.bounds]  # what lies within a unit stays there
        scales = [np.ones(1), *(start / begin for start, begin in zip(self.starts, self.bounds, strict=False))]
        found = []
        for begin, end, scale in zip(bounds, bounds[1:], scales, strict=False):
            first, last = np.clip(low, begin, end), np.clip(high, begin, end)
            found.append(GroupStride(first * scale, np.maximum(1.0, last / first)))
        return found

    def _on_switches(self, plain: Group, digits: Sequence[GroupStride], constants: Constants) -> Group:
        n, inside, nic, topology = np.asarray(plain.ranks, float), plain.inside, plain.nic, self.topology
        leaves = inside < n
        ring, next_one, slowest = inside * nic, nic * 1.0, (1 - inside / n) / nic
        crossed: Numbers = np.where(leaves, 1.0, 0.0)
        for level in self.levels:
            here = inside * _ranks_in(level.devices, digits)
            beyond = here < n
            ring = np.where(beyond, np.minimum(ring, here * nic * level.ring), ring)
            next_one = np.where(beyond, np.minimum(next_one, here * nic * level.ring), next_one)
            slowest = np.where(beyond, np.maximum(slowest, (1 - here / n) / (nic * level.exchange)), slowest)
            crossed = crossed + beyond
        hop = constants.hop + topology.switch_latency_s * np.maximum(0.0, 2 * (crossed - 1))
        return replace(
            plain,
            ring=through(plain.ranks, inside, plain.link, ring),
            nic=next_one,
            round=hop * (n - 1),
            exchange=np.where(leaves, (1 - inside / n) / np.maximum(slowest, 1e-30), nic),
            forwarded=1 - 1 / self.unit if topology.keeps_rails else 0.0,
            tree=2 * crossed * (topology.switch_latency_s + constants.hop),
            adapter=nic,
            algorithms=topology.algorithms,
            wires=((WIRE, np.where(leaves, 1.0, 0.0)),),
        )

    def _on_circuits(self, plain: Group, digits: Sequence[GroupStride], constants: Constants) -> Group:
        """Return a group whose nodes are joined by circuits; a part of the rank without any goes by way of others."""
        n, inside, nic = np.asarray(plain.ranks, float), plain.inside, plain.nic
        least = 1 / (2 * self.topology.circuits)
        share: Numbers = 1.0
        for each, has in zip(digits[-len(self.shares) :], self.shares, strict=True):
            share = np.where(each.size > 1, np.minimum(share, np.maximum(has, least)), share)
        nodes, many = np.maximum(1.0, n / inside), np.maximum(1.0, share * self.topology.circuits)
        hops = np.maximum(1.0, many * (nodes ** (1 / many) - 1) / 2)
        part = 1.0 if len(self.shares) == 1 else np.where(np.asarray(digits[-1].size) > 1, 2.0, 1.0)
        return replace(
            plain,
            ring=through(plain.ranks, inside, plain.link, inside * nic * share),
            nic=nic * share,
            exchange=nic * share / hops,
            algorithms=tuple(name for name in self.topology.algorithms if name != "sharp"),
            wires=tuple((place, np.where((inside < n) & (part == place), 1.0, 0.0)) for place in (1, 2)),
        )

    def _on_torus(self, plain: Group, stride: Numbers, constants: Constants) -> Group:
        n, link = np.asarray(plain.ranks, float), self.link_bytes_per_s * constants.link
        rate: Numbers = np.zeros(1)
        slowest: Numbers = np.zeros(1)
        to_next: Numbers = np.full(1, np.inf)
        hops: Numbers = np.zeros(1)
        wires, first = [], np.ones(1)
        digits = self._digits(plain.ranks, stride, 1)
        wraps = self.topology.wrap
        for place, size in enumerate(self.dims):
            end, passes = first * size, np.zeros(1)
            for each in digits:
                low, high = np.maximum(each.start, first), np.minimum(each.start * each.size, end)
                here = np.maximum(1.0, high / low)
                apart = low / first
                closes = (high >= end) & (here > 1) & wraps
                both = np.where(closes, 2.0, 1.0)
                is_along = here > 1
                rate = rate + np.where(is_along, both * link / apart, 0.0)
                slowest = np.maximum(slowest, np.where(is_along, here * apart / (4 * both * link), 0.0))
                to_next = np.where(is_along, np.minimum(to_next, link / apart), to_next)
                hops = hops + np.where(is_along, (here - 1) * apart, 0.0)
                passes = np.maximum(passes, is_along)
            wires.append((place, passes))
            first = end
        alone = rate <= 0
        rate, to_next = np.where(alone, link, rate), np.where(alone, link, to_next)
        return replace(
            plain,
            inside=np.ones(1),
            ring=rate,
            link=rate,
            nic=to_next,
            round=(constants.hop + self.topology.switch_latency_s) * hops,
            reduction_gain=1.0,
            exchange=np.where(alone, link, (1 - 1 / n) / np.maximum(slowest, 1e-30)),
            algorithms=tuple(name for name in self.topology.algorithms if name in ("ring", "tree")) or ("ring",),
            wires=tuple(wires),
        )

    def spans(self, ranks: int, stride: int, node: int) -> list[tuple[str, int]]:
        """Return how many ranks of a group, or units of them, lie in each unit: a node, a leaf, ..., or along each
        dimension, of one plan that is placed."""
        found, before = [], 1.0
        if self.topology.is_torus:
            first = 1.0
            for place, size in enumerate(np.ravel(each)[0] for each in self.dims):
                many = 1.0
                for digits in self._digits(ranks, stride, 1):
                    low, high = (
                        max(first_of(digits.start), first),
                        min(first_of(digits.start * digits.size), first * size),
                    )
                    many *= max(1.0, high / low)
                found.append((f"dimension {place + 1} of {size}", round(many)))
                first *= size
            return [each for each in found if each[1] > 1]
        inside = min(max(node // stride, 1), ranks)
        digits_beyond = self._digits(ranks, stride, self.unit)
        units = [("node", float(inside))]
        units += [(level.name, inside * first_of(_ranks_in(level.devices, digits_beyond))) for level in self.levels]
        for name, many in [*units, ("network", float(ranks))]:
            found.append((name, round(many / before)))
            before = many
        return [each for each in found if each[1] > 1]

    def machine_of(self, plan: Plan, per_unit: int) -> list[int]:
        """Return the machine of the network on which each machine of the ranks lies, of one plan that is placed."""
        units = np.arange(max(1, plan.world_size // self.unit))
        found = np.zeros(len(units), np.int64)
        for begin, end, start in zip(self.bounds, self.bounds[1:], self.starts, strict=False):
            low, high = (max(1, round(first_of(value)) // self.unit) for value in (begin, end))
            found += units % high // low * (round(first_of(start)) // self.unit)
        if self.topology.dims:
            found = self._in_order_of_file(found)
        return [int(unit) * per_unit + n for unit in found for n in range(per_unit)]

    def _in_order_of_file(self, machines: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of machines if dimensions are counted as the file has them, not as ranks fill them."""
        filled, left, places = (
            [round(first_of(size)) for size in self.dims],
            list(self.topology.dims),
            machines * self.unit,
        )
        strides = np.concatenate([[1], np.cumprod(left)])
        found = np.zeros_like(machines)
        for size in filled:
            place = left.index(size)
            left[place] = 0  # equal dimensions are taken one after the other
            found += places % size * int(strides[place])
            places = places // size
        return found // self.unit


def _ranks_in(devices: int, digits: Sequence[GroupStride]) -> Numbers:
    """Return how many ranks beyond their node lie in a unit of so many devices."""
    found: Numbers = 1.0
    for each in digits:
        found = found * np.clip(np.floor(devices / each.start), 1, each.size)
    return found
