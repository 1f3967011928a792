"""The report of `argosy plan`: the best plans for a run on a cluster, and why. All figures are plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from argosy.config.load import model_name
from argosy.config.optimizer import OPTIMIZERS
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.economy import Goodput, price_per_device_h
from argosy.plan.cost.estimate import Estimate, count, first_of, gib, percent, seconds, table_in_html
from argosy.plan.cost.heterogeneous import UnevenSplit, uneven_splits
from argosy.plan.cost.sites import ExchangeCost, bytes_of_step, costs_of_one_plan, updates_in_words, with_workers
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import GIB
from argosy.plan.layouts import Layouts
from argosy.plan.parameters import active_parameters, parameters
from argosy.plan.plan import Objective, Plan, has_workers
from argosy.plan.report.explain import (
    Reliability,
    Sensitivity,
    binding,
    reliability,
    sensitivities,
    sums_in_words,
    ways_to_agree,
)
from argosy.plan.report.network import NetworkReport, network_report
from argosy.plan.search.candidates import Candidate, WholeRunModel, rounder, row_of
from argosy.plan.search.search import (
    OFFLOADS,
    MemoryMisfit,
    SearchResult,
    least_memory_bytes,
    misfit,
    nearest_that_fits,
    search,
    why_nothing_fits,
)
from argosy.plan.search.space import Pins
from argosy.plan.workload import Numbers

TOKENS_PER_PARAMETER = 20
"""Training tokens for each active parameter, by default (Hoffmann et al. 2022)."""
FEWEST_HALVINGS = 10
"""Cost and energy may be least on fewer devices than there are: a half, a quarter, ...; so many halvings are tried."""
IN_HOST_MEMORY = "With state in host memory"
IN_8_BITS = 'With 8-bit optimizer state (optimizer.state = "int8" in the run file)'
WEIGHTS_IN_BF16 = "With weights in 16 bits, which changes results: --fix weights=bf16"
WITH_ADAPTER = "As an adapter: --lora {rank} (lora.rank in a run file)"
ADAPTER_RANK = 16
MOST_DOUBLINGS = 12
"""Doublings of the cluster that are tried, to find one that is large enough."""
BY_SPEED = "Unless it deals work out by speed: below stand the best such plans."
ONE_WORLD = (
    "All sites are one world, which sums gradients over the link in every step. Below: what it brings to agree every H "
    "steps, with [[sites]] in the run file (docs/sites.md)."
)


@dataclass(frozen=True)
class PlanRequest:
    """The user's request."""

    run: RunConfig
    cluster: Cluster
    tokens: float | None = None
    """Tokens to train on; None: 20 for each active parameter."""
    objective: Objective = "time"
    pins: Pins = field(default_factory=dict)
    top: int = 10
    given: Plan | None = None
    """A plan to explain in place of the best."""
    assumed: tuple[str, ...] = ()
    """Defaults that were filled in for the user, in words."""
    assumed_batch: str = ""
    """The one of these that names the batch; a smaller one may take its place. Empty: the batch was asked for."""
    is_fine_tuning: bool = False


@dataclass(frozen=True)
class Explanation:
    """Why one plan takes its time and memory."""

    choice: Candidate
    misfit: MemoryMisfit | None
    """The shortfall of memory; None if the plan fits."""
    near: Candidate | None
    """If it does not fit, the plan most like it that does."""
    waterfall: dict[str, float]
    """Seconds of a step by category, from ideal to predicted, and what failures add."""
    memory: dict[str, float]
    """Bytes by category."""
    binding: str
    """The rate that the step time depends on most."""
    sensitivities: tuple[Sensitivity, ...]
    failures: Goodput
    sums: tuple[str, str] | None
    """The way data-parallel ranks sum gradients, and bytes that each sends, in words; None: there is one."""
    reliability: Reliability
    """Expected stops of the run, and remedies."""


