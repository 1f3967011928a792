"""The ways to cut a model for inference, ranked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.formatting import gib
from argosy.plan.cost.inference import Serving, predict_serving
from argosy.plan.integers import divisors
from argosy.plan.search.space import Pins

KEYS = ("tp", "pp", "precision")
"""Keys of a plan that apply to inference."""


def search_serving(costs: CostModel, pins: Pins) -> list[Serving]:
    """Return the ways that fit, the one with most tokens a second first. Raises: UserError if there is none."""
    if strange := [key for key in pins if key not in KEYS]:
        raise UserError(f"--fix {strange[0]} says nothing about inference. Try {', '.join(KEYS)}.")
    precision = pins.get("precision", (costs.precision,))[0]
    tp, pp = _cuts(costs, pins)
    if not len(tp):
        fixed = ", ".join(f"{key} = {'|'.join(map(str, values))}" for key, values in pins.items())
        raise UserError(f"no way to cut {costs.run.model.heads} heads over {costs.devices} devices with {fixed}.")
    found = predict_serving(costs, tp, pp, str(precision))
    fitting = sorted((way for way in found if _fits(way, costs)), key=lambda way: -way.tokens_per_s)
    if not fitting:
        least = min(found, key=lambda way: float(way.memory_bytes.mid))
        raise UserError(
            f"nothing fits: with tp = {least.tp} and pp = {least.pp} a device needs {gib(least.weights_bytes)} GiB for "
            f"weights and {gib(least.cache_bytes)} GiB for the cache of {least.sequences} sequences, and has "
            f"{gib(costs.rates.memory_bytes)} GiB. Try a smaller --global-batch or --seq-len, or more devices."
        )
    return fitting


def _cuts(costs: CostModel, pins: Pins) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return every (tp, pp) that the heads, the layers and the devices allow."""
    model, node = costs.run.model, int(costs.rates.node)
    cuts = [
        (tp, pp)
        for tp in pins.get("tp", [n for n in divisors(costs.devices) if n <= node])
        for pp in pins.get("pp", [n for n in divisors(costs.devices) if n <= model.layers])
        if costs.devices % (tp * pp) == 0 and model.heads % tp == 0 and model.ffn_width % tp == 0
    ]
    columns = np.array(cuts, np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _fits(way: Serving, costs: CostModel) -> bool:
    return float(way.memory_bytes.mid) <= costs.memory_bytes
