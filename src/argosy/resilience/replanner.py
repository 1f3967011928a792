"""Re-planning: the plan for the processes that are left, and what a migration to another plan would gain.

The machine is the one that the run measured at its start. The gain is predicted in a process of its own, since the
planner's search takes a second or more: `python -m argosy.resilience.replanner RUN_DIR` answers the question that comes
over its channel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter

from argosy.config.launch import USUAL_ACCELERATOR, DeviceType
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.observe.events import Events, each_line
from argosy.plan.plan import Plan
from argosy.processes.child import channel_to_parent, end_with_parent

if TYPE_CHECKING:
    from argosy.plan.hardware.clusters import Cluster
    from argosy.plan.hardware.local_machine import DetectedHardware

# The planner is imported only when it is needed: the coordinator must start at once.


class Replanner:
    """A function from the number of processes to the plan for them, as text, and its size."""

    def __init__(self, run_dir: Path, run: RunConfig, plan: Plan):
        self._run_dir, self._run, self._plan = run_dir, run, plan
        self._events = Events(run_dir, "coordinator")

    def __call__(self, processes: int) -> tuple[str, int] | None:
        """Return the plan and its size; None if no plan fits so few processes."""
        try:
            plan, notes = self._choose(processes)
        except UserError as error:
            self._events.write("replan_failed", processes=processes, why=str(error))
            return None
        self._events.write("replan", processes=processes, plan=str(plan), notes=list(notes))
        return str(plan), plan.world_size

    def _choose(self, processes: int) -> tuple[Plan, tuple[str, ...]]:
        from argosy.plan.search.replan import replan

        machine = machine_of(self._run_dir, self._run, self._plan, processes)
        chosen = replan(self._run, self._plan, machine, processes)
        return chosen.plan, chosen.notes


def machine_of(run_dir: Path, run: RunConfig, plan: Plan, processes: int) -> Cluster:
    """Return the machine of the run, with this many of its processes. Raises: UserError."""
    from argosy.plan.hardware.local_machine import machine_at_hand
    from argosy.plan.search.auto import Devices, machine_for

    found = _hardware(run_dir, processes)
    machine = machine_at_hand(run, found) if found is not None else None
    if machine is not None:
        return machine
    kind: DeviceType = "cpu" if found is None or found.device == "cpu" else USUAL_ACCELERATOR
    return machine_for(run, Devices(processes, kind, plan.precision == "bf16"))


def _hardware(run_dir: Path, processes: int) -> DetectedHardware | None:
    """Return what rank 0 recorded at the run's start; None before."""
    from argosy.plan.hardware.local_machine import DetectedHardware

    starts = [
        event
        for path in sorted((run_dir / "events").glob("rank-*.jsonl"))
        for event in each_line(path)
        if event["event"] == "start" and "hardware" in event
    ]
    if not starts:
        return None
    newest = max(starts, key=lambda event: event["time_s"])["hardware"]
    known = {field.name: newest[field.name] for field in fields(DetectedHardware)}
    return DetectedHardware(**{**known, "processes": processes, "per_node": min(known["per_node"], processes)})


NICE = 10
"""Training comes first."""


@dataclass(frozen=True)
class MigrationQuestion:
    """A slow node or link, or stages of unlike speed, for which the planner looks for a better plan."""

    kind: Literal["slow_node", "slow_link", "uneven_stages"]
    plan: str
    """The plan in force."""
    times: float
    """slow_node: the time of a slow rank's own work over its peers'; slow_link: the step time over the usual one;
    uneven_stages: the time of the slowest stage for a layer over that of the fastest."""
    on: tuple[int, ...]
    """Numbers of processes to choose from. slow_node: all but those of the node; slow_link: of all nodes, or of one."""
    step: int
    """The step that the run is in."""
    step_s: float | None
    """The measured step time; None if there is none yet."""
    migration_s: float
    """Time for which a migration stops training."""
    stage_s: tuple[float, ...] = ()
    """uneven_stages: own seconds of each pipeline rank for a microbatch, measured."""
    microbatches: int = 1
    """uneven_stages: of a step."""


@dataclass(frozen=True)
class MigrationAnswer:
    """The best plan, and whether a migration to it pays."""

    pays: bool
    plan: str = ""
    size: int = 0
    on: int = 0
    """The number of processes that the plan was chosen for."""
    predicted_now_s: float = 0.0
    """A step under the plan in force, with the slow node or link."""
    predicted_new_s: float = 0.0
    steps_left: int = 0
    why: str = ""
    """Why there is no better plan."""


