"""Run steps again from the checkpoint before them, and compare losses and gradient norms bit for bit.

The exit code is 0 if all are equal, 1 if one differs, 2 if the steps cannot be run here. Nothing is written into the
run's folder. A step that differs was computed wrongly, then or now, unless device, versions or threads differ. A bad
step that is equal is bad because of its data or settings.

Examples:
  argosy replay runs/demo --step 120
  argosy replay runs/demo --step 120 --json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from argosy.cli.documents import answer
from argosy.cli.options import RunPath, TrustCode, parse

if TYPE_CHECKING:
    from argosy.compare.replay import Replay


@dataclass(frozen=True)
class Options:
    run: RunPath
    step: int
    """The last step to run again, counted from 0 as in metrics.jsonl."""
    trust_code: TrustCode = False
    json: bool = False
    """Print the result as one JSON object."""


def main(argv: list[str]) -> int:
    options = parse(argv, "argosy replay", Options)
    from argosy.compare.replay import replay

    found = replay(options.run, options.step, trust_code=options.trust_code, say=partial(print, file=sys.stderr))
    answer(options.json, "replay", _in_words(found), found)
    return 0 if found.is_equal else 1


def _in_words(found: Replay) -> str:
    lines = [f"{'step':>8}  {'loss':24}{'gradient norm':24}"]
    for step in found.steps:
        numbers = "".join(f"{step.before[key]!r:24}" for key in ("loss", "grad_norm"))
        lines.append(f"{step.step:8}  {numbers}{'equal' if step.is_equal else 'differs'}")
        if not step.is_equal:
            now = "".join(f"{step.now[key]!r:24}" for key in ("loss", "grad_norm")) if step.now else "not reached"
            lines.append(f"{'now':>8}  {now}")
    different = sum(not step.is_equal for step in found.steps)
    lines.append(f"{different} of {len(found.steps)} steps differ" if different else "the same, bit for bit")
    return "\n".join(lines)
