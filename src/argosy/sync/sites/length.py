"""A run over sites can be made longer, or shorter, if the rounds that were made are rounds of that run too.

The last round of a run is unlike the others: it ends with the run, waits for nothing, and is about all weights, so that
all sites end with the same ones. Averages of it that a site may still read would mean something else in a longer run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Ledger

RUN_FILE = "run.toml"


def check_length(run_dir: Path, run: RunConfig) -> None:
    """Refuse another train.steps for the site in `run_dir`, if it would change a round that was made.

    Raises: UserError.
    """
    path = run_dir / RUN_FILE
    if not path.exists() or (before := load(path)).train.steps == run.train.steps or not before.sites:
        return
    old, new = Sites.of(before, run_dir), Sites.of(run, run_dir)
    made = len(Ledger(run_dir).lines)
    made += old.about(made).exists()  # what a site has left for a round is not made again
    for number in range(min(old.rounds, new.rounds) - 1, made):
        if _means(old, number) != _means(new, number):
            raise UserError(
                f"train.steps = {run.train.steps}: {run_dir} has made round {number} of a run of "
                f"{before.train.steps} steps, which would be another round in a run of {run.train.steps}. "
                f"Keep train.steps = {before.train.steps}; or begin another run, with --name, from the weights of this "
                f'one: model.weights = "{run_dir}".'
            )


def _means(sites: Sites, number: int) -> tuple[Any, ...]:
    """Return all that a round's average means to a site that takes it over."""
    mixing = 0.0 if sites.is_last(number) else sites.run.sync.mixing
    return sites.end_of(number), sites.merge_after(number), tuple(sites.flat(number).shapes), mixing
