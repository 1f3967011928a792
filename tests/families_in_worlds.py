"""A drawn model under plans of several processes: its logits, gradients and losses against those of transformers.

Each row of tokens is packed: it holds three documents. transformers computes each document alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.models import hf
from argosy.models.decoder import Decoder
from argosy.models.initialize import offset_of
from argosy.models.layers import local
from argosy.models.microbatch import Microbatch, microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.apply import apply
from argosy.parallel.context import shard_sequence, unshard_sequence
from argosy.parallel.mesh import Meshes
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.plan.rules import first_problem
from argosy.training.state import TrainState
from argosy.training.step import Step
from tiny import eager, gradients

ROWS, SEQ_LEN, STEPS = 4, 40, 10
DOCUMENTS = (11, 19, 10)
END_OF_DOCUMENT = 2
RATE, EPS = 1e-3, 1e-5
"""AdamW's. With a smaller eps it blows the rounding of gradients that are nearly 0 up to steps of its full size."""
PLANS = {
    "tp": "tp=2,microbatch=2",
    "pp": "pp=2,microbatch=2",
    "ep": "dp_shard=2,ep=2,microbatch=2",
    "cp": "cp=2,microbatch=4",
    "ulysses": "cp=2,context=ulysses,microbatch=4",
    "zero 3": "dp_shard=2,zero=3,microbatch=2",
}
"""Each for two processes."""
Measured = dict[str, Any]
"""What one rank found: "logits" of its rows by their first row, "gradients" by name, "losses" of the steps."""


def rows_of(vocab_size: int, steps: int) -> np.ndarray:
    """Return the rows of all steps, int32 [steps, ROWS, SEQ_LEN + 1]."""
    rows = np.random.default_rng(1).integers(3, vocab_size, (steps, ROWS, SEQ_LEN + 1), dtype=np.int32)
    rows[:, :, [0, DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1]]] = END_OF_DOCUMENT
    return rows


def run_of(config: ModelConfig) -> RunConfig:
    """Return the run of these steps; the losses that balance experts are not part of transformers'."""
    balance = {"aux_coefficient": 0.0, "bias_rate": 0.0, "z_coefficient": 0.0}
    model = config.model_copy(update={"moe": config.moe.model_copy(update=balance)})
    return RunConfig.model_validate(
        {
            "model": model.model_dump(),
            "data": {"sources": {"none": 1.0}, "seq_len": SEQ_LEN},
            "train": {"steps": STEPS, "global_batch": ROWS},
            "optimizer": {"lr": RATE, "eps": EPS, "weight_decay": 0.0, "grad_clip": 0.0},
        }
    )


def plans_of(config: ModelConfig) -> dict[str, str]:
    """Return those of `PLANS` that the model can have."""
    return {name: plan for name, plan in PLANS.items() if first_problem(eager(plan), run_of(config)) is None}


def under_plans(world: World, folder: Path, plans: Mapping[str, str], steps: int = STEPS) -> dict[str, Measured]:
    """Run the model in `folder` under each plan, as one rank of `world`."""
    return {name: under_plan(world, folder, eager(plan), steps) for name, plan in plans.items()}


def under_plan(world: World, folder: Path, plan: Plan, steps: int = STEPS) -> Measured:
    """Run the model in `folder` under one plan."""
    config, weights = hf.import_folder(folder)
    run, rows, parts = run_of(config), rows_of(config.vocab_size, steps), list[Decoder]()
    model = apply(plan, run, world, materialize=partial(_load, weights, parts))
    mine = plan.rows_of(model.dp_rank, ROWS)
    whole = microbatches(rows[0, mine], mine.stop - mine.start, END_OF_DOCUMENT, world.device)[0]
    logits = logits_of(parts, plan, model.meshes, whole)
    step = Step(run, TrainState.begin(model, plan, run), world, StepClock(world.device))
    losses, first = [], {}
    for i in range(steps):
        batch = microbatches(rows[i, mine], plan.microbatch, END_OF_DOCUMENT, world.device)
        outcome = step.exchange(step.forward_backward(batch))
        first = first or gradients(model)
        losses.append(outcome.loss)
        step.apply(step.update(outcome, RATE))
    return {"logits": (mine.start, logits), "gradients": first, "losses": losses}


