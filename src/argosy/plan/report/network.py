"""The report of a network whose topology is known: the places of a plan's ranks, the time of each axis there, and the
files that put the ranks there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from argosy.errors import UserError
from argosy.plan.cost.collectives import (
    Group,
    all_reduce_s,
    all_reduces,
    all_to_all_s,
    gather_s,
    gathers,
    send_s,
    shared,
)
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import first_of, seconds
from argosy.plan.cost.fabric import ORDERS, RANK_PARTS, Fabric
from argosy.plan.cost.step_time import StepModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.topology import Topology, hosts_of
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan


@dataclass(frozen=True)
class AxisOnNetwork:
    """One axis of a plan's mesh on the network."""

    axis: str
    ranks: int
    spans: tuple[tuple[str, int], ...]
    """Unit of the network -> how many ranks, or units of them, lie in one: (("node", 8), ("leaf", 4))."""
    collective: str
    algorithm: str
    """The one of the network's algorithms that takes least; ring where there is one only."""
    message_bytes: float
    seconds: float
    """Seconds of one such message, with all groups of the axis at it."""
    shares_with: tuple[str, ...]
    """Axes whose messages pass the same wires."""


@dataclass(frozen=True)
class NetworkReport:
    """Placement of a plan's ranks on a network."""

    kind: str
    order: tuple[str, ...]
    """Parts of the rank beyond a node, from those next to each other outwards."""
    dims: tuple[int, ...]
    """Torus: devices along each dimension, in the order in which ranks fill them."""
    circuits: tuple[tuple[str, int], ...]
    """Circuits of a node for each part of the rank."""
    is_moved: bool
    """True if ranks are not in the order of the network's nodes."""
    step_s: float
    in_order_step_s: float
    """The same with ranks in that order."""
    axes: tuple[AxisOnNetwork, ...]


AXIS_COLUMNS = {
    "axis": False, "ranks": True, "where": False, "collective": False, "algorithm": False, "MB": True, "takes": True,
    "at once on the same wires": False,
}  # fmt: skip
"""Columns of the table of axes; True for numbers."""


def network_in_words(found: NetworkReport) -> str:
    """Return where the ranks are, in a sentence."""
    facts = [f"dimensions {' x '.join(map(str, found.dims))}"] if found.dims else []
    facts += [f"circuits of a node: {', '.join(f'{many} for {name}' for name, many in found.circuits)}"] * bool(
        found.circuits
    )
    order = ", then ".join(found.order)
    if found.is_moved:
        facts.append(
            f"next to each other {order}: {seconds(found.step_s)}, with ranks in the order of nodes "
            f"{seconds(found.in_order_step_s)} (--rank-map FILE writes which machine has which ranks)"
        )
    elif len(found.order) > 1:
        facts.append(f"next to each other {order}, as ranks are counted: no other placement saves 1 %")
    return f"Network, {found.kind}: {'; '.join(facts) or 'ranks as they are counted'}"


def axis_cells(axis: AxisOnNetwork) -> tuple[str, ...]:
    """Return what an axis has in each of `AXIS_COLUMNS`."""
    return (
        axis.axis,
        str(axis.ranks),
        " x ".join(f"{many} ({name})" for name, many in axis.spans),
        axis.collective.replace("_", "-"),
        axis.algorithm,
        f"{axis.message_bytes / 1e6:,.1f}",
        seconds(axis.seconds),
        ", ".join(axis.shares_with) or "-",
    )


def network_report(costs: CostModel, plan: Plan) -> NetworkReport | None:
    """Return where the ranks of a plan are; None if the cluster's file does not say how nodes are joined."""
    fabric, rows = costs.rates.fabric, Layouts.of([plan])
    placed = costs.placements(rows)
    if fabric is None or placed is None:
        return None
    way = placed.ways[int(placed.rows[0])]
    model = costs.step_model(rows)
    assert model.rates.fabric is not None
    sizes = [int(size[0]) for size in fabric.sizes_of(rows)]
    in_order = replace(costs, is_in_order=True)
    return NetworkReport(
        kind=fabric.topology.kind,
        order=tuple(RANK_PARTS[part] for part in ORDERS[way.order] if sizes[part] > 1),
        dims=way.dims,
        circuits=tuple(
            (name, many) for name, many, size in zip(RANK_PARTS, way.circuits, sizes, strict=False) if size > 1
        ),
        is_moved=way != placed.ways[0],
        step_s=costs.step_s(plan),
        in_order_step_s=in_order.step_s(plan),
        axes=tuple(_axes(model, plan, model.rates.fabric)),
    )


