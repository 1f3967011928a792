"""Rotary angles: relative, and stretched as the published rules say."""

from __future__ import annotations

import math

import pytest
import torch

from argosy.config.attention import RopeScaling
from argosy.config.model import ModelConfig
from argosy.models.rope import attention_scale, rotary_table, rotate
from argosy.plan.layer_spec import layer_spec

CONFIG = ModelConfig(head_width=64, rope_theta=10_000.0)


def angles_per_position(config: ModelConfig) -> torch.Tensor:
    cos, sin = rotary_table(layer_spec(config, 0).places, 2)
    return torch.atan2(sin[1], cos[1])[: config.head_width // 2]


def scaled(**scaling: object) -> ModelConfig:
    return CONFIG.model_copy(update={"rope_scaling": RopeScaling.model_validate(scaling)})


def test_frequencies_fall_from_one_by_powers_of_theta():
    expected = torch.tensor([10_000.0 ** (-2 * i / 64) for i in range(32)])
    torch.testing.assert_close(angles_per_position(CONFIG), expected)


def test_scores_depend_on_the_distance_only():
    cos, sin = rotary_table(layer_spec(CONFIG, 0).places, 64)
    q, k = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def score(at_q: int, at_k: int) -> float:
        turned = [rotate(x, cos[i : i + 1], sin[i : i + 1]) for x, i in ((q, at_q), (k, at_k))]
        return float((turned[0] * turned[1]).sum())

    assert score(10, 3) == pytest.approx(score(50, 43), rel=1e-4)
    assert score(10, 3) != pytest.approx(score(10, 4), rel=1e-2)


def test_turning_keeps_lengths_and_dtype_and_leaves_position_zero_alone():
    cos, sin = rotary_table(layer_spec(CONFIG, 0).places, 8)
    x = torch.randn(2, 8, 3, 64, generator=torch.Generator().manual_seed(0))
    y = rotate(x, cos, sin)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[:, 0], x[:, 0])
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_linear_scaling_is_position_interpolation():
    stretched, _ = rotary_table(layer_spec(scaled(kind="linear", factor=4.0), 0).places, 32)
    plain, _ = rotary_table(layer_spec(CONFIG, 0).places, 8)
    torch.testing.assert_close(stretched[::4], plain)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    config = scaled(kind="llama3", factor=8.0, original_max_seq_len=1000)
    plain, stretched = angles_per_position(CONFIG), angles_per_position(config)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 1000 / 4, wavelengths > 1000 / 1
    between = ~short & ~long
    torch.testing.assert_close(stretched[short], plain[short])
    torch.testing.assert_close(stretched[long], plain[long] / 8)
    assert between.any() and (stretched[between] < plain[between]).all()
    assert (stretched[between] > plain[between] / 8).all()


def test_yarn_keeps_fast_dimensions_divides_slow_ones_and_scales_attention():
    config = scaled(kind="yarn", factor=4.0, original_max_seq_len=2048)
    plain, stretched = angles_per_position(CONFIG), angles_per_position(config)
    torch.testing.assert_close(stretched[0], plain[0])
    torch.testing.assert_close(stretched[-1], plain[-1] / 4)
    assert ((stretched <= plain * 1.0001) & (stretched >= plain / 4.0001)).all()
    cos, sin = rotary_table(layer_spec(config, 0).places, 3)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, attention_scale(config.rope_scaling) ** 2))
    assert attention_scale(config.rope_scaling) == pytest.approx(0.1 * math.log(4) + 1)
