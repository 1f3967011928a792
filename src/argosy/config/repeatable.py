"""Which runs give the same numbers again."""

from __future__ import annotations

from argosy.config.schema import RunConfig
from argosy.errors import UserError


def check_repeatable(run: RunConfig, source: object) -> None:
    """Raise UserError if `run`, which `source` names, gives other numbers each time: then nothing can be compared."""
    if "sync=async" in run.plan.replace(" ", ""):
        raise UserError(
            f"{source}: with plan.sync = async gradients come in another order each time, and steps give other numbers "
            "again. There is nothing to compare."
        )
    for own in run.not_deterministic:
        raise UserError(
            f"{source}: the {own} ({own.place}) is declared not deterministic, so the same steps give other "
            "numbers each time. There is nothing to compare."
        )
