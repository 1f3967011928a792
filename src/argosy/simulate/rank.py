"""The real train step of one rank, run and written down."""

from __future__ import annotations

import math
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


def simulate_rank(plan: Plan, run: RunConfig, rank: int, every_microbatch: bool = False) -> Trace:
    """A step of rank `rank` under `plan`, with no device, no weights and no other rank; nothing is compiled.

    Its batch is of whole documents, and goes to all experts alike. Many microbatches repeat: without a pipeline, and
    under 1f1b once it is filled, some are traced, and one of those that turn out to be alike stands for the others,
    unless `every_microbatch` says to trace each.

    Raises: UserError if the step depends on numbers that only a real run knows, or on a device that is not here.
    """
    # The first one makes gradients, and after the last one they are summed; between them are two that may be alike.
    enough = plan.pp + 3
    more = plan.microbatches(run.train.global_batch) - enough
    if plan.pp > 1:  # is traced twice: what it makes beforehand for all microbatches shows by one more
        enough, more = enough + 1, more - 1
        if plan.schedule != "1f1b" or more < enough:
            every_microbatch = True
    if every_microbatch or more <= 0:
        return _traced(plan, run, rank, None)
    trace = _traced(plan, run, rank, enough)
    shorter = _traced(plan, run, rank, enough - 1) if plan.pp > 1 else None
    return trace.extended(more, shorter) or _traced(plan, run, rank, None)


def _traced(plan: Plan, run: RunConfig, rank: int, microbatches: int | None) -> Trace:
    eager = plan.model_copy(update={"compile": False})
    with fake_world(rank, plan.world_size) as world, fake_memory() as fake, Recorder() as recorder:
        return _record(recorder, fake, eager, run, world, microbatches)


def _record(recorder: Recorder, fake: Fake, plan: Plan, run: RunConfig, world: World, traced: int | None) -> Trace:
    """Write down a step with `traced` of the batch's microbatches, by default all."""
    with _host_copies_labelled(recorder):
        model = apply(plan, run, world, _without_values)
        for moe in model.moes.values():
            moe.router.choose = partial(even_choice, run.model.moe.experts_per_token)  # type: ignore[method-assign]
        recorder.label([x for p in model.pieces for x in (p.parameter.detach(), p.value)], "parameters")
        optimizer = Optimizer(model.masters, run.optimizer, run.seed)
        # The first update makes what is kept from then on: moments, places, the host's gradients.
        for piece in model.pieces:
            piece.value.grad = torch.zeros_like(piece.value)
        _update(recorder, model, optimizer)
        if model.masters is not model.pieces:
            moments = [m for p in optimizer.pieces for m in optimizer.state_of(p).values()]
            recorder.label([*(p.value for p in model.masters), *moments], "host")
        batch = _batch(plan, run, world, fake)
        some = batch if traced is None else [*batch[: traced - 1], batch[-1]]
        recorder.begin(axes_of(model.meshes))
        # What the loop does in a step, as `training.job` does it.
        forward_backward(model, some, 1.0, world, recorder.clock, Wishes())
        if model.moes:
            with recorder.clock.time("communication"):
                balance_experts(model.moes, run.model, world)
        with recorder.clock.time("optimizer"):
            clip_gradients(model.pieces, run.optimizer.grad_clip).item()
        _update(recorder, model, optimizer)
        return recorder.end()


def _update(recorder: Recorder, model: ParallelModel, optimizer: Optimizer) -> None:
    with recorder.clock.time("optimizer"):
        model.before_update()
        if model.masters is not model.pieces:
            recorder.label([p.value.grad for p in model.masters if p.value.grad is not None], "host")
        optimizer.step()
        model.after_update()
    model.zero_gradients()


def _batch(plan: Plan, run: RunConfig, world: World, fake: Fake) -> list[Microbatch]:
    rows = np.ones((run.train.global_batch // plan.dp, run.data.seq_len + 1), dtype=np.int32)
    batch = microbatches(rows, plan.microbatch, 0, world.device)
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
