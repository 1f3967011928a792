"""AdamW over two groups of parameters, and the global gradient norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from argosy.config.schema import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (fused) in which weight decay falls on matrices only; its learning rate is set at each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients down to a global norm of `max_norm` (0: leave them); returns the norm before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if max_norm:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by parameter name; made (as zeros) where no step was taken yet.

    The state is created with the shapes and dtypes that AdamW gives it, so that a checkpoint can be read into it.
    """
    state = {}
    for name, parameter in model.named_parameters():
        entry = optimizer.state[parameter]
        if not entry:
            entry["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            entry["exp_avg"] = torch.zeros_like(parameter)
            entry["exp_avg_sq"] = torch.zeros_like(parameter)
        state[name] = dict(entry)
    return state
