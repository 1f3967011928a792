"""The gradient noise scale: how large a batch is worth its samples (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", appendix A.1).

Of a step's gradient two norms are known: that of the whole batch B, and the mean of those of parts of b sequences, one
part a data-parallel rank (with uneven shares, b is their harmonic mean: a part's variance is S over its size); with one
rank, its first microbatch. Where ranks share sequences or parameters (cp, ep, zero
= 3) none has a gradient of its own: there the part is the first microbatch of all ranks, whose gradient is computed
once more before the step. Without bias,

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)
    S     = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

and the noise scale is S / |G|^2, in sequences. A single step tells little, so both are smoothed on their own.
Parameters that tensor-parallel ranks hold whole are left out, and a tied embedding between the ends of a pipeline: no
single rank has their gradient before the sums (all count where the part is computed once more). What is trained does
not change by a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.models.microbatch import Microbatch
from argosy.observe.events import Metrics
from argosy.parallel.pieces import LocalSquares, square_share
from argosy.plan.plan import Plan, check_can_estimate
from argosy.training.parts import Parts
from argosy.training.records import Records
from argosy.training.services.service import Service
from argosy.training.state import TrainState
from argosy.training.step import StepOutcome

SMOOTHING = 0.98
"""Share of the averages that stays with each new estimate: about fifty estimates count."""
RESUMED = 1000
"""Averages resume from those of one of the last so many estimates that were due: of some, nothing is written."""


@dataclass(frozen=True)
class Smoothed:
    """Averages of the estimates so far, the newest counting most."""

    squared: float = 0.0
    """|G|^2."""
    variance: float = 0.0
    """S: the trace of the covariance of one sequence's gradient."""
    estimates: int = 0

    def with_estimate(self, squared: float, variance: float) -> Smoothed:
        """Return the averages with one more estimate."""
        keep = min(SMOOTHING, self.estimates / (self.estimates + 1))  # a plain mean at first
        return Smoothed(
            keep * self.squared + (1 - keep) * squared,
            keep * self.variance + (1 - keep) * variance,
            self.estimates + 1,
        )

    @property
    def noise_scale(self) -> float | None:
        """S / |G|^2, sequences; None while noise hides the gradient, or the estimate of it."""
        return self.variance / self.squared if self.squared > 0 and self.variance > 0 else None

    def line(self) -> dict[str, Any]:
        """Return what a step's line of metrics says."""
        scale = self.noise_scale
        noise = {"gradient_squared": self.squared, "variance": self.variance, "estimates": self.estimates}
        return {"noise": noise} | ({} if scale is None else {"noise_scale": round(scale, 4)})

    @classmethod
    def newest(cls, metrics: Metrics, step: int, every: int) -> Smoothed:
        """Return the averages of the last estimates before `step`, if one is due every `every` steps (0: none is)."""
        line = metrics.newest("noise", step, RESUMED * every) if every else None
        if line is None:
            return cls()
        noise = line["noise"]
        return cls(noise["gradient_squared"], noise["variance"], noise["estimates"])


def estimate(small: float, big: float, b: float, B: float) -> tuple[float, float]:
    """Return |G|^2 and S from the squared norms of the gradients of `b` and of `B` sequences."""
    return (B * big - b * small) / (B - b), (small - big) / (1 / b - 1 / B)


class NoiseScale(Service):
    """Estimates it in the steps that are due."""

    @classmethod
    def of(cls, parts: Parts) -> NoiseScale:
        return cls(parts.run, parts.plan, parts.state, parts.records)

    def __init__(self, run: RunConfig, plan: Plan, state: TrainState, records: Records):
        model = state.model
        self._run, self._plan, self._state, self._records = run, plan, state, records
        self._every = run.observe.noise_scale_every_steps
        try:
            check_can_estimate(run, plan)
        except UserError as problem:  # the first plan was checked: this one is for what is left of the machines
            self._every = 0
            records.progress.say(f" no noise scale under this plan: {problem}", "yellow")
        self._squares, self._pieces = model.own_squares or LocalSquares(), model.own_pieces
        self._device = model.device
        self._model, self._has_own = model, plan.has_own_gradients
        self._first = torch.zeros(())
        """This rank's share of the squared norm of the first microbatch's gradient, where no rank has its own."""
        self._small, self._is_on = 0, False
        self._batch = 1
        self._sums: Sequence[float] = ()
        self.smoothed = Smoothed()

    def start(self, step: int) -> None:
        """Resume the averages of the steps before; all ranks take in the same estimates, and rank 0 writes them."""
        self.smoothed = Smoothed.newest(self._records.metrics, step, self._every)

    def before_forward(self, step: int, batch: Sequence[Microbatch]) -> None:
        """Take the squares of a part's gradient in the step to come, if it is due."""
        is_due = bool(self._every) and (step + 1) % self._every == 0
        self._batch = self._run.train.batches.at(step)
        if not self._has_own:
            self._is_on = is_due and self._plan.microbatches(self._batch) > 1
            if self._is_on:
                self._small = self._plan.dp * self._plan.microbatch
                self._first = self._model.square_of(batch[0], self._state.scaler.scale)
            return
        at = len(batch) if self._plan.dp > 1 else 1
        self._is_on = is_due and (self._plan.dp > 1 or len(batch) > 1)
        if self._is_on:
            self._small = at * self._plan.microbatch
            self._squares.arm(at, self._device)

    def measure(self) -> Sequence[float] | Tensor:
        """Return this rank's shares: of |G_b|^2, of |G_B|^2, and 1 / b; nothing in a step that is not due."""
        if not self._is_on:
            return ()
        scale, inverse = self._state.scaler.scale, 1 / self._small
        if not self._has_own:
            of_part, share = self._first / scale**2, self._model.square_share()
        else:
            share = square_share(self._pieces) if self._pieces else torch.zeros((), device=self._device)
            # Gradients are of the sum over a part, over the number of tokens of the whole batch: the mean is larger.
            of_part = self._squares.take() * (self._batch / self._small / scale) ** 2 / self._plan.dp
        return torch.stack([of_part, share.double(), torch.full_like(share, inverse, dtype=torch.float64)])

    def after_exchange(self, outcome: StepOutcome, sums: Sequence[float]) -> None:
        self._sums = sums

    def after_step(self, step: int, learning_rate: float) -> None:
        """Estimate the noise scale from the sums: the step was applied, and is not done again."""
        if not self._is_on:
            return
        small, big, inverse = self._sums
        if math.isfinite(small) and math.isfinite(big):
            b = self._plan.world_size / inverse
            self.smoothed = self.smoothed.with_estimate(*estimate(small, big, b, self._batch))

    def line(self, step: int) -> dict[str, Any]:
        return self.smoothed.line() if self._is_on and self.smoothed.estimates else {}
