"""Tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022) as a table of (module, style).

Between attention and feed-forward each rank has the hidden states of its own stretch of tokens; inside them it has all
tokens and its own heads, or columns. A style says how a module's parameters are split (they become DTensors on the tp
mesh) and what its input or output crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from argosy.models.attention import Attention
from argosy.models.decoder import Decoder
from argosy.models.experts import MoE
from argosy.models.layers import Embedding, Linear, local
from argosy.models.loss import IGNORED
from argosy.parallel.collectives import all_gather_single, gather_sequence, reduce_scatter_sequence

# B batch, T tokens, D model width, V vocabulary, C tokens of a chunk of the loss

Style = Callable[[nn.Module, DeviceMesh], None]


def columns(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank computes some of the outputs."""
    split(module, mesh, Shard(0))


def rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank reads some of the inputs; the sums over ranks are left split by tokens, the bias is added to those."""
    assert isinstance(module, Linear)
    split(module, mesh, Shard(1), names=("weight",))
    if module.bias is not None:
        split(module, mesh, Replicate(), names=("bias",))
    module.reduce = partial(reduce_scatter_sequence, group=mesh.get_group())


def whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank has all of it and sees a part of the tokens or heads: its gradient is a part of a sum over ranks."""
    split(module, mesh, Replicate())


def gathered(module: nn.Module, mesh: DeviceMesh) -> None:
    """Its first input comes split by tokens, and it needs them all."""
    group = mesh.get_group()

    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_sequence(inputs[0], group), *inputs[1:]

    module.register_forward_pre_hook(gather)


def already(module: nn.Module, mesh: DeviceMesh) -> None:
    """Nothing is to be done, or it was done with the module that it is in."""


def gathers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Whole; its output is split by tokens, and what follows needs them all."""
    whole(module, mesh)
    module.register_forward_hook(lambda _, inputs, output: gather_sequence(output, mesh.get_group()))


def vocabulary_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """An embedding of which each rank has some rows: they look up what they have, and add up."""
    assert isinstance(module, Embedding)
    first = _first_row(module.num_embeddings, mesh)
    split(module, mesh, Shard(0))
    module.forward = partial(_lookup, module, mesh.get_group(), first)  # type: ignore[method-assign]


def feed_forward(module: nn.Module, mesh: DeviceMesh) -> None:
    """Gathered, but for a mixture of experts: its router works on the rank's own tokens, its experts gather."""
    if not isinstance(module, MoE):
        gathered(module, mesh)


