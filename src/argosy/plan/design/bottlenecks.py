"""The time of training and serving along one figure of a space, and what binds it there.

Every matrix multiplication of a model is bound on a device by arithmetic or by memory. A multiplication of m x k by k x
n takes 2mkn FLOPs and moves at least (mk + kn + mn) e bytes; with a cache of C bytes at least 2mkn e / sqrt(C/e) of
them, however it is blocked (Hong and Kung 1981). The longer of both at the rates that a device reaches binds it
(roofline: Williams et al. 2009). The shapes are those that `plan.cost.layer_time` and `plan.cost.inference` compute
with; times of whole steps and passes come from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import computed_field
from pydantic.dataclasses import dataclass as documented

from argosy.plan.cost.inference import ServingLoad
from argosy.plan.cost.rates import Rates
from argosy.plan.design.points import BYTES, Floats, Points
from argosy.plan.design.sweep import NARROW_FORMATS, Served, ServingSweep, TrainedPoints, TrainingSweep
from argosy.plan.layouts import Layouts
from argosy.plan.workload import Workload

RAISED_BY = 1.1
"""A tenth more of a figure, as in `plan.report.explain`."""
CHANGES: dict[str, tuple[str, ...]] = {
    "matmul rate": ("fp32", "half", "narrow"),
    "memory bandwidth": ("memory_bytes_per_s",),
    "links": ("link_bytes_per_s",),
    "network": ("nic_bytes_per_s",),
}
"""Bottleneck -> the rates that would be a tenth more."""
STEP_PARTS = {
    "matmuls": ("ideal", "matmul", "recompute"),
    "attention": ("attention",),
    "memory": ("pointwise", "optimizer", "offload"),
    "links": ("tensor",),
    "network": ("gradients", "pipeline", "context", "experts"),
    "idle": ("bubble", "host", "other"),
}
"""Part of a step -> the planner's categories in it."""


@documented(frozen=True)
class Stop:
    """One value of a figure, all others being those of the reference."""

    value: Any
    seconds: float
    """Time of a step in training, or between two tokens in serving."""
    parts: dict[str, float]
    """Share of those seconds by what they are spent on."""
    elasticity: dict[str, float]
    """Relative change of the speed for that of a figure: 1 follows it, 0 does not care."""
    way: str
    """The plan; or the format of weights, tp and requests."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def binds(self) -> str:
        """The rate that the speed depends on most; "overhead" if none that is raised would bring a third."""
        most = max(self.elasticity, key=lambda name: self.elasticity[name])
        return most if self.elasticity[most] > 1 / 3 else "overhead"


def rows_along(points: Points, axis: str) -> list[int]:
    """Return a row for each value of a figure, all others at the reference: the base's own, else the middle one."""
    reference = {key: _reference(points, key) for key in points.axes}
    row_of = {int(number): row for row, number in enumerate(points.chosen)}
    shape = [len(values) for values in points.axes.values()]
    found = []
    for place in range(len(points.axes[axis])):
        places = [place if key == axis else reference[key] for key in points.axes]
        number = int(np.ravel_multi_index(places, shape))
        if number in row_of:
            found.append(row_of[number])
    return found


def _reference(points: Points, key: str) -> int:
    values, base, silicon = points.axes[key], points.base, points.base.silicon
    own = getattr(base, key, getattr(silicon, key, None) if silicon else None)
    return values.index(own) if own in values else len(values) // 2


def training_along(training: TrainingSweep, trained: TrainedPoints, axis: str) -> list[Stop]:
    """Return the step along a figure, each value with its best plan."""
    points, stops = training.points, []
    plans: dict[tuple[str, str], Layouts] = {}
    for row in rows_along(points, axis):
        if trained.way[row] < 0:
            continue
        number_format, text = trained.plans[trained.way[row]]
        plan = plans.setdefault((number_format, text), training.plan_of(number_format, text))
        rates = points.rates(NARROW_FORMATS[number_format], slice(row, row + 1))
        time = training.step(plan, rates)
        total, by_name = float(np.asarray(time.total)[0]), time.by_category(0)
        parts = {part: sum(by_name[name] for name in names) / total for part, names in STEP_PARTS.items()}

        def seconds(changed: Rates, plan: Layouts = plan) -> float:
            return float(np.asarray(training.step(plan, changed).total)[0])

        stops.append(Stop(_value(points, axis, row), total, parts, _elasticity(seconds, rates, total), text))
    return stops


