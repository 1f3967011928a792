"""Tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022).

Between attention and feed-forward each rank has the hidden states of its own stretch of tokens; inside them it has all
tokens and its own heads, or columns. Where forward gathers what other ranks hold, backward sums the gradients of all
ranks, and vice versa. Which dim of a parameter is cut is in the table of parameters (`plan.parameters`); parameters
become DTensors on the tp mesh. `STYLES` says what a module exchanges with other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from argosy.data.packing import IGNORED
from argosy.models.adapters import LowRank
from argosy.models.attention import Attention
from argosy.models.decoder import Decoder
from argosy.models.delta_net import GatedDeltaNet
from argosy.models.initialize import offset_of
from argosy.models.layers import Embedding, FeedForward, LayerNorm, Linear, RMSNorm, local
from argosy.models.loss import ChunkLoss
from argosy.models.mla import LatentAttention
from argosy.plan.parameters import INPUTS, Table
from argosy.sync.compressor import all_gather_single, reduce_scatter_single

Way = Callable[[Tensor, dist.ProcessGroup], Tensor]


def exchange(x: Tensor, group: dist.ProcessGroup, there: Way, back: Way) -> Tensor:
    """Return what `there` makes of `x`; in backward `back`, its transpose, is applied to the gradient."""
    y: Tensor = _Transposed.apply(x, group, there, back)
    return y


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Way, back: Way) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


# B batch, t tokens of this rank, T tokens of all ranks of the group, D width


def gather_sequence(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all ranks, [B, T, D]; in backward each rank gets the sum of the gradients of its own."""
    return exchange(x_BtD, group, all_gather_tokens, reduce_scatter_tokens)


