"""Common parts of memory and step model: sizes of a rank's work, figures by category, and their calibration factors.

A factor tells how much longer than predicted a part of a step takes on a cluster, with its uncertainty. Sizes are those
of one microbatch on one rank, estimated from the model's dimensions, without padding, norms and biases, for one plan or
for columns of plans; `plan.cost.exact_state` counts the state of one rank of one plan to the byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.muon import HiddenMatrices
from argosy.plan.cost.rates import System
from argosy.plan.hardware.clusters import Category, Factor
from argosy.plan.layouts import Layouts
from argosy.plan.workload import Numbers, Workload

Factors = Mapping[Category, Factor]
Parts = Mapping[Category, tuple[str, ...]]

OF_TIME: Parts = {
    "compute": ("ideal", "matmul", "attention", "pointwise", "host", "recompute", "offload", "bubble"),
    "network": ("tensor", "context", "experts", "pipeline", "gradients"),
    "optimizer": ("optimizer",),
    "rest": ("other",),
}
"""Factor -> the categories of a step's time that it multiplies."""
MEMORY_FACTORS: Parts = {"memory": ("activations", "logits", "gathered", "agreement", "workspace", "reserve")}
"""Factor -> the categories of memory that it multiplies; weights, gradients and optimizer state are known exactly."""
RUN_STD = 0.05
"""Standard deviation of the logarithm of measured over predicted, from run to run and plan to plan on one machine."""


def slowed(factors: Factors, times: float, *categories: Category) -> dict[Category, Factor]:
    """Return the factors of a cluster where these parts of a step take `times` times as long."""
    unknown = Factor(value=1.0, std=0.0)
    before = {category: factors.get(category, unknown) for category in categories}
    return {**factors, **{c: f.model_copy(update={"value": f.value * times}) for c, f in before.items()}}


def spread(costs: Mapping[str, float], parts: Parts, factors: Factors, std: float) -> float:
    """Return the standard deviation of the logarithm of a total's error; `costs` are its parts, by category.

    std: the standard deviation of a prediction without factors. A part with a factor errs as the factor does, and all
    such parts in the same direction; each run differs a little from the next.
    """
    unknown = math.sqrt(max(0.0, std**2 - RUN_STD**2))
    of_part = {part: category for category, names in parts.items() for part in names}
    known = {part: _std(factors[of_part[part]]) for part in costs if of_part.get(part) in factors}
    if known:  # parts without a category are exact, so that the others explain all of the error
        known |= {part: 0.0 for part in costs if part not in of_part}
    errors = sum(value * known.get(part, unknown) for part, value in costs.items())
    return math.hypot(RUN_STD, errors / sum(costs.values()))


def _std(factor: Factor) -> float:
    return factor.std / factor.value


@dataclass(frozen=True)
class Breakdown:
    """Figures by category, for one plan or as columns for many plans; the categories add up to a total."""

    parts: ClassVar[Parts] = {}
    """Calibration factor -> the categories that it multiplies."""

    @property
    def total(self) -> Numbers:
        return sum((getattr(self, f.name) for f in fields(self)), np.zeros(1))

    def by_category(self, row: int = 0) -> dict[str, float]:
        """Return category -> figure, for the plan in this row."""
        return {f.name: float(getattr(self, f.name)[row]) for f in fields(self)}

    def calibrated(self, factors: Factors) -> Self:
        scaled = {
            name: getattr(self, name) * factor.value
            for category, factor in factors.items()
            for name in self.parts.get(category, ())
        }
        return replace(self, **scaled)

    def rows(self, chosen: NDArray[Any]) -> Self:
        """Return the figures of the plans that a mask or an array of row numbers chooses."""
        return self.each(lambda column: column[chosen])

    def each(self, change: Callable[[Any], Numbers]) -> Self:
        """Return the figures, each of them changed alike."""
        return replace(self, **{f.name: change(getattr(self, f.name)) for f in fields(self)})