def _load(
    weights: Mapping[str, Tensor],
    parts: list[Decoder],
    model: Decoder,
    config: ModelConfig,
    device: torch.device,
    *_: Any,
) -> None:
    """Give `model` memory and this rank's part of `weights`, and add it to `parts`."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = local(parameter)
            part.copy_(weights[name][tuple(map(slice, offset_of(parameter), _ends(parameter)))])
        for name, buffer in model.named_buffers():
            buffer.copy_(weights[name])
    parts.append(model)


def _ends(parameter: Tensor) -> list[int]:
    return [start + size for start, size in zip(offset_of(parameter), local(parameter).shape, strict=True)]


@torch.no_grad()
def logits_of(parts: list[Decoder], plan: Plan, meshes: Meshes, micro: Microbatch) -> Tensor | None:
    """Return the logits of the rank's rows [B, T, V]; None on a pipeline rank that is not the last."""
    (part,) = parts
    x, pipe = shard_sequence(micro.tokens_BT, meshes.rank("cp"), plan.cp), meshes.group("pp")
    if pipe is not None and not part.stage.first:
        x = torch.empty(*x.shape, part.config.width)
        dist.recv(x, group=pipe, group_src=pipe.rank() - 1)
    y: Tensor = part(x, None, micro.positions_BT, micro.documents)
    if pipe is not None and not part.stage.last:
        dist.send(y, group=pipe, group_dst=pipe.rank() + 1)
        return None
    vocabulary, tp, cp = part.config.vocab_size, meshes.group("tp"), meshes.group("cp")
    if tp is not None:
        longest = -(-vocabulary // plan.tp)
        y = torch.cat(_gathered(F.pad(y, (0, longest - y.shape[-1])), tp), -1)[..., :vocabulary]
    return y if cp is None else unshard_sequence(_gathered(y, cp))


def _gathered(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


# transformers


def by_transformers(model: Any, as_ours: Callable[[Any], Mapping[str, Tensor]], steps: int = STEPS) -> Measured:
    """Return the same of a model of transformers, in a plain loop that trains it.

    as_ours: returns its gradients by our names.
    """
    batches = torch.from_numpy(rows_of(model.config.vocab_size, steps).astype(np.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    losses, logits, first = [], None, {}
    for rows in batches:
        found = torch.cat([model(part).logits for part in rows[:, :-1].split(DOCUMENTS, 1)], 1)
        loss = F.cross_entropy(found.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if logits is None:
            logits, first = found.detach(), dict(as_ours(model))
        optimizer.step()
        losses.append(loss.item())
    return {"logits": logits, "gradients": first, "losses": losses}


def errors(found: list[Measured], expected: Measured) -> dict[str, float]:
    """Return the largest errors of all ranks, relative to the largest number; of losses, to each."""
    with_logits = {start: part for start, part in (rank["logits"] for rank in found) if part is not None}
    logits = torch.cat([with_logits[start] for start in sorted(with_logits)])
    gradient = {name: value for rank in found for name, value in rank["gradients"].items()}
    theirs = expected["gradients"]
    assert logits.shape == expected["logits"].shape
    assert gradient.keys() == {name for name in theirs if not name.endswith(("router.bias", "layer_scale"))}
    largest = max(float(value.abs().max()) for name, value in theirs.items() if name in gradient)
    return {
        "logits": float((logits - expected["logits"]).abs().max() / expected["logits"].abs().max()),
        "gradients": max(float((g - theirs[name]).abs().max()) for name, g in gradient.items()) / largest,
        "losses": max(
            abs(a / b - 1) for rank in found for a, b in zip(rank["losses"], expected["losses"], strict=True)
        ),
    }