def few_kv_heads(module: nn.Module, mesh: DeviceMesh) -> None:
    """Attention with fewer key/value heads than ranks: each rank computes all (few), and takes the one it needs."""
    assert isinstance(module, Attention)
    gathered(module, mesh)
    for linear in (module.k, module.v):
        head = mesh.get_local_rank() * (linear.out_features // module.head_width) // mesh.size()
        mine = slice(head * module.head_width, (head + 1) * module.head_width)
        linear.register_forward_hook(lambda _, inputs, y, mine=mine: y[..., mine])
        whole(linear, mesh)


DECODER: dict[str, Style] = {
    "embedding": vocabulary_rows,
    "blocks.*.attention_norm": whole,
    "blocks.*.attention": gathered,
    "blocks.*.attention.[qkv]": columns,
    "blocks.*.attention.[qk]_norm": whole,
    "blocks.*.attention.o": rows,
    "blocks.*.mlp_norm": whole,
    "blocks.*.mlp": feed_forward,
    "blocks.*.mlp.gate": columns,
    "blocks.*.mlp.up": columns,
    "blocks.*.mlp.down": rows,
    "norm": gathers,
    "head": columns,
}
"""Llama and Qwen3."""
LATENT_ATTENTION: dict[str, Style] = {
    "blocks.*.attention.q_down": whole,
    "blocks.*.attention.kv_down": whole,
    "blocks.*.attention.kv_norm": whole,
    "blocks.*.attention.q_up": columns,
    "blocks.*.attention.kv_up": columns,
}
"""DeepSeek's attention, besides: what heads share every rank computes, each for its own heads."""
EXPERTS: dict[str, Style] = {
    "blocks.*.mlp.router": whole,
    "blocks.*.mlp.experts": already,
    "blocks.*.mlp.shared": gathered,
    "blocks.*.mlp.shared.gate": columns,
    "blocks.*.mlp.shared.up": columns,
    "blocks.*.mlp.shared.down": rows,
}
"""Mixtures of experts, besides; `parallel.expert.split_experts` has split the experts already."""
FEW_KV_HEADS: dict[str, Style] = {
    "blocks.*.attention": few_kv_heads,
    "blocks.*.attention.[kv]": already,
}
"""Before these, where there are fewer key/value heads than ranks."""


def split_over_ranks(model: Decoder, mesh: DeviceMesh) -> None:
    """Apply the table to `model` (on the meta device), in place. Every parameter must fall under a style."""
    few = model.config.kv_heads < mesh.size()
    tables = (FEW_KV_HEADS if few else {}, LATENT_ATTENTION, EXPERTS, DECODER)  # the first that matches counts
    table = [entry for part in tables for entry in part.items()]
    for name, module in list(model.named_modules()):
        depth = name.count(".")
        styles = (style for pattern, style in table if pattern.count(".") == depth and fnmatchcase(name, pattern))
        next(styles, already)(module, mesh)
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not left, f"no style for {left}"
    vocabulary = model.config.vocab_size
    model.loss_of_chunk = VocabularyLoss(mesh.get_group(), _first_row(vocabulary, mesh))
    model.longest_part = -(-vocabulary // mesh.size())


def split(module: nn.Module, mesh: DeviceMesh, *placements: Placement, names: Sequence[str] | None = None) -> None:
    """Make parameters (all of the module's own, or `names`) DTensors on `mesh`, of which this rank has its part."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if names is None or name in names:
            part = parameter.detach()
            for axis, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    part = _part(part, placement.dim, mesh.size(axis), mesh.get_local_rank(axis))
            whole_shape, strides = parameter.shape, parameter.stride()
            dtensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole_shape, stride=strides)
            module.register_parameter(name, nn.Parameter(dtensor))


def _part(tensor: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    """This rank's chunk as DTensors cut: all of the same size but the last ones, which may be smaller, or empty."""
    size = -(-tensor.shape[dim] // ranks)
    start = min(rank * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start)).contiguous()


def _first_row(rows: int, mesh: DeviceMesh) -> int:
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


def _lookup(embedding: Embedding, group: dist.ProcessGroup, first: int, tokens_BT: Tensor) -> Tensor:
    """The vectors of this rank's stretch of the tokens; only one rank has each, so adding up rounds nothing."""
    weight = local(embedding.weight)
    rows_BT = tokens_BT - first
    elsewhere_BT = (rows_BT < 0) | (rows_BT >= weight.shape[0])
    if weight.shape[0] == 0:
        x_BTD = weight.new_zeros(*tokens_BT.shape, embedding.embedding_dim) + weight.sum()
    else:
        x_BTD = F.embedding(rows_BT.masked_fill(elsewhere_BT, 0), weight).masked_fill(elsewhere_BT[..., None], 0.0)
    return reduce_scatter_sequence(x_BTD.to(embedding.dtype), group)


class VocabularyLoss:
    """`models.loss.chunk_loss_and_gradient` where each rank has the logits of its part of the vocabulary.

    Ranks exchange two numbers a token: the log-sum-exp of what each has, and the target's logit from who has it.
    """

    def __init__(self, group: dist.ProcessGroup, first: int):
        self._group, self._first = group, first
        self._statistics: Callable[[Tensor, Tensor], Tensor] = _statistics
        self._gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _gradient

    def __call__(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss (the same on all ranks) and its gradient to this rank's logits."""
        mine_C = targets_C - self._first
        statistics_C2 = self._statistics(logits_CV, mine_C)
        everyone = statistics_C2.new_empty(self._group.size() * len(targets_C), 2)
        all_gather_single(everyone, statistics_C2, group=self._group)
        everyone = everyone.unflatten(0, (self._group.size(), -1))
        logsumexp_C, target_logit_C = everyone[..., 0].logsumexp(0), everyone[..., 1].sum(0)
        counts_C = targets_C != IGNORED
        loss = ((logsumexp_C - target_logit_C) * counts_C).sum()
        return loss, self._gradient(logits_CV, mine_C, logsumexp_C, counts_C)

    def compile(self) -> None:
        """Compile what is computed between the exchanges."""
        self._statistics, self._gradient = torch.compile(_statistics), torch.compile(_gradient)


def _statistics(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Log-sum-exp of this part of the vocabulary, and the target's logit, 0 if it is not here; fp32 [C, 2]."""
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
