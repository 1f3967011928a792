"""One rank's part of a trained model that is laid out by a plan, to use it: logits, tokens and held-out loss.

All ranks call the methods alike. Without gradients, so that of a plan only the layout counts: rows go over the
data-parallel ranks, and a row's tokens come one at a time, so that context-parallel ranks take rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.shards import part_box, wholes
from argosy.checkpoint.weights import MODEL_PREFIX, fill
from argosy.config.model import ModelConfig
from argosy.data.manifest import TOKENIZER
from argosy.data.stores.cache import Cache as StoreCache
from argosy.data.stores.source import open_source
from argosy.data.stores.store import is_url
from argosy.data.tokenizer import how_to_prepare
from argosy.errors import UserError
from argosy.inference.plans import plan_of_rows, plan_to_score, run_of_rows, run_to_score
from argosy.inference.trained_model import SomeModel
from argosy.models.decoder import Cache, Decoder
from argosy.models.generate import choose, sample_rows
from argosy.models.layers import itself
from argosy.parallel.apply import lay_out
from argosy.parallel.mesh import Meshes
from argosy.parallel.model import ParallelModel
from argosy.parallel.pieces import pieces_of
from argosy.parallel.tensor import gather_vocabulary
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.evaluation import HeldOut, Score, evaluate

# N rows in all, B those of this rank, T tokens, D model width, V vocabulary


@dataclass(frozen=True)
class SampleRequest:
    """Rows to continue."""

    prompts: list[list[int]]
    """Each of at least one token."""
    limits: list[int]
    """The most new tokens of each row."""
    seeds: list[int]
    temperature: float
    top_p: float
    ends: list[int]
    """Tokens that end a row."""


@dataclass(frozen=True)
class EvaluateRequest:
    """The text that is scored."""

    folders: list[str]
    """Prepared folders or their URLs."""
    split: Literal["train", "validation"]
    max_tokens: int
    seq_len: int
    """Tokens per window."""
    kind: ClassVar[Any] = Score

    def score(self, source: SomeModel, plan: Plan, world: World) -> Score:
        """Return the score under `plan`; all ranks call it, and get the same. Raises: UserError, as `read`, `score`."""
        return score(source, plan, world, self.read(source))

    def read(self, source: SomeModel) -> HeldOut:
        """Read the text. Raises: UserError if it has another tokenizer than the model, or is too short."""
        cache = StoreCache(source.run.data.cache) if any(map(is_url, self.folders)) else None
        splits = [open_source(folder, self.split, check_shards=False, cache=cache) for folder in self.folders]
        for data in splits:
            if data.manifest.tokenizer_sha256 != source.tokenizer.sha256:
                raise UserError(
                    f"{data.name}: prepared with another tokenizer than {source.home}/{TOKENIZER}. Prepare the "
                    f"text again with that one: {how_to_prepare(source.home)}"
                )
        kinds = {None if split.manifest.rows is None else split.manifest.rows.kind for split in splits}
        if source.run.model.score and kinds != {"pairs"}:
            raise UserError(
                f"{source.home} is a reward model, which compares pairs, and {self.folders[0]} holds none. Give "
                "prepared pairs: --data."
            )
        held_out = HeldOut.read(splits, self.seq_len, self.max_tokens, source.run.model.score)
        if not held_out.tokens:
            raise UserError(
                f"{self.folders[0]}: its {self.split} split is empty. Prepare it with a larger --validation-fraction."
            )
        return held_out


class RankModel:
    """This rank's pipeline stage of a model, with its weights."""

    def __init__(self, source: SomeModel, plan: Plan, world: World):
        """Raises: UserError if the plan cannot lay the model out, or a weight is not there."""
        self.plan, self._world = plan_of_rows(plan), world
        run = run_of_rows(source.run, plan)
        self.meshes, parts = lay_out(self.plan, run, world, _allocate, splits_tokens=False)
        (self.model,) = parts.values()
        _load([self.model], self.meshes, source)
        #: This rank's place among the data-parallel ranks.
        self.dp_rank = self.meshes.rank("dp_replicate") * self.plan.dp_shard + self.meshes.rank("dp_shard")

    @torch.no_grad()
    def logits(self, tokens_NT: Tensor) -> Tensor | None:
        """Return the logits of this rank's rows, fp32 [B, T, V]; None if another rank has them to tell."""
        self.model.for_head = itself
        y = self._outputs(self._mine(tokens_NT), None)
        if y is None or self.meshes.rank("tp"):
            return None
        return y[: len(self.rows_of(self.dp_rank, len(tokens_NT)))].float()

    def rows_of(self, dp_rank: int, rows: int) -> range:
        """Return the rows of so many that a data-parallel rank computes."""
        each = -(-rows // self.plan.dp)
        return range(min(dp_rank * each, rows), min((dp_rank + 1) * each, rows))

    @torch.no_grad()
    def sample(self, request: SampleRequest, is_stopped: Callable[[], bool]) -> Generator[list[int | None]]:
        """Yield what `sample_rows` does, on all ranks alike, until `is_stopped` on rank 0, which is asked each step."""
        rows, each = len(request.prompts), -(-len(request.prompts) // self.plan.dp)
        room = max(len(p) + limit for p, limit in zip(request.prompts, request.limits, strict=True))
        cache = self.model.new_cache(room)
        self.model.for_head = _last_token
        is_over = False

        def next_tokens(tokens_NT: Tensor, uniform_N: Tensor) -> list[int]:
            nonlocal is_over
            y_B1V = self._outputs(self._mine(tokens_NT), cache)
            # All rows of all ranks, filled up, and whether rank 0 was told to stop.
            told = torch.zeros(each * self.plan.dp + 1, dtype=torch.int64)
            if y_B1V is not None and not self.meshes.rank("tp"):
                uniform_B = self._mine(uniform_N)
                chosen = choose(y_B1V[:, -1].float(), request.temperature, request.top_p, uniform_B)
                told[self.dp_rank * each : (self.dp_rank + 1) * each] = chosen.cpu()
            told[-1] = self._world.is_first and is_stopped()
            if self._world.size > 1:
                dist.all_reduce(told, group=self._world.host_group)
            *tokens, is_over = told.tolist()
            return tokens[:rows]

        for told in sample_rows(next_tokens, request.prompts, request.limits, request.seeds, request.ends):
            if is_over:
                return
            yield told

    def _mine(self, x_N: Tensor) -> Tensor:
        """Return this rank's rows on its device; where there are too few, others fill them up."""
        each = -(-len(x_N) // self.plan.dp)
        rows = torch.arange(self.dp_rank * each, (self.dp_rank + 1) * each).clamp(max=len(x_N) - 1)
        return x_N[rows].to(self._world.device)

    def _outputs(self, tokens_BT: Tensor, cache: list[Cache] | None) -> Tensor | None:
        """Return logits of the whole vocabulary, [B, T, V], on the ranks of the last stage; None on the others."""
        model, group, x = self.model, self.meshes.group("pp"), tokens_BT
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
        if (over := self.meshes.group("tp")) is not None:
            y = gather_vocabulary(y.flatten(0, 1), over, model.config.vocab_size).unflatten(0, y.shape[:2])
        return y


def score(source: SomeModel, plan: Plan, world: World, held_out: HeldOut) -> Score:
    """Return the score of held-out text, computed as in training under `plan`; all ranks call it, and get the same.

    Raises: UserError if the plan cannot lay out the model, or windows of this length.
    """
    seq_len = held_out.windows.shape[1] - 1
    model = model_to_score(source, plan, world, seq_len)
    return evaluate(model, held_out, plan_to_score(plan, seq_len).microbatch, world)


def model_to_score(source: SomeModel, plan: Plan, world: World, seq_len: int) -> ParallelModel:
    """Return the model as it is laid out to score rows of so many tokens (`plan_to_score`). Raises: UserError if it
    cannot be."""
    used, run = plan_to_score(plan, seq_len), run_to_score(source.run, plan, seq_len)
    meshes, parts = lay_out(used, run, world, _allocate)
    _load(list(parts.values()), meshes, source)
    return ParallelModel(used, run, meshes, parts)


def _allocate(model: Decoder, config: ModelConfig, device: torch.device, seed: int) -> None:
    model.to_empty(device=device).eval().requires_grad_(False)


def _load(parts: Sequence[Decoder], meshes: Meshes, source: SomeModel) -> None:
    """Fill this rank's parts with the weights of `source`, of which no more is read. Raises: UserError."""
    with source.weights() as weights:
        for part in parts:
            fill(_boxes(part, meshes), weights)


def _boxes(part: Decoder, meshes: Meshes) -> Mapping[Box, Tensor]:
    boxes = {part_box(MODEL_PREFIX + p.name, p.value, p.shape, p.offset): p.value for p in pieces_of(part, meshes)}
    return boxes | wholes(dict(part.named_buffers()), MODEL_PREFIX)


def _last_token(x_BTD: Tensor) -> Tensor:
    return x_BTD[:, -1:]
