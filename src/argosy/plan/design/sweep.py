"""Training and serving on every device of a space, by the planner's formulas with the devices' figures as columns.

Plans depend on devices only by which of them is fastest and fits. So a full search is made for some devices, the
extremes of the space and some drawn ones, and every device takes the best of the plans that these have found. Other
devices are drawn to tell what that costs: `regret` is how much slower the chosen plan is than one of a search there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.economy import DRAW
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.inference import (
    BYTES_OF_WEIGHT,
    CACHES,
    Formats,
    Latencies,
    ReplicaCut,
    ServingLoad,
    ServingModel,
    ServingSoftware,
)
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.step_time import StepModel, StepTime
from argosy.plan.design.points import Floats, Points
from argosy.plan.design.space import ServeSpace, TrainSpace
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import Format
from argosy.plan.layer_spec import tensor_parts
from argosy.plan.layouts import Layouts, column_of
from argosy.plan.plan import Plan
from argosy.plan.quantities import evenly
from argosy.plan.report.request import Question, in_keys, of_model
from argosy.plan.search.candidates import WholeRunModel
from argosy.plan.search.search import SearchResult, plainest, search

DRAWN, HELD_OUT, OTHER_POINTS = 10, 8, 4
"""Points that are drawn to be searched for plans, and in each round to tell the regret; and that are searched in number
formats with slower matmuls."""
SENSITIVITY_ROUNDS, ROUND_TOLERANCE = 3, 0.03
"""Rounds of drawn points whose plans are tried everywhere too, until these lose less than predictions can tell."""
POINTS_AT_ONCE = 2**14
"""Points in arrays of one computation: more leave the processor's caches."""
OF_EACH = 3
"""Meshes of each search whose best plan every point may take."""
NARROW_FORMATS: dict[str, Format] = {"bf16": "fp8", "fp8": "fp8", "fp4": "fp4"}
"""Number format to train in -> that of the plan's narrow matmuls."""


@dataclass(frozen=True)
class TrainedPoints:
    """Training on each point; NaN where nothing fits."""

    step_s: Floats
    run_s: Floats
    """Seconds of the whole run, failures included."""
    usd: Floats
    kwh: Floats
    way: NDArray[np.int64]
    """Place of the point's plan in `plans`; -1 where none fits."""
    plans: tuple[tuple[str, str], ...]
    """(number format, plan)."""
    regret: float
    """Most that a point of the last drawn ones lost against a full search, before the plans of that were tried."""
    searched: int
    """Points that were searched for plans."""

    @property
    def objectives(self) -> Floats:
        """Time, money and energy, a column each."""
        return np.stack([self.run_s, self.usd, self.kwh], axis=1)


@dataclass(frozen=True)
class Served:
    """Serving on each point; NaN where nothing fits or no way keeps the limits."""

    ttft_s: Floats
    tpot_s: Floats
    tokens_per_s_device: Floats
    usd_per_million: Floats
    kwh_per_million: Floats
    way: NDArray[np.int64]
    ways: tuple[tuple[str, int, int], ...]
    """(number format of weights, devices of a replica, requests at a time)."""

    @property
    def objectives(self) -> Floats:
        """Time per token, money and energy of a million, a column each."""
        return np.stack([self.tpot_s, self.usd_per_million, self.kwh_per_million], axis=1)


def drawn_w(points: Points, pue: float) -> Floats:
    """Return the power for one device with its share of node and building (`plan.cost.economy`)."""
    base = points.base
    ratio = (base.nameplate_w or np.nan) / (base.power_w or np.nan)
    return np.asarray(points.power_w * ratio * float(DRAW.mid) * pue)


def _request(table: str, model: str, cluster: Cluster, question: Question) -> tuple[CostModel, Any]:
    """Return the cost model of a model on the base device, and the request. Raises: UserError by the file's keys."""
    try:
        request = of_model(model, cluster, question)
    except UserError as error:
        text = in_keys(str(error), f"{table}.")
        raise UserError(text if text.startswith(f"{table}.") else f"[{table}] {text}") from None
    return CostModel.of(request.run, request.cluster), request


