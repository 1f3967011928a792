"""The findings of `argosy design` in a space: fronts, effects, bottlenecks, matrix multiplications, and speed-ups."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from argosy.errors import counted
from argosy.plan.cost.estimate import count, percent, seconds
from argosy.plan.design import charts
from argosy.plan.design.bottlenecks import (
    ModelMatmul,
    Stop,
    attention_of,
    effects,
    matmuls_of,
    rows_along,
    seconds_of_matmuls,
    serving_along,
    training_along,
    where_it_stops,
)
from argosy.plan.design.points import Floats, Points
from argosy.plan.design.space import DesignSpace
from argosy.plan.design.speedup import Speedup, speedups
from argosy.plan.design.sweep import Served, ServingSweep, TrainedPoints, TrainingSweep, front
from argosy.plan.hardware.technology import LogicNode, MemoryGeneration, logic_nodes, memory_generations
from argosy.plan.quantities import evenly

TRAINING = ("run_s", "usd", "kwh")
SERVING_COLUMNS = ("tpot_s", "usd_per_million", "kwh_per_million")


@dataclass(frozen=True, kw_only=True)
class BoundMatmul(ModelMatmul):
    """A matrix multiplication on a device of the space."""

    device: dict[str, Any]
    """The figures of the device that vary."""
    work: str
    """training, prefill or decode."""
    compute_s: float
    memory_s: float
    binds: str
    """compute or memory."""


@dataclass(frozen=True)
class DesignReport:
    """Everything that was found."""

    space: DesignSpace
    points: Points
    trained: TrainedPoints | None
    served: Served | None
    fronts: dict[str, list[int]]
    """Work -> rows of its Pareto front, by time."""
    effects: dict[str, dict[str, list[float]]]
    along: dict[str, dict[str, list[Stop]]]
    """Work -> figure -> its values with what binds."""
    bounds: dict[int, list[BoundMatmul]]
    """Row -> its matrix multiplications: those along the figures, and the best of each front."""
    speedups: list[Speedup]
    took_s: float
    caveats: list[str] = field(default_factory=list)


def design_report(space: DesignSpace) -> DesignReport:
    """Sweep a space. Raises: UserError if no combination is a device, or the work fits none."""
    began = time.perf_counter()
    points, pue = Points.of(space), space.costs.pue
    training = TrainingSweep(space.train, points, pue) if space.train else None
    serving = ServingSweep(space.serve, points, pue) if space.serve else None
    trained = training.swept() if training else None
    served = serving.swept() if serving else None
    fronts: dict[str, list[int]] = {}
    metrics: dict[str, Floats] = {}
    for found, names, work in ((trained, TRAINING, "training"), (served, SERVING_COLUMNS, "serving")):
        if found is not None:
            objectives = found.objectives[:, np.isfinite(found.objectives).any(axis=0)]
            fronts[work] = front(objectives).tolist()
            metrics |= {name: getattr(found, name) for name in names if np.isfinite(getattr(found, name)).any()}
    axes = space.along or tuple(key for key, values in points.axes.items() if len(values) > 1)
    along: dict[str, dict[str, list[Stop]]] = {}
    if training is not None and trained is not None:
        along["training"] = {axis: training_along(training, trained, axis) for axis in axes}
    if serving is not None and served is not None:
        along["serving"] = {axis: serving_along(serving, served, axis) for axis in axes}
    shown = {row for axis in axes for row in rows_along(points, axis)} | {rows[0] for rows in fronts.values() if rows}
    bounds = {row: list(_bounds(row, points, training, trained, serving, served)) for row in sorted(shown)}
    return DesignReport(
        space=space,
        points=points,
        trained=trained,
        served=served,
        fronts=fronts,
        effects=effects(points, metrics),
        along=along,
        bounds=bounds,
        speedups=speedups(space),
        took_s=time.perf_counter() - began,
        caveats=_caveats(space, points),
    )


def _passes(
    training: TrainingSweep | None, serving: ServingSweep | None, served: Served | None, row: int, plan: str
) -> Iterable[tuple[str, str, list[ModelMatmul]]]:
    """Yield (work, number format, multiplications) of one point."""
    if training is not None and plan:
        number_format, _, text = plan.partition(" ")
        layout = training.plan_of(number_format, text)
        work = training.costs.workload
        tp, size = float(layout.tp[0]), float(layout.microbatch[0])
        tokens = size * training.space.seq_len / float(layout.cp[0])
        span = float(work.attention_span / (1 - work.delta_share))  # of the layers that have attention
        attention = attention_of(work, size, training.space.seq_len / float(layout.cp[0]), span, tp)
        yield "training", number_format, [*matmuls_of(work, tokens, tokens, tp), *attention]
    if serving is not None and served is not None and served.way[row] >= 0:
        weights, degree, sequences = served.ways[served.way[row]]
        wanted, work = weights if weights in ("fp8", "fp4") else "bf16", serving.costs.workload
        space, tp = serving.space, float(degree)
        has_attention = 1 - float(work.delta_share)
        span = space.prompt * float(work.attention_span / work.seq_len) / has_attention  # windows see less than half
        attention = attention_of(work, 1, space.prompt, span, tp)
        yield "prefill", wanted, [*matmuls_of(work, space.prompt, 1, tp), *attention]
        cached = (space.prompt + space.output / 2) * float(work.cached_share) / has_attention
        attention = attention_of(work, sequences, 1, cached, tp)
        yield "decode", wanted, [*matmuls_of(work, sequences, sequences, tp), *attention]


def _bounds(
    row: int,
    points: Points,
    training: TrainingSweep | None,
    trained: TrainedPoints | None,
    serving: ServingSweep | None,
    served: Served | None,
) -> Iterable[BoundMatmul]:
    plan = " ".join(trained.plans[trained.way[row]]) if trained is not None and trained.way[row] >= 0 else ""
    for work, number_format, some in _passes(training, serving, served, row, plan):
        compute, memory = seconds_of_matmuls(some, points, number_format, np.array([row]))
        for one, of_compute, of_memory in zip(some, compute[:, 0], memory[:, 0], strict=True):
            yield BoundMatmul(
                **vars(one),
                device=points.values(row),
                work=work,
                compute_s=float(of_compute),
                memory_s=float(of_memory),
                binds="compute" if of_compute >= of_memory else "memory",
            )


def _caveats(space: DesignSpace, points: Points) -> list[str]:
    """Return what the figures rest on, in words."""
    nodes, memory = logic_nodes(), memory_generations()
    lines = ["No run has checked these figures: they are predictions, for devices of which most do not exist."]
    used: list[LogicNode | MemoryGeneration] = [nodes[name] for name in space.device.node]
    for one in [*used, *(memory[name] for name in space.device.memory)]:
        assumed = f" Assumed: {', '.join(one.assumed)}." if one.assumed else ""
        lines.append(f"{one.name}: {one.source}.{assumed}")
    for reason, many in points.impossible.items():
        lines.append(f"{counted(many, 'combination', form=',')} {'was' if many == 1 else 'were'} left out: {reason}.")
    return [*lines, *points.base.caveats]


@dataclass(frozen=True, kw_only=True)
class DesignRecord:
    """Findings in a space, as a program reads them: all but the single points, which are in `as_csv`."""

    name: str
    points: int
    combinations: int
    """Points, and those that are no device."""
    seconds: float
    left_out: dict[str, int]
    """Why a combination is no device -> how many."""
    searched: int
    """Points whose plan was searched, not taken from a neighbour."""
    regret: float | None
    """Most time that a neighbour's plan lost where both are known, as a share."""
    fronts: dict[str, list[dict[str, Any]]]
    """Work -> points of its front by time: their figures, and what they do."""
    effects: dict[str, dict[str, list[float]]]
    """Result -> figure -> relative change for each of its values."""
    along: dict[str, dict[str, list[Stop]]]
    """Work -> figure -> each value of it, with what binds."""
    matmuls: list[BoundMatmul]
    speedups: list[Speedup]
    fits_none: dict[str, int]
    """Work -> points that it does not fit."""
    notes: list[str]


