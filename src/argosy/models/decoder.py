"""The decoder-only transformer that all families share; their differences are data (`ModelConfig`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelConfig
from argosy.models.attention import Attention, Documents, LayerCache
from argosy.models.delta_net import DeltaCache, GatedDeltaNet
from argosy.models.dropout import AdapterDropout, mask_keys_of_layer
from argosy.models.experts import MoE
from argosy.models.layers import FeedForward, Norm, embedding, itself, linear, local, norm
from argosy.models.loss import (
    ChunkLoss,
    IsLikeliest,
    chunk_loss_and_gradient,
    is_likeliest,
    rows_at_once,
    soft_capped,
    summed_cross_entropy,
    with_misses,
)
from argosy.models.mla import LatentAttention
from argosy.models.mtp import PredictionModule, with_gradient_of
from argosy.models.preference import (
    Answers,
    Preference,
    Sequences,
    answer_scores,
    answer_values,
    last_tokens,
    preference_loss,
)
from argosy.models.quantised_weight import QuantisationScheme
from argosy.models.rope import place_table
from argosy.models.user_code import activation_of
from argosy.plan.layer_spec import RopeSpec, TemperatureSpec, layer_spec
from argosy.plan.mup import logit_factor
from argosy.plan.parameters import Stage, Table, block_table, dense_table, layers_on, parameter_table

Places = RopeSpec | TemperatureSpec
Cache = LayerCache | DeltaCache
"""One layer's cache of the tokens read so far."""


class _Rows(NamedTuple):
    """The rows, as blocks know them."""

    places: dict[Places, tuple[Tensor, ...]]
    documents: dict[int, Documents | None]
    """By the chunk of a layer, 0 without one: `documents` of `attention.packed_attention`."""
    mask_keys: Tensor | None
    """The mask keys of the tokens that this rank computes, int64 [B, t]."""

    def mask_keys_of(self, layer: int) -> Tensor | None:
        return None if self.mask_keys is None else mask_keys_of_layer(self.mask_keys, layer)


# B batch, T tokens, D model width, V vocabulary


def attention_of(config: ModelConfig, layer: int = 0) -> Attention | LatentAttention | GatedDeltaNet:
    """Build the attention of block `layer`."""
    if layer_spec(config, layer).delta_net is not None:
        return GatedDeltaNet(config)
    return LatentAttention(config) if config.mla.kv_rank else Attention(config, layer)


def cache_of(config: ModelConfig, layer: int, max_seq_len: int) -> Cache:
    """Build an empty cache for `attention_of(config, layer)`."""
    spec = layer_spec(config, layer)
    if spec.delta_net is not None:
        return DeltaCache(max_seq_len)
    return LayerCache(max_seq_len, 0 if config.mla.kv_rank else spec.window)