def serving_along(serving: ServingSweep, served: Served, axis: str) -> list[Stop]:
    """Return the time of a token in decode along a figure, each value with its best way to serve."""
    points, space, stops = serving.points, serving.space, []
    for row in rows_along(points, axis):
        if served.way[row] < 0:
            continue
        weights, tp, sequences = served.ways[served.way[row]]
        model = serving.model(weights, float(tp), slice(row, row + 1))
        rates, load = model.rates, ServingLoad(float(sequences), space.prompt, space.output)
        total = float(model.latencies(load).tpot_s[0])
        decode = model.decode_parts(float(sequences), space.prompt + space.output / 2)
        parts = {name: float(np.ravel(part)[0]) / total for name, part in decode.items()}
        parts["prefill of others"] = max(0.0, 1 - sum(parts.values()))

        def seconds(changed: Rates, model: Any = model, load: ServingLoad = load, own: Rates = rates) -> float:
            faster = float(changed.half[0] / own.half[0])  # type: ignore[index]
            model.rates = changed
            model.formats = replace(model.formats, flops_per_s=model.formats.flops_per_s * faster)
            found = float(model.latencies(load).tpot_s[0])
            model.rates = own
            model.formats = replace(model.formats, flops_per_s=model.formats.flops_per_s / faster)
            return found

        way = f"{weights}, tp={tp}, {sequences} at a time"
        stops.append(Stop(_value(points, axis, row), total, parts, _elasticity(seconds, rates, total), way))
    return stops


def _value(points: Points, axis: str, row: int) -> Any:
    return points.axes[axis][int(points.places[axis][row])]


def _elasticity(seconds: Any, rates: Rates, now: float) -> dict[str, float]:
    found = {}
    for name, keys in CHANGES.items():
        changed = replace(rates, **{key: getattr(rates, key) * RAISED_BY for key in keys})
        found[name] = float(np.log(now / seconds(changed)) / np.log(RAISED_BY))
    return found


def where_it_stops(stops: list[Stop]) -> Stop | None:
    """Return the value from which on less than half of what more memory bandwidth brings arrives; None if more does
    at the last."""
    beyond = None
    for stop in reversed(stops):
        if stop.elasticity["memory bandwidth"] >= 0.5:
            break
        beyond = stop
    return beyond


