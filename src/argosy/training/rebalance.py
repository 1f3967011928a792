"""Rebalancing: replicas take microbatches by their measured speed, between two steps and without a new world.

Each rank tells, in the one exchange of a step, how long its own work for a microbatch took in the step before: forward
and backward, without waiting for others. All ranks so have the same numbers and come to the same decision: the deal of
microbatches whose slowest replica ends first. It replaces the one in force if that saves `LEAST_SAVED` of the measured
step; after each change twice as many steps are watched before the next, so that noise does not keep it swinging.

The samples of a step stay the same. Gradients are summed in another order, so a run that was rebalanced does not repeat
another's losses to the bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argosy.config.schema import RunConfig
from argosy.observe.clock import Category
from argosy.parallel.world import World
from argosy.plan.dealing import deal
from argosy.plan.plan import Plan
from argosy.plan.ratio import lowest, ratio_of
from argosy.plan.rules import first_problem
from argosy.plan.shares import holders_of, microbatches_of, shares_of_ranks

Floats = NDArray[np.float64]

OF_MICROBATCHES: tuple[Category, ...] = ("forward", "backward", "pipeline")
WATCHED = 10
"""Steps that are watched before the first change; twice as many after each."""
MOST_WATCHED = 640
SKIPPED = 2
"""First steps under new shares, which may compile and read their samples late."""
LEAST_SAVED = 0.05
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


class Rebalance:
    """Watches the speed of replicas. All ranks call each method together."""

    def __init__(self, run: RunConfig, plan: Plan, world: World, dp_rank: int):
        self._run, self._plan, self._world, self._dp_rank = run, plan, world, dp_rank
        self._holders = holders_of(plan)
        self.is_on = run.resilience.rebalance and self._holders > 1
        self._watched = WATCHED
        self._own_s = self._step_s = 0.0
        self._rows: deque[Floats] = deque()
        self._to_skip = SKIPPED

    @property
    def many(self) -> int:
        """How many numbers `measure` gives."""
        return self._world.size * 2 + 1 if self.is_on else 0

    def took(self, own_s: Mapping[Category, float], step_s: float, batch: int) -> None:
        """Take in this rank's own work in the step that was applied, as `StepClock` has it; `batch` rows in all."""
        work_s = sum(own_s.get(name, 0.0) for name in OF_MICROBATCHES)
        mine = microbatches_of(self._plan, self._dp_rank, batch)
        self._own_s, self._step_s = work_s / mine, step_s

    def measure(self) -> Sequence[float]:
        """Return this rank's numbers to sum over ranks: own seconds and data-parallel rank in its slot; the step's."""
        if not self.is_on:
            return ()
        size, rank = self._world.size, self._world.rank
        numbers = [0.0] * self.many
        numbers[rank], numbers[size + rank], numbers[-1] = self._own_s, float(self._dp_rank), self._step_s / size
        return numbers

    def measured(self, sums: Sequence[float], batch: int) -> Rebalanced | None:
        """Take in the sums over ranks in a step of so many rows. Return new shares if it is time for some."""
        if not self.is_on:
            return None
        own_s, dp_ranks = np.array(sums[: self._world.size]), np.array(sums[self._world.size : -1]).astype(int)
        if not own_s.all() or not math.isfinite(own_s.sum()):
            return None  # the first step of this world
        if self._to_skip:
            self._to_skip -= 1
            return None
        holder = dp_ranks * self._holders // self._plan.dp
        self._rows.append(np.array([*(own_s[holder == n].max() for n in range(self._holders)), sums[-1]]))
        if len(self._rows) < self._watched:
            return None
        *each_s, step_s = np.median(np.array(self._rows), axis=0).tolist()
        found = rebalanced(self._run, self._plan, each_s, step_s, batch)
        if found is None:
            self._rows.popleft()
            return None
        self._plan, self._to_skip = found.plan, SKIPPED
        self._watched = min(2 * self._watched, MOST_WATCHED)
        self._rows.clear()
        return found


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
    now = shares_of_ranks(plan)[:: plan.dp // holders]
    of_portion = total / sum(now) * times
    saved_s = max(n * of_portion * s for n, s in zip(now, each_s, strict=True)) - dealt[1] * times
    other = plan.model_copy(update={"shares": ratio_of(counts)})
    if lowest(now) == lowest(counts) or saved_s < LEAST_SAVED * step_s or first_problem(other, run) is not None:
        return None
    return Rebalanced(other, plan.shares, step_s, step_s - saved_s, tuple(each_s))


def plan_in_force(run: RunConfig, plan: Plan, world: World, run_dir: Path) -> Plan:
    """Return `plan` with the shares of the folder's plan.toml, if that differs in nothing else. All call it together.

    A world that takes the place of another so goes on with the shares that were measured.
    """
    if not run.resilience.rebalance:
        return plan
    path = run_dir / "plan.toml"
    text = world.share_first(lambda: str(Plan.load(path)) if path.exists() else "", str)
    said = Plan.parse(text) if text else plan
    is_alike = said.model_copy(update={"shares": plan.shares}) == plan
    return said if is_alike and first_problem(said, run) is None else plan
