"""The updates of an asynchronous run: what one costs a worker, and how many all workers make together.

For an update a worker receives N numbers in fp32, makes H steps of t seconds (`sync.local_steps`), and sends N numbers
as `sync.wire` has them, to S servers. With w and s the seconds of worker and servers for a number, that takes it

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
from argosy.errors import UserError
from argosy.plan.cost.network import FRAMING, between_sites_s
from argosy.plan.cost.outer_traffic import BLOCK, BLOCK_BYTES
from argosy.plan.hardware.clusters import Cluster, NodeGroup, SiteLink
from argosy.plan.plan import NO_WORKERS
from argosy.plan.workload import Numbers, parameters

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
MESSAGES = 5
"""Messages of an update that wait for an answer: work, weights, the last piece, its receipt, the commit."""
NUMBER_BYTES = 4

Limit = Literal["workers", "a server", "the link", "max_staleness"]


@dataclass(frozen=True)
class Updates:
    """The updates of a run; with arrays, one entry for each of several plans."""

    sent_bytes: float
    """By a worker, for one update, without headers."""
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
    return float(servers * -(-parameters(run.model) // (servers * BLOCK)) * BLOCK_BYTES[run.sync.wire])


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
        link_s = between_sites_s(FRAMING * (sent + received), cluster, 2 * MESSAGES)
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


def in_words(run: RunConfig, cluster: Cluster, step_s: float) -> str:
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
