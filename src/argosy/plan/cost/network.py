"""The links that a group of ranks spans; and what sending fewer bytes costs.

A group of n ranks, each `stride` apart, has min(n, node/stride) ranks in a node. If it crosses nodes, its ring enters
and leaves each node through the adapters of all its ranks there. Every device has its share of the node's adapters, and
other groups use theirs at the same time. So it is with sites: a ring enters and leaves each by the shares that all its
ranks there have in the thin link, and each message that goes on takes that link's latency.

Where a cluster's file says how nodes are joined, `plan.cost.fabric` has the group's links. What a collective takes over
them is in `plan.cost.collectives`.

Bytes of compressed sums are about those of `plan.cost.traffic`, which counts one plan's exactly. The work is as `argosy
probe` measured it, or follows from `plan.sync.COMPRESSOR_COSTS`: a GPU takes the bytes that are moved over its
memory bandwidth, and LAUNCHES kernels for each bucket; a CPU the seconds for a number. Residuals take 4 bytes for each
number that is summed, and as much again while a step may still be taken back (`sync.compressor.BucketMemory`); `sign`
keeps a momentum in the same way. Sites keep what they agreed on: 4 bytes of weights for each number whose state is on
the rank, and with diloco 4 of outer momentum.

Ranks are placed on a network of known topology: for each mesh by the time of a plain plan on it.

Of a mesh all plans are placed alike, as its axes send the same bytes whatever the schedule or the microbatch. Ranks
stay in their order unless another placement saves `LEAST_PLACEMENT_GAIN` of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from argosy.config.sync import SyncConfig
from argosy.plan.cost.collectives import Group, through
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.fabric import Arrangement, Fabric
from argosy.plan.cost.rates import Rates
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import PLAN_WORDS, Layouts, column_of
from argosy.plan.plan import MESH, Plan
from argosy.plan.sync import COMPRESSOR_COSTS, SITE_BYTES
from argosy.plan.workload import Numbers, Workload

FRAMING = 1.01
"""Bytes on a link between sites over those of numbers: headers of TCP, encryption, and the heads of messages."""


def group_of(ranks: Numbers, stride: Numbers, rates: Rates, constants: Constants) -> Group:
    """Return the group of `ranks` ranks whose neighbours are `stride` ranks apart."""
    inside = np.clip(rates.node // np.maximum(1, stride), 1, ranks)
    link, nic = rates.link_bytes_per_s * constants.link, rates.nic_bytes_per_s * constants.nic
    ring = through(ranks, inside, link, inside * nic)
    latency = np.where(np.asarray(ranks) > 1, constants.latency, 0.0)
    group = Group(ranks, inside, ring, link, nic, latency, constants.hop * (ranks - 1), rates.reduction_gain)
    if rates.fabric is not None:
        group = rates.fabric.group(group, stride, constants)
    at_site = np.clip(rates.site // np.maximum(1, stride), 1, ranks)
    far = at_site < ranks
    if not np.any(far):
        return group
    thin = np.where(far, rates.far_bytes_per_s, np.inf)
    return replace(
        group,
        ring=np.minimum(group.ring, at_site * thin),
        nic=np.minimum(group.nic, thin),
        exchange=None if group.exchange is None else np.minimum(group.exchange, thin),
        latency=group.latency + np.where(far, rates.far_latency_s, 0.0),
        round=np.where(far, np.maximum(group.round, rates.far_latency_s * (np.asarray(ranks) - 1)), group.round),
        algorithms=group.algorithms and (tuple(name for name in group.algorithms if name != "sharp") or ("ring",)),
    )


def between_sites_s(sent: float, cluster: Cluster, messages: int) -> float:
    """Return the seconds of `sent` bytes over the thinnest link of a cluster, and of messages one after the other."""
    thinnest = min(link.bandwidth_bytes_per_s for link in cluster.links)
    return sent / thinnest + messages * max(link.latency_s for link in cluster.links)


LAUNCHES, LAUNCH_S = 60, 5e-6
"""Kernels of a bucket, and the host's time for one."""
HIDDEN_SHARE = 0.8
"""Share of the shorter of compressing and sending that the longer hides: while a bucket is sent, the next is
compressed."""
NUMBERS_IN_MIB = 2**18
RESIDUAL_BYTES = 8


