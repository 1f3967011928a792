"""Which parameter is trained how."""

from __future__ import annotations

import pytest

from argosy.config.model import ModelConfig
from argosy.config.optimizer import OptimizerConfig, OptimizerGroup, check_patterns, is_frozen, settings_of
from argosy.config.schema import RunConfig
from argosy.config.train import TrainConfig
from argosy.errors import UserError
from argosy.models.decoder import Decoder
from optim.pieces import SHAPES
from tiny import MODEL


def config(*groups: dict[str, object], **keys: object) -> OptimizerConfig:
    return OptimizerConfig(groups=tuple(OptimizerGroup(**group) for group in groups), **keys)


def test_weight_decay_falls_on_matrices_only():
    decayed = {name for name, shape in SHAPES.items() if settings_of(name, shape, config()).weight_decay}
    assert decayed == {name for name in SHAPES if "norm" not in name and "bias" not in name}


def test_stacked_biases_of_experts_are_no_matrix():
    assert settings_of("blocks.0.mlp.experts.up.bias", (8, 64), config(kind="muon")).rule == "adamw"


def test_first_group_that_matches_counts():
    groups = config({"match": "*.attention.*", "lr_factor": 0.5}, {"match": "*", "lr_factor": 2.0, "weight_decay": 0.3})
    q, norm = (settings_of(name, (64, 64), groups) for name in ("blocks.0.attention.q.weight", "norm.weight"))
    assert (q.lr_factor, q.weight_decay) == (0.5, 0.1)
    assert (norm.lr_factor, norm.weight_decay) == (2.0, 0.3)


def test_group_may_give_weight_decay_to_what_has_none():
    assert settings_of("norm.weight", (64,), config({"match": "*norm*", "weight_decay": 0.2})).weight_decay == 0.2


def test_pattern_that_matches_nothing_is_refused_with_names_that_are_near():
    wrong = config({"match": "head.*"}, {"match": "*.nrom.weight"})
    with pytest.raises(UserError, match=r'match = "\*\.nrom\.weight" \(number 2\).*norm\.weight'):
        check_patterns(wrong.groups, (), SHAPES)
    check_patterns(config({"match": "head.*"}, {"match": "*_norm.weight"}).groups, (), SHAPES)


def frozen(*patterns: str) -> RunConfig:
    return RunConfig(train=TrainConfig(steps=1, frozen=patterns))


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["embed"], r'train\.frozen: "embed" matches no parameter\. The nearest names are embedding'),
        (["head", "block.0"], r'"block\.0" matches no parameter\. The nearest names are blocks\.0'),
    ],
)
def test_frozen_pattern_that_makes_no_sense_is_refused(patterns: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_patterns((), patterns, SHAPES)


def test_frozen_pattern_names_parameters_or_modules() -> None:
    check_patterns((), ("embedding", "*_norm", "blocks.0.attention"), SHAPES)
    assert is_frozen("blocks.1.attention.q.weight", ["blocks.1"])
    assert not is_frozen("blocks.11.attention.q.weight", ["blocks.1"])


OTHERS = {
    "blocks.0.mlp.router.weight": (8, 64),
    "score.weight": (1, 64),
    "blocks.0.mlp.experts.up_lora.magnitude": (8, 64),
}


def test_muon_takes_the_hidden_matrices_of_the_decoder_and_no_others():
    model = Decoder(ModelConfig(**MODEL, attention_bias=True, qk_norm=True))
    rules = {n: settings_of(n, tuple(p.shape), config(kind="muon")).rule for n, p in model.named_parameters()}
    hidden = {name.split(".", 2)[2] for name, rule in rules.items() if rule == "muon"}
    assert hidden == {f"attention.{part}.weight" for part in "qkvo"} | {
        f"mlp.{p}.weight" for p in ("gate", "up", "down")
    }
    assert set(rules.values()) == {"adamw", "muon"}
    for name, shape in OTHERS.items():
        assert settings_of(name, shape, config(kind="muon")).rule == "adamw", name


def test_lengths_of_adapters_do_not_decay_those_of_experts_neither() -> None:
    shapes = {"blocks.0.attention.q.lora.magnitude": (64,), "blocks.0.mlp.experts.up_lora.magnitude": (8, 64)}
    assert {settings_of(name, shape, config()).weight_decay for name, shape in shapes.items()} == {0.0}


@pytest.mark.parametrize(
    ("kind", "name", "shape", "int8"),
    [
        ("adamw", "head.weight", (64, 64), True),
        ("lion", "head.weight", (64, 64), True),
        ("adamw", "head.weight", (64, 63), False),
        ("adamw", "norm.weight", (8192,), False),
        ("muon", "blocks.0.mlp.up.weight", (64, 64), False),
        ("muon", "head.weight", (64, 64), True),
    ],
)
def test_int8_is_for_large_matrices_outside_muon(kind, name, shape, int8):
    assert settings_of(name, shape, config(kind=kind, state="int8")).int8 is int8
    assert not settings_of(name, shape, config(kind=kind)).int8


def test_a_factor_by_width_leaves_the_weight_decay_of_a_step_as_it_is():
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, groups=(OptimizerGroup(match="a", lr_factor=0.5),))
    settings = settings_of("a", (4, 4), config, lambda name, shape, rule: 0.25)
    assert (settings.lr_factor, settings.weight_decay) == (0.125, 2.0)
    assert settings.lr_factor * settings.weight_decay == settings_of("a", (4, 4), config).lr_factor * 0.5
