"""The scaling law L(N, D) = E + A / N^alpha + B / D^beta: fitted to small runs, asked about larger ones.

N: parameters of the model, embeddings counted, as Hoffmann et al. 2022 ("Chinchilla") do, of experts only those that a
token goes to; D: training tokens; L: loss, nats per token. Compute is C = 6 N D, that paper's convention.

L-BFGS for many small problems at once: thousands of short vectors cost a NumPy call as little as one.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from argosy.errors import UserError

Array = np.ndarray[Any, np.dtype[np.float64]]
Function = Callable[[Array], tuple[Array, Array]]
"""Points [P, n] -> values [P] and gradients [P, n]; a point outside the domain has a value that is not finite."""

MEMORY = 10
"""Number of steps that the curvature is estimated from."""
SUFFICIENT_DECREASE, CURVATURE = 1e-4, 0.9
"""Wolfe's two conditions (Nocedal and Wright 2006, equation 3.6)."""
TRIALS = 20
"""Step lengths that a line search tries."""


def minimize(function: Function, starts: Array, steps: int = 300, tolerance: float = 1e-9) -> tuple[Array, Array]:
    """Return the points [P, n] where the descents from `starts` [P, n] end, and their values [P].

    Liu and Nocedal 1989 (Nocedal and Wright 2006, algorithm 7.4), each point for itself, with the line search of Lewis
    and Overton 2013 (algorithm 2.6), which kinks do not stop. Ends after `steps` steps, or once no point has come
    down by more than `tolerance` * (1 + its value) in `MEMORY` of them. `starts` have finite values.
    """
    points = starts
    values, gradients = function(points)
    history: deque[tuple[Array, Array]] = deque(maxlen=MEMORY)
    earlier: deque[Array] = deque([values], maxlen=MEMORY)
    for _ in range(steps):
        directions = _directions(gradients, history)
        found, values, found_gradients = _line_search(function, points, values, gradients, directions, tolerance)
        history.append((found - points, found_gradients - gradients))
        points, gradients = found, found_gradients
        if len(earlier) == MEMORY and np.all(earlier[0] - values <= tolerance * (1 + np.abs(values))):
            break
        earlier.append(values)
    return points, values


def _directions(gradients: Array, history: deque[tuple[Array, Array]]) -> Array:
    """Return downhill directions, scaled by the curvature in `history`; the first step has length 1 at most."""
    directions = -gradients
    if not history:
        return directions / np.maximum(1.0, np.linalg.norm(gradients, axis=1, keepdims=True))
    kept = []
    for step, change in reversed(history):
        curvature = _dot(step, change)
        # A step without positive curvature, such as none at all, teaches nothing.
        inverse = np.divide(1.0, curvature, out=np.zeros_like(curvature), where=curvature > 0)
        share = inverse * _dot(step, directions)
        directions = directions - share * change
        kept.append((step, change, inverse, share))
    step, change, inverse, _ = kept[0]
    directions = directions * np.where(inverse > 0, _dot(step, change) / np.maximum(_dot(change, change), 1e-300), 1.0)
    for step, change, inverse, share in reversed(kept):
        directions = directions + step * (share - inverse * _dot(change, directions))
    return np.where(_dot(directions, gradients) < 0, directions, -gradients)


def _line_search(
    function: Function, points: Array, values: Array, gradients: Array, directions: Array, tolerance: float
) -> tuple[Array, Array, Array]:
    """Return lower points along `directions`, with values and gradients; a point with no lower one stays."""
    slope = _dot(gradients, directions)[:, 0]
    low, high, length = np.zeros_like(slope), np.full_like(slope, np.inf), np.ones_like(slope)
    best, best_values, best_gradients = points, values, gradients
    at_end = slope >= -1e-3 * tolerance * (1 + np.abs(values))  # the others need not wait for it
    for _ in range(TRIALS):
        trial = points + length[:, None] * directions
        trial_values, trial_gradients = function(trial)
        falls = trial_values <= values + SUFFICIENT_DECREASE * length * slope
        flat = _dot(trial_gradients, directions)[:, 0] >= CURVATURE * slope
        better = (falls & (trial_values <= best_values))[:, None]
        best, best_gradients = np.where(better, trial, best), np.where(better, trial_gradients, best_gradients)
        best_values = np.where(better[:, 0], trial_values, best_values)
        if np.all(falls & flat | at_end):
            break
        low, high = np.where(falls & ~flat, length, low), np.where(falls, high, length)
        following = np.where(np.isinf(high), 2 * low, (low + high) / 2)
        length = np.where(falls & flat, length, following)
    return best, best_values, best_gradients


def _dot(a: Array, b: Array) -> Array:
    """Return the dot product of each point's vectors, [P, 1]."""
    return np.einsum("pn,pn->p", a, b)[:, None]


