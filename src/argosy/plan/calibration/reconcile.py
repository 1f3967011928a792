"""A run's prediction beside its measurements: how wrong it was, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from argosy.plan.cost.breakdown import OF_TIME
from argosy.plan.cost.estimate import seconds
from argosy.plan.cost.prediction import Prediction
from argosy.plan.plan import Plan
from argosy.plan.workload import Numbers

PASSES, COMMUNICATION, OPTIMIZER, REST = "forward_backward", "communication", "optimizer", "rest"


@dataclass(frozen=True)
class StepPart:
    """A part of a step that can be both predicted and measured."""

    predicted: tuple[str, ...]
    """Its categories in `plan.cost.step_time.StepTime`."""
    measured: tuple[str, ...]
    """Its categories in the step's clock."""


PARTS = {
    # A layer waits inside its passes for other ranks' tokens, hidden states and parameters.
    PASSES: StepPart(
        (*OF_TIME["compute"], "tensor", "context", "experts", "pipeline"),
        ("forward", "backward", "pipeline"),
    ),
    # Gradient sums that backward did not hide, and updated values on their way back; of a worker of asynchronous
    # training its pushes and pulls.
    COMMUNICATION: StepPart(("gradients", "sites"), ("communication",)),
    # The update and the gradients' norm.
    OPTIMIZER: StepPart(("optimizer",), ("optimizer",)),
    # Reading the batch, code of the user's, and the time between the parts. Compiling, checks, evaluation and
    # checkpoints are in no part.
    REST: StepPart(("other",), ("data", "user", "other")),
}
"""Part of a step -> its predicted and measured categories."""


class Compared(BaseModel):
    """One figure, predicted and measured."""

    model_config = ConfigDict(frozen=True)

    predicted: float
    measured: float
    low: float | None = None
    """Ends of the prediction's 90 % interval; None for a part of a total."""
    high: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else None


class Reconciled(BaseModel):
    """A run's steps, predicted and measured."""

    model_config = ConfigDict(frozen=True)

    cluster: str
    """Name of the cluster that the prediction was made for."""
    seconds: dict[str, Compared]
    """Seconds of a step, by part; they add up to step_s."""
    step_s: Compared
    memory_bytes: Compared
    """Peak of a process beyond its memory before the model was made; predicted for the rank that needs most."""
    sent_bytes: dict[str, Compared] = {}
    """Bytes that the first rank sends in a step, by axis."""
    update_s: Compared | None = None
    """Seconds of an update of a worker of asynchronous training: its steps, push and pull."""
    round_wait_s: Compared | None = None
    """Seconds that a site waits in a round for the others and for what travels; the median."""

    def in_words(self) -> str:
        """Return a small table, with the interval behind each total."""
        rows = [_row(name.replace("_", " + "), each, seconds) for name, each in self.seconds.items()]
        rows += [_row("step", self.step_s, seconds), _row("memory", self.memory_bytes, _megabytes)]
        rows += [_row("update", self.update_s, seconds)] if self.update_s else []
        rows += [_row(f"sent: {axis}", each, _megabytes_sent) for axis, each in self.sent_bytes.items()]
        rows += [_row("wait of a round", self.round_wait_s, seconds)] if self.round_wait_s else []
        head = f"  {'':18}{'predicted':>12}{'measured':>12}{'ratio':>8}   nine times of ten"
        return "\n".join([f"predicted for {self.cluster}:", head, *rows])


def _row(name: str, each: Compared, write: Callable[[Numbers], str]) -> str:
    ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
    interval = "" if each.low is None or each.high is None else f"   {write(each.low)} to {write(each.high)}"
    return f"  {name:18}{write(each.predicted):>12}{write(each.measured):>12}{ratio:>8}{interval}"


def _megabytes(value: Numbers) -> str:
    return f"{float(value) / 1e6:,.0f} MB"


def _megabytes_sent(value: Numbers) -> str:
    return f"{float(value) / 1e6:,.2f} MB"


def part_of(category: str, plan: Plan) -> str:
    """Return the part of a step whose measured time includes a predicted category."""
    if category == "gradients" and plan.shards_parameters:
        return PASSES  # FSDP2 gathers parameters and sums gradients layer by layer, in forward and backward
    return next(name for name, part in PARTS.items() if category in part.predicted)


def reconcile(
    prediction: Prediction,
    plan: Plan,
    clock: Mapping[str, float],
    memory_bytes: float,
    with_reserve: bool,
    sent_bytes: Mapping[str, float] = MappingProxyType({}),
    update_s: float | None = None,
    round_wait_s: float | None = None,
) -> Reconciled:
    """Compare a prediction for `plan` with a typical step (seconds by the clock's categories) and the peak memory.

    with_reserve: the measured memory includes what the allocator holds unused. sent_bytes: of a typical step, by axis.
    update_s: of a typical update of a worker of asynchronous training. round_wait_s: of a typical round of sites.
    """
    predicted = dict.fromkeys(PARTS, 0.0)
    for category, value in prediction.seconds.items():
        predicted[part_of(category, plan)] += value
    measured = {name: sum(clock.get(c, 0.0) for c in part.measured) for name, part in PARTS.items()}
    parts = {name: Compared(predicted=predicted[name], measured=measured[name]) for name in PARTS}
    step, memory = prediction.step_s, prediction.memory_bytes
    reserve = 0.0 if with_reserve else prediction.memory.get("reserve", 0.0)
    share = 1 - reserve / float(memory.mid)
    update = prediction.update.get("seconds")
    return Reconciled(
        cluster=prediction.cluster,
        update_s=Compared(predicted=update, measured=update_s) if update and update_s else None,
        seconds=parts,
        step_s=Compared(
            predicted=float(step.mid), measured=sum(measured.values()), low=float(step.low), high=float(step.high)
        ),
        memory_bytes=Compared(
            predicted=float(memory.mid) * share,
            measured=memory_bytes,
            low=float(memory.low) * share,
            high=float(memory.high) * share,
        ),
        sent_bytes={
            axis: Compared(predicted=float(predicted), measured=sent_bytes[axis])
            for axis, predicted in prediction.traffic.items()
            if axis in sent_bytes
        },
        round_wait_s=None
        if round_wait_s is None or not prediction.rounds
        else Compared(predicted=prediction.rounds["waits_s"], measured=round_wait_s),
    )