class TrainingSweep:
    """One training, on any point of a space."""

    def __init__(self, space: TrainSpace, points: Points, pue: float):
        self.space, self.points, self.pue = space, points, pue
        question = Question(space.global_batch, space.seq_len, space.tokens)
        cluster = Cluster.of(points.base, space.devices)
        self.costs, self.request = _request("train", space.model, cluster, question)
        self.formats = [fmt for fmt in space.precision if fmt == "bf16" or points.computed(fmt) == fmt] or ["bf16"]

    def costs_of(self, row: int, number_format: str) -> CostModel:
        """Return the cost model of one point, for a search: in bf16, at the rate of the format."""
        rates = _one(self.points.rates(NARROW_FORMATS[number_format], slice(row, row + 1)))
        if number_format != "bf16":
            rates = replace(rates, half=rates.narrow, achieved_half=rates.achieved_narrow)
        return replace(self.costs, rates=rates)

    def search(self, row: int, number_format: str) -> SearchResult:
        half = "bf16" if "bf16" in self.points.base.formats else "fp16"
        return search(self.costs_of(row, number_format), {"precision": (half,)})

    def in_format(self, plans: Layouts, number_format: str) -> Layouts:
        """Return plans of a search in a number format: rules of today's software need not hold for it."""
        return plans if number_format == "bf16" else replace(plans, precision=column_of("precision", ["fp8"]))

    def plan_of(self, number_format: str, text: str) -> Layouts:
        """Return a plan of `TrainedPoints.plans`."""
        return self.in_format(Layouts.of([Plan.parse(text)]), number_format)

    def step(self, plan: Layouts, rates: Rates) -> StepTime:
        """Return the step of one plan on columns of devices."""
        costs = self.costs
        model = StepModel(plan, costs.workload, rates, costs.system, costs.constants, costs.compression)
        return model.predict().calibrated(costs.factors)

    @cached_property
    def _seen(self) -> list[int]:
        """Rows that are searched for plans: the extremes of each figure, and some drawn ones."""
        points = self.points
        figures = [
            points.memory_bytes,
            points.node,
            points.memory_bytes_per_s,
            points.link_bytes_per_s,
            points.nic_bytes_per_s,
            points.flops_per_s[points.computed("bf16")] / points.memory_bytes_per_s,
        ]
        ends = [int(end(figure)) for figure in figures for end in (np.argmin, np.argmax)]
        drawn = np.random.default_rng(0).choice(len(points), min(len(points), DRAWN), replace=False)
        return sorted({*ends, *drawn.tolist()})

    @cached_property
    def fastest(self) -> str:
        """The number format with the fastest matmuls: full searches are made in it."""
        points = self.points
        return max(self.formats, key=lambda fmt: float(np.max(points.flops_per_s[points.computed(fmt)])))

    def found_for(self, row: int, number_format: str) -> list[tuple[str, Layouts]]:
        """Return (number format, plan) of the best plans of a full search for one point; the fastest first."""
        result = self.search(row, number_format)
        if not len(result):
            return []
        rows = dict.fromkeys([*result.best(result.step_s, OF_EACH).tolist(), plainest(result)])
        return [(number_format, self.in_format(result.plans[np.array([i])], number_format)) for i in rows]

    def swept(self) -> TrainedPoints:
        """Return the training on every point. Raises: UserError if nothing fits anywhere."""
        best = _Best(self)
        for row in self._seen:
            best.add(self.found_for(row, self.fastest))
        for number_format in self.formats:
            if number_format != self.fastest:
                for row in evenly(self._seen, OTHER_POINTS):
                    best.add(self.found_for(row, number_format))
        if not best.ways:
            raise UserError(
                f"train.devices = {self.space.devices}: {self.space.model} fits on no device of the space. Give more "
                "devices, or devices with more memory."
            )
        best.evaluate()
        drawn, regret = np.random.default_rng(1), 0.0
        unseen = np.setdiff1d(np.arange(len(self.points)), self._seen)
        for _ in range(SENSITIVITY_ROUNDS):
            rows = drawn.choice(unseen, min(len(unseen), HELD_OUT), replace=False)
            regret = max((best.regret(row) for row in rows.tolist()), default=0.0)
            best.evaluate()
            if regret < ROUND_TOLERANCE:
                break
        step_s = np.where(best.way < 0, np.nan, best.step_s)
        plans = Layouts.of([plan.plan(0) for plan in best.ways.values()])
        return self._with_costs(step_s, best.way, plans[np.maximum(best.way, 0)], tuple(best.ways), regret)

    def step_at(self, row: int, number_format: str, plan: Layouts) -> float:
        """Return the seconds of a plan's step on one point."""
        rates = _one(self.points.rates(NARROW_FORMATS[number_format], slice(row, row + 1)))
        return float(np.asarray(self.step(plan, rates).total)[0])

    def _with_costs(
        self,
        step_s: Floats,
        way: NDArray[np.int64],
        layouts: Layouts,
        plans: tuple[tuple[str, str], ...],
        regret: float,
    ) -> TrainedPoints:
        model = WholeRunModel(self.request.run, self.request.cluster, self.costs, self.space.tokens)
        used = np.full(len(step_s), self.space.devices)
        failures = model.failures(layouts, used, np.nan_to_num(step_s, nan=1.0))
        made = model.whole(layouts, used, Estimate.exactly(step_s), failures)
        hours = np.asarray(made.device_hours.mid)
        return TrainedPoints(
            step_s=step_s,
            run_s=np.asarray(made.time_s.mid),
            usd=hours * self.points.usd_per_h,
            kwh=hours * drawn_w(self.points, self.pue) / 1000,
            way=way,
            plans=plans,
            regret=regret,
            searched=len(self._seen),
        )


