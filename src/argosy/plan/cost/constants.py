"""The cost model's few free numbers: what formulas do not say and only measurements tell.

`Constants()` is what one would assume without any measurement; how far off each may well be stands beside it, and
fits pay for leaving. `fitted()` is what `benchmarks/planner/fit.py` found for published runs, all systems and devices
together.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

FITTED = Path(__file__).parent / "fitted.toml"
"""What `benchmarks/planner/fit.py` wrote."""


def _free(guess: float, spread: float) -> float:
    """A constant: what is assumed beforehand, and the factor that it may be off by (one standard deviation)."""
    return field(default=guess, metadata={"spread": spread})


@dataclass(frozen=True)
class Constants:
    """Free numbers of time and memory; all positive."""

    matmul: float = _free(0.9, 1.15)
    """Matmuls inside a model, over large ones in a loop of their own: heat, other kernels, layouts."""
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
    """Feed-forward widths likewise."""
    unfused: float = _free(0.5, 1.4)
    """So much more of both where kernels are not fused."""
    quantize: float = _free(3, 1.7)
    """Passes over each matmul's operands that a narrow format costs."""
    permute: float = _free(10, 1.4)
    """Passes over the rows that go to experts: sorted before they leave and where they arrive, sent, and back again."""
    host: float = _free(0.3e-3, 2.0)
    """Seconds of the host for a layer's forward and backward: the floor of small kernels."""
    host_experts: float = _free(6e-3, 1.6)
    """Those that a layer with experts takes besides: routing, sorting, sending. An eager dense layer takes 2.8 ms, and
    one with experts starts two or three times as many kernels."""
    host_expert: float = _free(0.1e-3, 1.6)
    """Those for each expert on the rank: a dozen kernels, matmuls and what prepares their operands."""
    link: float = _free(0.95, 1.15)
    """Share of a large ring's bandwidth that collectives inside a step reach."""
    nic: float = _free(0.8, 1.25)
    """Share of the adapters."""
    latency: float = _free(30e-6, 2.0)
    """Seconds to start a collective."""
    hop: float = _free(2e-6, 1.7)
    """Seconds from one rank of a ring to the next."""
    exposed_tensor: float = _free(0.8, 1.25)
    """Share of tensor-parallel collectives that is waited for."""
    exposed_experts: float = _free(0.9, 1.2)
    """Share of the all-to-alls that is waited for where nothing is made to overlap them."""
    exposed_context: float = _free(0.3, 1.5)
    """Share of a ring's sends."""
    exposed_pipeline: float = _free(0.5, 1.7)
    """Share of sends between stages."""
    exposed_gradients: float = _free(0.2, 1.7)
    """Share of gradient sums that is waited for even where they fit under backward."""
    optimizer: float = _free(1.5, 1.5)
    """Time of the update over reading and writing its state once."""
    step: float = _free(10e-3, 2.0)
    """Seconds of a step outside all else."""
    straggling: float = _free(0.006, 1.7)
    """Share of the step that each doubling of the nodes costs: the slowest decides."""
    expert_matmul: float = _free(0.8, 1.2)
    """Grouped matmuls over plain ones of the same shape."""
    imbalance: float = _free(1.3, 1.15)
    """The busiest expert rank's load over the mean, where a router learns."""

    workspace_bytes: float = _free(1.0e9, 1.6)
    """Buffers of kernels and collectives."""
    fragmentation: float = _free(0.05, 1.5)
    """What the allocator holds without use, over what comes and goes in a step."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if not getattr(self, f.name) > 0:
                raise ValueError(f"{f.name} = {getattr(self, f.name)} must be positive")


@dataclass(frozen=True)
class Spread:
    """How far predictions are from published runs of sources that they were not fitted to: standard deviations of
    the logarithm, such that 1.645 of them hold nine of ten."""

    dense_time: float
    moe_time: float
    memory: float


@cache
def fitted() -> tuple[Constants, Spread]:
    """The constants that fit published runs best, and how far predictions with them are off elsewhere."""
    table = tomllib.loads(FITTED.read_text())
    return Constants(**table["constants"]), Spread(**table["spread"])
