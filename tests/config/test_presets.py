"""The presets: every one loads, and the published sizes have the published parameters."""

import pytest

from argosy.config.layers import preset_names
from argosy.config.load import load
from argosy.config.model import ModelConfig
from argosy.plan.parameters import parameters
from argosy.plan.workload import Workload

PUBLISHED = {  # parameters, billions: the model cards, embeddings included, tied ones once
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama3.1-8b": 8.03,
    "llama3.1-70b": 70.55,
    "llama3.1-405b": 405.85,
    "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.616,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.6,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "deepseek-v3": 671.0,
}
OTHERS = {  # likewise, without parts for images and modules for several tokens at once
    "command-r7b": 8.028,
    "deepseek-v2-lite": 15.706,
    "deepseek-v2": 235.74,
    "exaone4-32b": 32.0,
    "gemma2-2b": 2.614,
    "gemma2-9b": 9.242,
    "gemma2-27b": 27.227,
    "gemma3-1b": 1.0,
    "gemma3-4b": 3.88,
    "gemma3-12b": 11.766,
    "gemma3-27b": 27.009,
    "gemma4-31b": 30.7,
    "glm4-9b": 9.4,
    "glm4-32b": 32.566,
    "glm4.5-air": 106.85,
    "glm4.5": 352.8,
    "gpt-oss-20b": 20.915,
    "gpt-oss-120b": 116.83,
    "granite3-8b": 8.171,
    "kimi-k2": 1026.4,
    "llama4-scout": 107.77,
    "llama4-maverick": 400.7,
    "mimo-v2-flash": 308.8,
    "mistral-7b": 7.242,
    "olmo2-7b": 7.299,
    "olmo2-13b": 13.716,
    "olmo3-7b": 7.298,
    "olmoe-7b-a1b": 6.919,
    "phi3-mini": 3.821,
    "phi4": 14.66,
    "qwen2-57b-a14b": 57.41,
    "qwen3-next-80b-a3b": 79.674,
    "qwen3.5-4b": 4.206,
    "qwen3.5-9b": 8.954,
    "qwen3.5-35b-a3b": 34.661,
    "seed-oss-36b": 36.151,
    "smollm3-3b": 3.075,
}
ACTIVE = {  # what one token uses of them, billions: the model cards and reports
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.1,
    "qwen3-30b-a3b": 3.35,
    "qwen3-235b-a22b": 22.19,
    "deepseek-v3": 37.55,
}
LAPTOP = {"llama-5m": 5, "llama-20m": 20, "llama-60m": 60, "llama-160m": 160, "qwen3-20m": 20}
LAPTOP |= {"mixtral-10m": 10, "qwen3-moe-10m": 10, "deepseek-10m": 10}


def model(name: str) -> ModelConfig:
    return load("demo", {"model.preset": name}).model


def test_every_model_preset_is_counted_here():
    assert set(preset_names("models")) == {*PUBLISHED, *OTHERS, *LAPTOP}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_has_the_published_parameters(name):
    assert counted(model(name)) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)
    assert parameters(model(name)) == counted(model(name))


@pytest.mark.parametrize("name", OTHERS)
def test_a_size_of_another_class_has_the_published_parameters(name):
    """Weights are counted against `transformers` in the families' cards."""
    assert parameters(model(name)) / 1e9 == pytest.approx(OTHERS[name], rel=0.005)


@pytest.mark.parametrize("name", LAPTOP)
def test_a_laptop_size_has_about_the_parameters_of_its_name(name):
    sized = model(name).model_copy(update={"vocab_size": 4096})
    assert counted(sized) / 1e6 == pytest.approx(LAPTOP[name], rel=0.05)
    assert model(name).vocab_size == 0


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_the_published_share_of_the_parameters(name):
    config = model(name)
    matmuls = Workload.of_model(config, seq_len=1, global_batch=1).matmul_parameters
    active = matmuls + config.width * config.vocab_size  # and the embedding, as cards count
    assert active / 1e9 == pytest.approx(ACTIVE[name], rel=0.005)


def counted(m: ModelConfig) -> int:
    """Weight by weight."""
    norms = 2 * m.width + (2 * m.head_width if m.qk_norm else 0) + m.mla.kv_rank + m.mla.q_rank
    embeddings = m.vocab_size * m.width * (1 if m.tie_embeddings else 2)
    feed_forwards = sum(feed_forward(m, layer) for layer in range(m.layers))
    return (
        m.layers * ((latent_attention(m) if m.mla.kv_rank else attention(m)) + norms)
        + feed_forwards
        + embeddings
        + m.width
    )


def attention(m: ModelConfig) -> int:
    q, k, v, o = (m.width * m.head_width * n for n in (m.heads, m.kv_heads, m.kv_heads, m.heads))
    biases = m.head_width * (m.heads + 2 * m.kv_heads) if m.qkv_bias else 0
    return q + k + v + o + biases


def latent_attention(m: ModelConfig) -> int:
    mla = m.mla
    q_down, q_up = m.width * mla.q_rank, mla.q_rank * m.heads * (mla.nope_width + mla.rope_width)
    kv_down, kv_up = (
        m.width * (mla.kv_rank + mla.rope_width),
        mla.kv_rank * m.heads * (mla.nope_width + mla.value_width),
    )
    return q_down + q_up + kv_down + kv_up + m.heads * mla.value_width * m.width


def feed_forward(m: ModelConfig, layer: int) -> int:
    gate = up = down = m.width * m.ffn_width
    if m.moe.experts == 0 or layer < m.moe.first_dense_layers:
        return gate + up + down
    expert, router = 3 * m.width * m.moe.expert_ffn_width, m.width * m.moe.experts
    return expert * (m.moe.experts + m.moe.shared_experts) + router


@pytest.mark.parametrize("name", preset_names("runs"))
def test_every_run_preset_loads(name):
    assert load(name).name == name
