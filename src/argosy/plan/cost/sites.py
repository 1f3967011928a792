"""One job on several sites that a slow link joins: they sum gradients in every step, or agree on weights every H steps.

Every site holds a whole replica of the model and has its share of the batch. For a message of N numbers of r bytes,
each of n sites sends 2 (n-1)/n r N over its link, in two passes (each fetches its slice of the others' numbers, then
the others fetch the sums): a ring's bytes (Thakur et al. 2005). Gradients travel in fp32, after the last backward. In a
round of local or DiLoCo (Douillard et al. 2023) the changes of the weights travel as `sync.wire` says, and their bytes
are written, encrypted, sent, decoded and averaged on the host. DiLoCo reached the synchronous loss with H = 500;
how large H may be is a question of optimization that this arithmetic does not answer.

A round with an overlap of tau steps of t seconds hides what the exchange and the link do under these steps; what the
ranks do themselves it does not. Where cores train, the exchange takes its seconds from the steps that it runs under:

    waits = ranks + max(0, exchange + link - tau t - slows),  slows = exchange on CPUs, else 0

The last round is about all weights, and no step is left to hide it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.config.schema import RunConfig
from argosy.config.sync import Wire
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import plain
from argosy.plan.cost.network import FRAMING, between_sites_s
from argosy.plan.cost.outer_traffic import BLOCK, BLOCK_BYTES, rounds_in, sent_in_run, sent_in_turn
from argosy.plan.cost.updates import added_s
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.parameters import trained_shapes
from argosy.plan.plan import Plan, has_workers
from argosy.plan.workload import Numbers

INNER_STEPS = (10, 50, 100, 500)
"""Values of H that are compared, beside 1: gradients are summed in every step."""
WEIGHT_BYTES = 4
WIRE_BYTES = {wire: of_block / BLOCK for wire, of_block in BLOCK_BYTES.items()}
"""Bytes of a number between sites (`sync.wire`)."""
RANKS_NUMBER_S = 9e-9
"""Seconds for a number of a round in which the ranks do not train: they write what changed, and make the outer step."""
EXCHANGE_NUMBER_S, EXCHANGE_BYTE_S = 9e-9, 4e-9
"""Seconds of the exchange for a number, read, encoded, summed; and for a byte sent: hashed, encrypted, decoded."""
ROUND_S = 0.07
"""Seconds of a round without numbers: processes that look for files, messages that say who takes part.

These four were read off rounds of 10 and 48 M numbers in fp32 and int8, of two sites on one machine of two cores; those
in bf16 and int4 take within 7 % of what they say. The disk, which has the average before a round counts, is not in
them: 15 to 25 % more where two sites shared one.
"""
ROUND_TRIPS = 4
"""Round trips before all sites know that a round is done: ready, who takes part, slices, averages."""


@dataclass(frozen=True)
class ExchangeCost:
    """The exchange of sites that sum every H steps."""

    inner_steps: int
    """H; 1: gradients are summed in every step."""
    bytes_per_step: float
    """Bytes that each site sends, on average over the steps."""
    step_s: float
    """Time of a step, with its part of the exchange."""
    plan: str
    """The plan that does it: of all devices for H = 1, else of each site."""
    sync: dict[str, int | str]
    """Keys of `[sync]` that do it, in a run with `[[sites]]`."""


@dataclass(frozen=True)
class RoundCosts:
    """The rounds of a run with `[[sites]]`, each of one fragment, and of all weights at the end."""

    steps: int
    """Steps from one to the next."""
    seconds: float
    """From the last site's end of its steps until all have the average."""
    waits_s: Numbers
    """Seconds that a site waits: fewer where it trains on meanwhile."""
    slows_s: float
    """By how much the steps that hide a round are longer for it: the same cores do both."""
    sent_bytes: float
    """Bytes of numbers that each site sends."""
    last_s: float
    """Seconds that a site waits in the last round, which is about all weights."""
    rounds: int
    """Rounds of the run; 0: the run's length is not known in steps, so that its end does not count."""
    alone_steps: int
    """The steps that these rounds follow."""
    sums: int
    """Steps before them, in which sites sum gradients (`sync.from_step`)."""
    sum_s: float
    """Seconds that a site waits in each of these."""

    @property
    def alone_s(self) -> Numbers:
        """Seconds that rounds take of each step that they follow, on average."""
        of_turn = np.asarray(self.waits_s) + self.slows_s
        if not self.rounds:
            return plain(of_turn / self.steps)
        return plain(((self.rounds - 1) * of_turn + self.last_s) / self.alone_steps)

    @property
    def step_s(self) -> Numbers:
        """Seconds that agreeing takes of each step of the run, on average."""
        steps = self.sums + self.alone_steps
        if not steps:
            return self.alone_s
        return plain((self.sums * self.sum_s + self.alone_steps * np.asarray(self.alone_s)) / steps)


def site_count(cluster: Cluster) -> int:
    """Return the number of sites that share a job; 1 if all devices are in one place."""
    return len(cluster.sites)


def within_site(costs: CostModel, cluster: Cluster) -> CostModel:
    """Return the cost model of one site: its part of the batch on as many devices as the smallest site has.

    Raises: UserError if the batch cannot be shared out.
    """
    sites, run = site_count(cluster), costs.run
    if has_workers(run):
        return costs.on(run, min(cluster.sites.values()))  # each worker computes whole batches
    batch, left_over = divmod(run.train.global_batch, sites)
    if left_over:
        raise UserError(
            f"train.global_batch = {run.train.global_batch} cannot be shared by the {sites} sites of {cluster.name}. "
            f"Try {max(1, batch) * sites}."
        )
    part = run.model_copy(update={"train": run.train.model_copy(update={"global_batch": batch})})
    return costs.on(part, min(cluster.sites.values()))


