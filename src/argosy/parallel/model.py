"""This rank's part of a model that runs over many ranks, and the step's arithmetic over all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.config.schema import RunConfig
from argosy.faults import fault
from argosy.models.decoder import Decoder
from argosy.models.experts import MoE
from argosy.models.microbatch import Microbatch
from argosy.models.mtp import further_tokens
from argosy.models.preference import Preference
from argosy.observe.clock import StepClock
from argosy.parallel.buckets import Bucket, GradientSync, SumRanks
from argosy.parallel.context import shard_sequence
from argosy.parallel.data import FullySharded, GradientSum
from argosy.parallel.mesh import Meshes
from argosy.parallel.offload import HostCopies
from argosy.parallel.pieces import LocalSquares, PlacedPiece, pieces_of, square_share
from argosy.parallel.pipeline import Pipeline
from argosy.plan.pipeline import SCHEDULES
from argosy.plan.plan import FP8, Plan
from argosy.plan.sync import is_summed_exactly
from argosy.precision import FLOAT_DTYPES
from argosy.sync.compressor import Lane, SumTime
from argosy.sync.compressors import COMPRESSOR_OF

COMPUTE_DTYPES = FLOAT_DTYPES | dict.fromkeys(FP8, torch.bfloat16)
"""The dtype of the arithmetic around matmuls, by the plan's word."""


class GradientRule(Protocol):
    """The way from the gradients of one part of the model to sums over data-parallel ranks."""

    def arm(self, backwards: int, moment: SumTime) -> None: ...
    def before_backward(self, last: bool) -> None: ...
    def finish(self) -> None: ...
    def after_update(self) -> None: ...


class Schedule(Protocol):
    """The order in which a batch's microbatches run, forward and backward, through all parts of the model."""

    microbatches_at_once: int
    """Number of microbatches that `outputs` takes."""

    def forward_backward(self, batch: Sequence[Microbatch], scale: float | Tensor, clock: StepClock) -> Tensor:
        """Add to the parameters' gradients those of `scale` times the summed loss; return that loss, or 0 if it is
        computed elsewhere."""
        ...

    def outputs(self, batch: Sequence[Microbatch]) -> list[Tensor]:
        """Return what the last stage gives for each microbatch, or nothing if it is elsewhere, without gradients."""
        ...


class Sequential:
    """The pipeline of one stage: each microbatch runs forward and backward before the next."""

    def __init__(self, model: Decoder, before_backward: Callable[[bool], None]):
        """`before_backward(last)` is called before each microbatch, with True for the last one of the batch."""
        self._model, self._before_backward = model, before_backward
        self.microbatches_at_once = 1

    def forward_backward(self, batch: Sequence[Microbatch], scale: float | Tensor, clock: StepClock) -> Tensor:
        total = torch.zeros((), device=self._model.device)
        for micro in batch:
            self._before_backward(micro is batch[-1])
            with clock.time("forward"):
                fault("forward")
                loss = self._loss(micro)
            with clock.time("backward"):
                fault("backward")
                (loss * scale).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def outputs(self, batch: Sequence[Microbatch]) -> list[Tensor]:
        return [self._loss(micro) for micro in batch]

    def _loss(self, micro: Microbatch) -> Tensor:
        known = micro.tokens_BT, micro.targets_BT, micro.positions_BT, micro.documents
        loss: Tensor = self._model(*known, **micro.extras())
        return loss


