"""The training step, defined once: the trainer, the simulator and the benchmark run this one.

    forward and backward -> gradients summed over ranks -> unscaled -> norm, fingerprint and checks -> one exchange of
    all ranks -> clipped -> optimizer -> biases of routers -> values to all ranks that compute with them

What is decided between exchange and update (skip it, do it again) is the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from argosy.accelerator import sent_to
from argosy.config.schema import RunConfig
from argosy.data.packing import MISMATCHED_SIDE
from argosy.faults import fault
from argosy.models.microbatch import Microbatch
from argosy.observe.clock import StepClock
from argosy.optim.piece import Piece
from argosy.parallel.expert import loads_of
from argosy.parallel.pieces import unscale
from argosy.parallel.world import World
from argosy.sync.compressor import SumTime
from argosy.training.fingerprint import LIMBS, Fingerprints, is_nonzero, limbs_of
from argosy.training.state import StepUpdate, TrainState


@dataclass(frozen=True)
class Requests:
    """Requests of a process after this step; granted to all if any of them asks."""

    stop: bool = False
    save: bool = False
    quarantine: bool = False
    """The samples could not be read: repeat the step without their shard."""
    retry: bool = False
    """The gradient was summed or computed wrongly: repeat the step."""
    memory_checkpoint: bool = False
    hold: bool = False
    """Save an in-memory checkpoint, and stand still: this world is to end, in order."""
    left_behind: bool = False
    """The other sites went on without this one: go to where they are."""


@dataclass(frozen=True)
class StepOutcome:
    """The step's result, the same on every process; the gradients wait in the pieces."""

    loss: float
    """Mean over the global batch's tokens, nats, or over its pairs or answers."""
    gradient_norm: float
    """Global, before clipping."""
    replicas_differ: bool
    """Ranks that should hold the same weights or optimizer state do not."""
    requests: Requests
    loads: Tensor | None
    """Loads of experts, in host memory."""
    sums: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Sums over ranks of what `exchange` was given to sum, by name."""


class UpdateObserver(Protocol):
    """Observes the update of each parameter. All ranks call each method together, in this order."""

    def before_update(self) -> None:
        """The gradients are whole, and not clipped yet."""

    def updated(self, piece: Piece, before: Tensor) -> None:
        """A parameter was updated. before: a copy of its value before, which may be overwritten."""

    def after_update(self, step: int) -> None:
        """All parameters are updated."""


class Checks:
    """Checks of a step: that replicas of the state are equal, and that sums of gradients fit their checksums.

    `training.integrity` adds others, and reports. All ranks call each method together.
    """

    def __init__(self, run: RunConfig, state: TrainState, world: World):
        self._fingerprint_every, self._model = run.resilience.fingerprint_every_steps, state.model
        outer = None if state.outer is None else state.outer.state_of
        self._fingerprints = Fingerprints(state.model, state.optimizer, world, outer)

    def watch(self, tokens: int | Tensor) -> None:
        """Compute the step at hand such that it can be checked. tokens: what the sum of losses is divided by."""

    def fingerprint(self, step: int) -> Tensor | None:
        """Return this rank's share of the fingerprint of all replicas; None in a step that does not compare them."""
        is_due = self._fingerprint_every and step % self._fingerprint_every == 0
        return self._fingerprints.share() if is_due else None

    def is_wrong(self, step: int, loss: Tensor) -> bool:
        """True if this rank knows that the step's gradient was summed or computed wrongly."""
        return not self._model.sums_are_sound()


