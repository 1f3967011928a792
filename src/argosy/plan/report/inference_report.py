"""The report of `argosy plan --inference`: the best ways to serve a model on a cluster.

The ways to cut a model for inference, ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.config.load import model_name
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import count, gib, seconds, within
from argosy.plan.cost.inference import Serving, predict_serving
from argosy.plan.quantities import divisors
from argosy.plan.report.report import PlanRequest, describe
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


@dataclass(frozen=True)
class InferenceReport:
    """The report."""

    model: str
    cluster: str
    seq_len: int
    sequences: int
    """Sequences that all devices answer at a time."""
    assumed: tuple[str, ...]
    choices: tuple[Serving, ...]
    """Ways that fit, the one with most tokens a second first."""


def inference_report(request: PlanRequest) -> InferenceReport:
    """Return the best ways to answer `train.global_batch` sequences of `data.seq_len` tokens at a time, ranked.

    Raises: UserError if nothing fits, or a pin does not apply to inference.
    """
    run = request.run
    found = search_serving(CostModel.of(run, request.cluster), request.pins or {})
    return InferenceReport(
        model=model_name(run.model, run.name),
        cluster=describe(request.cluster),
        seq_len=run.data.seq_len,
        sequences=run.train.global_batch,
        assumed=request.assumed,
        choices=tuple(found[: request.top]),
    )


def in_words(report: InferenceReport) -> str:
    """Return the report as a table of text."""
    lines = [
        f"{report.model} on {report.cluster}: {report.sequences} sequences of {report.seq_len} tokens at a time",
        *report.assumed,
        f"{'tp':>4}{'pp':>4}{'replicas':>10}{'weights':>10}{'cache':>8}{'GiB':>8}{'room for':>10}{'tokens/s':>10}"
        "  prefill; between tokens",
    ]
    lines += [
        f"{way.tp:>4}{way.pp:>4}{way.copies:>10}{gib(way.weights_bytes):>10}{gib(way.cache_bytes):>8}"
        f"{gib(way.memory_bytes.mid):>8}{way.most_sequences:>10}{count(way.tokens_per_s):>10}"
        f"  {within(way.prefill_s, seconds)}; {within(way.decode_s, seconds)}"
        for way in report.choices
    ]
    return "\n".join(lines)
