"""The cost of agreeing where links are thin: of sites, each with a replica of the model, and of asynchronous workers.

Sites sum gradients in every step, or agree on weights every H steps.

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

Workers of parameter servers make updates, and none of them waits for another. For an update a worker receives N numbers
in fp32, makes H steps of t seconds (`sync.local_steps`), and sends N numbers as `sync.wire` has them, to S servers.
With w and s the seconds of worker and servers for a number, that takes it

    T = H t + N (w + s / S) + c + (received + sent) / bandwidth + 2 messages' latency

where the terms of the link count for workers that are not at the servers' site. Workers wait for nobody, so together
they make sum 1 / T updates a second, but no more than

- the busiest server, or the link to the servers in the busier direction, can carry (the asymptotic bound of a closed
  network of queues: Denning and Buzen 1978);
- `sync.max_staleness` allows: so many updates of others may come while the slowest worker makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from argosy.config.schema import RunConfig
from argosy.config.sync import Wire
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import plain
from argosy.plan.cost.network import FRAMING, between_sites_s
from argosy.plan.hardware.clusters import Cluster, NodeGroup, SiteLink
from argosy.plan.parameters import parameters, trained_shapes
from argosy.plan.plan import NO_WORKERS, Plan, has_workers
from argosy.plan.sync import USUAL_OF_SITES, WIRE_BLOCK, WIRE_BLOCK_BYTES, rounds_in, sent_in_run, sent_in_turn
from argosy.plan.workload import Numbers

INNER_STEPS = (10, 50, 100, 500)
"""Values of H that are compared, beside 1: gradients are summed in every step."""
WEIGHT_BYTES = 4
WIRE_BYTES = {wire: of_block / WIRE_BLOCK for wire, of_block in WIRE_BLOCK_BYTES.items()}
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
    """Seconds from the end of the last site's steps until all sites have the average."""
    waits_s: Numbers
    """Seconds that a site waits: fewer where it trains on meanwhile."""
    slows_s: float
    """Seconds by which a round makes the steps that hide it longer: the same cores do both."""
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


def within_site(costs: CostModel, cluster: Cluster) -> CostModel:
    """Return the cost model of one site: its part of the batch on as many devices as the smallest site has.

    Raises: UserError if the batch cannot be shared out.
    """
    sites, run = len(cluster.sites), costs.run
    if has_workers(run):
        return costs.on(run, min(cluster.sites.values()))  # each worker computes whole batches
    batch, left_over = divmod(run.train.global_batch, sites)
    if left_over:
        raise UserError(
            f"train.global_batch = {run.train.global_batch} cannot be shared by the {sites} sites of {cluster.name}. "
            f"Try {max(1, batch) * sites}."
        )
    part = run.with_keys(train={"global_batch": batch})
    return costs.on(part, min(cluster.sites.values()))


def costs_of_one_plan(run: RunConfig, cluster: Cluster) -> CostModel:
    """Return the cost model of the devices that have one plan: all, or, of a run of several sites, those of one.

    Raises: UserError, as `within_site`.
    """
    whole = CostModel.of(run, cluster)
    return within_site(whole, cluster) if run.sites and len(cluster.sites) > 1 else whole


