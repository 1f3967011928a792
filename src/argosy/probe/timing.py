"""Measures how long something takes on a device, within a given time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from argosy.parallel.world import World
from argosy.plan.hardware.measurements import four_digits

SAMPLE_S = 2e-3
"""Calls are timed together for at least this long: one alone may be shorter than a wait for the device."""
LONGEST_SLICE_S = 0.5
"""A measurement is repeated for at most this long: by then it is certain enough."""
FEWEST, MOST = 3, 200
"""Number of samples."""


def seconds(call: Callable[[], object], device: torch.device, slice_s: float) -> float:
    """Return the seconds of one call, repeated for about `slice_s` (at least three times, after one that warms up).

    The lower quartile of the samples: other work on the machine can only make a sample slower.
    """
    calls = max(1, round(SAMPLE_S / _sample(call, device, 1)))
    samples: list[float] = []
    end = time.perf_counter() + slice_s
    while len(samples) < FEWEST or (time.perf_counter() < end and len(samples) < MOST):
        samples.append(_sample(call, device, calls))
    return lower_quartile(samples)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sample(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the seconds of one of `calls` calls."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / calls


def total(world: World, value: float) -> float:
    """Return the sum of a figure over all processes, the same on all."""
    return four_digits(world.sum(torch.tensor(value, dtype=torch.float64, device=world.device)).item())


def mean(world: World, value: float) -> float:
    """Return the mean of a figure over all processes, the same on all."""
    return four_digits(total(world, value) / world.size)


def lower_quartile(samples: Sequence[float]) -> float:
    """Return the sample that a quarter of the samples is below."""
    return float(np.quantile(samples, 0.25, method="lower"))