def as_record(report: DesignReport) -> DesignRecord:
    points, trained, served = report.points, report.trained, report.served
    return DesignRecord(
        name=report.space.name,
        points=len(points),
        combinations=len(points) + sum(points.impossible.values()),
        seconds=round(report.took_s, 3),
        left_out=points.impossible,
        searched=trained.searched if trained else 0,
        regret=trained.regret if trained else None,
        fronts={work: [_row(report, row) for row in rows] for work, rows in report.fronts.items()},
        effects=report.effects,
        along=report.along,
        matmuls=[bound for bounds in report.bounds.values() for bound in bounds],
        speedups=report.speedups,
        fits_none={
            "training": int(np.isnan(trained.step_s).sum()) if trained else 0,
            "serving": int(np.isnan(served.tpot_s).sum()) if served else 0,
        },
        notes=report.caveats,
    )


def _row(report: DesignReport, row: int) -> dict[str, Any]:
    points, trained, served = report.points, report.trained, report.served
    found: dict[str, Any] = dict(points.values(row))
    half = points.computed("bf16")
    found |= {
        f"{half}_flops_per_s": float(points.flops_per_s[half][row]),
        "memory_bytes": float(points.memory_bytes[row]),
        "memory_bytes_per_s": float(points.memory_bytes_per_s[row]),
        "drawn_w": float(points.power_w[row]),
        "usd_per_h": _number(points.usd_per_h[row]),
    }
    if trained is not None and trained.way[row] >= 0:
        found |= {key: _number(getattr(trained, key)[row]) for key in ("step_s", *TRAINING)}
        found["format"], found["plan"] = trained.plans[trained.way[row]]
    if served is not None and served.way[row] >= 0:
        found |= {
            key: _number(getattr(served, key)[row]) for key in ("ttft_s", *SERVING_COLUMNS, "tokens_per_s_device")
        }
        found["weights"], found["tp"], found["sequences"] = served.ways[served.way[row]]
    return found


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def as_csv(report: DesignReport) -> str:
    """Return every point as a line, with the matmuls that bind by arithmetic (C) or memory (M) in their order."""
    rows = [_row(report, row) for row in range(len(report.points))]
    binding = _binding(report)
    for work, columns in binding.items():
        for row, text in zip(rows, columns, strict=True):
            row[f"{work}_binds"] = text
    names = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _binding(report: DesignReport) -> dict[str, list[str]]:
    """Return work -> for each point a letter for each matrix multiplication: C for compute, M for memory."""
    space, points = report.space, report.points
    training = TrainingSweep(space.train, points, space.costs.pue) if space.train else None
    serving = ServingSweep(space.serve, points, space.costs.pue) if space.serve else None
    found: dict[str, list[str]] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    ways = [one.way if one is not None else np.full(len(points), -1) for one in (report.trained, report.served)]
    for row, key in enumerate(zip(*(way.tolist() for way in ways), strict=True)):
        groups.setdefault(key, []).append(row)
    for (plan, _), members in groups.items():
        text = " ".join(report.trained.plans[plan]) if report.trained is not None and plan >= 0 else ""
        for work, number_format, some in _passes(training, serving, report.served, members[0], text):
            compute, memory = seconds_of_matmuls(some, points, number_format, np.array(members))
            letters = np.where(compute >= memory, "C", "M")
            column = found.setdefault(work, [""] * len(points))
            for row, of_row in zip(members, letters.T, strict=True):
                column[row] = "".join(of_row)
    return found


