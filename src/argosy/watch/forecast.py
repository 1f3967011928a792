"""The forecast of a run: when it ends and what it will have cost, with 90 % intervals.

The time left is the sum of steps, evaluations and failures that are still to come. Each has its own uncertainty:

- *steps*: the mean of the steps so far, of which the last half counts. How far such a mean is off is not assumed but
  looked up in the run itself: at earlier points of what it has done, its later part is forecast from its earlier one.
  The errors, with a prior for short runs, give the spread of a t-distribution, since they are few;
- *evaluations*: as many as the run file asks for, each as long as those so far, or, before the first, as long as the
  steps' forward takes for as many tokens;
- *failures*: a Poisson process with the rate of `rules.stops`: the catalogue's, corrected by the failures that the
  run had, or had not. Each costs as much as those so far, or as is usual
  (`plan.cost.economy.RESTART_S`).

All are drawn together 4000 times, with a fixed seed: the same folder gives the same forecast. The final loss is not
forecast: see docs/advice.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from argosy.errors import counted
from argosy.plan.cost.economy import RESTART_S, power_per_device_w, price_per_device_h
from argosy.plan.cost.estimate import INTERVAL_Z, Estimate, seconds
from argosy.plan.cost.reliability import FAILURE_DRAWS
from argosy.watch.columns import Floats
from argosy.watch.facts import RECENT, RunFacts, batches_of
from argosy.watch.rules.planner import Planner
from argosy.watch.rules.stops import failures, rates_of

FORECAST_STEPS = 10
"""No forecast with fewer steps, most of them first ones."""
FORECAST_BLOCKS = 30
"""Steps are put together in so many blocks: their means depend less on each other than steps do."""
FORECAST_AT = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Points of the run so far at which its later part is forecast."""
LOSS_PRIOR_STD, PRIOR_WEIGHT = 0.35, 3.0
"""Spread of the logarithm of such errors before any is seen, and its weight as a number of errors: tuned on the runs
named in benchmarks/results/forecast.md, and checked on others."""
PRIOR_S = 60.0
"""Other load on a machine changes within minutes: the prior shrinks with the root of the time seen over this."""
T_FREEDOM = 5
"""Degrees of freedom of the t-distribution."""
LATE_SHARE = 0.7
"""The level is the mean of so large a last part of the steps: what changed long ago counts no more."""


@dataclass(frozen=True)
class Forecast:
    """The end of a run, and its cost by then."""

    steps_left: int
    left_s: Estimate
    """Seconds from the newest line to the last step."""
    end_s: Estimate
    """Time of that, in seconds since 1970."""
    words: str
    """All of it in a sentence or two."""
    cost: Estimate | None = None
    """Money for the whole run; None if nobody knows a price of the devices."""
    cost_so_far: float | None = None
    currency: str = ""
    energy_kwh: Estimate | None = None
    """Energy of the whole run; None if it is neither measured nor published, or there is no plan."""
    energy_source: str = ""
    """nvml or rapl: measured; estimate: by the power that the catalogue has of the devices."""
    failures: float = 0.0
    """Failures that are expected until the end."""


def forecast(facts: RunFacts, planner: Planner | None = None) -> Forecast | None:
    """Return the forecast; None for a run that has ended, or has done too little to tell."""
    left = facts.steps_left
    if facts.has_ended or not left or int(facts.warm.sum()) < FORECAST_STEPS or not facts.wall_s > 0:
        return None
    planner, random = planner or Planner(facts), np.random.default_rng(0)
    steps_s = _full_steps(facts, left) * _level(facts, random)
    draws = steps_s + _evaluations(facts, left, random)
    if not np.isfinite(draws).all():  # no clock gave such times
        return None
    stops, stops_s = _failures(facts, planner, draws, random)
    left_s = Estimate.of_draws(draws + stops_s)
    newest_s = facts.last_line_s
    end_s = Estimate(*(newest_s + each for each in (left_s.low, left_s.mid, left_s.high)))
    hours_left = (draws + stops_s) / 3600
    cost, so_far, currency = _cost(facts, planner, hours_left, random)
    energy, source = _energy(facts, planner, hours_left, random)
    return Forecast(
        left, left_s, end_s, _words(left, left_s, cost, currency), cost, so_far, currency, energy, source, stops
    )


def _level(facts: RunFacts, random: np.random.Generator) -> Floats:
    """Draw the mean seconds of the steps to come, evaluations left out, saves and checks included."""
    took = _plain_steps(facts)
    late = took[int(len(took) * (1 - LATE_SHARE)) :]
    errors = _errors(took)
    prior = LOSS_PRIOR_STD / np.sqrt(1 + took.sum() / PRIOR_S)
    spread = np.sqrt((PRIOR_WEIGHT * prior**2 + np.sum(errors**2)) / (PRIOR_WEIGHT + len(errors)))
    return np.asarray(late.mean() * np.exp(spread * random.standard_t(T_FREEDOM, FAILURE_DRAWS)))


def _plain_steps(facts: RunFacts) -> Floats:
    """Return the seconds of steps without evaluations: those under the plan in force, without first ones of a world."""
    whole = facts.column("seconds.step")
    whole = np.where(np.isfinite(whole), whole, facts.column("step_time_s"))
    plain = (whole - np.nan_to_num(facts.column("seconds.evaluate"))) / _shares(facts)
    under = facts.warm & (facts.column("step") >= facts.plan_since) & np.isfinite(plain)
    return plain[under] if under.sum() >= FORECAST_STEPS else plain[np.isfinite(plain)]


