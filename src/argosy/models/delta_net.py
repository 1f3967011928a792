"""Gated delta-net (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks"): linear attention, a state for each head.

A head keeps a matrix S that maps keys to values. For each token it decays, corrects what S holds for the token's key by
the gated delta rule, and is read by the query:

    S' = exp(g) S        S = S' + beta k (v - S'^T k)^T        y = S^T q

Rows are computed in chunks (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", section 3.2):
within a chunk all corrections come from one triangular system, and only the state goes from chunk to chunk. A document
that starts inside a row begins with an empty state, and its convolution sees nothing before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula

from argosy.compiler import operator
from argosy.config.model import ModelConfig
from argosy.models.attention import Documents
from argosy.models.layers import linear, local, rms_norm
from argosy.plan.layer_spec import DELTA_CHUNK as CHUNK
from argosy.plan.parameters import delta_net_table

NORM_EPS = 1e-6
"""Added to the square of a query's or key's length; that of the published models' kernels."""

# B batch, T tokens, D model width, W width of the convolution, P channels of a stream
# J key heads, R value heads for each of them, H = J R value heads, K key width, V value width
# N chunks, C tokens of a chunk, G = B H heads of all rows


class DeltaStreams(NamedTuple):
    """The values that a layer computes from each token alone."""

    q_BTP: Tensor
    k_BTP: Tensor
    v_BTP: Tensor
    beta_BTH: Tensor
    """Before the sigmoid."""
    decay_BTH: Tensor
    """Before its bias and the softplus."""


class DeltaWeights(NamedTuple):
    """The parameters of a layer's heads."""

    q_conv: Tensor
    k_conv: Tensor
    v_conv: Tensor
    """Kernels of the convolutions, [P, 1, W]."""
    decay_log: Tensor
    decay_bias: Tensor

    def part(self, rank: int, ranks: int) -> DeltaWeights:
        """Return those of one of equal parts of the heads."""
        return DeltaWeights(*(x.chunk(ranks)[rank] for x in self))


class DeltaCore(Protocol):
    """The signature of `delta_attention`. Context parallelism puts in one that exchanges tokens for heads."""

    def __call__(
        self,
        streams: DeltaStreams,
        weights: DeltaWeights,
        documents: Documents | None,
        key_width: int,
        recomputes: bool,
    ) -> Tensor: ...


class DeltaCache:
    """The state of one layer after the tokens read so far, [B, H, K, V] (None: empty), and the last W - 1 inputs of
    convolutions. The first tokens say how many rows and heads this rank has."""

    def __init__(self, max_seq_len: int):
        self.state: Tensor | None = None
        self.inputs = list[Tensor]()
        self.length, self.max_seq_len = 0, max_seq_len

    def append(self, q_BTP: Tensor, k_BTP: Tensor, v_BTP: Tensor, width: int) -> list[Tensor]:
        """Return the new inputs of convolutions of this width with the W - 1 before them, and keep the last W - 1."""
        self.length += q_BTP.shape[1]
        self.inputs = self.inputs or [x.new_zeros(len(x), width - 1, x.shape[2]) for x in (q_BTP, k_BTP, v_BTP)]
        whole = [torch.cat(both, 1) for both in zip(self.inputs, (q_BTP, k_BTP, v_BTP), strict=True)]
        self.inputs = [x[:, x.shape[1] - kept.shape[1] :] for x, kept in zip(whole, self.inputs, strict=True)]
        return whole


