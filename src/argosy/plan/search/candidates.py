"""The costs of candidate plans: step, memory, and a whole run with failures, money and energy, as intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from argosy.config.schema import RunConfig
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.economy import WholeRun, whole_run
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.factors import OF_MEMORY, OF_TIME, spread
from argosy.plan.cost.goodput import Goodput, checkpoint_cost, goodput
from argosy.plan.cost.rates import in_precision
from argosy.plan.cost.sites import exchange_s, site_count, within_site
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import has_workers
from argosy.plan.search.search import SearchResult
from argosy.plan.workload import Numbers

Objective = Literal["time", "cost", "energy", "goodput"]
"""The quantity that plans are ranked by."""


@dataclass(frozen=True)
class Candidate:
    """One plan with its costs."""

    plan: str
    devices: int
    step_s: Estimate
    memory_bytes: Estimate
    """Bytes on the rank that needs most."""
    fits: bool
    tokens_per_s: float
    mfu: float
    """Model FLOPs over the data sheet's, in the plan's precision."""
    run: WholeRun
    effective: Estimate
    """Share of the time that is productive."""


class WholeRunModel:
    """The costs of plans in a whole run."""

    def __init__(self, run: RunConfig, cluster: Cluster, costs: CostModel, tokens: float):
        """costs: the cost model of each site; tokens: those to train on."""
        self.run, self.cluster, self.costs, self.tokens = run, cluster, costs, tokens
        self.is_asynchronous = has_workers(run)
        if self.is_asynchronous:  # while each worker makes a step, all of them train on so much
            batch = run.train.global_batch * site_count(cluster)
            self.run = run.model_copy(update={"train": run.train.model_copy(update={"global_batch": batch})})
        self.sites = site_count(cluster) if run.sites else 1
        """Sites that each have a plan of their own, and agree in rounds; else all devices are one world."""

    def between_sites_s(self, step_s: Numbers) -> Numbers:
        """Return what agreeing with other sites adds to a step of a site that takes `step_s`, on average over steps."""
        return exchange_s(self.costs, self.cluster, step_s) if self.run.sites else 0.0

    def failures(self, devices: NDArray[np.int64], step_s: Numbers) -> Goodput:
        """Return the effect of failures on jobs on so many devices of a site."""
        work, moment_bytes = self.costs.workload, self.costs.system.moment_bytes
        state_bytes = float(4 * work.matrix_parameters + moment_bytes * work.trained_parameters)
        used = np.asarray(devices * self.sites, float)
        saving = checkpoint_cost(self.cluster, state_bytes, used, self.run.checkpoint.background)
        return goodput(self.cluster, saving, used, step_s=step_s)

    def whole(self, plans: Layouts, devices: NDArray[np.int64], step_s: Estimate, failures: Goodput) -> WholeRun:
        """Return the costs of whole runs on so many devices of a site, with such steps and failures."""
        used = np.asarray(devices * self.sites, float)
        return whole_run(
            self.cluster,
            step_s,
            failures,
            tokens=self.tokens,
            tokens_per_step=self.run.tokens_per_step,
            devices=used,
            ramp=self._ramp(plans),
        )

    def _ramp(self, plans: Layouts) -> tuple[Numbers, Numbers] | None:
        """Return the steps of a run with a batch-size ramp, and as many full steps as they take the time of."""
        run = self.run
        if not run.train.batch_ramp or not len(plans):
            return None
        full_s = np.asarray(self.costs.predict_time(plans).total)
        between_s = self.between_sites_s(full_s)
        steps, full, left = 0.0, np.zeros(len(plans)), self.tokens
        for batch, many in run.train.batches.steps_of(run.train.batch_ramp[-1].until_step):
            train = run.train.model_copy(update={"global_batch": batch, "batch_ramp": ()})
            stage = run.model_copy(update={"train": train})
            whole = CostModel.of(stage, self.cluster)
            costs = within_site(whole, self.cluster) if self.sites > 1 else whole
            made = min(float(many), np.ceil(left / stage.tokens_per_step))
            step_s = np.asarray(costs.predict_time(plans).total)
            steps, full = steps + made, full + made * (step_s + between_s) / (full_s + between_s)
            left = max(0.0, left - made * stage.tokens_per_step)
        rest = np.ceil(left / run.tokens_per_step)
        return steps + rest, full + rest

    def score(self, found: SearchResult, objective: Objective) -> NDArray[np.float64]:
        """Return the score of each plan; lower is better."""
        if objective == "time":
            return found.step_s
        step_s = found.step_s + self.between_sites_s(found.step_s)
        made = self.whole(found.plans, found.devices, Estimate.exactly(step_s), self.failures(found.devices, step_s))
        chosen = {"cost": made.money, "energy": made.energy_kwh}.get(objective)
        if objective == "goodput":
            return -np.asarray(made.tokens_per_day.mid)
        return np.asarray((chosen or made.device_hours).mid)

    def choices(self, plans: Layouts) -> tuple[Candidate, ...]:
        """Return these plans with their costs."""
        costs, n = self.costs, len(plans)
        devices = np.broadcast_to(plans.world_size, n)
        time, memory = costs.predict_time(plans), costs.predict_memory(plans)
        steps = [
            Estimate.log_normal(
                inside_s + self.between_sites_s(inside_s), spread(parts, OF_TIME, costs.factors, costs.time_std)
            )
            for parts in (time.by_category(i) for i in range(n))
            for inside_s in (sum(parts.values()),)
        ]
        ranks = [
            Estimate.log_normal(sum(parts.values()), spread(parts, OF_MEMORY, costs.factors, costs.memory_std))
            for parts in (memory.by_category(i) for i in range(n))
        ]
        step_s = stacked(steps)
        failures = self.failures(devices, step_s.mid)
        made = self.whole(plans, devices, step_s, failures)
        rates = costs.rates
        peak = np.broadcast_to(in_precision(plans.precision, rates.fp32, rates.half, rates.narrow), n)
        flops = float(costs.workload.train_flops_per_token) * self.run.tokens_per_step
        return tuple(
            Candidate(
                plan=str(plans.plan(i)),
                devices=int(devices[i]) * self.sites,
                step_s=steps[i],
                memory_bytes=ranks[i],
                fits=bool(float(ranks[i].mid) <= costs.memory_bytes),
                tokens_per_s=self.run.tokens_per_step / float(steps[i].mid),
                mfu=flops / float(steps[i].mid * devices[i] * self.sites * peak[i]),
                run=_row(made, i),
                effective=row_of(failures.effective, i),
            )
            for i in range(n)
        )


def stacked(estimates: Sequence[Estimate]) -> Estimate:
    """Stack many estimates into one of arrays."""
    return Estimate(*(np.array([getattr(each, f.name) for each in estimates], float) for f in fields(Estimate)))


def _row(made: WholeRun, i: int) -> WholeRun:
    def one(estimate: Estimate | None) -> Estimate | None:
        return estimate and row_of(estimate, i)

    return replace(
        made,
        steps=float(made.steps),
        time_s=row_of(made.time_s, i),
        device_hours=row_of(made.device_hours, i),
        money=one(made.money),
        energy_kwh=one(made.energy_kwh),
        co2_kg=one(made.co2_kg),
        tokens_per_day=row_of(made.tokens_per_day, i),
    )


def first_of(failures: Goodput) -> Goodput:
    """Return the failures of the first of several plans."""
    return Goodput(
        mtbf_s=row_of(failures.mtbf_s, 0),
        stops_per_day=row_of(failures.stops_per_day, 0),
        interval_s=float(np.atleast_1d(failures.interval_s)[0]),
        copy_interval_s=float(np.atleast_1d(failures.copy_interval_s)[0]),
        overhead=row_of(failures.overhead, 0),
        effective=row_of(failures.effective, 0),
    )


def row_of(estimate: Estimate, i: int) -> Estimate:
    """Return one estimate of a stack."""
    return Estimate(*(float(np.atleast_1d(end)[i]) for end in (estimate.low, estimate.mid, estimate.high)))
