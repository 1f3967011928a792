"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2): modules that predict tokens beyond the next one.

Module k, from 1, works on the states of the one before, and first on the model's own after its last norm. It joins
token i's state with the embedding of token i + k, computes one more block, and predicts token i + k + 1 with the
model's own head. Embedding and head are shared. The norm before the head is each module's own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from argosy.config.model import ModelConfig
from argosy.data.packing import IGNORED
from argosy.models.dropout import AdapterDropout
from argosy.models.layers import linear, norm
from argosy.plan.parameters import prediction_table

# B batch, T tokens, D model width, n modules


class PredictionModule(nn.Module):
    """Parameters of a module besides its block: norms of both inputs, their projection, the norm before the head."""

    dropout: AdapterDropout | None = None
    """The dropout of the projection's adapter, if it drops (`models.adapters`)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        table = prediction_table(config)
        self.embedding_norm = norm(table, "embedding_norm", config)
        self.hidden_norm = norm(table, "hidden_norm", config)
        self.projection = linear(table, "projection")
        self.norm = norm(table, "norm", config)

    def joined(self, embedded_BTD: Tensor, hidden_BTD: Tensor, mask_keys_BT: Tensor | None = None) -> Tensor:
        """Return the input of the module's block: the embedding comes first, as in the published weights."""
        if self.dropout is not None:
            self.dropout.keys_BT = mask_keys_BT
        both = torch.cat((self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)), -1)
        joined: Tensor = self.projection(both)
        return joined


def further_tokens(tokens_BT: Tensor, targets_BT: Tensor, positions_BT: Tensor, modules: int) -> Tensor:
    """Return for each module the tokens that it reads and its targets, [B, T, n, 2].

    A target does not count (`IGNORED`) where what is read is beyond the row, or in another document.
    """
    index_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    found = []
    for ahead in range(1, modules + 1):
        tokens, targets, places = (x.roll(-ahead, 1) for x in (tokens_BT, targets_BT, positions_BT))
        is_same_BT = (places == positions_BT + ahead) & (index_T + ahead < len(index_T))
        found.append(torch.stack((tokens, targets.where(is_same_BT, IGNORED)), -1))
    return torch.stack(found, 2)


def with_gradient_of(loss: Tensor, other: Tensor) -> Tensor:
    """Return the value of `loss`, whose gradient is that of the sum of both."""
    return loss + (other - other.detach())
