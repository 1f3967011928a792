"""Mixture of experts: a router sends each token to a few of many feed-forwards (Shazeer et al. 2017).

Mixtral, Qwen3-MoE and DeepSeek-V3 are settings of one layer (`config.model.MoEConfig`). A token's result does not
depend on the other tokens of its batch. Only a capacity, which drops tokens, makes it depend on those of its own row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.accelerator import is_accelerator
from argosy.compiler import outside_graphs
from argosy.config.model import ModelConfig, MoEConfig
from argosy.matmul import dense_by_group
from argosy.models.layers import Activation, FeedForward, gated, held, linear, local
from argosy.models.quantised_weight import QuantisationScheme, QuantisedWeight, multiply
from argosy.models.router import Router, Routing
from argosy.models.user_code import activation_of
from argosy.plan.parameters import Table, inside, moe_table

# B rows, T tokens of a row (those that this rank has), D model width, F hidden width of an expert
# E experts, e of them on this rank, K experts of a token, P pairs of a token and one of its experts, sorted by expert


def moe_layers(model: nn.Module) -> Iterator[MoE]:
    """Yield the mixtures of experts in `model`, in their order."""
    return (module for module in model.modules() if isinstance(module, MoE))


class MoE(nn.Module):
    """The weighted sum of each token's own few experts, and the experts that all tokens share.

    The losses that keep the experts in balance are not part of the output: their gradients join those of the model's
    loss in backward, with the factor `loss_weight`. Set it to the factor by which the model's *summed* token loss is
    multiplied before `backward` (one over the tokens of the global batch, times any loss scale).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = moe = config.moe
        table = moe_table(config)
        self.router = Router(moe, inside(table, "router"))
        activation = activation_of(config), config.ffn_limit
        self.experts = Experts(moe, inside(table, "experts"), *activation)
        self.shared = FeedForward(inside(table, "shared"), *activation) if moe.shared_experts else None
        self.shared_gate = linear(table, "shared_gate") if moe.shared_experts and moe.shared_gate else None
        self.rows = Rows()
        self.loss_weight = 1.0
        self._load: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        routing = self.router(x_BTD)
        training = torch.is_grad_enabled()  # true in a recomputed forward pass too
        experts_BTK = self._within_capacity(routing.experts_BTK) if training else routing.experts_BTK
        shared = None if self.shared is None else partial(self.shared, x_BTD)
        beside = shared if self.experts.tokens_travel else None
        y_BTD, shared_BTD = self.experts(x_BTD, experts_BTK, routing.weights_BTK, beside=beside)
        if shared is not None:
            shared_BTD = shared() if beside is None else shared_BTD
            if self.shared_gate is not None:
                shared_BTD = shared_BTD * self.shared_gate(x_BTD).sigmoid()
            y_BTD = y_BTD + shared_BTD
        return self._balanced(y_BTD, routing, experts_BTK) if training else y_BTD

    def take_load(self) -> Tensor:
        """Return the load of all backward passes since the last call, fp64 [2E+1], for `Load.of`; loads add up."""
        load, self._load = self._load, None
        if load is None:
            load = torch.zeros(2 * self.config.experts + 1, dtype=torch.float64, device=self.router.weight.device)
        return load

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor) -> None:
        """Move each expert's bias by bias_rate towards an even load (Wang et al. 2024, "Loss-Free Balancing").

        `counts_E`: the tokens that the whole step's batch sent to each. Without balance = "bias", do nothing.
        """
        if self.router.bias is not None:
            counts_E = counts_E.round().long()  # integers: rounding must not decide if a load is exactly even
            missing_E = counts_E.sum() - counts_E * self.config.experts
            self.router.bias += self.config.bias_rate * missing_E.sign()

    def _within_capacity(self, experts_BTK: Tensor) -> Tensor:
        """Replace an expert by E (no expert) where earlier tokens of the row have used up its capacity."""
        moe = self.config
        if not moe.capacity_factor:
            return experts_BTK
        row = experts_BTK.shape[1] * self.rows.ranks
        capacity = math.ceil(moe.capacity_factor * row * moe.experts_per_token / moe.experts)
        return experts_BTK.masked_fill(self.rows.places(experts_BTK) >= capacity, moe.experts)

    @outside_graphs  # backward leaves the load in the module; a compiled graph would not
    def _balanced(self, y_BTD: Tensor, routing: Routing, experts_BTK: Tensor) -> Tensor:
        """Return `y_BTD`; its backward counts the load and starts the gradients of the balance losses."""
        with torch.no_grad():
            counts_BE = counts_by_row(routing.experts_BTK, self.config.experts)
            scores_E = routing.scores_BTE.sum((0, 1), dtype=torch.float64)
            dropped = (experts_BTK == self.config.experts).sum()
            load = torch.cat((counts_BE.sum(0), scores_E, dropped[None]))
        y: Tensor = _Balance.apply(y_BTD, self._losses(routing, counts_BE), load, self)
        return y

    def _losses(self, routing: Routing, counts_BE: Tensor) -> Tensor:
        """Return the sum over this rank's tokens of the balance loss of their row and of the z-loss, fp32 scalar.

        A row's balance loss is aux_coefficient * sum_i f_i P_i, with f_i = E/(KT) * (tokens sent to expert i) and P_i
        the mean score of i (DeepSeek-V3, equations 17 to 20). As f has no gradient and P is a mean over tokens, ranks
        that share a row need only each other's counts.
        """
        moe, loss = self.config, routing.logits_BTE.new_zeros(())
        if moe.balance != "none" and moe.aux_coefficient:
            counts_BE = self.rows.sum(counts_BE)
            share_BE = counts_BE / counts_BE.sum(1, keepdim=True) * moe.experts
            loss = loss + moe.aux_coefficient * (share_BE * routing.scores_BTE.sum(1)).sum()
        if moe.z_coefficient:
            loss = loss + moe.z_coefficient * routing.logits_BTE.logsumexp(-1).square().sum()
        return loss

    def _add_load(self, load: Tensor) -> None:
        self._load = load if self._load is None else self._load + load


