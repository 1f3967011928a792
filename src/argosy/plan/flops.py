"""Parameters and floating-point operations of a decoder."""

from __future__ import annotations

import math
from collections.abc import Iterator

from argosy.config.model import ModelConfig
from argosy.plan.layer_spec import layer_kinds
from argosy.plan.parameters import Parameter, Stage, block_table, parameter_table
from argosy.plan.workload import Workload


def matmul_parameters(model: ModelConfig) -> int:
    """Return how many parameters take part in a matmul with each token.

    These are all but the embedding lookup, norms, biases and idle experts: of the routed experts, as many count as one
    token goes to ("active parameters").
    """
    return int(Workload.of_model(model, seq_len=1, global_batch=1).matmul_parameters)


def parameters(model: ModelConfig) -> int:
    """Return the number of all parameters."""
    return sum(times * math.prod(parameter.shape) for parameter, times in _parameters(model))


def active_parameters(model: ModelConfig) -> int:
    """Return the number of parameters without the routed experts that one token does not go to."""
    idle = sum(
        times * math.prod(parameter.shape[1:]) * (model.moe.experts - model.moe.experts_per_token)
        for parameter, times in _parameters(model)
        if parameter.is_expert
    )
    return parameters(model) - idle


def train_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return the model FLOPs of forward and backward per token: 6 N + 6 L s a d (the causal half counted).

    N: `matmul_parameters`; L layers, s `seq_len`, a heads, d head width (with latent attention the mean of a key's
    and a value's). PaLM (Chowdhery et al. 2022, appendix B) with causal attention counted once, as Megatron-Bridge
    does. Packed documents shorter than the sequence do less attention than this; the formula counts whole sequences,
    so that runs compare. Balance losses, dropped tokens and padding are not counted either.
    """
    return float(Workload.of_model(model, seq_len, global_batch=1).train_flops_per_token)


def _parameters(model: ModelConfig) -> Iterator[tuple[Parameter, int]]:
    """Each parameter outside blocks, and those of one block of each kind with the number of such blocks."""
    yield from ((parameter, 1) for parameter in parameter_table(model, Stage(layers=())).values())
    for layers in layer_kinds(model).values():
        yield from ((parameter, len(layers)) for parameter in block_table(model, layers[0]).values())
