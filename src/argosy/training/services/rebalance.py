"""Rebalancing: replicas take microbatches by their measured speed, between two steps and without a new world.

Each rank tells, in the one exchange of a step, how long its own work for a microbatch took in the step before: forward
and backward, without waiting for others. All ranks so have the same numbers and come to the same decision: the deal of
microbatches whose slowest replica ends first. It replaces the one in force if that saves `STEP_LEAST_SAVED` of the
measured step; after each change twice as many steps are watched before the next, so that noise does not keep it
swinging.

The samples of a step stay the same. Gradients are summed in another order, so a run that was rebalanced does not repeat
another's losses to the bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.config.schema import RunConfig
from argosy.observe.counters import Category
from argosy.plan.dealing import COLD_STEPS, deal
from argosy.plan.plan import Plan
from argosy.plan.quantities import lowest, ratio_of
from argosy.plan.rules import first_problem
from argosy.training.parts import Parts
from argosy.training.services.service import Service
from argosy.training.step import StepOutcome

Floats = NDArray[np.float64]

MICROBATCH_PARTS: tuple[Category, ...] = ("forward", "backward", "pipeline")
WATCHED = 10
"""Steps that are watched before the first change; twice as many after each."""
MOST_WATCHED_STEPS = 640
STEP_LEAST_SAVED = 0.05
"""Share of a step that a change must save. It costs next to nothing, and what is measured holds as a rule."""


@dataclass(frozen=True)
class Rebalanced:
    """New shares, and why."""

    plan: Plan
    before: str
    """The shares so far."""
    step_s: float
    """Measured."""
    predicted_s: float
    microbatch_s: tuple[float, ...]
    """Seconds of each replica for one microbatch."""


class Rebalance(Service):
    """Watches the speed of replicas, and deals microbatches out anew where that pays."""

    @classmethod
    def of(cls, parts: Parts) -> Rebalance:
        return cls(parts)

    def __init__(self, parts: Parts):
        self._parts, self._plan = parts, parts.plan
        self._holders = parts.plan.holders_of_shares
        self._is_on = parts.run.resilience.rebalance and self._holders > 1
        self._watched = WATCHED
        self._own_s = self._step_s = 0.0
        self._sums: Sequence[float] = ()
        self._rows: deque[Floats] = deque()
        self._to_skip = COLD_STEPS

    def measure(self) -> Sequence[float]:
        """Return own seconds and data-parallel rank, each in this rank's slot, and this rank's share of the step's."""
        if not self._is_on:
            return ()
        size, rank, dp_rank = self._parts.world.size, self._parts.world.rank, self._parts.state.model.dp_rank
        numbers = [0.0] * (2 * size + 1)
        numbers[rank], numbers[size + rank], numbers[-1] = self._own_s, float(dp_rank), self._step_s / size
        return numbers

    def after_exchange(self, outcome: StepOutcome, sums: Sequence[float]) -> None:
        self._sums = sums

    def end_step(self, step: int, seconds: Mapping[str, float]) -> None:
        """Note this rank's own work in the step, and put other shares in force from the next on, if it is time."""
        if not self._is_on:
            return
        parts, batch = self._parts, self._parts.run.train.batches.at(step)
        work_s = sum(parts.clock.own_s.get(name, 0.0) for name in MICROBATCH_PARTS)
        self._own_s = work_s / self._plan.microbatches_of(parts.state.model.dp_rank, batch)
        self._step_s = seconds["step"]
        found = self._found(batch)
        if found is None:
            return
        self._plan, self._to_skip = found.plan, COLD_STEPS
        self._watched = min(2 * self._watched, MOST_WATCHED_STEPS)
        self._rows.clear()
        for holder in (parts.batches, parts.checkpointer):
            holder.replan(found.plan)
        parts.records.replan(found.plan, step + 1)
        self._record(found, step + 1)

    def _found(self, batch: int) -> Rebalanced | None:
        """Take in the sums over ranks in a step of `batch` rows. Return new shares if it is time for some."""
        size = self._parts.world.size
        own_s, dp_ranks = np.array(self._sums[:size]), np.array(self._sums[size:-1]).astype(int)
        if not own_s.all() or not math.isfinite(own_s.sum()):
            return None  # the first step of this world
        if self._to_skip:
            self._to_skip -= 1
            return None
        holder = dp_ranks * self._holders // self._plan.dp
        self._rows.append(np.array([*(own_s[holder == n].max() for n in range(self._holders)), self._sums[-1]]))
        if len(self._rows) < self._watched:
            return None
        *each_s, step_s = np.median(np.array(self._rows), axis=0).tolist()
        found = rebalanced(self._parts.run, self._plan, each_s, step_s, batch)
        if found is None:
            self._rows.popleft()
        return found

    def _record(self, found: Rebalanced, step: int) -> None:
        shares, was = found.plan.shares or "even", found.before or "even"
        self._parts.records.tell(
            "rebalanced",
            step=step,
            plan=str(found.plan),
            shares=found.plan.shares,
            before=found.before,
            step_s=round(found.step_s, 6),
            predicted_s=round(found.predicted_s, 6),
            microbatch_s=[round(seconds, 6) for seconds in found.microbatch_s],
        )
        self._parts.records.progress.say(
            f" step {step}: shares of microbatches {shares} from here on, {was} so far: a step is to take "
            f"{found.predicted_s:.3g} s in place of {found.step_s:.3g} s",
            "green",
        )


def rebalanced(run: RunConfig, plan: Plan, each_s: Sequence[float], step_s: float, batch: int) -> Rebalanced | None:
    """Return the best shares for holders that take `each_s` for a microbatch; None if they save too little.

    step_s: measured, in a step of `batch` rows. Shares hold for all of the run's batches, so that they are of as many
    microbatches as divide each.
    """
    holders = len(each_s)
    at_once = plan.microbatch * plan.dp // holders
    total = math.gcd(*run.train.batches.all) // at_once
    each = np.arange(1, total + 1)
    dealt = deal(total, np.ones(holders, np.int64), np.array(each_s)[:, None] * each)
    if dealt is None:
        return None
    counts = tuple(int(n) for n in dealt[0][:, 0])
    times = batch / at_once / total
    now = plan.shares_of_ranks[:: plan.dp // holders]
    of_portion = total / sum(now) * times
    saved_s = max(n * of_portion * s for n, s in zip(now, each_s, strict=True)) - dealt[1] * times
    other = plan.model_copy(update={"shares": ratio_of(counts)})
    if lowest(now) == lowest(counts) or saved_s < STEP_LEAST_SAVED * step_s or first_problem(other, run) is not None:
        return None
    return Rebalanced(other, plan.shares, step_s, step_s - saved_s, tuple(each_s))