def _full_steps(facts: RunFacts, left: int) -> float:
    """Return the steps to come, counted in steps with the largest batch: samples are what takes time.

    Of those of all workers of parameter servers, only as many are this one's as of the last ones.
    """
    if facts.plan is not None and facts.plan.has_servers:
        own = facts.column("step")[-RECENT:]
        return float(left * len(own) / (own[-1] - own[0] + 1))
    if facts.run is None or facts.steps_in_all is None:
        return left
    steps = facts.steps_in_all
    return facts.run.train.batches.steps_like(steps - 1, steps - left, steps)


def _shares(facts: RunFacts) -> Floats:
    """Return the batch of each step over the largest one."""
    largest = facts.run.train.batches.largest if facts.run is not None else 1
    return batches_of(facts.run, facts.column("step")) / largest


def _errors(took: Floats) -> Floats:
    """Return how far forecasts at earlier points were off, as logarithms of measured over forecast."""
    if len(took) < 2 * FORECAST_BLOCKS:
        return np.empty(0)
    blocks = np.array([block.mean() for block in np.array_split(took, FORECAST_BLOCKS)])
    cuts = [round(split * FORECAST_BLOCKS) for split in FORECAST_AT]
    errors = [np.log(blocks[cut:].mean() / blocks[int(cut * (1 - LATE_SHARE)) : cut].mean()) for cut in cuts]
    return np.asarray(errors, dtype=float)


def _evaluations(facts: RunFacts, left: int, random: np.random.Generator) -> Floats:
    """Draw the seconds of the evaluations to come: those of each `every_steps`, and the one at the end."""
    took = facts.column("seconds.evaluate")
    took = took[np.isfinite(took) & (took > 0)]
    if not len(took):
        took = _unseen_evaluation_s(facts)
    if facts.run is None or facts.steps_in_all is None or not len(took):
        return np.zeros(FAILURE_DRAWS)
    every, done, steps = facts.run.evaluate.every_steps, facts.steps_in_all - left, facts.steps_in_all
    times = (steps // every - done // every) + (steps % every > 0) if every else 1
    return (
        np.asarray(times * random.choice(took, (FAILURE_DRAWS, min(times, 20))).mean(axis=1))
        if times
        else np.zeros(FAILURE_DRAWS)
    )


def _unseen_evaluation_s(facts: RunFacts) -> Floats:
    """Return the seconds of an evaluation before any was seen, by the steps' forward; empty if that does not tell.

    Of all workers of parameter servers only one evaluates.
    """
    if facts.run is None or (facts.plan is not None and facts.plan.has_servers):
        return np.empty(0)
    forward_s = facts.typical.get("forward") or facts.step_s / 3  # of a pipeline it is not known: a third of the FLOPs
    took = np.array([forward_s * facts.run.evaluate.tokens / facts.run.tokens_per_step])
    return took[np.isfinite(took)]


def _failures(facts: RunFacts, planner: Planner, left_s: Floats, random: np.random.Generator) -> tuple[float, Floats]:
    """Return the failures to expect, and draw the seconds that they take."""
    found = failures(facts)
    known = rates_of(facts, planner, found)
    if known is None or facts.plan is None:
        return 0.0, np.zeros(FAILURE_DRAWS)
    rates = known.drawn_rates(random, FAILURE_DRAWS) * facts.plan.world_size / 3600
    counts = random.poisson(np.minimum(rates * left_s, 1e6))
    costs = np.array([outage.cost_s(facts.step_s) for outage in found])
    each = random.choice(costs, FAILURE_DRAWS) if len(costs) else _of(RESTART_S, random)
    return float(counts.mean()), np.asarray(counts * each, dtype=float)


def _cost(
    facts: RunFacts, planner: Planner, hours_left: Floats, random: np.random.Generator
) -> tuple[Estimate | None, float | None, str]:
    machine, plan = planner.machine, facts.plan
    price = None if machine is None or plan is None else price_per_device_h(machine)
    if machine is None or plan is None or price is None:
        return None, None, ""
    mid = float(price.mid)
    so_far = facts.cost_so_far(mid, machine.currency)
    in_all = (so_far / mid + hours_left * plan.world_size) * _of(price, random)
    return Estimate.of_draws(in_all), so_far, machine.currency


def _energy(
    facts: RunFacts, planner: Planner, hours_left: Floats, random: np.random.Generator
) -> tuple[Estimate | None, str]:
    machine, plan = planner.machine, facts.plan
    if plan is None:
        return None, ""
    in_all = facts.device_hours + hours_left * plan.world_size
    if facts.power_w:
        return Estimate.of_draws(in_all * facts.power_w / plan.world_size / 1000), facts.power_source
    power = None if machine is None else power_per_device_w(machine)
    if machine is None or power is None:
        return None, ""
    return Estimate.of_draws(in_all * _of(power, random) / machine.pue / 1000), "estimate"  # as measured: computers


def _of(estimate: Estimate, random: np.random.Generator) -> Floats:
    """Draw from an estimate: log-normal, each side with its own spread."""
    low, mid, high = float(estimate.low), float(estimate.mid), float(estimate.high)
    normal = np.asarray(random.standard_normal(FAILURE_DRAWS))
    down, up = math.log(mid / low) / INTERVAL_Z, math.log(high / mid) / INTERVAL_Z
    return np.asarray(mid * np.exp(down * np.minimum(normal, 0.0) + up * np.maximum(normal, 0.0)))


def _words(left: int, left_s: Estimate, cost: Estimate | None, currency: str) -> str:
    text = (
        f"{counted(left, 'step')} left: about {seconds(left_s.mid)} ({seconds(left_s.low)} to {seconds(left_s.high)}, "
        "90 % interval)."
    )
    if cost is not None:
        text += f" In all it will have cost {cost.mid:,.2f} {currency} ({cost.low:,.2f} to {cost.high:,.2f})."
    return text