def feed_forward_of(config: ModelConfig, layer: int) -> FeedForward | MoE:
    """Build the feed-forward of block `layer` (from 0)."""
    if config.is_moe_layer(layer):
        return MoE(config)
    return FeedForward(dense_table(config, layer), activation_of(config), config.ffn_limit)


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream, with norms where `model.norms` places them."""

    dropout: AdapterDropout | None = None
    """The dropout of its adapters, if they drop (`models.adapters`)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        table = block_table(config, layer)
        spec = layer_spec(config, layer)
        #: The use of places in queries and keys; and the layer's chunks, each of which is a document.
        self.places, self.chunk = spec.places, spec.window if spec.is_chunked else 0
        self.attention_norm = _norm_or_none(table, "attention_norm", config)
        self.attention = attention_of(config, layer)
        self.attention_post_norm = _norm_or_none(table, "attention_post_norm", config)
        self.mlp_norm = _norm_or_none(table, "mlp_norm", config)
        self.mlp = feed_forward_of(config, layer)
        self.mlp_post_norm = _norm_or_none(table, "mlp_post_norm", config)
        self.scale, self.is_parallel = config.residual_scale, config.norms.place == "parallel"
        self.layer_scale = nn.Parameter(torch.empty(1)) if config.layer_scale else None

    def forward(
        self,
        x_BTD: Tensor,
        places: tuple[Tensor, ...] | None,
        documents: Documents | None,
        cache: Cache | None = None,
        mask_keys: Tensor | None = None,
    ) -> Tensor:
        if self.dropout is not None:
            self.dropout.keys_BT = mask_keys
        h_BTD = x_BTD if self.attention_norm is None else self.attention_norm(x_BTD)
        y_BTD = self.attention(h_BTD, places, documents, cache)
        if self.attention_post_norm is not None:
            y_BTD = self.attention_post_norm(y_BTD)
        x_BTD = x_BTD + (y_BTD if self.scale == 1.0 else y_BTD * self.scale)
        if not self.is_parallel:
            h_BTD = x_BTD if self.mlp_norm is None else self.mlp_norm(x_BTD)
        y_BTD = self.mlp(h_BTD)
        if self.mlp_post_norm is not None:
            y_BTD = self.mlp_post_norm(y_BTD)
        x_BTD = x_BTD + (y_BTD if self.scale == 1.0 else y_BTD * self.scale)
        return x_BTD if self.layer_scale is None else x_BTD * local(self.layer_scale).to(x_BTD.dtype)


def _norm_or_none(table: Table, name: str, config: ModelConfig) -> Norm | None:
    return norm(table, name, config) if f"{name}.weight" in table else None