class RankSizes:
    """Sizes on one rank of each plan, for one workload or for as many as there are plans."""

    def __init__(self, plans: Layouts, work: Workload, system: System):
        self.plans, self.work, self.system = plans, work, system
        of_portion = work.global_batch / (plans.portions * plans.microbatch)
        self.microbatches = np.maximum(1, of_portion * plans.most_portions)
        """Microbatches in a step, on the data-parallel rank that runs most."""
        self.tokens = plans.microbatch * work.seq_len / plans.cp
        """Tokens of a microbatch, on each context-parallel rank."""
        self.activation_bytes = np.where(plans.is_("precision", "fp32"), 4.0, 2.0)
        """Bytes of one activation."""
        self.sequence_ranks = np.where(system.sequence_parallel > 0, plans.tp, 1)
        """Ranks that share the tokens between matrices."""
        self.expert_tp = np.where(system.whole_experts > 0, 1, plans.tp)
        """Tensor-parallel ranks that share each expert."""

    @property
    def recomputed_share(self) -> Numbers:
        """Share of the layers that a plan which recomputes does so with: those whose number, from 0, is a multiple of
        `recompute_every`."""
        layers = np.maximum(1, self.work.layers)
        return np.ceil(layers / self.plans.recompute_every) / layers

    @property
    def hidden_bytes(self) -> Numbers:
        """Bytes of a microbatch's hidden states on one rank, between matrices."""
        return self.tokens * self.work.width / self.sequence_ranks * self.activation_bytes

    @property
    def weight_bytes(self) -> Numbers:
        """Bytes of a weight as the optimizer updates it."""
        return np.where(self.plans.is_("weights", "bf16"), 2.0, self.system.weight_bytes)

    @property
    def gradient_bytes(self) -> Numbers:
        """Bytes of a number of a gradient, which has its weight's format."""
        return np.where(self.plans.is_("weights", "bf16"), 2.0, self.system.gradient_bytes)

    @property
    def reduced_bytes(self) -> Numbers:
        """Bytes of a number of a gradient on the wire."""
        return np.where(self.plans.is_("reduce", "bf16"), 2.0, self.system.reduced_bytes)

    @property
    def expert_ranks(self) -> Numbers:
        """Ranks that share one copy of the state of experts; those of other systems may be dealt over more axes."""
        return np.maximum(1, self.plans.shares_state / self.plans.ep)

    def are_apart(self, matrices: HiddenMatrices) -> NDArray[np.bool_]:
        """Return True where ranks have whole matrices of these, each others, so that Muon needs no other rank."""
        plans = self.plans
        return np.asarray(matrices.are_stacks & (self.expert_tp == 1) & ((plans.ep > 1) | (self.expert_ranks > 1)))

    @property
    def expert_padding(self) -> Numbers:
        """Times the mean share of the experts' state that the rank with most has, and that all send: it is cut only
        between experts."""
        ranks, here = self.expert_ranks, np.maximum(1, self.work.experts / self.plans.ep)
        return np.where(self.system.deals_experts > 0, np.ceil(here / ranks) * ranks / here, 1.0)

    def parameters(self, layers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the parameters on a rank that holds `layers` layers: outside routed experts, and in routed experts.

        Tensor and expert parallelism have cut them; data-parallel ranks may share the rest (ZeRO).
        """
        plans, work = self.plans, self.work
        moe = work.moe_layers / work.layers
        whole = work.tp_replicated_parameters
        dense = work.attention_parameters + (1 - moe) * work.ffn_parameters + moe * work.router_and_shared_parameters
        experts = layers * moe * work.expert_parameters / plans.ep / self.expert_tp
        return layers * ((dense - whole) / plans.tp + whole), experts

    def quantised(self, layers: Numbers) -> tuple[Numbers, Numbers]:
        """Return those of `parameters` that are quantised."""
        dense, experts = self.parameters(layers)
        return dense * self.work.quantised_dense, experts * self.work.quantised_experts

    def adapters(self, layers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the same of the adapter, where one is trained beside the weights."""
        plans, work = self.plans, self.work
        dense = layers * (work.adapter_whole + work.adapter_cut / plans.tp)
        experts = work.adapter_experts_whole + work.adapter_experts_cut / self.expert_tp
        return dense, layers * experts / plans.ep
