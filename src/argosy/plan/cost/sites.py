"""One job on several sites that a slow link joins: sites sum gradients in every step, or weights from time to time.

Every site holds a whole replica of the model and has its share of the batch. If N gradients of r bytes are summed in
every step (synchronous data parallelism), each of n sites sends 2 (n-1)/n r N over its link (ring all-reduce, Thakur et
al. 2005), after the step's last backward. With local SGD (DiLoCo: Douillard et al. 2023) the sites train alone for H
steps and then sum the changes of their fp32 weights: the same bytes, once in H steps. DiLoCo reached the synchronous
loss with H = 500; how large H may be is a question of optimization that this arithmetic does not answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster

INNER_STEPS = (1, 10, 100, 500)
"""Values of H that are compared; 1 is synchronous."""
WEIGHT_BYTES = 4


@dataclass(frozen=True)
class Exchange:
    """The exchange of sites that sum every H steps."""

    inner_steps: int
    """H; 1: gradients are summed in every step."""
    bytes_per_step: float
    """Bytes that each site sends, on average over the steps."""
    step_s: float
    """Time of a step inside the site, with its part of the exchange."""


def site_count(cluster: Cluster) -> int:
    """Return the number of sites that share a job; 1 if all devices are in one place."""
    return len(cluster.sites)


def within_site(costs: CostModel, cluster: Cluster) -> CostModel:
    """Return the cost model of one site: its part of the batch on as many devices as the smallest site has.

    Raises: UserError if the batch cannot be shared out.
    """
    sites, run = site_count(cluster), costs.run
    batch, left_over = divmod(run.train.global_batch, sites)
    if left_over:
        raise UserError(
            f"train.global_batch = {run.train.global_batch} cannot be shared by the {sites} sites of {cluster.name}. "
            f"Try {max(1, batch) * sites}."
        )
    part = run.model_copy(update={"train": run.train.model_copy(update={"global_batch": batch})})
    return costs.on(part, min(cluster.sites.values()))


def exchange_bytes(costs: CostModel, cluster: Cluster) -> float:
    """Return the bytes that each site sends to sum all gradients, or weights, once."""
    sites = site_count(cluster)
    return 2 * (sites - 1) / sites * WEIGHT_BYTES * float(costs.workload.matrix_parameters)


def exchange_s(costs: CostModel, cluster: Cluster) -> float:
    """Return the seconds of one such sum, over the thinnest link; 0 for a single site."""
    if not cluster.links:
        return 0.0
    thinnest = min(link.bandwidth_bytes_per_s for link in cluster.links)
    longest = max(link.latency_s for link in cluster.links)
    return exchange_bytes(costs, cluster) / thinnest + 2 * (site_count(cluster) - 1) * longest


def exchanges(costs: CostModel, cluster: Cluster, inner_step_s: float) -> list[Exchange]:
    """Compare synchronous training with local SGD, for a plan whose step takes `inner_step_s` in a site."""
    sent, seconds = exchange_bytes(costs, cluster), exchange_s(costs, cluster)
    return [Exchange(h, sent / h, inner_step_s + seconds / h) for h in INNER_STEPS]
