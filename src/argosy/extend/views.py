"""The view that the user's code has of a run, and the points at which it is called. torch is only named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

if TYPE_CHECKING:
    from torch import Tensor

Point = Literal["start", "before_step", "after_backward", "after_exchange", "after_step", "evaluate", "save", "end"]
"""The moments of a callback. start: the state is there, and training is about to begin, also after a recovery;
before_step; after_backward: this rank's gradients are summed over all ranks; after_exchange: loss and gradient norm
are known, the same on all ranks, and nothing is updated yet; after_step: the weights are updated; evaluate: held-out
text was scored; save: a checkpoint is being written; end: the run ends here, with its state saved."""

POINTS: tuple[Point, ...] = get_args(Point)


class Run(Protocol):
    """A run and its step at hand, on one rank: to read. Numbers that are not known yet are NaN."""

    @property
    def name(self) -> str:
        """The run's name."""

    @property
    def folder(self) -> Path:
        """The run's folder. Files of yours belong in a folder of their own in it."""

    @property
    def rank(self) -> int:
        """This process, 0 ... world_size - 1. Only rank 0 should write files or print."""

    @property
    def world_size(self) -> int:
        """The number of processes. After a recovery it may be another."""

    @property
    def step(self) -> int:
        """The step at hand, counted from 0 as in metrics.jsonl."""

    @property
    def steps(self) -> int | None:
        """The steps of the run; None as long as a run in minutes does not know them."""

    @property
    def tokens(self) -> int:
        """Tokens trained on so far, over all ranks."""

    @property
    def loss(self) -> float:
        """Mean training loss of the step over the tokens of all ranks, nats; known from after_exchange on."""

    @property
    def grad_norm(self) -> float:
        """Norm of the step's gradient over all parameters, before clipping; known from after_exchange on."""

    @property
    def lr(self) -> float:
        """The learning rate of the step; known from after_step on."""

    @property
    def validation_loss(self) -> float:
        """Loss on held-out text, nats a token; that of the newest evaluation since this process started."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the parameters, by name: live tensors, local shapes. Do not write to them."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of `weights()`, local shapes: sums over all ranks, of the mean loss a token.

        They exist in a metric and at after_exchange, before clipping; elsewhere the mapping is empty.
        """

    def log(self, **values: float) -> None:
        """Write numbers into the line of the step in metrics.jsonl, under "user"; the last value of a name counts.

        Rank 0's values are written; those of other ranks are not. A metric is for means over ranks. Values that are
        not finite are left out. Raises: TypeError if a value is no number.
        """


Loss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""Logits [C, V] and targets [C] to a loss for each token [C]."""


@dataclass(frozen=True)
class Update:
    """One step of this rank's part of one parameter, for an optimizer. Its tensors are fp32 and changed in place."""

    name: str
    """The parameter's name in the whole model, such as blocks.0.attention.q.weight."""
    weight: Tensor
    """Local shape."""
    gradient: Tensor
    """Local shape; summed over ranks and clipped."""
    moments: Mapping[str, Tensor]
    """The optimizer's state by its names; local shape."""
    step: int
    """Number of the parameter's step, from 1."""
    lr: float
    """The learning rate of the step, with the factor of the parameter's group."""
    weight_decay: float
    """That of the parameter: 0 for norms and biases, unless its group says otherwise."""
    settings: Mapping[str, float]
    """beta1, beta2, momentum and eps of the run file's table `optimizer`."""
