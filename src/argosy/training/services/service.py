"""The service interface: the moments of a run at which a service is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from argosy.models.microbatch import Microbatch
from argosy.training.evaluation import Score
from argosy.training.parts import Parts
from argosy.training.step import StepOutcome, UpdateObserver


class Service:
    """Something that takes part in the steps of a run, and decides nothing of them.

    The trainer calls all services at each of these moments, in the order of `SERVICES` and of the methods here. All
    ranks call each method together. A service overrides what it needs.
    """

    @classmethod
    def of(cls, parts: Parts) -> Self:
        """Return the service of a run. Raises: UserError if the run asks for what its plan does not allow."""
        raise NotImplementedError

    def start(self, step: int) -> None:
        """`step` steps are done, and training begins: of a new run, or after each restart."""

    def before_step(self, step: int, steps: int | None) -> None:
        """Step `step` begins, maybe not for the first time. steps: those of the run, if they are known yet."""

    def before_forward(self, step: int, batch: Sequence[Microbatch]) -> None:
        """This rank's share of the samples is read."""

    def after_backward(self) -> None:
        """The gradients of this rank are there, not yet unscaled."""

    def measure(self) -> Sequence[float] | Tensor:
        """Return numbers to sum over ranks in the step's one exchange: as many on each rank. Gradients are whole.

        What the device has computed stays there (fp64, one dim): to read it would make the host wait.
        """
        return ()

    def after_exchange(self, outcome: StepOutcome, sums: Sequence[float]) -> None:
        """The outcome is known, and the sums over ranks of what `measure` gave."""

    def observer(self, step: int) -> UpdateObserver | None:
        """Return the observer of this step's update, if there is one."""
        return None

    def after_step(self, step: int, learning_rate: float) -> None:
        """Step `step` was applied."""

    def evaluated(self, score: Score) -> None:
        """The model was scored on held-out text."""

    def line(self, step: int) -> Mapping[str, Any]:
        """Return what the metrics line of step `step`, applied just now, says of it."""
        return {}

    def end_step(self, step: int, seconds: Mapping[str, float]) -> None:
        """The line of step `step` is written. seconds: where its time went, as `StepClock.lap` gives it."""

    def saved(self) -> None:
        """A checkpoint was begun."""

    def finish(self) -> Mapping[str, Any]:
        """Return what the run's last event says of it. No step comes after this, and the last state is saved."""
        return {}

    def abandon(self) -> None:
        """Leave at once: the world is over, or this process has failed. Ranks do not call it together."""
