"""The few free numbers of the cost model: only measurements tell them, no formula does.

`Constants()` holds guesses made before any measurement, each with the factor by which it may be off; a fit is penalised
for leaving them. `fitted()` returns the constants that `benchmarks/planner/fit.py` found for published runs of all
systems and devices together.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

FITTED = Path(__file__).parent / "fitted.toml"
"""The file that `benchmarks/planner/fit.py` writes."""


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
