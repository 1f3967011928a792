"""The formulas agree with those of the papers. What is really sent: parallel/test_accounting."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.config.model import ModelConfig, MoEConfig
from argosy.config.schema import RunConfig
from argosy.plan.cost.cost_model import CostModel, first_of
from argosy.plan.cost.traffic import LOSS_BYTES, Traffic, axis_sizes, spanning_axis, traffic
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.parameters import parameters
from argosy.plan.plan import Plan

MODEL = ModelConfig(layers=4, width=64, heads=8, kv_heads=4, head_width=8, ffn_width=96, vocab_size=256)
P = 4 * parameters(MODEL)
"""Bytes of all parameters."""
AROUND = 4 * (2 * 256 * 64 + 64)
"""Bytes of the parameters that are in no block."""
ROWS, TOKENS = 16, 64
HIDDEN = 4 * ROWS * TOKENS * MODEL.width
"""Bytes of the whole batch's hidden states."""


def run_of(model: ModelConfig = MODEL) -> RunConfig:
    return RunConfig.model_validate(
        {"model": model.model_dump(), "data": {"seq_len": TOKENS}, "train": {"steps": 1, "global_batch": ROWS}}
    )


def sent(plan: str, rank: int = 0, model: ModelConfig = MODEL) -> Traffic:
    return traffic(Plan.parse(plan), run_of(model), rank)