def _axes(model: StepModel, plan: Plan, fabric: Fabric) -> list[AxisOnNetwork]:
    dense, experts = (first_of(part) for part in model.summed_parameters)
    gradients = "all_reduce" if plan.zero == 0 else "reduce_scatter"
    stride, apart = plan.tp * plan.cp * plan.dp, round(first_of(model.expert_tp))
    context = ("all_to_all", model.heads) if plan.context == "ulysses" else ("send", model.keys_and_values)
    found = [
        ("tp", plan.tp, 1, model.tensor_group, "all_reduce", model.hidden),
        ("cp", plan.cp, plan.tp, model.context_group, *context),
        ("ep", plan.ep, apart, model.expert_group, "all_to_all", model.to_experts),
        ("dp", plan.dp * plan.cp, plan.tp, model.data_group, gradients, (dense + experts) * model.reduced_bytes),
        ("pp", plan.pp, stride, model.stage_group, "send", model.hidden_bytes),
    ]
    rows = [row for row in found if row[1] > 1]
    return [
        AxisOnNetwork(
            axis=name,
            ranks=ranks,
            spans=tuple(fabric.spans(ranks, stride, int(model.rates.node))),
            collective=kind,
            algorithm=_algorithm(kind, first_of(size), group),
            message_bytes=first_of(size),
            seconds=_seconds(kind, first_of(size), group),
            shares_with=tuple(other[0] for other in rows if other[0] != name and _meet(group, other[3])),
        )
        for name, ranks, stride, group, kind, size in rows
    ]


def _meet(one: Group, other: Group) -> bool:
    return bool(np.any(np.asarray(shared(one, other)) > 0))


def _algorithm(kind: str, size: float, group: Group) -> str:
    if kind in ("send", "all_to_all"):
        return "direct"
    if not bool(np.any(group.crosses)):
        return "ring"
    found = all_reduces(size, group) if kind == "all_reduce" else gathers(size, group)
    return min(found, key=lambda name: first_of(found[name]))


def _seconds(kind: str, size: float, group: Group) -> float:
    if kind == "all_to_all":
        return first_of(all_to_all_s(size, group))
    if kind == "all_reduce":
        return first_of(all_reduce_s(size, group))
    return first_of(send_s(size, group) if kind == "send" else gather_s(size, group))


def rank_map(costs: CostModel, cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    """Return the names of the machines in the order of a plan's ranks. Raises: UserError if they have no names."""
    topology = with_names(cluster, "--rank-map")
    fabric = costs.step_model(Layouts.of([plan])).rates.fabric
    assert fabric is not None
    names = tuple(hosts_of(topology.hosts))
    return tuple(names[machine] for machine in fabric.machine_of(plan, fabric.unit // cluster.devices_per_machine))


def slurm_topology(cluster: Cluster) -> str:
    """Return SLURM's topology.conf of a cluster. Raises: UserError if its machines have no names, or it is no tree."""
    topology = with_names(cluster, "--slurm-topology")
    try:
        per_node = cluster.devices_per_node // cluster.devices_per_machine
        if len(cluster.sites) == 1:
            return topology.slurm(tuple(hosts_of(topology.hosts)), per_node)
        trees = [topology.slurm(cluster.hosts_at(site), per_node, f"{site}-") for site in cluster.sites]
    except ValueError as problem:
        raise UserError(
            f"--slurm-topology: topology.{problem}. Use --rank-map with --distribution=arbitrary."
        ) from None
    tops = [tree.splitlines()[-1].split()[0].removeprefix("SwitchName=") for tree in trees]
    return f"{''.join(trees)}SwitchName=sites Switches={','.join(tops)}\n"


def with_names(cluster: Cluster, option: str) -> Topology:
    """Return the topology of a cluster whose machines have names. Raises: UserError for any other."""
    topology = cluster.topology
    if topology is None:
        raise UserError(
            f"{option}: cluster {cluster.name or 'at hand'} has no table topology, which says how nodes are joined. "
            'Add [topology] with kind = "fat-tree" or another to its file (docs/networks.md).'
        )
    if not topology.hosts:
        raise UserError(
            f'{option}: topology.hosts names no machines. Add hosts = "node[001-{cluster.machines:03d}]" to the table '
            "topology of the cluster's file, in the order in which they are cabled."
        )
    return topology
