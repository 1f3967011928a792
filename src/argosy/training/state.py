"""The state of a run, all that it must not lose: weights, optimizer, loss scale, step, random generators."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from argosy.accelerator import peak_memory_bytes, random_state, set_random_state
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.directory import deal
from argosy.checkpoint.history import History, Position
from argosy.checkpoint.shards import TensorsToSave, part_box, wholes
from argosy.config.schema import RunConfig
from argosy.data.order import Range
from argosy.models.quantised_weight import QuantisedWeight
from argosy.optim.optimizer import Optimizer, optimizer_of
from argosy.optim.piece import Piece
from argosy.parallel.encoding import SentTensor
from argosy.parallel.expert import update_biases
from argosy.parallel.model import ParallelModel
from argosy.parallel.peers import over, peers_of
from argosy.parallel.pieces import PlacedPiece, clip
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.precision import LossScaler
from argosy.training.bad_steps import BadStepCounts
from argosy.training.outer_state import OuterState
from argosy.training.sync_memory import SavedSyncState, SyncMemory

SENT = "outer.sent."
"""Prefix of the boxes that hold what a site has sent: outer.sent.ROUND.PARAMETER."""


@dataclass(frozen=True)
class StepUpdate:
    """The update of a step, the same on all ranks: with its gradients, a rank needs only this to apply the step."""

    step: int
    """0-based."""
    loss: float
    """NaN of a step that other sites made without this one."""
    gradient_norm: float
    """Before clipping."""
    max_norm: float
    """The norm that gradients are clipped to; 0: they are not clipped."""
    learning_rate: float
    tokens: int
    """Tokens of the step, over all processes."""
    loads: SentTensor | None
    """Tokens that each expert was sent (`parallel.expert.loads_of`), in host memory; None without experts."""

    @property
    def has_loss(self) -> bool:
        """True if the step is this run's own, of which metrics tell."""
        return not math.isnan(self.loss)


