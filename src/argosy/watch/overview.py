"""What a run comes to, in a line of a list of runs and at the head of its page."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from argosy.config.model_name import model_name
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyError
from argosy.plan.cost.economy import price_per_device_h
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.local_machine import DetectedHardware, machine_at_hand
from argosy.watch.reader import RunReader
from argosy.watch.run_files import RunFiles, RunTail
from argosy.watch.timeline import Timeline, run_timeline, timeline, useful_s


def line(run_id: str, run: RunFiles) -> dict[str, Any]:
    """Return what a list of runs shows of one; a value that is not known is None."""
    step = run.last_line
    devices = _devices(run)
    found = timeline(run.events, run.alive_s, run.recent_step_s)
    cost, currency = _cost(run, found)
    answer = {
        "id": run_id,
        "name": run.run.name if run.run else run.folder.name,
        "state": run.state,
        "why": run.why,
        "step": _count(step.get("step")),
        "steps": _steps_to_make(run),
        "tokens": step.get("tokens"),
        "loss": step.get("loss"),
        "validation_loss": run.last_evaluation.get("validation_loss"),
        "bits_per_byte": run.last_evaluation.get("bits_per_byte"),
        "tokens_per_s": step.get("tokens_per_s"),
        "mfu": step.get("mfu"),
        "eta_s": _eta_s(run),
        "cost": cost,
        "currency": currency,
        "updated_s": run.alive_s or None,
        "started_s": found.stretches[0].begin_s if found.stretches else None,
        "plan": _plan(run),
        "model": model_name(run.run.model) if run.run else None,
        "devices": devices,
        "goodput": (run.report or {}).get("goodput"),
    }
    return answer | ({"spark": run.spark} if isinstance(run, RunTail) else {})


def details(run_id: str, reader: RunReader) -> dict[str, Any]:
    """Return what the head of a run's page shows."""
    found = run_timeline(reader)
    predicted = reader.prediction
    return line(run_id, reader) | {
        "now_s": time.time(),
        "goodput": (reader.report or {}).get("goodput", _goodput(reader, found)),
        "step_s": reader.recent_step_s,
        "predicted": predicted
        and {
            "step_s": _ends(predicted.step_s),
            "memory_bytes": _ends(predicted.memory_bytes),
            "seconds": predicted.seconds,
            "cluster": predicted.cluster,
        },
        "config": _config(reader.run),
        "keys": reader.keys(),
        "problems": reader.problems,
        "report": {key: (reader.report or {}).get(key) for key in ("status", "wall_s", "validation", "sample")},
    }


def _goodput(reader: RunReader, found: Timeline) -> float | None:
    useful = min(useful_s(reader), found.seconds("training"))  # clocks may differ by a little
    return useful / found.wall_s if found.wall_s > 0 else None


def unreadable(run_id: str, problem: str) -> dict[str, Any]:
    """Return what a list of runs shows of a folder that cannot be read."""
    return {"id": run_id, "name": run_id, "state": "unreadable", "problems": [problem]}


def _count(step: Any) -> int | None:
    """Return how many steps are done; they are counted from 0."""
    return int(step) + 1 if isinstance(step, int | float) else None


def _steps_to_make(run: RunFiles) -> int | None:
    lengths = [event["steps"] for event in run.events if event["event"] == "length" and event.get("steps")]
    return lengths[-1] if lengths else (run.run.train.steps or None) if run.run else None


def _eta_s(run: RunFiles) -> float | None:
    """Return the seconds that are left at the pace of the last steps, pauses between them included."""
    done, steps = _count(run.last_line.get("step")), _steps_to_make(run)
    pace_s = _pace_s(run)
    if run.state != "training" or done is None or not steps or pace_s is None:
        return None
    return max(0.0, (steps - done) * pace_s)


def _pace_s(run: RunFiles) -> float | None:
    if isinstance(run, RunReader):
        rows = slice(-200, None)
        times, steps = run.steps["time_s"][rows], run.steps["step"][rows]
    else:
        times = np.array([line.get("time_s") or np.nan for line in run.recent_steps], dtype=float)
        steps = np.array([line["step"] for line in run.recent_steps], dtype=float)
    if len(times) > 1 and np.isfinite(times[[0, -1]]).all() and times[-1] > times[0] and steps[-1] > steps[0]:
        # A pause in which the run was down is not its pace.
        each = np.diff(times) / np.diff(steps)
        return float(np.mean(each[each <= 20 * np.median(each)]))
    return run.recent_step_s


def _devices(run: RunFiles) -> int | None:
    for event in reversed(run.events):
        size = event.get("size") if event["event"] == "generation" else event.get("world_size")
        if isinstance(size, int):
            return size
    return run.plan.world_size if run.plan else None


def _plan(run: RunFiles) -> str | None:
    if run.plan:
        return str(run.plan)
    told = (event["plan"] for event in reversed(run.events) if isinstance(event.get("plan"), str))
    return next(told, None)


def _cost(run: RunFiles, found: Timeline) -> tuple[float | None, str | None]:
    """Return the money for the devices so far, and its currency; None if nobody knows a price."""
    cluster = machine_of(run)
    price = price_per_device_h(cluster) if cluster else None
    if cluster is None or price is None:
        return None, None
    return found.device_hours * float(price.mid), cluster.currency


def machine_of(run: RunFiles) -> Cluster | None:
    """Return the cluster that a run's money and power are counted for: launch.cluster, else the catalogue's devices."""
    hardware = next((e["hardware"] for e in reversed(run.events) if isinstance(e.get("hardware"), dict)), None)
    if run.run is None or hardware is None:
        return None
    try:
        return machine_at_hand(run.run, DetectedHardware(**hardware))
    except (ArgosyError, ValueError, TypeError, OSError):  # the cluster's file is elsewhere, or the event is foreign
        return None


def _config(run: RunConfig | None) -> dict[str, dict[str, Any]]:
    """Return the tables of the run file that a reader asks for first, as plain values."""
    if run is None:
        return {}
    shown = ("model", "data", "train", "optimizer", "schedule", "evaluate", "checkpoint", "resilience")
    whole = run.model_dump(mode="json", include=set(shown))
    return {"run": {"name": run.name, "seed": run.seed, "plan": run.plan}} | {name: whole[name] for name in shown}


def _ends(estimate: Any) -> list[float]:
    return [float(estimate.low), float(estimate.mid), float(estimate.high)]
