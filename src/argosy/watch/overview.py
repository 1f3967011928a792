"""A run as a list of runs and the head of its page show it, and the smaller views of its page: model, energy, profiles,
logs.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from argosy.config.load import model_name
from argosy.config.schema import RunConfig
from argosy.credentials import redact
from argosy.errors import UserError
from argosy.files import text_at_end
from argosy.observe.energy import JOULES_PER_KWH, machine_started_on, price_of
from argosy.observe.heartbeat import BESIDE
from argosy.observe.records import NORM_KINDS
from argosy.plan.hardware.clusters import Cluster
from argosy.watch.columns import STEP_COLUMN
from argosy.watch.facts import batches_of
from argosy.watch.linefile import leads_away, table_of
from argosy.watch.nodes import EnergySoFar
from argosy.watch.reader import RunFiles, RunReader, RunTail
from argosy.watch.steps import Buckets, ends
from argosy.watch.timeline import RunTimeline, timeline


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run in a list of runs; None where a figure is not known."""

    id: str
    """Its path in the folder of runs."""
    name: str | None = None
    state: str
    """training, silent, finished, stopped, failed, dead; of a launched run also waiting, running, unknown."""
    why: str = ""
    step: int | None = None
    """Steps that it has made."""
    steps: int | None = None
    """Steps that it is to make."""
    tokens: float | None = None
    loss: float | None = None
    """The last step's, in nats per token, or the mean over pairs or answers where preferences are learned."""
    validation_loss: float | None = None
    bits_per_byte: float | None = None
    validation_accuracy: float | None = None
    """The last evaluation's; the accuracy of a reward model."""
    tokens_per_s: float | None = None
    """The report's, else the median of the last steps, as mfu."""
    mfu: float | None = None
    eta_s: float | None = None
    """Seconds that are left."""
    cost: float | None = None
    """The cost of the devices until now."""
    currency: str | None = None
    updated_s: float | None = None
    """Its last sign of life, seconds since 1970."""
    started_s: float | None = None
    plan: str | None = None
    model: str | None = None
    devices: int | None = None
    goodput: float | None = None
    """Share of the time in which it ran that was spent in steps that count."""


RUN_ROW_KEYS = tuple(field.name for field in fields(RunRow))
"""The keys of a run in a list of runs."""


def line(run_id: str, run: RunFiles) -> dict[str, Any]:
    """Return `row_of` as JSON has it, with the last losses if they are known."""
    return vars(row_of(run_id, run)) | ({"spark": run.spark} if isinstance(run, RunTail) else {})


def row_of(run_id: str, run: RunFiles) -> RunRow:
    """Return what a list of runs shows of one."""
    step, report = run.last_line, run.report or {}
    devices = _devices(run)
    found = timeline(run.events, run.alive_s, run.recent_step_s)
    cost, currency = _cost(run, found)
    return RunRow(
        id=run_id,
        name=run.run.name if run.run else run.folder.name,
        state=run.state,
        why=run.why,
        step=_count(step.get("step")),
        steps=run.steps_to_make,
        tokens=step.get("tokens"),
        loss=step.get("loss"),
        validation_loss=run.last_evaluation.get("validation_loss"),
        bits_per_byte=run.last_evaluation.get("bits_per_byte"),
        validation_accuracy=run.last_evaluation.get("validation_accuracy"),
        **{key: report.get(key, run.recent(key)) for key in ("tokens_per_s", "mfu")},
        eta_s=_eta_s(run),
        cost=cost,
        currency=currency,
        updated_s=run.alive_s or None,
        started_s=found.stretches[0].begin_s if found.stretches else None,
        plan=_plan(run),
        model=model_name(run.run.model) if run.run else None,
        devices=devices,
        goodput=report.get("goodput"),
    )


def details(run_id: str, reader: RunReader) -> dict[str, Any]:
    found = run_timeline(reader)
    predicted = reader.prediction
    return line(run_id, reader) | {
        "now_s": time.time(),
        "goodput": (reader.report or {}).get("goodput", found.goodput(useful_s(reader))),
        "step_s": reader.recent_step_s,
        "predicted": predicted
        and {
            "step_s": ends(predicted.step_s),
            "memory_bytes": ends(predicted.memory_bytes),
            "seconds": predicted.seconds,
            "cluster": predicted.cluster,
        },
        "config": _config(reader.run),
        "keys": reader.keys(),
        "problems": reader.problems,
        "report": {key: (reader.report or {}).get(key) for key in ("status", "wall_s", "validation", "sample")},
    }


def unreadable(run_id: str, problem: str) -> dict[str, Any]:
    """Return what a list of runs shows of a folder that cannot be read."""
    return {"id": run_id, "name": run_id, "state": "unreadable", "problems": [problem]}


