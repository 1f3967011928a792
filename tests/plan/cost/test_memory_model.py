"""Memory in closed form: against the exact state, and against the published formulas for activations."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.exact_state import state_bytes
from argosy.plan.cost.memory_model import Footprint, MemoryModel
from argosy.plan.cost.rates import System
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.pipeline import split_layers
from argosy.plan.plan import Plan
from argosy.plan.workload import Workload

GELU_2022 = System(flash=0, dropout=1, kept_widths=0, gathers_again=1)
"""What Korthikanti et al. 2022 describe."""
GPT = Workload(
    layers=4, width=2048, heads=16, kv_heads=16, key_width=128, value_width=128, kv_width=256, core_width=128,
    ffn_width=8192, widest_ffn=8192, ffn_matrices=2,
    vocab_size=50304, tied=1, seq_len=1024, global_batch=64, attention_span=512,
)  # fmt: skip


def footprint(plan: str, work: Workload, system: System | None = None) -> Footprint:
    return MemoryModel(Layouts.of([Plan.parse(plan)]), work, system or System(), Constants()).predict()


@pytest.mark.parametrize("preset", ["llama3-8b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=8,zero=0",
        "dp_shard=8,zero=1",
        "dp_shard=8,zero=2",
        "dp_shard=8",
        "tp=8",
        "tp=2,dp_shard=4,zero=1",
        "dp_shard=4,cp=2",
        "dp_shard=8,ep=4,zero=1",
        "dp_shard=8,ep=8",
        "dp_shard=32",
        "dp_shard=32,ep=4,zero=1",
    ],
)
def test_the_state_is_the_exact_one_but_for_norms_and_padding(preset, plan):
    run = load("demo", {"model.preset": preset, "train.global_batch": 64, "model.vocab_size": 32000})
    if not run.model.moe.experts and "ep=" in plan:
        plan = plan.partition(",ep")[0]
    exact = state_bytes(Plan.parse(plan), run)
    # As `state_bytes` has it: what is left when all is summed.
    summed = System(sums_once=0, gradient_buffers=1, deals_experts=1)
    found = footprint(plan, Workload.of(run), summed)
    assert float(np.squeeze(found.weights)) == pytest.approx(exact.parameters, rel=5e-3)
    if Plan.parse(plan).zero != 1:  # whose sums come when activations are gone: not at the peak
        assert float(np.squeeze(found.gradients)) == pytest.approx(exact.gradients, rel=5e-3)
    assert float(np.squeeze(found.optimizer)) == pytest.approx(exact.optimizer, rel=5e-3)


@pytest.mark.parametrize(
    ("plan", "keys"),
    [
        ("dp_shard=8", {"optimizer.kind": "muon"}),
        ("dp_shard=8", {"optimizer.kind": "muon", "optimizer.state": "int8"}),
        ("dp_shard=8", {"optimizer.kind": "lion", "optimizer.state": "int8"}),
        ("", {"lora.rank": 16, "model.mtp.modules": 1, "model.layers": 2}),
    ],
    ids=str,
)
def test_the_state_is_that_of_the_runs_optimizer_and_of_what_it_trains(plan, keys):
    run = load("demo", {"model.preset": "llama3-8b", "train.global_batch": 64, "model.vocab_size": 32000} | keys)
    laid_out = Plan.parse(f"{plan},precision=bf16")
    found = CostModel.of(run, Cluster.parse("8xh100")).on(run, 8).predict_memory(Layouts.of([laid_out])).by_category()
    exact = state_bytes(laid_out, run)
    assert found["weights"] == pytest.approx(exact.parameters, rel=5e-3)
    assert found["optimizer"] == pytest.approx(exact.optimizer, rel=5e-3)


def test_the_last_stage_of_a_reward_model_has_no_head_over_words():
    work = replace(GPT, tied=0, scored=1)
    last = MemoryModel(Layouts.of([Plan.parse("pp=2")]), work, System(), Constants()).on_rank(first=False)
    assert float(np.squeeze(last.weights)) == 4 * 2 * 12 * GPT.width**2  # fp32, of two layers


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_those_of_korthikanti(tp, recompute):
    """Table 2 of the paper: s b h L (34/t + 5 a s / (h t)), 34 s b h L / t, and 2 s b h L / t (sharded inputs)."""
    model = MemoryModel(
        Layouts.of([Plan(tp=tp, recompute=recompute, microbatch=2, precision="bf16")]), GPT, GELU_2022, Constants()
    )
    sbh = 1024 * 2 * 2048
    published = {"none": 34 + 5 * 16 * 1024 / 2048, "selective": 34, "full": 2}[recompute] * sbh / tp
    assert float(model.kept[0]) == pytest.approx(published)


def test_a_pipelines_first_rank_has_as_many_microbatches_in_flight_as_ranks():
    alone = MemoryModel(Layouts.of([Plan(precision="bf16")]), GPT, System(), Constants())
    piped = MemoryModel(Layouts.of([Plan(pp=4, precision="bf16")]), GPT, System(), Constants())
    assert piped.in_flight(True, False, 1.0) == alone.in_flight(True, True, 4.0) == 4
    assert piped.in_flight(False, True, 1.0) == 1
    assert piped.on_rank(first=False).activations < piped.on_rank(first=True).activations / 2


def test_ranks_have_the_layers_that_they_are_dealt():
    for layers, vocab_size, pp, modules in product((4, 7, 31), (32000, 262144), (2, 3, 4), (0, 1)):
        keys = {"model.layers": layers, "model.vocab_size": vocab_size, "model.mtp.modules": modules}
        run = load("demo", {"model.preset": "llama-60m", **keys})
        dealt = [len(part) for part in split_layers(run.model, run.data.seq_len, pp)]
        model = MemoryModel(Layouts.of([Plan(pp=pp)]), Workload.of(run), System(), Constants())
        place = int(np.squeeze(model.place_between))
        found = [model.layers_on(first=True, last=False), model.layers_on(first=False, last=True)]
        assert [int(np.squeeze(n)) for n in found] == [dealt[0], dealt[-1]], keys
        assert max(dealt[:-1]) == (model.layers_on(first=False, last=False) if place else dealt[0]), keys


def test_a_pipeline_has_its_frozen_layers_where_they_are():
    """Of four ranks with two layers each, two have weights alone; the third has most microbatches in flight."""
    whole = replace(GPT, layers=8, vocab_size=1, tied=0)
    half = replace(whole, trained_dense=0.5, reached=0.5, trained_embedding=0)
    some, all_ = (MemoryModel(Layouts.of([Plan(pp=4)]), work, System(), Constants()) for work in (half, whole))
    bottom, between, top = (some.on_rank(*place) for place in ((True, False), (False, False), (False, True)))
    assert bottom.gradients == bottom.optimizer == 0
    assert some.place_between == 2 and some.predict() == between
    assert vars(top) == vars(all_.on_rank(first=False))
    assert between.gradients == pytest.approx(4 * 2 * 12 * GPT.width**2)
    assert between.activations - top.activations == pytest.approx(2 * some.kept + some.hidden_bytes, rel=0.05)


def test_a_pipeline_s_only_microbatch_makes_gradients_while_it_gives_activations_up():
    once, twice = (
        footprint("pp=4,schedule=gpipe,compile=false", replace(GPT, tied=0, global_batch=batch)) for batch in (1, 2)
    )
    assert twice.gradients == pytest.approx(4 * 12 * GPT.width**2 + 4 * GPT.width * GPT.vocab_size)
    assert once.gradients < twice.gradients / 2


def test_chunks_of_the_loss_cost_less_than_whole_logits():
    assert footprint("microbatch=8", GPT).logits < footprint("microbatch=8", GPT, System(whole_logits=10)).logits / 3


def test_everything_is_positive_and_adds_up():
    found = footprint("tp=2,dp_shard=4,precision=bf16", GPT)
    parts = {f.name: float(np.squeeze(getattr(found, f.name))) for f in fields(found)}
    assert all(value >= 0 for value in parts.values())
    assert sum(parts.values()) == pytest.approx(float(found.total[0]))


def test_what_the_update_needs_counts_once_it_exceeds_the_activations():
    plain, copies = footprint("", GPT), footprint("", GPT, System(update_bytes=100))
    held = sum(float(np.squeeze(getattr(plain, name))) for name in ("activations", "logits", "gathered"))
    more = (copies.total - copies.reserve) - (plain.total - plain.reserve)
    assert more == pytest.approx(100 * GPT.matrix_parameters - held, rel=1e-3)
    assert footprint("", GPT, System(update_bytes=1e-3)).total == pytest.approx(float(plain.total[0]))


@pytest.mark.parametrize(
    ("plan", "widened", "each"),
    [
        ("weights=bf16,compile=false", 0, 8 + 16),  # weight and gradient in fp32, and what rounding takes
        ("weights=bf16,compile=false", 8, 8 + 8 + 32),  # and both moments, rounded to eight bits
        ("compile=false", 8, 8 + 32),
        ("weights=bf16", 8, 8 + 8 + 1),
        ("weights=bf16,dp_shard=2,zero=1,compile=false", 0, (8 + 16) / 2),
        ("weights=bf16,offload=optimizer", 0, 0),
        ("compile=false", 0, 0),
    ],
)
def test_an_update_has_one_parameter_after_the_other_in_fp32(plan, widened, each):
    """As ranks allocate it in a simulated step, to 0.1 %."""
    work = replace(GPT, layers=1, vocab_size=2**20, seq_len=16, global_batch=2)
    found = footprint(plan, work, System(widened_bytes=widened))
    buffers = float(np.squeeze(found.workspace)) - Constants().workspace_bytes
    assert buffers == pytest.approx(each * work.vocabulary_parameters)


@pytest.mark.parametrize(
    ("plan", "each"),
    [
        ("dp_shard=2,weights=bf16", 4),  # FSDP2 adds them up in the format of their sum
        ("dp_shard=2,weights=bf16,reduce=bf16", 2),
        ("dp_shard=2,reduce=bf16", 2),
        ("dp_shard=2,zero=2,reduce=bf16", 4),
        ("dp_shard=2,zero=2,weights=bf16", 2),
    ],
)
def test_gradients_that_add_up_have_the_format_of_their_sum_in_fsdp(plan, each):
    found = footprint(f"precision=bf16,{plan}", GPT)
    assert found.gradients == pytest.approx(each * GPT.trained_parameters)


def test_fsdp_gathers_the_last_two_layers_which_have_experts_where_most_have():
    moe = replace(GPT, vocab_size=1, experts=8, experts_per_token=2, expert_ffn_width=8192)
    all_, most, half = (
        float(np.squeeze(footprint("dp_shard=8,precision=bf16", replace(moe, moe_layers=many)).gathered))
        for many in (4, 3, 2)
    )
    assert most == pytest.approx(all_)
    assert all_ - half == pytest.approx(2 * (moe.expert_parameters + moe.width * 8 - moe.ffn_parameters), rel=1e-3)


def test_zero_2_needs_no_more_memory_than_zero_1():
    """Where the peak is another moment, too: only what comes and goes leaves holes."""
    run = load("demo", {"model.preset": "qwen3-next-80b-a3b", "data.seq_len": 2048, "train.global_batch": 512})
    costs = CostModel.of(run, Cluster.parse("8xh100"))
    plan = Plan.parse("dp_shard=8,microbatch=2,precision=bf16,compile=true")
    one, two = (costs.predict_memory(Layouts.of([plan.model_copy(update={"zero": zero})])).total for zero in (1, 2))
    assert two <= one


def test_where_gradients_are_checked_there_are_two_at_a_time():
    once, twice = footprint("dp_replicate=2", GPT), footprint("dp_replicate=2", GPT, System(checks_gradients=1))
    assert twice.gradients - once.gradients == pytest.approx(4 * GPT.matrix_parameters, rel=1e-3)
    assert twice.total - once.total == pytest.approx(4 * GPT.matrix_parameters, rel=1e-3)


def test_the_fullest_rank_counts_however_layers_are_dealt_out():
    five = replace(GPT, layers=5, vocab_size=1)
    evenly, by_cost = (footprint("pp=2", five, System(balanced_stages=given)) for given in (0, 1))
    assert evenly.weights == pytest.approx(by_cost.weights, rel=1e-3)  # 3 layers and 2, either way


def test_gradients_have_the_format_of_their_weights():
    wide, narrow = footprint("microbatch=2", GPT), footprint("microbatch=2,precision=bf16,weights=bf16", GPT)
    assert narrow.gradients == pytest.approx(wide.gradients / 2)
    assert narrow.weights == pytest.approx(wide.weights / 2)


def test_matrices_are_not_kept_in_another_format_for_fp8():
    plan = "zero=1,dp_shard=2,compile=false,precision="
    wide, narrow = (footprint(plan + precision, GPT).activations for precision in ("bf16", "fp8_rowwise"))
    assert wide - narrow == pytest.approx(2 * (GPT.matrix_parameters - GPT.vocab_size * GPT.width), rel=0.1)


def test_offload_takes_the_optimizer_and_activations_off_the_device():
    here, away = footprint("microbatch=8", GPT), footprint("microbatch=8,offload=all", GPT)
    assert away.optimizer == 0
    moved = MemoryModel(Layouts.of([Plan.parse("microbatch=8,offload=all")]), GPT, System(), Constants()).moved
    assert here.activations - away.activations == pytest.approx((GPT.layers - 1) * moved, rel=1e-6)
