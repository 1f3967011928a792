"""Causal self-attention with grouped queries, over packed documents or with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelConfig
from argosy.models.layers import linear, norm
from argosy.models.rope import rotate
from argosy.plan.mup import query_factor
from argosy.plan.parameters import attention_table

PADDED_TO = 32
"""On a CPU, bf16 documents are padded to a multiple of this many tokens. oneDNN makes a kernel for each shape of a bf16
product and keeps it: without padding, kernels took a gigabyte after an hour, and half of attention's time to make."""

# B batch, T tokens, S tokens in the cache, D model width, H query heads, K key/value heads, E head width


AttentionCore = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""The signature of `packed_attention`. Context parallelism puts in one that sees the other ranks' tokens too."""


class LayerCache:
    """Keys and values of one layer for the tokens read so far, [B, max_seq_len, K, E]."""

    def __init__(self, batch: int, max_seq_len: int, config: ModelConfig, like: Tensor):
        shape = (batch, max_seq_len, config.kv_heads, config.head_width)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.length = 0

    def append(self, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens and return all keys and values so far, [B, S, K, E]."""
        end = self.length + k_BTKE.shape[1]
        self.keys[:, self.length : end] = k_BTKE
        self.values[:, self.length : end] = v_BTKE
        self.length = end
        return self.keys[:, :end], self.values[:, :end]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_width = config.head_width
        table = attention_table(config)
        self.q, self.k, self.v, self.o = (linear(table, name) for name in "qkvo")
        self.q_norm = norm(table, "q_norm", config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = norm(table, "k_norm", config.norm_eps) if config.qk_norm else nn.Identity()
        self.query_factor = query_factor(config)
        self.core: AttentionCore = packed_attention

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        documents: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """`rotary`: cosines and sines of these tokens; `documents`: see `packed_attention`."""
        heads = (*x_BTD.shape[:2], -1, self.head_width)
        q_BTHE = rotate(self.q_norm(self.q(x_BTD).view(heads)), *rotary)
        if self.query_factor != 1.0:
            q_BTHE = q_BTHE * self.query_factor
        k_BTKE = rotate(self.k_norm(self.k(x_BTD).view(heads)), *rotary)
        v_BTKE = self.v(x_BTD).view(heads)
        if cache is None:
            y_BTHE = self.core(q_BTHE, k_BTKE, v_BTKE, documents)
        else:
            y_BTHE = cached_attention(q_BTHE, *cache.append(k_BTKE, v_BTKE))
        return self.o(y_BTHE.flatten(2))


def packed_attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, documents: Tensor | None) -> Tensor:
    """Causal attention inside each document and never across; returns [B, T, H, E].

    `documents` holds where documents start in the B*T tokens laid end to end, then B*T itself (int32,
    the `cu_seqlens` of variable-length attention kernels). A document always starts where a row does.

    With None, none starts inside a row. The caller decides this before it enters compiled code: if compiled code
    branched on the length of `documents`, which of its two paths such rows took would depend on what the process had
    compiled before, and the last bits of the result would depend on it too.
    """
    if documents is None:
        return causal_attention(q_BTHE, k_BTKE, v_BTKE)
    if q_BTHE.is_cuda and q_BTHE.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn  # importing it loads the compiler, which takes seconds

        longest = q_BTHE.shape[1]  # an upper bound: the true maximum would make the host wait for the device
        q, k, v = (x.flatten(0, 1) for x in (q_BTHE, k_BTKE, v_BTKE))
        gqa = q.shape[1] != k.shape[1]
        y = varlen_attn(q, k, v, documents, documents, longest, longest, window_size=(-1, 0), enable_gqa=gqa)
        assert isinstance(y, Tensor)  # a tuple only if the log-sum-exp is asked for
        return y.view(q_BTHE.shape)
    return _attention_by_document(q_BTHE, k_BTKE, v_BTKE, documents)


@torch.compiler.disable  # lengths differ from batch to batch: each would be compiled again
def _attention_by_document(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, documents: Tensor) -> Tensor:
    """Compute `packed_attention` without a variable-length kernel: one call for each run of equal lengths."""
    runs = [(length, len(list(run))) for length, run in groupby(documents.diff().tolist())]
    sizes = [length * count for length, count in runs]
    q, k, v = (x.flatten(0, 1).split(sizes) for x in (q_BTHE, k_BTKE, v_BTKE))
    multiple = PADDED_TO if q_BTHE.dtype == torch.bfloat16 else 1
    parts = []
    for i, (length, count) in enumerate(runs):
        rows = (_padded(x[i].unflatten(0, (count, length)), multiple) for x in (q, k, v))
        parts.append(causal_attention(*rows)[:, :length].flatten(0, 1))
    return torch.cat(parts).view(q_BTHE.shape)


def _padded(x_BTHE: Tensor, multiple: int) -> Tensor:
    """Append zeros, which no token before them sees, until the length is a multiple of `multiple`."""
    missing = -x_BTHE.shape[1] % multiple
    return F.pad(x_BTHE, (0, 0, 0, 0, 0, missing)) if missing else x_BTHE  # padding by nothing would copy


def causal_attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
    """Attention of each token to itself and those before it in its row; [B, T, H, E]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2)


def cached_attention(q_BTHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
    """Attention of the last T of S tokens to all up to themselves; [B, T, H, E]."""
    T, S = q_BTHE.shape[1], k_BSKE.shape[1]
    seen_TS = torch.ones(T, S, dtype=torch.bool, device=q_BTHE.device).tril(S - T)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BSKE, v_BSKE))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TS, enable_gqa=gqa).transpose(1, 2)
