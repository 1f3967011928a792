"""Checks of what a run is to profile, before any process starts."""

from __future__ import annotations

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.plan import Plan


def check_profile(run: RunConfig, plan: Plan) -> None:
    """Refuse to profile steps or ranks that the run does not have. Raises: UserError."""
    profile, steps = run.observe.profile, run.train.steps
    if not profile.steps:
        return
    last = profile.range[-1]
    if steps and last >= steps:
        raise UserError(
            f"observe.profile.steps = {profile.steps} ends with step {last}, but the run has the steps 0 to "
            f"{steps - 1} (train.steps = {steps}). Try {max(0, steps - 3)}:{steps}, or more steps."
        )
    missing = sorted(rank for rank in profile.chosen or () if rank >= plan.world_size)
    if missing:
        raise UserError(
            f"observe.profile.ranks = {profile.ranks} names rank {missing[0]}, but the plan {plan} has the ranks 0 to "
            f"{plan.world_size - 1}. Try 0, or nodes for the first rank of each node."
        )
