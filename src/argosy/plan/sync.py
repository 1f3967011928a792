"""The ways for replicas to agree, by the plan's word `sync`: the one table of plan, planner, probe and trainer.

A compressor is a row of `COMPRESSOR_COSTS` here, which says what it costs, and a class in `sync.compressors`.
Bytes: with S numbers in a bucket, n replicas, blocks of b numbers and rank r, a bucket sends

    word        collective                size
    exact       all_reduce                r S                     r bytes of a number (`reduce`)
    bf16        all_reduce                2 S
    int8, int4, all_to_all, all_gather    n W each                W = C bits/8 + 4 C/b, C = S/n, in whole blocks
    sign
    powersgd    all_reduce                4 r rows, 4 r cols      each matrix that this halves; 4 S of the others
    topk        all_gather                8 n k                   k = density S of each parameter: places and values

Work: compressors are chains of pointwise operations, each of which reads and writes memory: for a number of a bucket,
over n replicas, all of a chain's operations move a + b/n bytes (`moved_bytes`, counted in `sync`).

Sites: with N numbers in a round, n sites, and blocks of 256 numbers of b bytes as `sync.wire` has them, a site sends

    2 (n-1)/n  ceil(N / 256)  b

once as the sum of its slice's parts and once as its share of the sums (`sync.average`). A round comes every
H / F steps (`sync.every_steps`, `sync.fragments`) and is about one of F fragments; the last one is about everything.
So what a link has to carry at once is 1/F of the model, while bytes a step are those of one fragment. They may take
`sync.overlap_steps` steps before a site waits for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from argosy.config.sync import OuterConfig, SyncConfig
from argosy.plan.workload import Numbers, Workload

Sent = tuple[str, float]
"""Kind of a collective, and bytes of its whole message."""
SUMS_AHEAD = 4
"""Buckets at once, on a CPU, that are summed over the ranks that share a replica before backward waits for the first:
gloo gives up their memory only when it is waited for them."""
SCALE_BYTES = 4
LEAST_COMPRESSION = 2
"""PowerSGD compresses a matrix that is so many times as large as both thin ones (PyTorch's min_compression_rate)."""


@dataclass(frozen=True)
class Summand:
    """One parameter's part of a bucket on this rank."""

    is_exact: bool
    shape: tuple[int, ...]
    """Shape of the sum over replicas: the largest share of the parameter."""
    bucket_bytes: int
    """Its share of its bucket's size."""

    @property
    def elements(self) -> int:
        """Numbers that are summed."""
        return math.prod(self.shape)

    def part(self, k: int) -> Summand:
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


@dataclass(frozen=True)
class CompressorCost:
    """The costs of a compressor of gradient sums."""

    share_sent: Callable[[SyncConfig, Numbers, Workload], Any]
    """(settings, replicas, sizes) -> about the share of an exact fp32 sum's bytes that a replica sends."""
    messages: Callable[[Sequence[Summand], int, SyncConfig], list[Sent]]
    """(a bucket, replicas, settings) -> exactly what sums it."""
    moved_bytes: tuple[float, float]
    """Bytes read and written for a number of a bucket, and those that fall to the ranks in equal parts."""
    cpu_s: float
    """Seconds for a number, in a group of one rank, on one thread of a server's CPU (2026, AVX-512;
    benchmarks/results/thin_link.md)."""
    has_residual: bool = True
    """True if it keeps what it did not send, given sync.error_feedback."""
    has_momentum: bool = False
    """True if it keeps a momentum, given sync.momentum."""


def _cast(bucket: Sequence[Summand], replicas: int, settings: SyncConfig) -> list[Sent]:
    return [("all_reduce", 2 * sum(one.elements for one in bucket))]


def _quantised(bits: int, moved_bytes: tuple[float, float], cpu_s: float, has_momentum: bool = False) -> CompressorCost:
    def messages(bucket: Sequence[Summand], replicas: int, settings: SyncConfig) -> list[Sent]:
        block = settings.block
        piece = -(-sum(one.elements for one in bucket) // (replicas * block)) * block
        sent = replicas * (piece * bits // 8 + SCALE_BYTES * piece // block)
        return [("all_to_all", sent), ("all_gather", sent)]

    def share(settings: SyncConfig, replicas: Numbers, work: Workload) -> float:
        return (bits / 8 + SCALE_BYTES / settings.block) / 4

    return CompressorCost(share, messages, moved_bytes, cpu_s, has_momentum=has_momentum)


def _largest(bucket: Sequence[Summand], replicas: int, settings: SyncConfig) -> list[Sent]:
    return [("all_gather", 8 * replicas * sum(math.ceil(one.elements * settings.density) for one in bucket))]


def _thin(bucket: Sequence[Summand], replicas: int, settings: SyncConfig) -> list[Sent]:
    there = back = 0
    for one in bucket:
        batch, rows, cols = one.matrices
        rank = thin_rank(rows, cols, settings.rank)
        there += batch * rows * rank if rank else one.elements
        back += batch * cols * rank
    return [("all_reduce", 4 * there), ("all_reduce", 4 * max(1, back))]


def _thin_share(settings: SyncConfig, replicas: Numbers, work: Workload) -> Any:
    """Return the numbers of both thin matrices of all matrices of the model, over those of the matrices."""
    import numpy as np

    width = work.width
    attention: Numbers = 4 * width + work.heads * (work.key_width + work.value_width) + work.kv_heads * work.kv_width
    dense = work.ffn_matrices * (width + work.ffn_width)
    experts = work.experts * work.expert_matrices * (width + work.expert_ffn_width)
    delta = 6 * width + work.delta_streams + width + work.delta_heads * work.delta_value_width
    attention = (1 - work.delta_share) * attention + work.delta_share * delta
    thin = work.layers * attention + work.dense_layers * dense + work.moe_layers * experts
    thin = thin + (2 - work.tied) * (width + work.vocab_size)
    return np.minimum(1.0, settings.rank * thin / work.matrix_parameters)


COMPRESSOR_COSTS: Mapping[str, CompressorCost] = {
    "bf16": CompressorCost(lambda s, n, w: 1 / 2, _cast, (12, 0), 0.4e-9, has_residual=False),
    "int8": _quantised(8, (120, 70), 11e-9),
    "int4": _quantised(4, (128, 78), 13e-9),
    "powersgd": CompressorCost(_thin_share, _thin, (44, 0), 9e-9),
    "topk": CompressorCost(lambda s, n, w: n * s.density, _largest, (44, 0), 15e-9),
    "sign": _quantised(1, (190, 50), 19e-9, has_momentum=True),
}
"""Words that sum gradients in every step, in fewer bytes."""

COMPRESSED = tuple(COMPRESSOR_COSTS)
SITE_BYTES: Mapping[str, float] = {"local": 4, "diloco": 8}
"""Word -> bytes that a site keeps for each number whose state is on the rank: weights agreed on, outer momentum."""
LOCAL = tuple(SITE_BYTES)
"""Words by which sites train alone for some steps and then agree on the weights."""
WITH_SERVERS = ("async",)
"""Words by which workers, none of which waits for another, agree through parameter servers that hold the weights."""
OF_SITES = (*LOCAL, *WITH_SERVERS)
"""Words of a run with sites."""
USUAL_OF_SITES = "diloco"
"""The word of sites whose plan names none."""
SYNC_WORDS = ("exact", *COMPRESSED, *OF_SITES)

if TYPE_CHECKING:
    Sync: TypeAlias = str
    Compressed: TypeAlias = str
else:
    Sync, Compressed = Literal[SYNC_WORDS], Literal[COMPRESSED]


def thin_rank(rows: int, cols: int, rank: int) -> int:
    """Return the rank at which PowerSGD sums a matrix as the product of two thin ones; 0: it is summed whole."""
    rank = min(rank, rows, cols)
    return rank if LEAST_COMPRESSION * rank * (rows + cols) < rows * cols else 0


SENT_TO_ALL = tuple(
    word
    for word, cost in COMPRESSOR_COSTS.items()
    if cost.messages([Summand(False, (2, 2), 16)], 2, SyncConfig())[0][0] != "all_reduce"
)
"""Those that every replica restores and adds up by itself: no switch does it for them."""


def is_summed_exactly(
    name: str, shape: tuple[int, ...], whole_on_tp: bool, at_both_ends: bool, sync: str, settings: SyncConfig
) -> bool:
    """Return True for a parameter that no compressor touches.

    Those are norms and biases (of one dim), routers, small parameters (`sync.min_elements`), and with tensor
    parallelism what its ranks have whole (each of them has a part of that gradient's sum), and the tied embedding of a
    pipeline, which two stages hold. bf16 rounds all.
    """
    if sync == "bf16" or sync not in COMPRESSOR_COSTS:
        return sync != "bf16"
    if at_both_ends and name == "embedding.weight":
        return True
    return len(shape) < 2 or ".router." in name or math.prod(shape) < settings.min_elements or whole_on_tp


WIRE_BLOCK = 256
WIRE_BLOCK_BYTES = {"fp32": 4 * WIRE_BLOCK, "bf16": 2 * WIRE_BLOCK, "int8": 4 + WIRE_BLOCK, "int4": 4 + WIRE_BLOCK // 2}
"""Bytes of a block, by `sync.wire`: the short ones have a scale each."""
LAYER = re.compile(r"^blocks\.(\d+)\.")


def fragments_of(names: Iterable[str], fragments: int) -> list[list[str]]:
    """Deal parameters out over fragments, in the order of their turns.

    Layer i is in fragment i mod F (strided, as Douillard et al. 2025), so that each has early and late
    layers; what belongs to no layer is dealt out after them, from the last fragment backwards.
    """
    parts: list[list[str]] = [[] for _ in range(fragments)]
    loose = 0
    for name in names:
        layer = LAYER.match(name)
        if layer is None:
            parts[(fragments - 1 - loose) % fragments].append(name)
            loose += 1
        else:
            parts[int(layer.group(1)) % fragments].append(name)
    return parts


def sent_in_turn(shapes: Mapping[str, tuple[int, ...]], settings: OuterConfig, sites: int) -> list[float]:
    """Return the bytes that a site sends in the round of each fragment, if all `sites` take part."""
    return [_sent(shapes, names, settings, sites) for names in fragments_of(shapes, settings.fragments)]


def sent_in_run(shapes: Mapping[str, tuple[int, ...]], settings: OuterConfig, sites: int, steps: int) -> float:
    """Return the bytes that a site sends in a run of that many steps, if all `sites` take part in all rounds.

    Before `sync.from_step` each step is a round, in which gradients travel in fp32.
    """
    summed, rounds = rounds_in(settings, steps)
    in_sums = summed * _sent(shapes, shapes, settings.model_copy(update={"wire": "fp32"}), sites)
    if not rounds:
        return in_sums
    turns = sent_in_turn(shapes, settings, sites)
    whole, begun = divmod(rounds - 1, len(turns))
    return in_sums + whole * sum(turns) + sum(turns[:begun]) + _sent(shapes, shapes, settings, sites)


def rounds_in(settings: OuterConfig, steps: int) -> tuple[int, int]:
    """Return in how many steps of a run of `steps` sites sum gradients, and how many rounds come after these."""
    summed = min(settings.from_step, steps)
    return summed, -(-(steps - summed) // (settings.every_steps // settings.fragments))


def _sent(shapes: Mapping[str, tuple[int, ...]], names: Iterable[str], settings: OuterConfig, sites: int) -> float:
    blocks = -(-sum(math.prod(shapes[name]) for name in names) // WIRE_BLOCK)
    return 2 * (sites - 1) / sites * blocks * WIRE_BLOCK_BYTES[settings.wire]


FAITHFUL: tuple[Sync, ...] = ("bf16", "int8")
"""Words of `sync` in fewer bytes under which the sum's norm is still that of the gradient: of the first step of a tiny
model, |G|^2 was 0.1 % off; with int4 21 %, and with the others below 0."""