@dataclass(frozen=True)
class PlanReport:
    """The report."""

    model: str
    parameters: float
    active_parameters: float
    cluster: str
    devices: int
    memory_bytes: float
    """Memory of a device."""
    seq_len: int
    global_batch: int
    tokens: float
    objective: Objective
    currency: str
    price_per_device_h: Estimate | None
    """Price of an hour of one device; None if it is unknown."""
    prices_of: str
    """Date of the catalogue's prices; empty for the user's own."""
    assumed: tuple[str, ...]
    looked_at: int
    fitting: int
    choices: tuple[Candidate, ...]
    """The best plans first, one for each mesh."""
    pareto: tuple[Candidate, ...]
    """Plans that no other beats in step time, memory and devices at once; the fastest first."""
    explanation: Explanation
    """The explanation of the plan that was asked about, or of the best."""
    uneven: tuple[UnevenSplit, ...]
    """On devices of several kinds: the best plans that deal work out by speed."""
    exchanges: tuple[ExchangeCost, ...]
    """Several sites: sums in every step, and rounds every H steps."""
    notes: tuple[str, ...]
    network: NetworkReport | None = None
    """Placement of the explained plan's ranks; None if the cluster's file does not say how nodes are joined."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Heads of the table of plans (`figures_of`)."""
        return "step", "GiB", "MFU", "tokens/s", "devices", "run", self.currency, "kWh"

    def _repr_html_(self) -> str:
        """Return the best plans as a table: how a notebook shows the report."""
        rows = [(*figures_of(choice), choice.plan) for choice in self.choices]
        return table_in_html(rows, (*self.columns, "plan"))


def middle(estimate: Estimate, write: Callable[[Numbers], str]) -> str:
    """Return the middle of an estimate alone, as `plan.cost.estimate.within` does with its interval."""
    return write(estimate.mid)


def figures_of(choice: Candidate, put: Callable[[Estimate, Callable[[Numbers], str]], str] = middle) -> tuple[str, ...]:
    """Return a plan's figures, one for each of `PlanReport.columns`; `put` writes those that have an interval."""
    run = choice.run
    return (
        put(choice.step_s, seconds),
        put(choice.memory_bytes, gib),
        percent(choice.mfu),
        count(choice.tokens_per_s),
        str(choice.devices),
        seconds(run.time_s.mid),
        put(run.money, count) if run.money else "?",
        put(run.energy_kwh, count) if run.energy_kwh else "?",
    )


def plan_report(request: PlanRequest) -> PlanReport:
    """Search, rank and explain. Raises: UserError with a remedy if nothing is legal, or nothing fits."""
    request, economy, found = searched(request, lambda costs: _counts(costs, request.objective))
    run, cluster = request.run, economy.cluster
    costs, tokens = economy.costs, economy.tokens
    best = found.best(economy.score(found, request.objective), max(request.top, 1))
    explained = request.given or found.plans.plan(int(best[0]))
    is_fastest = request.given is None and bool(found.step_s[best[0]] <= found.step_s.min())
    explanation = _explain(economy, explained, found, is_fastest)
    front = found.pareto()
    shown = [found.plans.plan(int(row)) for row in dict.fromkeys([*best, *front])]
    inside_s = sum(costs.predict_time(Layouts.of([explained])).by_category(0).values())
    return PlanReport(
        model=model_name(run.model, run.name),
        parameters=parameters(run.model),
        active_parameters=active_parameters(run.model),
        cluster=describe(cluster),
        devices=cluster.devices,
        memory_bytes=float(costs.rates.memory_bytes),
        seq_len=run.data.seq_len,
        global_batch=run.train.global_batch,
        tokens=tokens,
        objective=request.objective,
        currency=cluster.currency,
        price_per_device_h=price_per_device_h(cluster),
        prices_of=_prices_of(cluster),
        assumed=request.assumed,
        looked_at=found.looked_at,
        fitting=len(found),
        choices=economy.choices(found.plans[best]),
        pareto=economy.choices(found.plans[front]),
        explanation=explanation,
        uneven=() if economy.sites > 1 else tuple(uneven_splits(costs, shown)),
        exchanges=() if economy.is_asynchronous else ways_to_agree(run, cluster, request.pins),
        notes=tuple(_notes(request, economy, explained, inside_s)),
        network=network_report(costs, explained),
    )


