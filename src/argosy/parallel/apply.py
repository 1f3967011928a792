"""From a plan to a model that is laid out as it says: the one order in which the axes are applied.

Which axes are in use is asked here and in `model.py`, which picks the schedule and how gradients are summed. The step,
the optimizer and the checkpoint do not ask: they see pieces of parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from argosy import compiler
from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.config.train import BUILTIN_LOSSES
from argosy.models.adapters import add_adapters, quantise
from argosy.models.decoder import Block, Decoder
from argosy.models.delta_net import GatedDeltaNet
from argosy.models.experts import Experts, moe_layers
from argosy.models.initialize import materialize
from argosy.models.preference import Preference
from argosy.models.user_code import load_family, user_loss
from argosy.parallel.async_tensor import AsyncSequenceParallel, check_reach
from argosy.parallel.context import DeltaExchange, RingAttention, UlyssesAttention, shard_sequence, unshard_sequence
from argosy.parallel.data import gather_in_fp8, shard_fully
from argosy.parallel.expert import SplitRows, split_experts
from argosy.parallel.mesh import Meshes, lay_out_meshes
from argosy.parallel.model import COMPUTE_DTYPES, ParallelModel
from argosy.parallel.offload import offload_activations
from argosy.parallel.recompute import apply_recompute
from argosy.parallel.tensor import GatheredLoss, SequenceParallel, VocabularyLoss, WholeSequence, split_over_ranks
from argosy.parallel.world import World
from argosy.plan.cost.exact_state import stages_on, weight_format
from argosy.plan.parameters import Stage, inside, run_table
from argosy.plan.pipeline import SCHEDULES
from argosy.plan.plan import FP8, PLAN_VARIABLE, Plan
from argosy.precision import matrices_of, use_fp8


def load() -> None:
    """Import what laying a model out by the plan in the environment takes beside this module: once, in the process that
    workers are forked from, and not in each of them.
    """
    plan = Plan.parse(os.environ[PLAN_VARIABLE])
    if plan.compile:
        compiler.load()
    if plan.pp > 1:
        import torch.distributed.pipelining
    if plan.shards_parameters:
        import torch.distributed.fsdp
    if max(plan.tp, plan.ep, plan.dp_shard) > 1:
        import torch.distributed.tensor
    if max(plan.tp, plan.cp, plan.ep, plan.dp_shard) > 1 or plan.recompute != "none":
        import torch._dynamo  # noqa: F401  what torch marks as not to be compiled loads it when it is first called


def compile_blocks(model: Decoder, enabled: bool) -> None:
    """Compile `model`'s blocks (once, as they are alike), the last norm, and the loss of a chunk, in place."""
    if enabled:
        compiler.load()
        for block in model.blocks.values():
            block.compile()
            for moe in moe_layers(block):
                if moe.shared is not None and moe.experts.tokens_travel:
                    moe.shared.compile()  # it is called beside the experts, which no graph has
        if model.norm is not None:
            model.norm.compile()
        if isinstance(model.loss_of_chunk, VocabularyLoss):
            model.loss_of_chunk.compile()
        else:
            model.loss_of_chunk = torch.compile(model.loss_of_chunk)


Materialize = Callable[[Decoder, ModelConfig, torch.device, int], None]
"""`models.initialize.materialize` or its replacement: gives a model memory, and weights."""


def apply(
    plan: Plan,
    run: RunConfig,
    world: World,
    materialize: Materialize = materialize,
    stages_on: Callable[[Plan, RunConfig, int], dict[int, Stage]] = stages_on,
) -> ParallelModel:
    """Build this rank's part of the model as `plan` says, with its initial weights; all ranks call it alike.

    stages_on: may replace `plan.cost.exact_state.stages_on`.
    Raises: UserError if the device cannot do what the plan asks of it (fp8, async_tp).
    """
    meshes, parts = lay_out(plan, run, world, materialize, stages_on)
    return ParallelModel(plan, run, meshes, parts)