class Step:
    """The training step of one rank. All ranks call each method together, in this order:

    loss = step.forward_backward(batch)
    outcome = step.exchange(loss)
    step.apply(step.update(outcome, learning_rate))
    """

    def __init__(
        self,
        run: RunConfig,
        state: TrainState,
        world: World,
        clock: StepClock,
        checks: Checks | None = None,
        check_world: Callable[[], None] = lambda: None,
    ):
        """`check_world()` raises once the world is over: a collective that was aborted on a GPU returns, with any
        numbers, and they must not be taken for those of all ranks."""
        self.state, self.checks = state, checks or Checks(run, state, world)
        self._run, self._world, self._clock, self._check_world = run, world, clock, check_world
        self.counted: int | Tensor = 0
        """Targets of the step at hand that count, over all ranks (`_counted`)."""

    def forward_backward(self, batch: Sequence[Microbatch]) -> Tensor:
        """Leave in every piece's `grad` the gradient of the mean loss over the global batch's tokens, times the scale.

        Returns this rank's share of that mean, nats, no dims. All targets that count count alike: the sum over ranks of
        local sums over the global number of them is the mean over tokens, not a mean of means, whatever share of the
        batch each data-parallel rank has.
        """
        state, step, rank = self.state, self.state.step, self._world.rank
        self._clock.microbatches = max(1, len(batch))
        self.counted = tokens = self._counted(batch)
        self.checks.watch(tokens)
        scale = state.scaler.scale
        moment, balance_scale = SumTime(step, scale), scale / self._run.tokens_at(step)
        summed = state.model.forward_backward(batch, scale / tokens, self._clock, moment, balance_scale)
        with self._clock.time("communication"):
            state.model.finish_gradients()
        loss = summed / tokens
        fault("gradient", step=step, rank=rank, tensors=self._gradients)
        fault("loss", step=step, rank=rank, tensors=lambda: {"loss": loss})
        return loss

    def _counted(self, batch: Sequence[Microbatch]) -> int | Tensor:
        """Return how many targets of the global batch count, or how many pairs or judged answers it has; no dims.

        Of text all do. How many conversations have is in their rows, which ranks read apart: they tell each other
        before backward, and on a GPU the host does not wait for it.
        """
        if self._run.train.objective == "pretrain":
            return self._run.tokens_at(self.state.step)
        model, counts = self.state.model, [0, 0]
        if model.counts_rows:
            counts = [sum(micro.counted for micro in batch), sum(micro.answers for micro in batch)]
        counted = torch.tensor(counts, dtype=torch.float64, device=self._world.device)
        with self._clock.time("communication"):
            tokens, answers = self._world.sum(counted).clamp(min=1.0)
        if not self._run.train.has_preferences:
            return tokens
        for preference in model.preferences:
            preference.per_token = (answers / tokens).float()
        if self._run.train.objective == "kto":
            self._estimate_kl(batch)
        return answers

    def _estimate_kl(self, batch: Sequence[Microbatch]) -> None:
        """Estimate KTO's KL term: the mean log-ratio of answers to other prompts, over the global batch, 0 at least."""
        model, total = self.state.model, torch.zeros(2, dtype=torch.float64, device=self._world.device)
        with self._clock.time("forward"):
            for start in range(0, len(batch), model.microbatches_at_once):
                some = batch[start : start + model.microbatches_at_once]
                for micro, scores_BT2 in zip(some, model.score_batch(some) or (), strict=False):
                    assert micro.sequences is not None
                    is_other_BT = micro.sequences.kinds == MISMATCHED_SIDE
                    ratios_BT = torch.where(is_other_BT, scores_BT2[..., 0] - micro.sequences.reference, 0.0)
                    total += torch.stack((ratios_BT.sum(), is_other_BT.sum()))
        with self._clock.time("communication"):
            ratio, count = self._world.sum(total)
        for preference in model.preferences:
            preference.kl = (ratio / count.clamp(min=1.0)).clamp(min=0.0).float()

    def exchange(
        self,
        loss: Tensor,
        requests: Callable[[], Requests] = Requests,
        measure: Callable[[], Mapping[str, Sequence[float] | Tensor]] = dict,
    ) -> StepOutcome:
        """Tell all ranks what each of them found: one small all-reduce, from which all decide alike.

        It is the one place of a step where all ranks meet, and the one time that the host waits for the device. A rank
        enters it once its gradient is whole; what comes after it may rely on that for all ranks (`TrainState.pending`).
        `requests` gives what this process asks for after the step, and `measure` more numbers to sum, by name, the same
        names with as many numbers on each rank, on the host or (fp64, one dim) on the device; they are called once the
        gradient is whole.
        """
        state, step = self.state, self.state.step
        with self._clock.time("optimizer"):
            unscale(state.model.pieces, state.scaler.scale)
            squares = state.model.square_share()
            fingerprint = self.checks.fingerprint(step)
        state.pending = True
        fault("exchange", step=step, rank=self._world.rank)
        is_wrong = self.checks.is_wrong(step, loss)
        measured = measure()
        with self._clock.time("communication"):
            loads = loads_of(state.model.moes, self._run.model, self._world.device)
            votes = astuple(replace(requests(), retry=is_wrong))
            mine = [loss.double().view(1), squares.view(1), limbs_of(fingerprint, loss.device)]
            mine += _on_device(loss.device, votes, *measured.values())
            sums = self._world.sum(torch.cat(mine if loads is None else [*mine, loads.flatten()])).cpu()
        self._check_world()
        head = 2 + LIMBS + len(votes)
        mean_loss, norm_squared, *rest = sums[:head].tolist()
        end = head + sum(map(len, measured.values()))
        named = iter(sums[head:end].tolist())
        return StepOutcome(
            loss=mean_loss,
            gradient_norm=math.sqrt(norm_squared),
            replicas_differ=is_nonzero(rest[:LIMBS]),
            requests=Requests(*(count > 0 for count in rest[LIMBS:])),
            loads=None if loads is None else sums[end:].view_as(loads),
            sums={name: tuple(islice(named, len(some))) for name, some in measured.items()},
        )

    def update(self, outcome: StepOutcome, learning_rate: float) -> StepUpdate:
        """Return the update that applies the step with this outcome."""
        return StepUpdate(
            step=self.state.step,
            loss=outcome.loss,
            gradient_norm=outcome.gradient_norm,
            max_norm=self._run.optimizer.grad_clip,
            learning_rate=learning_rate,
            tokens=self._run.tokens_at(self.state.step),
            loads=outcome.loads,
        )

    def apply(self, update: StepUpdate, observer: UpdateObserver | None = None) -> None:
        """Apply the gradients and free them; the step counts from then on."""
        state, clock, step, rank = self.state, self._clock, update.step, self._world.rank
        with clock.time("optimizer"):
            if observer is not None:
                observer.before_update()
            state.prepare(update)
        if not state.optimizer.is_local:
            fault("prepared", step=step, rank=rank)
            with clock.time("communication"):
                self._world.barrier()  # a rank that is here can follow, whichever applies it now (`TrainState`)
            self._check_world()
        with clock.time("optimizer"):
            state.apply(update, None if observer is None else observer.updated)
        state.model.zero_gradients()  # their memory serves what is gathered
        with clock.time("communication"):
            state.model.after_update()
        if observer is not None:
            with clock.time("communication"):
                observer.after_update(step)
            self._check_world()
        fault("weights", step=step, rank=rank, tensors=lambda: {p.name: p.value for p in state.model.pieces})
        fault("moments", step=step, rank=rank, tensors=self._moments)

    def _gradients(self) -> dict[str, Tensor]:
        return {p.name: p.value.grad for p in self.state.model.pieces if p.value.grad is not None}

    def _moments(self) -> dict[str, Tensor]:
        pieces, optimizer = self.state.model.masters, self.state.optimizer
        return {f"{p.name}.{name}": tensor for p in pieces for name, tensor in optimizer.kept_of(p).items()}


def _on_device(device: torch.device, *parts: Sequence[float] | Tensor) -> list[Tensor]:
    """Return each part as fp64 on `device`, [n]; the host's numbers travel there in one copy."""
    numbers = [number for part in parts if not isinstance(part, Tensor) for number in part]
    sent = iter(
        sent_to(device, torch.tensor(numbers, dtype=torch.float64)).split(
            [len(part) for part in parts if not isinstance(part, Tensor)]
        )
    )
    return [part if isinstance(part, Tensor) else next(sent) for part in parts]
