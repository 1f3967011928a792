"""The numbers of serving that no formula gives, and how far predictions are off: fitted to published measurements.

`benchmarks/planner/fit_serving.py` writes `serving.toml` from `benchmarks/planner/inference.csv`. `ServingConstants()`
holds guesses made before any measurement.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod
from pathlib import Path

from argosy.plan.workload import Numbers

SERVING_FILE = Path(__file__).parent / "serving.toml"
"""The file that `benchmarks/planner/fit_serving.py` writes."""
ENGINE_SPELLINGS = {
    "vLLM": r"vllm",
    "SGLang": r"sglang",
    "TensorRT-LLM": r"tensorrt(?:-?llm)?|trt-?llm|\bnim\b",
    "LMDeploy": r"lmdeploy|turbomind",
    "FasterTransformer": r"fastertransformer",
    "DeepSpeed": r"deepspeed",
    "DeepSpeed-MII": r"deepspeed-?(?:mii|fastgen)",
    "llama.cpp": r"llama\.?cpp",
    "TGI": r"\btgi\b|text-generation-inference",
}
"""Engine -> how sources write it."""
NEW = {"vLLM": (0, 6), "TensorRT-LLM": (0, 16)}
"""Releases before these, of 2024 and earlier, count as engines of their own ("old"): vLLM 0.6 took scheduling off the
path of passes, TensorRT-LLM 0.16 has today's kernels for small sums and fp8."""
PAST = ("FasterTransformer", "DeepSpeed-MII", "DeepSpeed", "llama.cpp", "LMDeploy")
"""Engines that were measured in releases of 2024 and earlier only."""


@dataclass(frozen=True)
class ServingConstants:
    """The free numbers of the model of serving; all are positive.

    The default is a guess made before any measurement; "spread" is the factor by which it may be off (one standard
    deviation).
    """

    bandwidth: Numbers = field(default=0.8, metadata={"spread": 1.15})
    """Share of the memory bandwidth for reading weights."""
    cache: Numbers = field(default=0.6, metadata={"spread": 1.3})
    """Share of the memory bandwidth for reading the cache in pages."""
    matmul: Numbers = field(default=0.75, metadata={"spread": 1.2})
    """Rate of a model's matmuls over that of large ones."""
    half_tokens: Numbers = field(default=32, metadata={"spread": 2.0})
    """Tokens of a pass that halve the rate of matmuls."""
    narrow: Numbers = field(default=0.75, metadata={"spread": 1.3})
    """The same of formats of 8 bits and fewer over that of 16: scales, conversions."""
    experts: Numbers = field(default=0.6, metadata={"spread": 1.4})
    """Rate of grouped matmuls over that of dense ones."""
    attention: Numbers = field(default=0.5, metadata={"spread": 1.4})
    """Rate of attention in prefill over that of large matmuls."""
    pointwise: Numbers = field(default=14, metadata={"spread": 1.4})
    """Hidden-state widths that a layer reads or writes outside of matmuls."""
    link: Numbers = field(default=0.7, metadata={"spread": 1.3})
    """Share of a large ring's bandwidth that sums reach."""
    sum_s: Numbers = field(default=6e-6, metadata={"spread": 1.6})
    """Seconds to start a sum over the ranks of a node, by kernels made for small messages."""
    sum_hops: Numbers = field(default=2.0, metadata={"spread": 1.6})
    """Latencies of the link that a sum waits for."""
    nic_s: Numbers = field(default=20e-6, metadata={"spread": 1.6})
    """Seconds more to start a sum across nodes."""
    library_s: Numbers = field(default=20e-6, metadata={"spread": 1.6})
    """Seconds more to start a sum by NCCL or RCCL."""
    layer_s: Numbers = field(default=20e-6, metadata={"spread": 2.0})
    """Seconds between the kernels of a layer: launches and gaps."""
    moe_layer_s: Numbers = field(default=20e-6, metadata={"spread": 2.0})
    """Seconds more of a layer with experts: routing, sorting."""
    pass_s: Numbers = field(default=1e-3, metadata={"spread": 2.0})
    """Seconds to schedule a pass."""
    sequence_s: Numbers = field(default=15e-6, metadata={"spread": 2.0})
    """Seconds of a sequence in each pass: sampling, text, bookkeeping."""
    eager_layer_s: Numbers = field(default=300e-6, metadata={"spread": 2.0})
    """Seconds that the host needs to launch a layer of a pass with prompts, kernel by kernel; they hide behind
    computing."""
    request_s: Numbers = field(default=10e-3, metadata={"spread": 2.0})
    """Seconds that a server takes for a request before its prefill begins, and until its first token has been sent."""
    burst: Numbers = field(default=0.05, metadata={"spread": 2.0})
    """Share of the other requests' prefill that a request finds before it, beside what comes at random: in published
    benchmarks the first requests come together, 1/(2 rounds) of all."""
    compute: Numbers = field(default=1.0, metadata={"spread": 1.3})
    """Time of what devices compute, read and exchange over that of most engines."""
    overhead: Numbers = field(default=1.0, metadata={"spread": 1.6})
    """Time of launches, scheduling and sampling over that of most engines."""


