"""`sync=auto`: the word of `sync` for sums over replicas, from what the link between them is predicted to cost.

The rule: of the ways in `ORDER`, from the one that loses least to the one that loses most, the first whose predicted
step is within `MARGIN` of the fastest of them. Only ways are compared whose quality was measured and is within 2 % of
exact sums (benchmarks/results/thin_link_quality.md). PowerSGD was so with exact sums in the first tenth of the run: it
counts if `sync.exact_steps` says that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from argosy.config.schema import RunConfig
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import seconds
from argosy.plan.search.best import best_to_run
from argosy.plan.search.space import Pins
from argosy.plan.sync import Sync

ORDER: tuple[Sync, ...] = ("exact", "int8", "int4", "powersgd")
MARGIN = 0.1
EXACT_SHARE = 0.1
"""Share of a run's steps that have to be exact before PowerSGD is a choice."""


@dataclass(frozen=True)
class SyncChoice:
    """How replicas agree, and what the other ways would have taken."""

    word: Sync
    step_s: Mapping[Sync, float]
    """Predicted seconds of a step with each way that was compared, in their order."""

    def in_words(self) -> str:
        """Return the choice and why, in one line."""
        if len(self.step_s) < 2:
            return f"sync=auto takes {self.word}: there are no replicas that could agree in another way."
        each = ", ".join(f"{word} {seconds(step_s)}" for word, step_s in self.step_s.items())
        return (
            f"sync=auto takes {self.word}: predicted steps are {each}; of those within {100 * MARGIN:.0f} % of the "
            "fastest it loses least."
        )


def choose_word(costs: CostModel, pins: Pins) -> SyncChoice:
    """Return how replicas of the run should agree under the best plan that keeps to `pins`."""
    if costs.run.sites:
        return SyncChoice("diloco", {})
    found: dict[Sync, float] = {}
    for word in _allowed(costs.run):
        best = best_to_run(costs, {**pins, "sync": (word,)})
        if best is not None:  # there is none without replicas
            found[word] = best[1]
    if not found:
        return SyncChoice("exact", {})
    enough = (1 + MARGIN) * min(found.values())
    return SyncChoice(next(word for word, step_s in found.items() if step_s <= enough), found)


def _allowed(run: RunConfig) -> list[Sync]:
    if run.resilience.check_collectives:  # checksums fit exact sums only
        return ["exact"]
    is_warmed_up = bool(run.train.steps) and run.sync.exact_steps >= EXACT_SHARE * run.train.steps
    return [word for word in ORDER if word != "powersgd" or is_warmed_up]
