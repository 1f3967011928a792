"""All that a run must not lose: weights, optimizer, loss scale, step, random generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.history import History, Position
from argosy.checkpoint.shards import part_box, wholes
from argosy.config.schema import RunConfig
from argosy.data.order import Range
from argosy.optim.optimizer import Optimizer
from argosy.parallel.expert import update_biases
from argosy.parallel.gradients import clip
from argosy.parallel.model import ParallelModel
from argosy.parallel.pieces import Held
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.precision.scaler import LossScaler


@dataclass(frozen=True)
class Decision:
    """What all ranks know of a step that is applied, alike on all: to apply it takes this and a rank's gradients."""

    step: int
    """0-based."""
    loss: float
    gradient_norm: float
    """Before clipping."""
    max_norm: float
    """What gradients are clipped to; 0: they are not."""
    learning_rate: float
    tokens: int
    """Of the step, over all processes."""
    loads: Tensor | None
    """What the experts of all ranks were sent (`parallel.expert.loads_of`), in host memory; None without experts."""


@dataclass
class TrainState:
    """The state of one process. What is read next follows from `step` and `skipped` alone.

    A step is all or nothing, over all ranks: none applies it before the exchange has ended that gives it the
    gradient's norm, and none enters that before its own gradient is whole (`pending`). So if any rank has applied step
    s, each other rank has, or still holds its whole gradient of s, and can follow with the same `Decision`. Where an
    update takes other ranks (`prepare`), none applies it before all are prepared: then following takes no other rank.
    """

    model: ParallelModel
    optimizer: Optimizer
    scaler: LossScaler
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on, over all processes."""
    skipped: tuple[Range, ...] = ()
    """Samples that bad steps had: no update is made from them (`data.order.kept`)."""
    history: History = field(default_factory=History)
    """The worlds that led to it."""
    pending: bool = False
    """Every piece has its gradient of step `step`: whole, divided by the loss scale, not clipped."""
    is_prepared: bool = False
    """What the update of step `step` takes of other ranks is here, and the gradients are clipped."""
    in_update: bool = False
    """Weights or optimizer are being written: what they hold now is of no step."""
    decided: Decision | None = None
    """That of the step applied last, if it was applied here: its step is `step` - 1."""

    @classmethod
    def begin(cls, model: ParallelModel, plan: Plan, run: RunConfig) -> TrainState:
        """Return the state of a run before its first step, with the weights that `model` has."""
        scaler = LossScaler() if plan.precision == "fp16" else LossScaler(scale=1.0, growth_steps=0)
        return cls(model, Optimizer(model.masters, run.optimizer, run.seed), scaler)

    @property
    def position(self) -> Position:
        """What there is of the state besides tensors, the same on all ranks."""
        return Position(self.step, self.tokens, self.skipped)

    @property
    def can_follow(self) -> bool:
        """Whether `apply` takes no other rank now, so that it may be made up for when the others are gone.

        False only if none has applied the step.
        """
        return self.optimizer.is_local or self.is_prepared

    def prepare(self, decision: Decision) -> None:
        """Clip the gradients, and take of other ranks what the update needs of them; they call it together.

        Weights and optimizer stay as they are: should a rank die meanwhile, the state is still whole.
        """
        assert decision.step == self.step, f"step {decision.step} applied to the state of step {self.step}"
        clip(self.model.pieces, decision.max_norm, decision.gradient_norm)
        self.model.before_update()
        self.optimizer.prepare()
        self.is_prepared = True

    def apply(self, decision: Decision) -> None:
        """Update weights and optimizer; the step counts from then on. `model.after_update` remains to be called."""
        if not self.is_prepared:
            self.prepare(decision)
        self.in_update, self.pending, self.is_prepared = True, False, False
        self.scaler.update(decision.gradient_norm)
        self.optimizer.set_learning_rate(decision.learning_rate)
        self.optimizer.step()
        if decision.loads is not None:
            update_biases(self.model.moes, decision.loads)
        self.step += 1
        self.tokens += decision.tokens
        self.decided = decision
        self.in_update = False

    def drop_gradient(self) -> None:
        """Let go of the step's gradient."""
        self.pending = False
        self.model.zero_gradients()

    def weights(self) -> dict[Box, Tensor]:
        """This rank's part of the weights: live tensors, to copy from or to read into (`model.after_update` then)."""
        parts = {_part(f"model.{p.name}", p, p.value): p.value.detach() for p in self.model.masters}
        return parts | wholes(self.model.buffers(), "model.")

    def boxes(self) -> dict[Box, Tensor]:
        """All tensors of this rank's part: plain, most of them live, to copy from, or to read into for `restored`."""
        parts = self.weights()
        for piece in self.model.masters:
            for key, tensor in self.optimizer.state_of(piece).items():
                parts[_part(f"optimizer.{piece.name}.{key}", piece, tensor)] = tensor.detach()
        return parts | wholes(self.scaler.state(), "scaler.")

    def restored(self, boxes: Mapping[Box, Tensor]) -> None:
        """Take over what the tensors of `boxes()` were filled with."""
        tensors = {box.name: tensor for box, tensor in boxes.items()}
        self.model.after_update()
        for piece in self.model.masters:
            keys = self.optimizer.state_of(piece)
            self.optimizer.load_state(piece, {key: tensors[f"optimizer.{piece.name}.{key}"] for key in keys})
        self.scaler.load_state({key: tensors[f"scaler.{key}"] for key in self.scaler.state()})


@dataclass
class Survivor:
    """What a process keeps when the world it was in is over: it brings it to the next."""

    state: TrainState | None = None
    """None until it is whole for the first time."""
    bad_steps: Mapping[str, Any] | None = None
    """What its bad-step policy has counted (`BadStepPolicy.state_dict`)."""
    memory_before_bytes: int | None = None
    """What the process held before it trained in any world; None before the first."""
    last_save_s: float | None = None
    """When it began the last save that was not cut off, by its monotonic clock."""


def generators(world: World) -> dict[Box, Tensor]:
    """The states of this rank's random generators, to save, or to read into for `set_generators`.

    They are of a rank, not of the state: of more ranks than wrote a checkpoint, some keep those that they have.
    """
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(world.device)
    return wholes(states, f"rng.rank{world.rank}.")


def set_generators(boxes: Mapping[Box, Tensor], world: World) -> None:
    """Set the generators to what the tensors of `generators` were filled with."""
    for box, state in boxes.items():
        if box.name.endswith(".device"):
            torch.cuda.set_rng_state(state, world.device)
        else:
            torch.set_rng_state(state)


def _part(name: str, piece: Held, tensor: Tensor) -> Box:
    """The box of something that a piece has: a number of its own, or a tensor that is cut up as it is."""
    if tensor.shape != piece.value.shape:
        return part_box(name, tensor, tensor.shape, (0,) * tensor.ndim)
    return part_box(name, tensor, piece.shape, piece.offset)
