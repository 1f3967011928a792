"""The presets: every one loads, and the published sizes have the published parameters."""

import pytest

from argosy.config.catalog import preset_names
from argosy.config.load import load
from argosy.config.schema import ModelConfig
from argosy.plan.flops import parameters

PUBLISHED = {  # parameters, billions: the model cards, embeddings included, tied ones once
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3.1-8b": 8.03,
    "llama3.1-70b": 70.55,
    "llama3.1-405b": 405.85,
    "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
}
LAPTOP = {"llama-5m": 5, "llama-20m": 20, "llama-60m": 60, "llama-160m": 160, "qwen3-20m": 20}


def model(name: str) -> ModelConfig:
    return load("demo", {"model.preset": name}).model


def test_every_model_preset_is_counted_here():
    assert set(preset_names("models")) == {*PUBLISHED, *LAPTOP}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_has_the_published_parameters(name):
    assert counted(model(name)) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)
    assert parameters(model(name)) == counted(model(name))


@pytest.mark.parametrize("name", LAPTOP)
def test_a_laptop_size_has_about_the_parameters_of_its_name(name):
    sized = model(name).model_copy(update={"vocab_size": 4096})
    assert counted(sized) / 1e6 == pytest.approx(LAPTOP[name], rel=0.05)
    assert model(name).vocab_size == 0


def counted(m: ModelConfig) -> int:
    """Weight by weight, without biases, which no preset has."""
    q, k, v, o = (m.width * m.head_width * n for n in (m.heads, m.kv_heads, m.kv_heads, m.heads))
    gate = up = down = m.width * m.ffn_width
    norms = 2 * m.width + (2 * m.head_width if m.qk_norm else 0)
    embeddings = m.vocab_size * m.width * (1 if m.tie_embeddings else 2)
    return m.layers * (q + k + v + o + gate + up + down + norms) + embeddings + m.width


@pytest.mark.parametrize("name", preset_names("runs"))
def test_every_run_preset_loads(name):
    assert load(name).name == name
