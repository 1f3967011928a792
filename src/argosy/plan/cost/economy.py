"""The costs of a whole run: the failures in it, time, device-hours, money, energy and CO2, each with its interval.

Failures of n devices with a mean time between failures of M_device each (`plan.cost.reliability`) come at random, one
every M = M_device / n. The run saves every tau seconds of work and stands still for delta; a save is safe w seconds
after it began. After a failure it takes R until steps run again, and the work since the newest safe save is repeated.
The productive share of the time (the effective training time ratio, ETTR) is then

    tau / (M e^((R+w-delta)/M) (e^((tau+delta)/M) - 1))

which is exact for exponential failures that strike at any time, restarts included. For w = delta it is Daly 2006,
equation 20; the work during a background write is repeated in every restart. To first order it is what
Kokolis et al. 2024 ("Revisiting Reliability in Large-Scale Machine Learning Research Clusters") call expected ETTR:
1 - delta/tau - (tau/2 + R)/M.

All functions take numbers or NumPy arrays, one number for each plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from argosy.plan.cost.estimate import Estimate, propagate
from argosy.plan.cost.reliability import device_hours_per_stop
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.workload import Numbers

RESTART_S = Estimate(300.0, 600.0, 1200.0)
"""Time to detect the failure, replace the node, start processes and load: minutes (Kokolis et al. 2024 take 5)."""
HOST_COPY_BYTES_PER_S = 10e9
"""Rate from device to host memory while all devices of a node copy; assumed."""
MEMORY_CHECKPOINTS_MAY_COST = 0.001
"""Share of the time that in-memory checkpoints may take in any case. Rates of failure are those of hardware; processes
die of other causes too, and all the more if nobody has published a rate."""


@dataclass(frozen=True)
class CheckpointCost:
    """The time that one checkpoint takes."""

    stall_s: Numbers
    """Time that training stands still (delta)."""
    write_s: Numbers
    """Time from its beginning until it is safe (w), the stall included; the next one cannot begin before."""
    copy_s: Numbers = 0.0
    """Time that training stands still for an in-memory checkpoint; nothing else of it costs time."""


@dataclass(frozen=True)
class Goodput:
    """The effect of failures on a run."""

    mtbf_s: Estimate
    """Time between unexpected stops."""
    stops_per_day: Estimate
    interval_s: Estimate
    """Best working time between checkpoints; its middle, for that of mtbf_s, is what `effective` counts with."""
    copy_interval_s: Numbers
    """Working time between in-memory checkpoints."""
    overhead: Estimate
    """Lost time over productive time: checkpoints, restarts, work done twice."""
    effective: Estimate
    """Share of the time that is productive (ETTR): 1 / (1 + overhead)."""


def goodput(
    cluster: Cluster,
    saving: CheckpointCost,
    devices: Numbers | None = None,
    restart_s: Estimate = RESTART_S,
    step_s: Numbers = 0.0,
    mtbf: Estimate | None = None,
) -> Goodput:
    """Return the effect of failures on a job that saves as often as is best.

    devices: those of the cluster that the job uses; default: all. step_s: seconds of a step; checkpoints are at least
    that far apart. mtbf: seconds between stops, if more is known of them than the catalogue says.
    """
    mtbf = mtbf_s(cluster, devices) if mtbf is None else mtbf

    def interval_s(mtbf_s: Numbers) -> Numbers:
        return np.maximum(best_interval_s(saving.stall_s, mtbf_s), np.maximum(saving.write_s, step_s))

    chosen_s = interval_s(mtbf.mid)

    def overhead(mtbf_s: Numbers, restart_s: Numbers) -> Numbers:
        return 1 / effective_share(chosen_s, saving, restart_s, mtbf_s) - 1

    lost = propagate(overhead, mtbf, restart_s)
    return Goodput(
        mtbf_s=mtbf,
        stops_per_day=propagate(lambda m: 86_400 / m, mtbf),
        interval_s=Estimate(interval_s(mtbf.low), chosen_s, interval_s(mtbf.high)),
        copy_interval_s=np.maximum(memory_checkpoint_interval_s(saving.copy_s, mtbf.mid), step_s),
        overhead=lost,
        effective=propagate(lambda o: 1 / (1 + o), lost),
    )


def mtbf_s(cluster: Cluster, devices: Numbers | None = None) -> Estimate:
    """Return the seconds between stops of a job on `devices` of the cluster, evenly of all kinds; default: all."""
    used = cluster.devices if devices is None else devices
    hours = device_hours_per_stop(cluster, used)
    return Estimate(*(3600 * each / used for each in (hours.low, hours.mid, hours.high)))


def checkpoint_cost(
    cluster: Cluster, state_bytes: Numbers, devices: Numbers | None = None, background: bool = True
) -> CheckpointCost:
    """Return the time of saving `state_bytes`, the state of the whole job, from `devices` (default: all).

    background: the state is copied to host memory, and written from there while training goes on.
    """
    write_s = state_bytes / cluster.storage_bytes_per_s
    copy_s = state_bytes / (cluster.devices if devices is None else devices) / HOST_COPY_BYTES_PER_S
    return CheckpointCost(copy_s, copy_s + write_s, copy_s) if background else CheckpointCost(write_s, write_s, copy_s)


def best_interval_s(stall_s: Numbers, mtbf_s: Numbers) -> Numbers:
    """Return the working time between checkpoints that loses the least time (Daly 2006, equation 37).

    Its first term is Young's sqrt(2 delta M) (1974); checkpoints that take longer than 2 M come every M.
    """
    root = np.sqrt(stall_s / (2 * mtbf_s))
    daly = 2 * mtbf_s * root * (1 + root / 3 + root**2 / 9) - stall_s
    return np.where(root < 1, daly, mtbf_s)[()]


def memory_checkpoint_interval_s(copy_s: Numbers, mtbf_s: Numbers) -> Numbers:
    """Return the working time between in-memory checkpoints: `best_interval_s`, or less if they cost little."""
    return np.minimum(best_interval_s(copy_s, mtbf_s), copy_s / MEMORY_CHECKPOINTS_MAY_COST)[()]


LEAST_SHARE, MOST_FAILURES = 1e-9, 700.0
"""Productive share, and failures between two checkpoints, beyond which no run ever ends: numbers end soon after."""


def effective_share(interval_s: Numbers, saving: CheckpointCost, restart_s: Numbers, mtbf_s: Numbers) -> Numbers:
    """Return the productive share of the time, with checkpoints every `interval_s` > 0. 1 / mtbf_s may be 0."""
    rate = 1 / np.asarray(mtbf_s, dtype=float)
    cycle_s = interval_s + np.asarray(saving.stall_s, dtype=float)
    failures = np.minimum(rate * cycle_s, MOST_FAILURES)
    # x / (e^x - 1), which is 1 at 0.
    undisturbed = np.divide(failures, np.expm1(failures), out=np.ones_like(failures), where=failures > 0)
    share = interval_s / cycle_s * undisturbed * np.exp(-rate * (restart_s + saving.write_s - saving.stall_s))
    return np.maximum(share, LEAST_SHARE)[()]


DRAW = Estimate(0.65, 0.76, 0.90)
"""Power that a node draws in training, over its nameplate: 0.76 measured on nodes of H100; the interval is assumed."""


@dataclass(frozen=True)
class WholeRun:
    """The costs of training on a given number of tokens."""

    steps: Numbers
    time_s: Estimate
    """Time from the first step to the last, evaluations and failures included."""
    device_hours: Estimate
    money: Estimate | None
    """Cost in the cluster's currency; None if the catalogue has no price of a device."""
    energy_kwh: Estimate | None
    """Energy of nodes and building; None if nobody published the power of a device."""
    co2_kg: Estimate | None
    tokens_per_day: Estimate
    """Tokens a day, failures included."""


