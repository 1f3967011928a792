"""The table of parameters says what the model's modules have, and how ranks share it."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.config.attention import MLAConfig
from argosy.config.model import ModelConfig, MoEConfig
from argosy.models.decoder import Decoder
from argosy.plan.parameters import Parameter, Stage, Table, block_table, inside, parameter_table, state_table

SMALL = ModelConfig(layers=4, width=64, heads=8, kv_heads=2, head_width=8, ffn_width=96, vocab_size=203)
LATENT = MLAConfig(kv_rank=20, q_rank=36, rope_width=8, nope_width=16, value_width=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything dense": {"tie_embeddings": True, "attention_bias": True, "qk_norm": True},
    "qwen2": {"qkv_bias": True},
    "experts": {"moe": MoEConfig(experts=4, shared_experts=2, first_dense_layers=1)},
    "latent": {"kv_heads": 8, "mla": LATENT, "attention_bias": True},
    "latent, whole queries": {"kv_heads": 8, "mla": LATENT.model_copy(update={"q_rank": 0})},
}
STAGES = [None, Stage(range(2), last=False), Stage([1, 3], first=False, last=False), Stage(range(3, 4), first=False)]


@pytest.mark.parametrize("stage", STAGES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_modules_of_each_stage_have_these_parameters_in_this_order(variant, stage):
    model = SMALL.model_copy(update=variant)
    table = [(name, parameter.shape) for name, parameter in parameter_table(model, stage).items()]
    assert table == [
        (name, tuple(parameter.shape)) for name, parameter in Decoder(model, stage=stage).named_parameters()
    ]


@pytest.mark.parametrize("balance", ["aux", "bias"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_state_of_the_model_is_its_parameters_and_the_biases_of_routers(variant, balance):
    model = SMALL.model_copy(update=variant)
    model = model.model_copy(update={"moe": model.moe.model_copy(update={"balance": balance})})
    table = [(name, parameter.shape) for name, parameter in state_table(model).items()]
    assert table == [(name, tuple(weight.shape)) for name, weight in Decoder(model).state_dict().items()]


def block(tp: int = 1, **changes: Any) -> Table:
    return block_table(SMALL.model_copy(update=changes), SMALL.layers - 1, tp)


def whole_on_each_rank(table: Table) -> set[str]:
    return {name for name, parameter in table.items() if parameter.tp_dim is None}


def test_tensor_parallel_ranks_hold_norms_routers_and_what_heads_share_whole():
    norms = {"attention_norm.weight", "mlp_norm.weight"}
    assert whole_on_each_rank(block()) == norms
    assert whole_on_each_rank(block(moe=MoEConfig(experts=4, shared_experts=1))) == norms | {"mlp.router.weight"}
    latent = {"q_down.weight", "q_norm.weight", "kv_down.weight", "kv_norm.weight"}
    assert whole_on_each_rank(block(kv_heads=8, mla=LATENT)) == norms | {f"attention.{name}" for name in latent}


def test_key_and_value_are_whole_where_there_are_fewer_heads_than_ranks():
    key_and_value = {"attention.k.weight", "attention.v.weight", "attention.k.bias", "attention.v.bias"}
    assert not whole_on_each_rank(block(tp=2, attention_bias=True)) & key_and_value
    assert whole_on_each_rank(block(tp=4, attention_bias=True)) >= key_and_value


def test_a_bias_is_cut_where_the_outputs_are():
    attention = inside(block(attention_bias=True), "attention")
    assert [attention[f"{name}.bias"].tp_dim for name in "qkvo"] == [0, 0, 0, None]


def test_qwen2_has_biases_on_query_key_and_value_alone():
    biases = {name: p.tp_dim for name, p in block(qkv_bias=True).items() if name.endswith("bias")}
    assert biases == {"attention.q.bias": 0, "attention.k.bias": 0, "attention.v.bias": 0}


def test_experts_are_stacks_cut_along_their_hidden_width():
    experts = inside(block(moe=MoEConfig(experts=4, expert_ffn_width=40)), "mlp.experts")
    assert experts == {
        "gate": Parameter((4, 40, 64), 1, is_expert=True, is_linear=True),
        "up": Parameter((4, 40, 64), 1, is_expert=True, is_linear=True),
        "down": Parameter((4, 64, 40), 2, is_expert=True, is_linear=True, initial="into_residual"),
    }


def test_what_adds_to_the_residual_stream_starts_smaller_and_norms_and_biases_are_constant():
    model = SMALL.model_copy(update={"attention_bias": True, "moe": MoEConfig(experts=4, shared_experts=1)})
    initial: dict[str, set[str]] = {}
    for name, parameter in (parameter_table(model, Stage([])) | block_table(model, 0)).items():
        initial.setdefault(parameter.initial, set()).add(name)
    assert initial["into_residual"] == {"attention.o.weight", "mlp.experts.down", "mlp.shared.down.weight"}
    assert initial["ones"] == {"attention_norm.weight", "mlp_norm.weight", "norm.weight"}
    assert initial["zeros"] == {f"attention.{name}.bias" for name in "qkvo"}
