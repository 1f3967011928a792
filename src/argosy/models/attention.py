"""Causal self-attention with grouped queries, over packed documents or with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.accelerator import CPU, sent_to
from argosy.compiler import outside_graphs, varies
from argosy.config.model import ModelConfig
from argosy.models.attention_kernels import products_are_faster
from argosy.models.banded_attention import banded_attention
from argosy.models.layers import itself, linear, local, norm, plain_rms_norm
from argosy.models.rope import rotate
from argosy.plan.layer_spec import layer_spec
from argosy.plan.mup import query_factor
from argosy.plan.parameters import attention_table

# B batch, T tokens, S tokens in the cache, D model width, H query heads, K key/value heads, E width of a query or key
# head, V of a value head


@dataclass(frozen=True)
class Documents:
    """The places where documents start in the B*T tokens laid end to end, then B*T itself; int32. One always starts
    where a row does."""

    starts: Tensor
    """On the tokens' device: the `cu_seqlens` of variable-length attention kernels."""
    on_host: Tensor
    """In host memory: for what is cut up by them. If that asked the device, the host would wait in each layer."""

    def __post_init__(self) -> None:
        varies(self.starts, self.on_host)

    @classmethod
    def of(cls, positions_BT: Tensor) -> Documents:
        """Return the documents of tokens with these places in them; positions on a GPU are waited for."""
        starts = (positions_BT.flatten() == 0).nonzero().flatten()
        on_device = F.pad(starts, (0, 1), value=positions_BT.numel()).to(torch.int32)
        return cls(on_device, on_device.cpu())

    @classmethod
    def of_rows(cls, rows: int, length: int, device: torch.device) -> Documents:
        """Return rows of one document each."""
        on_host = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        return cls(sent_to(device, on_host), on_host)

    def in_chunks(self, chunk: int) -> Documents:
        """Return each chunk of a document, counted from its start, as a document of its own."""
        starts: list[int] = self.on_host.tolist()
        cut = [place for start, end in pairwise(starts) for place in range(start, end, chunk)]
        on_host = torch.tensor([*cut, starts[-1]], dtype=torch.int32)
        return Documents(sent_to(self.starts.device, on_host), on_host)

    @property
    def count(self) -> int:
        return self.on_host.shape[0] - 1


