"""Checks of the user's losses and optimizers, before a run begins with them."""

from __future__ import annotations

from argosy.config.schema import LOSSES, OPTIMIZERS, RunConfig
from argosy.errors import UserError
from argosy.models.own_loss import check_loss
from argosy.optim.own import check_rule
from argosy.plan.plan import Plan


def check_own_code(run: RunConfig, plan: Plan) -> None:
    """Try the user's loss and optimizer, and refuse what the run asks for and they cannot do.

    Raises: UserError.
    """
    if run.train.loss not in LOSSES:
        check_loss(run.extend.code, run.train.loss)
    if run.optimizer.kind not in OPTIMIZERS:
        check_rule(run.extend.code, run.optimizer)
    own = {declaration.kind: declaration for declaration in run.not_deterministic}
    for declaration in own.values():
        if every := run.resilience.replay_check_every_steps:
            raise UserError(
                f"resilience.replay_check_every_steps = {every}: the {declaration} ({declaration.place}) is declared "
                "not deterministic, so no replay gives the same bits. Set it to 0."
            )
    if "optimizer" in own and plan.world_size > 1 and not (plan.zero and plan.dp_shard == plan.world_size):
        raise UserError(
            f'plan = "{plan}": ranks that each update the same parameter would drift apart, as the {own["optimizer"]} '
            f"is declared not deterministic. Try dp_shard={plan.world_size},zero=1, or draw its random numbers from "
            "update.name and update.step."
        )
    if "loss" in own and plan.tp > 1:
        raise UserError(
            f'plan = "{plan}": the ranks of a tp group each compute the {own["loss"]}, which is declared not '
            "deterministic, and would not get the same. Try tp=1."
        )
