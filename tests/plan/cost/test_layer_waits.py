"""The waits of a layer by hand: messages of the published layouts over links as fast as the data sheet says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from argosy.plan.cost.constants import Constants
from argosy.plan.cost.layer_waits import HOST_LINK, LayerWaits, WaitModel
from argosy.plan.cost.rates import Rates, System
from argosy.plan.hardware.devices import find_device
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.workload import Workload

LINK, NIC = 100e9, 10e9
RATES = replace(Rates.of_device(find_device("h100")), link_bytes_per_s=LINK, nic_bytes_per_s=NIC, node=8)
NOW = 1e-15
"""Of a latency: constants are positive."""
ALONE = Constants(
    link=1, nic=1, latency=NOW, hop=NOW, exposed_tensor=1, exposed_experts=1, exposed_context=1, exposed_pipeline=1,
    exposed_gradients=1, imbalance=1,
)  # fmt: skip
"""Nothing but bytes over the link's rate."""
DENSE = Workload(
    layers=4, width=1024, heads=8, kv_heads=2, key_width=128, value_width=128, kv_width=256, core_width=128,
    ffn_width=4096, widest_ffn=4096, ffn_matrices=3, vocab_size=32000, tied=0, seq_len=512,
    global_batch=64, attention_span=256,
)  # fmt: skip
EXPERTS = replace(DENSE, moe_layers=4, experts=8, experts_per_token=2, expert_ffn_width=256, widest_ffn=0, ffn_width=0)
TOKENS = 2 * 512
"""Of a microbatch of two rows."""
BF16 = 2


def waits(plan: str, work: Workload = DENSE, system: System | None = None, **rates: Any) -> LayerWaits:
    layouts = Layouts.of([Plan.parse(f"microbatch=2,precision=bf16,{plan}")])
    model = WaitModel(layouts, work, replace(RATES, **rates), system or System(), ALONE)
    return model.waits


def seconds(value: Any) -> float:
    return float(np.squeeze(value))


@pytest.mark.parametrize(("plan", "sums"), [("tp=4", 4), ("tp=4,recompute=full", 6), ("tp=1", 0)])
def test_tensor_parallel_ranks_sum_twice_in_each_direction(plan, sums):
    """Shoeybi et al. 2019, section 3: two all-reduces in forward, two in backward, and recomputing makes two more.

    Each passes 2 (n - 1) / n of the hidden states over a rank's link (Thakur et al. 2005).
    """
    message = TOKENS * 1024 * BF16
    assert seconds(waits(plan).tensor) == pytest.approx(sums * 2 * 3 / 4 * message / LINK, abs=1e-12)


def test_over_nodes_a_ring_goes_by_the_adapters_of_all_its_ranks_there():
    message, slower = TOKENS * 1024 * BF16, 8 * NIC  # eight ranks of sixteen in a node
    assert seconds(waits("tp=16", replace(DENSE, heads=16, kv_heads=16)).tensor) == pytest.approx(
        4 * 2 * 15 / 16 * message / slower
    )


def test_a_ring_passes_keys_and_values_round_and_their_gradients_back():
    """Liu et al. 2023: n - 1 blocks in forward and as many in backward, n of their gradients, in fp32 here."""
    found = waits("cp=4", replace(DENSE, attention_span=1e-9))  # no attention to hide them
    block = TOKENS / 4 * 2 * 2 * 128 * BF16
    one_way = 2 * 3 * block / LINK + 4 * 2 * block / LINK
    assert seconds(found.context) == pytest.approx(2 * one_way, rel=1e-6)  # none of it is hidden, exposed besides


def test_a_ring_under_long_attention_shows_its_exposed_share_alone():
    long = replace(DENSE, attention_span=1e6)
    exposed = replace(ALONE, exposed_context=0.25)
    model = WaitModel(Layouts.of([Plan.parse("cp=4,microbatch=2,precision=bf16")]), long, RATES, System(), exposed)
    block = TOKENS / 4 * 2 * 2 * 128 * BF16
    assert seconds(model.waits.context) == pytest.approx(0.25 * (2 * 3 + 4 * 2) * block / LINK)