class AttentionCore(Protocol):
    """The signature of `packed_attention`. Context parallelism puts in one that sees the other ranks' tokens too."""

    def __call__(
        self,
        q_BTHE: Tensor,
        k_BTKE: Tensor,
        v_BTKE: Tensor,
        documents: Documents | None,
        window: int = 0,
        softcap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor: ...


class LayerCache:
    """Keys [B, max_seq_len, K, E] and values [B, max_seq_len, K, V] of one layer for the tokens read so far, or the
    latents and rotated keys that these come from (`models.mla`). Of a layer with a window, it holds only those that
    later tokens see. The first tokens say how many rows and heads this rank has."""

    def __init__(self, max_seq_len: int, window: int = 0):
        self._window, self._room = window, 0 if window else max_seq_len
        self.length, self.max_seq_len = 0, max_seq_len

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store what the new tokens have, [B, T, ...], and return what all have that they may see, up to themselves:
        [B, S, ...]."""
        if not self.length:
            self.keys, self.values = (x.new_zeros(len(x), self._room, *x.shape[2:]) for x in (keys, values))
        begin, self.length = self.length, self.length + keys.shape[1]
        if self._window:
            keys, values = torch.cat((self.keys, keys), 1), torch.cat((self.values, values), 1)
            self.keys, self.values = (x[:, max(0, x.shape[1] - self._window + 1) :] for x in (keys, values))
            return keys, values
        self.keys[:, begin : self.length] = keys
        self.values[:, begin : self.length] = values
        return self.keys[:, : self.length], self.values[:, : self.length]


class Attention(nn.Module):
    """Attention of the layer that `spec` describes, with the parameters of `plan.parameters.attention_table`."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        settings, spec = config.attention, layer_spec(config, layer)
        self.head_width, self.value_width, self.kv_heads = spec.head_width, spec.value_width, spec.kv_heads
        table = attention_table(config, layer)
        self.q, self.k = linear(table, "q"), linear(table, "k")
        self.v = linear(table, "v") if spec.has_values else None
        self.o = linear(table, "o")
        has_weights = spec.has_qk_norm and settings.norm_weights
        plain = partial(plain_rms_norm, eps=config.norm_eps) if spec.has_qk_norm else itself
        self.q_norm: Callable[[Tensor], Tensor] = norm(table, "q_norm", config) if has_weights else plain
        self.k_norm: Callable[[Tensor], Tensor] = norm(table, "k_norm", config) if has_weights else plain
        self.norms_all = has_weights and settings.norm_over == "all"
        self.norms_last = settings.norm_after_rotary
        self.value_norm_eps = config.norm_eps if settings.value_norm else None
        self.value_scale = settings.value_scale
        self.out_gate = linear(table, "out_gate") if settings.gate else None
        self.gate = torch.sigmoid if settings.gate_kind == "sigmoid" else F.softplus
        self.gates_heads = settings.gate_over == "head"
        self.sinks = nn.Parameter(torch.empty(table["sinks"].shape)) if spec.has_sinks else None
        #: Where scores are computed all are as wide: values that are narrower, or queries and keys, are padded.
        self.core_width = spec.core_width
        self.query_factor = query_factor(config) * (self.core_width / spec.head_width) ** 0.5
        if settings.scale:
            self.query_factor *= settings.scale * spec.head_width**0.5
        self.window, self.is_chunked, self.softcap = spec.window, spec.is_chunked, settings.softcap
        self.core: AttentionCore = packed_attention

    def forward(
        self,
        x_BTD: Tensor,
        places: tuple[Tensor, ...] | None,
        documents: Documents | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """`places`: cosines and sines of these tokens, or a factor on their queries, None for neither; `documents`: see
        `packed_attention`. In a layer with chunks each is a document."""
        q_BTHE = self._placed(self.q(x_BTD), self.q_norm, places)
        if places is not None and len(places) == 1:
            q_BTHE = (q_BTHE * places[0][..., None]).to(q_BTHE.dtype)  # the factor is fp32
        if self.query_factor != 1.0:
            q_BTHE = q_BTHE * self.query_factor
        k_BTX = self.k(x_BTD)
        k_BTKE = self._placed(k_BTX, self.k_norm, places)
        v_BTKV = self._values(k_BTX if self.v is None else self.v(x_BTD))
        sinks_H = None if self.sinks is None else local(self.sinks)
        if cache is not None:
            k_BSKE, v_BSKE = (self._padded(x) for x in cache.append(k_BTKE, v_BTKV))
            first = cache.length - k_BSKE.shape[1] if self.is_chunked else None
            q_BTHE = self._padded(q_BTHE)
            y_BTHE = cached_attention(q_BTHE, k_BSKE, v_BSKE, self.window, self.softcap, sinks_H, first)
        else:
            q, k, v = (self._padded(x) for x in (q_BTHE, k_BTKE, v_BTKV))
            y_BTHE = self.core(q, k, v, documents, self.window, self.softcap, sinks_H)
        y_BTHV = y_BTHE if self.core_width == self.value_width else y_BTHE[..., : self.value_width]
        if self.out_gate is None:
            return self.o(y_BTHV.flatten(2))
        gate = self.gate(self.out_gate(x_BTD))
        return self.o((y_BTHV * gate[..., None]).flatten(2) if self.gates_heads else y_BTHV.flatten(2) * gate)

    def _values(self, x: Tensor) -> Tensor:
        v_BTKV = x.unflatten(-1, (-1, self.value_width))
        if self.value_norm_eps is not None:
            v_BTKV = plain_rms_norm(v_BTKV, self.value_norm_eps)
        return v_BTKV if self.value_scale == 1.0 else v_BTKV * self.value_scale

    def _padded(self, x_BTHX: Tensor) -> Tensor:
        missing = self.core_width - x_BTHX.shape[-1]
        return F.pad(x_BTHX, (0, missing)) if missing else x_BTHX

    def _placed(self, x: Tensor, norm: Callable[[Tensor], Tensor], places: tuple[Tensor, ...] | None) -> Tensor:
        """Return queries or keys by heads, with their norm and rotation."""
        x_BTHE = (norm(x) if self.norms_all else x).unflatten(-1, (-1, self.head_width))
        if not self.norms_all and not self.norms_last:
            x_BTHE = norm(x_BTHE)
        if places is not None and len(places) == 2:
            x_BTHE = rotate(x_BTHE, *places)
        return norm(x_BTHE) if self.norms_last else x_BTHE


def packed_attention(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    documents: Documents | None,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention inside each document and never across; returns [B, T, H, E].

    With `documents` None, none starts inside a row. The caller decides this before it enters compiled code: if compiled
    code branched on the length of `documents`, which of its two paths such rows took would depend on what the process
    had compiled before, and the last bits of the result would depend on it too.

    `window`: a token sees as many tokens up to itself; 0: all of its document. `softcap`, `sinks_H`: as in
    `banded_attention`.
    """
    has_kernel = q_BTHE.is_cuda and q_BTHE.dtype in (torch.bfloat16, torch.float16)
    by_products = torch.compiler.is_compiling() and products_are_faster(q_BTHE)
    # One operator, which the compiler takes whole.
    by_document = by_products or (documents is not None and q_BTHE.device.type == "cpu")
    if softcap or sinks_H is not None or (window and not has_kernel) or by_document:
        starts = _row_starts(q_BTHE, CPU) if documents is None else documents.on_host
        q, k, v = (x.flatten(0, 1) for x in (q_BTHE, k_BTKE, v_BTKE))
        return banded_attention(q, k, v, starts, starts, window, softcap, sinks_H, by_products).view(q_BTHE.shape)
    if documents is None and not window:
        return causal_attention(q_BTHE, k_BTKE, v_BTKE)
    if has_kernel:
        from torch.nn.attention.varlen import varlen_attn  # importing it loads the compiler, which takes seconds

        longest = q_BTHE.shape[1]  # an upper bound: the true maximum would make the host wait for the device
        q, k, v = (x.flatten(0, 1) for x in (q_BTHE, k_BTKE, v_BTKE))
        gqa = q.shape[1] != k.shape[1]
        starts = _row_starts(q_BTHE, q.device) if documents is None else documents.starts
        y = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(window - 1, 0), enable_gqa=gqa)
        assert isinstance(y, Tensor)  # a tuple only if the log-sum-exp is asked for
        return y.view(q_BTHE.shape)
    assert documents is not None
    return _attention_by_document(q_BTHE, k_BTKE, v_BTKE, documents.on_host)


def _row_starts(x_BTHE: Tensor, device: torch.device) -> Tensor:
    """Return where rows start, then their end: where documents do if each row is one."""
    rows, length = x_BTHE.shape[:2]
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)


@outside_graphs  # lengths differ from batch to batch: each would be compiled again
def _attention_by_document(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts: Tensor) -> Tensor:
    """Compute `packed_attention` without a variable-length kernel: one call for each run of equal lengths."""
    runs = [(length, len(list(run))) for length, run in groupby(starts.diff().tolist())]
    sizes = [length * count for length, count in runs]
    q, k, v = (x.flatten(0, 1).split(sizes) for x in (q_BTHE, k_BTKE, v_BTKE))
    parts = []
    for i, (length, count) in enumerate(runs):
        rows = (x[i].unflatten(0, (count, length)) for x in (q, k, v))
        parts.append(causal_attention(*rows).flatten(0, 1))
    return torch.cat(parts).view(q_BTHE.shape)


def causal_attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
    """Attention of each token to itself and those before it in its row; [B, T, H, E]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2)


def cached_attention(
    q_BTHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    first: int | None = None,
) -> Tensor:
    """Attention of the last T of S tokens to all up to themselves, or the last `window` of these; [B, T, H, E].

    first: the place of the first of the S tokens, if tokens see those of their own chunk of `window` tokens.
    """
    T, S = q_BTHE.shape[1], k_BSKE.shape[1]
    if softcap or sinks_H is not None:
        q_starts, k_starts = (torch.arange(0, len(q_BTHE) * n + 1, n, dtype=torch.int32) for n in (T, S))
        q, k, v = (x.flatten(0, 1) for x in (q_BTHE, k_BSKE, v_BSKE))
        return banded_attention(q, k, v, q_starts, k_starts, window, softcap, sinks_H).view(q_BTHE.shape)
    seen_TS = torch.ones(T, S, dtype=torch.bool, device=q_BTHE.device).tril(S - T)
    if first is not None:
        chunk_S = (torch.arange(S, device=q_BTHE.device) + first) // window
        seen_TS &= chunk_S[S - T :, None] == chunk_S
    elif window:
        seen_TS = seen_TS.triu(S - T - window + 1)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BSKE, v_BSKE))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TS, enable_gqa=gqa).transpose(1, 2)