class ParallelModel:
    """This rank's part of a model that runs over many: its pieces, and the step's arithmetic over all ranks."""

    def __init__(self, plan: Plan, run: RunConfig, meshes: Meshes, parts: dict[int, Decoder]):
        #: The ranks' views of each other.
        self.meshes = meshes
        #: How parameters are cut into buckets, in a word.
        self.layout = f"pp{plan.pp}-{plan.stages}shard{plan.dp_shard}cp{plan.cp}tp{plan.tp}ep{plan.ep}zero{plan.zero}"
        self.layout += f"mb{plan.bucket_mb}rank{run.sync.rank}"
        self.layout += f"tiers{plan.sum_inside}x{plan.sum_between}" * plan.sums_in_tiers
        self.layout += plan.layers and f"layers{plan.layers}"
        #: This rank's stages of the model, in their order.
        self.parts = list(parts.values())
        self._further = run.model.mtp.modules
        self._take_mine = partial(shard_sequence, rank=meshes.rank("cp"), size=plan.cp)
        #: This rank's layers of experts, by number.
        self.moes = {int(i): b.mlp for m in parts.values() for i, b in m.blocks.items() if isinstance(b.mlp, MoE)}
        #: What it trains.
        self.pieces: list[PlacedPiece] = []
        #: What it holds besides: the run does not train it.
        self.frozen: list[PlacedPiece] = []
        #: True if it trains an adapter: checkpoints leave out what is frozen.
        self.has_adapter = run.lora.rank > 0
        self._rules: list[GradientRule] = []
        how = _agreement(plan, run, next(iter(parts.values())).device)
        #: What takes the squares of this rank's own gradients; None if nobody asks for them.
        self.own_squares: LocalSquares | None = None
        #: The pieces whose gradient on this rank, before any sum, is that of its own samples.
        self.own_pieces: list[PlacedPiece] = []
        for model in parts.values():
            held = list(pieces_of(model, meshes))
            mine = [piece for piece in held if piece.parameter.requires_grad]
            self.pieces += mine
            self.frozen += [piece for piece in held if not piece.parameter.requires_grad]
            if run.observe.noise_scale_every_steps and plan.has_own_gradients:
                on_both_ends = plan.pp > 1 and run.model.embeds_at_both_ends
                own = [p for p in mine if not p.is_part_of_sum and not (on_both_ends and p.name == "embedding.weight")]
                self.own_pieces += own
                self.own_squares = self.own_squares or LocalSquares()
                self.own_squares.watch(own)
            rules = _gradient_rules(plan, meshes, model, mine, run.resilience.check_collectives, how)
            self._rules += rules
            sums = [rule for rule in rules if isinstance(rule, GradientSum)]
            model.before_use = partial(_need, [weakref.ref(rule) for rule in sums])
        # A rank with both ends of the pipeline has a tied embedding twice: it updates one and copies it to the other.
        tied = [piece for piece in (*self.pieces, *self.frozen) if piece.name == "embedding.weight"]
        self._tied = [(tied[0], twin) for twin in tied[1:]]
        for _, twin in self._tied:
            (self.pieces if twin in self.pieces else self.frozen).remove(twin)
        offloaded = self.pieces if plan.offload in ("optimizer", "all") else []
        self._host = HostCopies([piece.value for piece in offloaded], torch.float32)
        #: What the optimizer updates: the pieces, or their twins in host memory.
        self.masters = self.pieces
        if offloaded:
            self.masters = [replace(p, value=twin) for p, twin in zip(self.pieces, self._host.twins, strict=True)]
        self._schedule = _schedule(plan, run, meshes, parts, self._rules)
        #: Data-parallel ranks read different rows: their number, and this rank's place among them.
        self.dp = plan.dp
        self.dp_rank = meshes.rank("dp_replicate") * plan.dp_shard + meshes.rank("dp_shard")
        # Every rank of a tp group computes the same loss, so one of them reports it.
        self._reports = meshes.rank("tp") == 0
        #: True on one of the ranks that read the same rows; its counts of them, summed over ranks, count each row once.
        self.counts_rows = not any(meshes.rank(axis) for axis in ("pp", "cp", "tp"))
        self.microbatches_at_once = self._schedule.microbatches_at_once

    def forward_backward(
        self,
        batch: Sequence[Microbatch],
        scale: float | Tensor,
        clock: StepClock,
        moment: SumTime = SumTime(),  # noqa: B008  (frozen)
        balance_scale: float | None = None,
    ) -> Tensor:
        """Leave in the parameters this rank's gradients of `scale` times the batch's summed loss.

        `moment`: the step, and the loss scale that is in `scale`. `balance_scale`: the factor of the losses that keep
        experts in balance, which are sums over all tokens; None: `scale`. Returns this rank's share of the summed loss:
        over all ranks the shares add up to it. The sums of gradients over ranks are under way until `finish_gradients`.
        """
        batch = [self._mine(micro, trains=True) for micro in batch]
        for moe in self.moes.values():
            moe.loss_weight = float(scale) if balance_scale is None else balance_scale
        for rule in self._rules:
            rule.arm(len(batch), moment)
        return self._share(self._schedule.forward_backward(batch, scale, clock))

    def square_of(self, micro: Microbatch, scale: float) -> Tensor:
        """Return this rank's share of the squared norm of one microbatch's gradient, fp64, no dims; leave no gradient.

        All ranks call it together, each data-parallel one with a microbatch of its own. The gradient is that of their
        mean loss times `scale`.
        """
        tokens = micro.targets_BT.numel() * self.dp
        self.forward_backward([micro], scale / tokens, StepClock(self.device))
        self.finish_gradients()
        square = self.square_share()
        self.zero_gradients()
        for moe in self.moes.values():
            moe.take_load()
        return square

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def watch(self, on: bool) -> None:
        """Turn on or off that `bits` can tell this rank's gradients of the next step."""
        for rule in self._sums:
            rule.watches = on

    def bits(self) -> int:
        """Return the bits of this rank's gradients of the step, before they were summed over ranks, in one number."""
        return int(sum(rule.bits() for rule in self._sums))

    def recompute(self, batch: Sequence[Microbatch], loss_scale: float, tokens: int | Tensor) -> tuple[float, int]:
        """Compute the loss over `tokens` and the gradient's bits of another rank's batch, and drop the gradient.

        The step's own results are left alone, and no other rank hears of it. Only where ranks are replicas of each
        other, without experts.
        """
        for rule in self._sums:
            rule.hold()
        unread = StepClock(self.device)
        batch = [self._mine(micro, trains=True) for micro in batch]
        total = self._schedule.forward_backward(batch, loss_scale / tokens, unread)
        return (total / tokens).item(), int(sum(rule.let_go() for rule in self._sums))

    def sums_are_sound(self) -> bool:
        """Return True if this rank's sums of gradients fit their checksums, as far as they were checked."""
        return all(bool(rule.is_sound) for rule in self._sums if rule.is_sound is not None)

    @property
    def _sums(self) -> list[GradientSum]:
        return [rule for rule in self._rules if isinstance(rule, GradientSum)]

    @property
    def compressed_buckets(self) -> list[Bucket]:
        """The buckets whose compressors keep something from step to step."""
        over_replicas = [sums for rule in self._rules if isinstance(rule, FullySharded) for sums in rule.over_replicas]
        return [bucket for sums in (*self._sums, *over_replicas) for bucket in sums.buckets if bucket.memory.kept]

    def commit_sums(self) -> None:
        """Make what the step's sums left in their compressors' memory count: the step is applied."""
        for bucket in self.compressed_buckets:
            bucket.memory.commit()

    def finish_gradients(self) -> None:
        """Wait until every piece's gradient is the sum over all ranks."""
        for rule in self._rules:
            rule.finish()
        _sum_over([p for p in self.pieces if p.is_part_of_sum], self.meshes.group("tp"))
        _sum_over([p for p in self.pieces if p.name == "embedding.weight"], self.meshes.ends)
        for kept, twin in self._tied:
            if kept.parameter.requires_grad:
                assert kept.value.grad is not None and twin.value.grad is not None
                kept.value.grad += twin.value.grad
                twin.value.grad = None

    def square_share(self) -> Tensor:
        """Return this rank's share of the gradient's squared global norm (`parallel.pieces.square_share`)."""
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        return square_share(self.pieces) if self.pieces else nothing

    def before_update(self) -> None:
        """Give the masters the gradients of their pieces."""
        self._host.grads_to_host()

    @torch.no_grad()
    def after_update(self) -> None:
        """Bring the new values of the masters to the model on every rank: with ZeRO 1 and 2 under the next forward, or
        until `settle`."""
        self._host.values_to_device()
        for kept, twin in self._tied:
            twin.value.copy_(kept.value)
        for rule in self._rules:
            rule.after_update()

    def settle(self) -> None:
        """Wait until the values of all parameters are those of all ranks; a forward waits for those that it needs."""
        for rule in self._sums:
            rule.settle()

    def zero_gradients(self) -> None:
        for model in self.parts:
            model.zero_grad(set_to_none=True)
        for piece in self.pieces:
            piece.value.grad = None

    def buffers(self) -> dict[str, Tensor]:
        """Return the model's state besides weights, by name, the same on all ranks that have it: biases of routers."""
        return {name: buffer for model in self.parts for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def loss(self, batch: Sequence[Microbatch]) -> Tensor:
        """Return this rank's share of the batch's summed loss; `batch` has `microbatches_at_once` microbatches."""
        losses = self._schedule.outputs([self._mine(micro) for micro in batch])
        return self._share(torch.stack(losses).sum() if losses else torch.zeros((), device=self.device))

    @torch.no_grad()
    def score_batch(self, batch: Sequence[Microbatch]) -> list[Tensor] | None:
        """Return `models.preference.answer_scores` of the batch's `sequences`, fp32 [B, T, 2] of each microbatch: the
        log-probability of each answer, and its tokens that are not the likeliest. Of a reward model: its score, and 0.

        All ranks call it together, with `microbatches_at_once` microbatches. None but on one of the ranks that have the
        same rows.
        """
        found = self._schedule.outputs([self._mine(micro) for micro in batch])
        is_mine = bool(found) and self._reports and self.meshes.rank("cp") == 0
        return found if is_mine else None

    @property
    def preferences(self) -> list[Preference]:
        """The objectives over whole answers of this rank's parts; those without the head have no use for theirs."""
        return [part.preference for part in self.parts if part.preference is not None]

    def _share(self, loss: Tensor) -> Tensor:
        return loss if self._reports else torch.zeros_like(loss)

    def _mine(self, micro: Microbatch, trains: bool = False) -> Microbatch:
        """Return the tokens that this rank of a cp group computes, with the positions and documents of whole rows.

        trains: False leaves out what only training has, further tokens and dropout.
        """
        tokens, targets = self._take_mine(micro.tokens_BT), self._take_mine(micro.targets_BT)
        mine = replace(micro, tokens_BT=tokens, targets_BT=targets)
        if not trains:
            return replace(mine, mask_keys_BT=None)
        if not self._further:
            return mine
        whole = further_tokens(micro.tokens_BT, micro.targets_BT, micro.positions_BT, self._further)
        return replace(mine, further_BTn2=self._take_mine(whole).contiguous())


def _need(sums: Sequence[Callable[[], GradientSum | None]], module: nn.Module) -> None:
    """Wait for the values of `module`. The references are weak: else a model would hold itself."""
    for rule in sums:
        if (alive := rule()) is not None:
            alive.need(module)


def _schedule(
    plan: Plan, run: RunConfig, meshes: Meshes, parts: dict[int, Decoder], rules: Sequence[GradientRule]
) -> Schedule:
    def before_backward(last: bool) -> None:
        for rule in rules:
            rule.before_backward(last)

    group = meshes.group("pp")
    if group is None:
        (model,) = parts.values()
        return Sequential(model, before_backward)
    hidden = (plan.microbatch, run.data.seq_len // plan.cp // plan.tp, run.model.width)
    microbatches = plan.microbatches(run.train.global_batch)
    return Pipeline(parts, plan.stages, SCHEDULES[plan.schedule], hidden, group, microbatches)


def _agreement(plan: Plan, run: RunConfig, device: torch.device) -> GradientSync:
    """Return how replicas agree, as plan and run say."""

    def goes_exact(piece: PlacedPiece) -> bool:
        whole_on_tp = plan.tp > 1 and piece.is_part_of_sum
        at_both_ends = plan.pp > 1 and run.model.embeds_at_both_ends
        return is_summed_exactly(piece.name, piece.shape, whole_on_tp, at_both_ends, plan.sync, run.sync)

    return GradientSync(
        Lane(device),
        COMPRESSOR_OF[plan.sync if plan.is_compressed else "exact"](run.sync),
        goes_exact if plan.is_compressed else lambda piece: False,
        run.sync.exact_steps,
        run.seed,
        bucket_bytes=plan.bucket_mb * 2**20,
    )


def _gradient_rules(
    plan: Plan, meshes: Meshes, model: Decoder, pieces: Sequence[PlacedPiece], checks: bool, how: GradientSync
) -> list[GradientRule]:
    dense = [piece for piece in pieces if not piece.is_expert]
    experts = [piece for piece in pieces if piece.is_expert]
    some = [(dense, "shard", "replicate"), (experts, "expert_shard", "expert_replicate")]
    ours = [(group, meshes.group(shard), meshes.replicas(replicate)) for group, shard, replicate in some if group]
    if not plan.shards_parameters:
        dtype, keep = COMPUTE_DTYPES[plan.reduce], plan.zero < 2
        return [GradientSum(group, SumRanks(shard, over), dtype, keep, checks, how) for group, shard, over in ours]
    if not plan.sums_beside_fsdp:
        return [FullySharded(model, pieces)]
    dtype = COMPUTE_DTYPES[plan.reduce]
    over_replicas = [GradientSum(group, SumRanks(None, over), dtype, False, how=how) for group, _, over in ours]
    return [FullySharded(model, pieces, over_replicas)]


def _sum_over(pieces: Sequence[PlacedPiece], group: dist.ProcessGroup | None) -> None:
    """Sum the pieces' gradients over `group`, all in one message."""
    gradients = [piece.value.grad for piece in pieces if piece.value.grad is not None]
    if group is None or not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, sums in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(sums.view_as(gradient))