@dataclass
class TrainState:
    """The state of one process. The samples that are read next follow from `step` and `skipped` alone.

    A step is all or nothing, over all ranks: no rank applies it before the exchange has ended that gives the gradient's
    norm, and none enters that before its own gradient is whole (`pending`). So if any rank has applied step s, each
    other rank has applied it too, or still holds its whole gradient of s, and can follow with the same `StepUpdate`.
    If an update needs other ranks (`prepare`), no rank applies it before all are prepared: then a rank can follow
    alone.
    """

    model: ParallelModel
    optimizer: Optimizer
    scaler: LossScaler
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on, over all processes."""
    rounds: int = 0
    """Outer steps done, of a run with sites."""
    outer: OuterState | None = None
    """The outer state that the sites agreed on last; None without sites."""
    skipped: tuple[Range, ...] = ()
    """Samples of bad steps: no update is made from them (`data.order.kept`)."""
    history: History = field(default_factory=History)
    """The worlds that led to the state."""
    base_sha256: str = ""
    """SHA-256 of the weights beside an adapter, which every world has to read again; empty before the first."""
    pending: bool = False
    """Every piece has its gradient of step `step`: whole, divided by the loss scale, not clipped."""
    is_prepared: bool = False
    """The gradients are clipped, and what the update of step `step` needs from other ranks is here."""
    in_update: bool = False
    """Weights or optimizer are being written: they hold the values of no step."""
    last_update: StepUpdate | None = None
    """The update of step `step` - 1, if it was applied here."""

    @classmethod
    def begin(cls, model: ParallelModel, plan: Plan, run: RunConfig) -> TrainState:
        """Return the state of a run before its first step, with the weights that `model` has."""
        scaler = LossScaler() if plan.precision == "fp16" else LossScaler(scale=1.0, growth_steps=0)
        return cls(model, optimizer_of(run, model.masters, plan.compile), scaler)

    @property
    def position(self) -> Position:
        """The state besides tensors, the same on all ranks."""
        return Position(self.step, self.tokens, self.skipped, self.rounds, self.base_sha256)

    @property
    def can_follow(self) -> bool:
        """True if `apply` needs no other rank now, so that it can still be called when the others are gone.

        False only if no rank has applied the step.
        """
        return self.optimizer.is_local or self.is_prepared

    def prepare(self, update: StepUpdate) -> None:
        """Clip the gradients, and take what the update needs from other ranks. All ranks call it together.

        Weights and optimizer stay as they are: if a rank dies meanwhile, the state is still whole.
        """
        assert update.step == self.step, f"step {update.step} applied to the state of step {self.step}"
        clip(self.model.pieces, update.max_norm, update.gradient_norm)
        self.model.before_update()
        self.optimizer.prepare()
        self.is_prepared = True

    def apply(self, update: StepUpdate, watch: Callable[[Piece, Tensor], None] | None = None) -> None:
        """Update weights and optimizer; the step counts from then on. `model.after_update` has to be called next.

        `watch`: as of `Optimizer.step`.
        """
        if not self.is_prepared:
            self.prepare(update)
        self.in_update, self.pending, self.is_prepared = True, False, False
        self.scaler.update(update.gradient_norm)
        self.optimizer.set_learning_rate(update.learning_rate)
        self.optimizer.step(watch)
        self.model.commit_sums()
        if update.loads is not None:
            update_biases(self.model.moes, update.loads)
        self.step += 1
        if self.outer is not None and self.outer.sites.sums_gradients(self.rounds):
            self.rounds += 1
            if not self.outer.sites.sums_gradients(self.rounds):
                self.outer.begin(self.model.masters)
        self.tokens += update.tokens
        self.last_update = update
        self.in_update = False

    def apply_outer(self, number: int) -> None:
        """Make the outer step of round `number`, which is in the site's ledger. `model.after_update` comes next.

        If the round was made without this site, what it trained since the one before does not count: it goes on where
        the next round begins, which may be some steps back.
        """
        assert self.outer is not None and number == self.rounds, f"round {number} after {self.rounds} rounds"
        self.in_update = True
        self.outer.apply(number, self.model.masters)
        self.rounds += 1
        end = self.outer.sites.end_of(number)
        if self.outer.is_left_out(number):
            if self.step > end:
                self.last_update, self.history = None, self.history.turned_back(end)
            self.step = end
        self.step = max(self.step, end)
        self.pending = self.is_prepared = self.in_update = False

    def drop_gradient(self) -> None:
        self.pending = False
        self.model.zero_gradients()

    def weights(self) -> dict[Box, Tensor]:
        """Return this rank's part of the weights that are the run's own: live tensors, to copy, or to fill (then
        `model.after_update`). What is beside an adapter is not (`base`)."""
        mine = _weights(self.model.masters)
        return mine if self.model.has_adapter else mine | self.base()

    def base(self) -> dict[Box, Tensor]:
        """Return this rank's part of what the run does not train, and of the model's buffers, as `weights` does; but
        for what is quantised (`quantised_base`)."""
        plain = (piece for piece in self.model.frozen if piece.scheme is None)
        return _weights(plain) | wholes(self.model.buffers(), "model.")

    def quantised_base(self) -> dict[Box, QuantisedWeight]:
        """Return the quantised weights of this rank's part, to fill: their boxes are those of the numbers."""
        found: dict[Box, QuantisedWeight] = {}
        for piece in self.model.frozen:
            if (scheme := piece.scheme) is not None:
                whole, offset = (*piece.shape[:-1], scheme.whole), (*piece.offset[:-1], scheme.first)
                box = Box(f"model.{piece.name}", "", whole, offset, (*piece.value.shape[:-1], scheme.columns))
                found[box] = QuantisedWeight(piece.value.detach(), scheme)
        return found

    def boxes(self, past: SavedSyncState | None = None, adopted: Collection[str] = ()) -> dict[Box, Tensor]:
        """Return all tensors of this rank's part, plain, most of them live, to fill (then `restored`).

        Moments that are kept in 8 bits are fp32 here, in the host's memory. past: what a state to fill them from has of
        compressors' memory; None: return this state's own. adopted: pieces whose optimizer state is left out.
        """
        parts = self._all(past, adopted)
        return {box: part if isinstance(part, Tensor) else part() for box, part in parts.items()}

    def to_save(self, past: SavedSyncState | None = None) -> TensorsToSave:
        """Return the same tensors to copy: moments are looked up, or widened, one at a time."""
        return TensorsToSave(self._all(past))

    def adopt(self, survivor: TrainState) -> set[str]:
        """Share the optimizer's state of pieces that lie here where `survivor` has them, so that memory holds it once.

        Return their names. It stays as it is until one of the two makes a step; then the other is over.
        """
        theirs = {piece.place for piece in survivor.model.masters}
        mine = (piece for piece in self.model.masters if piece.place in theirs)
        return {piece.name for piece in mine if self.optimizer.adopt(piece, survivor.optimizer)}

    def _all(
        self, past: SavedSyncState | None, adopted: Collection[str] = ()
    ) -> dict[Box, Tensor | Callable[[], Tensor]]:
        parts: dict[Box, Tensor | Callable[[], Tensor]] = {**self.weights()}
        for piece in self.model.masters:
            for key, part in self.optimizer.state_to_save(piece).items() if piece.name not in adopted else ():
                like = part if isinstance(part, Tensor) else piece.value.detach().to("meta", torch.float32)
                parts[_part(f"optimizer.{piece.name}.{key}", piece, like)] = part
        memory = SyncMemory(self.model)
        parts |= memory.boxes() if past is None else memory.wanted(past)
        if self.outer is not None:
            for piece in self.model.masters:
                for key, tensor in self.outer.state_of(piece.name).items():
                    parts[_part(f"outer.{key}.{piece.name}", piece, tensor)] = tensor
        return parts | wholes(self.scaler.state(), "scaler.")

    def in_flight(self) -> dict[Box, Tensor] | None:
        """Return what this rank's site has sent and is not agreed on yet: live tensors, to save. None: nothing is.

        Among ranks they need not travel: as long as a site's folder is there, they are in it as well.
        """
        if self.outer is None or self.outer.sent_in is None:
            return None
        return self._sent_boxes(self.outer.sent_in, self.outer.sent())

    def in_flight_before(self, boxes: Iterable[Box]) -> dict[Box, Tensor]:
        """Return tensors to fill with what a state that has these boxes had sent; nothing else is in flight then."""
        if self.outer is None:
            return {}
        self.outer.forget_sent()
        number = next((int(box.name.split(".")[2]) for box in boxes if box.name.startswith(SENT)), None)
        if number is None:
            return {}
        return self._sent_boxes(number, self.outer.sent_before(number, self.model.masters))

    def _sent_boxes(self, number: int, sent: Mapping[str, Tensor]) -> dict[Box, Tensor]:
        pieces = {piece.name: piece for piece in self.model.masters}
        return {_part(f"{SENT}{number}.{name}", pieces[name], tensor): tensor for name, tensor in sent.items()}

    def restored(self, boxes: Mapping[Box, Tensor], adopted: Collection[str] = ()) -> None:
        """Take over the values that the tensors of `boxes(adopted=adopted)` were filled with."""
        tensors = {box.name: tensor for box, tensor in boxes.items()}
        self.model.after_update()
        for piece in self.model.masters:
            if piece.name not in adopted:
                keys = self.optimizer.state_to_save(piece)
                self.optimizer.load_state(piece, {key: tensors[f"optimizer.{piece.name}.{key}"] for key in keys})
        SyncMemory(self.model).restored(boxes)
        self.scaler.load_state({key: tensors[f"scaler.{key}"] for key in self.scaler.state()})


