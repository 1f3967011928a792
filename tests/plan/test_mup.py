"""Which widths change what: the factors of maximal update parametrization."""

from __future__ import annotations

import math
from typing import Any

import pytest

from argosy.config.load import load
from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.plan.mup import DIMS, FEW_OUTPUTS, folded_factor, initial_factor, logit_factor, query_factor, rate_factor
from argosy.plan.parameters import parameter_table, state_table

WIDE: dict[str, Any] = {
    "layers": 2, "width": 128, "heads": 8, "kv_heads": 8, "head_width": 16, "ffn_width": 320, "vocab_size": 300,
}  # fmt: skip
EXPERTS = {"experts": 4, "expert_ffn_width": 64, "shared_experts": 1, "first_dense_layers": 1, "balance": "bias"}
LATENT = {"kv_rank": 32, "q_rank": 48, "rope_width": 16, "nope_width": 16, "value_width": 16}
ALL_PARTS = WIDE | {"moe": EXPERTS, "mla": LATENT, "attention_bias": True}


def model(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate(WIDE | keys)


def factors(config: ModelConfig, rule: str = "adamw") -> dict[str, tuple[float, float]]:
    """Name in a block, or whole name -> the factors on initial values and learning rate."""
    return {
        name.split(".", 2)[-1] if name.startswith("blocks.") else name: (
            initial_factor(name, config),
            rate_factor(name, parameter.shape, rule, config),
        )
        for name, parameter in state_table(config).items()
    }


@pytest.mark.parametrize("mup", [{}, {"base_width": 128}, {"base_width": 128, "base_head_width": 16}], ids=str)
def test_the_base_model_is_what_it_is_without(mup):
    base = model(**ALL_PARTS) if not mup else model(mup=mup)
    assert set(factors(base).values()) == set(factors(base, "muon").values()) == {(1.0, 1.0)}
    assert logit_factor(base) == query_factor(base) == 1.0
    assert {folded_factor(name, base) for name in state_table(base)} == {1.0}


def test_hidden_matrices_have_one_over_the_growth_of_their_inputs():
    found = factors(model(mup={"base_width": 32, "base_ffn_width": 160}))
    by_width, by_ffn = (0.5, 0.25), (pytest.approx(2**-0.5), 0.5)
    assert found == {
        "embedding.weight": (1, 1), "head.weight": (1, 1), "norm.weight": (1, 1),
        "attention_norm.weight": (1, 1), "mlp_norm.weight": (1, 1),
        **{f"attention.{name}.weight": by_width for name in "qkvo"},
        "mlp.gate.weight": by_width, "mlp.up.weight": by_width, "mlp.down.weight": by_ffn,
    }  # fmt: skip


def test_experts_latents_biases_and_routers_have_factors_of_their_own():
    sizes = {"base_width": 32, "base_expert_ffn_width": 64, "base_kv_rank": 32, "base_q_rank": 12}
    found = factors(model(**ALL_PARTS | {"mup": sizes}))
    assert found["mlp.router.weight"] == (0.25, 0.25)  # as many outputs for every width
    assert found["mlp.router.bias"] == found["attention.kv_down.bias"] == found["attention.q_norm.weight"] == (1, 1)
    assert found["mlp.experts.gate"] == found["mlp.shared.up.weight"] == (0.5, 0.25)
    assert found["mlp.experts.down"] == found["mlp.shared.down.weight"] == (1, 1)  # experts of one width
    assert found["mlp.down.weight"] == (0.5, 0.25)  # in proportion
    assert found["attention.kv_up.weight"] == (1, 1)  # from a latent of one width
    assert found["attention.q_up.weight"] == found["attention.kv_down.weight"] == (0.5, 0.25)


@pytest.mark.parametrize("parts", [{"mtp": {"modules": 1}}, {"score": True}], ids=str)
def test_every_matrix_has_its_factor(parts):
    config = model(**ALL_PARTS | parts | {"moe": {**EXPERTS, "shared_gate": True}})
    names = {name for name, p in parameter_table(config).items() if len(p.shape) > 1}
    known = {name for name in names if set(name.split(".")) & {*DIMS, *FEW_OUTPUTS, "embedding", "head"}}
    assert known == names


def test_gates_and_scores_of_one_number_are_as_routers_and_projections_as_hidden_matrices():
    parts = {"mup": {"base_width": 32}, "mtp": {"modules": 1}}
    found = factors(model(**ALL_PARTS | parts | {"moe": {**EXPERTS, "shared_gate": True}}))
    assert found["mlp.shared_gate.weight"] == found["mlp.router.weight"] == (0.25, 0.25)
    assert found["mtp.2.projection.weight"] == (0.5, 0.25)
    assert folded_factor("mtp.2.norm.weight", model(**parts)) == folded_factor("norm.weight", model(**parts)) == 0.25
    assert factors(model(score=True, mup={"base_width": 32}))["score.weight"] == (0.25, 0.25)


def test_muons_steps_keep_the_spectral_norm_that_a_matrix_of_this_shape_has_to_move_by():
    wide, base = model(mup={"base_width": 32}), model(width=32, heads=2, kv_heads=2, ffn_width=80)
    for name, parameter in parameter_table(wide).items():
        if name.startswith("blocks") and len(parameter.shape) > 1:

            def norm_of_step(shape: tuple[int, ...], factor: float) -> float:
                return factor * 0.2 * math.sqrt(max(shape)) / math.sqrt(shape[0] / shape[1])

            at_base = norm_of_step(parameter_table(base)[name].shape, 1.0)
            here = norm_of_step(parameter.shape, rate_factor(name, parameter.shape, "muon", wide))
            assert here == pytest.approx(at_base), name


def test_attention_divides_by_the_width_of_heads_where_these_grow():
    assert query_factor(model(mup={"base_width": 32})) == 1.0
    assert query_factor(model(mup={"base_width": 32, "base_head_width": 4})) / 16**0.5 == pytest.approx(4**0.5 / 16)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model.mup.base_ffn_width": 64}, "base_ffn_width = 64 has no effect without base_width"),
        ({"model.mup.base_width": 64, "model.mup.base_kv_rank": 8}, "base_kv_rank = 8 has no effect with mla.kv_rank"),
        ({"model.mup.base_width": -1}, "model.mup.base_width"),
        ({"model.mup.width": 64}, "unknown key"),
    ],
)
def test_what_has_no_effect_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        load(None, keys)


def test_heads_of_latent_attention_do_not_grow():
    with pytest.raises(ValueError, match=r"base_head_width = 8 with mla"):
        model(**ALL_PARTS | {"mup": {"base_width": 32, "base_head_width": 8}})