def exchange_bytes(costs: CostModel, cluster: Cluster) -> float:
    """Return the bytes that each site sends to sum all gradients once."""
    return _sent(costs, len(cluster.sites), WEIGHT_BYTES)


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
    return _sent(costs, len(cluster.sites), WIRE_BYTES[costs.run.sync.wire]) / costs.run.sync.fragments


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
    (`added_s`). Any other sums gradients in each step.
    """
    if has_workers(costs.run):
        return added_s(costs.run, cluster, inner_step_s)
    if not cluster.links:
        return 0.0
    if costs.run.sites:
        return rounds_of(costs, cluster, inner_step_s).step_s
    return between_sites_s(exchange_bytes(costs, cluster), cluster, 2 * (len(cluster.sites) - 1))


def outer_exchanges(costs: CostModel, cluster: Cluster, plan: Plan, inner_step_s: float) -> list[ExchangeCost]:
    """Compare rounds every H steps of sites whose plan is `plan`, and whose step takes `inner_step_s`."""
    whole = costs.run.sync.model_copy(update={"fragments": 1})
    costs = costs.on(costs.run.model_copy(update={"sync": whole}), costs.devices)
    sent, seconds = round_bytes(costs, cluster), round_s(costs, cluster)
    words = str(plan.model_copy(update={"sync": USUAL_OF_SITES}))
    return [
        ExchangeCost(h, sent / h, inner_step_s + seconds / h, words, {"every_steps": h, "wire": whole.wire})
        for h in INNER_STEPS
    ]


def _parts_s(costs: CostModel, cluster: Cluster, wire: Wire, fragments: int = 1) -> tuple[float, float, float]:
    """Return the seconds of a round of one fragment: of the ranks, of the exchange, and until all has arrived."""
    if not cluster.links:
        return 0.0, 0.0, 0.0
    numbers = float(costs.workload.trained_parameters) / fragments
    sent = _sent(costs, len(cluster.sites), WIRE_BYTES[wire]) / fragments
    travels_s = ROUND_S + between_sites_s(FRAMING * sent, cluster, 2 * ROUND_TRIPS)
    return RANKS_NUMBER_S * numbers, EXCHANGE_NUMBER_S * numbers + EXCHANGE_BYTE_S * sent, travels_s


def _sent(costs: CostModel, sites: int, of_number: float) -> float:
    return 2 * (sites - 1) / sites * of_number * float(costs.workload.trained_parameters)


# ---- workers of parameter servers, none of which waits for another ----

WORKER_NUMBER_S = 8e-9
"""Seconds of a worker for a number: received, decrypted, copied to the weights; copied from the gradient, sent. This
and the next two are CPU times of the parts (0.55 ns a byte for encryption, AdamW 0.6 ns a number) on a 2-core machine,
with an allowance for sockets."""
SERVER_NUMBER_S = 10e-9
"""Seconds of a server for a number: encrypted, sent; received, checked, the optimizer."""
WIRE_NUMBER_S = {"fp32": 0.0, "bf16": 4e-9, "int8": 7e-9, "int4": 8e-9}
"""Seconds of both for a number beside that: encoded with what was rounded away before, and decoded."""
UPDATE_S = 0.03
"""Seconds of an update without numbers: ranks that look for an answer, messages that deal samples out and commit."""
UPDATE_MESSAGES = 5
"""Messages of an update that wait for an answer: work, weights, the last piece, its receipt, the commit."""
NUMBER_BYTES = 4

Limit = Literal["workers", "a server", "the link", "max_staleness"]


@dataclass(frozen=True)
class Updates:
    """The updates of a run; with arrays, one entry for each of several plans."""

    sent_bytes: float
    """Bytes that a worker sends for one update, without headers."""
    received_bytes: float
    worker_s: tuple[Numbers, ...]
    """Seconds of each worker's update when it is alone, in the order of the run file."""
    is_away: tuple[bool, ...]
    """True for the workers that reach the servers over a link."""
    interval_s: Numbers
    """Mean time between two updates of the run."""
    limits: dict[Limit, Numbers]
    """The least time between two updates that each of these allows; the largest is `interval_s`."""

    @property
    def limit(self) -> Limit:
        """The limit that sets the pace of updates, where there is one plan."""
        return max(self.limits, key=lambda name: float(self.limits[name]))