def main() -> None:
    os.nice(NICE)
    coordinator = channel_to_parent()
    asked = coordinator.receive()
    end_with_parent(coordinator)
    question = TypeAdapter(MigrationQuestion).validate_python(asked["question"])
    coordinator.send("answer", answer=asdict(answer(Path(sys.argv[1]), question)))


def answer(run_dir: Path, question: MigrationQuestion) -> MigrationAnswer:
    from argosy.config.load import load
    from argosy.plan.search.replan import worth_migrating

    run = load(run_dir / "run.toml")
    if question.kind == "uneven_stages":
        return _layers_dealt(run_dir, run, question)
    try:
        options = list(_options(run_dir, run, question))
    except UserError as problem:
        return MigrationAnswer(False, why=str(problem))
    best = min(options, key=lambda option: option.predicted_new_s)
    # The cost model's error for this machine is the same for both plans: scale the measured time by their ratio.
    now_s = question.step_s or best.predicted_now_s
    new_s = now_s * best.predicted_new_s / best.predicted_now_s
    left = steps_left(run, question.step, now_s)
    pays = best.plan != question.plan and worth_migrating(now_s, new_s, left, question.migration_s)
    return MigrationAnswer(**{**asdict(best), "pays": pays, "steps_left": left})


def steps_left(run: RunConfig, step: int, step_s: float) -> int:
    """Return the steps left; for a run in minutes whose number is not decided yet, as many as fit."""
    return max(0, run.train.steps - step) if run.train.steps else int(60 * run.train.minutes / step_s)


def _layers_dealt(run_dir: Path, run: RunConfig, question: MigrationQuestion) -> MigrationAnswer:
    """Return the plan in force with the layers of its stages dealt by their measured speed."""
    import numpy as np

    from argosy.plan.cost.heterogeneous import room_for_layers
    from argosy.plan.dealing import PipelineWork
    from argosy.plan.rules import first_problem
    from argosy.plan.search.auto import costs_of
    from argosy.plan.search.replan import worth_migrating

    plan = Plan.parse(question.plan).with_shares_in(run_dir)
    stage_s, now = np.array(question.stage_s), PipelineWork.of(plan, run.model, run.data.seq_len)
    costs = costs_of(run, machine_of(run_dir, run, plan, plan.world_size), plan.world_size)
    room = room_for_layers(costs, plan, np.full(plan.pp, costs.memory_bytes))
    dealt = now.dealt_by_speed(stage_s, np.maximum(room, now.layers))  # what is there has room, whatever is predicted
    if dealt is None:
        return MigrationAnswer(False, why="there is no other deal of layers that has room")
    other = plan.model_copy(update={"layers": dealt.plan.layers})
    if (problem := first_problem(other, run)) is not None:
        return MigrationAnswer(False, str(other), other.world_size, why=problem)
    pipeline_s = float(now.takes_s(stage_s, now, question.microbatches))
    now_s = question.step_s or pipeline_s
    new_s = now_s - pipeline_s + float(dealt.takes_s(stage_s, now, question.microbatches))
    left = steps_left(run, question.step, now_s)
    pays = worth_migrating(now_s, new_s, left, question.migration_s)
    return MigrationAnswer(pays, str(other), other.world_size, plan.world_size, now_s, new_s, left)


def _options(run_dir: Path, run: RunConfig, question: MigrationQuestion) -> Iterator[MigrationAnswer]:
    """Yield the best plan for each number of processes. Raises: UserError if there is none for one of them."""
    from argosy.plan.cost.prediction import predict
    from argosy.plan.search.replan import replan, step_with_slow_rank_s, with_slow_link

    plan = Plan.parse(question.plan)
    machine = machine_of(run_dir, run, plan, plan.world_size)
    if question.kind == "slow_node":
        slow, now_s = machine, step_with_slow_rank_s(run, plan, machine, question.times)
    else:
        slow = with_slow_link(run, plan, machine, question.times)
        now_s = float(predict(plan, run, slow).step_s.mid)
    for processes in question.on:
        # The processes of one node, fewer than the plan has, do not use the links between nodes.
        is_all = processes >= plan.world_size
        left = slow if is_all else machine_of(run_dir, run, plan, processes)
        found = replan(run, plan, left, processes)
        yield MigrationAnswer(False, str(found.plan), found.plan.world_size, processes, now_s, found.step_s)


if __name__ == "__main__":
    main()