def _count(step: Any) -> int | None:
    """Return how many steps are done; they are counted from 0."""
    return None if step is None else int(step) + 1


def _eta_s(run: RunFiles) -> float | None:
    """Return the seconds that are left at the pace of the last steps, pauses between them included."""
    done, steps = _count(run.last_line.get("step")), run.steps_to_make
    pace_s = _pace_s(run)
    if run.state != "training" or done is None or not steps or pace_s is None:
        return None
    left = run.run.train.batches.steps_like(done - 1, done, steps) if run.run else steps - done
    return max(0.0, left * pace_s)


def _pace_s(run: RunFiles) -> float | None:
    """Return the seconds of a step with the batch of the last one, under the plan in force."""
    if isinstance(run, RunReader):
        rows = slice(-200, None)
        times, steps = run.steps["time_s"][rows], run.steps["step"][rows]
    else:
        times = np.array([line.get("time_s") or np.nan for line in run.recent_steps], dtype=float)
        steps = np.array([line["step"] for line in run.recent_steps], dtype=float)
    under_plan = steps >= run.plan_since
    if under_plan.sum() > 1:
        times, steps = times[under_plan], steps[under_plan]
    if len(times) > 1 and np.isfinite(times[[0, -1]]).all() and times[-1] > times[0] and steps[-1] > steps[0]:
        # A pause in which the run was down is not its pace; a step of a smaller batch took as much less.
        batches = batches_of(run.run, steps)
        each = np.diff(times) / np.diff(steps) * batches[-1] / batches[1:]
        return float(np.mean(each[each <= 20 * np.median(each)]))
    return run.recent_step_s


def _devices(run: RunFiles) -> int | None:
    for event in reversed(run.events):
        size = event.get("size" if event["event"] == "generation" else "world_size")
        if size is not None:
            return int(size)
    return run.plan.world_size if run.plan else None


def _plan(run: RunFiles) -> str | None:
    if run.plan:
        return str(run.plan)
    told = (event["plan"] for event in reversed(run.events) if "plan" in event)
    return next(told, None)


def _cost(run: RunFiles, found: RunTimeline) -> tuple[float | None, str | None]:
    """Return the money for the devices so far, or as reported, and its currency; None if nobody knows a price."""
    told = (run.report or {}).get("energy", {})
    if isinstance(told.get("money"), int | float):
        return told["money"], str(told.get("currency"))
    price = None if run.run is None else price_of(machine_of(run), run.run.observe.energy)
    return (None, None) if price is None else (found.money(price), price[1])


def machine_of(run: RunFiles) -> Cluster | None:
    """Return the cluster that a run's money and power are counted for; None if nobody knows it."""
    hardware = next((e["hardware"] for e in reversed(run.events) if isinstance(e.get("hardware"), dict)), None)
    return None if run.run is None else machine_started_on(run.run, hardware)


def _config(run: RunConfig | None) -> dict[str, dict[str, Any]]:
    """Return the tables of the run file that a reader asks for first, as plain values."""
    if run is None:
        return {}
    shown = ("model", "data", "train", "optimizer", "schedule", "evaluate", "checkpoint", "resilience")
    whole = run.model_dump(mode="json", include=set(shown))
    return {"run": {"name": run.name, "seed": run.seed, "plan": run.plan}} | {name: whole[name] for name in shown}


NORM_POINTS = 300
MOST_ROW_SAMPLES = 50
MOST_PROFILES = 100
MOST_LOGS, MOST_LOG_LINES, LOG_TAIL_BYTES = 64, 2000, 2**16


def model(reader: RunReader, first: float | None = None, last: float | None = None) -> dict[str, Any]:
    """Return norms by layer and step, the load of experts, and the newest samples of text.

    norms: `weight[layer][n]` is that of `layers[layer]` at `step[n]`. experts: `load[layer][expert]`, tokens of the
    newest step; the series are `experts.LAYER.imbalance` and others.
    """
    table = reader.norms
    buckets = Buckets.of(table, first, last, NORM_POINTS)
    layers = list(dict.fromkeys(key.rpartition(".")[0] for key in table if "." in key))
    norms = {kind: [buckets.mean(table[f"{layer}.{kind}"]) for layer in layers] for kind in NORM_KINDS}
    return {
        "norms": {"step": np.round(buckets.mean(table[STEP_COLUMN])), "layers": layers, **norms},
        "experts": _experts(reader.last_line),
        "samples": reader.samples[-MOST_ROW_SAMPLES:],
    }


