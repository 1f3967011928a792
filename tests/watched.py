"""Facts of runs, made up: a healthy one, and what tests change about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from argosy.config.schema import RunConfig
from argosy.plan.cost.prediction import predict
from argosy.plan.hardware.local_machine import DetectedHardware, machine_at_hand
from argosy.plan.plan import Plan
from argosy.watch.columns import Floats
from argosy.watch.facts import Event, RankTable, RunFacts
from tiny import run_config

BEGAN_S = 1_700_000_000.0
STEPS = 400
STEP_S = 0.4
PARTS = {
    "data": 0.0005,
    "forward": 0.1275,
    "backward": 0.255,
    "communication": 0.005,
    "optimizer": 0.01,
    "other": 0.002,
}
"""Seconds of a step by category; they add up to STEP_S."""
H100 = DetectedHardware("NVIDIA H100 80GB HBM3", 64, 8, {"bf16": 600e12})
CPU = DetectedHardware("cpu", 2, 2, {"fp32": 1e11})


def big_run(**sections: dict[str, Any]) -> RunConfig:
    """A run of an 8B model, of 10,000 steps."""
    base: dict[str, dict[str, Any]] = {
        "model": {
            "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "head_width": 128, "ffn_width": 14336,
            "vocab_size": 128256,
        },
        "data": {"sources": {"data/web": 1.0}, "seq_len": 8192},
        "train": {"steps": 10_000, "global_batch": 256},
        "evaluate": {"every_steps": 0},
        "checkpoint": {"every_minutes": 10.0},
    }  # fmt: skip
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    return RunConfig.model_validate({"name": "big", **merged})


def small_run(**sections: dict[str, Any]) -> RunConfig:
    """A run of the tiny model, of 1000 steps."""
    return run_config(Path("corpus"), **{**sections, "train": {"steps": 1000, **sections.get("train", {})}})


def start(step: int = 0, at_s: float = BEGAN_S, hardware: DetectedHardware = CPU, plan: str = "") -> Event:
    """The event of rank 0 that begins to train."""
    facts = {"step": step, "plan": plan, "world_size": hardware.processes, "hardware": vars(hardware)}
    return {"time_s": at_s, "event": "start", "process": "rank-0", **facts}


def event(kind: str, at_s: float, process: str = "rank-0", **facts: Any) -> Event:
    """Any other event, `at_s` seconds after the run began."""
    return {"time_s": BEGAN_S + at_s, "event": kind, "process": process, **facts}


def columns(count: int = STEPS, step_s: float = STEP_S, seed: int = 0, **parts: float | Floats) -> dict[str, Floats]:
    """The columns of `count` healthy steps; `parts` are seconds of categories that are otherwise."""
    random = np.random.default_rng(seed)
    steps = np.arange(count, dtype=float)
    whole = {name: np.full(count, value * step_s / STEP_S) for name, value in PARTS.items()}
    whole |= {name: np.broadcast_to(np.asarray(value, dtype=float), count).copy() for name, value in parts.items()}
    noise = random.normal(1, 0.01, count)
    seconds = {f"seconds.{name}": value * noise for name, value in whole.items()}
    beside = sum(seconds.get(f"seconds.{name}", np.zeros(count)) for name in ("check", "evaluate", "checkpoint"))
    wall = np.asarray(sum(seconds.values()))
    loss = 2 + 4 / (1 + steps / 50) + random.normal(0, 0.02, count)
    return {
        "step": steps,
        "tokens": (steps + 1) * 256,
        "loss": loss,
        "grad_norm": np.exp(random.normal(0, 0.1, count)),
        "lr": np.full(count, 1e-3),
        "step_time_s": wall - beside,
        "mfu": np.full(count, 0.4),
        "memory_bytes": np.full(count, 40e9),
        "time_s": BEGAN_S + 1 + np.cumsum(wall),
        "seconds.step": wall,
        **seconds,
    }


def healthy(
    run: RunConfig | None = None, plan: str = "dp_replicate=2,microbatch=4,compile=false", **facts: Any
) -> RunFacts:
    """The facts of a healthy run on two CPU processes, at the end of its newest step."""
    run, parsed = run or small_run(), Plan.parse(plan)
    steps = facts.pop("steps", None) or columns()
    hardware = facts.pop("hardware", CPU)
    events = [start(plan=str(parsed), hardware=hardware), *facts.pop("events", [])]
    machine = machine_at_hand(run, hardware)
    prediction = facts.pop("prediction", None) or (machine and predict(parsed, run, machine))
    known = {"now_s": float(steps["time_s"][-1]) + 0.1, "folder": "runs/tiny", **facts}
    ordered = sorted(events, key=lambda each: each["time_s"])
    return RunFacts(run=run, plan=parsed, prediction=prediction, steps=steps, events=ordered, **known)


def continued(facts: RunFacts, pause_s: float, at_step: int = STEPS - 1) -> RunFacts:
    """The same run, which was asked to stop before this step, and was continued after a pause."""
    steps = {key: values.copy() for key, values in facts.steps.items()}  # type: ignore[attr-defined]
    steps["time_s"][at_step:] += pause_s
    stop_s = float(steps["time_s"][at_step - 1]) + 0.1
    ended = [
        {"time_s": stop_s, "event": "end", "process": "rank-0", "step": at_step, "finished": False},
        {"time_s": stop_s + 0.1, "event": "finish", "process": "coordinator", "exit_code": 143, "why": "SIGTERM"},
    ]
    again_s = float(steps["time_s"][at_step]) - 1.0
    begun = {"time_s": again_s - 0.2, "event": "coordinator_started", "process": "launcher", "replaces": False}
    events = [*facts.events, *ended, begun, {**facts.starts[-1], "time_s": again_s, "step": at_step}]
    return replace(facts, steps=steps, events=events, now_s=facts.now_s + pause_s)


def ranks(count: int = 8, slow: dict[int, float] | None = None, steps: int = 30, per_node: int = 4) -> RankTable:
    """What the nodes told of `count` ranks in the last steps; `slow` ones take so many times as long."""
    random = np.random.default_rng(1)
    own_s = 0.3 * random.normal(1, 0.02, (steps, count))
    forward = np.full(count, 0.1)
    for rank, times in (slow or {}).items():
        own_s[:, rank] *= times
        forward[rank] += 0.3 * (times - 1)
    nodes = tuple(f"node{rank // per_node}" for rank in range(count))
    last = np.arange(STEPS - steps, STEPS)
    return RankTable(np.arange(count), nodes, last, own_s, {"forward": forward, "backward": np.full(count, 0.2)})