def effects(points: Points, metrics: Mapping[str, Floats]) -> dict[str, dict[str, list[float]]]:
    """Return metric -> figure -> its median over all points with each value, over that with the first value."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, column in metrics.items():
        of_axes = {}
        for key, values in points.axes.items():
            if len(values) > 1:
                medians = [_median(column[points.places[key] == place]) for place in range(len(values))]
                first = next((m for m in medians if np.isfinite(m)), np.nan)
                of_axes[key] = [float(m / first) for m in medians]
        found[name] = of_axes
    return found


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


@dataclass(frozen=True)
class ModelMatmul:
    """One matrix multiplication of a pass, [m, k] x [k, n], done so many times."""

    name: str
    times: float
    m: float
    k: float
    n: float
    is_weight: bool = True
    """False for attention, whose operands are activations or the cache, in 16 bits."""

    @property
    def flops(self) -> float:
        return self.times * 2 * self.m * self.k * self.n


def matmuls_of(work: Workload, tokens: float, logits: float, tp: float = 1) -> list[ModelMatmul]:
    """Return the multiplications with weights in a forward pass of `tokens`, of which `logits` go through the head."""
    numbers = {name: value for name, value in vars(work).items() if not isinstance(value, tuple)}
    w: dict[str, float] = {name: float(np.asarray(value)) for name, value in numbers.items()}
    layers, width = w["layers"] - w["delta_layers"], w["width"]
    queries, values = w["heads"] * w["key_width"] / tp, w["heads"] * w["value_width"] / tp
    found: list[ModelMatmul] = []
    if w["kv_rank"]:
        unrotated = w["key_width"] - w["rope_width"]
        if w["q_rank"]:
            found.append(ModelMatmul("queries down", layers, tokens, width, w["q_rank"]))
        found += [
            ModelMatmul("queries", layers, tokens, w["q_rank"] or width, queries),
            ModelMatmul("latent down", layers, tokens, width, w["kv_rank"] + w["rope_width"]),
            ModelMatmul("latent up", layers, tokens, w["kv_rank"], w["heads"] / tp * (unrotated + w["value_width"])),
        ]
    else:
        kv = float(np.asarray(work.kv_heads_on(tp))) * (w["kv_width"] - w["unprojected"] / w["kv_heads"])
        found.append(ModelMatmul("queries, keys, values", layers, tokens, width, queries + w["gates"] * values + kv))
    found.append(ModelMatmul("attention out", layers, tokens, values, width))
    if deltas := w["delta_layers"]:
        values = w["delta_heads"] * w["delta_value_width"] / tp
        found += [
            ModelMatmul("delta-net in", deltas, tokens, width, float(np.asarray(work.delta_streams)) / tp),
            ModelMatmul("delta-net out", deltas, tokens, values, width),
        ]
    if dense := w["layers"] - w["moe_layers"]:
        up = w["ffn_matrices"] - 1
        found += [
            ModelMatmul("feed-forward up", dense, tokens, width, up * w["ffn_width"] / tp),
            ModelMatmul("feed-forward down", dense, tokens, w["ffn_width"] / tp, width),
        ]
    if moe := w["moe_layers"]:
        up = w["expert_matrices"] - 1
        share = w["experts_per_token"] / w["experts"]
        hit = 1 - (1 - share) ** tokens  # of the experts, those that any token chose
        each, hidden = tokens * share / hit, w["expert_ffn_width"] / tp
        found += [
            ModelMatmul("router", moe, tokens, width, w["experts"] + w["shared_gate"]),
            ModelMatmul("experts up", moe * w["experts"] * hit, each, width, up * hidden),
            ModelMatmul("experts down", moe * w["experts"] * hit, each, hidden, width),
        ]
        if shared := w["shared_ffn_width"] / tp:
            found += [
                ModelMatmul("shared experts up", moe, tokens, width, up * shared),
                ModelMatmul("shared experts down", moe, tokens, shared, width),
            ]
    return [*found, ModelMatmul("head", 1, logits, width, w["vocab_size"] / tp)]


def attention_of(work: Workload, sequences: float, new: float, seen: float, tp: float = 1) -> list[ModelMatmul]:
    """Return attention's two multiplications, of layers that have attention: `new` tokens of each sequence attend to
    `seen` ones, on average.

    The query heads that share keys are rows of one matrix.
    """
    kv_heads = float(np.asarray(work.kv_heads_on(tp)))
    rows = new * float(np.asarray(work.heads)) / tp / kv_heads
    times = float(np.asarray(work.layers - work.delta_layers)) * kv_heads * sequences
    key, value = float(np.asarray(work.key_width)), float(np.asarray(work.value_width))
    return [
        ModelMatmul("attention scores", times, rows, key, seen, is_weight=False),
        ModelMatmul("attention values", times, rows, seen, value, is_weight=False),
    ]


def seconds_of_matmuls(
    some: Sequence[ModelMatmul], points: Points, wanted: str, rows: NDArray[np.int64] | slice = slice(None)
) -> tuple[Floats, Floats]:
    """Return the seconds of arithmetic and of memory of each multiplication on each point: [matmul, point].

    wanted: number format of the weights' multiplications.
    """
    of_compute, of_memory = [], []
    for one in some:
        fmt = points.computed(wanted if one.is_weight else "bf16")
        size = BYTES[fmt] if one.is_weight else 2.0
        moved = np.asarray((one.m * one.k + one.k * one.n + one.m * one.n) * size)
        if points.cache_bytes is not None:
            blocked = one.flops / one.times * size / np.sqrt(points.cache_bytes[rows] / size)
            moved = np.maximum(moved, np.where(points.cache_bytes[rows] > 0, blocked, 0.0))
        rate = points.flops_per_s[fmt][rows] * points.achieved[fmt][rows]
        of_compute.append(one.flops / rate)
        of_memory.append(one.times * moved / points.memory_bytes_per_s[rows])
    return np.stack(np.broadcast_arrays(*of_compute)), np.stack(np.broadcast_arrays(*of_memory))
