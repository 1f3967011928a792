"""Arithmetic of a decoder: parameters and floating-point operations."""

from __future__ import annotations

from argosy.config.schema import ModelConfig
from argosy.plan.workload import Workload


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that take part in a matmul with each token: all but embedding lookup, norms, biases and idle experts.

    Of the routed experts these are as many as one token goes to ("active parameters").
    """
    return int(Workload.of_model(model, seq_len=1, global_batch=1).matmul_parameters)


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
    return float(Workload.of_model(model, seq_len, global_batch=1).train_flops_per_token)


def _attention_vectors(model: ModelConfig) -> int:
    """Parameters of norms and biases inside a block's attention."""
    mla = model.mla
    if mla.kv_rank:
        biases = mla.q_rank + mla.kv_rank + mla.rope_width + model.width
        return mla.q_rank + mla.kv_rank + (biases if model.attention_bias else 0)
    biases = model.head_width * (model.heads + 2 * model.kv_heads) + model.width
    return (2 * model.head_width if model.qk_norm else 0) + (biases if model.attention_bias else 0)
