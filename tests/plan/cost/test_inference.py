"""The model of serving: published cache sizes, rooflines, what no roofline has, and requests that share a replica."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.inference import (
    Draft,
    ReplicaCut,
    ServingLoad,
    ServingModel,
    ServingOptions,
    formats_of,
)
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.serving_constants import ServingConstants, ServingEngine
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import find_device

KIB = 1024
IDEAL = ServingConstants(
    **dict.fromkeys(("bandwidth", "cache", "matmul", "narrow", "experts", "attention", "link"), 1.0),
    **dict.fromkeys(
        ("half_tokens", "pointwise", "sum_s", "sum_hops", "nic_s", "library_s", "layer_s", "moe_layer_s"), 1e-12
    ),
    **dict.fromkeys(("pass_s", "sequence_s", "eager_layer_s", "request_s", "burst"), 1e-12),
)
"""Nothing but rooflines."""


def model_of(
    model: str,
    cluster: str,
    tp: int = 1,
    pp: int = 1,
    weights: str = "bf16",
    cache: str = "16",
    constants: ServingConstants = IDEAL,
    draft: Draft | None = None,
    experts: int = 0,
    **options: float,
) -> ServingModel:
    run = load(None, {"model.preset": model, "data.seq_len": 4096, "train.global_batch": 8})
    machines = Cluster.parse(cluster)
    costs = CostModel.of(run, machines)
    formats = formats_of(machines.device, costs.rates, weights, cache)
    cut = ReplicaCut(tp, pp, experts)
    return ServingModel(
        costs.workload, costs.rates, cut, formats, constants, draft=draft, options=ServingOptions(**options)
    )


@pytest.mark.parametrize(
    ("model", "cluster", "cut", "of_token"),
    [
        ("llama3-8b", "1xh100", (1, 1), 128 * KIB),  # 32 layers x 8 heads x 128 x 2 x 2 bytes
        ("llama3-70b", "8xh100", (8, 1), 40 * KIB),  # 80 layers x 1 of 8 heads x 128 x 2 x 2 bytes
        ("deepseek-v3", "16xh200", (1, 16), 70_272 / 16),  # 70 KB a token (DeepSeek-AI 2025, table 1)
        # 39 layers with windows of 129, and 9 without; 8 or 4 heads of 192 + 128 numbers, of 2 bytes.
        ("mimo-v2-flash", "8xh200", (1, 1), (39 * 8 * 129 / 4096 + 9 * 4) * 320 * 2),
        ("deepseek-v3", "8xh200", (8, 1), 70_272),  # a latent is whole on every rank
    ],
)
def test_the_cache_of_a_token_is_what_is_published(
    model: str, cluster: str, cut: tuple[int, int], of_token: float
) -> None:
    assert float(model_of(model, cluster, *cut).token_cache_bytes) == pytest.approx(of_token)


def test_states_of_delta_nets_take_the_same_memory_for_any_context() -> None:
    model = model_of("qwen3-next-80b-a3b", "8xh100", tp=2)
    assert float(model.token_cache_bytes) == 12 * 1 * 256 * 2 * 2  # layers of full attention, one key/value head each
    assert float(model.state_bytes) == 36 * 16 * 128 * 128 * 4
    free = float(model.room(1000)) * (1000 * float(model.token_cache_bytes) + float(model.state_bytes))
    assert float(model.room(100_000)) == pytest.approx(free / (1e5 * 12_288 + float(model.state_bytes)))


def test_weights_are_cut_over_all_devices_of_a_replica() -> None:
    whole = float(model_of("llama3-8b", "8xh100").weights_bytes)
    assert whole == pytest.approx(2 * 8.03e9, rel=0.01)
    assert float(model_of("llama3-8b", "8xh100", 4, 2).weights_bytes) == pytest.approx(whole / 8)
    narrow = float(model_of("llama3-8b", "8xh100", weights="int4", cache="fp8").weights_bytes)
    assert 0.25 * whole < narrow < 0.4 * whole  # embedding and head stay in 16 bits


def test_one_sequence_is_decoded_as_fast_as_weights_are_read() -> None:
    """8.03e9 parameters, less the embedding, of 2 bytes, at 3.35 TB/s; the cache adds 4096 tokens."""
    read = 2 * (8.03e9 - 128_256 * 4096) + 4096 * 128 * KIB
    assert float(model_of("llama3-8b", "1xh100").decode_s(1, 4096)) == pytest.approx(read / 3.35e12, rel=0.01)


def test_a_long_prompt_is_computed_as_fast_as_matmuls_go() -> None:
    flops = 2 * (8.03e9 - 2 * 128_256 * 4096) * 8192 + 2 * 8192 * 4096 * 32 * 256 * 32  # attention attends to half
    found = float(model_of("llama3-8b", "1xh100").prefill_s(1, 8192))
    assert found == pytest.approx(flops / (989e12 * 0.8033), rel=0.03)


def test_layers_with_windows_score_no_more_of_a_prompt_than_their_windows() -> None:
    """Of 26 layers with 4 heads of 256 numbers, 22 have windows of 512: on average 480 of 4096 tokens, else 2048."""
    model = model_of("gemma3-1b", "1xh100")
    found = float(model.pass_parts(4096.0, 1.0, 2048.0, 0.0)["attention"])
    flops = 2 * 4096 * (22 * 480 + 4 * 2048) * 4 * 2 * 256
    assert found == pytest.approx(flops / (989e12 * 0.8033), rel=0.01)


def test_launches_and_small_sums_keep_many_devices_from_making_a_token_faster() -> None:
    slow = replace(IDEAL, layer_s=30e-6, sum_s=10e-6)
    one, eight = (float(model_of("llama3-8b", "8xh100", tp, constants=slow).decode_s(1, 1024)) for tp in (1, 8))
    floor = 32 * (30e-6 + 2 * 10e-6)
    assert floor < eight < one
    assert eight > one / 8 + 0.9 * floor


def test_few_sequences_read_few_experts() -> None:
    """One token goes to 8 of 256 experts, those of 64 sequences to most."""
    one, many = (float(model_of("deepseek-v3", "16xh200", 8, 2, "fp8").decode_s(n, 1024)) for n in (2, 128))
    assert many > 4 * one


def test_tokens_of_all_devices_are_gathered_where_each_has_attention_of_its_own() -> None:
    """In 58 layers 7168 numbers of 2 bytes of 1,000 tokens go to the other devices and come back, over 366 GB/s."""
    two, sixteen = (model_of("deepseek-v3", "16xh200", experts=n).pass_parts(1000, 1000, 0.0, 0.0) for n in (2, 16))
    of_device = 58 * 2 * 1000 * 7168 * 2 / 366e9
    assert float(two["exchange"]) == pytest.approx(of_device, rel=1e-3)
    assert float(sixteen["exchange"]) == pytest.approx(15 * of_device, rel=1e-3)


def test_a_sum_across_nodes_leaves_each_by_all_of_its_cards() -> None:
    across, tokens = model_of("llama3-70b", "16xa100", tp=16), 1e5
    rates, message = across.rates, 2 * tokens * across.work.width
    sent = 2 * 80 * 2 * 15 / 16 * message
    assert 8 * rates.nic_bytes_per_s < rates.link_bytes_per_s
    seconds = across.pass_parts(tokens, 1.0, 0.0, 0.0)["exchange"]
    assert float(seconds) == pytest.approx(sent / (8 * rates.nic_bytes_per_s), rel=1e-6)


def test_latent_attention_decodes_as_fast_as_heads_multiply_with_the_latent() -> None:
    many = model_of("deepseek-v3", "8xh200", weights="fp8", cache="fp8", experts=8)
    context = 256 * 4096
    flops = 2 * context * 61 * 128 * (512 + 64 + 512)
    read = context * 61 * (512 + 64) / many.rates.memory_bytes_per_s
    seconds = float(many.pass_parts(256.0, 256.0, 0.0, float(context))["attention"])
    compute = flops / float(many.rates.half * many.rates.achieved_half)
    assert compute > 1.5 * read
    assert compute < seconds < compute + read


def test_each_stage_of_a_pipeline_prepares_its_pass() -> None:
    host = replace(IDEAL, pass_s=1e-3, sequence_s=1e-5)
    one, four = (model_of("llama3-8b", "4xh100", pp=pp, constants=host) for pp in (1, 4))
    assert four.decode_s(4.0, 1000.0) - one.decode_s(1.0, 1000.0) == pytest.approx(3 * (1e-3 + 1e-5), rel=0.05)


def test_the_busiest_device_makes_the_others_wait() -> None:
    alone, dealt = (model_of("mixtral-8x7b", "4xh100", experts=n) for n in (1, 4))
    tokens = 1e6
    seconds = [float(each.pass_parts(tokens, 1.0, 0.0, 0.0)["weights"]) for each in (alone, dealt)]
    of_experts = 32 * 2 * 2 * tokens * 3 * 4096 * 14336 / float(alone.formats.flops_per_s)
    uneven = (2 * np.log(4) * 4 / 8) ** 0.5
    assert seconds[1] - seconds[0] == pytest.approx(uneven * of_experts, rel=0.01)


def test_requests_that_share_a_replica_pause_for_the_prompts_of_others() -> None:
    model = model_of("llama3-8b", "1xh100")
    fixed, steady = (model.latencies(ServingLoad(32, 1024, 256, together)) for together in (1.0, 0.0))
    alone = float(model.prefill_s(1, 1024))
    pauses = (1 - float(IDEAL.burst)) * 31 * alone
    assert float(steady.tpot_s) == pytest.approx(float(fixed.tpot_s) + pauses / 256, rel=1e-6)
    assert float(fixed.ttft_s) > 5 * float(steady.ttft_s)
    assert float(fixed.e2e_s) == pytest.approx(float(steady.e2e_s), rel=0.1)


def test_a_prompt_finds_others_before_it_as_in_a_queue() -> None:
    """Pollaczek-Khinchine, service of one length: rho / (2 (1 - rho)) of it, and half of a decode pass."""
    model = model_of("llama3-8b", "1xh100")
    found, alone = model.latencies(ServingLoad(8, 2048, 64)), float(model.prefill_s(1, 2048))
    decode = float(model.decode_s(8, 2048 + 32))
    busy = 7 * alone / (8 * alone + 63 * decode)
    assert float(found.ttft_s) == pytest.approx(alone * (1 + busy / (2 * (1 - busy))) + decode / 2, rel=1e-6)
    at_once = model.latencies(ServingLoad(8, 2048, 64, first=1.0))
    assert float(at_once.ttft_s - found.ttft_s) == pytest.approx(7 / 2 * alone, rel=1e-6)
    assert float(found.tpot_s - at_once.tpot_s) == pytest.approx(7 / 2 * alone / 64, rel=1e-6), (
        "the other half pauses it"
    )


def test_a_short_prompt_takes_as_long_as_its_kernels_are_launched() -> None:
    """Passes with prompts are no captured graph: 32 layers of 1 ms each; a long prompt hides them."""
    model = model_of("llama3-8b", "1xh100", constants=replace(IDEAL, eager_layer_s=1e-3))
    assert float(model.prefill_s(1, 64)) == pytest.approx(0.032, rel=0.01)
    assert float(model.prefill_s(8, 1024)) == pytest.approx(
        float(model_of("llama3-8b", "1xh100").prefill_s(8, 1024)), 0.02
    )
    assert float(model.decode_s(1, 64)) < 0.01


def test_without_captured_graphs_a_token_takes_as_long_as_its_kernels_are_launched() -> None:
    slow = replace(IDEAL, eager_layer_s=1e-3)
    graphs, eager = (model_of("llama3-8b", "1xh100", constants=slow, eager=eager) for eager in (0.0, 1.0))
    assert float(eager.decode_s(1, 64)) == pytest.approx(0.032, rel=0.01)
    assert float(graphs.decode_s(1, 64)) < 0.01
    assert float(eager.prefill_s(1, 64)) == float(graphs.prefill_s(1, 64))


def test_gaps_of_kernels_add_to_what_a_pass_computes() -> None:
    slow = replace(IDEAL, eager_layer_s=1e-3)
    hidden, added = (model_of("llama3-8b", "1xh100", constants=slow, eager=1.0, gaps=each) for each in (0.0, 1.0))
    without = float(model_of("llama3-8b", "1xh100").prefill_s(1, 8192))
    assert float(hidden.prefill_s(1, 8192)) < without + 0.01
    assert float(added.prefill_s(1, 8192)) == pytest.approx(without + 0.032, rel=1e-3)


def test_products_that_nobody_tuned_take_the_longer_where_computing_binds() -> None:
    """Dense ones by that factor: one token waits for its weights; experts have kernels of their own."""
    tuned, untuned = (model_of("llama3-8b", "1xh100", untuned=each) for each in (1.0, 7.0))
    assert float(untuned.decode_s(1, 64)) == pytest.approx(float(tuned.decode_s(1, 64)), rel=0.05)
    of_prompt = [float(each.pass_parts(8192, 1, 4096.0, 0.0)["weights"]) for each in (tuned, untuned)]
    assert of_prompt[1] / of_prompt[0] == pytest.approx(7, rel=0.01)
    of_experts = [
        float(model_of("mixtral-8x7b", "8xh100", 8, untuned=each).pass_parts(8192, 1, 4096.0, 0.0)["weights"])
        for each in (1.0, 7.0)
    ]
    assert 1 < of_experts[1] / of_experts[0] < 3


def test_query_heads_read_the_cache_each_for_itself_where_kernels_share_no_reads() -> None:
    """Four query heads to a key: above 512 of them in a pass, 32 of each sequence, the cache is read four times."""
    shared, apart = (model_of("llama3-8b", "1xh100", **of) for of in ({}, {"sharing_heads": 512}))

    def cache_s(model: ServingModel, sequences: int) -> float:
        return float(model.pass_parts(sequences, sequences, 0.0, 4096.0 * sequences)["attention"])

    assert cache_s(apart, 16) == cache_s(shared, 16)
    assert cache_s(apart, 17) == pytest.approx(4 * cache_s(shared, 17), rel=1e-3)
    assert float(apart.prefill_s(17, 4096)) == float(shared.prefill_s(17, 4096))


def test_engines_have_the_kernels_of_their_release() -> None:
    def of(engine: str, device: str) -> ServingOptions:
        return ServingOptions.of(ServingEngine.of(engine), find_device(device))

    old = ServingOptions(eager=1.0, gaps=1.0, sharing_heads=512, library_sums=1.0)
    assert of("vLLM 0.5", "mi250x-gcd") == old
    assert of("vLLM 0.5", "mi300x") == replace(old, untuned=7.2)
    assert of("vLLM 0.10", "mi300x") == of("vLLM 0.5", "h100") == ServingOptions()
    assert of("DeepSpeed-MII", "h100") == ServingOptions(library_sums=1.0)
    assert of("llama.cpp", "mi300x").gaps and not of("llama.cpp", "h100").eager
    sums = replace(IDEAL, library_s=1e-3)
    own, library = (
        float(model_of("llama3-8b", "8xh100", 8, constants=sums, library_sums=each).decode_s(1, 1024))
        for each in (0.0, 1.0)
    )
    assert library - own == pytest.approx(2 * 32 * 1e-3, rel=1e-3)


def test_activations_of_the_longest_pass_take_room_from_the_cache() -> None:
    """Two hidden states and three widths of a feed-forward, in 16 bits."""
    short, long = (model_of("llama3-70b", "8xh100", 8, chunk=chunk) for chunk in (8192, 65536))
    taken = (65536 - 8192) * 2 * (2 * 8192 + 3 * 28672 / 8)
    assert float(short.room(4096) - long.room(4096)) == pytest.approx(taken / float(4096 * short.token_cache_bytes))


def test_the_first_turn_of_a_fixed_batch_begins_with_all_that_it_lets_in() -> None:
    """Prompts of 128 tokens with long answers: all prompts have room at once, their whole answers have not."""
    model = model_of("llama3-8b", "1xh100")
    many = 1.5 * float(model.room(128 + 8192))
    found = model.latencies(ServingLoad(many, 128, 8192, 1.0))
    assert float(found.ttft_s) == pytest.approx(float(model.prefill_s(many, 128)))


def test_a_prompt_of_one_token_a_pass_takes_as_long_as_its_decode() -> None:
    model = model_of("llama3-8b", "1xh100")
    one, more = (float(model_of("llama3-8b", "1xh100", chunk=chunk).prefill_s(1, 512)) for chunk in (1, 64))
    assert one == pytest.approx(512 * float(model.decode_s(1, 256)), rel=0.01)
    assert more < one / 50


def test_stages_compute_several_passes_of_prompts_at_a_time() -> None:
    """The last of 8 passes leaves the last of 4 stages after 8 + 3 times of a stage."""

    def prefill_s(pp: int, chunk: int) -> float:
        return float(model_of("llama3-8b", "4xh100", pp=pp, chunk=chunk).prefill_s(1, 4096))

    assert prefill_s(4, 512) == pytest.approx(11 / 32 * prefill_s(1, 512), rel=0.01)
    assert prefill_s(4, 4096) == pytest.approx(prefill_s(1, 4096), rel=0.01)


def test_requests_without_room_wait() -> None:
    """By Little's law: twice the requests that there is room for take twice the time of one."""
    model = model_of("llama3-8b", "1xh100")
    room = float(model.latencies(ServingLoad(1, 8192, 512)).room)
    full, twice = (model.latencies(ServingLoad(n * room, 8192, 512)) for n in (1, 2))
    assert float(twice.e2e_s) == pytest.approx(2 * float(full.e2e_s))
    assert float(twice.ttft_s - full.ttft_s) == pytest.approx(float(full.e2e_s))
    assert float(twice.tokens_per_s) == pytest.approx(float(full.tokens_per_s))