def test_ulysses_exchanges_queries_keys_values_and_results():
    """Jacobs et al. 2023: an all-to-all of each, in forward and in backward."""
    message = TOKENS / 2 * (2 * 8 + 2 * 2) * 128 * BF16
    assert seconds(waits("cp=2,context=ulysses").context) == pytest.approx(2 * message / 2 / LINK)


@pytest.mark.parametrize(
    ("plan", "system", "share"),
    [
        ("ep=4", System(even_experts=1), 1.0),
        ("ep=4", System(even_experts=1, overlaps_experts=1), 0.25),
        ("ep=4,recompute=full", System(even_experts=1), 1.5),
    ],
)
def test_tokens_go_to_their_experts_and_come_back_in_each_direction(plan, system, share):
    """Of two copies of a token three quarters leave the rank, there and back, in forward and in backward."""
    message = TOKENS * 2 * 1024 * BF16
    found = waits(f"dp_shard=4,{plan}", EXPERTS, system)
    assert seconds(found.experts) == pytest.approx(share * 4 * message * 3 / 4 / LINK)


def test_a_token_crosses_the_network_once_for_each_node_where_software_sends_it_so():
    """Of k copies to n nodes at random n (1 - (1 - 1/n)^k) nodes get one: 1.5 of 2 for two nodes."""
    every, once = (
        seconds(
            waits("dp_shard=16,ep=16", replace(EXPERTS, experts=16), System(even_experts=1, sends_once=given)).experts
        )
        for given in (0, 1)
    )
    message = TOKENS * 2 * 1024 * BF16
    assert every == pytest.approx(4 * message / 2 / NIC)
    assert once == pytest.approx(4 * message / 2 / NIC * 1.5 / 2)


def test_zero_3_gathers_twice_and_scatters_gradients_once():
    """Rajbhandari et al. 2020, section 7.2.2; weights in bf16, gradients in fp32, of whole layers."""
    parameters = 1024 * (8 * 128 + 2 * 256 + 8 * 128) + 3 * 1024 * 4096
    shown = System(overlaps_gradients=0, sums_once=0)
    found = seconds(waits("dp_shard=8", system=shown).gathered)
    assert found == pytest.approx((2 * BF16 + 4) * 7 / 8 * parameters / LINK, rel=0.01)  # and norms
    assert seconds(waits("dp_shard=8,zero=2", system=shown).gathered) == 0
    assert seconds(waits("dp_shard=8").gathered) < found


def test_gradients_of_several_microbatches_are_scattered_once():
    each, once = (
        seconds(waits("dp_shard=8", system=System(overlaps_gradients=0, sums_once=given)).gathered) for given in (0, 1)
    )
    assert once / each == pytest.approx((2 * BF16 + 4 / 4) / (2 * BF16 + 4))  # 64 rows on 8 ranks, two at a time


def test_activations_go_to_the_host_and_come_back_by_its_link():
    plan = "offload=activations,recompute=full"
    layer_input = TOKENS * 1024 * BF16
    for rate, is_hidden in ((32e9, True), (1e6, False)):
        moved = layer_input / (HOST_LINK * rate)
        found = seconds(waits(plan, host_link_bytes_per_s=rate).offload)
        assert found == pytest.approx(moved, rel=1e-6) if is_hidden else found == pytest.approx(2 * moved, rel=0.01)
    assert seconds(waits("recompute=full").offload) == 0


def test_other_axes_take_wires_only_where_the_network_is_known():
    model = WaitModel(Layouts.of([Plan.parse("tp=4,dp_shard=2")]), DENSE, RATES, System(), ALONE)
    assert seconds(model.taken_s(model.shard_group)) == 0
