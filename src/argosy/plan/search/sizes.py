"""The numbers of devices that a run could have: of a cluster as it is, or of more of its nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster

MOST_COUNTS = 128
"""More numbers of whole nodes are thinned out."""
ROUND = (1, 3, 5, 7, 9, 11, 13, 15)
"""Numbers of nodes that are these times a power of two are not thinned out: most plans are for them."""


def counts_up_to(costs: CostModel) -> list[int]:
    """Return the numbers of devices of a site that a plan may be for: parts of a node that divide it, whole nodes."""
    node, devices = min(int(costs.rates.node), costs.devices), costs.devices
    parts = [n for n in range(1, node) if node % n == 0]
    nodes = devices // node
    whole = list(range(1, nodes + 1))
    if nodes > MOST_COUNTS:
        even = np.linspace(1, nodes, MOST_COUNTS).round().astype(int).tolist()
        powers = [1 << n for n in range(nodes.bit_length())]
        most_plans = (odd * n for n in powers for odd in ROUND if odd * n <= nodes)
        whole = sorted({*even, *most_plans})
    return sorted({*parts, *(n * node for n in whole), devices})


def rounder(count: int) -> list[int]:
    """Return the largest numbers up to `count` that are 1, 3 and 9 times a power of two; none if `count` is nearly one.

    There are more plans for these, so that the rest may stay idle.
    """
    odd = count // (count & -count)
    return [] if odd <= 3 else [n << ((count // n).bit_length() - 1) for n in (1, 3, 9) if n <= count]


def grown(cluster: Cluster, times: int) -> Cluster:
    """Return the cluster with so many times as many nodes of each group, and a network that holds them."""
    groups = tuple(group.model_copy(update={"nodes": group.nodes * times}) for group in cluster.groups)
    network = cluster.network
    if network:
        outer = network[-1]
        network = (*network[:-1], outer.model_copy(update={"devices": outer.devices * times}))
    storage = cluster.storage_bytes_per_s * times
    update = {"groups": groups, "network": network, "storage_bytes_per_s": storage}
    return Cluster.model_construct(**{**{k: getattr(cluster, k) for k in type(cluster).model_fields}, **update})


def best_of_each(score: NDArray[np.float64], devices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of the lowest score for each number of devices, the fewest first."""
    order = np.lexsort((score, devices))
    _, first = np.unique(devices[order], return_index=True)
    return np.asarray(order[first])


def fewest(does: Sequence[bool]) -> int | None:
    """Return the place of the first that does; None if none does."""
    return next((place for place, one in enumerate(does) if one), None)
