"""What the planner says of a slow node or link: a process of its own, since the search takes a second or more.

`python -m argosy.resilience.migration_cost RUN_DIR` answers the question that comes over its channel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.plan import Plan
from argosy.processes.child import channel_to_parent, end_with_parent

NICE = 10
"""Training comes first."""


@dataclass(frozen=True)
class MigrationQuestion:
    """Whether to go on otherwise."""

    kind: Literal["slow_node", "slow_link"]
    plan: str
    """In force."""
    times: float
    """slow_node: a slow rank's own work over its peers'; slow_link: a step over what it used to take."""
    on: tuple[int, ...]
    """Numbers of processes that one may go on with: all but those of the slow node; of all nodes, or of one."""
    step: int
    """That the run is in."""
    step_s: float | None
    """Measured; None: not yet."""
    migration_s: float
    """How long training stands still for a move."""


@dataclass(frozen=True)
class MigrationAnswer:
    """The best there is, and whether it pays."""

    pays: bool
    plan: str = ""
    size: int = 0
    on: int = 0
    """The number of processes that it is chosen for."""
    predicted_now_s: float = 0.0
    """A step as it is now, slow."""
    predicted_new_s: float = 0.0
    steps_left: int = 0
    why: str = ""
    """Why there is nothing better."""


def main() -> None:
    """Entry of the process."""
    os.nice(NICE)
    coordinator = channel_to_parent()
    asked = coordinator.receive()
    end_with_parent(coordinator)
    question = MigrationQuestion(**{**asked["question"], "on": tuple(asked["question"]["on"])})
    coordinator.send("answer", answer=asdict(answer(Path(sys.argv[1]), question)))


def answer(run_dir: Path, question: MigrationQuestion) -> MigrationAnswer:
    """What the planner says."""
    from argosy.config.load import load
    from argosy.plan.search.replan import worth_moving

    run = load(run_dir / "run.toml")
    try:
        options = list(_options(run_dir, run, question))
    except UserError as problem:
        return MigrationAnswer(False, why=str(problem))
    best = min(options, key=lambda option: option.predicted_new_s)
    # What the model gets wrong of this machine it gets wrong of both: measured seconds, in predicted proportions.
    now_s = question.step_s or best.predicted_now_s
    new_s = now_s * best.predicted_new_s / best.predicted_now_s
    left = steps_left(run, question.step, now_s)
    pays = best.plan != question.plan and worth_moving(now_s, new_s, left, question.migration_s)
    return MigrationAnswer(**{**asdict(best), "pays": pays, "steps_left": left})


def steps_left(run: RunConfig, step: int, step_s: float) -> int:
    """Steps still to make; of a run in minutes that has not decided on a number yet, as many as fit."""
    return max(0, run.train.steps - step) if run.train.steps else int(60 * run.train.minutes / step_s)


def _options(run_dir: Path, run: RunConfig, question: MigrationQuestion) -> Iterator[MigrationAnswer]:
    """The best plan for each number of processes. Raises: UserError if one has none."""
    from argosy.plan.cost.prediction import predict
    from argosy.plan.search.replan import replan, step_with_slow_rank_s, with_slow_link
    from argosy.resilience.replanner import machine_of

    plan = Plan.parse(question.plan)
    machine = machine_of(run_dir, run, plan, plan.world_size)
    if question.kind == "slow_node":
        slow, now_s = machine, step_with_slow_rank_s(run, plan, machine, question.times)
    else:
        slow = with_slow_link(run, plan, machine, question.times)
        now_s = float(predict(plan, run, slow).step_s.mid)
    for processes in question.on:
        # One node's processes, fewer than the plan has, do not use the links between nodes.
        is_all = processes >= plan.world_size
        left = slow if is_all else machine_of(run_dir, run, plan, processes)
        found = replan(run, plan, left, processes)
        yield MigrationAnswer(False, str(found.plan), found.plan.world_size, processes, now_s, found.step_s)


if __name__ == "__main__":
    main()
