"""The time of collectives: ring formulas over the links that a group of ranks spans.

A group of n ranks, each `stride` apart, has min(n, node/stride) ranks in a node. If it crosses nodes, its ring enters
and leaves each node through the adapters of all its ranks there. Every device has its share of the node's adapters, and
other groups use theirs at the same time. So it is with sites: a ring enters and leaves each by the shares that all its
ranks there have in the thin link, and each message that goes on takes that link's latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.plan.cost.constants import Constants
from argosy.plan.cost.rates import Rates
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.workload import Numbers

FRAMING = 1.01
"""Bytes on a link between sites over those of numbers: headers of TCP, encryption, and the heads of messages."""


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

    @property
    def crosses(self) -> Numbers:
        """True if the group spans nodes."""
        return self.inside < self.ranks


def group_of(ranks: Numbers, stride: Numbers, rates: Rates, constants: Constants) -> Group:
    """Return the group of `ranks` ranks whose neighbours are `stride` ranks apart."""
    inside = np.clip(rates.node // np.maximum(1, stride), 1, ranks)
    link, nic = rates.link_bytes_per_s * constants.link, rates.nic_bytes_per_s * constants.nic
    across = np.where(inside > 1, np.minimum(link, inside * nic), nic)
    ring = np.where(inside < ranks, across, link)
    latency = np.where(np.asarray(ranks) > 1, constants.latency, 0.0)
    at_site = np.clip(rates.site // np.maximum(1, stride), 1, ranks)
    far = at_site < ranks
    ring = np.where(far, np.minimum(ring, at_site * rates.far_bytes_per_s), ring)
    nic = np.where(far, np.minimum(nic, rates.far_bytes_per_s), nic)
    latency = latency + np.where(far, rates.far_latency_s, 0.0)
    hop = np.where(far, np.maximum(constants.hop, rates.far_latency_s), constants.hop)
    return Group(ranks, inside, ring, link, nic, latency, hop * (ranks - 1), rates.reduction_gain)


def gather_s(whole: Numbers, group: Group) -> Numbers:
    """Return the seconds of an all-gather or reduce-scatter of a message of `whole` bytes in all."""
    return (group.ranks - 1) / group.ranks * whole / group.ring + group.latency + group.round


def all_reduce_s(message: Numbers, group: Group, in_switch: Numbers = True) -> Numbers:
    """Return the seconds of an all-reduce of `message` bytes; where the switch sums, it is faster by its gain."""
    gain = np.where(group.crosses | ~np.asarray(in_switch, bool), 1.0, group.reduction_gain)
    steps = np.minimum(2 * group.round, 2 * group.latency * np.log2(np.maximum(2, group.ranks)))  # a ring, or a tree
    return 2 * (group.ranks - 1) / group.ranks * message / (group.ring * gain) + 2 * group.latency + steps


def all_to_all_s(message: Numbers, group: Group, crossing: Numbers = 1.0) -> Numbers:
    """Return the seconds of an all-to-all: each rank has `message` bytes, an equal part for every other rank.

    Links inside the node and to others carry it at the same time.
    crossing: share of the data for other nodes that is sent there; the rest is copied on arrival.
    """
    other_nodes = crossing * message * (1 - group.inside / group.ranks) / group.nic
    this_node = message * (group.inside - 1) / group.ranks / group.link
    return np.maximum(other_nodes, this_node) + group.latency


def send_s(message: Numbers, group: Group) -> Numbers:
    """Return the seconds of a send to the next rank; the slowest pair, across nodes, decides."""
    return message / np.where(group.crosses, group.nic, group.link) + np.where(
        np.asarray(group.ranks) > 1, group.latency, 0.0
    )


def between_sites_s(sent: float, cluster: Cluster, messages: int) -> float:
    """Return the seconds of `sent` bytes over the thinnest link of a cluster, and of messages one after the other."""
    thinnest = min(link.bandwidth_bytes_per_s for link in cluster.links)
    return sent / thinnest + messages * max(link.latency_s for link in cluster.links)
