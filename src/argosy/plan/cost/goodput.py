"""What failures cost a long run: how often it stops, how often to save, and how much of its time is progress.

Failures of n devices with a mean time between failures of M_device each come at random, one every M = M_device / n. The
run saves every tau seconds of work, standing still for delta; a save is safe w seconds after it began; from a failure
until steps are done again it takes R, and then what was done since the newest safe save is done once more. The share
of time that is progress (the effective training time ratio, ETTR) is then

    tau / (M e^((R+w-delta)/M) (e^((tau+delta)/M) - 1))

which is exact for exponential failures that strike at any time, restarts included: for w = delta it is Daly 2006,
equation 20, and what is written while training goes on is done once more in every restart. To first order it is what
Kokolis et al. 2024 ("Revisiting Reliability in Large-Scale Machine Learning Research Clusters") call expected ETTR:
1 - delta/tau - (tau/2 + R)/M.

All functions take numbers or NumPy arrays, one number for each plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma, log

import numpy as np

from argosy.plan.cost.estimate import Estimate, propagate
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.workload import Numbers

MTBF_SPREAD = 1.67
"""Kokolis et al. 2024: 29.5 and 82.1 thousand GPU-hours in two clusters of A100 in one company."""
MTBF_SPREAD_ASSUMED = 3.0
"""For devices of which nobody has published it."""
RESTART_S = Estimate(300.0, 600.0, 1200.0)
"""Detecting the failure, replacing the node, starting processes, loading: minutes (Kokolis et al. 2024 take 5)."""
HOST_COPY_BYTES_PER_S = 10e9
"""Device to host memory, with all devices of a node at it; assumed."""
MEMORY_CHECKPOINTS_MAY_COST = 0.001
"""Share of the time that copies in host memory may take in any case: rates of failure are those of hardware, and
processes die of other causes too, the more so where nobody has published a rate."""


@dataclass(frozen=True)
class CheckpointCost:
    """What one checkpoint takes."""

    stall_s: Numbers
    """Training stands still (delta)."""
    write_s: Numbers
    """From its begin until it is safe (w), the stall included; the next one cannot begin before."""
    copy_s: Numbers = 0.0
    """Training stands still for a copy in host memory, which is all that there is to such a copy."""


@dataclass(frozen=True)
class Goodput:
    """What failures make of a run."""

    mtbf_s: Estimate
    """Between unexpected stops."""
    stops_per_day: Estimate
    interval_s: Numbers
    """Best work time between checkpoints, for the middle of mtbf_s."""
    copy_interval_s: Numbers
    """Between copies in host memory."""
    overhead: Estimate
    """Time lost over time of progress: checkpoints, restarts, work done twice."""
    effective: Estimate
    """Share of the time that is progress (ETTR): 1 / (1 + overhead)."""


def goodput(
    cluster: Cluster,
    saving: CheckpointCost,
    devices: Numbers | None = None,
    restart_s: Estimate = RESTART_S,
    step_s: Numbers = 0.0,
) -> Goodput:
    """What failures cost a job on `devices` of the cluster, all of them if not said, that saves as often as is best.

    step_s: seconds of a step; checkpoints are at least that far apart.
    """
    mtbf = mtbf_s(cluster, devices)
    interval_s = np.maximum(best_interval_s(saving.stall_s, mtbf.mid), np.maximum(saving.write_s, step_s))

    def overhead(mtbf_s: Numbers, restart_s: Numbers) -> Numbers:
        return 1 / effective_share(interval_s, saving, restart_s, mtbf_s) - 1

    lost = propagate(overhead, mtbf, restart_s)
    return Goodput(
        mtbf_s=mtbf,
        stops_per_day=propagate(lambda m: 86_400 / m, mtbf),
        interval_s=interval_s,
        copy_interval_s=np.maximum(memory_checkpoint_interval_s(saving.copy_s, mtbf.mid), step_s),
        overhead=lost,
        effective=propagate(lambda o: 1 / (1 + o), lost),
    )


def mtbf_s(cluster: Cluster, devices: Numbers | None = None) -> Estimate:
    """Seconds between failures of a job on `devices` of the cluster, of all kinds evenly; all devices if not said."""
    stops_per_h = sum(group.devices / group.device.mtbf_h for group in cluster.groups)
    spreads = [MTBF_SPREAD_ASSUMED if "mtbf_h" in g.device.assumed else MTBF_SPREAD for g in cluster.groups]
    per_device_h = cluster.devices / stops_per_h
    return Estimate.within(3600 * per_device_h / (cluster.devices if devices is None else devices), max(spreads))


def checkpoint_cost(
    cluster: Cluster, state_bytes: Numbers, devices: Numbers | None = None, background: bool = True
) -> CheckpointCost:
    """What it takes to save `state_bytes`, the state of the whole job, from `devices` (all if not said).

    background: the state is copied to host memory, and written from there while training goes on.
    """
    write_s = state_bytes / cluster.storage_bytes_per_s
    copy_s = state_bytes / (cluster.devices if devices is None else devices) / HOST_COPY_BYTES_PER_S
    return CheckpointCost(copy_s, copy_s + write_s, copy_s) if background else CheckpointCost(write_s, write_s, copy_s)


def best_interval_s(stall_s: Numbers, mtbf_s: Numbers) -> Numbers:
    """Work time between checkpoints that makes most progress (Daly 2006, equation 37).

    Its first term is Young's sqrt(2 delta M) (1974); checkpoints that take longer than 2 M come every M.
    """
    root = np.sqrt(stall_s / (2 * mtbf_s))
    daly = 2 * mtbf_s * root * (1 + root / 3 + root**2 / 9) - stall_s
    return np.where(root < 1, daly, mtbf_s)[()]


def memory_checkpoint_interval_s(copy_s: Numbers, mtbf_s: Numbers) -> Numbers:
    """Work time between copies in host memory: that of `best_interval_s`, or less while they hardly cost anything."""
    return np.minimum(best_interval_s(copy_s, mtbf_s), copy_s / MEMORY_CHECKPOINTS_MAY_COST)[()]


def effective_share(interval_s: Numbers, saving: CheckpointCost, restart_s: Numbers, mtbf_s: Numbers) -> Numbers:
    """Progress over time, from 0 to 1, with checkpoints every `interval_s` > 0 of work. 1 / mtbf_s may be 0."""
    rate = 1 / np.asarray(mtbf_s, dtype=float)
    cycle_s = interval_s + np.asarray(saving.stall_s, dtype=float)
    failures = rate * cycle_s
    # x / (e^x - 1), which is 1 at 0.
    undisturbed = np.divide(failures, np.expm1(failures), out=np.ones_like(failures), where=failures > 0)
    return (interval_s / cycle_s * undisturbed * np.exp(-rate * (restart_s + saving.write_s - saving.stall_s)))[()]


def spare_nodes(cluster: Cluster, repair_h: float, confidence: float = 0.95) -> int:
    """Nodes to hold beside those of the job, so that with this probability none is missing.

    Nodes in repair are Poisson-distributed with mean nodes x repair time / MTBF of a node, whatever the distribution of
    repair times (Palm 1943, M/G/infinity). Every failure is taken to break a node: held spares err on the safe side.

    Raises: ValueError unless repair_h >= 0 and 0 < confidence < 1.
    """
    if repair_h < 0 or not 0 < confidence < 1:
        raise ValueError(f"repair_h = {repair_h}, confidence = {confidence}: must be >= 0, and between 0 and 1")
    mean = repair_h * sum(group.devices / group.device.mtbf_h for group in cluster.groups)
    if mean == 0:
        return 0
    spares, at_most = 0, -mean  # log of the probability of no more than `spares`
    while at_most < log(confidence):
        spares += 1
        at_most = np.logaddexp(at_most, spares * log(mean) - mean - lgamma(spares + 1))
    return spares
