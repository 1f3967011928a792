"""The real train step of one rank, run and written down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from argosy.config.schema import ModelConfig, RunConfig
from argosy.models.batch import Microbatch, microbatches
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.observe.wire import axes_of
from argosy.optim.optimizer import Optimizer
from argosy.parallel.apply import apply
from argosy.parallel.expert import balance_experts
from argosy.parallel.model import ParallelModel
from argosy.parallel.offload import ActivationOffload
from argosy.parallel.pieces import clip_gradients
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.simulate.fake import Fake, fake_memory, fake_world, replaced
from argosy.simulate.record import Recorder, Trace
from argosy.training.step import Wishes, forward_backward

TRACED_MICROBATCHES = 4
"""The first, which makes gradients; two more, which are alike; the last, after which gradients are summed."""


def simulate_rank(plan: Plan, run: RunConfig, rank: int, every_microbatch: bool = False) -> Trace:
    """A step of rank `rank` under `plan`, with no device, no weights and no other rank; nothing is compiled.

    Without a pipeline, microbatches repeat: the third stands for all between it and the last, unless it turns out that
    it differs from the second, or `every_microbatch` says to trace each.

    Raises: UserError if the step depends on numbers that only a real run knows, or on a device that is not here.
    """
    several = plan.microbatches(run.train.global_batch) - TRACED_MICROBATCHES
    traced = TRACED_MICROBATCHES if plan.pp == 1 and several > 0 and not every_microbatch else None
    with fake_world(rank, plan.world_size) as world, fake_memory() as fake, Recorder() as recorder:
        warmup = 1 if plan.offload in ("optimizer", "all") else 0  # the first step finds no gradients on the host yet
        trace = record_step(recorder, plan, run, world, fake, warmup, traced)
    if traced is None:
        return trace
    return trace.with_third_pass_repeated(several) or simulate_rank(plan, run, rank, every_microbatch=True)


def record_step(
    recorder: Recorder,
    plan: Plan,
    run: RunConfig,
    world: World,
    fake: Fake | None = None,
    warmup: int = 0,
    traced: int | None = None,
) -> Trace:
    """Write down a step of this rank, on a batch of whole documents that goes to all experts alike.

    `recorder` is on. `fake`: the step is simulated, else it really runs, and all ranks call this alike; after `warmup`
    other steps; with `traced` of the batch's microbatches, by default all.
    """
    plan = plan.model_copy(update={"compile": False})
    with _host_copies_labelled(recorder):
        model = apply(plan, run, world, materialize if fake is None else _without_values)
        for moe in model.moes.values():
            moe.router.choose = partial(even_choice, run.model.moe.experts_per_token)  # type: ignore[method-assign]
        optimizer = Optimizer(model.masters, run.optimizer, run.seed)
        with recorder.clock.time("optimizer"):
            for piece in optimizer.pieces:
                optimizer.state_of(piece)  # moments, which it makes when they are first needed
        recorder.label([x for p in model.pieces for x in (p.parameter.detach(), p.value)], "parameters")
        if model.masters is not model.pieces:
            recorder.label([master.value for master in model.masters], "host")
            recorder.label([m for p in optimizer.pieces for m in optimizer.state_of(p).values()], "host")
        batch = _batch(plan, run, world, fake)
        some = batch if traced is None else [*batch[: traced - 1], batch[-1]]
        for _ in range(warmup):
            _step(recorder, model, optimizer, some, run, world)
        recorder.begin(axes_of(model.meshes))
        _step(recorder, model, optimizer, some, run, world)
        return recorder.end()


def _step(
    recorder: Recorder,
    model: ParallelModel,
    optimizer: Optimizer,
    batch: Sequence[Microbatch],
    run: RunConfig,
    world: World,
) -> None:
    """What the loop does in a step, as `training.job` does it."""
    forward_backward(model, batch, 1.0, world, recorder.clock, Wishes())
    if model.moes:
        with recorder.clock.time("communication"):
            balance_experts(model.moes, run.model, world)
    with recorder.clock.time("optimizer"):
        clip_gradients(model.pieces, run.optimizer.grad_clip).item()
        model.before_update()
        if model.masters is not model.pieces:
            recorder.label([p.value.grad for p in model.masters if p.value.grad is not None], "host")
        optimizer.step()
        model.after_update()
    model.zero_gradients()


def _batch(plan: Plan, run: RunConfig, world: World, fake: Fake | None) -> list[Microbatch]:
    rows = np.ones((run.train.global_batch // plan.dp, run.data.seq_len + 1), dtype=np.int32)
    batch = microbatches(rows, plan.microbatch, 0, world.device)
    if fake is None:
        return batch
    # Nothing depends on tokens but numbers; on where documents start, shapes do.
    return [
        replace(
            micro,
            tokens_BT=fake.from_tensor(micro.tokens_BT).clone(),
            targets_BT=fake.from_tensor(micro.targets_BT).clone(),
        )
        for micro in batch
    ]


def even_choice(experts_per_token: int, scores_BTE: Tensor) -> Tensor:
    """Deal the experts out one after the other: each gets as many tokens, give or take one."""
    *shape, experts = scores_BTE.shape
    pairs = torch.arange(math.prod(shape) * experts_per_token, device=scores_BTE.device)
    return (pairs % experts).view(*shape, experts_per_token)


def _without_values(model: Decoder, config: ModelConfig, device: torch.device, seed: int) -> None:
    model.to_empty(device=device)


def _host_copies_labelled(recorder: Recorder) -> AbstractContextManager[None]:
    """What `offload` copies to the host is told apart: on a CPU, both are the same memory."""
    to_host = ActivationOffload.to_host

    def labelled(offload: ActivationOffload, tensor: Tensor) -> Any:
        copy = to_host(offload, tensor)
        recorder.label([copy.host], "host")
        return copy

    return replaced(ActivationOffload, "to_host", labelled)