def reduce_scatter_sequence(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens, [B, t, D], of the sum over ranks; in backward all ranks get all gradients."""
    return exchange(x_BTD, group, reduce_scatter_tokens, all_gather_tokens)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks, which each rank uses for its own part; in backward the gradients are summed alike."""
    return exchange(x, group, _sum, _sum)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather_tokens(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `gather_sequence`, without gradients."""
    B, t = x_BtD.shape[:2]
    n = group.size()
    parts = x_BtD.new_empty(n * B, *x_BtD.shape[1:])
    all_gather_single(parts, x_BtD.contiguous(), group=group)
    return parts.unflatten(0, (n, B)).transpose(0, 1).reshape(B, n * t, *x_BtD.shape[2:])


def reduce_scatter_tokens(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `reduce_scatter_sequence`, without gradients."""
    n = group.size()
    parts = x_BTD.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    reduce_scatter_single(mine, parts.flatten(0, 1), group=group)
    return mine


# B batch, T tokens, D model width, V vocabulary, C tokens of a chunk of the loss


class SequenceParallel:
    """Between matrices each rank has its own stretch of the tokens."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def gather(self, x_BtD: Tensor) -> Tensor:
        """Return all tokens, for matrices that are cut by their outputs."""
        return gather_sequence(x_BtD, self._group)

    def reduce(self, x_BTD: Tensor) -> Tensor:
        """Sum what matrices that are cut by their inputs gave."""
        return reduce_scatter_sequence(x_BTD, self._group)

    def feed(self, module: nn.Module) -> None:
        """Gather the module's first input, which comes split by tokens, while it needs them all."""

        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return self.gather(inputs[0]), *inputs[1:]

        module.register_forward_pre_hook(gather)

    def collect(self, linear: Linear) -> None:
        """Sum the layer's outputs over ranks, split by tokens; then add its bias."""
        linear.reduce = self.reduce


class WholeSequence(SequenceParallel):
    """Between matrices all ranks have all tokens, however few: a token at a time, say. Without gradients."""

    def gather(self, x_BtD: Tensor) -> Tensor:
        """Return the tokens, which are all there."""
        return x_BtD

    def reduce(self, x_BTD: Tensor) -> Tensor:
        """Sum over ranks, and leave all tokens on each."""
        return _sum(x_BTD, self._group)


Between = Callable[[dist.ProcessGroup], SequenceParallel]
"""Makes, for a group, the rule by which its ranks share tokens between matrices."""
Style = Callable[[Any, DeviceMesh, SequenceParallel], None]
"""Makes a module, whose parameters are cut already, exchange what it must with other ranks."""


def sums(linear: Linear, mesh: DeviceMesh, tokens: SequenceParallel) -> None:
    """Row-parallel linear layer: its outputs are parts of sums over ranks."""
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(linear.weight, DTensor)
    if linear.weight.placements == (Shard(INPUTS),):
        tokens.collect(linear)
        if isinstance(linear.lora, LowRank):
            linear.lora.sum_squares = partial(sum_over_ranks, group=mesh.get_group())
            linear.lora.first_input = offset_of(linear.weight)[-1]


def gathers(module: nn.Module, mesh: DeviceMesh, tokens: SequenceParallel) -> None:
    """Column-parallel linear layers inside: they need the tokens of all ranks."""
    tokens.feed(module)


def gathers_for_heads(attention: Attention, mesh: DeviceMesh, tokens: SequenceParallel) -> None:
    """As `gathers`. With fewer key/value heads than ranks, each rank computes all (few) and takes the one it needs.

    A norm over all heads needs sums over those of all ranks.
    """
    gathers(attention, mesh, tokens)
    heads, norms = attention.kv_heads, (attention.q_norm, attention.k_norm)
    if attention.norms_all:
        for norm in norms[: 2 if heads >= mesh.size() else 1]:
            assert isinstance(norm, RMSNorm | LayerNorm)
            norm.reduce = partial(sum_over_ranks, group=mesh.get_group())
    if heads < mesh.size():
        head = mesh.get_local_rank() * heads // mesh.size()
        last = attention.k_norm if attention.norms_all else attention.k
        for module, width in ((last, attention.head_width), (attention.v, attention.value_width)):
            if isinstance(module, nn.Module):  # keys may be the values too
                mine = slice(head * width, (head + 1) * width)
                module.register_forward_hook(lambda _, inputs, y, mine=mine: y[..., mine])


def looks_up(embedding: Embedding, mesh: DeviceMesh, tokens: SequenceParallel) -> None:
    """Each rank looks up the rows that it has, and the ranks add up."""
    first = _first_row(embedding.num_embeddings, mesh)
    embedding.forward = partial(_lookup, embedding, tokens, first)  # type: ignore[method-assign]


STYLES: dict[type[nn.Module], Style] = {
    Embedding: looks_up,
    Linear: sums,
    Attention: gathers_for_heads,
    LatentAttention: gathers,
    GatedDeltaNet: gathers,
    FeedForward: gathers,
}
"""Class of a module -> what it exchanges. A mixture of experts is not among them: its router works on the rank's own
tokens, and `parallel.expert.split_experts` makes its experts gather theirs."""


def split_over_ranks(model: Decoder, mesh: DeviceMesh, table: Table, between: Between = SequenceParallel) -> None:
    """Cut the parameters of `model` (on the meta device) by `table`, that for so many ranks, and apply `STYLES`, in
    place.

    Experts are cut already (`parallel.expert.split_experts`). Where a rank has a parameter whole, it sees a part of the
    tokens or heads, and its gradient is a part of a sum over ranks.
    """
    tokens = between(mesh.get_group())
    for name, module in list(model.named_modules()):
        for own, parameter in list(module.named_parameters(recurse=False)):
            if not hasattr(parameter, "to_local"):
                split(module, own, mesh, table[f"{name}.{own}"].tp_dim)
        for kind, style in STYLES.items():
            if isinstance(module, kind):
                style(module, mesh, tokens)
    model.for_head = tokens.gather
    vocabulary = model.config.vocab_size
    model.loss_of_chunk = loss = VocabularyLoss(mesh.get_group(), _first_row(vocabulary, mesh))
    model.is_likeliest = loss.is_likeliest
    model.longest_part = -(-vocabulary // mesh.size())


def split(module: nn.Module, name: str, mesh: DeviceMesh, *dims: int | None) -> None:
    """Make the module's parameter `name` a DTensor and keep this rank's part; `dims`: what each axis cuts."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = module.get_parameter(name)
    part = whole.detach()
    for axis, dim in enumerate(dims):
        if dim is not None:
            part = _part(part, dim, mesh.size(axis), mesh.get_local_rank(axis))
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    dtensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    module.register_parameter(name, nn.Parameter(dtensor))


def _part(tensor: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    """Return this rank's chunk as DTensors cut: of equal sizes, but the last ones may be smaller, or empty."""
    size = -(-tensor.shape[dim] // ranks)
    start = min(rank * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start)).contiguous()


def _first_row(rows: int, mesh: DeviceMesh) -> int:
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


def _lookup(embedding: Embedding, tokens: SequenceParallel, first: int, tokens_BT: Tensor) -> Tensor:
    """Return the vectors of the tokens that this rank has between matrices. Only one rank has each, so adding up rounds
    nothing."""
    weight = local(embedding.weight)
    rows_BT = tokens_BT - first
    elsewhere_BT = (rows_BT < 0) | (rows_BT >= weight.shape[0])
    if weight.shape[0] == 0:
        x_BTD = weight.new_zeros(*tokens_BT.shape, embedding.embedding_dim) + weight.sum()
    else:
        x_BTD = F.embedding(rows_BT.masked_fill(elsewhere_BT, 0), weight).masked_fill(elsewhere_BT[..., None], 0.0)
    return tokens.reduce(x_BTD.to(embedding.dtype))


class VocabularyLoss:
    """`models.loss.chunk_loss_and_gradient` where each rank has the logits of its part of the vocabulary.

    Ranks exchange two numbers for each token: the log-sum-exp of their part, and the target's logit if they have it.
    """

    def __init__(self, group: dist.ProcessGroup, first: int):
        self._group, self._first = group, first
        self._statistics: Callable[[Tensor, Tensor], Tensor] = _statistics
        self._gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _gradient

    def __call__(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's loss (the same on all ranks), and the gradient of their sum to this rank's logits."""
        mine_C = targets_C - self._first
        statistics_C2 = self._statistics(logits_CV, mine_C)
        everyone = statistics_C2.new_empty(self._group.size() * len(targets_C), 2)
        all_gather_single(everyone, statistics_C2, group=self._group)
        everyone = everyone.unflatten(0, (self._group.size(), -1))
        logsumexp_C, target_logit_C = everyone[..., 0].logsumexp(0), everyone[..., 1].sum(0)
        counts_C = targets_C != IGNORED
        losses_C = (logsumexp_C - target_logit_C) * counts_C
        return losses_C, self._gradient(logits_CV, mine_C, logsumexp_C, counts_C)

    def is_likeliest(self, logits_CV: Tensor, targets_C: Tensor) -> Tensor:
        """As `models.loss.is_likeliest`; the same on all ranks."""
        mine_C, size = targets_C - self._first, logits_CV.shape[1]
        found_C2 = logits_CV.new_full((len(targets_C), 2), -torch.inf)
        if size:
            here_C = (mine_C >= 0) & (mine_C < size)
            target_logit_C = logits_CV.gather(1, mine_C.where(here_C, 0)[:, None]).squeeze(1)
            found_C2[:, 0] = target_logit_C.masked_fill(~here_C, -torch.inf)
            found_C2[:, 1] = logits_CV.max(1).values
        dist.all_reduce(found_C2, dist.ReduceOp.MAX, group=self._group)
        return found_C2[:, 0] >= found_C2[:, 1]

    def compile(self) -> None:
        """Compile what is computed between the exchanges."""
        self._statistics, self._gradient = torch.compile(_statistics), torch.compile(_gradient)


class GatheredLoss:
    """A loss of the user's where each rank has the logits of its part of the vocabulary: ranks gather them first.

    Each computes the loss from the whole, and takes its part of the gradient. That sends V numbers for a token, where
    `VocabularyLoss` sends two.
    """

    def __init__(self, loss: ChunkLoss, group: dist.ProcessGroup, vocabulary: int):
        self._loss, self._group, self._vocabulary = loss, group, vocabulary

    def __call__(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's loss (the same on all ranks), and the gradient of their sum to this rank's logits."""
        losses_C, gradient = self._loss(gather_vocabulary(logits_CV, self._group, self._vocabulary), targets_C)
        first = min(self._group.rank() * -(-self._vocabulary // self._group.size()), self._vocabulary)
        return losses_C, gradient[:, first : first + logits_CV.shape[1]].contiguous()


def gather_vocabulary(logits_CV: Tensor, group: dist.ProcessGroup, vocabulary: int) -> Tensor:
    """Return the logits of the whole vocabulary, of which each rank has a part; without gradients."""
    padded = F.pad(logits_CV, (0, -(-vocabulary // group.size()) - logits_CV.shape[1])).contiguous()
    everyone = padded.new_empty(group.size() * len(padded), padded.shape[1])
    all_gather_single(everyone, padded, group=group)
    return everyone.unflatten(0, (group.size(), -1)).movedim(0, 1).flatten(1)[:, :vocabulary]


def _statistics(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Return the log-sum-exp of this part of the vocabulary, and the target's logit or 0; fp32 [C, 2]."""
    logits = logits_CV.float()
    if logits.shape[1] == 0:
        return torch.stack((logits.new_full(targets_C.shape, -torch.inf), logits.new_zeros(targets_C.shape)), 1)
    here_C = (targets_C >= 0) & (targets_C < logits.shape[1])
    target_logit_C = logits.gather(1, targets_C.where(here_C, 0)[:, None]).squeeze(1) * here_C
    return torch.stack((logits.logsumexp(-1), target_logit_C), 1)


def _gradient(logits_CV: Tensor, targets_C: Tensor, logsumexp_C: Tensor, counts_C: Tensor) -> Tensor:
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    probabilities_CV = (logits_CV.float() - logsumexp_C[:, None]).exp()
    return ((probabilities_CV - is_target_CV.float()) * counts_C[:, None]).to(logits_CV.dtype)
