"""Targets of an adapter are layers that the model has; strengths are the published ones, unless they are set."""

from __future__ import annotations

import pytest

from argosy.config.train import LoraConfig, PreferenceConfig, check_targets
from argosy.errors import UserError

MODULES = [f"blocks.{layer}.{name}" for layer in (0, 10) for name in ("attention.q", "attention.o", "experts.up")]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("all-linear", MODULES),
        ("q", ["blocks.0.attention.q", "blocks.10.attention.q"]),
        ("attention.*", [name for name in MODULES if "attention" in name]),
        ("blocks.0.*", MODULES[:3]),
        ("up", ["blocks.0.experts.up", "blocks.10.experts.up"]),
        ("[qo]", []),
        ("p", []),
    ],
)
def test_a_target_is_a_whole_name_or_has_stars(target: str, expected: list[str]) -> None:
    lora = LoraConfig(rank=1, targets=(target,))
    assert [name for name in MODULES if lora.has_target(name)] == expected


def test_a_target_without_a_layer_is_refused_with_near_names() -> None:
    with pytest.raises(UserError, match=r'"attention.qq" matches no linear layer. The nearest names are attention.q'):
        check_targets(LoraConfig(rank=1, targets=("attention.o", "attention.qq")), MODULES)
    with pytest.raises(UserError, match=r'"self_attn.q_proj" matches no linear layer. The nearest .* attention.q;'):
        check_targets(LoraConfig(rank=1, targets=("self_attn.q_proj",)), MODULES)


def test_experts_are_refused_with_dropout() -> None:
    with pytest.raises(UserError, match=r"has experts \(blocks.0.experts.up\)"):
        check_targets(LoraConfig(rank=1, dropout=0.1), MODULES)


@pytest.mark.parametrize(
    "lora", [LoraConfig(targets=("nothing",)), LoraConfig(rank=1, dropout=0.1, targets=("attention.*",))]
)
def test_what_can_be_trained_is_accepted(lora: LoraConfig) -> None:
    check_targets(lora, MODULES)


@pytest.mark.parametrize(("kind", "scale"), [("lora", 4.0), ("dora", 4.0), ("rslora", 8.0)])
def test_an_adapters_scale_follows_from_its_rank(kind: str, scale: float) -> None:
    assert LoraConfig.model_validate({"rank": 4, "alpha": 16.0, "kind": kind}).scale == scale


@pytest.mark.parametrize(("base", "columns", "size"), [("nf4", 64, 36), ("nf4", 65, 72), ("int8", 64, 68)])
def test_a_quantised_row_has_a_scale_for_each_block_that_it_begins(base: str, columns: int, size: int) -> None:
    assert LoraConfig.model_validate({"rank": 1, "base": base}).row_bytes(columns) == size


@pytest.mark.parametrize(
    ("objective", "beta", "expected"),
    [("dpo", 0.0, 0.1), ("simpo", 0.0, 2.0), ("dpo", 0.3, 0.3), ("reward", 0.0, 1.0), ("reward", 0.3, 1.0)],
)
def test_the_strength_of_an_objective(objective: str, beta: float, expected: float) -> None:
    assert PreferenceConfig(beta=beta).beta_of(objective) == expected
