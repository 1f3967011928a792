"""What a layer keeps for backward, against what autograd saves in a model that is run, and what changes it by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from argosy.config.load import load
from argosy.config.model import ModelConfig
from argosy.models.decoder import Decoder
from argosy.models.delta_net import GatedDeltaNet
from argosy.models.initialize import materialize
from argosy.plan.cost.layer_memory import LayerMemory
from argosy.plan.cost.rates import System
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.workload import Workload
from tiny import DELTA_NET, LATENT, model_config

ROWS, SEQ_LEN = 2, 64
TOKENS = ROWS * SEQ_LEN


def memory(plan: str, model: ModelConfig, **work: Any) -> LayerMemory:
    layouts = Layouts.of([Plan.parse(f"microbatch={ROWS},{plan}")])
    return LayerMemory(layouts, replace(Workload.of_model(model, SEQ_LEN, 8), **work), System())


def only(numbers: Any) -> float:
    return float(np.squeeze(numbers))


def saved_bytes(model: ModelConfig, dtype: torch.dtype, frozen: tuple[str, ...] = ()) -> int:
    """Memory that autograd holds after forward, without weights; delta-nets recompute nothing. `frozen`: words in names
    of parameters."""
    decoder = Decoder(model, dtype)
    materialize(decoder, model, torch.device("cpu"), 0)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(not any(word in name for word in frozen))
    for module in decoder.modules():
        if isinstance(module, GatedDeltaNet):
            module.recomputes = False
    weights = {held.untyped_storage().data_ptr() for held in (*decoder.parameters(), *decoder.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.arange(TOKENS).view(ROWS, SEQ_LEN)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = decoder(tokens, tokens)
    assert loss.requires_grad
    return sum(storage.nbytes() for place, storage in saved.items() if place not in weights)


EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 16, "experts_per_token": 2}}
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "dense": ({}, 0.01),
    "one key head": ({"kv_heads": 1}, 0.01),
    "norms of queries and keys": ({"qk_norm": True}, 0.02),
    "norms around": ({"norms": {"place": "around"}}, 0.01),
    "parallel": ({"norms": {"place": "parallel"}}, 0.01),
    "LayerNorm": ({"norms": {"kind": "layer"}}, 0.02),
    "gated attention": ({"attention": {"gate": True}}, 0.01),
    "latent attention": (LATENT, 0.03),
    "experts": (EXPERTS, 0.05),
}
"""What is left out: a number of each norm and token, which counts in heads and layers as narrow as these."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_an_eager_layer_keeps_what_autograd_saves(name: str, precision: str) -> None:
    keys, error = MODELS[name]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    one, two = (saved_bytes(model_config(**keys, layers=layers), dtype) for layers in (1, 2))
    planned = memory(f"precision={precision},compile=false", model_config(**keys)).kept
    assert only(planned) == pytest.approx(two - one, rel=error)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_delta_net_keeps_less_where_its_convolutions_and_norms_are_frozen(precision: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = model_config(attention={"layers": ["linear"]}, delta_net=DELTA_NET)
    saved, planned = [], []
    for frozen, trained in ((), 1), (("conv", "norm"), 0):
        one, two = (saved_bytes(model.model_copy(update={"layers": layers}), dtype, frozen) for layers in (1, 2))
        saved.append(two - one)
        layer = memory(f"precision={precision},compile=false", model, trained_dense=trained, trained_norms=trained)
        planned.append(only(layer.kept + TOKENS * layer.delta_between))
    # Here nothing is recomputed: frozen kernels' streams are gone too, with rows that 1, 2 and 3 tokens are padded by.
    streams = 2 * model.delta_net.key_heads * model.delta_net.key_width
    streams += model.delta_net.value_heads * model.delta_net.value_width
    besides = streams * dtype.itemsize * (TOKENS + ROWS * 6)
    assert planned[0] - planned[1] + besides == pytest.approx(saved[0] - saved[1], rel=0.01)


def test_layers_that_recompute_passes_over_keep_what_they_have() -> None:
    """The first of five layers and the last are recomputed; of layers that all have experts if their number is odd,
    two in place of every second one."""
    model = model_config(**EXPERTS, layers=5)
    experts, dense = (memory("precision=bf16", model, moe_layers=n) for n in (5, 0))
    again = memory("precision=bf16,recompute=full,recompute_every=4", model)
    assert only(again.kept) == pytest.approx(only(2 * again.hidden_bytes + 3 * experts.kept) / 5)
    turns = model_config(moe={**EXPERTS["moe"], "every": 2}, layers=4)
    every_second = {n: memory(f"precision=bf16,recompute={n},recompute_every=2", turns) for n in ("full", "selective")}
    assert only(every_second["full"].kept) == pytest.approx(only(again.hidden_bytes + experts.kept) / 2)
    selective = memory("precision=bf16,recompute=selective", model, moe_layers=0)
    assert only(every_second["selective"].kept) == pytest.approx(only(selective.kept + experts.kept) / 2)
    # No layer is computed again before the last one, which is passed over, has given up what it kept.
    assert only(every_second["full"].working) == pytest.approx(only(dense.working))


def test_a_recomputed_layer_keeps_its_input_and_backward_needs_the_rest_again() -> None:
    model = model_config(layers=4)
    whole, again = memory("precision=bf16", model), memory("precision=bf16,recompute=full", model)
    layer_input = TOKENS * model.width * 2
    assert only(again.kept) == layer_input
    assert only(again.working) - only(whole.working) == pytest.approx(only(whole.kept) - layer_input)
    some = memory("precision=bf16,recompute=full,recompute_every=4", model)
    assert only(some.kept) == pytest.approx(layer_input / 4 + 3 / 4 * only(whole.kept))


def test_selective_recompute_keeps_the_results_of_products_and_of_attention() -> None:
    model = model_config()
    kept = only(memory("precision=bf16,recompute=selective", model).kept)
    queries, keys_and_values = model.heads * model.head_width, 2 * model.kv_heads * model.head_width
    # The layer's input, results of q, k, v and of attention, of o, gate, up and down; and attention's log-sum-exp.
    elements = model.width + queries + keys_and_values + queries + model.width + 2 * model.ffn_width + model.width
    assert kept == TOKENS * (2 * elements + 4 * model.heads)
    assert kept < only(memory("precision=bf16", model).kept)


def test_tensor_parallel_ranks_share_all_but_what_they_gather_of_norms() -> None:
    model = model_config()
    one, four = (only(memory(f"precision=bf16,tp={tp}", model, kv_heads=4).kept) for tp in (1, 4))
    gathered = 2 * TOKENS * 2 * model.width * (1 - 1 / 4)
    assert four == pytest.approx((one / 4) + gathered)


def test_offloaded_activations_are_those_that_are_kept_without_cast_weights() -> None:
    model = model_config()
    for plan in ("precision=bf16", "precision=fp32,compile=false"):
        away = memory(f"{plan},offload=activations", model)
        assert only(away.moved) == pytest.approx(only(away.kept)) and only(memory(plan, model).moved) == 0
    cast, held = (
        memory(f"precision=bf16,compile=false,offload=activations{more}", model) for more in ("", ",weights=bf16")
    )
    matrices = 32 * (2 * 32 + 2 * 16) + 3 * 32 * 64  # q and o, k and v; gate, up and down
    assert only(cast.kept) - only(cast.moved) == pytest.approx(2 * matrices)
    assert only(held.kept) == pytest.approx(only(held.moved))


def test_dora_squares_a_stack_of_experts_and_keeps_their_lengths_by_token() -> None:
    model = {"preset": "mixtral-8x7b", "layers": 2}
    dora, plain = (
        Workload.of(load("demo", {**{f"model.{key}": value for key, value in model.items()}, "lora.rank": 4,
                                  "lora.kind": kind, "data.seq_len": 64}))
        for kind in ("dora", "lora")
    )  # fmt: skip
    outputs = (4096 + 2 * 1024 + 4096) + 2 * 2 * (2 * 14336 + 4096)  # of attention; of two experts, and their lengths
    assert (plain.adapter_kept, dora.adapter_kept) == (0, outputs)
    layouts = Layouts.of([Plan.parse("precision=bf16,compile=false")])
    assert only(LayerMemory(layouts, dora, System()).working) > 8 * 8 * 4096 * 14336, "in fp32, and squared"
