"""Which parameters' gradients are summed exactly over replicas, whatever the plan's word `sync`."""

from __future__ import annotations

from math import prod

from argosy.config.sync import SyncConfig
from argosy.plan.plan import OF_SITES


def is_summed_exactly(
    name: str, shape: tuple[int, ...], whole_on_tp: bool, at_both_ends: bool, sync: str, settings: SyncConfig
) -> bool:
    """Return True for a parameter that no compressor touches.

    Those are norms and biases (of one dim), routers, small parameters (`sync.min_elements`), and with tensor
    parallelism what its ranks have whole (each of them has a part of that gradient's sum), and the tied embedding of a
    pipeline, which two stages hold. bf16 rounds all.
    """
    if sync in ("exact", "bf16", *OF_SITES):
        return sync != "bf16"
    if at_both_ends and name == "embedding.weight":
        return True
    return len(shape) < 2 or ".router." in name or prod(shape) < settings.min_elements or whole_on_tp
