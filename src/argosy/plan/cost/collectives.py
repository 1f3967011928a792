"""Time of collectives over the links of a group, by algorithm, in closed form.

With S bytes, n ranks, i of them in each of m nodes, B bytes/s of a rank in a ring, L of its node's link:

    all_reduce  ring            2 (n-1)/n S/B, n-1 hops twice      Thakur et al. 2005, section 4
                tree            2 S/B, 2 log2 n messages           Sanders et al. 2009; NCCL's double binary trees
                hierarchical    2 (i-1)/i S/L + 2 (m-1)/m S/B      Cho et al. 2019 (BlueConnect)
                sharp           the longer of 2 (i-1)/i S/L inside, and S/i to the switch and back at once
                                                                   Graham et al. 2016, 2020
    gather      ring            (n-1)/n S/B, n-1 hops              Thakur et al. 2005
                hierarchical    (i-1)/i S/L + (m-1)/m S/B          Cho et al. 2019
    all_to_all                  what leaves the node beside what does not

A group of a cluster without a topology takes the ring, or for the latency of an all-reduce the tree if that is less.
Inside a node a switch that sums (NVLS) is faster than a ring by a gain that was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.plan.workload import Numbers

WIRE = -1
"""The one wire that all groups share which leave their node; dimensions of a torus have numbers from 0 on."""


@dataclass(frozen=True)
class Group:
    """A group of ranks that communicate."""

    ranks: Numbers
    inside: Numbers
    """Ranks in one node."""
    ring: Numbers
    """Bytes/s of each rank in a ring through all of them."""
    link: Numbers
    """Bytes/s to a rank of the same node."""
    nic: Numbers
    """Bytes/s to a rank of another node."""
    latency: Numbers
    """Seconds that any collective takes to start."""
    round: Numbers
    """Seconds for a message to pass all ranks one after the other."""
    reduction_gain: Numbers
    exchange: Numbers | None = None
    """Bytes/s of a rank to other nodes if all send to all; none: `nic`."""
    forwarded: Numbers = 0.0
    """Share of these bytes that the node's link carries too, before or after (rails)."""
    tree: Numbers = 0.0
    """Seconds of a message through the switches that sum, and back."""
    adapter: Numbers = np.inf
    """Bytes/s of a rank to its switch."""
    algorithms: tuple[str, ...] = ()
    """Algorithms that may sum over nodes; none: the cluster's topology is not known."""
    wires: tuple[tuple[int, Numbers], ...] = ()
    """The wires that the group's messages pass, where known: those of which groups that run at once get shares each."""

    @property
    def crosses(self) -> Numbers:
        return self.inside < self.ranks


def through(ranks: Numbers, inside: Numbers, link: Numbers, ring: Numbers) -> Numbers:
    """Return the bytes/s of a ring that enters and leaves its nodes by `ring`, and inside of them takes their links."""
    return np.where(inside < ranks, np.where(inside > 1, np.minimum(link, ring), ring), link)


def gathers(whole: Numbers, group: Group) -> dict[str, Numbers]:
    """Return the seconds of an all-gather or reduce-scatter of `whole` bytes in all, by each algorithm."""
    found = {"ring": (group.ranks - 1) / group.ranks * whole / group.ring + group.latency + group.round}
    if "hierarchical" in group.algorithms:
        inside, nodes = group.inside, np.maximum(1, group.ranks / group.inside)
        moved = (inside - 1) / inside * whole / group.link + (nodes - 1) / nodes * whole / group.ring
        tiers = moved + group.latency * 2 + group.round * (inside + nodes - 2) / np.maximum(1, group.ranks - 1)
        found["hierarchical"] = np.where(group.crosses, tiers, found["ring"])
    return found


def gather_s(whole: Numbers, group: Group) -> Numbers:
    """Return the seconds of an all-gather or reduce-scatter of a message of `whole` bytes in all."""
    found = gathers(whole, group)
    return np.minimum(found["ring"], found["hierarchical"]) if "hierarchical" in found else found["ring"]


def all_reduces(message: Numbers, group: Group) -> dict[str, Numbers]:
    """Return the seconds of an all-reduce of `message` bytes over nodes, by each algorithm that the group may use."""
    n, inside = np.asarray(group.ranks, float), group.inside
    nodes = np.maximum(1, n / inside)
    start, each = 2 * group.latency, 2 * message / group.ring
    link = 2 * (inside - 1) / inside * message / group.link
    rounds = 2 * group.round * (inside + nodes - 2) / np.maximum(1, n - 1)
    found = {
        "ring": (n - 1) / n * each + start + 2 * group.round,
        "tree": each + start + 2 * group.latency * np.log2(np.maximum(2, n)),
        "hierarchical": link + (nodes - 1) / nodes * each + 2 * start + rounds,
        "sharp": np.maximum(link, message / inside / group.adapter) + 2 * start + group.tree,
    }
    return {name: found[name] for name in group.algorithms}


def all_reduce_s(message: Numbers, group: Group, in_switch: Numbers = True) -> Numbers:
    """Return the seconds of an all-reduce of `message` bytes; where the switch sums, it is faster by its gain."""
    gain = np.where(group.crosses | ~np.asarray(in_switch, bool), 1.0, group.reduction_gain)
    steps = np.minimum(2 * group.round, 2 * group.latency * np.log2(np.maximum(2, group.ranks)))  # a ring, or a tree
    known = 2 * (group.ranks - 1) / group.ranks * message / (group.ring * gain) + 2 * group.latency + steps
    if not group.algorithms:
        return known
    least: Numbers = np.minimum.reduce(np.broadcast_arrays(*all_reduces(message, group).values()))
    return np.where(group.crosses, least, known)


def all_to_all_s(message: Numbers, group: Group, crossing: Numbers = 1.0) -> Numbers:
    """Return the seconds of an all-to-all: each rank has `message` bytes, an equal part for every other rank.

    Links inside the node and to others carry it at the same time.
    crossing: share of the data for other nodes that is sent there; the rest is copied on arrival.
    """
    leaving = crossing * message * (1 - group.inside / group.ranks)
    other_nodes = leaving / (group.nic if group.exchange is None else group.exchange)
    this_node = message * (group.inside - 1) / group.ranks / group.link
    return np.maximum(other_nodes, this_node) + leaving * group.forwarded / group.link + group.latency


def shared(one: Group, other: Group) -> Numbers:
    """Return 1 where messages of both groups pass a wire, so that they share it; 0 where that is not known."""
    found: Numbers = 0.0
    for wire, passes in one.wires:
        for its, also in other.wires:
            if wire == its:
                found = np.maximum(found, np.asarray(passes) * np.asarray(also))
    return found


def send_s(message: Numbers, group: Group) -> Numbers:
    """Return the seconds of a send to the next rank; the slowest pair, across nodes, decides."""
    return message / np.where(group.crosses, group.nic, group.link) + np.where(
        np.asarray(group.ranks) > 1, group.latency, 0.0
    )
