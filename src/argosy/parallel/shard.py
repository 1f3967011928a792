"""ZeRO stage 3 on FSDP2 (Zhao et al. 2023): parameters too are split, and gathered block by block where used."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from argosy.models.decoder import Decoder
from argosy.models.experts import moe_layers
from argosy.models.layers import local
from argosy.parallel.data import GradientSum
from argosy.parallel.pieces import PlacedPiece
from argosy.sync.compressor import Moment


def shard_fully(
    model: Decoder,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    reduce_dtype: torch.dtype,
    keep_gathered: bool = False,
) -> None:
    """Split the parameters of `model` (on the meta device) over `mesh`: [shard], or [replicate, shard], in place.

    They are gathered in the dtype of the arithmetic, and gradients are summed, not averaged, in `reduce_dtype`.
    `expert_mesh` is that of experts, where they are dealt over ep ranks. `keep_gathered`: from a forward to its
    backward, as the pipeline schedules need that split backward: they look for the parameters before it gathers them.
    """
    # A block's output may be a view: the warning is for code that writes into it, which ours does not.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    compute = None if model.compute_dtype == torch.float32 else model.compute_dtype
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    # None: blocks let go after forward, the model itself does not, as backward begins with its head.
    shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=False if keep_gathered else None)
    for block in model.blocks.values():
        if expert_mesh is not None:
            for moe in moe_layers(block):
                shard(moe.experts, mesh=expert_mesh)
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # or it scales inside the collective, which gloo cannot


class FullySharded:
    """The gradients of a `shard_fully` model: FSDP2 sums them in backward; this hands them to the pieces."""

    def __init__(self, model: Decoder, pieces: Sequence[PlacedPiece], over_replicas: Sequence[GradientSum] = ()):
        """`over_replicas`: sums of the shards' gradients over replicas, where FSDP2 splits over one replica only. It
        tells them of each gradient that it has reduced, through the parameter's hooks."""
        assert isinstance(model, FSDPModule)
        self._model, self._pieces, self.over_replicas = model, pieces, over_replicas

    def arm(self, backwards: int, moment: Moment) -> None:
        """FSDP2 counts backwards itself, and sums once a step."""
        for sums in self.over_replicas:
            sums.arm(1, moment)

    def before_backward(self, last: bool) -> None:
        """Sum only in the step's last backward; until then gradients add up, whole, on each rank."""
        self._model.set_requires_gradient_sync(last)

    def finish(self) -> None:
        """Make the sums the gradients of the pieces' values."""
        for sums in self.over_replicas:
            sums.finish()
        if self.over_replicas:
            return
        for piece in self._pieces:
            gradient = piece.parameter.grad
            assert gradient is not None, f"{piece.name}: every parameter takes part in every step"
            piece.value.grad = local(gradient)

    def after_update(self) -> None:
        """Do nothing: the values are gathered when they are next used."""
