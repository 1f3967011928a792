"""The router of a mixture of experts: it chooses the experts of each token, and weighs their results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import MoEConfig
from argosy.models.layers import local
from argosy.plan.parameters import Table

# B rows, T tokens of a row (those that this rank has), D model width, E experts, K experts of a token


class Routing(NamedTuple):
    """The experts of each token; all but `experts_BTK` is fp32."""

    experts_BTK: Tensor
    """int64; the K experts of a token differ."""
    weights_BTK: Tensor
    """The weight of each expert's result."""
    scores_BTE: Tensor
    """Adds up to 1 for each token."""
    logits_BTE: Tensor


class Router(nn.Module):
    """A linear layer whose best K outputs are chosen, in fp32: near ties must fall the same way in any precision."""

    bias: Tensor | None
    """Added to the scores to choose experts, not to weigh them; fp32 [E], part of the model's state, 0 at first."""

    def __init__(self, config: MoEConfig, table: Table):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(table["weight"].shape))
        self.logit_bias = nn.Parameter(torch.empty(table["logit_bias"].shape)) if "logit_bias" in table else None
        self.register_buffer("bias", torch.zeros(config.experts) if config.balance == "bias" else None)

    def forward(self, x_BTD: Tensor) -> Routing:
        moe = self.config
        logits_BTE = F.linear(x_BTD.float(), local(self.weight).float())
        if self.logit_bias is not None:
            logits_BTE = logits_BTE + local(self.logit_bias).float()
        scores_BTE = logits_BTE.softmax(-1) if moe.router == "softmax" else logits_BTE.sigmoid()
        experts_BTK = self.choose(scores_BTE.detach())
        weights_BTK = scores_BTE.gather(-1, experts_BTK)
        if moe.normalize_weights:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)
        if moe.router == "sigmoid":
            scores_BTE = scores_BTE / (scores_BTE.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts_BTK, weights_BTK * moe.routed_scale, scores_BTE, logits_BTE)

    def choose(self, scores_BTE: Tensor) -> Tensor:
        """Return each token's K experts, [B, T, K], from its best groups (`group_score`)."""
        moe = self.config
        if self.bias is not None:
            scores_BTE = scores_BTE + self.bias
        if moe.top_groups < moe.groups:
            in_groups = scores_BTE.unflatten(-1, (moe.groups, -1))
            judged = 2 if moe.group_score == "best_two" else 1
            best = in_groups.topk(judged).values.sum(-1).topk(moe.top_groups).indices
            out = torch.ones(in_groups.shape[:-1], dtype=torch.bool, device=best.device).scatter(-1, best, False)
            scores_BTE = in_groups.masked_fill(out[..., None], -torch.inf).flatten(-2)
        return scores_BTE.topk(moe.experts_per_token).indices