class _Balance(torch.autograd.Function):
    """Passes `y` through; its backward starts the gradient of `loss`, and adds `load` to the layer's.

    The load is counted in backward, which runs once for each microbatch. Forward runs twice with activation
    checkpointing, and in evaluation too, which is not part of a step's load.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, load: Tensor, layer: MoE) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(load)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (load,) = ctx.saved_tensors
        ctx.layer._add_load(load)
        return grad, grad.new_full((), ctx.layer.loss_weight, dtype=torch.float32), None, None


@dataclass(frozen=True)
class Load:
    """Use of a layer's experts, over any number of tokens. Only the counts depend on that number."""

    counts_E: Tensor
    """Tokens sent to each expert, including those that were dropped."""
    mean_scores_E: Tensor
    """Mean over tokens of the router's scores; adds up to 1."""
    dropped_fraction: float
    """Share of the pairs of token and expert that were dropped because of a capacity."""

    @classmethod
    def of(cls, load: Tensor) -> Load:
        """Read what `MoE.take_load` returns, or its sum over ranks; the host waits for the device."""
        *per_expert, dropped = load.cpu().split([len(load) // 2, len(load) // 2, 1])
        counts_E, scores_E = per_expert
        pairs, tokens = counts_E.sum().clamp(min=1), scores_E.sum().clamp(min=1)
        return cls(counts_E.round().long(), scores_E / tokens, float(dropped / pairs))

    @property
    def entropy(self) -> float:
        """Entropy of the mean scores, nats: log E if all experts are used alike, 0 if one has everything."""
        return float(torch.special.entr(self.mean_scores_E).sum())

    def record(self) -> dict[str, Any]:
        """Return the figures for the step's line of metrics."""
        return {
            "tokens": self.counts_E.tolist(),
            "imbalance": round(self.imbalance, 4),
            "entropy": round(self.entropy, 4),
            "dropped": round(self.dropped_fraction, 6),
        }

    @property
    def imbalance(self) -> float:
        """The tokens of the busiest expert over the mean; 1 is even."""
        return float(self.counts_E.max() * len(self.counts_E) / self.counts_E.sum().clamp(min=1))


class Rows:
    """Computes what needs whole rows, where this rank has them; `parallel.expert.SplitRows` where ranks share them."""

    ranks = 1
    """The number of ranks that share a row."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks that share the rows; no gradient."""
        return x

    def places(self, experts_BTK: Tensor) -> Tensor:
        """Return `places_in_row`."""
        return places_in_row(experts_BTK)


def counts_by_row(experts_BTK: Tensor, experts: int) -> Tensor:
    """Count how often the tokens of each row chose each expert, int64 [B, E]."""
    return _run_edges(experts_BTK.flatten(1).sort(1).values, experts).diff()


def places_in_row(experts_BTK: Tensor) -> Tensor:
    """Count for each choice the tokens before it in its row that chose the same expert; int64 [B, T, K]."""
    chosen_BP = experts_BTK.flatten(1)
    sorted_BP, order_BP = chosen_BP.sort(dim=1, stable=True)
    first_BP = torch.searchsorted(sorted_BP, sorted_BP)  # the start of the run of the same expert
    places_BP = torch.arange(chosen_BP.shape[1], device=chosen_BP.device) - first_BP
    return torch.empty_like(places_BP).scatter_(1, order_BP, places_BP).view_as(experts_BTK)


def _run_edges(sorted_BP: Tensor, experts: int) -> Tensor:
    """Return where each expert's run begins in a row's sorted choices, and where the last one ends; [B, E+1]."""
    edges = torch.arange(experts + 1, device=sorted_BP.device).expand(*sorted_BP.shape[:-1], -1)
    return torch.searchsorted(sorted_BP, edges.contiguous())


# Computing


Compute = Callable[[Tensor, Tensor], Tensor]
"""Pairs sorted by expert [P, D], and how many each expert has -> the experts' outputs, [P, D]."""
Exchange = Callable[[Sequence[tuple[Tensor, Tensor]], Compute], Iterator[Tensor]]
"""Sends batches of pairs, [P, D] and [E] each, to their experts and returns the results, batch by batch, computed when
they are asked for; expert parallelism replaces `at_home` by its own."""


def at_home(batches: Sequence[tuple[Tensor, Tensor]], compute: Compute) -> Iterator[Tensor]:
    """Compute on this rank, which has all experts."""
    return (compute(x_PD, counts_E) for x_PD, counts_E in batches)


class _Pairs(NamedTuple):
    """Pairs of N tokens and their experts, sorted by expert; `pairs_P` and `places_P` lead there and back."""

    x_PD: Tensor
    counts_E: Tensor
    pairs_P: Tensor
    places_P: Tensor
    experts_NK: Tensor
    weights_NK: Tensor


def _in_parts(x_ND: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Cut `x_ND` into as many parts, also if it has fewer rows."""
    if parts == 1:
        return (x_ND,)
    edges = [len(x_ND) * part // parts for part in range(parts + 1)]
    return x_ND.split([end - start for start, end in pairwise(edges)])


class Experts(nn.Module):
    """The experts: gated feed-forwards whose weights are stacked, and the dispatch of tokens to them."""

    share_of_bias = 1.0
    """The part of the last bias that this rank adds. Tensor parallelism, which adds up results, sets it."""
    product: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """Multiplies rows in a narrower format by their expert's matrix as it is stored, given the experts' numbers of rows
    (`precision.use_fp8`)."""

    def __init__(self, config: MoEConfig, table: Table, activation: Activation = F.silu, limit: float = 0.0):
        super().__init__()
        self.activation, self.limit = activation, limit
        self.count, self.may_drop = config.experts, config.capacity_factor > 0
        self.weighs_inputs = config.weigh == "inputs"
        self.gate = nn.Parameter(torch.empty(table["gate"].shape))
        self.up = nn.Parameter(torch.empty(table["up"].shape))
        self.down = nn.Parameter(torch.empty(table["down"].shape))
        biases = ("gate_bias", "up_bias", "down_bias")
        for name in biases:
            bias = nn.Parameter(torch.empty(table[name].shape)) if name in table else None
            self.register_parameter(name, bias)
        for name in ("gate", "up", "down"):
            self.register_module(f"{name}_lora", None)  # `models.adapters` may put one here
        #: How matrices are quantised, if they are (`models.adapters`), by name.
        self.schemes: dict[str, QuantisationScheme] = {}
        self.exchange: Exchange = at_home
        #: Parts in which tokens go to their experts: while one is under way, another is computed.
        self.parts = 1

    @property
    def tokens_travel(self) -> bool:
        """True if experts are on several ranks."""
        return self.exchange is not at_home

    @outside_graphs  # each expert's number of tokens differs from batch to batch
    def forward(
        self, x_BTD: Tensor, experts_BTK: Tensor, weights_BTK: Tensor, beside: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sum of the outputs of each token's experts (E: none), [B, T, D] in `x_BTD`'s dtype; and
        the result of `beside`, which is computed while tokens are on their way, as its backward is."""
        whole = (x_BTD.flatten(0, 1), experts_BTK.flatten(0, 1), weights_BTK.flatten(0, 1))
        batches = [self._sorted(*part) for part in zip(*(_in_parts(x, self.parts) for x in whole), strict=True)]
        compute = partial(self.compute, kept={})
        results = self.exchange([(batch.x_PD, batch.counts_E) for batch in batches], compute)
        meanwhile = None if beside is None else beside()
        y_ND = [self._summed(y_PD, batch) for y_PD, batch in zip(results, batches, strict=True)]
        return (y_ND[0] if len(y_ND) == 1 else torch.cat(y_ND)).view(x_BTD.shape), meanwhile

    def _sorted(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> _Pairs:
        """Sort the pairs of these tokens and their experts by expert."""
        K = experts_NK.shape[-1]
        sorted_P, pairs_P = experts_NK.flatten().sort(stable=True)
        places_P = inverse(pairs_P)
        counts_E = _run_edges(sorted_P, self.count).diff()
        if self.may_drop and not is_accelerator(x_ND.device):
            pairs_P = pairs_P[: int(counts_E.sum())]
        elif self.may_drop and not self.tokens_travel:
            # How many are left only the device knows, and the host would wait for it in each layer: those without an
            # expert go to the last one, and count for nothing.
            weights_NK = weights_NK.masked_fill(experts_NK == self.count, 0.0)
            counts_E = torch.cat((counts_E[:-1], len(sorted_P) - counts_E[:-1].sum()[None]))
        x_PD = take_rows(x_ND, pairs_P // K, places_P.view(-1, K), self.may_drop)
        if self.weighs_inputs:
            weights_P1 = weights_NK.to(x_ND.dtype).flatten()[:, None]
            x_PD = x_PD * take_rows(weights_P1, pairs_P, places_P[:, None], self.may_drop)
        return _Pairs(x_PD, counts_E, pairs_P, places_P, experts_NK, weights_NK)

    def _summed(self, y_PD: Tensor, batch: _Pairs) -> Tensor:
        """Return the weighted sums of the outputs of pairs, by token."""
        experts_NK = batch.experts_NK
        y_PD = take_rows(y_PD, batch.places_P, batch.pairs_P[: len(y_PD), None], self.may_drop)
        y_NKD = y_PD.view(*experts_NK.shape, -1)
        if self.weighs_inputs:
            if self.may_drop:  # an input of zero has a bias for its output
                y_NKD = y_NKD.masked_fill((experts_NK == self.count)[..., None], 0.0)
            return y_NKD.sum(1)
        return torch.einsum("nk,nkd->nd", batch.weights_NK.to(y_PD.dtype), y_NKD)

    def compute(self, x_PD: Tensor, counts_e: Tensor, kept: dict[str, Tensor | QuantisedWeight]) -> Tensor:
        """Return the outputs of this rank's experts. Each takes the next `counts_e` (int64) of `x_PD`; a `Compute`.

        kept: matrices in the dtype of `x_PD` (in fp8, their own), for all parts of a batch.
        """
        product = partial(self._product, matmul=self._matmul(x_PD, counts_e), counts_e=counts_e, kept=kept)
        hidden_PF = gated(
            self._biased(product(x_PD, "gate"), "gate_bias", counts_e),
            self._biased(product(x_PD, "up"), "up_bias", counts_e),
            self.activation,
            self.limit,
        )
        y_PD = product(hidden_PF, "down")
        return self._biased(y_PD, "down_bias", counts_e, self.share_of_bias)

    def _matmul(self, x_PD: Tensor, counts_e: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Return what multiplies each expert's rows by its matrix."""
        if self.product is not None:
            by_group = self.product
            return lambda x_PX, weight_eYX: by_group(x_PX, weight_eYX, counts_e)
        # The kernels take rows of whole 16 bytes, and at least one row.
        stacks = [(name, local(p).shape) for name, p in self.named_parameters() if p.ndim == 3]
        sizes = [shape[1] for _, shape in stacks]
        sizes += [self.schemes[name].columns if name in self.schemes else shape[2] for name, shape in stacks]
        if x_PD.is_cuda and x_PD.dtype == torch.bfloat16 and x_PD.numel() and not any(size % 8 for size in sizes):
            return partial(grouped_matmul, counts_E=counts_e)
        # Without a row there is nothing to ask a device for.
        return partial(dense_by_group, counts=counts_e.tolist() if len(x_PD) else [0] * len(counts_e))

    def _product(
        self,
        x_PX: Tensor,
        name: str,
        matmul: Callable[[Tensor, Tensor], Tensor],
        counts_e: Tensor,
        kept: dict[str, Tensor | QuantisedWeight],
    ) -> Tensor:
        """Multiply each expert's rows by its matrix `name`, and by that matrix's adapter, if it has one."""
        if name not in kept:
            matrices = self.get_parameter(name)
            dtype = x_PX.dtype if self.product is None else matrices.dtype
            kept[name] = held(matrices, self.schemes.get(name), dtype)
        weight = kept[name]
        adapter = self._modules[f"{name}_lora"]
        if adapter is None:
            return multiply(x_PX, weight, matmul)
        each = partial(torch.repeat_interleave, repeats=counts_e, dim=0, output_size=len(x_PX))
        y: Tensor = adapter(x_PX, weight, matmul, each)
        return y

    def _biased(self, y_PX: Tensor, name: str, counts_e: Tensor, share: float = 1.0) -> Tensor:
        """Add to each row its expert's bias `name`, if the experts have biases."""
        bias = getattr(self, name)
        if bias is None:
            return y_PX
        return y_PX + (local(bias).to(y_PX.dtype) * share).repeat_interleave(counts_e, 0, output_size=len(y_PX))


def grouped_matmul(x_PX: Tensor, weight_EYX: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix with one kernel; the host does not wait for the counts."""
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x_PX, weight_EYX.transpose(1, 2), offs=ends_E)


# Moving rows


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation: inverse(order)[order] = 0, 1, 2, ..."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def take_rows(x_XD: Tensor, rows_Y: Tensor, copies_XC: Tensor, some_missing: bool = False) -> Tensor:
    """Return x_XD[rows_Y], where each row of x is taken C times and ends up at the rows `copies_XC` of the result.

    With `some_missing`, indices past the end (in either direction) stand for zeros. With `copies_XC`, backward adds up
    in a fixed order and without atomics; the backward of plain indexing does not.
    """
    y: Tensor = _TakeRows.apply(x_XD, rows_Y, copies_XC, some_missing)
    return y


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, copies: Tensor, some_missing: bool) -> Tensor:
        ctx.save_for_backward(copies)
        ctx.some_missing = some_missing
        return _rows(x, rows, some_missing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (copies,) = ctx.saved_tensors
        return _rows(grad, copies, ctx.some_missing).sum(1), None, None, None


def _rows(x: Tensor, index: Tensor, some_missing: bool) -> Tensor:
    if some_missing:
        x, index = F.pad(x, (0, 0, 0, 1)), index.clamp(max=len(x))
    return x[index]
