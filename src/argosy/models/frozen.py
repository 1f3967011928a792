"""Quantises the matrices beside an adapter: each rank those that it has (`lora.base`, `models.quantised_weight`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from argosy.config.train import LoraConfig
from argosy.models.decoder import Decoder
from argosy.models.experts import Experts
from argosy.models.initialize import offset_of
from argosy.models.layers import Linear, local
from argosy.models.quantised_weight import QuantisationScheme


def quantise(model: Decoder, lora: LoraConfig) -> None:
    """Let the frozen matrices of linear layers and of experts be bytes, in place; `model` is on the meta device, and
    tensor and expert parallelism have cut it.

    ZeRO cuts rows of bytes as it cuts rows of numbers.
    """
    for name, parameter in list(model.named_parameters()):
        if not model.table[name].is_linear:
            continue
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        scheme = model.schemes[name] = _scheme_of(parameter, lora)
        module.register_parameter(own, _bytes_for(parameter, scheme))
        if isinstance(module, Experts):
            module.schemes[own] = scheme
        else:
            assert isinstance(module, Linear), name
            module.scheme = scheme


def _scheme_of(parameter: Tensor, lora: LoraConfig) -> QuantisationScheme:
    ranks = _ranks_over_columns(parameter)
    return QuantisationScheme(lora, local(parameter).shape[-1], offset_of(parameter)[-1], parameter.shape[-1], ranks)


def _ranks_over_columns(parameter: Tensor) -> int:
    """Return how many ranks share the last dim."""
    ranks, last = 1, parameter.ndim - 1
    for axis, placement in enumerate(getattr(parameter, "placements", ())):
        if getattr(placement, "dim", None) == last:
            ranks *= parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
    return ranks


def _bytes_for(parameter: Tensor, scheme: QuantisationScheme) -> nn.Parameter:
    """Return the parameter of bytes in place of one of numbers, cut alike."""
    part = torch.empty(*local(parameter).shape[:-1], scheme.row_bytes, dtype=torch.uint8, device=parameter.device)
    if not hasattr(parameter, "to_local"):
        return nn.Parameter(part, requires_grad=False)
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*parameter.shape[:-1], scheme.row_bytes * _ranks_over_columns(parameter)))
    strides = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    whole = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=strides)
    return nn.Parameter(whole, requires_grad=False)