def lay_out(
    plan: Plan,
    run: RunConfig,
    world: World,
    materialize: Materialize = materialize,
    stages_on: Callable[[Plan, RunConfig, int], dict[int, Stage]] = stages_on,
    splits_tokens: bool = True,
) -> tuple[Meshes, dict[int, Decoder]]:
    """Return the ranks' views of each other, and this rank's pipeline stages by number, as `apply` lays them out.

    splits_tokens: False if tp ranks are to have all tokens between matrices (`tensor.WholeSequence`), for inference.
    """
    load_family(run)
    if plan.async_tp:
        check_reach(world, plan.tp)
    tied = run.model.embeds_at_both_ends and plan.pp > 1 and not SCHEDULES[plan.schedule].v_shaped
    meshes = lay_out_meshes(world.device.type, plan, tied, run.launch.timeout_s)
    parts = {
        number: Decoder(run.model, COMPUTE_DTYPES[plan.precision], stage)
        for number, stage in stages_on(plan, run, world.rank).items()
    }
    for model in parts.values():
        model.table = run_table(run, model.stage)
        add_adapters(model, model.table, run.lora)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(COMPUTE_DTYPES[weight_format(name, model.table[name], plan, run)])
        split_model(model, plan, run, meshes, splits_tokens)
        in_fp8 = use_fp8(model, world.device, plan.precision) if plan.precision in FP8 else []
        if run.lora.is_quantised:
            quantise(model, run.lora)
        freeze(model)
        blocks = [(int(layer), block) for layer, block in model.blocks.items()]
        apply_recompute(blocks, plan.recompute, plan.recompute_every, plan.compile)
        if plan.offload in ("activations", "all"):
            offload_activations(blocks)
        compile_blocks(model, plan.compile)
        use_loss(model, run, meshes)
        if plan.shards_parameters:
            ours = plan.sums_beside_fsdp  # then the sum over replicas is not FSDP2's
            experts = _fsdp_mesh(meshes, "expert_replicate", "expert_shard", ours) if plan.ep > 1 else None
            keep_gathered = plan.pp > 1 and SCHEDULES[plan.schedule].splits_backward
            dense = _fsdp_mesh(meshes, "replicate", "shard", ours)
            shard_fully(model, dense, experts, COMPUTE_DTYPES[plan.reduce], keep_gathered, plan.user_buffers)
        for scheme in model.schemes.values():
            scheme.to(world.device)
        materialize(model, run.model, world.device, run.seed)
        if plan.fp8_gather:
            gather_in_fp8(matrix for module in in_fp8 for matrix in matrices_of(module))
    return meshes, parts


def freeze(model: Decoder) -> None:
    """Let autograd compute no gradients of what the run does not train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(model.table[name].is_trained)


def split_model(model: Decoder, plan: Plan, run: RunConfig, meshes: Meshes, splits_tokens: bool) -> None:
    """Split experts, matrices and sequences as the plan says; splits_tokens: as of `lay_out`."""
    axes, table = [axis for axis in ("ep", "tp") if getattr(plan, axis) > 1], run_table(run, model.stage, plan.tp)
    split_by_tokens = AsyncSequenceParallel if plan.async_tp else SequenceParallel
    between = split_by_tokens if splits_tokens else WholeSequence
    if axes:
        for name, module in model.named_modules():
            if isinstance(module, Experts):
                split_experts(module, meshes.device_mesh(*axes), inside(table, name), between, 1 + plan.overlap_experts)
    if plan.tp > 1:
        split_over_ranks(model, meshes.device_mesh("tp"), table, between)
    rows = None
    if (group := meshes.group("cp")) is not None:
        rank = meshes.rank("cp")
        core = RingAttention(group) if plan.context == "ring" else UlyssesAttention(group)
        delta_core = DeltaExchange(group)
        model.my_tokens = partial(shard_sequence, rank=rank, size=plan.cp)
        model.sum_over_tokens = partial(_summed_over, [group])
        for block in model.blocks.values():
            assert isinstance(block, Block)
            if isinstance(block.attention, GatedDeltaNet):
                block.attention.core = delta_core
            else:
                block.attention.core = core
        rows = SplitRows(group, unshard_sequence, partial(shard_sequence, rank=rank, size=plan.cp))
    if (group := meshes.group("tp")) is not None:
        rank = meshes.rank("tp")
        stretch = partial(_stretch_of, rank, plan.tp)
        rows = SplitRows(group, partial(torch.cat, dim=1), stretch, around=rows)
        if splits_tokens:
            model.my_stretch = stretch
        if model.score is not None and splits_tokens:  # logits are of all tokens on each rank, scores of its own
            groups = [other for other in (meshes.group("cp"), group) if other is not None]
            model.sum_over_tokens = partial(_summed_over, groups)
    for moe in moe_layers(model):
        moe.rows = rows or moe.rows


def _stretch_of(rank: int, ranks: int, x_BT: Tensor) -> Tensor:
    return x_BT.chunk(ranks, dim=1)[rank]


def use_loss(model: Decoder, run: RunConfig, meshes: Meshes) -> None:
    """Train with the objective that the run names, or with its loss, if it is the user's. Raises: UserError."""
    if run.train.has_preferences:
        model.preference = Preference(run.train.objective, run.preference)
        model.preference.reports = meshes.rank("cp") == 0
    if run.train.loss in BUILTIN_LOSSES:
        return
    loss, group = user_loss(run.extend.code, run.train.loss), meshes.group("tp")
    model.user_loss = loss if group is None else GatheredLoss(loss, group, run.model.vocab_size)


def _summed_over(groups: Sequence[dist.ProcessGroup], tensor: Tensor) -> Tensor:
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


def _fsdp_mesh(meshes: Meshes, replicate: str, shard: str, one_replica: bool) -> DeviceMesh:
    """Return the mesh that FSDP2 splits over: with the dimension of replicas where there are any, unless it is to see
    one replica only."""
    is_hybrid = meshes.group(replicate) is not None and not one_replica
    return meshes.device_mesh(replicate, shard) if is_hybrid else meshes.device_mesh(shard)
