"""Arithmetic of a decoder: parameters and floating-point operations."""

from __future__ import annotations

from argosy.config.schema import ModelConfig


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that take part in a matmul once per token: all but embedding lookup, norms and biases."""
    attention = 2 * model.width * model.head_width * (model.heads + model.kv_heads)
    feed_forward = 3 * model.width * model.ffn_width
    return model.layers * (attention + feed_forward) + model.width * model.vocab_size


def parameters(model: ModelConfig) -> int:
    """All parameters."""
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.width
    heads_width = model.head_width * (model.heads + 2 * model.kv_heads)
    per_layer = 2 * model.width
    per_layer += 2 * model.head_width if model.qk_norm else 0
    per_layer += heads_width + model.width if model.attention_bias else 0
    return matmul_parameters(model) + embedding + model.layers * per_layer + model.width


def train_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of forward and backward per token: 6 N + 6 L s a d (the causal half counted).

    N: `matmul_parameters`; L layers, s `seq_len`, a heads, d head width. PaLM (Chowdhery et al. 2022,
    appendix B) with causal attention counted once, as Megatron-Bridge does. Packed documents shorter than
    the sequence do less attention than this; the formula counts whole sequences, so that runs compare.
    """
    attention = 6 * model.layers * seq_len * model.heads * model.head_width
    return 6.0 * matmul_parameters(model) + attention
