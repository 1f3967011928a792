"""The exact bytes of rounds of a run with sites: which parameters each is about, and what a site sends for them.

With N numbers in a round, n sites, and blocks of 256 numbers of b bytes as `sync.wire` has them, a site sends

    2 (n-1)/n  ceil(N / 256)  b

once as the sum of its slice's parts and once as its share of the sums (`sync.average`). A round comes every
H / F steps (`sync.every_steps`, `sync.fragments`) and is about one of F fragments; the last one is about everything.
So what a link has to carry at once is 1/F of the model, while bytes a step are those of one fragment. They may take
`sync.overlap_steps` steps before a site waits for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod

from argosy.config.sync import OuterConfig

BLOCK = 256
BLOCK_BYTES = {"fp32": 4 * BLOCK, "bf16": 2 * BLOCK, "int8": 4 + BLOCK, "int4": 4 + BLOCK // 2}
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
    blocks = -(-sum(prod(shapes[name]) for name in names) // BLOCK)
    return 2 * (sites - 1) / sites * blocks * BLOCK_BYTES[settings.wire]