class _Best:
    """The best plan of each point, of those that were tried so far."""

    def __init__(self, training: TrainingSweep):
        self.training, points = training, training.points
        self.step_s, self.way = np.full(len(points), np.inf), np.full(len(points), -1)
        self.ways: dict[tuple[str, str], Layouts] = {}
        self._tried = 0
        costs = training.costs
        self._most = points.memory_bytes / (float(costs.rates.memory_bytes) / costs.memory_bytes)

    def add(self, found: Sequence[tuple[str, Layouts]]) -> None:
        """Add plans, which `evaluate` will try."""
        for number_format, plan in found:
            self.ways.setdefault((number_format, str(plan.plan(0))), plan)

    def evaluate(self) -> None:
        """Try the plans that were added since on every point that they fit."""
        training = self.training
        new = list(enumerate(self.ways.items()))[self._tried :]
        self._tried = len(self.ways)
        needed = [float(np.asarray(training.costs.predict_memory(plan).total)[0]) for _, (_, plan) in new]
        for block in training.points.blocks(POINTS_AT_ONCE):
            rows = block.rows
            rates: dict[str, Rates] = {
                fmt: training.points.rates(NARROW_FORMATS[fmt], block.chips, block.networks) for fmt in training.formats
            }
            for (place, ((number_format, _), plan)), memory_bytes in zip(new, needed, strict=True):
                fits = memory_bytes <= self._most[rows]
                if fits.any():
                    step_s = np.where(fits, block.flat(training.step(plan, rates[number_format]).total), np.inf)
                    better = step_s < self.step_s[rows]
                    self.step_s[rows] = np.where(better, step_s, self.step_s[rows])
                    self.way[rows] = np.where(better, place, self.way[rows])

    def regret(self, row: int) -> float:
        """Return how much slower the point's plan is than that of a full search, whose plans are added."""
        found = self.training.found_for(row, self.training.fastest)
        self.add(found)
        if not found:
            return 0.0
        return max(0.0, float(self.step_s[row]) / self.training.step_at(row, *found[0]) - 1)


