"""The reasons of a plan's time and memory, in words: categories, the rate that binds it, changes that would help, how
ranks and sites agree; and the stops to expect, by component, with remedies: spares, burn-in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import percent
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.reliability import (
    REPAIR_H,
    BurnIn,
    ExpectedStops,
    FailureRates,
    burn_in,
    node_stops_per_h,
    spare_nodes,
)
from argosy.plan.cost.sites import ExchangeCost, exchange_bytes, outer_exchanges, within_site
from argosy.plan.cost.traffic import ENDS, traffic
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import GIB
from argosy.plan.plan import Plan
from argosy.plan.search.search import MEMORY_EXCESS, SearchResult, best_to_run
from argosy.plan.search.space import Pins
from argosy.plan.sync import OF_SITES

MEANING = {
    "ideal": "model FLOPs at the data sheet's rate",
    "matmul": "matmuls slower than that: rates never reached, shapes, conversions",
    "attention": "attention slower than that",
    "pointwise": "norms, activations, residuals: as fast as memory",
    "host": "kernels too small for the host to keep up",
    "recompute": "activations computed again in backward",
    "offload": "waiting for activations that go to the host's memory and back",
    "tensor": "waiting for tensor-parallel ranks",
    "context": "waiting for context-parallel ranks",
    "experts": "waiting for tokens sent to experts, and for the busiest expert",
    "pipeline": "waiting for sends between stages",
    "bubble": "idle pipeline stages, and stages shorter than the longest",
    "gradients": "waiting for data-parallel ranks: sums of gradients, gathered parameters",
    "optimizer": "the update",
    "other": "fixed costs of a step, and stragglers",
    "sites": "waiting for the other sites",
    "evaluations": "loss on held-out text",
    "failures": "checkpoints, restarts, work done twice",
}
"""Category of a step -> its meaning."""

MEMORY_MEANING = {
    "weights": "parameters",
    "gradients": "sums of gradients",
    "optimizer": "moments of the optimizer",
    "activations": "kept for backward",
    "logits": "logits, and what the loss keeps",
    "gathered": "parameters and gradients of the layers at work (ZeRO 3)",
    "agreement": "residuals of compressed sums, outer state of sites",
    "workspace": "kernels' and collectives' buffers",
    "reserve": "held unused by the allocator",
}
"""Category of memory -> its meaning."""


@dataclass(frozen=True)
class Sensitivity:
    """The effect of a little more of one thing on the same plan."""

    what: str
    change: float
    """Relative change of the step time."""
    note: str = ""


def sensitivities(costs: CostModel, plan: Plan, found: SearchResult | None = None) -> list[Sensitivity]:
    """Return the effect of a tenth more of each on the step, the most helpful first.

    found: the search in which the plan is the fastest; it tells what a tenth more memory would bring.
    """
    r, c = costs.rates, costs.constants
    more = 1 + MEMORY_EXCESS
    tenth = f"+{MEMORY_EXCESS:.0%}".replace("%", " %")
    trials: dict[str, tuple[Rates, Constants]] = {
        f"{tenth} matmul rate": (replace(r, fp32=r.fp32 * more, half=r.half * more, narrow=r.narrow * more), c),
        f"{tenth} memory bandwidth": (replace(r, memory_bytes_per_s=r.memory_bytes_per_s * more), c),
        f"{tenth} link bandwidth in the node": (replace(r, link_bytes_per_s=r.link_bytes_per_s * more), c),
        f"{tenth} NIC bandwidth": (replace(r, nic_bytes_per_s=r.nic_bytes_per_s * more), c),
        f"{tenth} speed of the host": (r, replace(c, host=c.host / more)),
        f"-{MEMORY_EXCESS:.0%} latency of collectives".replace("%", " %"): (
            r,
            replace(c, latency=c.latency * (1 - MEMORY_EXCESS)),
        ),
    }
    now = costs.step_s(plan)
    changes = [
        Sensitivity(what, replace(costs, rates=rates, constants=constants).step_s(plan) / now - 1)
        for what, (rates, constants) in trials.items()
    ]
    if found is not None and math.isfinite(found.roomier_step_s):
        change = min(0.0, found.roomier_step_s / now - 1)
        changes.append(Sensitivity(f"{tenth} memory", change, "by another plan" if change else ""))
    return sorted(changes, key=lambda s: s.change)


def binding(changes: list[Sensitivity]) -> str:
    """Return what the step time depends on most: the thing of which a tenth more helps most."""
    return changes[0].what.split(" ", 2)[2]


WHERE = {
    "shard": "among ranks that share the state",
    "replicate_inside": "among neighbours",
    "replicate_between": "between their groups",
    "replicate": "across",
}
"""Axes of traffic that sums of gradients go along, in their order (those of experts go the same way)."""


def sums_in_words(plan: Plan, run: RunConfig) -> tuple[str, str] | None:
    """Return in which messages gradients are summed; and over which ranks, with GiB that each sends in a step.

    None if no rank has a like.
    """
    if plan.dp * plan.cp == 1:
        return None
    ways = []
    if plan.shares_state > 1:
        ways.append(f"among {plan.shares_state} ranks that share the state")
    if plan.sums_in_tiers:
        ways.append(f"among {plan.sum_inside} neighbours")
    if plan.sum_between > 1:
        ways.append(f"between {plan.sum_between} groups of them")
    across = plan.replicas // (plan.sum_inside * plan.sum_between)
    if across > 1:
        ways.append(f"across {across}{' groups' if plan.sums_in_tiers else ' replicas'}")
    if plan.is_compressed:
        ways[-1] += f" in {plan.sync}"
    messages = "layer by layer (FSDP2)" if plan.shards_parameters else f"buckets of {plan.bucket_mb} MiB"
    sent = dict.fromkeys(WHERE, 0.0)
    for (axis, _), size in traffic(plan, run).items():
        name = axis.removeprefix("expert_")
        if name in sent:
            sent[name] += size
    several = len(ways) > 1
    amounts = [f"{size / GIB:.3g} GiB" + f" {WHERE[name]}" * several for name, size in sent.items() if size]
    return messages, f"{', then '.join(ways)}; a rank sends {', '.join(amounts)} a step"


def ways_to_agree(run: RunConfig, cluster: Cluster, pins: Pins) -> tuple[ExchangeCost, ...]:
    """Return a row for sums in every step and some for rounds, each with its plan; none if no link joins sites.

    Rounds need a batch that sites can share. A row that no plan with these pins can make is left out.
    """
    if not cluster.links:
        return ()
    pins = {key: values for key, values in pins.items() if key != "sync" or not set(OF_SITES) & set(values)}
    alone = run.model_copy(update={"sites": (), "site": ""})
    whole = CostModel.of(alone, cluster)
    ways: list[ExchangeCost] = []
    if (found := best_to_run(whole, pins)) is not None:
        ways.append(ExchangeCost(1, _sent_by_site(found[0], whole, cluster), found[1], str(found[0]), {}))
    try:
        of_site = within_site(whole, cluster)
    except UserError:  # the batch cannot be shared
        return tuple(ways)
    inside = {key: values for key, values in pins.items() if key not in ("sync", "sum_inside", "sum_between")}
    if (found := best_to_run(of_site, inside)) is not None:
        ways += outer_exchanges(of_site, cluster, *found)
    return tuple(ways)


def _sent_by_site(plan: Plan, costs: CostModel, cluster: Cluster) -> float:
    """Return the bytes that a site sends to the next in a step: its gradients, or where the stages of a pipeline lie at
    several sites what these pass on, and the gradient of a tied embedding."""
    if plan.pp % len(cluster.sites):
        return exchange_bytes(costs, cluster)
    of_rank = sum(size for (axis, _), size in traffic(plan, costs.run).items() if axis in ("pp", ENDS))
    return float(of_rank * plan.world_size / plan.pp)


LEAST_STOPS = 0.005
"""A component that is expected to stop a run more rarely is not shown, if it did not."""


@dataclass(frozen=True)
class Reliability:
    """Expected stops of a run, and remedies."""

    stops: tuple[float, float, float]
    """Stops in the whole run: nine times of ten from the first to the last, and in the middle of the rate."""
    components: tuple[ExpectedStops, ...]
    """The same by component; likelier ones first."""
    corruptions: ExpectedStops
    """Silent corruptions that are noticed."""
    spare_nodes: tuple[int, int, int]
    """Spare nodes to hold, so that none is missing in 95 of 100 cases if a repair takes `REPAIR_H`: at the low end, the
    middle and the high end of the rate of stops."""
    burn_in: BurnIn


def reliability(cluster: Cluster, devices: int, device_hours: float, rates: FailureRates | None = None) -> Reliability:
    """Return what stops a run of so many device-hours on so many devices of the cluster.

    rates: what is known of its failures; default: what the catalogue says.
    """
    rates = rates or FailureRates.of(cluster, devices)
    of_nodes, used = node_stops_per_h(cluster, rates), devices / cluster.devices
    repair_h = min(float(REPAIR_H.mid), device_hours / devices)  # a node that fails in a short run is not back in it
    low, mid, high = (spare_nodes(float(each) * used, repair_h) for each in (of_nodes.low, of_nodes.mid, of_nodes.high))
    components = rates.expected(device_hours)
    return Reliability(
        stops=rates.expected_in_all(device_hours),
        components=tuple(components),
        corruptions=next(each for each in components if each.component == "corruption"),
        spare_nodes=(low, mid, high),
        burn_in=burn_in(cluster),
    )


def spares_in_words(found: Reliability) -> str:
    low, mid, high = found.spare_nodes
    ends = f" ({low} to {high})" if low != high else ""
    return f"hold {mid}{ends} spare node{'s' * (mid != 1)}, if a repair takes {float(REPAIR_H.mid):.0f} h"


def stops_in_words(found: Reliability) -> str:
    """Return the stops of the whole run, and how many of them are silent corruptions, in a sentence."""
    low, mid, high = found.stops
    silent = found.corruptions
    return (
        f"{count_of_stops(mid)} stops ({low:.0f} to {high:.0f}), of them silent corruptions that are "
        f"noticed {count_of_stops(silent.expected)} ({silent.low:.0f} to {silent.high:.0f})"
    )


def burn_in_in_words(found: BurnIn) -> str:
    return (
        f"a burn-in of {found.hours:.0f} h leaves out {percent(found.left_out)} of the nodes and saves "
        f"{percent(found.saved)} of the stops"
    )


def count_of_stops(count: float) -> str:
    """Return a number of stops that need not be whole."""
    if count < 0.001:
        return "under 0.001" if count > 0 else "0"
    return f"{count:.0f}" if count >= 10 else f"{count:.2g}" if count >= 0.01 else f"{count:.3f}"


def shown_stops(components: Sequence[ExpectedStops]) -> list[ExpectedStops]:
    return [each for each in components if each.expected >= LEAST_STOPS or each.seen]


def unlike(stops: ExpectedStops) -> str:
    """Return whether more or fewer were seen than nine times of ten."""
    seen = stops.seen or 0
    return "more than expected" if seen > stops.high else "fewer than expected" if seen < stops.low else ""