def searched(
    request: PlanRequest, counts_of: Callable[[CostModel], list[int]]
) -> tuple[PlanRequest, WholeRunModel, SearchResult]:
    """Return the plans for some numbers of devices of a site, the costs of whole runs, and the request they answer.

    If nothing is legal or fits with a batch that was assumed, that is the request with the largest half, quarter, ...
    of it with which something does. Raises: UserError with a remedy if there is none.
    """
    problem, tried = "", request
    while True:
        costs = costs_of_one_plan(tried.run, _with_workers(tried))
        counts, pins = counts_of(costs), tried.pins
        try:
            found = search(costs, pins, counts, explains=not problem)
        except UserError as error:
            problem = problem or str(error)
        else:
            if len(found):
                tokens = tried.tokens or TOKENS_PER_PARAMETER * float(active_parameters(tried.run.model))
                return tried, WholeRunModel(tried.run, _with_workers(tried), costs, tokens), found
            problem = problem or _nothing_fits(tried, costs, found, counts)
        if not tried.assumed_batch or tried.run.train.global_batch == 1:
            raise UserError("\n  ".join([problem, *request.assumed]))
        tried = _with_batch(tried, tried.run.train.global_batch // 2)


def _with_batch(request: PlanRequest, batch: int) -> PlanRequest:
    """Return the request with another batch in place of the one that was assumed."""
    said = f"Assumed: --global-batch {batch}, as with more nothing fits."
    return replace(
        request,
        run=request.run.with_keys(train={"global_batch": batch}),
        assumed=tuple(said if line == request.assumed_batch else line for line in request.assumed),
        assumed_batch=said,
    )


def _with_workers(request: PlanRequest) -> Cluster:
    """Return the cluster of the request; of an asynchronous run, with a site for each worker."""
    return with_workers(request.cluster, request.run) if has_workers(request.run) else request.cluster


def _explain(economy: WholeRunModel, plan: Plan, found: SearchResult, is_fastest: bool) -> Explanation:
    costs, row = economy.costs, Layouts.of([plan])
    choice = economy.choices(row)[0]
    failures = economy.failures(row, np.array([plan.world_size]), float(choice.step_s.mid))
    waterfall = costs.predict_time(row).by_category(0)
    if between_s := float(economy.between_sites_s(sum(waterfall.values()))):
        waterfall["sites"] = between_s
    step_s = float(choice.step_s.mid)
    waterfall["evaluations"] = step_s * first_of(economy.evaluations(row) / choice.run.steps)
    waterfall["failures"] = first_of(failures.overhead.mid) * (step_s + waterfall["evaluations"])
    missing = misfit(costs, plan)
    near = nearest_that_fits(plan, found) if missing else None
    changes = sensitivities(costs, plan, found if is_fastest else None)
    return Explanation(
        choice=choice,
        misfit=missing,
        near=None if near is None else economy.choices(found.plans[np.array([near])])[0],
        waterfall=waterfall,
        memory=costs.predict_memory(row).by_category(0),
        binding=binding(changes),
        sensitivities=tuple(changes),
        failures=row_of(failures, 0),
        sums=sums_in_words(plan, costs.run),
        reliability=reliability(economy.cluster, choice.devices, float(choice.run.device_hours.mid)),
    )


def describe(cluster: Cluster) -> str:
    """Return what a cluster is made of, in words."""
    return " + ".join(f"{group.devices} {group.device.name}" for group in cluster.groups)


def _prices_of(cluster: Cluster) -> str:
    if cluster.price_per_device_h is not None:
        return ""
    return ", ".join(dict.fromkeys(group.device.price_date for group in cluster.groups if group.device.price_date))


def _counts(costs: CostModel, objective: Objective) -> list[int]:
    """Return the numbers of devices that a plan may be for: whole nodes, or parts of one. The others stay idle."""
    node, devices = int(costs.rates.node), costs.devices
    unit = 1 if devices % node else node
    most = [devices, *(n * unit for n in rounder(devices // unit))]
    halvings = range(FEWEST_HALVINGS if objective in ("cost", "energy") else 1)
    halves = {n >> k for n in most for k in halvings if n == n >> k << k}
    return sorted((n for n in halves if n and (n in most or n % node == 0 or node % n == 0)), reverse=True)


def _notes(request: PlanRequest, economy: WholeRunModel, plan: Plan, inside_s: float) -> list[str]:
    notes, costs, used = [], economy.costs, plan.world_size
    if plan.offload != "none":
        host = min(used, request.cluster.device.devices_per_host) * least_memory_bytes(costs, plan)[1]
        notes.append(f"Offloading takes {host / GIB:,.0f} GiB or more of each host's memory.")
    if used < costs.devices:
        notes.append(f"The plan is for {used} of {costs.devices} devices: the others stay idle, or can wait as spares.")
    if not request.cluster.uniform:
        notes.append(f"All plans wait for the slowest device, {request.cluster.device.name}. {BY_SPEED}")
    if economy.is_asynchronous:
        notes.append(updates_in_words(request.run, economy.cluster, inside_s))
    elif len(request.cluster.sites) > 1:
        notes.append(_of_rounds(economy, inside_s) if costs.run.sites else ONE_WORLD)
    return [*notes, *request.cluster.device.caveats]


def _of_rounds(economy: WholeRunModel, inside_s: float) -> str:
    """Say how often sites agree, and what that takes of a step that is `inside_s` long within a site."""
    costs, sync = economy.costs, economy.costs.run.sync
    at_first = f" after {sync.from_step} steps in which they sum gradients" if sync.from_step else ""
    return (
        f"Each site has a plan of its own, for {costs.devices} device{'s' * (costs.devices > 1)}; they agree every "
        f"{sync.every_steps} steps{at_first}. On average over the run that takes "
        f"{seconds(economy.between_sites_s(inside_s))} of a step, in which each sends "
        f"{bytes_of_step(costs.run) / 1e6:,.2f} MB."
    )


def _nothing_fits(request: PlanRequest, costs: CostModel, found: SearchResult, counts: Sequence[int]) -> str:
    """Explain by how much the leanest plan does not fit, and what would."""
    remedies = _remedies(request, costs, found.leanest, counts) or ["A larger device, or a smaller model, would do."]
    return "\n  ".join([why_nothing_fits(costs, found), *remedies])


def _remedies(request: PlanRequest, costs: CostModel, leanest: Plan, counts: Sequence[int]) -> list[str]:
    """Describe what would make a plan fit."""
    pins, remedies = request.pins, []
    if pins:
        free = search(costs, {}, counts)
        row = nearest_that_fits(leanest, free)
        if row is not None:
            needs = free.memory_bytes[row] / GIB
            remedies.append(f'With nothing fixed, the nearest that fits: "{free.plans.plan(row)}" ({needs:.1f} GiB).')
    ways: list[tuple[str, CostModel, Pins]] = [
        (f"{IN_HOST_MEMORY}: --fix offload=all|optimizer", costs, {**pins, "offload": OFFLOADS})
    ]
    if request.run.optimizer.state != "int8" and request.run.optimizer.kind in OPTIMIZERS:
        smaller = request.run.with_keys(optimizer={"state": "int8"})
        small = costs_of_one_plan(smaller, _with_workers(request))
        ways += [(IN_8_BITS, small, pins), (f"{IN_8_BITS}, {ways[0][0].lower()}", small, ways[0][2])]
    if "weights" not in pins:
        ways.append((WEIGHTS_IN_BF16, costs, {**pins, "weights": ("bf16",)}))
    if (request.is_fine_tuning or request.run.model.weights) and not request.run.lora.rank:
        adapter = request.run.with_keys(lora={"rank": ADAPTER_RANK})
        ways.append((WITH_ADAPTER.format(rank=ADAPTER_RANK), costs_of_one_plan(adapter, _with_workers(request)), pins))
    for how, leaner, more in ways:
        has_both = IN_8_BITS in how and "offload" in more
        if ("offload" in pins and "offload" in how) or (has_both and remedies):
            continue
        if plan := _fastest(leaner, more, counts):
            remedies.append(f'{how}, e.g. "{plan}".')
    for doublings in range(1, MOST_DOUBLINGS):
        count = costs.devices << doublings
        if plan := _fastest(costs, pins, [count]):
            remedies.append(f'On {count} such devices: "{plan}".')
            break
    return remedies


def _fastest(costs: CostModel, pins: Pins, counts: Sequence[int]) -> Plan | None:
    """Return the fastest plan that fits; None if none does, or none is legal."""
    with suppress(UserError):
        if len(found := search(costs, pins, counts, explains=False)):
            return found.plans.plan(int(np.argmin(found.step_s)))
    return None


def usual_batch(run: RunConfig, seq_len: int) -> int:
    """Return the default sequences of a step: DeepSeek's 0.2920 C^0.3271 tokens (Bi et al. 2024, equation 1).

    C: FLOPs of training on 20 tokens for each active parameter; rounded to a power of two of sequences.
    """
    active = float(active_parameters(run.model))
    tokens = 0.2920 * (6 * active * TOKENS_PER_PARAMETER * active) ** 0.3271
    return int(2 ** max(0, round(math.log2(tokens / seq_len))))
