"""Maximal update parametrization: what a model's widths change in its initial values, learning rates and multipliers.

Yang & Hu 2021, "Tensor Programs V", table 8, for optimizers whose step does not depend on the size of the gradient
(AdamW, Lion), in ratios to a base model (`config.model`), for which all factors are 1:

    embedding, norms, biases    as they are
    hidden matrices             variance of initial values and learning rate over the growth of their inputs
    head                        as it is; the logits over the growth of its inputs
    attention                   q k / d in place of q k / sqrt(d)

A router's outputs are as many for every width, as the head's are. It has the other form of the same rule (table 3):
standard deviation and learning rate over the growth of its inputs, without a multiplier. So have a gate of one number
and the head of a reward model. Muon's step is an orthogonal matrix times a size: its spectral norm has to stay as
sqrt(outputs / inputs) does (Yang, Simon & Bernstein 2023, "A spectral condition for feature learning").
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from argosy.config.model import ModelConfig

DIMS: Mapping[str, tuple[str, str]] = {
    "q": ("width", "width"),  # the heads' widths together grow as the width does
    "k": ("width", "width"),
    "v": ("width", "width"),
    "o": ("width", "width"),
    "out_gate": ("width", "width"),
    "q_in": ("width", "width"),  # of a delta-net: its heads together grow as the width does
    "k_in": ("width", "width"),
    "v_in": ("width", "width"),
    "gate_in": ("width", "width"),
    "beta_in": ("width", "width"),
    "decay_in": ("width", "width"),
    "out": ("width", "width"),
    "q_down": ("q_rank", "width"),
    "q_up": ("width", "q_rank"),
    "kv_down": ("kv_rank", "width"),
    "kv_up": ("width", "kv_rank"),
    "gate": ("ffn_width", "width"),
    "up": ("ffn_width", "width"),
    "down": ("width", "ffn_width"),
    "projection": ("width", "width"),  # of multi-token prediction
}
"""Module of a hidden matrix -> the sizes that its outputs and its inputs grow with."""
FEW_OUTPUTS = ("router", "shared_gate", "score")
"""Modules with as many outputs for every width."""


def initial_factor(name: str, model: ModelConfig) -> float:
    """Return the factor on the standard deviation of a parameter's initial values."""
    if not model.mup.base_width or (module := _matrix(name)) is None:
        return 1.0
    if module in FEW_OUTPUTS:
        return 1 / growth(model)["width"]
    return _grown(name, module, model)[1] ** -0.5


def rate_factor(name: str, shape: tuple[int, ...], rule: str, model: ModelConfig) -> float:
    """Return the factor on the learning rate of a parameter of this whole `shape` that is updated by `rule`."""
    if not model.mup.base_width or (module := _matrix(name)) is None:
        return 1.0
    if module in FEW_OUTPUTS:
        return 1 / growth(model)["width"]
    outputs, inputs = _grown(name, module, model)
    if rule != "muon":
        return 1 / inputs
    here, at_base = max(shape[-2:]), max(shape[-2] / outputs, shape[-1] / inputs)
    return math.sqrt(outputs / inputs * at_base / here)  # its step has the size 0.2 sqrt(max(M, N)) (`optim.optimizer`)


def logit_factor(model: ModelConfig) -> float:
    """Return the factor on the hidden states that the head turns into logits."""
    return 1 / growth(model)["width"]


def query_factor(model: ModelConfig) -> float:
    """Return the factor on queries, which makes q k / sqrt(d) to q k / d, with the base model's as it was."""
    base = model.mup.base_head_width
    return math.sqrt(base / model.head_width) if base else 1.0


def folded_factor(name: str, model: ModelConfig) -> float:
    """Return the factor on a parameter after training with which a decoder without multipliers computes the same."""
    if name.split(".")[-2:-1] == ["norm"]:  # the one before the head; modules of multi-token prediction have their own
        return 1.0 if model.score else logit_factor(model)
    scaled = ".attention.q_norm." if model.qk_norm else ".attention.q."
    return query_factor(model) if scaled in name else 1.0


def growth(model: ModelConfig) -> dict[str, float]:
    """Return how many times as large as the base model's each of the sizes is that `DIMS` names."""
    mup = model.mup
    width = model.width / mup.base_width if mup.base_width else 1.0
    sizes = {
        "ffn_width": (model.ffn_width, mup.base_ffn_width),
        "expert_ffn_width": (model.moe.expert_ffn_width, mup.base_expert_ffn_width),
        "kv_rank": (model.mla.kv_rank, mup.base_kv_rank),
        "q_rank": (model.mla.q_rank, mup.base_q_rank),
    }
    return {"width": width} | {name: here / base if base else width for name, (here, base) in sizes.items()}


def _matrix(name: str) -> str | None:
    """Return the module of a matrix; None for what does not change with the width."""
    *modules, last = name.split(".")
    module = modules[-1] if last == "weight" else last  # stacks of experts' matrices are named by themselves
    return module if module in DIMS or module in FEW_OUTPUTS else None


def _grown(name: str, module: str, model: ModelConfig) -> tuple[float, float]:
    """Return the growth of a matrix's outputs and of its inputs."""
    sizes = growth(model)
    if {"experts", "shared"} & set(name.split(".")):
        sizes["ffn_width"] = sizes["expert_ffn_width"]
    outputs, inputs = DIMS[module]
    return sizes[outputs], sizes[inputs]
