"""The scaling law L(N, D) = E + A / N^alpha + B / D^beta: fitted to small runs, asked about larger ones.

N: parameters of the model, embeddings counted, as Hoffmann et al. 2022 ("Chinchilla") do, of experts only those that a
token goes to; D: training tokens; L: loss, nats per token. Compute is C = 6 N D, that paper's convention.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

import numpy as np

from argosy.errors import UserError, missing_extra

Array = np.ndarray[Any, np.dtype[np.float64]]

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
UNTIL = {"maxiter": 300, "ftol": 1e-9, "gtol": 1e-6}
"""A descent ends after so many steps, or with so small a relative gain or gradient."""
COEFFICIENTS = 5
FEWEST_RUNS, FEWEST_SIZES = COEFFICIENTS + 1, 3
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
    Raises: UserError if the results are too few, or SciPy is not installed.
    """
    if find_spec("scipy") is None or find_spec("threadpoolctl") is None:
        raise missing_extra("scipy", "scaling", "argosy scaling")
    _check_enough(results)
    from scipy.optimize import minimize  # takes a fifth of a second, and nothing else needs it
    from threadpoolctl import threadpool_limits

    problem = _Problem(results, minimize)
    # Exponential weights have variance 1; these make up for the degrees of freedom that the coefficients take.
    freedom = 1 - COEFFICIENTS / len(results)
    weights = np.random.default_rng(seed).gamma(freedom, 1 / freedom, size=(draws, len(results)))
    with threadpool_limits(limits=1, user_api="blas"):  # on five numbers its threads only wait for each other
        best = min((problem.descend(start) for start in problem.best_starts()), key=lambda end: end[1])[0]
        drawn = [problem.descend(best, of_draw)[0] for of_draw in weights]
    law = problem.law(best)
    residuals = tuple(math.log(r.loss / law.loss(r.parameters, r.tokens)) for r in results)
    return ScalingFit(law, tuple(map(problem.law, drawn)), residuals)


def _check_enough(results: Sequence[RunResult]) -> None:
    sizes, lengths = len({r.parameters for r in results}), len({r.tokens for r in results})
    if len(results) < FEWEST_RUNS or min(sizes, lengths) < FEWEST_SIZES:
        raise UserError(
            f"{len(results)} results, with {sizes} different N and {lengths} different D, are too few for a scaling "
            f"law: its five coefficients take at least {FEWEST_RUNS}, with {FEWEST_SIZES} different N and "
            f"{FEWEST_SIZES} different D. Train more small runs."
        )


class _Problem:
    """The fit as L-BFGS sees it: a point is (log E, log a, log b, log alpha, log beta).

    a and b are the other two terms of the law at the mean log N and log D of the results: unlike A and B these hardly
    depend on the exponents, so that the descent takes tens of steps and not hundreds.
    """

    def __init__(self, results: Sequence[RunResult], minimize: Callable[..., Any]):
        self._minimize = minimize
        logs = np.log([(r.parameters, r.tokens, r.loss) for r in results])
        self._centre = logs[:, :2].mean(0)
        self._n, self._d = (logs[:, :2] - self._centre).T
        self._loss = logs[:, 2]

    def best_starts(self) -> Array:
        """Return the `DESCENTS` points of the grid with the least loss, [DESCENTS, 5]."""
        log_E, log_A, log_B, alpha, beta = np.array(list(itertools.product(*STARTS.values()))).T
        n, d = self._centre
        starts = np.stack([log_E, log_A - alpha * n, log_B - beta * d, np.log(alpha), np.log(beta)], 1)
        return starts[self.loss(starts)[0].argsort()[:DESCENTS]]

    def law(self, point: Array) -> ScalingLaw:
        log_E, log_a, log_b, log_alpha, log_beta = point
        n, d = self._centre
        logs = log_E, log_a + np.exp(log_alpha) * n, log_b + np.exp(log_beta) * d, log_alpha, log_beta
        return ScalingLaw(*np.exp(logs).tolist())

    def descend(self, start: Array, weights: Array | float = 1.0) -> tuple[Array, float]:
        """Return the point where L-BFGS ends that begins at `start`, and its loss. weights: those of the results."""

        def loss(point: Array) -> tuple[float, Array]:
            losses, gradients = self.loss(point[None], weights)
            return float(losses[0]), gradients[0]

        found = self._minimize(loss, start, jac=True, method="L-BFGS-B", options=UNTIL)
        return found.x, float(found.fun)

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
