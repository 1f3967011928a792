"""From a plan to a model that is laid out as it says: the one order in which the axes are applied.

Nothing else asks whether an axis is in use: the step, the optimizer and the checkpoint see pieces of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.schema import RunConfig
from argosy.models.batch import Microbatch
from argosy.models.decoder import Block, Decoder, Part
from argosy.models.experts import MoE, moe_layers
from argosy.models.initialize import materialize
from argosy.observe.clock import StepClock
from argosy.parallel.compile import compile_blocks
from argosy.parallel.context import RingAttention, UlyssesAttention, shard_sequence, unshard_sequence
from argosy.parallel.data import GradientSum, Ranks
from argosy.parallel.expert import SplitRows, split_experts
from argosy.parallel.mesh import Meshes, lay_out_meshes
from argosy.parallel.offload import HostCopies, offload_activations
from argosy.parallel.pieces import Held, pieces_of
from argosy.parallel.pipeline import Pipeline
from argosy.parallel.recompute import apply_recompute
from argosy.parallel.shard import FullySharded, shard_fully
from argosy.parallel.tensor import split_over_ranks
from argosy.parallel.world import World
from argosy.plan.pipeline import SCHEDULES, split_layers, stages_of_rank
from argosy.plan.plan import Plan
from argosy.precision.fp8 import use_fp8

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class GradientRule(Protocol):
    """How the gradients of one part of the model become sums over data-parallel ranks."""

    def arm(self, backwards: int) -> None: ...
    def before_backward(self, last: bool) -> None: ...
    def finish(self) -> None: ...
    def after_update(self) -> None: ...


def apply(plan: Plan, run: RunConfig, world: World) -> ParallelModel:
    """Build this rank's part of the model as `plan` says, with its initial weights; all ranks call it alike.

    Raises: UserError if the device cannot do what the plan asks of it (fp8).
    """
    tied = run.model.tie_embeddings and plan.pp > 1 and not SCHEDULES[plan.schedule].v_shaped
    meshes = lay_out_meshes(world.device.type, plan, tied) if world.size > 1 else None
    parts = {
        stage: Decoder(run.model, DTYPES[plan.precision], part)
        for stage, part in _parts(plan, run, 0 if meshes is None else meshes.rank("pp")).items()
    }
    for model in parts.values():
        if plan.weights == "bf16":
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        if plan.precision == "fp8":
            use_fp8(model, world.device)
        if meshes is not None:
            split_model(model, plan, meshes)
        blocks = [(int(layer), block) for layer, block in model.blocks.items()]
        apply_recompute(blocks, plan.recompute, plan.recompute_every, plan.compile)
        if plan.offload in ("activations", "all"):
            offload_activations(blocks)
        compile_blocks(model, plan.compile)
        if meshes is not None and fully_sharded(plan):
            experts = meshes.sharded("expert_replicate", "expert_shard") if plan.ep > 1 else None
            keep_gathered = plan.pp > 1 and SCHEDULES[plan.schedule].splits_backward
            shard_fully(model, meshes.sharded("replicate", "shard"), experts, DTYPES[plan.reduce], keep_gathered)
        materialize(model, run.model, world.device, run.seed)
    return ParallelModel(plan, run, world, meshes, parts)


class ParallelModel:
    """This rank's part of a model that runs over many: its pieces, and the step's arithmetic over all ranks."""

    def __init__(self, plan: Plan, run: RunConfig, world: World, meshes: Meshes | None, parts: dict[int, Decoder]):
        #: The ranks' views of each other; None alone.
        self.meshes = meshes
        self._parts, self._cp = list(parts.values()), plan.cp
        #: This rank's layers of experts, by number.
        self.moes = {int(i): b.mlp for m in parts.values() for i, b in m.blocks.items() if isinstance(b.mlp, MoE)}
        self.pieces: list[Held] = []
        self._rules: list[GradientRule] = []
        for model in parts.values():
            mine = list(pieces_of(model, meshes, plan.zero))
            self.pieces += mine
            self._rules += _gradient_rules(plan, meshes, model, mine)
        # A rank with both ends of the pipeline has a tied embedding twice: it updates one and copies it to the other.
        tied = [piece for piece in self.pieces if piece.name == "embedding.weight"]
        self._tied = (tied[0], tied[-1]) if len(tied) == 2 else None
        if self._tied:
            self.pieces.remove(self._tied[1])
        #: What the optimizer updates and a checkpoint saves: the pieces, or their twins in host memory.
        self.masters = self.pieces
        self._host: HostCopies | None = None
        if plan.offload in ("optimizer", "all"):
            self._host = HostCopies([piece.value for piece in self.pieces], torch.float32)
            self.masters = [replace(p, value=twin) for p, twin in zip(self.pieces, self._host.twins, strict=True)]
        self._pipeline: Pipeline | None = None
        if plan.pp > 1:
            assert meshes is not None
            group = meshes.group("pp")
            assert group is not None
            hidden = (plan.microbatch, run.data.seq_len // plan.cp // plan.tp, run.model.width)
            self._pipeline = Pipeline(parts, plan.stages, SCHEDULES[plan.schedule], hidden, group)
        #: Data-parallel ranks read different rows; this is which, and of how many.
        self.dp = plan.dp
        self.dp_rank = 0
        if meshes is not None:
            self.dp_rank = meshes.rank("dp_replicate") * plan.dp_shard + meshes.rank("dp_shard")
        # Every rank of a tp group computes the same loss, so one of them reports it.
        self._reports = meshes is None or meshes.rank("tp") == 0
        self.microbatches_at_once = plan.microbatches(run.train.global_batch) if plan.pp > 1 else 1

    def forward_backward(self, batch: Sequence[Microbatch], scale: float, clock: StepClock) -> Tensor:
        """Leave in the parameters this rank's gradients of `scale` times the batch's summed loss.

        Returns this rank's share of the summed loss: over all ranks the shares add up to it. The sums of gradients
        over ranks are under way until `finish_gradients`.
        """
        batch = [self._mine(micro) for micro in batch]
        for moe in self.moes.values():
            moe.loss_weight = scale
        for rule in self._rules:
            rule.arm(len(batch))
        if self._pipeline is not None:
            with clock.time("pipeline"):
                return self._share(self._pipeline.forward_backward(batch, scale))
        (model,) = self._parts
        total = torch.zeros((), device=model.device)
        for micro in batch:
            for rule in self._rules:
                rule.before_backward(last=micro is batch[-1])
            with clock.time("forward"):
                loss = model(micro.tokens_BT, micro.targets_BT, micro.positions_BT, micro.documents)
            with clock.time("backward"):
                (loss * scale).backward()
            total += loss.detach()
        return self._share(total)

    def finish_gradients(self) -> None:
        """Wait until every piece's gradient is the sum over all ranks."""
        for rule in self._rules:
            rule.finish()
        if self.meshes is not None:
            _sum_over([p for p in self.pieces if p.is_part_of_sum], self.meshes.group("tp"))
            _sum_over([p for p in self.pieces if p.name == "embedding.weight"], self.meshes.ends)
        if self._tied:
            first, last = (piece.value for piece in self._tied)
            assert first.grad is not None and last.grad is not None
            first.grad += last.grad
            last.grad = None

    def before_update(self) -> None:
        """Give the masters the gradients of their pieces."""
        if self._host is not None:
            self._host.grads_to_host()

    @torch.no_grad()
    def after_update(self) -> None:
        """Once the masters' values have changed, make the model on every rank that of the new values."""
        if self._host is not None:
            self._host.values_to_device()
        if self._tied:
            self._tied[1].value.copy_(self._tied[0].value)
        for rule in self._rules:
            rule.after_update()

    def zero_gradients(self) -> None:
        """Free the gradients."""
        for model in self._parts:
            model.zero_grad(set_to_none=True)
        for piece in self.pieces:
            piece.value.grad = None

    def buffers(self) -> dict[str, Tensor]:
        """What the model remembers besides weights, by name, the same on all ranks that have it: biases of routers."""
        return {name: buffer for model in self._parts for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def loss(self, batch: Sequence[Microbatch]) -> Tensor:
        """This rank's share of the batch's summed loss; `batch` has `microbatches_at_once` microbatches."""
        batch = [self._mine(micro) for micro in batch]
        if self._pipeline is not None:
            return self._share(self._pipeline.loss(batch))
        (model,) = self._parts
        losses = [model(m.tokens_BT, m.targets_BT, m.positions_BT, m.documents) for m in batch]
        return self._share(torch.stack(losses).sum())

    def _share(self, loss: Tensor) -> Tensor:
        return loss if self._reports else torch.zeros_like(loss)

    def _mine(self, micro: Microbatch) -> Microbatch:
        """The tokens of the rows that this rank of a cp group computes; positions and documents stay those of all."""
        if self._cp == 1 or self.meshes is None:
            return micro
        rank = self.meshes.rank("cp")
        tokens, targets = (shard_sequence(x, rank, self._cp) for x in (micro.tokens_BT, micro.targets_BT))
        return Microbatch(tokens, targets, micro.positions_BT, micro.documents)


def fully_sharded(plan: Plan) -> bool:
    """Whether parameters are split by FSDP2: alone, a rank has nothing to share."""
    return plan.zero == 3 and plan.dp_shard * plan.cp > 1


def split_model(model: Decoder, plan: Plan, meshes: Meshes) -> None:
    """Split experts, matrices and sequences as the plan says."""
    axes = [axis for axis in ("ep", "tp") if getattr(plan, axis) > 1]
    if axes:
        for moe in moe_layers(model):
            split_experts(moe, (meshes.experts if plan.ep > 1 else meshes.state)[tuple(axes)])
    if plan.tp > 1:
        split_over_ranks(model, meshes.state["tp"])
    rows = None
    if (group := meshes.group("cp")) is not None:
        rank = meshes.rank("cp")
        core = RingAttention(group) if plan.context == "ring" else UlyssesAttention(group)
        model.my_tokens = partial(shard_sequence, rank=rank, size=plan.cp)
        for block in model.blocks.values():
            assert isinstance(block, Block)
            block.attention.core = core
        rows = SplitRows(group, unshard_sequence, partial(shard_sequence, rank=rank, size=plan.cp))
    if (group := meshes.group("tp")) is not None:
        rank = meshes.rank("tp")
        rows = SplitRows(group, partial(torch.cat, dim=1), lambda x: x.chunk(plan.tp, dim=1)[rank], around=rows)
    for moe in moe_layers(model):
        moe.rows = rows or moe.rows


def _parts(plan: Plan, run: RunConfig, rank: int) -> dict[int, Part]:
    """Stage -> what of the decoder it holds, for the stages of pipeline rank `rank`."""
    if plan.pp == 1:
        return {0: Part(range(run.model.layers))}
    layers = split_layers(run.model, run.data.seq_len, plan.stages)
    per_rank, v_shaped = plan.stages // plan.pp, SCHEDULES[plan.schedule].v_shaped
    return {
        stage: Part(layers[stage], first=stage == 0, last=stage == plan.stages - 1)
        for stage in stages_of_rank(rank, plan.pp, per_rank, v_shaped)
    }


def _gradient_rules(plan: Plan, meshes: Meshes | None, model: Decoder, pieces: Sequence[Held]) -> list[GradientRule]:
    if meshes is not None and fully_sharded(plan):
        return [FullySharded(model, pieces)]
    ranks = Ranks(None, None) if meshes is None else Ranks(meshes.group("shard"), meshes.group("replicate"))
    dense = [piece for piece in pieces if not piece.is_expert]
    experts = [piece for piece in pieces if piece.is_expert]
    rules: list[GradientRule] = [GradientSum(dense, ranks, DTYPES[plan.reduce], keep=plan.zero < 2)]
    if experts and meshes is not None:
        ranks = Ranks(meshes.group("expert_shard"), meshes.group("expert_replicate"))
        rules.append(GradientSum(experts, ranks, DTYPES[plan.reduce], keep=plan.zero < 2))
    return rules


def _sum_over(pieces: Sequence[Held], group: dist.ProcessGroup | None) -> None:
    """Sum the pieces' gradients over `group`, all in one message."""
    gradients = [piece.value.grad for piece in pieces if piece.value.grad is not None]
    if group is None or not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, sums in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(sums.view_as(gradient))
