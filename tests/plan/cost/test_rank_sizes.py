"""What the memory and the step model take for a rank's parameters is what the rank holds, but for norms and padding."""

from __future__ import annotations

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.cost.breakdown import RankSizes
from argosy.plan.cost.exact_state import state_bytes
from argosy.plan.cost.rates import System
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.workload import Workload


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama3-8b", "dp_replicate=8,zero=0"),
        ("llama3-8b", "dp_replicate=2,tp=4,zero=0"),
        ("deepseek-v3", "dp_shard=8,ep=8,tp=2,zero=1"),
        ("qwen3-30b-a3b", "dp_shard=4,ep=4,zero=1"),
    ],
)
def test_parameters_of_a_rank_are_those_of_the_exact_count(model, plan):
    run = load(
        None, {"model.preset": model, "data.seq_len": 4096, "train.global_batch": 64, "model.vocab_size": 32_000}
    )
    laid_out, work = Plan.parse(plan), Workload.of(run)
    dense, experts = RankSizes(Layouts.of([laid_out]), work, System()).parameters(work.layers)
    ends = (2 - work.tied) * work.vocabulary_parameters / laid_out.tp
    exact = state_bytes(laid_out, run).parameters / 4
    assert float(np.squeeze(dense + experts + ends)) == pytest.approx(exact, rel=1e-3)


def test_sizes_of_many_plans_are_those_of_each():
    work = Workload.of(load(None, {"model.preset": "llama3-8b", "data.seq_len": 8192, "train.global_batch": 64}))
    plans = [Plan.parse(text) for text in ("tp=4,cp=2", "dp_shard=8,microbatch=4,precision=bf16")]
    together = RankSizes(Layouts.of(plans), work, System())
    for row, plan in enumerate(plans):
        alone = RankSizes(Layouts.of([plan]), work, System())
        for name in ("microbatches", "tokens", "activation_bytes", "sequence_ranks", "hidden_bytes"):
            assert np.broadcast_to(getattr(together, name), 2)[row] == np.squeeze(getattr(alone, name)), name