class GatedDeltaNet(nn.Module):
    """The layer with the `forward` of `attention.Attention`, and the parameters of `delta_net_table`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        table = delta_net_table(config)
        self.key_width, self.value_width = config.delta_net.key_width, config.delta_net.value_width
        self.q_in, self.k_in, self.v_in = (linear(table, f"{name}_in") for name in "qkv")
        self.gate_in, self.beta_in, self.decay_in = (linear(table, f"{n}_in") for n in ("gate", "beta", "decay"))
        for name in DeltaWeights._fields:
            self.register_parameter(name, nn.Parameter(torch.empty(table[name].shape)))
        self.out_norm = rms_norm(table, "out_norm", config.norm_eps)
        self.out = linear(table, "out")
        self.core: DeltaCore = delta_attention
        #: False where the whole block is computed again (`parallel.recompute`).
        self.recomputes = True

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        documents: Documents | None,
        cache: DeltaCache | None = None,
    ) -> Tensor:
        """`rotary` is not used: the state has the order; `documents`: see `attention.packed_attention`."""
        projections = (self.q_in, self.k_in, self.v_in, self.beta_in, self.decay_in)
        streams = DeltaStreams(*(projection(x_BTD) for projection in projections))
        weights = DeltaWeights(*(local(self.get_parameter(name)) for name in DeltaWeights._fields))
        if cache is None:
            y_BTHV = self.core(streams, weights, documents, self.key_width, self.recomputes)
        else:
            y_BTHV = cached_delta_attention(streams, weights, cache, self.key_width)
        gate_BTHV = self.gate_in(x_BTD).unflatten(-1, (-1, self.value_width))
        return self.out((self.out_norm(y_BTHV) * F.silu(gate_BTHV)).flatten(2))


def delta_attention(
    streams: DeltaStreams, weights: DeltaWeights, documents: Documents | None, key_width: int, recomputes: bool
) -> Tensor:
    """Return what the heads read, [B, T, H, V], from empty states at the starts of documents.

    recomputes: backward computes the heads again from the streams, as FlashAttention does with scores: all between
    takes ten times the memory of these.
    """
    if recomputes and torch.is_grad_enabled():
        inputs = streams, weights, documents, key_width, False
        y: Tensor = checkpoint(delta_attention, *inputs, use_reentrant=False, preserve_rng_state=False)
        return y
    rows, length = streams.q_BTP.shape[:2]
    places_BT = None if documents is None else places_in(documents.starts, rows, length)
    q, k, v = (short_convolution(x, kernel, places_BT) for x, kernel in zip(streams[:3], weights[:3], strict=True))
    return chunked_delta_rule(*_heads(q, k, v, streams, weights, key_width), places_BT)[0].to(streams.q_BTP.dtype)


def cached_delta_attention(streams: DeltaStreams, weights: DeltaWeights, cache: DeltaCache, key_width: int) -> Tensor:
    """Return what the heads read, [B, T, H, V], from the cache's states on, and leave the states after in it."""
    length = streams.q_BTP.shape[1]
    inputs = cache.append(*streams[:3], weights.q_conv.shape[-1])
    q, k, v = (short_convolution(x, kernel)[:, -length:] for x, kernel in zip(inputs, weights[:3], strict=True))
    heads = _heads(q, k, v, streams, weights, key_width)
    if length == 1 and cache.state is not None:
        y_BTHV, cache.state = delta_step(*heads, cache.state)
    else:
        y_BTHV, cache.state = chunked_delta_rule(*heads, None, cache.state)
    return y_BTHV.to(streams.q_BTP.dtype)


def places_in(starts: Tensor, rows: int, length: int) -> Tensor:
    """Return each token's place in its document, int32 [B, T], counted from 0; `starts`: `Documents.starts`."""
    tokens = torch.arange(rows * length, dtype=torch.int32, device=starts.device)
    return (tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]).view(rows, length)


def short_convolution(x_BTP: Tensor, kernel_P1W: Tensor, places_BT: Tensor | None = None) -> Tensor:
    """Return silu of the weighted sum of each token and the W - 1 before it in its document; each channel alone."""
    kernel_PW, length = kernel_P1W.squeeze(1).float(), x_BTP.shape[1]
    total = x_BTP * kernel_PW[:, -1]
    for back in range(1, kernel_PW.shape[1]):
        earlier = F.pad(x_BTP, (0, 0, back, 0))[:, :length]
        if places_BT is not None:
            earlier = earlier.masked_fill((places_BT < back)[..., None], 0.0)
        total = total + earlier * kernel_PW[:, -1 - back]
    return F.silu(total).to(x_BTP.dtype)


