"""Turns measurements into a cluster to plan for; what they do not tell is taken from the catalogue."""

from __future__ import annotations

from typing import Any

from argosy.plan.hardware.clusters import Cluster, NodeGroup, Tier
from argosy.plan.hardware.devices import Device, Efficiencies, PeakFlops
from argosy.plan.hardware.measurements import CollectiveRate, Measurements, Operation, four_digits
from argosy.probe.machine import Machine

LEAST_LATENCY_S = 1e-6
"""What a link takes at least. A line through few messages may begin at 0: a throttle lets the first bytes pass."""


def as_cluster(catalogue: Device, machine: Machine, measured: Measurements) -> Cluster:
    """Return the cluster of `machine`, whose device the catalogue calls `catalogue`."""
    nodes, local = machine.nodes, machine.devices_per_node
    device = _device(catalogue, machine, measured)
    return Cluster(
        name=f"{nodes}x{local} {catalogue.name} at {machine.hosts[0]}",
        groups=(NodeGroup(device=device, nodes=nodes, devices_per_node=local),),
        network=_network(measured, nodes * local) if nodes > 1 else (),
        storage_bytes_per_s=measured.disk_write_bytes_per_s,
        software=machine.software,
        measured=measured,
    )


def _device(catalogue: Device, machine: Machine, measured: Measurements) -> Device:
    """One device as measured.

    A GPU keeps its specification, and measurements are shares of it. The catalogue can only guess at a CPU, so the best
    matmuls replace its guesses.
    """
    best: dict[str, float] = {}
    for rate in measured.matmuls:
        if rate.kind == "square":
            best[rate.number_format] = max(rate.flops_per_s, best.get(rate.number_format, 0.0))
    local = machine.devices_per_node
    found: dict[str, Any] = {"memory_bytes": machine.memory_bytes, "devices_per_node": local, "devices_per_host": local}
    if machine.kind == "cpu":
        found["peak_flops_per_s"] = PeakFlops(**best)
        found["matmul_efficiency"] = Efficiencies(**dict.fromkeys(best, 1.0))
        found["memory_bytes_per_s"] = measured.memory_copy_bytes_per_s
    else:
        known = catalogue.peak_flops_per_s.model_dump(exclude_none=True)
        shares = {fmt: min(1.0, rate / known[fmt]) for fmt, rate in best.items() if fmt in known}
        found["matmul_efficiency"] = catalogue.matmul_efficiency.model_copy(update=shares)
    if local > 1:
        found |= _link(measured, machine.kind)
    if machine.nodes > 1:
        tier = _network(measured, len(machine.hosts))[0]
        found |= {"nic_bytes_per_s": tier.bandwidth_bytes_per_s, "nic_latency_s": tier.latency_s}
    found |= {
        "name": f"{catalogue.name} at {machine.hosts[0]}",
        "aliases": (),
        "assumed": tuple(key for key in catalogue.assumed if key not in found),
        "source": f"argosy probe, {measured.date}; what it cannot measure: {catalogue.source}",
    }
    return catalogue.model_copy(update=found)


def _link(measured: Measurements, kind: str) -> dict[str, Any]:
    """Return the link in a node: a ring's bandwidth from the largest all-reduce, latency from the smallest message."""
    reduces, sends = (_rows(measured, operation, "node") for operation in ("all_reduce", "send"))
    ranks, rate = reduces[-1].ranks, reduces[-1].bytes_per_s or 0.0
    found = {
        "ring_busbw_bytes_per_s": four_digits(2 * (ranks - 1) / ranks * rate),
        "link_latency_s": max(LEAST_LATENCY_S, sends[0].latency_s),
    }
    # A GPU's link has a specification; that of CPU processes is what gloo makes of the memory.
    return found if kind == "cuda" else found | {"link_bytes_per_s": sends[-1].bytes_per_s}


def _network(measured: Measurements, devices: int) -> tuple[Tier]:
    """Return the link between nodes, shared by all their devices."""
    sends = _rows(measured, "send", "network")
    rate, latency_s = sends[-1].bytes_per_s or 0.0, max(LEAST_LATENCY_S, sends[0].latency_s)
    return (Tier(name="network", devices=devices, bandwidth_bytes_per_s=rate, latency_s=latency_s),)


def _rows(measured: Measurements, operation: Operation, tier: str) -> list[CollectiveRate]:
    """Return the rows with most ranks, and among these with most groups at once, by message size."""
    rows = [row for row in measured.collectives if (row.operation, row.tier) == (operation, tier)]
    ranks, groups = max((row.ranks, row.groups) for row in rows)
    return [row for row in rows if (row.ranks, row.groups) == (ranks, groups)]
