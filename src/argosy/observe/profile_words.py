"""A profile's summary for a person."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argosy.plan.cost.estimate import seconds

OPERATIONS = 5
NAME_LENGTH = 40


def profile_in_words(steps: list[int], ranks: Mapping[int, Mapping[str, Any]], folder: Path) -> str:
    """Return what was recorded, of the first rank in full: it stands for the others unless one differs much."""
    which = f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
    lines = [f" profile of {which}, {_ranks(ranks)}: {folder}"]
    lines += [f"  rank {rank}: {found['problem']}" for rank, found in ranks.items() if "problem" in found]
    whole = {rank: found for rank, found in ranks.items() if "problem" not in found}
    if whole:
        rank = min(whole)
        lines += [
            f"  a step of rank {rank} takes {seconds(whole[rank]['step_s'])} while it is recorded",
            *_of(whole[rank]),
        ]
    return "\n".join(lines)


def _of(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, figures in found["parts"].items():
        planned = f"   planned {seconds(figures['predicted'])}" if "predicted" in figures else ""
        lines.append(f"  {name.replace('_', ' + '):20} {seconds(figures['measured']):>9}{planned}")
    for axis, figures in found["communication"].items():
        planned = (
            f"   planned {seconds(figures['predicted_exposed_seconds'])}"
            if "predicted_exposed_seconds" in figures
            else ""
        )
        exposed = f"{seconds(figures['exposed_seconds']):>9}{planned}   of {seconds(figures['seconds'])} in collectives"
        lines.append(f"  {'waits along ' + axis:20} {exposed}")
    lines.append(f"  {'idle':20} {seconds(found['idle_s']):>9}{_gap(found['gaps'])}")
    lines.append("  longest operations:")
    lines += [
        f"    {operation['share']:>4.0%}  {seconds(operation['seconds']):>9}  {operation['name'][:NAME_LENGTH]}"
        for operation in found["operations"][:OPERATIONS]
    ]
    return lines


def _gap(gaps: list[Mapping[str, Any]]) -> str:
    if not gaps:
        return ""
    after = f" after {gaps[0]['after']}" if gaps[0]["after"] else ""
    return f"   the longest gap: {seconds(gaps[0]['seconds'])} in {gaps[0]['part']}{after}"


def _ranks(ranks: Mapping[int, Any]) -> str:
    known = sorted(ranks)
    shown = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
    return f"rank{'s' if len(known) > 1 else ''} {shown}" if known else "no rank"
