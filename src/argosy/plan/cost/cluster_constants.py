"""The cost model's constants for a cluster: fitted to published runs, or measured by a probe.

A probe tells how fast matmuls of a model's shapes are beside large ones, the rate of attention, the host's time for a
layer, and how long collectives take to start, in groups of several sizes. On CPUs nothing overlaps with anything else,
because the same cores do all of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from argosy.plan.cost.constants import Constants, fitted
from argosy.plan.cost.layer_time import BACKWARD_ATTENTION, INTENSITY
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import Device, Format
from argosy.plan.hardware.measurements import CollectiveRate, Measurements

ON_CPUS = {
    **dict.fromkeys(("exposed_tensor", "exposed_experts", "exposed_context", "exposed_pipeline"), 1.0),
    "exposed_gradients": 1.0,
    "unfused": 1.0,
    "step": 3e-3,
    "workspace_bytes": 120e6,
}
"""Constants of processes on CPUs, which no published run covers. Nothing overlaps; a first step makes torch's code and
the buffers of BLAS and gloo resident (`benchmarks/results/planner_memory_cpu.md`)."""
COMPILER_BYTES = 75e6
"""What torch.compile adds to that: its own code, and what it keeps of graphs (the same runs)."""
CPU_MEMORY_STD = 0.10
"""Standard deviation (of the logarithm) to add to that of memory on CPUs (the same runs)."""
CPU_STD, ASSUMED_STD = 0.25, 0.5
"""Standard deviations (of the logarithm) to add on CPUs, and where nobody measured the device."""
ASSUMED = {"peak_flops_per_s", "matmul_efficiency", "memory_bytes_per_s", "link_bytes_per_s"}
HALF_SIZES = np.geomspace(1, 2000, 100)
"""Values tried for `Constants.half_size`."""


def constants_of(cluster: Cluster) -> Constants:
    """Return the constants for predictions on `cluster`."""
    constants, _ = fitted()
    device, found = cluster.device, cluster.measured or Measurements()
    if device.kind == "cpu":
        constants = replace(constants, **ON_CPUS)
    return replace(
        constants,
        **_matmuls(device, found),
        **_attention(device, found),
        **_collectives(found.collectives, constants),
        **({"host": found.layer_host_s} if found.layer_host_s else {}),
    )


def time_std(cluster: Cluster, experts: bool) -> float:
    """Return the standard deviation of the logarithm of measured over predicted time, on a cluster without factors."""
    _, spread = fitted()
    device = cluster.device
    published = spread.moe_time if experts else spread.dense_time
    on_cpus = CPU_STD if device.kind == "cpu" else 0.0
    return math.hypot(published, on_cpus, ASSUMED_STD if ASSUMED & set(device.assumed) else 0.0)


def memory_std(cluster: Cluster) -> float:
    """Return the standard deviation of the logarithm of measured over predicted memory, without factors."""
    _, spread = fitted()
    return math.hypot(spread.memory, CPU_MEMORY_STD if cluster.device.kind == "cpu" else 0.0)


def _matmuls(device: Device, found: Measurements) -> dict[str, float]:
    """Return the speed and half size that explain measured matmuls of the model's shapes best, weighted by time."""
    rows = [row for row in found.matmuls if row.kind != "square" and row.number_format == _fastest(device)]
    if not rows:
        return {}
    sizes = np.array([(row.m, row.k, row.n) for row in rows], float)
    large = device.matmul_flops_per_s(_fastest(device))
    speed = np.log(np.array([row.flops_per_s for row in rows]) / large)
    flops = sizes.prod(axis=1)
    half = HALF_SIZES[:, None, None] * large / device.memory_bytes_per_s / INTENSITY
    slowed = np.log1p(half / sizes).sum(axis=2)
    level = ((speed + slowed) * flops).sum(axis=1) / flops.sum()
    misses = ((speed + slowed - level[:, None]) ** 2 * flops).sum(axis=1)
    best = int(np.argmin(misses))
    return {"matmul": float(np.exp(level[best])), "half_size": float(HALF_SIZES[best])}


def _attention(device: Device, found: Measurements) -> dict[str, float]:
    """Return the rate of attention over that of large matmuls, forward and backward together.

    The backward has 2.5 times forward's FLOPs; a measured backward rate counts 2 times.
    """
    for row in found.attention:
        if row.number_format == _fastest(device):
            rate = (1 + BACKWARD_ATTENTION) / (1 / row.forward_flops_per_s + 2 / row.backward_flops_per_s)
            return {"attention": rate / device.matmul_flops_per_s(row.number_format)}
    return {}


def _fastest(device: Device) -> Format:
    """Return the format in which matmuls were measured: the one that the trainer chooses by default."""
    return max(("bf16", "fp16", "fp32"), key=lambda fmt: device.matmul_flops_per_s(fmt) if fmt in device.formats else 0)


def _collectives(rows: tuple[CollectiveRate, ...], before: Constants) -> dict[str, float]:
    """Return the seconds to start a collective, and those that each further rank adds.

    Gathering takes at least latency + (n - 1) hop. The probe's bandwidths are those of collectives, so that nothing is
    lost from them.
    """
    starts = [row for row in rows if row.operation in ("all_gather", "reduce_scatter") and row.tier == "node"]
    smallest: dict[int, float] = {}
    for row in starts:
        if row.from_bytes == min(r.from_bytes for r in starts):
            smallest[row.ranks] = max(row.latency_s, smallest.get(row.ranks, 0.0))
    if not smallest:
        return {}
    hops, seconds = np.array(list(smallest), float) - 1, np.array(list(smallest.values()))
    usual = before.hop / before.latency
    hop = np.polyfit(hops, seconds, 1)[0] if len(hops) > 1 else seconds[0] * usual / (1 + usual * hops[0])
    hop = max(float(hop), 1e-7)
    return {"latency": max(float(np.mean(seconds - hop * hops)), 1e-7), "hop": hop, "link": 1.0, "nic": 1.0}
