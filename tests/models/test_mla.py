"""Latent attention is attention with keys and values made from one narrow vector, with a cache of that vector."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from argosy.config.attention import MLAConfig, RopeScaling
from argosy.config.model import ModelConfig
from argosy.models.attention import Documents, LayerCache
from argosy.models.mla import LatentAttention
from argosy.models.rope import attention_scale, rotary_table, rotate
from argosy.plan.layer_spec import layer_spec

WIDTH, HEADS, TOKENS = 32, 3, 12
KINDS: dict[str, dict[str, Any]] = {
    "narrow queries": {"q_rank": 20},
    "queries from the hidden state": {"q_rank": 0},
    "values as wide as keys": {"q_rank": 20, "value_width": 18},
}
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=8)


def config_of(rope: RopeScaling | None = None, **mla: Any) -> ModelConfig:
    latent = {"kv_rank": 16, "rope_width": 8, "nope_width": 10, "value_width": 6} | mla
    return ModelConfig(
        width=WIDTH, heads=HEADS, kv_heads=HEADS, head_width=8, attention_bias=True,
        rope_scaling=rope or RopeScaling(), mla=MLAConfig.model_validate(latent),
    )  # fmt: skip


def layer(config: ModelConfig) -> LatentAttention:
    module, generator = LatentAttention(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return module


def inputs(rows: int = 2) -> Tensor:
    return torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)


def rotary(config: ModelConfig, rows: int = 2, start: int = 0, end: int = TOKENS) -> tuple[Tensor, Tensor]:
    cos, sin = (table[start:end].expand(rows, -1, -1) for table in rotary_table(layer_spec(config, 0).places, TOKENS))
    return cos, sin


def starts(rows: list[list[int]]) -> Documents:
    return Documents.of(torch.cat([torch.arange(length) for length in itertools.chain(*rows)]))


ROW_EACH = starts([[TOKENS], [TOKENS]])


def by_hand(module: LatentAttention, config: ModelConfig, x_TD: Tensor) -> Tensor:
    """DeepSeek-V2's equations for one row, head by head."""
    mla = config.mla
    # YaRN's temperature is in the table; here it divides the scores instead, as it is defined.
    temperature = attention_scale(config.rope_scaling)
    cos, sin = (table[None] / temperature for table in rotary_table(layer_spec(config, 0).places, len(x_TD)))
    q = module.q_up(module.q_norm(module.q_down(x_TD))) if mla.q_rank else module.q(x_TD)
    latent, shared_key = module.kv_down(x_TD).split((mla.kv_rank, mla.rope_width), -1)
    keys_values = module.kv_up(module.kv_norm(latent))
    future = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).triu(1)
    outputs = []
    for head in range(config.heads):
        q_plain, q_rotated = q.chunk(config.heads, -1)[head].split((mla.nope_width, mla.rope_width), -1)
        k_plain, v = keys_values.chunk(config.heads, -1)[head].split((mla.nope_width, mla.value_width), -1)
        turned_q, turned_k = (rotate(x[None, :, None], cos, sin)[0, :, 0] for x in (q_rotated, shared_key))
        scores = (q_plain @ k_plain.T + turned_q @ turned_k.T) / mla.key_width**0.5 * temperature**2
        outputs.append(F.softmax(scores.masked_fill(future, -torch.inf), -1) @ v)
    return module.o(torch.cat(outputs, -1))


@pytest.mark.parametrize("rope", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_it_is_the_published_equations(kind, rope):
    config = config_of(rope, **kind)
    module, x = layer(config), inputs()
    y, expected = module(x, rotary(config), ROW_EACH), torch.stack([by_hand(module, config, row) for row in x])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(z.square().sum(), [x, *module.parameters()]) for z in (y, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows", [[[5, 7], [12]], [[1] * 12, [4, 8]]], ids=str)
def test_a_packed_document_attends_as_if_it_were_alone(rows):
    config = config_of()
    module, x = layer(config), inputs()
    y = module(x, rotary(config), starts(rows)).flatten(0, 1)
    documents = x.flatten(0, 1).split(list(itertools.chain(*rows)))
    alone = torch.cat([by_hand(module, config, document) for document in documents])
    torch.testing.assert_close(y, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 6]], ids=str)
def test_a_cache_of_latents_read_in_pieces_gives_the_whole(pieces):
    config = config_of(q_rank=20)
    module, x = layer(config), inputs()
    cache = LayerCache(TOKENS)
    parts, start = [], 0
    with torch.no_grad():
        for piece in x.split(pieces, 1):
            end = start + piece.shape[1]
            parts.append(module(piece, rotary(config, 2, start, end), ROW_EACH, cache))
            start = end
        torch.testing.assert_close(torch.cat(parts, 1), module(x, rotary(config), ROW_EACH), rtol=1e-4, atol=1e-5)
    assert cache.length == TOKENS
    assert (cache.keys.shape, cache.values.shape) == ((2, TOKENS, 16), (2, TOKENS, 8))


def test_bf16_stays_close_and_leaves_gradients_in_fp32():
    config = config_of(q_rank=20)
    module, x = layer(config), inputs().detach()
    y = module(x.bfloat16(), rotary(config), ROW_EACH)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), module(x, rotary(config), ROW_EACH), rtol=0.1, atol=0.15)
    y.sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in module.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mla": {"kv_rank": 8, "rope_width": 7}}, "rope_width = 7 must be even"),
        ({"mla": {"kv_rank": 8, "value_width": 500}}, r"value_width = 500 is more than .* = 192; try 192 or less"),
        ({"mla": {"kv_rank": 8}, "kv_heads": 2}, "kv_heads = 2 with mla.kv_rank = 8.*set kv_heads = 4"),
        ({"mla": {"kv_rank": 8}, "head_width": 32}, "head_width = 32 and mla.rope_width = 64.*set head_width = 64"),
        ({"mla": {"kv_rank": 8}, "qk_norm": True}, "qk_norm = true with mla.*set qk_norm = false"),
        ({"mla": {"kv_rank": 8}, "qkv_bias": True}, "qkv_bias = true with mla.*set qkv_bias = false"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_to_do(settings, message):
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(settings)
