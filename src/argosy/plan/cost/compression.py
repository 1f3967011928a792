"""What sums over replicas in fewer bytes cost: bytes, the work of compressing, and memory, for columns of plans.

Bytes are about those of `plan.cost.sync_traffic`, which counts one plan's exactly. The work is as `argosy probe`
measured it, or as follows. Compressors are chains of pointwise operations, each of which reads and writes memory: for a
number of a bucket, over n replicas, all of a chain's operations move a + b/n bytes (`MOVED`, counted in `sync`). A GPU
takes that over its memory bandwidth, and LAUNCHES kernels for each bucket. A CPU takes `CPU_S` for a number, measured
with one thread (`benchmarks/results/thin_link.md`).

Residuals take 4 bytes for each number that is summed, and as much again while a step may still be taken back
(`sync.compressor.Memory`); `sign` keeps a momentum in the same way. Sites keep what they agreed on: 4 bytes of weights
for each number whose state is on the rank, and with diloco 4 of outer momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from argosy.config.sync import SyncConfig
from argosy.plan.cost.rates import Rates
from argosy.plan.layouts import WORDS, Layouts
from argosy.plan.plan import COMPRESSED
from argosy.plan.workload import Numbers, Workload

MOVED: Mapping[str, tuple[float, float]] = {
    "bf16": (12, 0),
    "int8": (120, 70),
    "int4": (128, 78),
    "sign": (190, 50),
    "topk": (44, 0),
    "randomk": (22, 0),
    "powersgd": (44, 0),
}
"""Word -> bytes read and written for a number of a bucket, and those that fall to the ranks in equal parts."""
CPU_S: Mapping[str, float] = {
    "bf16": 0.4e-9,
    "int8": 11e-9,
    "int4": 13e-9,
    "sign": 19e-9,
    "topk": 15e-9,
    "randomk": 6e-9,
    "powersgd": 9e-9,
}
"""Word -> seconds for a number, in a group of one rank, on one thread of a server's CPU (2026, AVX-512)."""
LAUNCHES, LAUNCH_S = 60, 5e-6
"""Kernels of a bucket, and the host's time for one."""
HIDDEN = 0.8
"""Share of the shorter of compressing and sending that the longer hides: while a bucket is sent, the next is
compressed."""
NUMBERS_IN_MIB = 2**18
RESIDUAL_BYTES = 8
SITE_BYTES = {"local": 4, "diloco": 8}


@dataclass(frozen=True)
class Compression:
    """How replicas of a run agree, and how fast its devices compress."""

    settings: SyncConfig = field(default_factory=SyncConfig)
    measured_s: Mapping[str, float] = field(default_factory=dict)
    """Word -> seconds for a number in a group of one rank, if a probe measured it."""

    def share_sent(self, plans: Layouts, work: Workload, replicas: Numbers) -> Numbers:
        """Return which share of an exact fp32 sum's bytes replicas send."""
        block, density = 4 / self.settings.block, self.settings.density
        shares = {
            "bf16": 1 / 2,
            "int8": (1 + block) / 4,
            "int4": (1 / 2 + block) / 4,
            "sign": (1 / 8 + block) / 4,
            "topk": replicas * density,
            "randomk": density,
            "powersgd": thin_share(work, self.settings.rank),
        }
        return _by_word(plans, shares, 1.0)

    def seconds(self, plans: Layouts, numbers: Numbers, replicas: Numbers, rates: Rates) -> Numbers:
        """Return the seconds that a rank compresses and restores `numbers` in a step."""
        launch_s = np.where(rates.host_waits > 0, 0.0, LAUNCHES * LAUNCH_S / (plans.bucket_mb * NUMBERS_IN_MIB))
        each: dict[str, Numbers] = {word: self._of_number(word, replicas, rates, launch_s) for word in COMPRESSED}
        seconds = numbers * _by_word(plans, each, 0.0)
        return np.where(np.asarray(replicas) > 1, seconds, 0.0)

    def kept_bytes(self, plans: Layouts, summed: Numbers, mine: Numbers) -> Numbers:
        """Return the bytes that a rank keeps to agree.

        summed: numbers that it sums over replicas. mine: numbers whose optimizer state it has.
        """
        with_residual = RESIDUAL_BYTES * self.settings.error_feedback
        kept: dict[str, Numbers] = {word: with_residual for word in COMPRESSED if word != "bf16"}
        kept["sign"] = with_residual + RESIDUAL_BYTES * (self.settings.momentum > 0)
        return summed * _by_word(plans, kept, 0.0) + mine * _by_word(plans, SITE_BYTES, 0.0)

    def _of_number(self, word: str, replicas: Numbers, rates: Rates, launch_s: Numbers) -> Numbers:
        whole, shared = MOVED[word]
        moved = whole + shared / np.maximum(1, replicas)
        on_gpu = moved / rates.memory_bytes_per_s + launch_s
        alone_s = self.measured_s.get(word)
        measured = (CPU_S[word] if alone_s is None else alone_s) * moved / (whole + shared)
        return measured if alone_s is not None else np.where(rates.host_waits > 0, measured, on_gpu)


def thin_share(work: Workload, rank: int) -> Numbers:
    """Return the numbers of both thin matrices of all matrices of the model, over those of the matrices."""
    width = work.width
    attention = 2 * (width + work.heads * work.key_width) + 2 * (width + work.kv_heads * work.key_width)
    dense = work.ffn_matrices * (width + work.ffn_width)
    experts = work.experts * work.ffn_matrices * (width + work.expert_ffn_width)
    thin = work.layers * attention + work.dense_layers * dense + work.moe_layers * experts
    thin = thin + (2 - work.tied) * (width + work.vocab_size)
    return np.minimum(1.0, rank * thin / work.matrix_parameters)


def _by_word(plans: Layouts, values: Mapping[str, Numbers], otherwise: float) -> Numbers:
    found: Numbers = np.full(len(plans.sync), otherwise)
    for word in WORDS["sync"]:
        if word in values:
            found = np.where(plans.is_("sync", word), values[word], found)
    return found
