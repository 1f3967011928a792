"""The sweep file: every key, its type, its range and its meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from argosy.config.section import Section

Method = Literal["grid", "random", "tpe", "halving", "hyperband"]


class Range(Section):
    """The values of a key that is varied: a list of values, or a range."""

    values: tuple[Any, ...] | None = None
    """Values to try. A list in place of this table says the same."""
    min: float | None = None
    """Least value of a range."""
    max: float | None = None
    """Greatest value of the range; it belongs to it."""
    log: bool = False
    """Draw the logarithm evenly: for learning rates, and other values of which the order of magnitude is open."""
    step: PositiveFloat | None = None
    """Distance of two values of the range."""
    int: bool = False
    """Whole numbers only; keys of the run that take whole numbers have them anyway."""

    @model_validator(mode="after")
    def _is_a_list_or_a_range(self) -> Self:
        limits = [name for name in ("min", "max", "step") if getattr(self, name) is not None]
        if self.values is not None:
            if limits or self.log or self.int:
                raise ValueError("it has values and a range; give values, or min and max")
            if not self.values:
                raise ValueError("values is empty; give at least one, such as values = [0.001, 0.003]")
            return self
        if self.min is None or self.max is None:
            raise ValueError(
                "it says neither which values to try nor a range; give a list, or min and max, "
                "such as { min = 1e-4, max = 1e-2, log = true }"
            )
        if self.min >= self.max:
            raise ValueError(f"the range from min = {self.min:g} to max = {self.max:g} is empty; let max be above min")
        if self.log and self.min <= 0:
            raise ValueError(f"min = {self.min:g} has no logarithm; give a min above 0, or leave log out")
        if self.log and self.step is not None:
            raise ValueError("log and step do not go together: steps of a logarithm are uneven; give one, or values")
        if self.step is not None and self.step > self.max - self.min:
            raise ValueError(f"step = {self.step:g} is wider than the range; try {(self.max - self.min) / 2:g}")
        return self


class Parallel(Section):
    """Trials that train at the same time on this machine, and what they may take of it."""

    trials: NonNegativeInt = 0
    """At most so many at a time; 0: as many as there are cores (or GPUs) and memory for."""
    cores: NonNegativeInt = 0
    """Cores for all of them together; 0: all that this process may use. A trial has cores / trials, or one for each of
    its processes if `trials` is 0; with launch.threads in the run, as many as that says."""
    memory_gb: NonNegativeFloat = 0.0
    """Memory for all of them together, in 10^9 bytes; 0: 90 % of the machine's. What a trial takes is predicted, and
    one that would not fit is not started beside others."""
    gpus: NonNegativeInt | None = None
    """GPUs for all of them together; left out: all that nvidia-smi lists. Each is used by one trial at a time."""


class Halving(Section):
    """Successive halving: at each rung the best trials are promoted, and go on from their checkpoints."""

    eta: Annotated[int, Field(ge=2)] = 3
    """The share of trials that is promoted is 1/eta, and each then trains until eta times as many steps."""
    min_steps: NonNegativeInt = 0
    """Steps until the first rung; 0: train.steps / eta, so often as trials can be divided by eta (hyperband: three
    times)."""


class SweepConfig(Section):
    """A sweep: a run, the keys of it that vary, and how."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "sweep"
    """The sweep's name; its folder is sweeps/NAME. Left out: the file's name without .toml."""
    run: str = ""
    """The run that is varied: a run file, from this file's folder on, a run preset, or a table [run] with the keys."""
    parameters: dict[str, Range] = {}
    """Key of the run -> what it is varied over."""
    method: Method = "tpe"
    """grid: all combinations; random; tpe: Bayesian, by a tree-structured Parzen estimator (Bergstra et al. 2011);
    halving: successive halving of random trials (Jamieson and Talwalkar 2016); hyperband: brackets of it that begin at
    different rungs (Li et al. 2018)."""
    trials: NonNegativeInt = 0
    """Number of trials; 0: 20 (grid and hyperband know theirs)."""
    metric: str = "validation_loss"
    """The metric that decides: a key of metrics.jsonl, such as validation_loss, bits_per_byte or tokens_per_s; nested
    ones with a dot. Of an evaluation the last one counts, of steps the mean of the last tenth."""
    direction: Literal["minimize", "maximize"] = "minimize"
    """The best trial has the least metric, or the greatest; accuracies, speeds and scores of tasks need this key."""
    seed: NonNegativeInt = 0
    """Random seed of the values that are drawn; the seed of the runs is theirs."""
    parallel: Parallel = Parallel()
    halving: Halving = Halving()