class Decoder(nn.Module):
    """Turns tokens into logits or, with targets, into their summed loss. With `stage`, one pipeline stage of it.

    Its parameters are those of `plan.parameters.parameter_table`. It is built on the meta device; `materialize` gives
    it memory and initial weights.
    """

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype = torch.float32, stage: Stage | None = None):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.stage = stage = stage or Stage(range(config.layers))
        #: Its parameters, and those of an adapter once it has one (`models.adapters`).
        self.table = table = parameter_table(config, stage)
        #: How matrices are quantised (`models.adapters`), by name.
        self.schemes: dict[str, QuantisationScheme] = {}
        with torch.device("meta"):
            # A tied head is the embedding itself. The weight has no second name: `to_empty` gives each name new memory,
            # which would cut the tie.
            has_embedding, has_head = "embedding.weight" in table, "head.weight" in table
            self.embedding = embedding(table, "embedding", compute_dtype) if has_embedding else None
            self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in layers_on(config, stage)})
            self.norm = norm(table, "norm", config) if stage.last else None
            self.head = linear(table, "head") if has_head else None
            #: The head of a reward model, in place of `head`.
            self.score = linear(table, "score") if "score.weight" in table else None
            #: Modules that predict further tokens, whose blocks are the last of `blocks`.
            further = layers_on(config, stage)[len(stage.layers) :]
            self.mtp = nn.ModuleDict({str(layer): PredictionModule(config) for layer in further})
        self.loss_of_chunk: ChunkLoss = chunk_loss_and_gradient
        #: A loss of the user's, in training; held-out text is scored by `loss_of_chunk` all the same.
        self.user_loss: ChunkLoss | None = None
        #: An objective over whole answers, in place of a loss of tokens.
        self.preference: Preference | None = None
        #: The largest part of the vocabulary that a rank has, in tokens.
        self.longest_part = config.vocab_size
        self.logit_factor = logit_factor(config) * config.logit_scale
        #: True for each token whose target has the highest logit.
        self.is_likeliest: IsLikeliest = is_likeliest
        self.my_tokens: Callable[[Tensor], Tensor] = itself
        #: Takes this rank's stretch of those tokens, where tensor-parallel ranks have one each.
        self.my_stretch: Callable[[Tensor], Tensor] = itself
        #: Sums over the ranks that have other tokens of the same rows.
        self.sum_over_tokens: Callable[[Tensor], Tensor] = itself
        #: Gathers what the head reads: all tokens, where tensor-parallel ranks have a stretch of them each.
        self.for_head: Callable[[Tensor], Tensor] = itself
        #: Called before a part of the model computes: its values may still be on their way from other ranks.
        self.before_use: Callable[[nn.Module], None] = _nothing
        self._tables: dict[Places, tuple[Tensor, ...]] = {}

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        documents: Documents | None = None,
        cache: list[Cache] | None = None,
        sequences: Sequences | None = None,
        further_BTn2: Tensor | None = None,
        mask_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, T, V] in the compute dtype (of a reward model scores [B, T, 1], neither scaled nor
        capped), or with `targets_BT` the summed loss (fp32 scalar).

        With `sequences` that is the loss of `preference`, summed over pairs or judged answers; without gradients, it is
        what `preference.answer_scores` returns of each answer (fp32 [B, S, 2], S tokens of whole rows).

        `x` is tokens [B, T], or for a stage that is not the first the hidden states [B, T, D] of the stage before;
        a stage that is not the last gives hidden states. Targets of -100 do not count. `positions_BT` are the
        tokens' places in their documents. Without `documents` these are found in `positions_BT`, and the host waits for
        the device. Without both, every row is one document.
        With `cache`, the tokens continue those that the cache has read. With `further_BTn2` (`mtp.further_tokens`) the
        loss's gradient, not its value, includes that of further tokens, by `mtp.loss_weight`. With `mask_keys_BT`
        adapters drop inputs.
        """
        start = cache[0].length if cache else 0
        if positions_BT is None:
            positions_BT = torch.arange(start, start + x.shape[1], device=x.device).expand(x.shape[:2])
        if cache is None:
            documents = Documents.of(positions_BT) if documents is None else documents
            if documents.count == len(x):  # no document starts inside a row
                documents = None
        rows = self._rows(positions_BT, documents, cache, mask_keys_BT)
        if self.stage.first:
            self.before_use(self.embedding)  # type: ignore[arg-type]
            x = self._embedded(x)
        for i, layer in enumerate(self.stage.layers):
            self.before_use(self.blocks[str(layer)])
            x = self._block(layer, x, rows, cache[i] if cache else None)
        if self.norm is None:
            return x
        self.before_use(self)
        x = self.norm(x)
        if targets_BT is None:
            weight_VD = local(self.head_weight).to(x.dtype)
            softcap = self.config.logit_softcap if self.score is None else 0.0
            return soft_capped(F.linear(self._scaled(x), weight_VD), softcap)
        loss = self._loss(x, targets_BT, sequences)
        if further_BTn2 is None or not self.mtp:
            return loss
        losses = []
        for i, (name, module) in enumerate(self.mtp.items()):
            assert isinstance(module, PredictionModule)
            tokens_BT, further_BT = further_BTn2[:, :, i].unbind(-1)
            keys = rows.mask_keys_of(int(name))
            x = module.joined(self._embedded(tokens_BT), x, None if keys is None else self.my_stretch(keys))
            x = self._block(int(name), x, rows)
            x = module.norm(x)
            losses.append(self._loss(x, further_BT))
        return with_gradient_of(loss, self.config.mtp.loss_weight * torch.stack(losses).mean())

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        assert self.embedding is not None
        x: Tensor = self.embedding(tokens_BT)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def _rows(
        self,
        positions_BT: Tensor,
        documents: Documents | None,
        cache: list[Cache] | None,
        mask_keys_BT: Tensor | None,
    ) -> _Rows:
        """Return what blocks know of the rows, whose first tokens may be in a cache."""
        cached = cache[0].length if cache else None
        longest = cache[0].max_seq_len if cache else positions_BT.shape[1]
        mine_BT = self.my_tokens(positions_BT)
        upto = (cached or 0) + positions_BT.shape[1]
        tables = self.places_to(upto, positions_BT.device, longest)
        places = {spec: tuple(part[mine_BT] for part in table) for spec, table in tables.items()}
        chunks = {block.chunk for block in self.blocks.values() if isinstance(block, Block)}
        starts = {0: documents}
        for chunk in chunks if cached is None else ():
            if chunk and chunk < positions_BT.shape[1]:  # else no document has more than one
                rows, length = positions_BT.shape
                whole = documents or Documents.of_rows(rows, length, positions_BT.device)
                starts[chunk] = whole.in_chunks(chunk)
        return _Rows(places, starts, None if mask_keys_BT is None else self.my_tokens(mask_keys_BT))

    def _block(self, layer: int, x: Tensor, rows: _Rows, cache: Cache | None = None) -> Tensor:
        block = self.blocks[str(layer)]
        assert isinstance(block, Block)
        places = None if block.places is None else rows.places[block.places]
        documents = rows.documents.get(block.chunk, rows.documents[0])
        y: Tensor = block(x, places, documents, cache, rows.mask_keys_of(layer))
        return y

    def _scaled(self, x: Tensor) -> Tensor:
        """Return what the head reads."""
        if self.score is not None:
            return x
        x = self.for_head(x)
        return x if self.logit_factor == 1.0 else x * self.logit_factor

    def _loss(self, x: Tensor, targets_BT: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Return the summed loss from the hidden states after the last norm; of sequences, as `forward`."""
        x, weight_VD, targets_N = self._scaled(x), self.head_weight, targets_BT.flatten()
        of_chunk, longest = self.loss_of_chunk, self.longest_part
        if self.user_loss is not None and torch.is_grad_enabled():
            of_chunk, longest = self.user_loss, self.config.vocab_size
        softcap = self.config.logit_softcap
        if sequences is not None:
            rows = rows_at_once(local(weight_VD), longest)
            about = x.flatten(0, 1), local(weight_VD)
            starts_BT, ends_BT = (
                self.my_tokens(part) if self.score is None else self.my_stretch(self.my_tokens(part))
                for part in (sequences.starts, last_tokens(sequences.starts))
            )
            where = (starts_BT.flatten(), ends_BT.flatten() if self.score is not None else None)
            answers = Answers(targets_N, *where, sequences, self.sum_over_tokens, of_chunk, rows, softcap)
            if not torch.is_grad_enabled():
                if self.score is None:
                    return answer_scores(*about, answers._replace(of_chunk=with_misses(of_chunk, self.is_likeliest)))
                values_BT = answer_values(*about, answers)
                return torch.stack([values_BT, torch.zeros_like(values_BT)], -1)
            assert self.preference is not None
            return preference_loss(*about, answers, self.preference)
        return summed_cross_entropy(x.flatten(0, 1), local(weight_VD), targets_N, of_chunk, longest, softcap)

    @property
    def head_weight(self) -> Tensor:
        """The weight that turns hidden states into logits, [V, D], or a score, [1, D]; only the last stage has one."""
        module = self.score or self.head or self.embedding
        assert module is not None
        return module.weight

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    def new_cache(self, max_seq_len: int) -> list[Cache]:
        """An empty key/value cache for each block."""
        return [cache_of(self.config, layer, max_seq_len) for layer in self.stage.layers]

    def places_to(self, seq_len: int, device: torch.device, longest: int = 0) -> dict[Places, tuple[Tensor, ...]]:
        """Return the table of at least `seq_len` places for each kind of the blocks, for rows of `longest` tokens (0:
        as many); they are computed once and kept."""
        found: dict[Places, tuple[Tensor, ...]] = {}
        for block in self.blocks.values():
            assert isinstance(block, Block)
            if block.places is None or block.places in found:
                continue
            places = block.places.of_rows(longest or seq_len)
            known = self._tables.get(places)
            if known is None or known[0].shape[0] < seq_len or known[0].device != device:
                with torch.inference_mode(False):  # training steps use a table that evaluation made
                    # A power of two, so that generation, token by token, seldom computes it again.
                    known = self._tables[places] = place_table(places, 1 << (seq_len - 1).bit_length(), device)
            found[block.places] = known
        return found


def _nothing(module: nn.Module) -> None:
    pass
