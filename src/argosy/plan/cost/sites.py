"""One job on several sites that a slow link joins: they sum gradients in every step, or agree on weights every H steps.

Every site holds a whole replica of the model and has its share of the batch. For a message of N numbers of r bytes,
each of n sites sends 2 (n-1)/n r N over its link, in two passes (each fetches its slice of the others' numbers, then
the others fetch the sums): a ring's bytes (Thakur et al. 2005). Gradients travel in fp32, after the last backward. In a
round of local or DiLoCo (Douillard et al. 2023) the changes of the weights travel as `sync.wire` says, and their bytes
are written, encrypted, sent, decoded and averaged on the host. DiLoCo reached the synchronous loss with H = 500;
how large H may be is a question of optimization that this arithmetic does not answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.outer_traffic import BLOCK, BLOCK_BYTES
from argosy.plan.cost.updates import added_s
from argosy.plan.flops import parameters
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan, is_asynchronous
from argosy.plan.workload import Numbers

INNER_STEPS = (10, 50, 100, 500)
"""Values of H that are compared, beside 1: gradients are summed in every step."""
WEIGHT_BYTES = 4
WIRE_BYTES = {wire: of_block / BLOCK for wire, of_block in BLOCK_BYTES.items()}
"""Bytes of a number between sites (`sync.sites.wire`)."""
FRAMING = 1.01
"""Bytes on the link over those of numbers: headers of TCP, TLS and pieces of 256 KiB."""
ROUND_NUMBER_S = 30e-9
"""Seconds of the host for a number of a round: out of the ranks and into a file, there and back, the outer step."""
ROUND_S = 0.15
"""Seconds of a round without numbers: processes that look for files, messages that say who takes part."""
ROUND_TRIPS = 4
"""Round trips before all sites know that a round is done: ready, who takes part, slices, averages."""


@dataclass(frozen=True)
class Exchange:
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
class Rounds:
    """The rounds of a run with `[[sites]]`, each of one fragment."""

    steps: int
    """Steps from one to the next."""
    seconds: float
    """From the last site's end of its steps until all have the average."""
    waits_s: Numbers
    """What a site waits for: less, where it trains on meanwhile."""
    sent_bytes: float
    """Bytes of numbers that each site sends."""


def site_count(cluster: Cluster) -> int:
    """Return the number of sites that share a job; 1 if all devices are in one place."""
    return len(cluster.sites)


def within_site(costs: CostModel, cluster: Cluster) -> CostModel:
    """Return the cost model of one site: its part of the batch on as many devices as the smallest site has.

    Raises: UserError if the batch cannot be shared out.
    """
    sites, run = site_count(cluster), costs.run
    if is_asynchronous(run.plan):
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
    """Return the bytes of numbers that each site of `run` sends, on average over the steps, if all take part."""
    numbers, sites = parameters(run.model), len(run.sites)
    return 2 * (sites - 1) / sites * WIRE_BYTES[run.sync.wire] * numbers / run.sync.every_steps


def round_bytes(costs: CostModel, cluster: Cluster) -> float:
    """Return the bytes of numbers that each site sends in a round of one fragment, as `sync.wire` has them."""
    return _sent(costs, site_count(cluster), WIRE_BYTES[costs.run.sync.wire]) / costs.run.sync.fragments


def round_s(costs: CostModel, cluster: Cluster) -> float:
    """Return the seconds of a round, over the thinnest link: from the last site's end of its steps until all go on."""
    if not cluster.links:
        return 0.0
    numbers = float(costs.workload.matrix_parameters) / costs.run.sync.fragments
    on_host = ROUND_S + ROUND_NUMBER_S * numbers
    return on_host + FRAMING * _on_link_s(round_bytes(costs, cluster), cluster, 2 * ROUND_TRIPS)


def rounds_of(costs: CostModel, cluster: Cluster, inner_step_s: Numbers) -> Rounds:
    """Return the rounds of a run with `[[sites]]` whose step takes `inner_step_s` within a site."""
    sync, seconds = costs.run.sync, round_s(costs, cluster)
    left_s = np.maximum(0.0, seconds - sync.overlap_steps * np.asarray(inner_step_s))
    waits_s: Numbers = left_s if np.ndim(left_s) else float(left_s)
    return Rounds(sync.every_steps // sync.fragments, seconds, waits_s, round_bytes(costs, cluster))


def exchange_s(costs: CostModel, cluster: Cluster, inner_step_s: Numbers = 0.0) -> Numbers:
    """Return the seconds that agreeing takes of each step on average; 0 for a single site.

    A run with `[[sites]]` agrees on each of its fragments every `sync.every_steps` steps (after `sync.from_step`), and
    waits for what `sync.overlap_steps` steps of `inner_step_s` do not hide. Under sync=async it is what pushes and
    pulls add, whatever joins the workers (`plan.cost.updates`). Any other sums gradients in each step.
    """
    if costs.run.sites and is_asynchronous(costs.run.plan):
        return added_s(costs.run, cluster, inner_step_s)
    if not cluster.links:
        return 0.0
    if costs.run.sites:
        rounds = rounds_of(costs, cluster, inner_step_s)
        return rounds.waits_s / rounds.steps
    return _on_link_s(exchange_bytes(costs, cluster), cluster, 2 * (site_count(cluster) - 1))


def outer_exchanges(costs: CostModel, cluster: Cluster, plan: Plan, inner_step_s: float) -> list[Exchange]:
    """Compare rounds every H steps of sites whose plan is `plan`, and whose step takes `inner_step_s`."""
    whole = costs.run.sync.model_copy(update={"fragments": 1})
    costs = costs.on(costs.run.model_copy(update={"sync": whole}), costs.devices)
    sent, seconds = round_bytes(costs, cluster), round_s(costs, cluster)
    words = str(plan.model_copy(update={"sync": "diloco"}))
    return [
        Exchange(h, sent / h, inner_step_s + seconds / h, words, {"every_steps": h, "wire": whole.wire})
        for h in INNER_STEPS
    ]


def _sent(costs: CostModel, sites: int, of_number: float) -> float:
    return 2 * (sites - 1) / sites * of_number * float(costs.workload.matrix_parameters)


def _on_link_s(sent: float, cluster: Cluster, passes: int) -> float:
    thinnest = min(link.bandwidth_bytes_per_s for link in cluster.links)
    return sent / thinnest + passes * max(link.latency_s for link in cluster.links)
