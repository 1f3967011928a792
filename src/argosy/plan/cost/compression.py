"""What sums over replicas in fewer bytes cost: bytes, the work of compressing, and memory, for columns of plans.

Bytes are about those of `plan.cost.traffic`, which counts one plan's exactly. The work is as `argosy probe`
measured it, or follows from the table `plan.sync.COMPRESSORS`: a GPU takes the bytes that are moved over its memory
bandwidth, and LAUNCHES kernels for each bucket; a CPU the seconds for a number.

Residuals take 4 bytes for each number that is summed, and as much again while a step may still be taken back
(`sync.compressor.BucketMemory`); `sign` keeps a momentum in the same way. Sites keep what they agreed on: 4 bytes of
weights for each number whose state is on the rank, and with diloco 4 of outer momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from argosy.config.sync import SyncConfig
from argosy.plan.cost.rates import Rates
from argosy.plan.layouts import WORDS, Layouts
from argosy.plan.sync import COMPRESSORS, SITE_BYTES
from argosy.plan.workload import Numbers, Workload

LAUNCHES, LAUNCH_S = 60, 5e-6
"""Kernels of a bucket, and the host's time for one."""
HIDDEN = 0.8
"""Share of the shorter of compressing and sending that the longer hides: while a bucket is sent, the next is
compressed."""
NUMBERS_IN_MIB = 2**18
RESIDUAL_BYTES = 8


@dataclass(frozen=True)
class Compression:
    """How replicas of a run agree, and how fast its devices compress."""

    settings: SyncConfig = field(default_factory=SyncConfig)
    measured_s: Mapping[str, float] = field(default_factory=dict)
    """Word -> seconds for a number in a group of one rank, if a probe measured it."""

    def share_sent(self, plans: Layouts, work: Workload, replicas: Numbers) -> Numbers:
        """Return which share of an exact fp32 sum's bytes replicas send."""
        shares = {word: cost.share_sent(self.settings, replicas, work) for word, cost in COMPRESSORS.items()}
        return _by_word(plans, shares, 1.0)

    def seconds(self, plans: Layouts, numbers: Numbers, replicas: Numbers, rates: Rates) -> Numbers:
        """Return the seconds that a rank compresses and restores `numbers` in a step."""
        launch_s = np.where(rates.host_waits > 0, 0.0, LAUNCHES * LAUNCH_S / (plans.bucket_mb * NUMBERS_IN_MIB))
        each: dict[str, Numbers] = {word: self._of_number(word, replicas, rates, launch_s) for word in COMPRESSORS}
        seconds = numbers * _by_word(plans, each, 0.0)
        return np.where(np.asarray(replicas) > 1, seconds, 0.0)

    def kept_bytes(self, plans: Layouts, summed: Numbers, mine: Numbers) -> Numbers:
        """Return the bytes that a rank keeps to agree.

        summed: numbers that it sums over replicas. mine: numbers whose optimizer state it has.
        """
        with_residual = RESIDUAL_BYTES * self.settings.error_feedback
        with_momentum = RESIDUAL_BYTES * (self.settings.momentum > 0)
        kept: dict[str, Numbers] = {
            word: with_residual * cost.has_residual + with_momentum * cost.has_momentum
            for word, cost in COMPRESSORS.items()
        }
        return summed * _by_word(plans, kept, 0.0) + mine * _by_word(plans, SITE_BYTES, 0.0)

    def _of_number(self, word: str, replicas: Numbers, rates: Rates, launch_s: Numbers) -> Numbers:
        cost = COMPRESSORS[word]
        whole, shared = cost.moved_bytes
        moved = whole + shared / np.maximum(1, replicas)
        on_gpu = moved / rates.memory_bytes_per_s + launch_s
        alone_s = self.measured_s.get(word)
        measured = (cost.cpu_s if alone_s is None else alone_s) * moved / (whole + shared)
        return measured if alone_s is not None else np.where(rates.host_waits > 0, measured, on_gpu)


def _by_word(plans: Layouts, values: Mapping[str, Numbers], otherwise: float) -> Numbers:
    found: Numbers = np.full(len(plans.sync), otherwise)
    for word in WORDS["sync"]:
        if word in values:
            found = np.where(plans.is_("sync", word), values[word], found)
    return found
