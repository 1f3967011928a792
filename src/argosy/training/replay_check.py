"""The replay check: now and then other replicas compute one's loss and gradient again, and compare the bits.

It is the one check that sees a gradient that was computed wrongly, which summing over ranks spreads to all. One replica
after the other is checked; each step that is checked costs the others as much again as their own. With n replicas and a
check every k steps, each replica is checked in one of n k steps. With three replicas the third decides which is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.parallel.world import World
from argosy.plan.plan import Plan

Result = tuple[float, int]
"""A replica's share of the loss, and the bits of its gradient."""


@dataclass(frozen=True)
class Disagreement:
    """A disagreement between replicas that computed from the same samples."""

    rank: int
    """The replica whose samples they were."""
    suspects: tuple[int, ...]
    """Ranks that may be wrong: one, if two others agree."""


def check_can_replay(run: RunConfig, plan: Plan, device: torch.device) -> None:
    """Raises: UserError if resilience.replay_check_every_steps or check_collectives cannot be had under `plan`."""
    if run.resilience.check_collectives and plan.shards_parameters:
        raise UserError(
            f'resilience.check_collectives = true with plan = "{plan}": under zero = 3 gradients are summed by FSDP2, '
            "which carries no checksums. Try zero=2 or lower, or check_collectives = false."
        )
    if not run.resilience.replay_check_every_steps:
        return
    asked = f"resilience.replay_check_every_steps = {run.resilience.replay_check_every_steps}"
    if plan.dp_replicate == 1 or plan.world_size != plan.dp_replicate or run.model.moe.experts:
        raise UserError(
            f'{asked} with plan = "{plan}": only whole replicas of a model without experts can compute each other\'s '
            "gradients. Try dp_replicate alone, or replay_check_every_steps = 0."
        )
    if device.type == "cuda" and not run.train.deterministic:
        raise UserError(f"{asked}: bits are only equal with train.deterministic = true. Set it, or 0 here.")


def compare(turn: int, mine: Result, recompute: Callable[[int], Result], world: World) -> Disagreement | None:
    """Check the replica whose turn it is (`turn` modulo their number); all ranks call it, and get the same answer.

    `mine`: this rank's result from its own samples. `recompute(rank)`: its result from those of another. The next two
    ranks recompute, side by side.
    """
    checked = turn % world.size
    others = [(checked + i) % world.size for i in range(1, min(world.size, 3))]
    loss, bits = recompute(checked) if world.rank in others else mine
    as_bits = torch.tensor(loss, dtype=torch.float64).view(torch.int64).item()
    results = [torch.zeros(2, dtype=torch.int64, device=world.device) for _ in range(world.size)]
    dist.all_gather(results, torch.tensor([as_bits, bits], device=world.device))
    found = {rank: tuple(results[rank].tolist()) for rank in (checked, *others)}
    (common, count), *rest = Counter(found.values()).most_common()
    if not rest:
        return None
    return Disagreement(checked, tuple(rank for rank, result in found.items() if count == 1 or result != common))
