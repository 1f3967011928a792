"""The local machine as a cluster: as a probe described it, or else, roughly, as the catalogue has its devices.

This process may use as much memory as the machine, the control groups it is in (version 1 and 2) and its limits allow.
"""

from __future__ import annotations

import math
import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.hardware.clusters import Cluster, NodeGroup
from argosy.plan.hardware.devices import Efficiencies, PeakFlops, device_names, find_device
from argosy.plan.hardware.measurements import Measurements

NOT_OF_THE_NAME = re.compile(r"nvidia|amd|instinct|tesla|hbm\d?e?")
"""Words in the driver's name of a device that the catalogue leaves out."""
PROBED = Path("cluster.toml")
"""File in which `argosy probe` describes the machine."""


@dataclass(frozen=True)
class DetectedHardware:
    """The devices that a run finds when it starts."""

    device: str
    """cpu, or the driver's name of the GPU."""
    processes: int
    per_node: int
    """Processes on one host."""
    peak_flops_per_s: Mapping[str, float]
    """Number format -> matmul rate of one process while all processes measure it."""


def cluster_of(run: RunConfig) -> Cluster | None:
    """Return the description of the machine: launch.cluster, else cluster.toml if it was probed on this host.

    Raises: UserError if launch.cluster is no cluster.
    """
    if run.launch.cluster:
        try:
            return Cluster.parse(run.launch.cluster)
        except UserError as error:
            raise UserError(f"launch.cluster: {error}") from None
    if not PROBED.is_file():
        return None
    try:
        probed = Cluster.load(PROBED)
    except UserError:  # some other file with that name
        return None
    return probed if probed.measured and probed.measured.host == socket.gethostname() else None


def own_part(run: RunConfig, cluster: Cluster) -> Cluster:
    """Return the part of a cluster of several sites that the run is at.

    That is the site which the run is, if it is one of several; and without sites, where nobody named the cluster, the
    one that was probed. Else all of it.
    """
    probed = "" if run.sites or run.launch.cluster or cluster.measured is None else cluster.measured.site
    site = run.site if run.sites else probed
    return cluster.of_site(site) if cluster.links and site in cluster.sites else cluster


def machine_at_hand(run: RunConfig, hardware: DetectedHardware) -> Cluster | None:
    """Return the cluster that a prediction of `run` on this hardware is made for.

    None if nobody described the machine and the catalogue does not know its devices.
    Raises: UserError if launch.cluster is no cluster.
    """
    known = cluster_of(run)
    cluster = _rough(hardware) if known is None else own_part(run, known)
    return cluster and resized(cluster, hardware.processes)


def device_named(driver_s: str) -> str:
    """Turn a driver's name of a device into the catalogue's: NVIDIA H100 80GB HBM3 -> h100-80gb.

    Nothing else is left out: an H100 NVL is not an H100 SXM, and it is better to ask.
    """
    words = driver_s.lower().replace("-", " ").split()
    return "-".join(word for word in words if not NOT_OF_THE_NAME.fullmatch(word))


