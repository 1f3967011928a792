"""The decoder-only transformer of the dense Llama 3 and Qwen3 families; sizes are data (`ModelConfig`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.schema import ModelConfig
from argosy.models.attention import Attention, LayerCache
from argosy.models.layers import FeedForward, Linear, RMSNorm
from argosy.models.loss import chunk_loss_and_gradient, summed_cross_entropy
from argosy.models.rope import rotary_table

# B batch, T tokens, D model width, V vocabulary


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], documents: Tensor, cache: LayerCache | None = None
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, documents, cache)
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return x_BTD


class Decoder(nn.Module):
    """Tokens in; logits, or with targets their summed loss, out.

    Built on the meta device; `materialize` gives it memory and initial weights.
    """

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = RMSNorm(config.width, config.norm_eps)
            # No second name for a tied weight: `to_empty` would cut the tie (it makes each name new memory).
            self.head = None if config.tie_embeddings else Linear(config.width, config.vocab_size, bias=False)
        self.loss_of_chunk = chunk_loss_and_gradient
        self._rotary: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        documents: Tensor | None = None,
        cache: list[LayerCache] | None = None,
    ) -> Tensor:
        """Logits [B, T, V] in the compute dtype, or with `targets_BT` the summed loss (fp32 scalar).

        Targets of -100 do not count. `documents` is as in `attention.packed_attention`; without it every
        row is one document. With `cache`, the tokens continue those that the cache has read.
        """
        B, T = tokens_BT.shape
        start = cache[0].length if cache else 0
        cos, sin = self._rotary_to(start + T, tokens_BT.device)
        rotary = cos[start : start + T], sin[start : start + T]
        if documents is None:
            documents = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=tokens_BT.device)
        x_BTD = self.embedding(tokens_BT).to(self.compute_dtype)
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, rotary, documents, cache[i] if cache else None)
        x_BTD = self.norm(x_BTD)
        weight_VD = self.embedding.weight if self.head is None else self.head.weight
        if targets_BT is None:
            return F.linear(x_BTD, weight_VD.to(x_BTD.dtype))
        return summed_cross_entropy(x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), self.loss_of_chunk)

    def new_cache(self, batch: int, max_seq_len: int) -> list[LayerCache]:
        """An empty key/value cache for each block."""
        like = torch.empty(0, dtype=self.compute_dtype, device=self.embedding.weight.device)
        return [LayerCache(batch, max_seq_len, self.config, like) for _ in self.blocks]

    def _rotary_to(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._rotary is None or self._rotary[0].shape[0] < seq_len or self._rotary[0].device != device:
            with torch.inference_mode(False):  # an evaluation's table must serve the training step after it
                # A power of two, so that generation token by token seldom computes it anew.
                self._rotary = rotary_table(self.config, 1 << (seq_len - 1).bit_length(), device)
        return self._rotary
