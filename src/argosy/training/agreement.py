"""How the replicas of a run come to the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.training.step import StepOutcome


class Agreement:
    """Replicas agree within the step: its gradients are sums over all of them. Other ways override what differs.

    All ranks call each method together, unless it says otherwise.
    """

    @property
    def is_left_behind(self) -> bool:
        """True if the other sites went on without this one. Any rank may ask."""
        return False

    def begin(self, is_new: bool) -> bool:
        """Meet the others. is_new: the run begins with the weights at hand. Returns False if a signal came before."""
        return True

    def sum_gradients(self, outcome: StepOutcome) -> StepOutcome | None:
        """Return the outcome of the step over all that sum gradients with it; None: its gradient is to be dropped."""
        return outcome

    def after_drop(self) -> bool:
        """Go to where the others are, as the gradient was dropped. Returns False if a signal came before."""
        return True

    def after_step(self, outcome: StepOutcome) -> bool:
        """Agree on the weights, if it is time. Returns False if a signal came before."""
        return True

    @property
    def is_due(self) -> bool:
        """True if weights are to be agreed on before the state counts as finished."""
        return False

    def line(self) -> Mapping[str, Any]:
        """Return what the step's line of metrics says of it, once. Only rank 0 has something to say."""
        return {}