def _experts(line: dict[str, Any]) -> dict[str, Any]:
    tables = line.get("experts", {})
    if not tables:
        return {"layers": [], "step": None, "load": []}
    layers = [layer for layer, table in tables.items() if "tokens" in table]
    facts = {name: [tables[layer].get(name) for layer in layers] for name in ("imbalance", "entropy", "dropped")}
    return {"layers": layers, "step": line["step"], "load": [tables[layer]["tokens"] for layer in layers], **facts}


def energy(reader: RunReader, meter: EnergySoFar) -> dict[str, Any]:
    """Return the energy of a run: what its report says, or what the agents measured so far."""
    meter.refresh(reader.nodes)
    reported = (reader.report or {}).get("energy", {})
    so_far = {"kwh": meter.joules / JOULES_PER_KWH, "source": meter.source} if meter.joules else {}
    tokens = reader.last_line.get("tokens")
    if reader.run and reader.plan and reader.plan.has_servers:  # its lines count the tokens of all workers
        tokens = len(reader.steps) * reader.run.tokens_per_step
    if so_far and tokens:
        so_far["per_token"] = {"joules": meter.joules / tokens}
    return {**so_far, **reported, "series": meter.series()}


def profiles(reader: RunReader) -> list[dict[str, Any]]:
    """Return the newest profiles that were recorded, with their summaries and files; by their steps."""
    found = []
    for folder in _profile_folders(reader.folder)[-MOST_PROFILES:]:
        entry: dict[str, Any] = {"name": folder.name}
        try:
            if not leads_away(reader.folder, f"profiles/{folder.name}/summary.json"):
                entry |= table_of(folder / "summary.json")
        except FileNotFoundError:
            entry["problem"] = "it has no summary.json yet"
        except (OSError, ValueError, RecursionError, UserError):
            entry["problem"] = "summary.json cannot be read"
        entry |= {"name": folder.name, "files": _files(folder)}
        found.append(entry)
    return found


def _files(folder: Path) -> list[dict[str, Any]]:
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    return [{"name": name, "bytes": (folder / name).stat().st_size} for name in names]


def _profile_folders(run: Path) -> list[Path]:
    if leads_away(run, "profiles"):
        return []
    with suppress(OSError):
        return sorted(path for path in (run / "profiles").iterdir() if path.is_dir() and not path.is_symlink())
    return []


def logs(reader: RunReader) -> dict[str, Any]:
    """Return the last lines of what processes printed, credentials in URLs hidden; those that say most recent last."""
    if leads_away(reader.folder, "logs"):
        return {"lines": []}
    paths: list[Path] = []
    with suppress(OSError):
        paths = [path for path in (reader.folder / "logs").iterdir() if path.is_file() and not path.is_symlink()]
    lines = []
    for path in sorted(paths, key=_modified_s)[-MOST_LOGS:]:
        each = _last_lines(path)
        lines += [{"process": path.stem, "text": redact(text)} for text in each]
    return {"lines": lines[-MOST_LOG_LINES:], "more": max(0, len(paths) - MOST_LOGS)}


def _last_lines(path: Path) -> list[str]:
    with suppress(OSError):
        is_cut = path.stat().st_size > LOG_TAIL_BYTES
        return text_at_end(path, LOG_TAIL_BYTES).splitlines()[is_cut:]
    return []


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return -math.inf


def run_timeline(reader: RunReader) -> RunTimeline:
    times = reader.steps["time_s"]
    return timeline(reader.events, reader.alive_s, reader.recent_step_s, times[np.isfinite(times)])


def goodput(reader: RunReader, found: RunTimeline) -> dict[str, Any]:
    """Return where a run's wall time went, in seconds; the parts add up to it.

    useful: steps that count. evaluate, checkpoint, check: beside steps. lost: steps that were run again. other: what
    is left of the training. `goodput` is the share of the useful part of what is not stopped, None if there is none.
    """
    training = found.seconds("training")
    parts = {"useful": useful_s(reader)}
    parts |= {name: float(np.nansum(reader.steps[f"seconds.{name}"])) for name in sorted(BESIDE)}
    parts["lost"] = min(found.lost_s, max(0.0, training - sum(parts.values())))
    if (inside := sum(parts.values())) > training:  # a step that began before its world said so, or clocks that differ
        parts = {name: seconds * training / inside for name, seconds in parts.items()}
    parts["other"] = training - sum(parts.values())
    parts |= {phase: found.seconds(phase) for phase in ("startup", "recovery", "stopped")}
    return {
        "wall_s": found.wall_s,
        "parts": {name: round(max(0.0, seconds), 3) for name, seconds in parts.items()},
        "goodput": found.goodput(parts["useful"]),
    }


def useful_s(reader: RunReader) -> float:
    return float(np.nansum(reader.steps["step_time_s"]))