@dataclass(frozen=True)
class ServingEngine:
    """The software that serves."""

    name: str = ""
    """A key of `ENGINE_SPELLINGS`; "" if unknown."""
    old: bool = False
    """A release of 2024 or earlier."""

    @classmethod
    def of(cls, text: str, version: tuple[int, int] | None = None) -> ServingEngine:
        """Return the engine that a text names last, as "vLLM 0.5" or a source; version: if the text says none."""
        low = text.lower()
        found = [(m.start(), name) for name, pattern in ENGINE_SPELLINGS.items() for m in re.finditer(pattern, low)]
        if not found:
            return cls()
        name = max(found, key=lambda each: (each[0], len(each[1])))[1]
        said = re.search(rf"(?:{ENGINE_SPELLINGS[name]})[ :@=-]*v?(\d+)\.(\d+)", low)
        number = (int(said[1]), int(said[2])) if said else version
        return cls(name, name in PAST or (name in NEW and number is not None and number < NEW[name]))

    @property
    def label(self) -> str:
        """Name of the engine with its age, as in `serving.toml`."""
        return f"{self.name} old" if self.old and self.name in NEW else self.name

    def groups(self, vendor: str, device: str) -> tuple[str, ...]:
        """Return the groups whose shifts of constants it has on a maker's device, from the wide to the narrow.

        Most measurements are from NVIDIA's devices, so that the others differ from them.
        """
        engine = (self.name, self.label) if self.name else ()
        port = () if vendor == "NVIDIA" else (vendor, f"{self.label} on {vendor}", f"{self.label} on {device}")
        return tuple(dict.fromkeys((*(("old",) if self.old else ()), *engine, *port)))


@dataclass(frozen=True)
class FittedServing:
    """The constants that published measurements give."""

    constants: ServingConstants
    shifts: Mapping[str, Mapping[str, float]]
    """Group -> constant -> factor on it."""
    spread: Mapping[str, Mapping[str, float]]
    """Kind of prediction -> metric -> standard deviation of the logarithm of measured over predicted."""
    publishers: Mapping[str, float]
    """Publisher -> logarithm of its predicted over measured times: what its setup makes of all its figures."""

    def of(self, engine: ServingEngine, vendor: str, device: str) -> ServingConstants:
        """Return the constants of an engine on a maker's device; the population's where nothing is known of them."""
        groups = [self.shifts.get(group, {}) for group in engine.groups(vendor, device)]
        return ServingConstants(
            **{
                f.name: getattr(self.constants, f.name) * prod(group.get(f.name, 1.0) for group in groups)
                for f in fields(ServingConstants)
            }
        )


@cache
def fitted_serving() -> FittedServing:
    """Return the constants that fit published measurements best, with the errors of predictions elsewhere."""
    table = tomllib.loads(SERVING_FILE.read_text())
    return FittedServing(ServingConstants(**table["constants"]), table["shifts"], table["spread"], table["publishers"])


def spread_of(metric: str, vendor: str, kind: str = "strangers") -> float:
    """Return the standard deviation of the logarithm of measured over predicted.

    metric: ttft, tpot, e2e_latency or throughput; kind: a table of `FittedServing.spread`.
    """
    widths = fitted_serving().spread[kind]
    if metric in widths:
        return widths[metric]
    if vendor == "NVIDIA":
        return widths[f"{metric}_nvidia"]
    return widths.get(f"{metric}_others", max(widths[f"{metric}_nvidia"], widths["e2e_latency_others"]))
