"""Initial weights are a function of seed and name."""

from __future__ import annotations

import pytest
import torch

from argosy.config.schema import ModelConfig
from argosy.models.decoder import Decoder
from argosy.models.initialize import initial_value, materialize

CONFIG = ModelConfig(
    layers=8, width=128, heads=4, kv_heads=2, head_width=32, ffn_width=256, vocab_size=512,
    family="qwen3", qk_norm=True, attention_bias=True,
)  # fmt: skip


def built(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    model = Decoder(config)
    materialize(model, torch.device("cpu"), seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_same_seed_gives_the_same_bits_whatever_the_global_generator_holds():
    torch.manual_seed(1)
    first = built()
    torch.manual_seed(2)
    assert all(torch.equal(value, first[name]) for name, value in built().items())


def test_seeds_and_names_give_different_values():
    shape = (64, 64)
    values = [
        initial_value(name, shape, CONFIG, seed)
        for name in (
            "blocks.0.attention.q.weight",
            "blocks.1.attention.q.weight",
            "blocks.0.attention.k.weight",
        )
        for seed in (0, 1)
    ]
    correlations = torch.corrcoef(torch.stack([v.flatten() for v in values])) - torch.eye(len(values))
    assert correlations.abs().max() < 0.1


def test_the_values_of_a_name_are_pinned():
    """A checkpoint of nothing but a seed: if these move, old seeds mean other models."""
    value = initial_value("blocks.0.attention.q.weight", (2, 2), CONFIG, seed=0)
    pinned = torch.tensor([[0.0157980751, 0.000461605960], [0.0167268217, 0.0197936408]])
    torch.testing.assert_close(value, pinned)


def test_other_layers_do_not_change_a_weight():
    fewer = built(CONFIG.model_copy(update={"layers": 1, "vocab_size": 100}))
    assert torch.equal(fewer["blocks.0.attention.q.weight"], built()["blocks.0.attention.q.weight"])


@pytest.mark.parametrize("name", built())
def test_each_weight_has_its_distribution(name):
    value = built()[name]
    if name.endswith("norm.weight"):
        assert (value == 1).all()
    elif name.endswith(".bias"):
        assert (value == 0).all()
    else:
        into_residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
        std = CONFIG.init_std / (2 * CONFIG.layers) ** 0.5 if into_residual else CONFIG.init_std
        assert float(value.std()) == pytest.approx(std, rel=0.05)
        assert abs(float(value.mean())) < 4 * std / value.numel() ** 0.5


def test_every_parameter_gets_memory_and_a_finite_value_and_ties_hold():
    model = Decoder(CONFIG.model_copy(update={"tie_embeddings": True}))
    materialize(model, torch.device("cpu"), 0)
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in model.parameters())
    logits = model(torch.zeros(1, 1, dtype=torch.int64))
    with torch.no_grad():
        model.embedding.weight[7] = 0
    assert logits[0, 0, 7] != 0 and model(torch.zeros(1, 1, dtype=torch.int64))[0, 0, 7] == 0