def _rough(hardware: DetectedHardware) -> Cluster | None:
    if hardware.device == "cpu":
        device, rates = find_device("cpu"), PeakFlops(**hardware.peak_flops_per_s)
        efficiency = Efficiencies(**dict.fromkeys(hardware.peak_flops_per_s, 1.0))
        device = device.model_copy(update={"peak_flops_per_s": rates, "matmul_efficiency": efficiency})
        name = "this CPU (argosy probe measures more of it)"
    else:
        driver_s = device_named(hardware.device)
        if driver_s not in device_names():
            return None
        device = find_device(driver_s)
        name = f"{hardware.processes} x {device.name}, by the catalogue"
    nodes = -(-hardware.processes // hardware.per_node)
    return Cluster(name=name, groups=(NodeGroup(device=device, nodes=nodes, devices_per_node=hardware.per_node),))


OF_MACHINE = ("power_w", "node_power_w", "price_low_usd_per_h", "price_usd_per_h", "price_high_usd_per_h")
"""Figures of a CPU's device of which a machine has as much whatever the number of its processes."""


def resized(cluster: Cluster, processes: int) -> Cluster:
    """Return the cluster with so many processes on each of its CPU nodes, where they share the cores and the memory.

    A process has its share of arithmetic, memory, power and price. What one process does alone (starting operations,
    messages) becomes slower with more processes than there were, and not faster with fewer. Accelerators stay as they
    are.
    """
    if cluster.device.kind != "cpu" or len(cluster.groups) > 1:
        return cluster
    (group,) = cluster.groups
    here = max(1, processes // group.nodes)
    share = group.devices_per_node / here
    alone = min(1.0, share)
    device = group.device
    smaller = device.model_copy(
        update={
            "peak_flops_per_s": _scaled(device.peak_flops_per_s, share),
            "memory_bytes": device.memory_bytes * share,
            "memory_bytes_per_s": device.memory_bytes_per_s * share,
            "link_bytes_per_s": device.link_bytes_per_s * alone,
            "ring_busbw_bytes_per_s": device.ring_busbw_bytes_per_s and device.ring_busbw_bytes_per_s * alone,
            "link_latency_s": device.link_latency_s / alone,
            "nic_bytes_per_s": device.nic_bytes_per_s * share,
            "devices_per_node": here,
            "devices_per_host": here,
            "mtbf_h": device.mtbf_h and device.mtbf_h / share,
            **{key: value * share for key in OF_MACHINE if (value := getattr(device, key)) is not None},
        }
    )
    of_group = {
        "device": smaller,
        "devices_per_node": here,
        "link_bytes_per_s": group.link_bytes_per_s * alone,
        "nic_bytes_per_s": group.nic_bytes_per_s * share,
    }
    changed = {
        "groups": (group.model_copy(update=of_group),),
        "network": tuple(
            tier.model_copy(
                update={
                    "devices": max(1, round(tier.devices / share)),
                    "bandwidth_bytes_per_s": tier.bandwidth_bytes_per_s * share,
                }
            )
            for tier in cluster.network
        ),
        "price_per_device_h": cluster.price_per_device_h and cluster.price_per_device_h * share,
        "measured": cluster.measured and _resized(cluster.measured, share, alone),
    }
    return cluster.changed(**changed)


def _scaled(rates: PeakFlops, share: float) -> PeakFlops:
    return PeakFlops(**{name: rate * share for name, rate in rates.model_dump(exclude_none=True).items()})


def _resized(found: Measurements, share: float, alone: float) -> Measurements:
    scale = {
        "matmuls": tuple(row.model_copy(update={"flops_per_s": row.flops_per_s * share}) for row in found.matmuls),
        "attention": tuple(
            row.model_copy(
                update={
                    "forward_flops_per_s": row.forward_flops_per_s * share,
                    "backward_flops_per_s": row.backward_flops_per_s * share,
                }
            )
            for row in found.attention
        ),
        "collectives": tuple(
            row.model_copy(
                update={
                    "latency_s": row.latency_s / alone,
                    "bytes_per_s": row.bytes_per_s and row.bytes_per_s * alone,
                }
            )
            for row in found.collectives
        ),
        "layer_host_s": found.layer_host_s and found.layer_host_s / alone,
    }
    return found.model_copy(update=scale)


PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60
"""Version 1 writes "none" as a number near 2^63."""


@dataclass(frozen=True)
class MemoryReading:
    """A node's memory at one moment."""

    available_bytes: int
    """Memory that can be used before a process is killed."""
    limit_bytes: int
    """The machine's memory, or the control group's limit."""
    oom_kills: int
    """Processes of the control group that the kernel has killed so far because memory ran out."""
    machine_oom_kills: int
    """The same for the whole machine, including groups that reached their own limit."""


def read_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryReading:
    """Read how much memory is left on this node, without the file pages that the kernel frees when needed."""
    kills = None
    for folder in _groups(proc, cgroup):
        if kills is None:  # the group's own count: groups above it count other processes too
            kills = (_table(folder / "memory.events") or _table(folder / "memory.oom_control")).get("oom_kill")
    return MemoryReading(*min(_left(proc, cgroup)), kills or 0, _table(proc / "vmstat").get("oom_kill", 0))


def host_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Return the memory of the machine, or of the control group with the lowest limit."""
    return float(min(limit for _, limit in _left(proc, cgroup)))


def cores_here(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return how many CPUs this process may keep busy: those that it may run on, or fewer by its control group's quota.

    More threads would be stopped together for a part of each period (a container with a limit on CPUs).
    """
    quotas = (_quota(folder) for folder in _groups(proc, cgroup, "cpu"))
    return max(1, int(min((len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota)))))


def _quota(folder: Path) -> float:
    """Return the CPUs that a control group may use; 0 if it has no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = (str(_number(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else 0.0


def process_memory_bytes() -> float:
    """Return the most memory that one process of this user may have (`ulimit -v`, `-d`)."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min((float(limit) for limit in limits if limit != resource.RLIM_INFINITY), default=math.inf)


def _left(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield bytes that are available, and the limit, of the machine and of each control group that has one."""
    machine = _table(proc / "meminfo")
    yield machine["MemAvailable:"] * 1024, machine["MemTotal:"] * 1024
    for folder in _groups(proc, cgroup):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and limit < NO_LIMIT and used is not None:
            reclaimable = _table(folder / "memory.stat").get("inactive_file", 0)
            yield max(0, limit - used + reclaimable), limit


def _groups(proc: Path, root: Path, controller: str = "memory") -> Iterator[Path]:
    """Yield the control groups of this process that may limit what it has of one kind, and those above them."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / (controller if controllers else "") / path.lstrip("/")
        # In a container the path is that of the host, and the root is the group itself.
        yield from (f for f in (folder, *folder.parents) if f.is_relative_to(root) and f.is_dir())


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is none


def _table(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}
