"""Every rule refuses with the values and the rule, one plan or many at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_plans import ANY_PLAN, any_run, run
from argosy.plan import rules
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.rules import RULES, breaks_any, first_problem

SITES = {"sites": [{"name": "A"}, {"name": "B"}]}


CASES: list[tuple[rules.Rule, str, dict[str, Any], str]] = [
    (rules.batch_is_dealt_out, "dp_replicate=2,dp_shard=3", {}, "8 is not a multiple of 6 (6 data-parallel ranks x"),
    (rules.batch_is_dealt_out, "dp_shard=2,microbatch=3", {}, "plan.microbatch = 3). Try 6 or 12."),
    (rules.batch_is_dealt_out, "dp_shard=16", {}, "Try 16."),
    (rules.batch_is_dealt_out, "dp_replicate=2,shares=2:1", {}, "multiple of 3 (3 portions of plan.shares = 2:1 x"),
    (rules.shares_are_of_ranks, "tp=2,shares=3:1", {}, "one data-parallel rank, which has all of it. Leave it out."),
    (rules.shares_are_of_ranks, "dp_replicate=4,shares=3:1:4", {}, "has 3 numbers, which do not divide the 4 data-"),
    (
        rules.ranks_that_gather_together_are_alike,
        "dp_replicate=2,dp_shard=2,zero=3,shares=3:1:2:2",
        {},
        "with plan.zero = 3: ranks that gather each layer's parameters together, dp_shard = 2 of them, run as many",
    ),
    (
        rules.ranks_that_gather_together_are_alike,
        "dp_shard=2,ep=2,zero=1,shares=3:1",
        {"model": {"moe": {"experts": 8}}},
        "with plan.ep = 2: ranks that exchange tokens",
    ),
    (rules.stages_have_the_layers, "layers=4", {}, "plan.layers = 4 with plan.pp = 1"),
    (rules.stages_have_the_layers, "pp=2,layers=1:2:1", {}, "has 3 numbers, and the pipeline has 2 stages"),
    (rules.stages_have_the_layers, "pp=2,layers=3:2", {}, "adds up to 5, and model.layers = 4"),
    (
        rules.schedule_admits_every_share,
        "pp=2,dp_replicate=2,shares=7:1",
        {},
        "gives pipelines 7, 1 microbatches, and plan.schedule = 1f1b with plan.pp = 2 cannot run 1: it takes at least",
    ),
    (
        rules.heads_are_dealt_out,
        "tp=3",
        {},
        "plan.tp = 3 does not divide model.heads = 4: each rank computes as many heads. Try plan.tp = 2 or 4.",
    ),
    (
        rules.heads_are_dealt_out,
        "tp=4",
        {"model": {"heads": 12, "kv_heads": 6}},
        "plan.tp = 4 and model.kv_heads = 6: one must divide the other",
    ),
    (
        rules.heads_are_dealt_out,
        "tp=4",
        {"model": {"heads": 12, "kv_heads": 4, "attention": {"kv_heads": [4, 4, 6]}}},
        "plan.tp = 4 and model.attention.kv_heads = 6 (layer 2): one must divide the other, so that each rank has as "
        "many key/value heads, or shares one. Try plan.tp = 2 or 12.",
    ),
    (
        rules.heads_are_dealt_out,
        "tp=4",
        {"model": {"heads": 8, "kv_heads": 2, "attention": {"heads": [8, 6]}}},
        "plan.tp = 4 does not divide model.attention.heads = 6 (layer 1)",
    ),
    (
        rules.feed_forward_is_dealt_out,
        "tp=4",
        {"model": {"ffn_widths": [64, 66]}},
        "plan.tp = 4 does not divide model.ffn_widths = 66 (layer 1).",
    ),
    (
        rules.ulysses_has_heads,
        "cp=4,context=ulysses",
        {"model": {"heads": 8, "kv_heads": 4, "attention": {"kv_heads": [4, 2], "heads": [8, 6]}}},
        "6 heads and 2 key/value heads on each of plan.tp = 1 ranks, model.attention.kv_heads = 2 (layer 1)",
    ),
    (
        rules.delta_heads_are_dealt_out,
        "tp=2,cp=2",
        {"model": {"attention": {"layers": ["linear"]}, "delta_net": {"key_heads": 6, "value_heads": 6}}},
        "plan.tp x cp = 4 must divide model.delta_net.key_heads = 6. Try [1, 2, 3, 6].",
    ),
    (
        rules.feed_forward_is_dealt_out,
        "tp=4",
        {"model": {"ffn_width": 66}},
        "plan.tp = 4 does not divide model.ffn_width = 66",
    ),
    (rules.tokens_are_dealt_out, "cp=3", {}, "data.seq_len = 64 is not a multiple of 6 = 2 x plan.cp"),
    (
        rules.tokens_are_dealt_out,
        "tp=4",
        {"data": {"seq_len": 62}},
        "a multiple of 4 = plan.tp = 4. Try data.seq_len = 60.",
    ),
    (
        rules.ulysses_has_heads,
        "cp=4,tp=2,context=ulysses",
        {},
        "plan.context = ulysses with plan.cp = 4: 2 heads and 1 key/value heads on each of plan.tp = 2 ranks",
    ),
    (rules.every_stage_has_a_layer, "pp=8", {}, "schedule 1f1b makes 8 stages, and model.layers = 4"),
    (rules.every_stage_has_a_layer, "pp=4,schedule=zbv,compile=false", {}, "schedule zbv makes 8 stages"),
    (
        rules.schedule_is_of_several_stages,
        "pp=2,schedule=interleaved_1f1b,stages_per_rank=1",
        {},
        "plan.stages_per_rank = 1 with schedule interleaved_1f1b",
    ),
    (rules.schedule_admits_the_microbatches, "pp=4,microbatch=4", {}, "plan.pp = 4 cannot run 2 microbatches a step"),
    (
        rules.schedule_admits_the_microbatches,
        "pp=2,schedule=dualpipev,microbatch=4",
        {},
        "at least 4, its stages. Try plan.microbatch = 2 or less.",
    ),
    (
        rules.schedule_admits_the_microbatches,
        "pp=4,microbatch=8",
        {"train": {"global_batch": 8}},
        "Try plan.microbatch = 2 or",
    ),
    (
        rules.schedule_admits_the_microbatches,
        "pp=2,schedule=interleaved_1f1b",
        {"train": {"global_batch": 5}},
        "cannot run 5 microbatches a step (train.global_batch / data-parallel ranks / plan.microbatch): try 4 or 6.",
    ),
    (rules.split_backward_is_eager, "pp=2,schedule=zbv", {}, "which compiled blocks cannot. Add compile=false."),
    (
        rules.split_backward_is_eager,
        "pp=2,schedule=zbv,compile=false",
        {"model": {"mtp": {"modules": 1}}},
        "which torch cannot with model.mtp.modules = 1. Use schedule=interleaved_1f1b.",
    ),
    (
        rules.split_backward_is_eager,
        "pp=2,schedule=zbv,compile=false,recompute=selective",
        {},
        "plan.schedule = zbv splits backward, and recompute=selective keeps",
    ),
    (
        rules.messages_that_are_hidden_travel,
        "dp_shard=2,overlap_experts=true",
        {},
        "plan.overlap_experts = true with plan.ep",
    ),
    (rules.messages_that_are_hidden_travel, "dp_shard=2,async_tp=true", {}, "plan.async_tp = true with plan.tp = 1"),
    (rules.messages_of_fsdp_are_sent, "dp_shard=2,zero=2,user_buffers=true", {}, "and there are none. Leave it out."),
    (
        rules.products_that_exchange_are_whole,
        "tp=2,precision=fp8,async_tp=true",
        {},
        "plan.async_tp = true with precision = fp8: a product",
    ),
    (
        rules.products_that_exchange_are_whole,
        "tp=2,recompute=selective,async_tp=true",
        {},
        "plan.async_tp = true with recompute = selective: a",
    ),
    (
        rules.products_that_exchange_are_whole,
        "pp=2,tp=2,schedule=zbv,compile=false,async_tp=true",
        {},
        "plan.async_tp = true with schedule = zbv",
    ),
    (
        rules.number_formats_go_together,
        "precision=fp8",
        {"model": {"moe": {"experts": 8}}},
        "plan.precision = fp8 with experts",
    ),
    (
        rules.messages_of_fsdp_are_sent,
        "precision=fp8_rowwise,fp8_gather=true",
        {},
        "plan.fp8_gather = true is for messages of zero=3",
    ),
    (
        rules.number_formats_go_together,
        "dp_shard=2,precision=fp8,fp8_gather=true",
        {},
        "plan.precision = fp8 with fp8_gather = true: only fp8_rowwise",
    ),
    (
        rules.number_formats_go_together,
        "precision=fp8_blockwise",
        {"model": {"moe": {"experts": 8}}},
        "plan.precision = fp8_blockwise with experts: in eight bits, theirs have a scale for each row",
    ),
    (
        rules.number_formats_go_together,
        "precision=mxfp8,microbatch=2",
        {"data": {"seq_len": 24}},
        "plan.precision = mxfp8 with 48 tokens of a microbatch on a rank: gradients of weights are sums of 32",
    ),
    (rules.adapters_have_plain_products, "precision=fp8", {"lora": {"rank": 4}}, "its layers know no adapters"),
    (rules.adapters_have_plain_products, "tp=2,async_tp=true", {"lora": {"rank": 4}}, "Try async_tp=false."),
    (
        rules.number_formats_go_together,
        "precision=mxfp8",
        {"model": {"moe": {"experts": 8}}},
        "plan.precision = mxfp8 with experts: in eight bits, theirs have a scale",
    ),
    (rules.number_formats_go_together, "precision=fp16,weights=bf16", {}, "plan.weights = bf16 with precision = fp16"),
    (
        rules.recomputed_experts_are_gathered_alike,
        "pp=2,dp_shard=2,ep=2,recompute=selective",
        {"model": {"moe": {"experts": 8}}},
        "Use recompute=full or none, or zero=2.",
    ),
    (rules.experts_are_dealt_out, "dp_shard=2,ep=2", {}, "plan.ep = 2, and the model has no experts"),
    (
        rules.experts_are_dealt_out,
        "dp_shard=4,ep=4",
        {"model": {"moe": {"experts": 6}}},
        "plan.ep = 4 does not divide model.moe.experts = 6. Try plan.ep = 3 or 6.",
    ),
    (
        rules.experts_are_dealt_out,
        "dp_shard=2,ep=4",
        {"model": {"moe": {"experts": 8}}},
        "plan.ep = 4 does not divide dp_shard x cp = 2. Try plan.ep = 2.",
    ),
    (rules.compressed_sums_have_replicas, "dp_shard=2,sync=bf16", {}, "plan.sync = bf16 with plan.dp_replicate = 1"),
    (
        rules.sums_that_are_checked_are_exact_and_ours,
        "dp_replicate=2,sync=bf16",
        {"resilience": {"check_collectives": True}},
        "resilience.check_collectives = true with plan.sync = bf16",
    ),
    (
        rules.sums_that_are_checked_are_exact_and_ours,
        "dp_shard=2,zero=3",
        {"resilience": {"check_collectives": True}},
        "resilience.check_collectives = true with plan.zero = 3: FSDP2",
    ),
    (
        rules.replicas_that_replay_are_whole,
        "dp_replicate=2,tp=2",
        {"resilience": {"replay_check_every_steps": 5}},
        "only whole replicas of a model without experts",
    ),
    (
        rules.tiers_divide_the_replicas,
        "dp_replicate=4,sum_inside=3",
        {},
        "plan.sum_inside = 3 has to divide the plan's 4 replicas of the state into two groups or more",
    ),
    (rules.tiers_divide_the_replicas, "dp_replicate=4,sum_inside=4", {}, "Try 2."),
    (rules.tiers_divide_the_replicas, "dp_replicate=8,sum_inside=2,sum_between=3", {}, "Try 4."),
    (rules.tiers_divide_the_replicas, "dp_shard=4,sum_inside=2", {}, "plan's 1 replica of"),
    (rules.tiers_divide_the_replicas, "dp_replicate=4,sum_between=2", {}, "the first tier is sum_inside. Name it so."),
    (
        rules.tiers_hold_whole_sets_of_experts,
        "dp_shard=24,zero=0,ep=4,sum_inside=6",
        {"model": {"moe": {"experts": 4}}, "train": {"global_batch": 24}},
        "Try sum_inside = 4.",
    ),
    (rules.sites_agree_now_and_then, "sync=async", {}, "they are its workers. Name two or more"),
    (rules.sites_agree_now_and_then, "sync=diloco", {}, "plan.sync = diloco, and the run has no [[sites]]"),
    (rules.sites_agree_now_and_then, "dp_shard=2", SITES, "sites agree by sync=diloco, sync=local or sync=async"),
    (rules.asynchronous_gradients_have_no_loss_scale, "sync=async,precision=fp16", SITES, "Try precision=bf16 or fp32"),
    (
        rules.sites_have_no_state_but_weights,
        "sync=local",
        {**SITES, "model": {"moe": {"experts": 4, "balance": "bias"}}},
        'Use balance = "aux".',
    ),
    (
        rules.servers_train_all_weights_and_score_no_tasks,
        "sync=async",
        {**SITES, "train": {"frozen": ["embedding"]}},
        "not supported with plan.sync = async. Remove it",
    ),
]


@pytest.mark.parametrize(("rule", "plan", "sections", "words"), CASES, ids=[f"{c[0].__name__}-{c[1]}" for c in CASES])
def test_a_rule_refuses_with_the_values_and_what_they_break(rule, plan, sections, words):
    problem = rule(Plan.parse(plan), run(**sections))
    assert problem is not None and words in problem
    assert first_problem(Plan.parse(plan), run(**sections)) == problem  # and no rule before it is broken too


def test_no_rule_is_without_a_case():
    assert {rule for rule, *_ in CASES} == set(RULES)


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "tp=4",  # more ranks than key/value heads
        "cp=2,tp=2",
        "cp=4,context=ulysses",
        "cp=2,tp=2,context=ulysses",
        "pp=4",
        "pp=2,dp_replicate=2,dp_shard=2",
        "pp=2,schedule=gpipe,microbatch=8",
        "pp=2,schedule=interleaved_1f1b",
        "pp=2,schedule=dualpipev,compile=false",
        "dp_replicate=4,sum_inside=2",
        "dp_replicate=2,dp_shard=4,zero=0,sum_inside=2,sum_between=2",
        "schedule=zbv,stages_per_rank=1",  # without a pipeline, a schedule says nothing
    ],
)
def test_a_plan_that_breaks_no_rule_has_no_problem(plan):
    assert first_problem(Plan.parse(plan), run()) is None


@settings(deadline=None, max_examples=60)
@given(st.lists(ANY_PLAN, min_size=1, max_size=20), any_run())
def test_rules_say_of_many_plans_what_they_say_of_each(plans, run_):
    broken = np.broadcast_to(breaks_any(Layouts.of(plans), run_), len(plans))
    assert broken.tolist() == [first_problem(plan, run_) is not None for plan in plans]
