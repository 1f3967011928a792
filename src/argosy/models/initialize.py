"""Initial weights: a function of the seed and each parameter's name alone, never of the layout."""

from __future__ import annotations

import hashlib

import torch

from argosy.config.schema import ModelConfig
from argosy.models.decoder import Decoder

INTO_RESIDUAL = ("attention.o.weight", "mlp.down.weight")


def materialize(model: Decoder, device: torch.device, seed: int) -> None:
    """Give `model` (on the meta device) memory on `device` and its initial weights, in place."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), model.config, seed))


def initial_value(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> torch.Tensor:
    """The parameter's first value, fp32 on the CPU: N(0, init_std), norms one, biases zero.

    Projections into the residual stream get init_std / sqrt(2 * layers), so that the stream's variance does
    not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    std = config.init_std / (2 * config.layers) ** 0.5 if name.endswith(INTO_RESIDUAL) else config.init_std
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).normal_(std=std, generator=generator)