def exchange_bytes(costs: CostModel, cluster: Cluster) -> float:
    """Return the bytes that each site sends to sum all gradients once."""
    return _sent(costs, site_count(cluster), WEIGHT_BYTES)


def bytes_of_step(run: RunConfig) -> float:
    """Return the bytes of numbers that each site of `run` sends, on average over the steps, if all take part.

    Of a run in minutes the beginning (`sync.from_step`) and the last round do not count.
    """
    shapes = trained_shapes(run)
    if steps := run.train.steps:
        return sent_in_run(shapes, run.sync, len(run.sites), steps) / steps
    return sum(sent_in_turn(shapes, run.sync, len(run.sites))) / run.sync.every_steps


def round_bytes(costs: CostModel, cluster: Cluster) -> float:
    """Return the bytes of numbers that each site sends in a round of one fragment, as `sync.wire` has them."""
    return _sent(costs, site_count(cluster), WIRE_BYTES[costs.run.sync.wire]) / costs.run.sync.fragments


def round_s(costs: CostModel, cluster: Cluster) -> float:
    """Return the seconds of a round, over the thinnest link: from the last site's end of its steps until all go on."""
    return sum(_parts_s(costs, cluster, costs.run.sync.wire, costs.run.sync.fragments))


def rounds_of(costs: CostModel, cluster: Cluster, inner_step_s: Numbers) -> RoundCosts:
    """Return the rounds of a run with `[[sites]]` whose step takes `inner_step_s` within a site."""
    sync, steps = costs.run.sync, costs.run.train.steps
    in_ranks_s, in_exchange_s, travels_s = _parts_s(costs, cluster, sync.wire, sync.fragments)
    slows_s = in_exchange_s if sync.overlap_steps and costs.rates.host_waits else 0.0
    left_s = in_exchange_s + travels_s - slows_s - sync.overlap_steps * np.asarray(inner_step_s)
    sums, rounds = rounds_in(sync, steps)
    return RoundCosts(
        steps=sync.every_steps // sync.fragments,
        seconds=in_ranks_s + in_exchange_s + travels_s,
        waits_s=plain(in_ranks_s + np.maximum(0.0, left_s)),
        slows_s=slows_s,
        sent_bytes=round_bytes(costs, cluster),
        last_s=sum(_parts_s(costs, cluster, sync.wire)),
        rounds=rounds,
        alone_steps=steps - sums,
        sums=sums,
        sum_s=sum(_parts_s(costs, cluster, "fp32")),
    )


def exchange_s(costs: CostModel, cluster: Cluster, inner_step_s: Numbers = 0.0) -> Numbers:
    """Return the seconds that agreeing takes of each step on average; 0 for a single site.

    A run with `[[sites]]` sums gradients before `sync.from_step`, then agrees on each of its fragments every
    `sync.every_steps` steps, and waits for what `sync.overlap_steps` steps of `inner_step_s` do not hide (on average
    over the whole run). Under sync=async it is what pushes and pulls add, whatever joins the workers
    (`plan.cost.updates`). Any other sums gradients in each step.
    """
    if has_workers(costs.run):
        return added_s(costs.run, cluster, inner_step_s)
    if not cluster.links:
        return 0.0
    if costs.run.sites:
        return rounds_of(costs, cluster, inner_step_s).step_s
    return between_sites_s(exchange_bytes(costs, cluster), cluster, 2 * (site_count(cluster) - 1))


def outer_exchanges(costs: CostModel, cluster: Cluster, plan: Plan, inner_step_s: float) -> list[ExchangeCost]:
    """Compare rounds every H steps of sites whose plan is `plan`, and whose step takes `inner_step_s`."""
    whole = costs.run.sync.model_copy(update={"fragments": 1})
    costs = costs.on(costs.run.model_copy(update={"sync": whole}), costs.devices)
    sent, seconds = round_bytes(costs, cluster), round_s(costs, cluster)
    words = str(plan.model_copy(update={"sync": "diloco"}))
    return [
        ExchangeCost(h, sent / h, inner_step_s + seconds / h, words, {"every_steps": h, "wire": whole.wire})
        for h in INNER_STEPS
    ]


def _parts_s(costs: CostModel, cluster: Cluster, wire: Wire, fragments: int = 1) -> tuple[float, float, float]:
    """Return the seconds of a round of one fragment: of the ranks, of the exchange, and until all has arrived."""
    if not cluster.links:
        return 0.0, 0.0, 0.0
    numbers = float(costs.workload.trained_parameters) / fragments
    sent = _sent(costs, site_count(cluster), WIRE_BYTES[wire]) / fragments
    travels_s = ROUND_S + between_sites_s(FRAMING * sent, cluster, 2 * ROUND_TRIPS)
    return RANKS_NUMBER_S * numbers, EXCHANGE_NUMBER_S * numbers + EXCHANGE_BYTE_S * sent, travels_s


def _sent(costs: CostModel, sites: int, of_number: float) -> float:
    return 2 * (sites - 1) / sites * of_number * float(costs.workload.trained_parameters)
