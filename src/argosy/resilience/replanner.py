"""Re-planning: the plan for the processes that are left, on the machine that the run measured at its start."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.observe.events import Events, each_line
from argosy.plan.plan import Plan

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
    kind: Literal["cpu", "cuda"] = "cpu" if found is None or found.device == "cpu" else "cuda"
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
