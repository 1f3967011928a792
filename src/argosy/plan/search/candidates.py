"""The costs of candidate plans, as intervals: step, memory, and a whole run with failures, money and energy; and the
numbers of devices that a run could have, of a cluster as it is, or of more of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from argosy.config.schema import RunConfig
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.economy import Goodput, WholeRun, checkpoint_cost, goodput, whole_run
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.rates import in_precision
from argosy.plan.cost.sites import costs_of_one_plan, exchange_s
from argosy.plan.cost.step_time import BACKWARD_SHARE
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Objective, has_workers
from argosy.plan.search.search import SearchResult
from argosy.plan.workload import Numbers

RowT = TypeVar("RowT", Estimate, Goodput, WholeRun)


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
            batch = run.train.global_batch * len(cluster.sites)
            self.run = run.with_keys(train={"global_batch": batch})
        self.sites = len(cluster.sites) if run.sites else 1
        """Sites that each have a plan of their own, and agree in rounds; else all devices are one world."""

    def between_sites_s(self, step_s: Numbers) -> Numbers:
        """Return what agreeing with other sites adds to a step of a site that takes `step_s`, on average over steps."""
        return exchange_s(self.costs, self.cluster, step_s) if self.run.sites else 0.0

    def state_bytes(self, plans: Layouts) -> Numbers:
        """Return the bytes of a checkpoint: weights as they are stored, and moments."""
        work, system = self.costs.workload, self.costs.system
        moment_bytes = system.moment_bytes * work.trained_parameters + system.ends_moment_bytes * work.trained_ends
        return np.where(plans.is_("weights", "bf16"), 2, 4) * work.saved_parameters + moment_bytes

    def failures(self, plans: Layouts, devices: NDArray[np.int64], step_s: Numbers) -> Goodput:
        """Return the effect of failures on jobs on so many devices of a site."""
        used = np.asarray(devices * self.sites, float)
        saving = checkpoint_cost(self.cluster, self.state_bytes(plans), used, self.run.checkpoint.background)
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
            evaluations=self.evaluations(plans),
        )

    def evaluations(self, plans: Layouts) -> Numbers:
        """Return the full steps whose time the evaluations take of held-out text, which is read forward only."""
        run, settings = self.costs.run, self.run.evaluate
        rows, at_once = max(1, settings.tokens // run.data.seq_len), plans.dp * plans.microbatch
        each = np.ceil(rows / at_once) * at_once / run.train.global_batch * (1 - BACKWARD_SHARE)
        steps = np.ceil(self.tokens / self.run.tokens_per_step)
        return each * (np.ceil(steps / settings.every_steps) if settings.every_steps else 1.0)

    def _ramp(self, plans: Layouts) -> tuple[Numbers, Numbers] | None:
        """Return the steps of a run with a batch-size ramp, and as many full steps as they take the time of."""
        run = self.run
        if not run.train.batch_ramp or not len(plans):
            return None
        full_s = np.asarray(self.costs.predict_time(plans).total)
        between_s = self.between_sites_s(full_s)
        steps, full, left = 0.0, np.zeros(len(plans)), self.tokens
        for batch, many in run.train.batches.steps_of(run.train.batch_ramp[-1].until_step):
            stage = run.with_keys(train={"global_batch": batch, "batch_ramp": ()})
            costs = costs_of_one_plan(stage, self.cluster)
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
        failures = self.failures(found.plans, found.devices, step_s)
        made = self.whole(found.plans, found.devices, Estimate.exactly(step_s), failures)
        chosen = {"cost": made.money, "energy": made.energy_kwh}.get(objective)
        if objective == "goodput":
            return -np.asarray(made.tokens_per_day.mid)
        return np.asarray((chosen or made.device_hours).mid)

    def choices(self, plans: Layouts) -> tuple[Candidate, ...]:
        costs, n = self.costs, len(plans)
        devices = np.broadcast_to(plans.world_size, n)
        time, memory = costs.predict_time(plans), costs.predict_memory(plans)
        inside = [time.by_category(i) for i in range(n)]
        steps = [costs.time_of(parts, float(self.between_sites_s(sum(parts.values())))) for parts in inside]
        ranks = [costs.memory_of(memory.by_category(i)) for i in range(n)]
        fits = costs.has_room(plans, np.array([float(rank.mid) for rank in ranks]))
        step_s = stacked(steps)
        failures = self.failures(plans, devices, step_s.mid)
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
                fits=bool(fits[i]),
                tokens_per_s=self.run.tokens_per_step / float(steps[i].mid),
                mfu=flops / float(steps[i].mid * devices[i] * self.sites * peak[i]),
                run=row_of(made, i),
                effective=row_of(failures.effective, i),
            )
            for i in range(n)
        )


def stacked(estimates: Sequence[Estimate]) -> Estimate:
    return Estimate(*(np.array([getattr(each, f.name) for each in estimates], float) for f in fields(Estimate)))


def row_of(columns: RowT, i: int) -> RowT:
    """Return row `i` of an estimate, or of a record of estimates and figures, that are columns; one number is alike for
    all."""

    def one(value: Any) -> Any:
        if value is None or isinstance(value, Estimate):
            return value and row_of(value, i)
        column = np.ravel(value)
        return float(column[i if len(column) > 1 else 0])

    return replace(columns, **{f.name: one(getattr(columns, f.name)) for f in fields(columns)})


MOST_COUNTS = 128
"""More numbers of whole nodes are thinned out."""
ROUND = (1, 3, 5, 7, 9, 11, 13, 15)
"""Numbers of nodes that are these times a power of two are not thinned out: most plans are for them."""


def counts_up_to(costs: CostModel) -> list[int]:
    """Return the numbers of devices of a site that a plan may be for: parts of a node that divide it, whole nodes."""
    node, devices = min(int(costs.rates.node), costs.devices), costs.devices
    parts = [n for n in range(1, node) if node % n == 0]
    nodes = devices // node
    whole = list(range(1, nodes + 1))
    if nodes > MOST_COUNTS:
        even = np.linspace(1, nodes, MOST_COUNTS).round().astype(int).tolist()
        powers = [1 << n for n in range(nodes.bit_length())]
        most_plans = (odd * n for n in powers for odd in ROUND if odd * n <= nodes)
        whole = sorted({*even, *most_plans})
    return sorted({*parts, *(n * node for n in whole), devices})


def rounder(count: int) -> list[int]:
    """Return the largest numbers up to `count` that are 1, 3 and 9 times a power of two; none if `count` is nearly one.

    There are more plans for these, so that the rest may stay idle.
    """
    odd = count // (count & -count)
    return [] if odd <= 3 else [n << ((count // n).bit_length() - 1) for n in (1, 3, 9) if n <= count]


def grown(cluster: Cluster, times: int) -> Cluster:
    """Return the cluster with so many times as many nodes of each group, and a network that holds them."""
    groups = tuple(group.model_copy(update={"nodes": group.nodes * times}) for group in cluster.groups)
    network = cluster.network
    if network:
        outer = network[-1]
        network = (*network[:-1], outer.model_copy(update={"devices": outer.devices * times}))
    topology = cluster.topology and cluster.topology.grown(times)
    storage = cluster.storage_bytes_per_s * times
    update = {"groups": groups, "network": network, "topology": topology, "storage_bytes_per_s": storage}
    return Cluster.model_construct(**{**{k: getattr(cluster, k) for k in type(cluster).model_fields}, **update})


def best_of_each(score: NDArray[np.float64], devices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of the lowest score for each number of devices, the fewest first."""
    order = np.lexsort((score, devices))
    _, first = np.unique(devices[order], return_index=True)
    return np.asarray(order[first])


def fewest(does: Sequence[bool]) -> int | None:
    """Return the place of the first that does; None if none does."""
    return next((place for place, one in enumerate(does) if one), None)
