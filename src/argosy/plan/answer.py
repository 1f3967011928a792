"""`argosy plan`: from a run and a cluster to the plans that are best for it, and why. All figures are plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.clusters import Cluster
from argosy.plan.economy import WholeRun, whole_run
from argosy.plan.estimate import Estimate
from argosy.plan.explain import (
    Misfit,
    Sensitivity,
    binding,
    interval,
    memory_of,
    misfit,
    nearest,
    sensitivities,
    waterfall,
)
from argosy.plan.flops import active_parameters, parameters
from argosy.plan.goodput import Goodput, goodput, saving_of
from argosy.plan.layouts import Layouts
from argosy.plan.mixed import Uneven, uneven_splits
from argosy.plan.plan import Plan
from argosy.plan.rates import in_precision
from argosy.plan.search import Found, Pins, Problem, predict_memory, predict_time, search
from argosy.plan.sites import Exchange, exchange_s, exchanges, site_count, within_site

Objective = Literal["time", "cost", "energy", "goodput"]

TOKENS_PER_PARAMETER = 20
"""Training tokens where nothing is said (Hoffmann et al. 2022)."""
FEWEST_HALVINGS = 10
"""Cost and energy may be least on fewer devices than there are: on a half of them, a quarter, ..."""
MOST_DOUBLINGS = 12
"""Of the cluster, in search of one that is large enough."""
OUTLOOK = "The trainer deals work out evenly so far: this is what it would bring."
OUTLOOK_SITES = "The trainer sums gradients in every step (H = 1) so far; with larger H this is what it would bring."
GIB = 2**30


@dataclass(frozen=True)
class Question:
    """What the user asks."""

    run: RunConfig
    cluster: Cluster
    tokens: float | None = None
    """To train on; None: 20 for each active parameter."""
    objective: Objective = "time"
    pins: Pins | None = None
    top: int = 10
    given: Plan | None = None
    """A plan to be explained in place of the best."""
    assumed: tuple[str, ...] = ()
    """What was filled in for the user, in words."""


@dataclass(frozen=True)
class Choice:
    """One plan, with what it comes to."""

    plan: str
    devices: int
    step_s: Estimate
    memory_bytes: Estimate
    """On the rank that needs most."""
    fits: bool
    tokens_per_s: float
    mfu: float
    """Model FLOPs over the data sheet's, in the plan's precision."""
    run: WholeRun
    effective: Estimate
    """Share of the time that is progress."""


@dataclass(frozen=True)
class Explanation:
    """Why one plan takes what it takes."""

    choice: Choice
    misfit: Misfit | None
    """By how much it does not fit."""
    near: Choice | None
    """If so, the plan most like it that does."""
    waterfall: dict[str, float]
    """Seconds of a step by category, from ideal to predicted, and what failures add."""
    memory: dict[str, float]
    """Bytes by category."""
    binding: str
    """What the step time depends on most."""
    sensitivities: tuple[Sensitivity, ...]
    failures: Goodput


@dataclass(frozen=True)
class Answer:
    """What the planner says."""

    model: str
    parameters: float
    active_parameters: float
    cluster: str
    devices: int
    memory_bytes: float
    """Of a device."""
    seq_len: int
    global_batch: int
    tokens: float
    objective: Objective
    currency: str
    assumed: tuple[str, ...]
    looked_at: int
    fitting: int
    choices: tuple[Choice, ...]
    """The best first, one for each mesh."""
    pareto: tuple[Choice, ...]
    """Plans that no other beats in step time, memory and devices at once; the fastest first."""
    explanation: Explanation
    """Of the plan that was asked about, or of the best."""
    uneven: tuple[Uneven, ...]
    """On devices of several kinds: work dealt out by speed; an outlook."""
    exchanges: tuple[Exchange, ...]
    """On several sites: synchronous, and local SGD; an outlook."""
    notes: tuple[str, ...]


def answer(question: Question) -> Answer:
    """Search, rank, explain. Raises: UserError if nothing is legal, or nothing fits, with what would."""
    run, cluster = question.run, question.cluster
    whole = Problem.of(run, cluster)
    problem = within_site(whole, cluster) if site_count(cluster) > 1 else whole
    pins, counts = question.pins or {}, _counts(problem, question.objective)
    found = search(problem, pins, counts)
    if not len(found) and question.given is None:
        raise UserError(_nothing_fits(problem, found, pins, counts))
    economy = _Economy(question, problem)
    best = found.best(economy.score(found), max(question.top, 1))
    explained = question.given or found.plans.plan(int(best[0]))
    explanation = _explain(economy, explained, found, is_best=question.given is None)
    leaders = [found.plans.plan(int(row)) for row in best]
    inside_s = float(explanation.choice.step_s.mid) - economy.between_sites_s
    return Answer(
        model=run.model.preset or run.name,
        parameters=parameters(run.model),
        active_parameters=active_parameters(run.model),
        cluster=describe(cluster),
        devices=cluster.devices,
        memory_bytes=float(problem.rates.memory_bytes),
        seq_len=run.data.seq_len,
        global_batch=run.train.global_batch,
        tokens=economy.tokens,
        objective=question.objective,
        currency=cluster.currency,
        assumed=question.assumed,
        looked_at=found.looked_at,
        fitting=len(found),
        choices=economy.choices(found.plans[best]),
        pareto=economy.choices(found.plans[found.pareto()]),
        explanation=explanation,
        uneven=tuple(uneven_splits(problem, cluster, leaders)) if problem is whole else (),
        exchanges=tuple(exchanges(problem, cluster, inside_s)) if problem is not whole else (),
        notes=tuple(_notes(question, problem)),
    )


def _explain(economy: _Economy, plan: Plan, found: Found, is_best: bool) -> Explanation:
    problem, row = economy.problem, Layouts.of([plan])
    choice = economy.choices(row)[0]
    failures = economy.failures(np.array([plan.world_size]), float(choice.step_s.mid))
    seconds = waterfall(predict_time(problem, row), 0)
    if economy.between_sites_s:
        seconds["sites"] = economy.between_sites_s
    seconds["failures"] = float(np.atleast_1d(failures.overhead.mid)[0]) * float(choice.step_s.mid)
    missing = misfit(problem, plan)
    near = nearest(plan, found) if missing else None
    changes = sensitivities(problem, plan, found if is_best else None)
    return Explanation(
        choice=choice,
        misfit=missing,
        near=None if near is None else economy.choices(found.plans[np.array([near])])[0],
        waterfall=seconds,
        memory=memory_of(predict_memory(problem, row), 0),
        binding=binding(changes),
        sensitivities=tuple(changes),
        failures=_of_first(failures),
    )


def describe(cluster: Cluster) -> str:
    """What a cluster is made of."""
    return " + ".join(f"{group.devices} {group.device.name}" for group in cluster.groups)


def _counts(problem: Problem, objective: Objective) -> list[int]:
    """Numbers of devices that a plan may be for: whole nodes, or parts of one."""
    halves = [problem.devices >> n for n in range(FEWEST_HALVINGS if objective in ("cost", "energy") else 1)]
    node = int(problem.rates.node)
    return [
        n
        for i, n in enumerate(halves)
        if n and problem.devices == n << i and (n % node == 0 or node % n == 0 or i == 0)
    ]


class _Economy:
    """What plans come to in a whole run."""

    def __init__(self, question: Question, problem: Problem):
        self.question, self.problem, self.cluster = question, problem, question.cluster
        self.run = question.run
        self.sites = site_count(self.cluster)
        self.tokens = question.tokens or TOKENS_PER_PARAMETER * float(active_parameters(self.run.model))
        self.tokens_per_step = self.run.train.global_batch * self.run.data.seq_len
        self.between_sites_s = exchange_s(problem, self.cluster)

    def failures(self, devices: NDArray[np.int64], step_s: float | NDArray[np.float64]) -> Goodput:
        """Of jobs on so many devices of a site."""
        state_bytes = float(self.problem.workload.parameters) * (4 + float(self.problem.system.moment_bytes))
        used = np.asarray(devices * self.sites, float)
        saving = saving_of(self.cluster, state_bytes, used, self.run.checkpoint.background)
        return goodput(self.cluster, saving, used, step_s=step_s)

    def whole(self, devices: NDArray[np.int64], step_s: NDArray[np.float64]) -> tuple[WholeRun, Goodput]:
        """Of jobs on so many devices of a site, with such steps."""
        failures = self.failures(devices, step_s)
        estimate = interval(step_s, self.problem.time_std)
        used = np.asarray(devices * self.sites, float)
        made = whole_run(
            self.cluster, estimate, failures, tokens=self.tokens, tokens_per_step=self.tokens_per_step, devices=used
        )
        return made, failures

    def score(self, found: Found) -> NDArray[np.float64]:
        """The lower the better, by the objective."""
        if self.question.objective == "time":
            return found.step_s
        made, _ = self.whole(found.devices, found.step_s + self.between_sites_s)
        chosen = {"cost": made.money, "energy": made.energy_kwh}.get(self.question.objective)
        if self.question.objective == "goodput":
            return -np.asarray(made.tokens_per_day.mid)
        return np.asarray((chosen or made.device_hours).mid)

    def choices(self, plans: Layouts) -> tuple[Choice, ...]:
        """What these plans come to."""
        problem = self.problem
        n = len(plans)
        devices = np.broadcast_to(plans.world_size, n)
        step_s = np.asarray(predict_time(problem, plans).step) + self.between_sites_s
        memory = np.asarray(predict_memory(problem, plans).total)
        made, failures = self.whole(devices, step_s)
        rates = problem.rates
        peak = np.broadcast_to(in_precision(plans.precision, rates.fp32, rates.half, rates.narrow), n)
        flops = float(problem.workload.train_flops_per_token) * self.tokens_per_step
        return tuple(
            Choice(
                plan=str(self.over_sites(plans.plan(i))),
                devices=int(devices[i]) * self.sites,
                step_s=interval(float(step_s[i]), problem.time_std),
                memory_bytes=interval(float(memory[i]), problem.memory_std),
                fits=bool(memory[i] <= problem.memory_bytes),
                tokens_per_s=self.tokens_per_step / float(step_s[i]),
                mfu=flops / float(step_s[i] * devices[i] * self.sites * peak[i]),
                run=_row(made, i),
                effective=_estimate(failures.effective, i),
            )
            for i in range(n)
        )

    def over_sites(self, plan: Plan) -> Plan:
        """The plan of one site, for all of them."""
        return plan.model_copy(update={"dp_replicate": plan.dp_replicate * self.sites})


def _row(made: WholeRun, i: int) -> WholeRun:
    def one(estimate: Estimate | None) -> Estimate | None:
        return estimate and _estimate(estimate, i)

    return replace(
        made,
        steps=float(made.steps),
        time_s=_estimate(made.time_s, i),
        device_hours=_estimate(made.device_hours, i),
        money=one(made.money),
        energy_kwh=one(made.energy_kwh),
        co2_kg=one(made.co2_kg),
        tokens_per_day=_estimate(made.tokens_per_day, i),
    )


def _of_first(failures: Goodput) -> Goodput:
    """Those of the first of several plans."""
    return Goodput(
        mtbf_s=_estimate(failures.mtbf_s, 0),
        stops_per_day=_estimate(failures.stops_per_day, 0),
        interval_s=float(np.atleast_1d(failures.interval_s)[0]),
        overhead=_estimate(failures.overhead, 0),
        effective=_estimate(failures.effective, 0),
    )


def _estimate(estimate: Estimate, i: int) -> Estimate:
    return Estimate(*(float(np.atleast_1d(end)[i]) for end in (estimate.low, estimate.mid, estimate.high)))


def _notes(question: Question, problem: Problem) -> list[str]:
    notes = []
    if not question.cluster.uniform:
        notes.append(f"All plans wait for the slowest device, {question.cluster.device.name}. {OUTLOOK}")
    if site_count(question.cluster) > 1:
        notes.append(f"Each site has a whole copy of the model on {problem.devices} devices. {OUTLOOK_SITES}")
    if question.cluster.device.assumed:
        device = question.cluster.device
        notes.append(f"Nobody published these of {device.name}, they are assumed: {', '.join(device.assumed)}.")
    return notes


def _nothing_fits(problem: Problem, found: Found, pins: Pins, counts: Sequence[int]) -> str:
    """By how much the leanest plan does not fit, and what would do."""
    missing = misfit(problem, found.leanest)
    if missing is None:  # a larger microbatch or less recompute is pinned than the leanest plan has
        raise AssertionError("the leanest plan fits, and no plan was found")
    lines = [
        f'nothing fits: of {found.looked_at:,} plans the leanest, "{found.leanest}", needs '
        f"{missing.needs_bytes / GIB:.1f} GiB of each device, {missing.excess_bytes / GIB:.1f} GiB more than the "
        f"{missing.has_bytes / GIB:.1f} GiB that it may (with a margin for the prediction); "
        f"{missing.largest} takes {missing.largest_bytes / GIB:.1f} GiB."
    ]
    remedies = list(_remedies(problem, found.leanest, pins, counts))
    return "\n  ".join([*lines, *(remedies or ["A larger device, or a smaller model, would do."])])


def _remedies(problem: Problem, leanest: Plan, pins: Pins, counts: Sequence[int]) -> list[str]:
    """What would make a plan fit, in words."""
    remedies = []
    if pins:
        free = search(problem, {}, counts)
        row = nearest(leanest, free)
        if row is not None:
            needs = free.memory_bytes[row] / GIB
            remedies.append(f'Without --fix, the nearest that fits: "{free.plans.plan(row)}" ({needs:.1f} GiB).')
    if "offload" not in pins:
        offloaded = search(problem, {**pins, "offload": ("all", "optimizer")}, counts)
        if len(offloaded):
            row = int(np.argmin(offloaded.step_s))
            remedies.append(
                f'With state in host memory: --fix offload=all|optimizer, e.g. "{offloaded.plans.plan(row)}".'
            )
    for doublings in range(1, MOST_DOUBLINGS):
        count = problem.devices << doublings
        try:
            larger = search(problem, pins, [count])
        except UserError:  # no legal plan for so many devices
            continue
        if len(larger):
            plan = larger.plans.plan(int(np.argmin(larger.step_s)))
            remedies.append(f'On {count} such devices: "{plan}".')
            break
    return remedies


def usual_batch(run: RunConfig, seq_len: int) -> int:
    """Sequences of a step where nothing is said: DeepSeek's 0.2920 C^0.3271 tokens (Bi et al. 2024, equation 1).

    C: FLOPs of training on 20 tokens for each active parameter; rounded to a power of two of sequences.
    """
    active = float(active_parameters(run.model))
    tokens = 0.2920 * (6 * active * TOKENS_PER_PARAMETER * active) ** 0.3271
    return int(2 ** max(0, round(math.log2(tokens / seq_len))))
