"""Decompose a speed-up between two devices by its causes: format, matmul rate, memory, links, capacity, batch.

Each factor is the mean, over all orders in which the figures of one device become those of the other, of what that
figure brings to the logarithm of the speed when its turn comes (Shapley 1953): what several bring together is shared
evenly, and the factors multiply to the whole. Every mixture of the two devices gets the best plan of a search, or the
best way to serve of those that the file names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
from pydantic import computed_field
from pydantic.dataclasses import dataclass as documented

from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.inference import BYTES_OF_WEIGHT, CACHES, Formats, ReplicaCut, ServingModel, ServingSoftware
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.step_time import StepModel
from argosy.plan.design.points import WIDER
from argosy.plan.design.space import DesignSpace, ServeSpace, SpeedupSpace, TrainSpace
from argosy.plan.design.sweep import degrees_of, served
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import Device, Format, find_device
from argosy.plan.layouts import column_of
from argosy.plan.report.request import Question, of_model
from argosy.plan.search.search import search

SPEEDUP_FACTORS = ("format", "matmul rate", "memory", "links", "capacity", "batch")
FIELDS = {
    "matmul rate": ("fp32", "half", "achieved_fp32", "achieved_half"),
    "memory": ("memory_bytes_per_s",),
    "links": ("link_bytes_per_s", "nic_bytes_per_s", "node", "link_latency_s", "reduction_gain"),
    "capacity": ("memory_bytes",),
}
"""Factor -> the figures that change with it."""


@documented(frozen=True)
class Speedup:
    """A speed-up and its factors, which multiply to it."""

    what: str
    """training, or serving."""
    before: str
    after: str
    formats: tuple[str, str]
    """Number formats of the two."""
    speeds: tuple[float, float]
    """Tokens a second of a device, before and after."""
    factors: dict[str, float]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def whole(self) -> float:
        return self.speeds[1] / self.speeds[0]


def speedups(space: DesignSpace) -> list[Speedup]:
    """Return the speed-ups that a space asks for. Raises: UserError if a device cannot do the work at all."""
    pair = space.speedup
    if pair is None:
        return []
    before, after = find_device(pair.before), find_device(pair.after)
    found = []
    if space.train is not None:
        found.append(_training(space.train, pair, before, after))
    if space.serve is not None:
        found.append(_serving(space.serve, before, after))
    return found


def shares(factors: Sequence[str], speed: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """Return what each factor multiplies the speed by; `speed` takes the factors that are those of the later device.

    Shapley's weights: |S|! (n - |S| - 1)! / n! for a factor that joins the set S of n.
    """
    n, found = len(factors), {}
    for factor in factors:
        others = [other for other in factors if other != factor]
        total = 0.0
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for joined in combinations(others, size):
                both = frozenset({*joined, factor})
                total += weight * math.log(speed(both) / speed(frozenset(joined)))
        found[factor] = math.exp(total)
    return found


def _best_format(device: Device, wanted: Sequence[str]) -> str:
    """Return the format with the fastest matmuls of the device, of those that are allowed."""
    known = [fmt for fmt in wanted if fmt in device.formats]
    rates = {fmt: device.peak(fmt) for fmt in known}
    return max(rates, key=lambda fmt: rates[fmt]) if rates else "bf16"


def _mixed(rates: tuple[Rates, Rates], later: frozenset[str], ratio: float) -> Rates:
    """Return the rates of a mixture. ratio: its narrow matmuls over those of 16 bits."""
    fields = {key: getattr(rates[factor in later], key) for factor, keys in FIELDS.items() for key in keys}
    mixed = replace(rates[0], **fields)
    return replace(mixed, narrow=mixed.half * ratio, achieved_narrow=mixed.achieved_half)


def _ratio(device: Device, number_format: str) -> float:
    """Return what large matmuls in a format gain over those in 16 bits."""
    half: Format = "bf16" if "bf16" in device.formats else "fp16"
    wider = next(fmt for fmt in WIDER[number_format] if fmt in device.formats)
    return device.matmul_flops_per_s(wider) / device.matmul_flops_per_s(half)


def _training(space: TrainSpace, pair: SpeedupSpace, before: Device, after: Device) -> Speedup:
    batches = (pair.before_batch or space.global_batch, pair.after_batch or space.global_batch)
    formats = (_best_format(before, space.precision), _best_format(after, space.precision))
    costs = [[_costs(space, device, batch) for batch in batches] for device in (before, after)]
    rates = (costs[0][0].rates, costs[1][0].rates)
    half = "bf16" if "bf16" in before.formats and "bf16" in after.formats else "fp16"

    @cache
    def speed(later: frozenset[str]) -> float:
        number_format = formats["format" in later]
        mixed = _mixed(rates, later, _ratio(after if "format" in later else before, number_format))
        own = costs["matmul rate" in later]["batch" in later]
        is_narrow = number_format != half
        searched = replace(mixed, half=mixed.narrow) if is_narrow else mixed
        found = search(replace(own, rates=searched), {"precision": (half,)})
        if not len(found):
            raise UserError(
                f"speedup: {space.model} does not fit {space.devices} devices with the memory of "
                f"{(after if 'capacity' in later else before).name}. Give more train.devices."
            )
        plan = found.plans[np.array([int(np.argmin(found.step_s))])]
        if is_narrow:
            plan = replace(plan, precision=column_of("precision", ["fp8"]))
        model = StepModel(plan, own.workload, mixed, own.system, own.constants, own.compression)
        step_s = float(np.asarray(model.predict().total)[0])
        return own.run.tokens_per_step / step_s / space.devices

    factors = [factor for factor in SPEEDUP_FACTORS if _differs(factor, rates, formats, batches)]
    ends = speed(frozenset()), speed(frozenset(factors))
    return Speedup("training", before.name, after.name, formats, ends, shares(factors, speed))


def _costs(space: TrainSpace, device: Device, batch: int) -> CostModel:
    request = of_model(space.model, Cluster.of(device, space.devices), Question(batch, space.seq_len, space.tokens))
    return CostModel.of(request.run, request.cluster)


def _serving(space: ServeSpace, before: Device, after: Device) -> Speedup:
    question = Question(seq_len=space.prompt + space.output, serving=True)
    clusters = [Cluster.of(device, device.devices_per_node) for device in (before, after)]
    requests = [of_model(space.model, cluster, question) for cluster in clusters]
    costs = [CostModel.of(request.run, request.cluster) for request in requests]
    rates = (costs[0].rates, costs[1].rates)
    _, constants, options = ServingSoftware.of(space.engine, before, "serve.engine =")
    formats = (_best_format(before, space.weights), _best_format(after, space.weights))

    @cache
    def speed(later: frozenset[str]) -> float:
        weights = formats["format" in later]
        mixed = _mixed(rates, later, _ratio(after if "format" in later else before, weights))
        flops = mixed.half * mixed.achieved_half if weights == "bf16" else mixed.narrow * mixed.achieved_narrow
        best = 0.0
        for tp in degrees_of(space, requests[0].run.model):
            form = Formats(BYTES_OF_WEIGHT[weights], CACHES[space.kv_cache], flops, float(weights != "bf16"))
            model = ServingModel(costs[0].workload, mixed, ReplicaCut(float(tp)), form, constants, options=options)
            for sequences in space.sequences:
                _, each, ok = served(model, space, tp, sequences, np.asarray(mixed.node))
                best = max(best, float(np.where(ok, each, 0.0)))
        if not best:
            raise UserError(
                f"speedup: {space.model} in {weights} has no replica of up to {max(space.tp)} devices with the memory "
                f"of {(after if 'capacity' in later else before).name} in time. Give a larger serve.tp, fewer bits or "
                "a larger serve.tpot_ms or serve.ttft_ms."
            )
        return best

    # As many requests at a time as the memory holds: what they bring belongs to capacity.
    factors = [factor for factor in SPEEDUP_FACTORS if _differs(factor, rates, formats, (1, 1))]
    ends = speed(frozenset()), speed(frozenset(factors))
    return Speedup("serving", before.name, after.name, formats, ends, shares(factors, speed))


def _differs(factor: str, rates: tuple[Rates, Rates], formats: tuple[str, str], batches: tuple[object, object]) -> bool:
    if factor == "format":
        return formats[0] != formats[1]
    if factor == "batch":
        return batches[0] != batches[1]
    return any(getattr(rates[0], key) != getattr(rates[1], key) for key in FIELDS[factor])
