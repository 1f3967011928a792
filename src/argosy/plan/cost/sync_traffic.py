"""The exact bytes of sums over replicas in tiers, and by the plan's word `sync`: those that `sync` sends, by bucket.

Where a replicas sum inside, and c groups of them between, each rank of a tier gets an equal part of the rows of each
matrix, filled up; S numbers in all, for r bytes of a number (`reduce`):

    inside      reduce_scatter, all_gather    r S each
    between     reduce_scatter, all_gather    r S/a each
    replicate   as `plan.sync` says, of S/(a c) numbers  1/(a c) of the bytes that leave the inner tiers

What is summed exactly whatever the word says (`plan.sync.is_summed_exactly`) goes in buckets of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from argosy.config.schema import RunConfig
from argosy.config.sync import SyncConfig
from argosy.plan.cost.exact_state import DTYPE_BYTES, LocalShard
from argosy.plan.parameters import Parameter
from argosy.plan.plan import Plan
from argosy.plan.sync import COMPRESSORS, Sent, is_summed_exactly


@dataclass(frozen=True)
class Summed:
    """One parameter's part of a bucket on this rank."""

    is_exact: bool
    shape: tuple[int, ...]
    """What is summed over replicas: the largest share of the parameter."""
    bucket_bytes: int
    """What it counts for in the size of its bucket."""

    @property
    def elements(self) -> int:
        """Numbers that are summed."""
        return math.prod(self.shape)

    def part(self, k: int) -> Summed:
        """Return the largest of k parts of it, as `sync.compressor.Segment.part` cuts it."""
        if k == 1:
            return self
        dim = 1 if len(self.shape) > 2 else 0
        return replace(self, shape=tuple(-(-size // k) if d == dim else size for d, size in enumerate(self.shape)))

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Number, rows and columns of its matrices: those of experts are one each."""
        rows, *rest = self.shape
        return (rows, rest[0], math.prod(rest[1:])) if len(rest) > 1 else (1, rows, math.prod(rest))


def summed(name: str, parameter: Parameter, cut: LocalShard, plan: Plan, run: RunConfig) -> Summed:
    """Return what replicas sum of a parameter."""
    whole_on_tp = plan.tp > 1 and parameter.tp_dim is None
    at_both_ends = plan.pp > 1 and run.model.tie_embeddings
    is_exact = is_summed_exactly(name, parameter.shape, whole_on_tp, at_both_ends, plan.sync, run.sync)
    weight = DTYPE_BYTES[plan.weights]
    if plan.zero == 3 and cut.ranks > 1:
        return Summed(is_exact, cut.mine, weight * math.prod(cut.mine))
    shape = (-(-cut.local[0] // cut.ranks), *cut.local[1:])
    return Summed(is_exact, shape, weight * cut.numel)


def sent_inside(parameters: Sequence[Summed], tiers: Sequence[int], plan: Plan) -> Iterator[tuple[int, str, float]]:
    """Yield tier, kind and bytes of the messages that sum these parameters in tiers of these sizes, nearest first."""
    left = math.prod(tiers)
    elements = sum(one.part(left).elements for one in parameters)
    for tier, size in enumerate(tiers):
        for kind in ("reduce_scatter", "all_gather"):
            yield tier, kind, DTYPE_BYTES[plan.reduce] * elements * left
        left //= size


def sent_across(parameters: Sequence[Summed], k: int, n: int, plan: Plan, settings: SyncConfig) -> Iterator[Sent]:
    """Yield the messages that sum one of `k` parts of these parameters, in the model's order, over `n` replicas."""
    for one in parameters:
        if one.is_exact or not plan.is_compressed:
            yield "all_reduce", DTYPE_BYTES[plan.reduce] * one.part(k).elements
    if plan.is_compressed and n > 1:
        for bucket in _buckets((one for one in parameters if not one.is_exact), plan.bucket_mb * 2**20):
            yield from COMPRESSORS[plan.sync].messages([one.part(k) for one in bucket], n, settings)


def _buckets(parameters: Iterable[Summed], bucket_bytes: int) -> Iterator[list[Summed]]:
    """Cut as `parallel.buckets.cut` does."""
    bucket: list[Summed] = []
    for one in reversed(list(parameters)):
        if sum(other.bucket_bytes for other in bucket) >= bucket_bytes:
            yield bucket
            bucket = []
        bucket.append(one)
    if bucket:
        yield bucket
