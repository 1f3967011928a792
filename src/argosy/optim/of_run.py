"""The optimizer that a run names: one of the table, or the user's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from argosy.config.schema import RunConfig
from argosy.optim.optimizer import RULES, Optimizer
from argosy.optim.own import own_rule
from argosy.optim.piece import Piece
from argosy.plan.mup import rate_factor


def optimizer_of(run: RunConfig, pieces: Sequence[Piece]) -> Optimizer:
    """Return the optimizer of these pieces, before its first step. Raises: UserError for a rule that does not exist."""
    own = own_rule(run.extend.code, run.optimizer.kind) if run.optimizer.kind not in RULES else None
    return Optimizer(pieces, run.optimizer, run.seed, own, partial(rate_factor, model=run.model))
