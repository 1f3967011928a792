"""Data parallelism with ZeRO (Rajbhandari et al. 2020): gradients are summed over ranks while backward still runs.

Stage 0 sums them over replicas (`sync`), in tiers if the plan says so; 1 and 2 reduce-scatter them, so that each rank
gets the part that it updates, sum that part over replicas, and all-gather the updated values under the next forward.
Each gradient is freed when it has been sent; stage 1 keeps it until the step is done. Stage 3 is FSDP2 (Zhao et al.
2023): parameters too are split, and gathered block by block where they are used.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from argosy.matmul import in_fp8
from argosy.models.decoder import Decoder
from argosy.models.experts import moe_layers
from argosy.models.layers import local
from argosy.parallel.buckets import Bucket, Gathering, GradientSync, SumRanks, cut, gradient_of, is_sum, sum_of_bits
from argosy.parallel.pieces import PlacedPiece
from argosy.sync.compressor import Lane, SumTime

BUCKETS_AHEAD = 4
"""Buckets of updated values that travel at once: as many copies of a bucket are in memory."""
NEVER_PASS = 2**62
"""A number of backward passes that is never reached."""


class GradientSum:
    """Sums gradients once per step, overlapped with the backward of the last microbatch.

    The buckets follow the order in which backward reaches parameters (last layer first) and are sent in that
    order on every rank, so that the collectives match (Li et al. 2020, "PyTorch Distributed", section 3.2).
    What a compressor leaves alone has buckets of its own, which come last: norms are in every layer.
    A rank that is alone has nothing to sum, and its gradients stay where they are.
    """

    def __init__(
        self,
        pieces: Sequence[PlacedPiece],
        ranks: SumRanks,
        dtype: torch.dtype,
        keep: bool,
        checks: bool = False,
        how: GradientSync | None = None,
    ):
        """`dtype`: that of the sums; `keep`: a gradient stays in memory after it was sent (ZeRO stage 1); `checks`:
        the sums are compared with their checksums; `how`: how replicas sum them; by default exactly."""
        self._ranks, self._checks = ranks, checks
        self._how = how = how or GradientSync(Lane(pieces[0].value.device))
        self.watches = False
        """True if `bits` is to tell this rank's gradients of the next steps."""
        self.is_sound: Tensor | None = None
        """True if the sums of the last step fit their checksums, bool, no dims; None if they were not checked."""
        self._alone = pieces if not ranks.groups else ()
        self._shared = ranks.shard is not None
        self._expected = 0
        self._next = 0
        self._moment = SumTime()
        self.buckets: list[Bucket] = []
        """The same on all replicas."""
        if not self._alone:
            exact = [piece for piece in pieces if how.goes_exact(piece)]
            others = [piece for piece in pieces if not how.goes_exact(piece)]
            for some, is_compressed in (others, True), (exact, False):
                cuts = cut(some, how.bucket_bytes)
                self.buckets += [Bucket(one, ranks, dtype, keep, how, is_compressed) for one in cuts]
        self._gatherings: deque[Gathering] = deque()
        self._bucket_of = {id(piece.parameter): bucket.number for bucket in self.buckets for piece in bucket.pieces}
        for bucket in self.buckets:
            arrived = partial(_tell, weakref.ref(self), weakref.ref(bucket))
            for piece in bucket.pieces:
                piece.parameter.register_post_accumulate_grad_hook(arrived)

    def arm(self, backwards: int, moment: SumTime = SumTime()) -> None:  # noqa: B008  (frozen)
        """Begin a step in which this many backwards reach each parameter: the last completes its gradient."""
        self._expected, self._moment = backwards, moment
        self._next = 0

    def before_backward(self, last: bool) -> None:
        """Nothing to do: the hooks count."""

    def finish(self) -> None:
        """Wait until every piece's gradient is the sum over the ranks."""
        self.settle()  # nothing is left, unless a part of the model took no part
        self._send_until(len(self.buckets))  # a pipeline schedule may have set gradients without our hooks
        received = [bucket.receive() for bucket in self.buckets]
        if self._checks and received:
            self.is_sound = self._check(received)
        self._expected = 0
        for piece in self._alone:
            piece.value.grad = gradient_of(piece)

    def after_update(self) -> None:
        """Once the optimizer has changed the pieces' values, begin to give them to the ranks that share them.

        They are taken over when they are needed (`need`, `settle`), the first layers' first: the others travel while
        these compute.
        """
        self.settle()
        if self._shared:
            self._gatherings = deque(Gathering(bucket, bucket.values()) for bucket in reversed(self.buckets))
            self._gather_ahead()

    def need(self, module: nn.Module) -> None:
        """Wait until the values of this module's parameters are those of all ranks."""
        if not self._gatherings:
            return
        wanted = {self._bucket_of[id(p)] for p in module.parameters() if id(p) in self._bucket_of}
        while any(gathering.bucket.number in wanted for gathering in self._gatherings):
            self._gatherings.popleft().finish()
            self._gather_ahead()

    def settle(self) -> None:
        """Wait until all values are those of all ranks."""
        while self._gatherings:
            self._gatherings.popleft().finish()
            self._gather_ahead()

    def _gather_ahead(self) -> None:
        for gathering in islice(self._gatherings, BUCKETS_AHEAD):
            gathering.start()

    def _arrived(self, bucket: Bucket) -> None:
        bucket.arrivals += 1
        ready = self._next
        while ready < len(self.buckets) and self._is_whole(self.buckets[ready]):
            ready += 1
        self._send_until(ready)
        self._how.lane.poll()

    def _is_whole(self, bucket: Bucket) -> bool:
        return bucket.arrivals == self._expected * len(bucket.pieces)

    def bits(self) -> Tensor:
        """Return the bits of this rank's gradients of the last step, before the sum over ranks; int64, no dims."""
        return torch.stack([bucket.bits for bucket in self.buckets if bucket.bits is not None]).sum()

    def hold(self) -> None:
        """Keep the gradients of the following backward passes on this rank, until `let_go`."""
        self._expected = NEVER_PASS

    def let_go(self) -> Tensor:
        """Drop the gradients of the passes since `hold`; returns their bits as `bits` gives them."""
        found = torch.stack([sum_of_bits(bucket.gather_up()) for bucket in self.buckets]).sum()
        for bucket in self.buckets:
            bucket.arrivals = 0
            for piece in bucket.pieces:
                piece.parameter.grad = None
        self._expected = 0
        return found

    def _check(self, received: Sequence[Tensor]) -> Tensor:
        """Compare the sums with the checksums of what all ranks sent: one small message for all buckets."""
        sent = torch.stack([bucket.checksums for bucket in self.buckets if bucket.checksums is not None])
        ranks = 1
        for group in self._ranks.groups:
            dist.all_reduce(sent, group=group)
            ranks *= group.size()
        mine = 0 if self._ranks.shard is None else self._ranks.shard.rank()
        return torch.stack([is_sum(sums, total[mine], ranks) for sums, total in zip(received, sent, strict=True)]).all()

    def _send_until(self, end: int) -> None:
        for bucket in self.buckets[self._next : end]:
            bucket.send(self._checks, self.watches, self._moment)
        self._next = max(self._next, end)