FLOPS_PER_PARAMETER_AND_TOKEN = 6
HUBER_DELTA = 1e-3
"""Residual of the log loss at which squares turn into absolute values (Hoffmann et al. 2022, appendix D.3)."""
STARTS = {
    "log E": np.arange(-1.0, 1.5, 0.5),
    "log A": np.arange(0.0, 30.0, 5.0),
    "log B": np.arange(0.0, 30.0, 5.0),
    "alpha": np.array([0.1, 0.25, 0.5, 1.0, 2.0]),
    "beta": np.array([0.1, 0.25, 0.5, 1.0, 2.0]),
}
"""The grid of starts: the paper's, with exponents above 0."""
DESCENTS = 32
"""Number of the grid's best starts from which to descend."""
COEFFICIENTS = 5
FEWEST, FEWEST_SIZES = COEFFICIENTS + 1, 3
"""Fewest results, and fewest different N and different D among them."""
INTERVAL = 0.90


@dataclass(frozen=True)
class RunResult:
    """One run, trained to its end."""

    parameters: float
    """N, as above."""
    tokens: float
    """D: tokens that it was trained on."""
    loss: float
    """Loss at the end, nats per token."""


@dataclass(frozen=True)
class Allocation:
    """The best way to spend a budget of compute."""

    parameters: float
    tokens: float
    loss: float
    """Loss that the law expects, nats per token."""