def test_a_draft_that_is_right_saves_readings() -> None:
    """Three guesses of 0.8 keep 1 + 0.8 + 0.64 + 0.512 tokens of a pass that costs 1.15 of one."""
    plain, drafted = (model_of("llama3-70b", "8xh100", 8, draft=d) for d in (None, Draft(3, 0.8, 0.05)))
    assert float(plain.decode_s(1, 64) / drafted.decode_s(1, 64)) == pytest.approx(2.952 / 1.15, rel=0.02)


def test_formats_that_a_device_lacks_are_converted() -> None:
    machines = Cluster.parse("8xa100")
    run = load(None, {"model.preset": "llama3-8b", "data.seq_len": 4096, "train.global_batch": 8})
    rates = CostModel.of(run, machines).rates
    narrow, half = (formats_of(machines.device, rates, weights, "16") for weights in ("fp8", "bf16"))
    assert narrow.flops_per_s == half.flops_per_s
    assert (narrow.weight_bytes, half.weight_bytes) == (1.0, 2.0)
    caches = [formats_of(machines.device, rates, "fp32", cache).cache_bytes for cache in ("16", "fp8")]
    assert caches == [4.0, 1.0]


def test_four_bits_are_multiplied_in_16_where_there_are_matmuls_of_8_alone() -> None:
    """As vLLM and TensorRT-LLM do on Hopper (the latter's deployment guide for GPT-OSS: H200, BF16 times MXFP4)."""
    device = Cluster.parse("8xh200").device
    rates = Rates.of_device(device, "fp8")
    four, eight, half = (formats_of(device, rates, weights, "16") for weights in ("fp4", "fp8", "bf16"))
    assert (four.flops_per_s, four.narrow) == (half.flops_per_s, 0.0)
    assert eight.flops_per_s > half.flops_per_s


def test_columns_and_numbers_agree() -> None:
    model = model_of("mixtral-8x7b", "8xh100", 4)
    sequences = np.array([1.0, 7.0, 64.0])
    column = model.latencies(ServingLoad(sequences, 512, 128))
    for i, n in enumerate(sequences):
        assert float(model.latencies(ServingLoad(n, 512, 128)).e2e_s) == pytest.approx(column.e2e_s[i])
