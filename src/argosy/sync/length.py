"""A site goes on with another run file only if the rounds that it has made are rounds of that run too.

Averages of these rounds are read again: by a rank that goes back to a checkpoint, by a site that was away; and the
ledger's samples are counted from one round to the next. So a round keeps its steps, its samples, its weights and what
the outer optimizer makes of its average, whatever key is changed, and `--accept-changes` changes nothing about that.
The number of steps is what is changed most: the last round of a run is unlike the others, as it ends with the run,
waits for nothing, and is about all weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.config.identity import lasting_values
from argosy.config.load import RUN_FILE, load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.sync.layout import Sites, at_site
from argosy.sync.ledger import RoundLedger

OF_ROUNDS = ("sync.", "sites.", "train.")
"""Tables of the run file with keys that say what a round is."""


def check_length(run_dir: Path, run: RunConfig, step: int) -> None:
    """Refuse to go on with `run` in a site's folder if it would change a round that was made, or is begun.

    step: of the newest checkpoint there. Raises: UserError.
    """
    path = run_dir / RUN_FILE
    if not path.exists() or not (before := load(path)).sites:
        return
    run = run if run.site else run.model_copy(update={"site": before.site})  # one command for all sites names none
    old, new = Sites.of(at_site(before), run_dir), Sites.of(at_site(run), run_dir)
    made = RoundLedger(run_dir).rounds
    made += old.about(made).exists()  # what a site has left for a round is not made again
    first = min(old.rounds, new.rounds) - 1 if _way(old) == _way(new) else 0
    for number in range(first, made):
        if _means(old, number) != _means(new, number):
            _refuse(run_dir, old, new, f"has made round {number}")
    is_begun = made < old.rounds and step > old.shares.start(made)
    begins_otherwise = _way(old) != _way(new) and _begins(old, made) != _begins(new, made)
    # As long as it is not merged, a site may have steps after a round that has ended.
    ends_before = step > new.end_of(made) and _ends(old, made) != _ends(new, made)
    if is_begun and (begins_otherwise or ends_before):
        _refuse(run_dir, old, new, f"is at step {step}, within round {made},")


def _way(sites: Sites) -> tuple[Any, ...]:
    """Return all that says what a round is, but the number of steps."""
    run, shares = sites.run, sites.shares
    outer = run.sync.outer_lr, run.sync.outer_momentum, run.sync.mixing, run.sync.overlap_steps, run.sync.wire
    return shares, run.sync.fragments, outer, run.train.batch_ramp


def _begins(sites: Sites, number: int) -> tuple[Any, ...]:
    """Return what a site's steps in a round depend on from its first step on."""
    shares = sites.shares
    dealt = shares.names, shares.batches, shares.ahead, sites.run.train.batch_ramp
    return shares.start(number), sites.sums_gradients(number), dealt


def _ends(sites: Sites, number: int) -> tuple[int, int]:
    """Return after which step a round ends, and after which a site merges its average."""
    return sites.end_of(number), sites.merge_after(number)


def _means(sites: Sites, number: int) -> tuple[Any, ...]:
    """Return all that a round means to a site that goes on from it, or takes its average over."""
    sync, is_gradient = sites.run.sync, sites.sums_gradients(number)
    turn = (number - sync.from_step) % sync.fragments, sync.fragments
    fragment = (0, 1) if is_gradient or sites.is_last(number) else turn
    outer = () if is_gradient else (sync.outer_lr, sync.outer_momentum, 0.0 if sites.is_last(number) else sync.mixing)
    return _begins(sites, number), _ends(sites, number), sites.wire_of(number).name, fragment, outer


def _refuse(run_dir: Path, old: Sites, new: Sites, what: str) -> None:
    before, now = ({**lasting_values(s.run), "train.steps": s.run.train.steps} for s in (old, new))
    keys = [key for key in before | now if key.startswith(OF_ROUNDS) and before.get(key) != now.get(key)]
    asked = ", ".join(f"{key} = {now.get(key)}" for key in keys) or "[[sites]] in another order"
    kept = ", ".join(f"{key} = {before.get(key)}" for key in keys) or "[[sites]] in the order of " + " ".join(old.names)
    raise UserError(
        f"{asked}: {run_dir} {what} of a run with {kept}, and it would be another round in this one; "
        f"--accept-changes does not change that. Keep {kept}; or begin another run, with --name, from the weights of "
        f'this one: model.weights = "{run_dir}".'
    )
