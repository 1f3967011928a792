"""Which runs give the same numbers again."""

from __future__ import annotations

from argosy.config.schema import RunConfig
from argosy.errors import UserError


def check_repeatable(run: RunConfig, source: object) -> None:
    """Raise UserError if nothing can run `run`, which `source` names, a second time to the same numbers."""
    if "sync=async" in run.plan.replace(" ", ""):
        raise UserError(
            f"{source}: with plan.sync = async gradients come in another order each time, and steps give other numbers "
            "again. There is nothing to compare."
        )
    if run.sites:
        raise UserError(
            f"{source}: the run has [[sites]], and what a site does follows from what the others send, so it cannot be "
            "repeated alone. Leave the sites out to try its model, data and plan."
        )
    for own in run.not_deterministic:
        raise UserError(
            f"{source}: the {own} ({own.place}) is declared not deterministic, so the same steps give other "
            "numbers each time. There is nothing to compare."
        )