def _heads(
    q: Tensor, k: Tensor, v: Tensor, streams: DeltaStreams, weights: DeltaWeights, key_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the operands of the delta rule, by heads and in fp32."""
    q_BTJK, k_BTJK = (_unit(x.float().unflatten(-1, (-1, key_width))) for x in (q, k))
    v_BTHV = v.float().unflatten(-1, (streams.beta_BTH.shape[-1], -1))
    rates_BTH = F.softplus(streams.decay_BTH.float() + weights.decay_bias.float())
    log_decay_BTH = -weights.decay_log.float().exp() * rates_BTH
    return q_BTJK * key_width**-0.5, k_BTJK, v_BTHV, streams.beta_BTH.float().sigmoid(), log_decay_BTH


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `chunked_delta_rule` of one token, [B, 1, H, V], and the state after it."""
    q_BHK, k_BHK = (x[:, 0].repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
    state = state * log_decay[:, 0, :, None, None].exp()
    held_BHV = torch.einsum("bhk,bhkv->bhv", k_BHK, state)
    state = state + torch.einsum("bhk,bhv->bhkv", k_BHK, (v[:, 0] - held_BHV) * beta[:, 0, :, None])
    return torch.einsum("bhk,bhkv->bhv", q_BHK, state)[:, None], state


def chunked_delta_rule(
    q_BTJK: Tensor,
    k_BTJK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor,
    places_BT: Tensor | None,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what the queries read, [B, T, H, V], and the state after the last token, [B, H, K, V]; all in fp32.

    `places_BT`: each token's place in its document; None: no document starts inside a row. `state_BHKV`: the state
    before the first token; None: empty. With documents inside rows, the returned state is of no use.
    """
    (B, T, H), J = beta_BTH.shape, q_BTJK.shape[2]
    q, k = (_in_chunks(x.unsqueeze(3)) for x in (q_BTJK, k_BTJK))
    v, beta, log_decay = (_in_chunks(x.unflatten(2, (J, H // J))) for x in (v_BTHV, beta_BTH, log_decay_BTH))
    since_start = log_decay.cumsum(-1)
    between = since_start[..., :, None] - since_start[..., None, :]
    places = None if places_BT is None else _in_chunks(places_BT[..., None, None])
    between = between.masked_fill(_unseen(places, beta.shape[-1], beta.device), -torch.inf).exp()
    from_start, to_end, across = (
        since_start.exp(),
        (since_start[..., -1:] - since_start).exp(),
        since_start[..., -1].exp(),
    )
    if places is not None:
        index, last = torch.arange(CHUNK, device=places.device), places[..., -1:]
        from_start = from_start.masked_fill(places <= index, 0.0)  # queries of documents that start in the chunk
        to_end = to_end.masked_fill(last < CHUNK - 1 - index, 0.0)  # keys of documents that end in it
        across = across.masked_fill(last.squeeze(-1) < CHUNK, 0.0)
    k_transposed = k.transpose(-1, -2)
    # (1 + L) of the corrections u - w S, which hold for any state S before the chunk.
    system = (k @ k_transposed) * (beta[..., :, None] * between)
    sides = torch.cat((v * beta[..., None], k * (beta * from_start)[..., None]), -1)
    u, w = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    shape = v.shape[1:4]  # B, J, R
    if state_BHKV is None:
        state_BHKV = v.new_zeros(B, H, k.shape[-1], v.shape[-1])
    values, states, last = delta_scan(
        w.flatten(1, 3), u.flatten(1, 3), (k * to_end[..., None]).flatten(1, 3), across.flatten(1, 3),
        state_BHKV.flatten(0, 1),
    )  # fmt: skip
    values, states = values.unflatten(1, shape), states.unflatten(1, shape)
    y = (q * from_start[..., None]) @ states + ((q @ k_transposed) * between) @ values
    y_BTHV = y.permute(1, 0, 4, 2, 3, 5).reshape(B, -1, H, v.shape[-1])[:, :T]
    return y_BTHV, last.unflatten(0, (B, H))


def _in_chunks(x_BTJR: Tensor) -> Tensor:
    """Return [N, B, J, R, C, ...] of [B, T, J, R, ...], with zeros after the last token."""
    missing = -x_BTJR.shape[1] % CHUNK
    if missing:
        x_BTJR = F.pad(x_BTJR, (0, 0) * (x_BTJR.ndim - 2) + (0, missing))
    return x_BTJR.unflatten(1, (-1, CHUNK)).movedim(0, 1).movedim(2, 4)


def _unseen(places: Tensor | None, chunk: int, device: torch.device) -> Tensor:
    """Return the keys of a chunk that a query of it does not see: those ahead, and those of other documents."""
    index = torch.arange(chunk, device=device)
    ahead = index[None, :] - index[:, None]
    return ahead > 0 if places is None else (ahead > 0) | (places[..., :, None] < -ahead)


# From chunk to chunk there is a loop, which the compiler would unroll. As one operator it is left as it is, has a
# backward of its own, and is kept or recomputed as a whole.


@operator("delta_scan")
def delta_scan(w: Tensor, u: Tensor, k: Tensor, keep: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state from chunk to chunk: values = u - w S, then S becomes keep S + k^T values.

    w, k: [N, G, C, K]; u: [N, G, C, V]; keep: [N, G]; state: S before the first chunk, [G, K, V].
    Returns values [N, G, C, V], S before each chunk [N, G, K, V], and S after the last.
    """
    values, states = torch.empty_like(u, memory_format=torch.contiguous_format), state.new_empty(len(w), *state.shape)
    for i in range(len(w)):
        states[i] = state
        torch.baddbmm(u[i], w[i], state, alpha=-1, out=values[i])
        state = torch.baddbmm(state * keep[i][:, None, None], k[i].mT, values[i])
    return values, states, state


@torch.library.register_fake("argosy::delta_scan")
def _(w: Tensor, u: Tensor, k: Tensor, keep: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    states = state.new_empty(len(w), *state.shape)
    return torch.empty_like(u, memory_format=torch.contiguous_format), states, state.new_empty(state.shape)


@operator("delta_scan_backward")
def _delta_scan_backward(
    dvalues: Tensor, dstates: Tensor, dstate: Tensor, w: Tensor, k: Tensor, keep: Tensor, values: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    du, after = torch.empty_like(values), torch.empty_like(states)  # after: gradients of S after each chunk
    for i in reversed(range(len(w))):
        after[i] = dstate
        torch.baddbmm(dvalues[i], k[i], dstate, out=du[i])
        dstate = torch.baddbmm(dstates[i] + dstate * keep[i][:, None, None], w[i].mT, du[i], alpha=-1)
    return -(du @ states.mT), du, values @ after.mT, (states * after).sum((-1, -2)), dstate


@torch.library.register_fake("argosy::delta_scan_backward")
def _(
    dvalues: Tensor, dstates: Tensor, dstate: Tensor, w: Tensor, k: Tensor, keep: Tensor, values: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dw, dk = (x.new_empty(x.shape) for x in (w, k))
    return dw, torch.empty_like(values), dk, keep.new_empty(keep.shape), dstate.new_empty(dstate.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    w, _, k, keep, _ = inputs
    ctx.save_for_backward(w, k, keep, *output[:2])


def _gradients(ctx: Any, dvalues: Tensor, dstates: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
    dw, du, dk, dkeep, dstate = _delta_scan_backward(dvalues, dstates, dstate, *ctx.saved_tensors)
    return dw, du, dk, dkeep, dstate


torch.library.register_autograd("argosy::delta_scan", _gradients, setup_context=_keep_for_backward)


@register_flop_formula(torch.ops.argosy.delta_scan, get_raw=True)
def _scan_flops(w: Tensor, u: Tensor, *others: Any, **_: Any) -> int:
    return 4 * w.numel() * u.shape[-1]


@register_flop_formula(torch.ops.argosy.delta_scan_backward, get_raw=True)
def _scan_backward_flops(dvalues: Tensor, dstates: Tensor, dstate: Tensor, w: Tensor, *others: Any, **_: Any) -> int:
    return 8 * w.numel() * dvalues.shape[-1]


@register_flop_formula(torch.ops.aten.linalg_solve_triangular, get_raw=True)
def _solve_flops(system: Tensor, sides: Tensor, *others: Any, **_: Any) -> int:
    return system.shape[-1] * sides.numel()