@dataclass
class Survivor:
    """The state that a process brings from one world to the next."""

    state: TrainState | None = None
    """None until it is whole for the first time."""
    bad_steps: BadStepCounts | None = None
    """Counts of its bad-step policy (`BadStepPolicy.counts`)."""
    memory_before_bytes: int | None = None
    """Memory of the process before it trained in any world; None before the first."""
    last_save_s: float | None = None
    """Start of the last save that was not interrupted, by its monotonic clock."""

    def enter(self, world: World, run: RunConfig) -> int:
        """Set this process's arithmetic and random numbers for its rank. Returns its bytes before the first world."""
        if self.memory_before_bytes is None:
            self.memory_before_bytes = peak_memory_bytes(world.device)
        if torch.are_deterministic_algorithms_enabled() != run.train.deterministic:  # setting it loads the compiler
            torch.use_deterministic_algorithms(run.train.deterministic)
        torch.manual_seed(run.seed * 1_000_003 + world.rank)
        return self.memory_before_bytes


def boxes_written(pieces: Iterable[PlacedPiece], world: World) -> dict[str, Box]:
    """Return the boxes of weights that this rank writes, by name: each is one rank's, of those that hold it."""
    group = world.host_group
    boxes = [part_box(p.name, p.value, p.shape, p.offset) for p in pieces if p.value.numel()]
    return {box.name: box for box in over(group, deal(peers_of(group), boxes))}


def generators(world: World) -> dict[Box, Tensor]:
    """Return the states of this rank's random generators, to save, or to fill (then call `set_generators`).

    They belong to a rank, not to the state: if more ranks read a checkpoint than wrote it, some keep their own.
    """
    states = {"cpu": torch.get_rng_state()}
    if (of_device := random_state(world.device)) is not None:
        states["device"] = of_device
    return wholes(states, f"rng.rank{world.rank}.")


def set_generators(boxes: Mapping[Box, Tensor], world: World) -> None:
    """Set the generators to the values that the tensors of `generators` were filled with."""
    for box, state in boxes.items():
        if box.name.endswith(".device"):
            set_random_state(state, world.device)
        else:
            torch.set_rng_state(state)


def _weights(pieces: Iterable[PlacedPiece]) -> dict[Box, Tensor]:
    return {_part(f"model.{p.name}", p, p.value): p.value.detach() for p in pieces}


def _part(name: str, piece: PlacedPiece, tensor: Tensor) -> Box:
    """Return the box of something that a piece has: a tensor that is cut up like the piece, or one of its own."""
    if tensor.shape != piece.value.shape:
        return part_box(name, tensor, tensor.shape, (0,) * tensor.ndim)
    return part_box(name, tensor, piece.shape, piece.offset)