class ServingSweep:
    """One service, on any point of a space."""

    def __init__(self, space: ServeSpace, points: Points, pue: float):
        self.space, self.points, self.pue = space, points, pue
        question = Question(seq_len=space.prompt + space.output, serving=True)
        self.costs, self.request = _request("serve", space.model, Cluster.of(points.base, 1), question)
        self.software = ServingSoftware.of(space.engine, points.base, "serve.engine =")
        self.tps = degrees_of(space, self.request.run.model)
        self.ways = tuple((w, tp, n) for w in space.weights for tp in self.tps for n in space.sequences)

    def model(self, weights: str, tp: float, rows: Any = slice(None), networks: Any = None) -> ServingModel:
        """Return the planner's model of a replica on columns of devices (`Points.rates`)."""
        points, space = self.points, self.space
        wanted = weights if weights in ("fp8", "fp4") else "bf16"
        computed = points.computed(wanted)
        rates = points.rates("fp8", rows, networks)
        flops = points.flops_per_s[computed][rows] * points.achieved[computed][rows]
        is_narrow = float(computed in ("fp8", "fp4"))
        formats = Formats(BYTES_OF_WEIGHT[weights], CACHES[space.kv_cache], flops, is_narrow)
        _, constants, options = self.software
        return ServingModel(self.costs.workload, rates, ReplicaCut(tp), formats, constants, options=options)

    def swept(self) -> Served:
        """Return the best way to serve on each device. Raises: UserError if the work fits none within its limits."""
        points, space, n = self.points, self.space, len(self.points)
        score, way = np.full(n, -np.inf), np.full(n, -1)
        kept = np.full((3, n), np.nan)
        for block in points.blocks(POINTS_AT_ONCE):
            rows = block.rows
            models = {
                (w, tp): self.model(w, float(tp), block.chips, block.networks) for w in space.weights for tp in self.tps
            }
            for place, (weights, tp, sequences) in enumerate(self.ways):
                model = models[weights, tp]
                found, *reach = served(model, space, tp, sequences, points.node[block.networks])
                ttft_s, tpot_s, each, ok = map(block.flat, (found.ttft_s, found.tpot_s, *reach))
                reached = np.where(ok, each if space.objective == "throughput" else -tpot_s, -np.inf)
                better = reached > score[rows]
                score[rows] = np.where(better, reached, score[rows])
                way[rows] = np.where(better, place, way[rows])
                for column, new in zip(kept, (ttft_s, tpot_s, each), strict=True):
                    column[rows] = np.where(better, new, column[rows])
        if (way < 0).all():
            raise UserError(self._nothing_serves())
        hours = 1e6 / kept[2] / 3600
        return Served(
            ttft_s=kept[0],
            tpot_s=kept[1],
            tokens_per_s_device=kept[2],
            usd_per_million=hours * points.usd_per_h,
            kwh_per_million=hours * drawn_w(points, self.pue) / 1000,
            way=way,
            ways=self.ways,
        )

    def _nothing_serves(self) -> str:
        """Say what comes nearest to the limits of a service that no device keeps."""
        space = self.space
        limits = {key: value for key in ("tpot_ms", "ttft_ms") if (value := getattr(space, key)) is not None}
        if not limits:
            return (
                f"serve.sequences = {list(space.sequences)}: {space.model} with so many requests fits on no device of "
                f"the space with serve.tp = {self.tps}. Give more tp, narrower weights, or more memory."
            )
        free = space.model_copy(update={"tpot_ms": None, "ttft_ms": None, "objective": "latency"})
        found = ServingSweep(free, self.points, self.pue).swept()
        reached = {"tpot_ms": found.tpot_s * 1e3, "ttft_ms": found.ttft_s * 1e3}
        row = int(np.nanargmin(np.max([reached[key] / limit for key, limit in limits.items()], axis=0)))
        key, limit = max(limits.items(), key=lambda item: float(reached[item[0]][row]) / item[1])
        figures = self.points.values(row).items()
        device = ", ".join(f"{name} {value if isinstance(value, str) else f'{value:g}'}" for name, value in figures)
        return (
            f"serve.{key} = {limit:g}: no device of the space keeps it. The nearest found has "
            f"{reached[key][row]:.3g} ms{f' with {device}' if device else ''}. Raise the limit, or give more tp, fewer "
            "sequences, faster memory."
        )


def degrees_of(space: ServeSpace, model: ModelConfig) -> list[int]:
    """Return the degrees of tensor parallelism that the model can be cut by. Raises: UserError if there is none."""
    parts = tensor_parts(model)
    if not (found := [tp for tp in space.tp if parts % tp == 0]):
        raise UserError(
            f"serve.tp = {list(space.tp)}: none divides the heads and feed-forwards of all layers ({parts}). Try 1, 2, "
            "4 or 8."
        )
    return found


def served(
    model: ServingModel, space: ServeSpace, tp: int, sequences: int, node: Floats
) -> tuple[Latencies, Floats, NDArray[np.bool_]]:
    """Return latencies, output tokens a second of a device, and where a replica of tp devices serves so many requests
    at a time: memory and node (devices that the fast link joins) hold them, and the limits are kept."""
    load = ServingLoad(float(sequences), space.prompt, space.output)
    found = model.latencies(load)
    ok = (sequences <= model.room(space.prompt + space.output / 2)) & (tp <= node)
    ok &= found.tpot_s * 1e3 <= (space.tpot_ms or np.inf)
    ok &= found.ttft_s * 1e3 <= (space.ttft_ms or np.inf)
    return found, found.reached(load) / tp, ok


def front(objectives: Floats) -> NDArray[np.int64]:
    """Return the rows that no other beats in every column at once (less is better), by the first column.

    Rows with NaN are left out; of equal rows the first is kept.
    """
    left = np.flatnonzero(np.isfinite(objectives).all(axis=1))
    kept = []
    while len(left):
        values = objectives[left]
        best = left[int(np.argmin(np.log(np.maximum(values, 1e-300)).sum(axis=1)))]
        kept.append(int(best))
        left = left[(values < objectives[best]).any(axis=1)]
    found = np.array(kept, np.int64)
    return found[np.argsort(objectives[found, 0], kind="stable")] if len(found) else found


def _one(rates: Rates) -> Rates:
    """Return rates of columns of one as rates of numbers."""
    numbers: dict[str, Any] = {name: float(np.ravel(v)[0]) for name, v in vars(rates).items() if np.ndim(v)}
    return replace(rates, **numbers)
