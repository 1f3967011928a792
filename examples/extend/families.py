"""A model family: Arcee's, which is Llama's decoder with a feed-forward without a gate, and the square of ReLU.

`[model] family = "arcee"`, `ffn_gate = false`; `argosy checkpoint export` writes what transformers reads.
"""

import torch
from torch import Tensor

from argosy import extend


@extend.family("arcee", gated=False, architecture="ArceeForCausalLM", hidden_act="relu2")
def relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()