def in_words(report: DesignReport, top: int = 10) -> str:
    points, trained = report.points, report.trained
    many = counted(len(points), "device", form=",")
    lines = [f"{report.space.name}: {many} from {points.base.name} on, in {report.took_s:.1f} s"]
    if trained is not None:
        lines.append(
            f"plans: the best of {len(trained.plans)} from searches for {counted(trained.searched, 'device')}; others "
            f"lost up to {percent(trained.regret)} of a step against a search of their own"
        )
    for work, rows in report.fronts.items():
        lines += ["", f"{work}: {len(rows)} that no other beats in time, money and energy at once"]
        lines += [f"  {_in_words(report, work, row)}" for row in evenly(rows, top)]
    for metric, of_axes in report.effects.items() if len(points) > 1 else ():
        lines += ["", f"{metric}: its median with each value, over that with the first; -: nothing fits"]
        for key, ratios in of_axes.items():
            times = (f"{ratio:.2f}" if np.isfinite(ratio) else "-" for ratio in ratios)
            said = zip(map(_short, points.axes[key]), times, strict=True)
            lines.append(f"  {key:20} " + "  ".join(map(" ".join, said)))
    for work, of_stops in report.along.items():
        for axis, stops in of_stops.items():
            lines += ["", f"{work} along {axis}, all else as in the base or the middle:"]
            for stop in stops:
                parts = ", ".join(f"{name} {percent(share)}" for name, share in stop.parts.items() if share > 0.02)
                lines.append(f"  {_short(stop.value):>8} {seconds(stop.seconds):>9}  {stop.binds:16}  {parts}")
            if work == "serving" and axis in ("memory", "memory_bytes_per_s", "stacks"):
                last = where_it_stops(stops)
                if last is not None:
                    lines.append(
                        f"  from {_short(last.value)} on less than half of more bandwidth reaches the time per token"
                    )
    for one in report.speedups:
        lines += ["", f"{_title(one)}: {one.whole:.1f}x"]
        lines += [f"  {name:14} {value:.2f}x" for name, value in one.factors.items()]
    for work, rows in report.fronts.items():
        if rows:
            lines += ["", f"matrix multiplications on the fastest device of {work}:", *_matmuls(report.bounds[rows[0]])]
            break
    return "\n".join([*lines, "", *report.caveats])


