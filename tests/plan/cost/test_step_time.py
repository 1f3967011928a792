"""The time of a step: what must hold whatever the constants are."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.layer_time import LayerModel
from argosy.plan.cost.rates import Rates, System
from argosy.plan.cost.step_time import StepModel, StepTime
from argosy.plan.hardware.devices import find_device
from argosy.plan.layouts import Layouts
from argosy.plan.plan import FP8, Plan
from argosy.plan.workload import Workload

H100 = Rates.of_device(find_device("h100"))
SEQ_LEN, BATCH = 8192, 256


def work(preset: str = "llama3-8b") -> Workload:
    return Workload.of_model(load("demo", {"model.preset": preset}).model, SEQ_LEN, BATCH)


def step(*plans: str, preset: str = "llama3-8b", rates: Rates = H100, system: System | None = None) -> StepTime:
    layouts = Layouts.of([Plan.parse(f"precision=bf16,{plan}") for plan in plans])
    return StepModel(layouts, work(preset), rates, system or System(), Constants()).predict()


@pytest.mark.parametrize("preset", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("plan", ["dp_shard=64", "tp=8,dp_shard=8", "pp=8,dp_shard=8,zero=1", "tp=2,cp=4,dp_shard=8"])
def test_ideal_is_the_models_flops_at_the_data_sheets_rate(preset, plan):
    flops = work(preset).train_flops_per_token * SEQ_LEN * BATCH
    assert step(plan, preset=preset).ideal == pytest.approx(flops / 64 / 989e12, rel=1e-6)


@pytest.mark.parametrize("plan", ["dp_shard=64", "pp=4,tp=4,dp_shard=4,zero=1,recompute=full", "cp=8,dp_shard=8"])
def test_categories_are_never_negative_and_add_up(plan):
    times = step(plan)
    parts = {f.name: float(np.squeeze(getattr(times, f.name))) for f in fields(times)}
    assert all(seconds >= 0 for seconds in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(float(times.total[0]))


def test_many_plans_at_once_are_each_alone():
    plans = ["dp_shard=64", "tp=8,dp_shard=8", "pp=8,dp_shard=8,zero=1,schedule=interleaved_1f1b,stages_per_rank=2"]
    assert step(*plans).total == pytest.approx([step(plan).total[0] for plan in plans])


@pytest.mark.parametrize(
    ("category", "without", "with_it"),
    [
        ("tensor", "dp_shard=64", "dp_shard=8,tp=8"),
        ("context", "dp_shard=64", "dp_shard=8,cp=8"),
        ("recompute", "dp_shard=64", "dp_shard=64,recompute=full"),
        ("bubble", "dp_shard=64", "dp_shard=8,pp=8,zero=1"),
        ("pipeline", "dp_shard=64", "dp_shard=8,pp=8,zero=1"),
    ],
)
def test_an_axis_costs_in_its_category(category, without, with_it):
    assert getattr(step(without), category) == 0
    assert getattr(step(with_it), category) > 0


def test_sums_in_bf16_take_half_the_time_but_for_those_of_compressors():
    plans = "dp_replicate=64,zero=0", "dp_shard=64,zero=1", "dp_replicate=8,dp_shard=8"
    for exact, half in zip(step(*plans).gradients, step(*(f"{p},reduce=bf16" for p in plans)).gradients, strict=True):
        assert 0.45 * exact < half < 0.9 * exact
    compressed = step("dp_replicate=64,sync=int8", "dp_replicate=64,sync=int8,reduce=bf16").gradients
    assert compressed[0] == pytest.approx(compressed[1])


def test_whole_experts_are_gathered_padded_where_ranks_are_more():
    dealt, evenly = (step("dp_shard=64", preset="mixtral-8x7b", system=System(deals_experts=n)) for n in (1, 0))
    assert dealt.gradients[0] > 3 * evenly.gradients[0] and dealt.optimizer[0] > 3 * evenly.optimizer[0]
    few = [step("dp_shard=8", preset="mixtral-8x7b", system=System(deals_experts=n)).total[0] for n in (1, 0)]
    assert few[0] == pytest.approx(few[1])


def test_what_goes_to_the_host_is_paid_for():
    what = ("none", "activations", "optimizer", "all")
    kept, activations, state, both = step(*(f"dp_shard=64,offload={word}" for word in what)).total
    assert kept < state < both and kept < activations < both


def test_moments_in_eight_bits_save_memory_and_no_time():
    """AdamW moves 28 bytes a weight; to unpack and pack two moments of a byte each it moves 20 more."""
    narrow = System(moment_bytes=2, widened_bytes=8)
    seconds = [float(step("dp_shard=64", system=system).optimizer[0]) for system in (System(), narrow)]
    assert seconds[1] / seconds[0] == pytest.approx(48 / 28)


def test_a_faster_link_to_the_host_helps_those_who_use_it_alone():
    faster = replace(H100, host_link_bytes_per_s=2 * H100.host_link_bytes_per_s)
    for plan, gains in (("dp_shard=64", False), ("dp_shard=64,offload=activations,recompute=full", True)):
        assert (step(plan, rates=faster).total < step(plan).total) == gains, plan


def test_a_recomputed_layer_sends_its_input_alone_to_the_host():
    none, full = step("dp_shard=64,offload=activations", "dp_shard=64,offload=activations,recompute=full").offload
    assert 0 < full < none / 10


def test_no_schedule_is_faster_than_one_microbatch_on_its_way_through_all_ranks():
    alone = step("pp=8,dp_shard=8,zero=1,schedule=zbv,microbatch=32")
    assert alone.bubble[0] > 3 * (alone.total[0] - alone.bubble[0])


def test_experts_that_live_elsewhere_are_waited_for():
    times = step("dp_shard=64", "dp_shard=64,ep=8", preset="mixtral-8x7b")
    assert times.experts[0] == 0
    assert times.experts[1] > 0


def test_halves_of_tokens_hide_up_to_half_of_their_way_and_no_more_than_is_computed():
    plans = Layouts.of([Plan.parse(f"dp_shard=64,ep=8,overlap_experts={word}") for word in ("false", "true")])
    for expert_ffn_width, least, most in ((14336, 0.5, 0.6), (16, 0.7, 0.8)):
        narrow = replace(work("mixtral-8x7b"), expert_ffn_width=expert_ffn_width)
        whole, halves = StepModel(plans, narrow, H100, System(even_experts=1), Constants(imbalance=1)).predict().experts
        assert least * whole < halves < most * whole


def test_shared_experts_hide_up_to_the_way_there_and_no_more_than_they_are_computed():
    plans = Layouts.of([Plan.parse("dp_shard=64,ep=8"), Plan.parse("dp_shard=64,ep=8,overlap_experts=true")])
    for width, least, most in ((0, 1.0, 1.0), (64, 0.51, 0.99), (1_000_000, 0.499, 0.501)):
        shared = replace(work("mixtral-8x7b"), shared_ffn_width=width)
        after, meanwhile = (
            StepModel(plans, shared, H100, System(even_experts=1, computes_shared_meanwhile=n), Constants(imbalance=1))
            .predict()
            .experts
            for n in (0, 1)
        )
        assert least * after[0] <= meanwhile[0] <= most * after[0]
        assert 0 <= meanwhile[1] <= after[1]


def test_products_hide_the_exchange_of_their_tokens_but_for_the_first_part():
    """On a link as slow as this they cannot hide all."""
    for link, least, most in ((600e9, 0.0, 0.01), (25e9, 0.5, 0.95)):
        plans = Layouts.of([Plan.parse(f"tp=8,precision=bf16,async_tp={word}") for word in ("false", "true")])
        rates = replace(H100, link_bytes_per_s=link)
        plain, hidden = StepModel(plans, work("llama3-70b"), rates, System(), Constants()).predict().tensor
        assert least * plain <= hidden < most * plain


def test_parts_of_few_tokens_cost_more_than_they_hide():
    plans = ["tp=8,microbatch=1,precision=bf16" + parts for parts in ("", ",async_tp=true")]
    few = replace(work("llama3-8b"), seq_len=64)
    whole, parts = (
        StepModel(Layouts.of([Plan.parse(p) for p in plans]), few, H100, System(), Constants()).predict().total
    )
    assert parts > whole


def test_halves_of_few_tokens_cost_more_than_they_hide():
    plans = ["dp_shard=8,ep=8,microbatch=1,precision=bf16" + halves for halves in ("", ",overlap_experts=true")]
    few = replace(work("mixtral-8x7b"), seq_len=64)
    whole, halves = (
        StepModel(Layouts.of([Plan.parse(p) for p in plans]), few, H100, System(), Constants()).predict().total
    )
    assert halves > whole


def test_a_ring_of_one_rank_in_each_node_has_one_adapter():
    """With ep=8 an eighth of the experts, but each on one rank of each of eight nodes: an eighth of the bandwidth."""
    all_ranks, apart = step("dp_shard=64,zero=1,ep=1", "dp_shard=64,zero=1,ep=8", preset="mixtral-8x7b").gradients
    assert apart > all_ranks / 2


def test_a_learned_router_waits_for_its_busiest_expert():
    even, learned = (
        step("dp_shard=64,ep=8", preset="mixtral-8x7b", system=System(even_experts=given)).experts for given in (1, 0)
    )
    assert even < learned


def test_many_experts_in_small_microbatches_wait_for_the_host():
    small, large = (
        StepModel(
            Layouts.of([Plan.parse("dp_shard=8,ep=8,precision=bf16")]),
            replace(work("mixtral-8x7b"), seq_len=seq_len),
            H100, System(), Constants(),
        ).predict()
        for seq_len in (64, 32768)
    )  # fmt: skip
    assert small.host / small.total > 0.5
    assert large.host / large.total < 0.01


def matmul_s(precision: str, tp: int, **sizes: int) -> float:
    """Seconds of the matmuls of a layer of Llama 3 8B with these sizes."""
    layouts = Layouts.of([Plan.parse(f"tp={tp},precision={precision}")])
    model = LayerModel(layouts, replace(work(), **sizes), H100, System(), Constants())
    return float(np.squeeze(model.mean_layer.matmul))


@pytest.mark.parametrize("precision", FP8)
def test_only_matrices_whose_sides_fit_are_as_fast_as_fp8(precision):
    def share(**sizes: int) -> float:
        return matmul_s(precision, 4, **sizes) / matmul_s("bf16", 4, **sizes)

    assert share() < 0.85
    assert 0.95 < share(ffn_width=14336 + 8) < 1  # 3586 on a rank of four: attention alone is faster
    assert share(width=4096 + 8) == pytest.approx(1)


def test_narrow_heads_are_slower():
    wide = work()
    widths = {"key_width": 64, "value_width": 64, "kv_width": 128, "core_width": 64}
    narrow = replace(wide, heads=wide.heads * 2, kv_heads=wide.kv_heads * 2, **widths)
    layouts = Layouts.of([Plan.parse("dp_shard=64,precision=bf16")])
    of_wide, of_narrow = (StepModel(layouts, each, H100, System(), Constants()).predict() for each in (wide, narrow))
    assert of_narrow.ideal == pytest.approx(of_wide.ideal)
    assert of_narrow.attention > of_wide.attention


def test_the_bubble_of_a_pipeline_is_that_of_its_schedule():
    plans = [
        "pp=8,dp_shard=8,zero=1",
        "pp=8,dp_shard=8,zero=1,schedule=interleaved_1f1b,stages_per_rank=2",
        "pp=8,dp_shard=8,zero=1,schedule=interleaved_zero_bubble,stages_per_rank=2",
    ]
    one, interleaved, zero = step(*plans, system=System(balanced_stages=0)).bubble
    assert zero < interleaved < one


def test_faster_links_and_devices_never_cost_time():
    plan = "tp=4,pp=2,dp_shard=8,cp=1,zero=1,ep=1"
    before = float(step(plan).total[0])
    for field in ("half", "memory_bytes_per_s", "link_bytes_per_s", "nic_bytes_per_s"):
        faster = replace(H100, **{field: 2 * getattr(H100, field)})
        assert float(step(plan, rates=faster).total[0]) < before, field


def test_gradient_sums_hide_under_backward():
    shown = step("dp_replicate=64,zero=0", system=System(overlaps_gradients=0)).gradients
    hidden = step("dp_replicate=64,zero=0").gradients
    assert hidden < shown


@pytest.mark.parametrize("mesh", ["dp_shard=64", "dp_replicate=8,dp_shard=8", "dp_shard=16,pp=4"])
def test_updated_values_hide_under_the_next_forward(mesh):
    thin = replace(H100, nic_bytes_per_s=2e9)  # backward hides less than the sums alone would let it
    for zero in 1, 2:
        after, ahead = (
            step(f"{mesh},zero={zero}", rates=thin, system=System(gathers_ahead=n)).gradients for n in (0, 1)
        )
        assert 0 < ahead < after
    for other in "dp_replicate=64,zero=0", f"{mesh},zero=3":
        after, ahead = (step(other, rates=thin, system=System(gathers_ahead=n)).gradients for n in (0, 1))
        assert ahead == after


@pytest.mark.parametrize("mesh", ["dp_replicate=16,zero=0", "dp_replicate=2,dp_shard=8,zero=3"])
def test_replicas_that_send_fewer_bytes_wait_less(mesh):
    thin = replace(H100, nic_bytes_per_s=1e8)
    waits = [step(f"{mesh},sync={word}", rates=thin).gradients for word in ("exact", "bf16", "int8", "int4", "sign")]
    assert waits == sorted(waits, reverse=True) and waits[0] > waits[-1]
