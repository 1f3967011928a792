"""One rank's part of a trained model that is laid out by a plan, to use it: logits, tokens and held-out loss.

All ranks call the methods alike. Without gradients, so that of a plan only the layout counts: rows go over the
data-parallel ranks, and a row's tokens come one at a time, so that context-parallel ranks take rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.shards import part_box, wholes
from argosy.checkpoint.weights import MODEL, fill
from argosy.config.lora import LoraConfig
from argosy.config.model import ModelConfig, MTPConfig
from argosy.config.schema import RunConfig
from argosy.config.train import TrainConfig
from argosy.errors import UserError
from argosy.inference.trained_model import SomeModel
from argosy.models.decoder import Decoder
from argosy.models.generate import choose, sample_rows
from argosy.models.mla import Cache
from argosy.parallel.apply import lay_out
from argosy.parallel.mesh import Meshes
from argosy.parallel.model import ParallelModel
from argosy.parallel.pieces import pieces_of
from argosy.parallel.tensor import gather_vocabulary
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.plan.rules import first_problem
from argosy.training.evaluation import HeldOut, Score, evaluate

# N rows in all, B those of this rank, T tokens, D model width, V vocabulary

BATCH_TOKENS = 4096
"""Tokens of held-out text that a rank scores at once, unless a window has more."""
LAYOUT = {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "context", "layers", "precision", "weights"}
"""Keys of a plan that say how a model is laid out and computes; the others are for training."""


def plan_to_use(plan: Plan) -> Plan:
    """Return `plan` with what counts for a model that is not trained: stages one after the other, and no ZeRO but of
    the parameters.

    Raises: UserError for fp8, whose matmuls need many tokens.
    """
    if plan.precision == "fp8":
        raise UserError(f'plan = "{plan}": precision = fp8 is for training. Use precision=bf16.')
    if plan.world_size > 1:
        raise UserError(
            f'plan = "{plan}" is for {plan.world_size} processes: a model is used in one. Leave the axes out.'
        )
    said = plan.model_dump(include=LAYOUT)
    if plan.stages != plan.pp:
        said.pop("layers")  # it says so of more stages
    return Plan(**{**said, "zero": 3 if plan.zero == 3 else 0, "compile": False})


def plan_of_rows(plan: Plan) -> Plan:
    """Return `plan_to_use` where ranks that share a sequence in training take rows of their own."""
    used = plan_to_use(plan)
    return used.model_copy(update={"dp_shard": used.dp_shard * used.cp, "cp": 1})


def run_to_use(run: RunConfig, plan: Plan, seq_len: int) -> RunConfig:
    """Return `run` with what its model needs to be used under `plan`: whole weights, no modules of multi-token
    prediction, and a batch that the ranks can deal out.

    Raises: UserError if the plan cannot lay the model out.
    """
    model = run.model.model_copy(update={"mtp": MTPConfig()})
    train = TrainConfig(steps=1, global_batch=plan.dp * plan.microbatch * plan.stages)
    data = run.data.model_copy(update={"seq_len": seq_len})
    sections = {"model": model, "train": train, "data": data, "lora": LoraConfig(), "sites": ()}
    used = run.model_copy(update=sections)
    if problem := first_problem(plan, used):
        raise UserError(f'plan = "{plan}": {problem}')
    return used


@dataclass(frozen=True)
class SampleRequest:
    """Rows to continue."""

    prompts: list[list[int]]
    """Of at least one token each."""
    limits: list[int]
    """The most new tokens of each row."""
    seeds: list[int]
    temperature: float
    top_p: float
    ends: list[int]
    """Tokens that end a row."""


class RankModel:
    """This rank's pipeline stage of a model, with its weights."""

    def __init__(self, source: SomeModel, plan: Plan, world: World):
        """Raises: UserError if the plan cannot lay the model out, or a weight is not there."""
        self.plan, self._world = plan_of_rows(plan), world
        run = run_to_use(source.run, self.plan, seq_len=2 * self.plan.tp)
        self._meshes, parts = lay_out(self.plan, run, world, _allocate, splits_tokens=False)
        (self._model,) = parts.values()
        _load([self._model], self._meshes, source)
        self._dp_rank = self._meshes.rank("dp_replicate") * self.plan.dp_shard + self._meshes.rank("dp_shard")

    @torch.no_grad()
    def logits(self, tokens_NT: Tensor) -> Tensor | None:
        """Return the logits of this rank's rows, fp32 [B, T, V]; None if another rank has them to tell."""
        self._model.for_head = _all_tokens
        y = self._outputs(self._mine(tokens_NT), None)
        if y is None or self._meshes.rank("tp"):
            return None
        return y[: len(self.rows_of(self._dp_rank, len(tokens_NT)))].float()

    def rows_of(self, dp_rank: int, rows: int) -> range:
        """Return the rows of so many that a data-parallel rank computes."""
        each = -(-rows // self.plan.dp)
        return range(min(dp_rank * each, rows), min((dp_rank + 1) * each, rows))

    @torch.no_grad()
    def sample(self, asked: SampleRequest, is_stopped: Callable[[], bool]) -> Generator[list[int | None]]:
        """Yield what `sample_rows` does, on all ranks alike, until `is_stopped` on rank 0, which is asked each step."""
        rows, each = len(asked.prompts), -(-len(asked.prompts) // self.plan.dp)
        room = max(len(p) + limit for p, limit in zip(asked.prompts, asked.limits, strict=True))
        cache = self._model.new_cache(room)
        self._model.for_head = _last_token
        is_over = False

        def next_tokens(tokens_NT: Tensor, uniform_N: Tensor) -> list[int]:
            nonlocal is_over
            y_B1V = self._outputs(self._mine(tokens_NT), cache)
            # All rows of all ranks, filled up, and whether rank 0 was told to stop.
            told = torch.zeros(each * self.plan.dp + 1, dtype=torch.int64)
            if y_B1V is not None and not self._meshes.rank("tp"):
                uniform_B = self._mine(uniform_N)
                chosen = choose(y_B1V[:, -1].float(), asked.temperature, asked.top_p, uniform_B)
                told[self._dp_rank * each : (self._dp_rank + 1) * each] = chosen.cpu()
            told[-1] = self._world.is_first and is_stopped()
            if self._world.size > 1:
                dist.all_reduce(told, group=self._world.host_group)
            *tokens, is_over = told.tolist()
            return tokens[:rows]

        for told in sample_rows(next_tokens, asked.prompts, asked.limits, asked.seeds, asked.ends):
            if is_over:
                return
            yield told

    def _mine(self, x_N: Tensor) -> Tensor:
        """Return this rank's rows on its device; where there are too few, others fill them up."""
        each = -(-len(x_N) // self.plan.dp)
        rows = torch.arange(self._dp_rank * each, (self._dp_rank + 1) * each).clamp(max=len(x_N) - 1)
        return x_N[rows].to(self._world.device)

    def _outputs(self, tokens_BT: Tensor, cache: list[Cache] | None) -> Tensor | None:
        """Return logits of the whole vocabulary, [B, T, V], on the ranks of the last stage; None on the others."""
        model, group, x = self._model, self._meshes.group("pp"), tokens_BT
        if not model.stage.first:
            assert group is not None
            shape = (*tokens_BT.shape, model.config.width)
            x = torch.empty(shape, dtype=model.compute_dtype, device=tokens_BT.device)
            dist.recv(x, group=group, group_src=group.rank() - 1)
        y: Tensor = model(x, cache=cache)
        if not model.stage.last:
            assert group is not None
            dist.send(y.contiguous(), group=group, group_dst=group.rank() + 1)
            return None
        if (over := self._meshes.group("tp")) is not None:
            y = gather_vocabulary(y.flatten(0, 1), over, model.config.vocab_size).unflatten(0, y.shape[:2])
        return y


def score(source: SomeModel, plan: Plan, world: World, held_out: HeldOut) -> Score:
    """Return the score of held-out text, computed as in training under `plan`; all ranks call it, and get the same.

    Raises: UserError if the plan cannot lay out the model, or windows of this length.
    """
    seq_len = held_out.windows.shape[1] - 1
    used = plan_to_use(plan).model_copy(update={"microbatch": max(1, BATCH_TOKENS // seq_len)})
    run = run_to_use(source.run, used, seq_len)
    meshes, parts = lay_out(used, run, world, _allocate)
    _load(list(parts.values()), meshes, source)
    return evaluate(ParallelModel(used, run, meshes, parts), held_out, used.microbatch, world)


def _allocate(model: Decoder, config: ModelConfig, device: torch.device, seed: int) -> None:
    model.to_empty(device=device).eval().requires_grad_(False)


def _load(parts: Sequence[Decoder], meshes: Meshes, source: SomeModel) -> None:
    """Fill this rank's parts with the weights of `source`, of which no more is read. Raises: UserError."""
    with source.weights() as weights:
        for part in parts:
            fill(_boxes(part, meshes), weights)


def _boxes(part: Decoder, meshes: Meshes) -> Mapping[Box, Tensor]:
    boxes = {part_box(MODEL + p.name, p.value, p.shape, p.offset): p.value for p in pieces_of(part, meshes)}
    return boxes | wholes(dict(part.named_buffers()), MODEL)


def _all_tokens(x_BTD: Tensor) -> Tensor:
    return x_BTD


def _last_token(x_BTD: Tensor) -> Tensor:
    return x_BTD[:, -1:]