def whole_run(
    cluster: Cluster,
    step_time_s: Estimate,
    goodput: Goodput,
    *,
    tokens: float,
    tokens_per_step: float,
    devices: Numbers | None = None,
    ramp: tuple[Numbers, Numbers] | None = None,
    evaluations: Numbers = 0.0,
) -> WholeRun:
    """Return the costs of training on `tokens`.

    devices: those of the cluster that the run uses, evenly of all kinds; default: all. ramp: the steps of a run whose
    first ones have smaller batches, and as many full steps as they take the time of. evaluations: as many full steps as
    they take the time of.
    """
    used = cluster.devices if devices is None else devices
    steps, full = ramp or 2 * (np.ceil(tokens / tokens_per_step),)
    total = tokens if ramp else steps * tokens_per_step
    time_s = propagate(lambda step, lost: (full + evaluations) * step * (1 + lost), step_time_s, goodput.overhead)
    device_hours = propagate(lambda t: t / 3600 * used, time_s)
    price, power = price_per_device_h(cluster), power_per_device_w(cluster)
    energy = power and propagate(lambda hours, watts: hours * watts / 1000, device_hours, power)
    return WholeRun(
        steps=steps,
        time_s=time_s,
        device_hours=device_hours,
        money=price and propagate(lambda t, each: t / 3600 * used * each, time_s, price),
        energy_kwh=energy,
        co2_kg=energy and propagate(lambda kwh: kwh * cluster.grid_kg_per_kwh, energy),
        tokens_per_day=propagate(lambda t: total * 86_400 / t, time_s),
    )


def comparable_costs(runs: Iterable[tuple[str, Estimate | None, Estimate]]) -> list[float]:
    """Return a cost for each of some runs (currency, money, device-hours) by which they are compared: the money, or the
    device-hours if a price is unknown or currencies differ."""
    each = list(runs)
    alike = len({currency for currency, _, _ in each}) == 1
    money = [float(money.mid) for _, money, _ in each if money]
    return money if alike and len(money) == len(each) else [float(hours.mid) for _, _, hours in each]


def price_per_device_h(cluster: Cluster) -> Estimate | None:
    """Return the price of an hour of one device, the mean over all; None if a price is unknown.

    The user's own price is exact; the catalogue's range counts as the interval.
    """
    if cluster.price_per_device_h:
        return Estimate.exactly(cluster.price_per_device_h)
    ends = ("price_low_usd_per_h", "price_usd_per_h", "price_high_usd_per_h")
    means = [_mean(cluster, end) for end in ends]
    return None if None in means else Estimate(*(mean for mean in means if mean is not None))


def power_per_device_w(cluster: Cluster) -> Estimate | None:
    """Return the power for one device with its share of node and building, the mean over all; None if one is unknown.

    It is the nameplate of the node x the share that training draws x PUE.
    """
    nameplate = _mean(cluster, "nameplate_w")
    if nameplate is None:
        return None
    return propagate(lambda draw: nameplate * draw * cluster.pue, DRAW)


def _mean(cluster: Cluster, what: str) -> float | None:
    """Return the mean of an attribute over all devices; None if one device lacks it."""
    values = [(group.devices, getattr(group.device, what)) for group in cluster.groups]
    if any(value is None for _, value in values):
        return None
    return sum(devices * value for devices, value in values) / cluster.devices
