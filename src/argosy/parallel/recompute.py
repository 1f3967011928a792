"""Activation checkpointing: keep less of the forward pass, and recompute what is missing in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from argosy import compiler
from argosy.compiler import outside_graphs
from argosy.models.adapters import LowRank
from argosy.models.delta_net import GatedDeltaNet
from argosy.observe.wire import tensors_in
from argosy.plan.cost.layer_memory import KEPT_FLOPS_PER_BYTE

RecomputeMode = Literal["none", "selective", "full"]

# FSDP2 marks for the profiler what it does around experts, which in backward is something else than in forward. Torch
# compares the operations of both, and takes the marks for some.
SAC_IGNORED_OPS.update(
    (torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction)
)


def apply_recompute(
    blocks: Iterable[tuple[int, nn.Module]], mode: RecomputeMode, every: int = 1, compiled: bool = False
) -> None:
    """Let each block whose layer number is a multiple of `every` recompute its activations in backward, in place.

    "full" keeps the block's inputs alone (Chen et al. 2016); "selective" also keeps the outputs that are dear to
    compute (Korthikanti et al. 2022), see `recompute_flops_per_byte`. `blocks` are (layer number in the whole model,
    block). Names of parameters stay as they are, gradients are bit for bit the same, random numbers are repeated.

    Blocks may be compiled with their own `compile()`, before or after this: the compiler then sees what to recompute.
    It can only do so with blocks that it takes whole. Others (whose attention exchanges messages) run eagerly, or with
    "full" and `compiled` in compiled parts.
    """
    if mode == "none":
        return
    if compiled:
        compiler.load()
    for layer, block in blocks:
        if layer % every == 0:
            for module in block.modules():
                if isinstance(module, GatedDeltaNet):
                    module.recomputes = False
            # Not a wrapping module, which would rename the parameters; a partial follows its module into a deepcopy.
            if mode == "selective":
                ranks = (part.a.shape[-2] for part in block.modules() if isinstance(part, LowRank))
                block.forward = partial(_recomputed_selectively, block.forward, max(ranks, default=0))
            else:
                # Selective recomputation would not see the operations in compiled parts, nor that they reuse memory.
                forward = torch.compile(block.forward) if compiled else block.forward
                has_dtensors = any(hasattr(parameter, "to_local") for parameter in block.parameters())
                block.forward = partial(_recomputed_around_compiled if has_dtensors else _recomputed, forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


# Where the compiler recomputes a whole block with DTensors, torch 2.13 takes their DeviceMesh for a saved tensor, and
# fails. So it only gets what is inside: the block's last matmul, which nothing needs, is then computed again too.
@outside_graphs
def _recomputed_around_compiled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _recomputed(forward, *args, **kwargs)


def _recomputed_selectively(forward: Callable[..., Any], rank: int, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(selective_contexts, rank), **kwargs)


def selective_contexts(rank: int = 0) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return `torch.utils.checkpoint.checkpoint`'s `context_fn` for one forward of a selectively recomputed block.

    rank: of its adapters, whose outputs, as wide as those of the products beside them, take little to compute again.
    """
    return create_selective_checkpoint_contexts(_KeepWhatIsDear(rank))


class _KeepWhatIsDear:
    """Decides, operation by operation of one forward, whose output is kept."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._kept: set[StorageWeakRef] = set()

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        outputs = list(tensors_in(context.op_output))
        of_adapter = 2 * self._rank / min((tensor.element_size() for tensor in outputs), default=1)
        if self._is_kept_and_summed(op, args) or (
            recompute_flops_per_byte(op, args, kwargs, context.op_output) > max(KEPT_FLOPS_PER_BYTE, of_adapter)
        ):
            self._kept.update(StorageWeakRef(tensor.untyped_storage()) for tensor in outputs)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def _is_kept_and_summed(self, op: Any, args: tuple[Any, ...]) -> bool:
        """Return True if a collective overwrites a kept tensor with its sum over ranks, which must not be summed again.

        Autograd's version counter, by which torch finds such writes, does not count those of collectives.
        """
        return str(op) == "c10d.allreduce_.default" and any(
            StorageWeakRef(tensor.untyped_storage()) in self._kept for tensor in tensors_in(args[0])
        )


def recompute_flops_per_byte(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
    """Return the FLOPs to compute `output` = op(*args, **kwargs) again, for each byte that keeping it would take.

    `op` is an `OpOverload`, as a dispatch mode sees it. Counts contractions (matmuls, convolutions, attention) by
    torch's formulas, and by ours where it has none; 0 for all other operations.
    """
    formula = _formula(op)
    if formula is None:
        return 0.0
    # Not `nbytes`, which fails where the compiler traces sizes as symbols, as of unlike heads.
    kept_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(output))
    return formula(*args, **kwargs, out_val=output) / kept_bytes if kept_bytes else 0.0  # experts may have no token


@cache
def _formula(op: Any) -> Callable[..., int] | None:
    packet = getattr(op, "overloadpacket", op)  # a higher-order operator has no overloads
    name = str(packet)
    # A dispatch mode sees the private operators under the public functions: F.scaled_dot_product_attention on a CPU,
    # F.grouped_mm and varlen_attn have no other names there. The tests run each.
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    elif name == "aten._grouped_mm":
        return _grouped_matmul_flops
    elif name == "torch_attn._varlen_attn":
        return _varlen_attention_flops
    return FlopCounterMode(display=False).flop_registry.get(packet)


def _grouped_matmul_flops(a: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return 2 * out_val.numel() * a.shape[-1]


def _varlen_attention_flops(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, starts: Tensor, *args: Any, out_val: Any, **kwargs: Any
) -> int:
    """Return FLOPs as if documents were equally long: torch's formula reads their lengths, so the host would wait."""
    mean_length = k_NKE.shape[0] // (starts.shape[0] - 1)
    return 4 * q_NHE.numel() * mean_length
