"""Linear layers that multiply in fp8, through torchao."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from argosy.accelerator import capability, device_name, has_fp8
from argosy.errors import UserError, missing_extra

MULTIPLE = 16
"""Both sizes of a weight in an fp8 matmul must be multiples of this."""
SKIPPED = ("embedding", "head", "router")
"""Modules, by the last part of their name, that stay as they are: errors in logits and in routing cost most."""


def check_fp8(device: torch.device) -> None:
    """Raise UserError if `device` cannot multiply in fp8, or torchao is not installed."""
    able = capability(device)
    name = device_name(device)
    where = f"{name} (compute capability {able[0]}.{able[1]})" if any(able) else name
    if not has_fp8(device):
        raise UserError(
            f"plan: precision = fp8 needs a CUDA device of compute capability 8.9 or more (Ada, Hopper, Blackwell); "
            f"this one is {where}. Try precision=bf16."
        )
    if importlib.util.find_spec("torchao") is None:
        raise missing_extra("torchao", "fp8", "plan: precision = fp8")


def takes_fp8(module: nn.Module, name: str) -> bool:
    """Return True if a module can multiply in fp8: it is linear, its sizes fit, and it is not one of `SKIPPED`."""
    return (
        isinstance(module, nn.Linear)
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
        and name.rpartition(".")[2] not in SKIPPED
    )


def use_fp8(model: nn.Module, device: torch.device, emulate: bool = False) -> None:
    """Make the model's linear layers multiply in fp8, scaled by tensor; weights keep their dtype and their names.

    Call it before anything else lays the model out. `emulate`: round to fp8 but multiply as before, which any device
    can do. Raises: UserError as `check_fp8` does, if no layer has sizes that fp8 can take, or if tensor parallelism has
    cut the weights: torchao's layers take only whole ones.
    """
    if not emulate:
        check_fp8(device)
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise UserError("plan: precision = fp8 does not go with tp > 1. Try tp=1, more dp_shard, or precision=bf16.")
    if not any(takes_fp8(module, name) for name, module in model.named_modules()):
        raise UserError(
            f"plan: precision = fp8 finds no linear layer whose sizes are multiples of {MULTIPLE}. "
            "Try precision=bf16, or other model.width and model.ffn_width."
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=takes_fp8, config=Float8LinearConfig(emulate=emulate))