@dataclass(frozen=True)
class ScalingLaw:
    """The coefficients, by their names in Hoffmann et al. 2022, approach 3 (equation 2)."""

    E: float
    """Loss that neither size nor data removes, nats per token."""
    A: float
    B: float
    alpha: float
    """Exponent of the parameters, above 0."""
    beta: float
    """Exponent of the tokens, above 0."""

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model with so many parameters after so many tokens, nats per token."""
        with np.errstate(all="ignore"):  # a draw may have a law of which one term is nothing: infinite, not an error
            rest = self.A * np.float64(parameters) ** -self.alpha + self.B * np.float64(tokens) ** -self.beta
            return float(self.E + rest)

    def compute_optimal(self, flops: float) -> Allocation:
        """Return the parameters and tokens of least loss for `flops` = 6 N D (Hoffmann et al. 2022, equation 4)."""
        both = self.alpha + self.beta
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        with np.errstate(all="ignore"):
            balance = (np.float64(self.alpha * self.A) / np.float64(self.beta * self.B)) ** (1 / both)
            parameters = float(balance * product ** (self.beta / both))
            tokens = float(product ** (self.alpha / both) / balance)
        return Allocation(parameters, tokens, self.loss(parameters, tokens))


@dataclass(frozen=True)
class BootstrapEstimate:
    """A figure with its 90 % interval from the bootstrap."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingFit:
    """The law that fits some results best, and the laws that fit them under random weights."""

    law: ScalingLaw
    draws: tuple[ScalingLaw, ...]
    """One law for each bootstrap draw."""
    residuals: tuple[float, ...]
    """Log of the measured over the fitted loss, for each result."""

    @property
    def coefficients(self) -> dict[str, BootstrapEstimate]:
        """Estimates of E, A, B, alpha and beta."""
        names = [field.name for field in fields(ScalingLaw)]
        return self._estimates(lambda law: {name: getattr(law, name) for name in names})

    @property
    def rms_residual(self) -> float:
        """Root mean square of `residuals`: about the relative error of the law on its own data."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))

    def compute_optimal(self, flops: float) -> dict[str, BootstrapEstimate]:
        """Return `parameters`, `tokens`, `tokens_per_parameter` and `loss` of the best use of a budget of FLOPs.

        The loss is the law's; that of one run would scatter around it (`predict`).
        """

        def spent(law: ScalingLaw) -> dict[str, float]:
            best = law.compute_optimal(flops)
            return {
                "parameters": best.parameters,
                "tokens": best.tokens,
                "tokens_per_parameter": best.tokens / best.parameters if best.parameters else math.inf,
                "loss": best.loss,
            }

        return self._estimates(spent)

    def predict(self, parameters: float, tokens: float) -> BootstrapEstimate:
        """Return the final loss of a run, in an interval that holds the law's uncertainty and a run's scatter."""
        laws = np.array([law.loss(parameters, tokens) for law in self.draws])
        # The law was fitted to these results, which takes a degree of freedom for each coefficient.
        scatter = np.array(self.residuals) * np.sqrt(len(self.residuals) / (len(self.residuals) - COEFFICIENTS))
        return _estimate(self.law.loss(parameters, tokens), np.outer(laws, np.exp(scatter)))

    def _estimates(self, figures: Callable[[ScalingLaw], dict[str, float]]) -> dict[str, BootstrapEstimate]:
        draws = [figures(law) for law in self.draws]
        return {
            name: _estimate(value, np.array([draw[name] for draw in draws]))
            for name, value in figures(self.law).items()
        }


def fit_scaling_law(results: Sequence[RunResult], draws: int = 100, seed: int = 0) -> ScalingFit:
    """Fit the law as Hoffmann et al. 2022 do (approach 3): Huber loss of the log loss, L-BFGS from a grid of starts.

    The loss is summed over results, not averaged: as a tiny mean it makes L-BFGS stop too early, which is what went
    wrong with the published coefficients (Besiroglu et al. 2024). The draws are of the Bayesian bootstrap (Rubin 1981):
    random weights on all results, so that none lacks a size that the fit needs.

    draws: laws of the bootstrap, for the intervals. seed: of its random weights.
    Raises: UserError if the results are too few.
    """
    _check_enough(results)
    problem = _Problem(results)
    points, losses = minimize(problem.loss, problem.best_starts(DESCENTS))
    best = points[losses.argmin()]
    # Exponential weights have variance 1; these make up for the degrees of freedom that the coefficients take.
    freedom = 1 - COEFFICIENTS / len(results)
    weights = np.random.default_rng(seed).gamma(freedom, 1 / freedom, size=(draws, len(results)))
    drawn, _ = minimize(lambda points: problem.loss(points, weights), np.tile(best, (draws, 1)))
    law = problem.law(best)
    residuals = tuple(math.log(r.loss / law.loss(r.parameters, r.tokens)) for r in results)
    return ScalingFit(law, tuple(map(problem.law, drawn)), residuals)


def _check_enough(results: Sequence[RunResult]) -> None:
    sizes, lengths = len({r.parameters for r in results}), len({r.tokens for r in results})
    if len(results) < FEWEST or min(sizes, lengths) < FEWEST_SIZES:
        raise UserError(
            f"{len(results)} results, with {sizes} different N and {lengths} different D, are too few for a scaling "
            f"law: its five coefficients take at least {FEWEST}, with {FEWEST_SIZES} different N and {FEWEST_SIZES} "
            "different D. Train more small runs."
        )


class _Problem:
    """The fit as L-BFGS sees it: a point is (log E, log a, log b, log alpha, log beta).

    a and b are the other two terms of the law at the mean log N and log D of the results: unlike A and B these hardly
    depend on the exponents, so that the descent takes tens of steps and not hundreds.
    """

    def __init__(self, results: Sequence[RunResult]):
        logs = np.log([(r.parameters, r.tokens, r.loss) for r in results])
        self._centre = logs[:, :2].mean(0)
        self._n, self._d = (logs[:, :2] - self._centre).T
        self._loss = logs[:, 2]

    def best_starts(self, count: int) -> Array:
        """Return the `count` points of the grid with the least loss, [count, 5]."""
        log_E, log_A, log_B, alpha, beta = np.array(list(itertools.product(*STARTS.values()))).T
        n, d = self._centre
        starts = np.stack([log_E, log_A - alpha * n, log_B - beta * d, np.log(alpha), np.log(beta)], 1)
        return starts[self.loss(starts)[0].argsort()[:count]]

    def law(self, point: Array) -> ScalingLaw:
        """Return the law of a point."""
        log_E, log_a, log_b, log_alpha, log_beta = point
        n, d = self._centre
        logs = log_E, log_a + np.exp(log_alpha) * n, log_b + np.exp(log_beta) * d, log_alpha, log_beta
        return ScalingLaw(*np.exp(logs).tolist())

    def loss(self, points: Array, weights: Array | float = 1.0) -> tuple[Array, Array]:
        """Return the Huber loss at each point, in units of delta squared, [P], and its gradient, [P, 5].

        weights: weights of the results, [P, results].
        """
        with np.errstate(over="ignore", invalid="ignore"):  # a step that leaves the range of numbers is taken back
            log_E, log_a, log_b, log_alpha, log_beta = points.T[:, :, None]
            slope_n, slope_d = -np.exp(log_alpha) * self._n, -np.exp(log_beta) * self._d
            logs = np.stack([log_E + 0 * slope_n, log_a + slope_n, log_b + slope_d])
            top = logs.max(0)
            terms = np.exp(logs - top)
            total = terms.sum(0)
            residuals = (top + np.log(total) - self._loss) / HUBER_DELTA
            bounded = np.clip(residuals, -1, 1)
            losses = (weights * bounded * (residuals - bounded / 2)).sum(1)
            pull = weights * bounded / HUBER_DELTA * terms / total
            along = pull.sum(2)
            gradient = [*along, (pull[1] * slope_n).sum(1), (pull[2] * slope_d).sum(1)]
        return losses, np.stack(gradient, 1)


def _estimate(value: float, draws: Array) -> BootstrapEstimate:
    low, high = np.quantile(draws, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return BootstrapEstimate(value, float(low), float(high))
