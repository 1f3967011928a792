"""The numbers of serving that no formula gives, and how far predictions are off: fitted to published measurements.

`benchmarks/planner/fit_serving.py` writes `serving.toml` from `benchmarks/planner/inference.csv`. `ServingConstants()`
holds guesses made before any measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from argosy.plan.workload import Numbers

SERVING = Path(__file__).parent / "serving.toml"


def _guess(value: float, spread: float) -> Numbers:
    """Declare a constant: its guess, and the factor by which that may be off (one standard deviation)."""
    return field(default=value, metadata={"spread": spread})


@dataclass(frozen=True)
class ServingConstants:
    """The free numbers of the model of serving; all are positive."""

    bandwidth: Numbers = _guess(0.8, 1.15)
    """Share of the memory bandwidth for reading weights."""
    cache: Numbers = _guess(0.6, 1.3)
    """Share of the memory bandwidth for reading the cache in pages."""
    matmul: Numbers = _guess(0.75, 1.2)
    """Rate of a model's matmuls over that of large ones."""
    narrow: Numbers = _guess(0.75, 1.3)
    """The same of formats of 8 bits and fewer over that of 16: scales, conversions."""
    experts: Numbers = _guess(0.6, 1.4)
    """Rate of grouped matmuls over that of dense ones."""
    attention: Numbers = _guess(0.5, 1.4)
    """Rate of attention in prefill over that of large matmuls."""
    pointwise: Numbers = _guess(14, 1.4)
    """Hidden-state widths that a layer reads or writes outside of matmuls."""
    link: Numbers = _guess(0.7, 1.3)
    """Share of a large ring's bandwidth that sums reach."""
    sum_s: Numbers = _guess(6e-6, 1.6)
    """Seconds to start a sum over the ranks of a node, by kernels made for small messages."""
    sum_hops: Numbers = _guess(2.0, 1.6)
    """Latencies of the link that a sum waits for."""
    nic_s: Numbers = _guess(20e-6, 1.6)
    """Seconds more to start a sum across nodes."""
    layer_s: Numbers = _guess(20e-6, 2.0)
    """Seconds between the kernels of a layer: launches and gaps."""
    moe_layer_s: Numbers = _guess(20e-6, 2.0)
    """Seconds more of a layer with experts: routing, sorting."""
    pass_s: Numbers = _guess(1e-3, 2.0)
    """Seconds to schedule a pass."""
    sequence_s: Numbers = _guess(15e-6, 2.0)
    """Seconds of a sequence in each pass: sampling, text, bookkeeping."""
    request_s: Numbers = _guess(10e-3, 2.0)
    """Seconds of a request before its prefill begins, and until its first token is sent."""
    burst: Numbers = _guess(0.1, 2.0)
    """Share of the other requests' prefill that a request finds before it, where requests come as others end."""
    compute: Numbers = _guess(1.0, 1.3)
    """Time of what devices compute, read and exchange over that of most engines."""
    overhead: Numbers = _guess(1.0, 1.6)
    """Time of launches, scheduling and sampling over that of most engines."""
