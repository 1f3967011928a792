"""The few free numbers of the cost model: only measurements tell them, no formula does.

`Constants()` holds guesses made before any measurement, each with the factor by which it may be off; a fit is penalised
for leaving them. `fitted()` returns the constants that `benchmarks/planner/fit.py` found for published runs of all
systems and devices together, and `constants_of` those for a cluster: a probe tells how fast matmuls of a model's shapes
are beside large ones, the rate of attention, the host's time for a layer, and how long collectives take to start."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

import numpy as np

from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import Device, Format
from argosy.plan.hardware.measurements import CollectiveRate, Measurements

FITTED = Path(__file__).parent / "fitted.toml"
"""The file that `benchmarks/planner/fit.py` writes."""
BACKWARD_ATTENTION = 2.5
"""Time of attention's backward over its forward: backward computes the scores again (Dao 2023)."""
INTENSITY = 156e0
"""FLOPs for each byte of memory bandwidth of an A100 in bf16, for which `Constants.half_size` is stated."""


def _free(guess: float, spread: float) -> float:
    """Declare a constant: its guess, and the factor by which that may be off (one standard deviation)."""
    return field(default=guess, metadata={"spread": spread})


@dataclass(frozen=True)
class Constants:
    """The free numbers of the step model and the memory model; all are positive."""

    matmul: float = _free(0.9, 1.15)
    """Speed of matmuls inside a model, over that of large ones in a loop of their own: heat, other kernels, layouts."""
    half_size: float = _free(130, 1.6)
    """A matmul dimension that halves its speed, for 156 FLOP/s of the device to each byte/s of its memory (A100)."""
    attention: float = _free(0.7, 1.15)
    """Tiled attention's FLOP rate over that of large matmuls, with the best kernels for the device: FlashAttention 2
    reaches 0.70 of it on an A100, 3 on an H100 0.82 forward and 0.65 backward (Shah et al. 2024)."""
    score_passes: float = _free(12, 1.5)
    """Times that untiled attention reads or writes each score in forward."""
    pointwise: float = _free(14, 1.5)
    """Hidden-state widths that a layer's forward reads or writes outside matmuls, fused."""
    pointwise_ffn: float = _free(6, 1.5)
    """Feed-forward widths that it reads or writes outside matmuls, fused."""
    unfused: float = _free(0.5, 1.4)
    """Share by which unfused kernels read and write more."""
    quantize: float = _free(3, 1.7)
    """Passes over each matmul's operands that a narrow format costs."""
    permute: float = _free(10, 1.4)
    """Passes over the rows that go to experts, to sort them before they leave and on arrival, and to send them."""
    host: float = _free(0.3e-3, 2.0)
    """Seconds that the host takes for a layer's forward and backward: the lower bound of small kernels."""
    host_experts: float = _free(6e-3, 1.6)
    """Seconds that the host takes more for a layer with experts: routing, sorting, sending. An eager dense layer takes
    2.8 ms, and one with experts starts two or three times as many kernels."""
    host_expert: float = _free(0.1e-3, 1.6)
    """Seconds that the host takes more for each expert on the rank: a dozen kernels, for matmuls and their operands."""
    link: float = _free(0.95, 1.15)
    """Share of a large ring's bandwidth that collectives inside a step reach."""
    nic: float = _free(0.8, 1.25)
    """Share of the network adapters' bandwidth that collectives inside a step reach."""
    latency: float = _free(30e-6, 2.0)
    """Seconds to start a collective."""
    hop: float = _free(2e-6, 1.7)
    """Seconds from one rank of a ring to the next."""
    exposed_tensor: float = _free(0.8, 1.25)
    """Share of tensor-parallel collectives that is exposed: computation waits for it."""
    exposed_experts: float = _free(0.9, 1.2)
    """Exposed share of the all-to-alls where nothing is made to overlap them."""
    exposed_context: float = _free(0.3, 1.5)
    """Exposed share of a ring's sends."""
    exposed_pipeline: float = _free(0.5, 1.7)
    """Exposed share of sends between stages."""
    exposed_gradients: float = _free(0.2, 1.7)
    """Share of gradient sums that is exposed even where they fit under backward."""
    optimizer: float = _free(1.5, 1.5)
    """Time of the update, over the time of reading and writing its state once."""
    step: float = _free(10e-3, 2.0)
    """Seconds of a step outside all other categories."""
    straggling: float = _free(0.006, 1.7)
    """Share of the step that each doubling of the nodes costs, because the slowest rank decides."""
    expert_matmul: float = _free(0.8, 1.2)
    """Speed of grouped matmuls over plain ones of the same shape."""
    imbalance: float = _free(1.3, 1.15)
    """Load of the busiest expert rank over the mean, where a router learns."""

    workspace_bytes: float = _free(1.0e9, 1.6)
    """Bytes of the buffers of kernels and collectives."""
    fragmentation: float = _free(0.05, 1.5)
    """Bytes that the allocator holds unused, over the bytes that come and go in a step."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if not getattr(self, f.name) > 0:
                raise ValueError(f"{f.name} = {getattr(self, f.name)} must be positive")


@dataclass(frozen=True)
class Spread:
    """Errors of predictions for published runs that the constants were not fitted to.

    Times: of runs whose publisher's lineage and whose device's generation taught nothing, and whose recipes were not
    read. Memory: of runs whose publisher taught nothing. They are standard deviations of the logarithm, such that 1.645
    of them hold nine of ten errors.
    """

    dense_time: float
    moe_time: float
    memory: float


@cache
def fitted() -> tuple[Constants, Spread]:
    """Return the constants that fit published runs best, and the errors of predictions with them elsewhere."""
    table = tomllib.loads(FITTED.read_text())
    return Constants(**table["constants"]), Spread(**table["spread"])


ON_CPUS = {
    **dict.fromkeys(("exposed_tensor", "exposed_experts", "exposed_context", "exposed_pipeline"), 1.0),
    "exposed_gradients": 1.0,
    "unfused": 1.0,
    "step": 3e-3,
    "workspace_bytes": 130e6,
}
"""Constants of processes on CPUs, which no published run covers. Nothing overlaps; a first step makes torch's code and
the buffers of BLAS and gloo resident (`benchmarks/results/planner_memory_cpu.md`)."""
CPU_MEMORY_STD = 0.12
"""Standard deviation (of the logarithm) to add to that of memory on CPUs (the same runs)."""
CPU_STD, ASSUMED_STD = 0.25, 0.5
"""Standard deviations (of the logarithm) to add on CPUs, and where nobody measured the device."""
ASSUMED = {"peak_flops_per_s", "matmul_efficiency", "memory_bytes_per_s", "link_bytes_per_s"}
HALF_SIZES = np.geomspace(1, 2000, 100)
"""Values tried for `Constants.half_size`."""


def constants_of(cluster: Cluster) -> Constants:
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
    slowed = np.log1p((half / sizes).sum(axis=2))
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
