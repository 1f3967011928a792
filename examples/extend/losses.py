"""A loss: the cross-entropy, and a little of the squared log-sum-exp, which keeps logits small (z-loss, PaLM)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy import extend


@extend.loss("z_loss")
def z_loss(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    z_C = torch.logsumexp(logits_CV, dim=-1)
    return F.cross_entropy(logits_CV, targets_C, reduction="none") + 1e-4 * z_C**2
