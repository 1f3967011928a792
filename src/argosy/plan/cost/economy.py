"""The costs of a whole run: time, device-hours, money, energy and CO2, each with its interval.

All functions take estimates of numbers or of NumPy arrays, one number for each plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argosy.plan.cost.estimate import Estimate, propagate
from argosy.plan.cost.goodput import Goodput
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.workload import Numbers

DRAW = Estimate(0.65, 0.76, 0.90)
"""Power that a node draws in training, over its nameplate: 0.76 measured on nodes of H100; the interval is assumed."""


@dataclass(frozen=True)
class WholeRun:
    """The costs of training on a given number of tokens."""

    steps: Numbers
    time_s: Estimate
    """Time from the first step to the last, failures included."""
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
    spares: Numbers = 0,
    ramp: tuple[Numbers, Numbers] | None = None,
) -> WholeRun:
    """Return the costs of training on `tokens`.

    devices: those of the cluster that the run uses, evenly of all kinds; default: all. spares: devices that are held
    and paid for beside those; they draw no power. ramp: the steps of a run whose first ones have smaller batches, and
    as many full steps as they take the time of.
    """
    used = cluster.devices if devices is None else devices
    steps, full = ramp or 2 * (np.ceil(tokens / tokens_per_step),)
    total = tokens if ramp else steps * tokens_per_step
    time_s = propagate(lambda step, lost: full * step * (1 + lost), step_time_s, goodput.overhead)
    device_hours = propagate(lambda t: t / 3600 * used, time_s)
    price, power = price_per_device_h(cluster), power_per_device_w(cluster)
    energy = power and propagate(lambda hours, watts: hours * watts / 1000, device_hours, power)
    return WholeRun(
        steps=steps,
        time_s=time_s,
        device_hours=device_hours,
        money=price and propagate(lambda t, each: t / 3600 * (used + spares) * each, time_s, price),
        energy_kwh=energy,
        co2_kg=energy and propagate(lambda kwh: kwh * cluster.grid_kg_per_kwh, energy),
        tokens_per_day=propagate(lambda t: total * 86_400 / t, time_s),
    )


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
