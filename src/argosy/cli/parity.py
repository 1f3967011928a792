"""Check that a plan computes what one process computes: train some steps both ways, and compare.

It prints the differences of loss, gradient norm and final weights, with exit code 1 if they are more than rounding.
Without a run file it trains a tiny built-in model, in as many processes as the plan has ranks, on this machine. Where
training is unstable, rounding grows from step to step: the plan "microbatch=1" shows the effect of rounding alone, and
a smaller --optimizer.lr or fewer --steps keep it small.

Examples:
  argosy parity --plan "tp=2,pp=2,dp_shard=2"           the tiny model, in 8 processes
  argosy parity run.toml --plan "tp=2" --steps 20       your run, cut to 20 steps
  argosy parity --plan "dp_shard=2,precision=bf16"      how far bf16 is from fp32 (without a tolerance)
  argosy parity --plan "pp=2,schedule=zbv" --model.tie_embeddings true --json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from argosy.cli.documents import answer
from argosy.cli.options import TrustCode, parse_run
from argosy.errors import UserError, counted
from argosy.plan.search.auto import check_written

if TYPE_CHECKING:
    from argosy.compare.parity import Parity

PARITY_PRESET = "parity"
"""The preset to train if no run is named."""
PARITY_IDLE_KEYS = (
    *("train.steps", "train.minutes", "train.epochs"),
    *("evaluate.every_steps", "checkpoint.every_steps", "launch.processes"),
)
"""Keys without effect here."""


@dataclass(frozen=True)
class Options:
    steps: int = 5
    """Optimizer steps, all at the peak learning rate."""
    tolerance: float | None = None
    """Largest relative difference of the loss: 1e-5 in fp32, else none. Gradient norm and weights get 10 and 100
    times as much."""
    trust_code: TrustCode = False
    json: bool = False
    """Print the result as one JSON object."""


def main(argv: list[str]) -> int:
    named = argv if argv and not argv[0].startswith("-") else [PARITY_PRESET, *argv]
    options, run = parse_run(named, "argosy parity", Options, idle=PARITY_IDLE_KEYS)
    if options.tolerance is not None and options.tolerance < 0:
        raise UserError(f"--tolerance {options.tolerance}: must be 0 or more. Try 1e-5.")
    check_written(run)  # before torch is imported, which takes seconds
    from argosy.compare.parity import parity

    found = parity(
        run,
        steps=options.steps,
        tolerance=options.tolerance,
        trust_code=options.trust_code,
        say=partial(print, file=sys.stderr),
    )
    answer(options.json, "parity", _in_words(found), found)
    return 0 if found.holds else 1


def _in_words(found: Parity) -> str:
    from argosy.compare.parity import limits

    beyond = {} if found.tolerance is None else found.differences.beyond(found.tolerance)
    limit = {} if found.tolerance is None else limits(found.tolerance)
    lines = [f"{found.plan}  against  {found.reference}, {counted(found.steps, 'step')}; largest relative difference:"]
    for name, difference in vars(found.differences).items():
        within = f" (limit {limit[name]:.0e})" if limit else ""
        mark = "   beyond its limit" if name in beyond else ""
        lines.append(f"  {name:9}  {difference.relative:.1e}{within}  at {difference.where}{mark}")
    if found.tolerance is None:
        lines.append("no tolerance, since the plan rounds more than fp32 does; --tolerance sets one")
    elif beyond:
        lines.append("differs from one process by more than rounding")
    else:
        lines.append("the same as one process, up to rounding")
    return "\n".join(lines)
