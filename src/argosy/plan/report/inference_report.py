"""The report of `argosy plan --inference`: the best ways to serve a model on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.model_name import model_name
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.formatting import count, gib, seconds, within
from argosy.plan.cost.inference import Serving
from argosy.plan.report.report import PlanRequest, describe
from argosy.plan.search.serving import search_serving


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