@dataclass(frozen=True)
class Compression:
    """The costs of compressed sums of one run: its settings, and how fast its devices compress."""

    settings: SyncConfig = field(default_factory=SyncConfig)
    measured_s: Mapping[str, float] = field(default_factory=dict)
    """Word -> seconds for a number in a group of one rank, if a probe measured it."""

    def share_sent(self, plans: Layouts, work: Workload, replicas: Numbers) -> Numbers:
        """Return which share of an exact fp32 sum's bytes replicas send."""
        shares = {word: cost.share_sent(self.settings, replicas, work) for word, cost in COMPRESSOR_COSTS.items()}
        return _by_word(plans, shares, 1.0)

    def seconds(self, plans: Layouts, numbers: Numbers, replicas: Numbers, rates: Rates) -> Numbers:
        """Return the seconds that a rank compresses and restores `numbers` in a step."""
        launch_s = np.where(rates.host_waits > 0, 0.0, LAUNCHES * LAUNCH_S / (plans.bucket_mb * NUMBERS_IN_MIB))
        each: dict[str, Numbers] = {word: self._of_number(word, replicas, rates, launch_s) for word in COMPRESSOR_COSTS}
        seconds = numbers * _by_word(plans, each, 0.0)
        return np.where(np.asarray(replicas) > 1, seconds, 0.0)

    def kept_bytes(self, plans: Layouts, summed: Numbers, mine: Numbers) -> Numbers:
        """Return the bytes that a rank keeps to agree.

        summed: numbers that it sums over replicas. mine: numbers whose optimizer state it has.
        """
        with_residual = RESIDUAL_BYTES * self.settings.error_feedback
        with_momentum = RESIDUAL_BYTES * (self.settings.momentum > 0)
        kept: dict[str, Numbers] = {
            word: with_residual * cost.has_residual + with_momentum * cost.has_momentum
            for word, cost in COMPRESSOR_COSTS.items()
        }
        return summed * _by_word(plans, kept, 0.0) + mine * _by_word(plans, SITE_BYTES, 0.0)

    def _of_number(self, word: str, replicas: Numbers, rates: Rates, launch_s: Numbers) -> Numbers:
        cost = COMPRESSOR_COSTS[word]
        whole, shared = cost.moved_bytes
        moved = whole + shared / np.maximum(1, replicas)
        on_gpu = moved / rates.memory_bytes_per_s + launch_s
        alone_s = self.measured_s.get(word)
        measured = (cost.cpu_s if alone_s is None else alone_s) * moved / (whole + shared)
        return measured if alone_s is not None else np.where(rates.host_waits > 0, measured, on_gpu)


def _by_word(plans: Layouts, values: Mapping[str, Numbers], otherwise: float) -> Numbers:
    found: Numbers = np.full(len(plans.sync), otherwise)
    for word in PLAN_WORDS["sync"]:
        if word in values:
            found = np.where(plans.is_("sync", word), values[word], found)
    return found


LEAST_PLACEMENT_GAIN = 0.01
"""Share of a step that moving ranks must save."""
OF_MESH = (*MESH, "zero", "context", "precision", "weights", "reduce")
"""Keys of a plan by which it is placed."""
StepSeconds = Callable[[Layouts, Fabric], NDArray[np.float64]]


@dataclass(frozen=True)
class Placements:
    ways: list[Arrangement]
    rows: NDArray[np.int64]
    """Place of each plan's arrangement in `ways`."""


def placed_in_order(fabric: Fabric, plans: Layouts) -> Placements:
    """Leave all ranks in their order."""
    return Placements(fabric.arrangements()[:1], np.zeros(len(plans), np.int64))


@dataclass(frozen=True)
class Placer:
    """Places plans, and remembers where each mesh belongs."""

    fabric: Fabric
    step_s: StepSeconds
    """Seconds of some plans' steps on the network with them placed."""
    known: dict[tuple[int, ...], int]
    """Mesh -> place of its arrangement among those of the network."""

    def best(self, plans: Layouts) -> Placements:
        """Return for each plan the arrangement with which a plain plan on its mesh has the shortest step."""
        ways, n = self.fabric.arrangements(), len(plans)
        if len(ways) < 2 or not n:
            return placed_in_order(self.fabric, plans)
        keys = np.stack([np.broadcast_to(getattr(plans, key), n) for key in OF_MESH])
        meshes, first, of_plan = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        names = [tuple(mesh) for mesh in meshes.T.tolist()]
        new = [place for place, name in enumerate(names) if name not in self.known]
        if new:
            found = self._of_meshes(_plain(plans[first[np.array(new)]]), ways)
            self.known.update(zip((names[place] for place in new), found.tolist(), strict=True))
        chosen = np.array([self.known[name] for name in names])
        return Placements(ways, chosen[of_plan.reshape(-1)])

    def _of_meshes(self, meshes: Layouts, ways: list[Arrangement]) -> NDArray[np.int64]:
        """Return the best way for each mesh; the first one unless another saves `LEAST_PLACEMENT_GAIN`."""
        matters = np.flatnonzero(self.fabric.parts_of(meshes) > 1) if len(ways[0].dims) == 0 else np.arange(len(meshes))
        found = np.zeros(len(meshes), np.int64)
        if not len(matters):
            return found
        some = meshes[matters]
        times = np.stack(
            [self.step_s(some, self.fabric.placed(some, ways, np.full(len(some), way))) for way in range(len(ways))]
        )
        saves = times.min(axis=0) < (1 - LEAST_PLACEMENT_GAIN) * times[0]
        found[matters] = np.where(saves, np.argmin(times, axis=0), 0)
        return found


def _plain(plans: Layouts) -> Layouts:
    """Return the plainest plans on the same meshes, with the smallest microbatch."""
    usual = Plan()
    kept = {*OF_MESH, "compile"}
    plain = {
        f.name: column_of(f.name, [getattr(usual, f.name)]).repeat(len(plans))
        for f in fields(plans)
        if f.name not in kept
    }
    return replace(plans, **plain)
