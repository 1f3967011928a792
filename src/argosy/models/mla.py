"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values come from one narrow vector.

Each token has one vector of `kv_rank` numbers, from which every head computes its own key and value, and one rotated
part of a key, which all heads share. A cache keeps only these two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelConfig
from argosy.models.attention import AttentionCore, Documents, LayerCache, cached_attention, packed_attention
from argosy.models.layers import linear, rms_norm
from argosy.models.rope import attention_scale, rotate
from argosy.plan.parameters import latent_attention_table

# B batch, T tokens, S tokens in the cache, D model width, C kv_rank, H heads (those of this rank), R rotated width
# E width of a query or key head (nope_width + R), V width of a value head


class LatentAttention(nn.Module):
    """Causal self-attention with the `forward` of `attention.Attention`.

    `q_down`, `kv_down` and the norms compute what all heads share; `q` (or `q_up`), `kv_up` and `o` have a part for
    each head. The last R outputs of `kv_down` are the shared, rotated key. The last R outputs of each head in `q` (or
    `q_up`) are its rotated part. The outputs of a head in `kv_up` are its key, then its value. A YaRN temperature
    scales the whole head, not only its rotated part.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.mla = config.mla
        table = latent_attention_table(config)
        if config.mla.q_rank:
            self.q_down = linear(table, "q_down")
            self.q_norm = rms_norm(table, "q_norm", config.norm_eps)
            self.q_up = linear(table, "q_up")
        else:
            self.q = linear(table, "q")
        self.kv_down = linear(table, "kv_down")
        self.kv_norm = rms_norm(table, "kv_norm", config.norm_eps)
        self.kv_up = linear(table, "kv_up")
        self.o = linear(table, "o")
        self.temperature = attention_scale(config.rope_scaling)
        self.core: AttentionCore = packed_attention

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        documents: Documents | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """`rotary`: cosines and sines of these tokens, of width R; `documents`: see `packed_attention`."""
        assert rotary is not None
        q_BTHE = self._queries(x_BTD, rotary)
        latent_BTC, key_BTR = self.kv_down(x_BTD).split((self.mla.kv_rank, self.mla.rope_width), dim=-1)
        latent_BTC, key_BTR = self.kv_norm(latent_BTC), rotate(key_BTR.unsqueeze(2), *rotary).squeeze(2)
        if cache is None:
            y_BTHE = self.core(q_BTHE, *self._keys_and_values(latent_BTC, key_BTR), documents)
        else:
            y_BTHE = cached_attention(q_BTHE, *self._keys_and_values(*cache.append(latent_BTC, key_BTR)))
        return self.o(y_BTHE[..., : self.mla.value_width].flatten(2))

    def _queries(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x_BTD))) if self.mla.q_rank else self.q(x_BTD)
        q_BTHE = q.unflatten(-1, (-1, self.mla.key_width))
        plain, rotated = q_BTHE.split((self.mla.nope_width, self.mla.rope_width), dim=-1)
        return torch.cat((plain * self.temperature**2, rotate(rotated, *rotary)), dim=-1)

    def _keys_and_values(self, latent_BSC: Tensor, key_BSR: Tensor) -> tuple[Tensor, Tensor]:
        """Return both for every head, [B, S, H, E]. Values are padded with zeros: fused kernels need equal widths."""
        kv = self.kv_up(latent_BSC).unflatten(-1, (-1, self.mla.nope_width + self.mla.value_width))
        plain, v_BSHV = kv.split((self.mla.nope_width, self.mla.value_width), dim=-1)
        shared = key_BSR.unsqueeze(2).expand(-1, -1, plain.shape[2], -1)
        return torch.cat((plain, shared), dim=-1), F.pad(v_BSHV, (0, self.mla.key_width - self.mla.value_width))