def _matmuls(bounds: list[BoundMatmul]) -> list[str]:
    lines = [f"  {'':10}{'':24}{'times':>8}{'m':>9}{'k':>8}{'n':>8}{'compute':>12}{'memory':>12}  binds"]
    for one in bounds:
        lines.append(
            f"  {one.work:10}{one.name:24}{one.times:>8.0f}{one.m:>9.0f}{one.k:>8.0f}{one.n:>8.0f}"
            f"{seconds(one.compute_s):>12}{seconds(one.memory_s):>12}  {one.binds}"
        )
    return lines


def _in_words(report: DesignReport, work: str, row: int) -> str:
    values = report.points.values(row) or {"base": report.points.base.name}
    device = ", ".join(f"{key} {_short(value)}" for key, value in values.items())
    found = _row(report, row)
    if work == "training":
        costs = f"{seconds(found['run_s'])}, {_count(found['usd'])} USD, {_count(found['kwh'])} kWh"
        return f"{costs}: {device}; {found['plan']}"
    costs = (
        f"{seconds(found['tpot_s'])} a token, {_count(found['usd_per_million'])} USD and "
        f"{_count(found['kwh_per_million'])} kWh a million"
    )
    return f"{costs}: {device}; tp={found['tp']}, {found['sequences']} at a time"


def _title(one: Speedup) -> str:
    return f"{one.what}, {one.before} in {one.formats[0]} to {one.after} in {one.formats[1]}"


def _count(value: float | None) -> str:
    return "?" if value is None else count(value)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def pictures(report: DesignReport) -> dict[str, str]:
    """Return file name -> SVG."""
    name, found = re.sub(r"[^\w.-]+", "-", report.space.name).strip(".-") or "design", {}
    for work, rows in report.fronts.items():
        table = [_row(report, row) for row in rows]
        x, y = ("usd", "run_s") if work == "training" else ("usd_per_million", "tpot_s")
        shown = [row for row in table if row[x] and row[y]]
        if len(shown) > 1:
            unit = {"usd": "USD", "run_s": "days", "usd_per_million": "USD a million tokens", "tpot_s": "ms a token"}
            scale = {"run_s": 1 / 86_400, "tpot_s": 1e3}
            found[f"{name}-{work}-front.svg"] = charts.scatter(
                f"{work}: devices that no other beats in time, money and energy",
                (unit[x], [row[x] for row in shown]),
                (unit[y], [row[y] * scale[y] for row in shown]),
                [", ".join(f"{key} {_short(value)}" for key, value in list(row.items())[:8]) for row in shown],
            )
    for work, axes in report.along.items():
        for axis, stops in axes.items():
            if len(stops) < 2:
                continue
            labels = [_short(stop.value) for stop in stops]
            times, said = (1e3, "ms a token") if work == "serving" else (1.0, "s a step")
            parts = {part: [stop.parts[part] * stop.seconds * times for stop in stops] for part in stops[0].parts}
            found[f"{name}-{work}-{axis}.svg"] = charts.stacked(f"{work} along {axis}", labels, parts, said)
            depends = {key: [stop.elasticity[key] for stop in stops] for key in stops[0].elasticity}
            found[f"{name}-{work}-{axis}-binds.svg"] = charts.lines(
                f"{work} along {axis}: how far the speed follows each figure", labels, depends, "1: in proportion"
            )
    for one in report.speedups:
        values = {**one.factors, "together": one.whole}
        found[f"{name}-{one.what}-speedup.svg"] = charts.bars(_title(one), values)
    return found