def _tell(rule: Callable[[], GradientSum | None], bucket: Callable[[], Bucket | None], _: Tensor) -> None:
    """Tell the rule of a gradient. The references are weak: else a parameter would hold itself through autograd."""
    if (alive := rule()) is not None and (its := bucket()) is not None:
        alive._arrived(its)


def shard_fully(
    model: Decoder,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    reduce_dtype: torch.dtype,
    keep_gathered: bool = False,
    user_buffers: bool = False,
) -> None:
    """Split the parameters of `model` (on the meta device) over `mesh`: [shard], or [replicate, shard], in place.

    They are gathered in the dtype of the arithmetic, and gradients are summed, not averaged, in `reduce_dtype`.
    `expert_mesh` is that of experts, where they are dealt over ep ranks. `keep_gathered`: from a forward to its
    backward, as the pipeline schedules need that split backward: they look for the parameters before it gathers them.
    `user_buffers`: messages lie in memory of the process group's, where its backend has an allocator, as NCCL has.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

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
            module.set_allocate_memory_from_process_group_for_comm(user_buffers)


def gather_in_fp8(matrices: Iterable[Any]) -> None:
    """Let FSDP2 gather these parameters in fp8, with a factor for each row, where ranks share rows evenly.

    Call it once they have memory, before they are gathered first. Factors are powers of two, as those of the rowwise
    product, and widening to bf16 is exact: the product's own rounding finds the same numbers again, but for what is so
    small that fp8 has fewer bits for it. What FSDP2 calls are its hooks of tensors that travel otherwise than they are.
    """
    for matrix in matrices:
        mesh, placements = matrix.device_mesh, matrix.placements
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        cuts = [size for size, cut in zip(mesh.shape, placements, strict=True) if getattr(cut, "dim", None) == 0]
        if sizes.get("expert_shard", sizes.get("shard")) == 1 or matrix.shape[0] % math.prod(cuts):
            continue  # nothing is sent, or FSDP2 pads it, all that it sends of a part alike
        part = matrix._local_tensor  # `to_local` returns another tensor of the same memory, where FSDP2 does not look
        part.fsdp_pre_all_gather = partial(_narrow, weakref.ref(part))
        part.fsdp_post_all_gather = _widen


def _narrow(part: Callable[[], Any], mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
    """Return what is sent of a part, fp8 [..., Y, X] and bf16 [..., Y], and nothing to remember."""
    numbers, factors = in_fp8(part().to(policy.param_dtype))
    return (numbers, factors.bfloat16()), None


def _widen(received: tuple[Tensor, Tensor], _: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    """Return the whole matrix, and what FSDP2 is to free with it; or write it to `out`, for which it made memory."""
    numbers, factors = received
    # Not `detach`: autograd would take the matrix of the forward, which has the same numbers, for another.
    whole = torch.empty_like(numbers, dtype=dtype) if out is None else local(out).data
    whole.copy_(numbers).mul_(factors[..., None])
    for tensor in received:
        tensor.untyped_storage().resize_(0)
    return (whole, (whole,)) if out is None else None


class FullySharded:
    """The gradients of a `shard_fully` model: FSDP2 sums them in backward; this hands them to the pieces."""

    def __init__(self, model: Decoder, pieces: Sequence[PlacedPiece], over_replicas: Sequence[GradientSum] = ()):
        """`over_replicas`: sums of the shards' gradients over replicas, where FSDP2 splits over one replica only. It
        tells them of each gradient that it has reduced, through the parameter's hooks."""
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(model, FSDPModule)
        self._model, self._pieces, self.over_replicas = model, pieces, over_replicas
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def arm(self, backwards: int, moment: SumTime) -> None:
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
            piece.value.grad = gradient_of(piece)

    def after_update(self) -> None:
        """Let go of what is gathered: after a forward without gradients, the model keeps the old values of some."""
        for module in self._sharded:
            module.reshard()
