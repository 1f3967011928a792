"""Fit a scaling law L(N, D) = E + A/N^alpha + B/D^beta to small runs, and ask it about larger ones.

N: parameters with embeddings (without the experts that a token does not go to); D: training tokens; L: loss on
held-out text, nats per token; compute is 6 N D. RESULTS are folders of finished runs that share a tokenizer, of sweeps
over sizes and steps, or CSV files with the columns parameters,tokens,loss. Intervals are 90 %, by bootstrap.

Examples:
  argosy scaling runs/small-*                                        the coefficients
  argosy scaling sweeps/sizes                                        the same, of the trials of a sweep
  argosy scaling results.csv --budget 1e21                           the best N and D for 1e21 FLOPs
  argosy scaling runs/small-* --predict big.toml                     the loss of a run before it is trained
  argosy scaling results.csv --parameters 7B --tokens 140B --json    the same for a size of your own
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.documents import answer
from argosy.cli.options import parse
from argosy.config.section import Count
from argosy.errors import UserError
from argosy.plan.scaling_law import BootstrapEstimate, fit_scaling_law


@dataclass(frozen=True)
class Options:
    results: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs and of sweeps, and CSV files."""
    budget: Count | None = None
    """Training compute in FLOPs, to spend on the best N and D."""
    predict: Path | None = None
    """A run file: predict its final loss."""
    parameters: Count | None = None
    """The N of a run whose final loss is predicted; needs --tokens."""
    tokens: Count | None = None
    """The D of that run; needs --parameters."""
    draws: int = 100
    """Number of bootstrap draws for the intervals."""
    seed: int = 0
    """Seed of the draws."""
    json: bool = False
    """Print everything as one JSON object."""


@dataclass(frozen=True)
class ComputeOptimal:
    """The best use of a budget."""

    flops: float
    """The budget."""
    parameters: BootstrapEstimate
    tokens: BootstrapEstimate
    tokens_per_parameter: BootstrapEstimate
    loss: BootstrapEstimate


@dataclass(frozen=True)
class PredictedLoss:
    """The final loss of a run that was not trained."""

    parameters: float
    tokens: float
    loss: BootstrapEstimate


@dataclass(frozen=True)
class ScalingAnswers:
    """The fit, and what was asked of it."""

    results: int
    """Number of runs that the law was fitted to."""
    rms_residual: float
    """Root mean square of the residuals of the logarithm of the loss."""
    coefficients: dict[str, BootstrapEstimate]
    """E, A, B, alpha and beta."""
    compute_optimal: ComputeOptimal | None = None
    """The best N and D, with `--budget`."""
    prediction: PredictedLoss | None = None
    """The predicted run, with `--predict`, or with `--parameters` and `--tokens`."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy scaling", Options)
    _check(options)
    from argosy.compare.results import planned_size, read_results

    sizes = (options.parameters, options.tokens) if options.predict is None else planned_size(options.predict)
    results = read_results(options.results)
    found = fit_scaling_law(results, options.draws, options.seed)
    answers = ScalingAnswers(len(results), found.rms_residual, found.coefficients)
    if options.budget is not None:
        best = ComputeOptimal(options.budget, **found.compute_optimal(options.budget))
        answers = replace(answers, compute_optimal=best)
    if sizes[0] is not None and sizes[1] is not None:
        predicted = PredictedLoss(sizes[0], sizes[1], found.predict(sizes[0], sizes[1]))
        answers = replace(answers, prediction=predicted)
    answer(options.json, "scaling", _in_words(answers), answers)


def _check(options: Options) -> None:
    if not options.results:
        raise UserError("no results: give folders of finished runs, or a CSV. argosy scaling --help shows how.")
    for name in ("budget", "parameters", "tokens", "draws"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name} {value:g}: must be above 0.")
    if (options.parameters is None) != (options.tokens is None):
        raise UserError("--parameters and --tokens describe a run together: give both.")
    if options.predict is not None and options.parameters is not None:
        raise UserError("--predict and --parameters with --tokens name two runs: give one of them.")


def _in_words(answers: ScalingAnswers) -> str:
    lines = [
        f"L(N, D) = E + A/N^alpha + B/D^beta, fitted to {answers.results} results; "
        f"residuals {answers.rms_residual:.2%} (root mean square)",
        *_rows(answers.coefficients),
    ]
    if best := answers.compute_optimal:
        figures = {name: value for name, value in vars(best).items() if name != "flops"}
        lines += [f"compute-optimal for {best.flops:g} FLOPs = 6 N D:", *_rows(figures)]
    if run := answers.prediction:
        lines += [f"a run of {run.parameters:.4g} parameters on {run.tokens:.4g} tokens:", *_rows({"loss": run.loss})]
    return "\n".join(lines)


def _rows(estimates: dict[str, BootstrapEstimate]) -> list[str]:
    width = max(map(len, estimates))
    return [f"  {name:{width}}  {e.value:<10.4g}  [{e.low:.4g}, {e.high:.4g}]" for name, e in estimates.items()]
