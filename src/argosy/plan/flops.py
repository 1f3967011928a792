"""Arithmetic of a decoder: parameters and floating-point operations."""

from __future__ import annotations

from argosy.config.schema import ModelConfig


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that take part in a matmul with each token: all but embedding lookup, norms, biases and idle experts.

    Of the routed experts these are as many as one token goes to ("active parameters").
    """
    return sum(_block_matmuls(model, layer) for layer in range(model.layers)) + model.width * model.vocab_size


def parameters(model: ModelConfig) -> int:
    """All parameters."""
    moe = model.moe
    moe_layers = sum(model.is_moe_layer(layer) for layer in range(model.layers))
    idle_experts = moe_layers * (moe.experts - moe.experts_per_token) * 3 * model.width * moe.expert_ffn_width
    return active_parameters(model) + idle_experts


def active_parameters(model: ModelConfig) -> int:
    """`parameters`, of routed experts only as many as one token goes to."""
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.width
    per_layer = 2 * model.width + _attention_vectors(model)
    return matmul_parameters(model) + embedding + model.layers * per_layer + model.width


def train_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of forward and backward per token: 6 N + 6 L s a d (the causal half counted).

    N: `matmul_parameters`; L layers, s `seq_len`, a heads, d head width (with latent attention the mean of a key's
    and a value's). PaLM (Chowdhery et al. 2022, appendix B) with causal attention counted once, as Megatron-Bridge
    does. Packed documents shorter than the sequence do less attention than this; the formula counts whole sequences,
    so that runs compare. Balance losses, dropped tokens and padding are not counted either.
    """
    mla = model.mla
    head_width = (mla.key_width + mla.value_width) / 2 if mla.kv_rank else model.head_width
    return 6.0 * matmul_parameters(model) + 6 * model.layers * seq_len * model.heads * head_width


def _block_matmuls(model: ModelConfig, layer: int) -> int:
    """`matmul_parameters` of one block."""
    moe = model.moe
    if not model.is_moe_layer(layer):
        return _attention_matmuls(model) + 3 * model.width * model.ffn_width
    experts = moe.experts_per_token + moe.shared_experts
    return _attention_matmuls(model) + 3 * model.width * moe.expert_ffn_width * experts + model.width * moe.experts


def _attention_matmuls(model: ModelConfig) -> int:
    mla, heads = model.mla, model.heads
    if not mla.kv_rank:
        return 2 * model.width * model.head_width * (heads + model.kv_heads)
    queries = heads * mla.key_width
    q = mla.q_rank * (model.width + queries) if mla.q_rank else model.width * queries
    kv = model.width * (mla.kv_rank + mla.rope_width) + mla.kv_rank * heads * (mla.nope_width + mla.value_width)
    return q + kv + heads * mla.value_width * model.width


def _attention_vectors(model: ModelConfig) -> int:
    """Parameters of norms and biases inside a block's attention."""
    mla = model.mla
    if mla.kv_rank:
        biases = mla.q_rank + mla.kv_rank + mla.rope_width + model.width
        return mla.q_rank + mla.kv_rank + (biases if model.attention_bias else 0)
    biases = model.head_width * (model.heads + 2 * model.kv_heads) + model.width
    return (2 * model.head_width if model.qk_norm else 0) + (biases if model.attention_bias else 0)