def loss(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * LOSS_BYTES


def test_one_process_sends_nothing():
    assert sent("") == {}


def test_plain_data_parallelism_all_reduces_the_gradients():
    assert sent("dp_replicate=4") == {("replicate", "all_reduce"): 2 * 3 / 4 * P + loss(4)}


def test_zero_1_and_2_send_as_much_as_plain_data_parallelism():
    for zero in (1, 2):
        assert sent(f"dp_shard=4,zero={zero}") == {
            ("shard", "reduce_scatter"): 3 / 4 * P,
            ("shard", "all_gather"): 3 / 4 * P,
            ("shard", "all_reduce"): loss(4),
        }


def test_zero_3_sends_half_as_much_again_and_more_with_each_microbatch():
    one = sent("dp_shard=4,microbatch=4")
    assert one["shard", "reduce_scatter"] == 3 / 4 * P
    assert one["shard", "all_gather"] == 3 / 4 * (2 * P - AROUND), "the root keeps from forward to backward"
    assert sent("dp_shard=4,microbatch=2")["shard", "all_gather"] == 2 * one["shard", "all_gather"]


def test_zero_3_gathers_in_the_dtype_of_the_arithmetic():
    half, full = sent("dp_shard=4,precision=bf16"), sent("dp_shard=4")
    assert half["shard", "all_gather"] == full["shard", "all_gather"] / 2
    assert half["shard", "reduce_scatter"] == full["shard", "reduce_scatter"]


def test_hybrid_sharding_sends_a_share_of_the_gradients_between_replicas():
    found = sent("dp_replicate=2,dp_shard=4,microbatch=2")
    assert found["replicate", "all_reduce"] == 2 * 1 / 2 * P / 4
    assert found["shard", "reduce_scatter"] == 3 / 4 * P
    assert found["world", "all_reduce"] == loss(8)


def test_context_parallel_ranks_share_the_state():
    assert sent("cp=2,dp_shard=2,microbatch=8")["shard", "reduce_scatter"] == 3 / 4 * P


def test_uneven_rows_are_padded():
    odd = MODEL.model_copy(update={"vocab_size": 253, "tie_embeddings": True})
    even = odd.model_copy(update={"vocab_size": 256})
    assert sent("dp_shard=4,zero=1", model=odd) == sent("dp_shard=4,zero=1", model=even)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_sends_hidden_states_eight_times_a_layer(tp):
    """Korthikanti et al. 2022, section 4.2.2: as much as four all-reduces."""
    found = sent(f"tp={tp},microbatch=4")
    statistics = 8 * tp * ROWS * TOKENS
    assert found["tp", "reduce_scatter"] == (tp - 1) / tp * HIDDEN * (4 * MODEL.layers + 2)
    assert found["tp", "all_gather"] == (tp - 1) / tp * (HIDDEN * (4 * MODEL.layers + 2) + statistics)
    norms = 4 * MODEL.width * (2 * MODEL.layers + 1)
    assert found["tp", "all_reduce"] == 2 * (tp - 1) / tp * (norms + LOSS_BYTES)


def test_few_key_value_heads_are_summed_over_tensor_parallel_ranks():
    few = (
        sent("tp=8", model=MODEL)["tp", "all_reduce"]
        - sent("tp=8", model=MODEL.model_copy(update={"kv_heads": 8}))["tp", "all_reduce"]
    )
    assert few == 2 * 7 / 8 * MODEL.layers * 2 * 4 * (4 * 8) * MODEL.width


def test_lengths_of_rows_are_summed_where_ranks_have_parts_of_them():
    plain, lengths = (
        traffic(Plan.parse("tp=2,microbatch=4,recompute=full"), run_of().with_keys(lora={"rank": 4, "kind": kind}))
        for kind in ("lora", "dora")
    )
    rows = MODEL.layers * 2 * MODEL.width  # of o and down
    forwards = 4 * 2
    assert lengths["tp", "all_reduce"] - plain["tp", "all_reduce"] == rows * (4 + 8 * forwards), "and their gradients"


def test_recomputing_sends_forward_again():
    once, again = sent("tp=2"), sent("tp=2,recompute=full")
    assert again["tp", "all_gather"] - once["tp", "all_gather"] == HIDDEN / 2 * 2 * MODEL.layers
    assert again["tp", "reduce_scatter"] - once["tp", "reduce_scatter"] == HIDDEN / 2 * MODEL.layers
    around = MODEL.model_copy(update={"norms": MODEL.norms.model_copy(update={"place": "around"})})
    behind = sent("tp=2,recompute=full", model=around)["tp", "reduce_scatter"]
    assert behind - again["tp", "reduce_scatter"] == HIDDEN / 2 * MODEL.layers, "the last norm's input"
    scaled = MODEL.model_copy(update={"layer_scale": True})
    assert sent("tp=2,recompute=full", model=scaled)["tp", "reduce_scatter"] == behind, "what is scaled"
    fused = sent("tp=2,recompute=full,async_tp=true")
    assert fused["tp", "reduce_scatter"] - again["tp", "reduce_scatter"] == HIDDEN / 2 * MODEL.layers
    half = sent("tp=2,recompute=full,recompute_every=2")
    assert half["tp", "all_gather"] - once["tp", "all_gather"] == HIDDEN / 2 * MODEL.layers


@pytest.mark.parametrize("n", [2, 4])
def test_a_ring_passes_keys_and_values_twice_and_their_gradients_once(n):
    keys_and_values = 2 * 4 * (ROWS * TOKENS / n) * (4 * 8)
    found = sent(f"cp={n},zero=0,microbatch=16")
    assert found["cp", "send"] == MODEL.layers * (2 * (n - 1) + n) * keys_and_values
    assert sent(f"cp={n},zero=0,recompute=selective")["cp", "send"] == found["cp", "send"]


@pytest.mark.parametrize("plan", ["cp=2,precision=bf16", "cp=4,precision=bf16,recompute=full", "cp=4,tp=2"])
def test_the_time_of_a_ring_is_that_of_the_bytes_it_sends(plan):
    """What `step_time` lets a layer wait for is what is counted here, gradients in fp32 included."""
    laid, run = Plan.parse(f"{plan},zero=0,microbatch=16"), run_of()
    model = CostModel.of(run, Cluster.parse("8xh100")).step_model(Layouts.of([laid]))
    blocks, gradients = (float(first_of(each)) for each in model.ring_blocks)
    each = float(first_of(model.keys_and_values))
    as_gradients = each * float(model.system.ring_gradient_bytes) / float(first_of(model.activation_bytes))
    counted = sent(f"{plan},zero=0,microbatch=16")["cp", "send"]
    assert MODEL.layers * (blocks * each + gradients * as_gradients) == pytest.approx(counted)


@pytest.mark.parametrize(("plan", "tied"), [("", False), ("", True), (",tp=2", False), (",pp=2", False)])
def test_the_time_of_sums_is_that_of_the_gradients_that_are_sent(plan, tied):
    model, laid = MODEL.model_copy(update={"tie_embeddings": tied}), Plan.parse(f"dp_replicate=4,zero=0{plan}")
    costs = CostModel.of(run_of(model), Cluster.parse("8xh100"))
    timed = 4 * sum(float(first_of(each)) for each in costs.step_model(Layouts.of([laid])).summed_parameters)
    counted = traffic(laid, run_of(model), 0)["replicate", "all_reduce"]
    assert 2 * 3 / 4 * timed == pytest.approx(counted, rel=0.02), "all but norms"


def test_ulysses_sends_less_the_more_ranks_there_are():
    found = {n: sent(f"cp={n},zero=0,context=ulysses")["cp", "all_to_all"] for n in (2, 4)}
    assert found[4] / found[2] == pytest.approx((3 / 4 / 4) / (1 / 2 / 2))
    assert found[4] < sent("cp=4,zero=0")["cp", "send"]


def test_a_pipeline_sends_hidden_states_on_and_their_gradients_back():
    ends, middle = (sent("pp=4", rank)["pp", "send"] for rank in (0, 1))
    assert ends == pytest.approx(HIDDEN + loss(4), abs=loss(4))
    assert middle == pytest.approx(2 * HIDDEN, abs=loss(4))
    assert sent("pp=4", 3)["pp", "send"] == ends


def test_a_v_does_not_send_where_it_turns():
    assert sent("pp=2,schedule=zbv", 0)["pp", "send"] == 2 * HIDDEN, "from its first stage, and from its last"
    assert sent("pp=2,schedule=zbv", 1)["pp", "send"] == 2 * HIDDEN, "two stages, with a turn between them"
    assert sent("pp=2,schedule=interleaved_1f1b", 0)["pp", "send"] == 3 * HIDDEN


def test_a_pipeline_gathers_sharded_blocks_once_more_than_it_has_microbatches():
    blocks = 4 * 3 / 4 * (P - AROUND)
    found = sent("pp=2,dp_shard=4", 0)["shard", "all_gather"] + sent("pp=2,dp_shard=4", 4)["shard", "all_gather"]
    assert found == (4 + 1) * blocks / 4 + 3 / 4 * AROUND
    split = "pp=2,dp_shard=4,schedule=zbv"
    assert sent(split, 0)["shard", "all_gather"] + sent(split, 4)["shard", "all_gather"] == 3 / 4 * P


def test_the_ends_of_a_pipeline_add_up_a_tied_embedding():
    tied = MODEL.model_copy(update={"tie_embeddings": True})
    of_ranks = [sent("pp=4", rank, tied)["ends", "all_reduce"] for rank in range(4)]
    assert of_ranks == [4 * 256 * 64, 0, 0, 4 * 256 * 64]
    assert ("ends", "all_reduce") not in sent("pp=2,schedule=zbv", 0, tied)


def test_tokens_travel_to_experts_and_back_and_so_do_gradients():
    moe = MoEConfig(experts=4, experts_per_token=2, balance="none", first_dense_layers=2)
    model = MODEL.model_copy(update={"moe": moe})
    found = sent("dp_shard=4,ep=2,zero=1", model=model)
    counts = 2 * (ROWS // 4) * 4 * 8
    assert found["ep", "all_to_all"] == 1 / 2 * (2 * 4 * 2 * HIDDEN / 4 + counts)
    halves = sent("dp_shard=4,ep=2,zero=1,overlap_experts=true", model=model)
    assert halves["ep", "all_to_all"] == found["ep", "all_to_all"] + 1 / 2 * counts
    experts = 2 * 3 * 4 * moe.expert_ffn_width * 64 * 4
    assert found["expert_shard", "reduce_scatter"] == 1 / 2 * experts / 2


@pytest.mark.parametrize(
    ("plan", "spanning"),
    [("dp_shard=4", "shard"), ("dp_shard=4,zero=0", "replicate"), ("cp=4", "cp"), ("tp=2,pp=2", None), ("", None)],
)
def test_an_axis_of_all_ranks_gives_its_name_to_all_messages_between_them(plan: str, spanning: Any):
    layout = Plan.parse(plan)
    assert spanning_axis(axis_sizes(layout), layout.world_size) == spanning
    axes = {axis for axis, _ in sent(plan)}
    assert "world" not in axes if spanning else axes <= {"tp", "pp", "world"}
