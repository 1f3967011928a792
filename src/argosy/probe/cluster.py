"""From measurements to a cluster that plans can be made for; what they do not say is the catalogue's."""

from __future__ import annotations

from typing import Any

from argosy.plan.hardware.clusters import Cluster, NodeGroup, Tier
from argosy.plan.hardware.devices import Device, Efficiencies, PeakFlops
from argosy.plan.hardware.measurements import CollectiveRate, Measurements, Operation
from argosy.probe.machine import Machine
from argosy.probe.timing import four_digits


def as_cluster(catalogue: Device, machine: Machine, measured: Measurements) -> Cluster:
    """The cluster of `machine`, whose device the catalogue calls `catalogue`."""
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

    A GPU keeps its specification, and what was measured are shares of it. Of a CPU the catalogue only guesses, and the
    best matmuls take the guesses' place.
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
    """The link inside a node: a ring's bandwidth from the largest all-reduce, latency from the smallest message."""
    reduces, sends = (_rows(measured, operation, "node") for operation in ("all_reduce", "send"))
    ranks, rate = reduces[-1].ranks, reduces[-1].bytes_per_s or 0.0
    found = {
        "ring_busbw_bytes_per_s": four_digits(2 * (ranks - 1) / ranks * rate),
        "link_latency_s": sends[0].latency_s,
    }
    # A GPU's link has a specification; that of CPU processes is what gloo makes of the memory.
    return found if kind == "cuda" else found | {"link_bytes_per_s": sends[-1].bytes_per_s}


def _network(measured: Measurements, devices: int) -> tuple[Tier]:
    """What joins the nodes, shared by all their devices."""
    sends = _rows(measured, "send", "network")
    rate, latency_s = sends[-1].bytes_per_s or 0.0, sends[0].latency_s
    return (Tier(name="network", devices=devices, bandwidth_bytes_per_s=rate, latency_s=latency_s),)


def _rows(measured: Measurements, operation: Operation, tier: str) -> list[CollectiveRate]:
    """The rows of the most ranks, of those the most groups at once, by message size."""
    rows = [row for row in measured.collectives if (row.operation, row.tier) == (operation, tier)]
    ranks, groups = max((row.ranks, row.groups) for row in rows)
    return [row for row in rows if (row.ranks, row.groups) == (ranks, groups)]