def sent_bytes(run: RunConfig) -> float:
    """Return the bytes of numbers that a worker sends for one update."""
    servers = run.sync.server_count
    return float(servers * -(-parameters(run.model) // (servers * WIRE_BLOCK)) * WIRE_BLOCK_BYTES[run.sync.wire])


def updates_of(run: RunConfig, cluster: Cluster, step_s: Numbers) -> Updates:
    """Predict the updates of `run`, whose workers are on the sites of `cluster`, each with steps of `step_s`.

    The servers are at the first site; workers are at the sites of their names, or else in turns. Raises: UserError if
    the run has no workers.
    """
    if not run.sites:
        raise UserError(NO_WORKERS)
    numbers, steps = parameters(run.model), run.sync.local_steps
    sent, received = sent_bytes(run), float(NUMBER_BYTES * numbers)
    server_s = numbers * (SERVER_NUMBER_S + WIRE_NUMBER_S[run.sync.wire] / 2) / run.sync.server_count
    own_s = numbers * (WORKER_NUMBER_S + WIRE_NUMBER_S[run.sync.wire] / 2) + UPDATE_S + server_s
    is_away = _away([site.name for site in run.sites], cluster)
    link_s = busier_s = 0.0
    if any(is_away):
        link_s = between_sites_s(FRAMING * (sent + received), cluster, 2 * UPDATE_MESSAGES)
        busier_s = between_sites_s(FRAMING * max(sent, received), cluster, 0)
    worker_s = tuple(steps * step_s + own_s + away * link_s for away in is_away)
    rates = [1 / seconds for seconds in worker_s]
    of_away = sum((rate for rate, away in zip(rates, is_away, strict=True) if away), 0.0) / sum(rates)
    limits: dict[Limit, Numbers] = {
        "workers": 1 / sum(rates),
        "a server": server_s + 0.0 * step_s,
        "the link": of_away * busier_s,
        "max_staleness": _held_s(worker_s, run.sync.max_staleness),
    }
    interval_s = _slowest(tuple(limits.values()))
    return Updates(sent, received, worker_s, is_away, interval_s, limits)


def added_s(run: RunConfig, cluster: Cluster, step_s: Numbers) -> Numbers:
    """Return the seconds that pushes and pulls add to a step, on average over all workers and steps."""
    found = updates_of(run, cluster, step_s)
    return len(found.worker_s) * found.interval_s / run.sync.local_steps - step_s


def with_workers(cluster: Cluster, run: RunConfig) -> Cluster:
    """Return a cluster that has as many sites as the run has workers; one of a single place is dealt out evenly.

    Raises: UserError if it has another number of sites, or cannot be dealt out.
    """
    workers, sites = len(run.sites), len(cluster.sites)
    if sites == workers or workers <= 1:
        return cluster
    if sites > 1 or len(cluster.groups) > 1:
        raise UserError(
            f"the run has {workers} [[sites]], its workers, and the cluster {cluster.name} has {sites} sites. Name as "
            "many [[sites]], or a cluster of one kind of node at one place."
        )
    (group,) = cluster.groups
    names = [site.name for site in run.sites]
    if group.nodes % workers == 0:
        size, rate = {"nodes": group.nodes // workers}, group.nic_bytes_per_s * group.devices_per_node
    elif group.nodes == 1 and group.devices_per_node % workers == 0:
        size, rate = {"devices_per_node": group.devices_per_node // workers}, group.link_bytes_per_s
    else:
        raise UserError(
            f"{cluster.name}: {workers} workers cannot share {group.nodes} x {group.devices_per_node} devices evenly. "
            "Describe a cluster with a site for each worker."
        )
    latency_s = group.device.nic_latency_s if "nodes" in size else group.device.link_latency_s
    groups: list[NodeGroup] = [group.model_copy(update={**size, "site": name}) for name in names]
    links = [SiteLink(sites=(names[0], name), bandwidth_bytes_per_s=rate, latency_s=latency_s) for name in names[1:]]
    return cluster.model_copy(update={"groups": tuple(groups), "links": tuple(links), "network": ()})


def updates_in_words(run: RunConfig, cluster: Cluster, step_s: float) -> str:
    """Return what is to be known of a run's updates, in a sentence or two."""
    found = updates_of(run, cluster, step_s)
    slowest, fastest = max(map(float, found.worker_s)), min(map(float, found.worker_s))
    each = f"{fastest:.3g} s" if slowest < 1.05 * fastest else f"{fastest:.3g} to {slowest:.3g} s"
    limit = "the workers' own time" if found.limit == "workers" else found.limit
    return (
        f"{len(found.worker_s)} workers without waiting for each other: an update takes one {each}, sends "
        f"{found.sent_bytes / 1e6:.3g} MB and receives {found.received_bytes / 1e6:.3g} MB; the run makes one every "
        f"{float(found.interval_s):.3g} s, and {limit} sets that pace."
    )


def _away(names: Sequence[str], cluster: Cluster) -> tuple[bool, ...]:
    sites = list(cluster.sites)
    where = names if set(names) <= set(sites) else [sites[at % len(sites)] for at in range(len(names))]
    return tuple(bool(cluster.links) and site != sites[0] for site in where)


def _held_s(worker_s: Sequence[Numbers], bound: int) -> Numbers:
    """Return the least time between updates that a bound on staleness allows; at 0 workers take turns."""
    return _slowest(worker_s) / (bound + 1) if bound else sum(worker_s, 0.0) / len(worker_s)


def _slowest(several: Sequence[Numbers]) -> Numbers:
    found: Numbers = np.max(np.broadcast_arrays(*several), axis=0)
    return found
