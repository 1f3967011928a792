"""Successive halving: which trials train until which step, and which of them are promoted.

Synchronous, as in Jamieson and Talwalkar 2016: a rung is judged once all of its trials have come to it. So what is
promoted follows from the metrics alone, not from how many trials ran at a time or what was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bracket:
    """Trials that compete, and the rungs at which they do."""

    first: int
    """Number of the first trial; the others follow it."""
    steps: tuple[int, ...]
    """Steps until each rung; the last is the run's end."""
    counts: tuple[int, ...]
    """Trials that come to each rung, if none fails."""

    @property
    def trials(self) -> range:
        return range(self.first, self.first + self.counts[0])

    def promoted(self, rung: int, scores: Mapping[int, float], minimize: bool) -> list[int]:
        """Return the trials that go on to the next rung, best first.

        scores: trial -> metric at this rung; those that have failed are not in it.
        """
        order = sorted(scores, key=lambda number: (scores[number] if minimize else -scores[number], number))
        return order[: self.counts[rung + 1]]


def halving(trials: int, steps: int, eta: int, min_steps: int = 0) -> list[Bracket]:
    """Return the one bracket of successive halving: `trials` at its first rung, each next with 1/eta of them.

    steps: of a whole run. min_steps: until the first rung; 0: so few that one trial, or a few less than eta, are left.
    """
    rungs = int(_log(steps / min_steps, eta)) if min_steps else int(_log(trials, eta))
    rungs = min(rungs, int(_log(steps, eta)))
    return [_bracket(0, trials, steps, eta, rungs)]


def hyperband(steps: int, eta: int, min_steps: int) -> list[Bracket]:
    """Return the brackets of Hyperband (Li et al. 2018, algorithm 1), the one with the most trials first.

    min_steps: until the first rung of the first bracket; 0: steps / eta^3.
    """
    most = int(_log(steps / min_steps if min_steps else min(eta**3, steps), eta))
    brackets: list[Bracket] = []
    first = 0
    for rungs in range(most, -1, -1):
        count = math.ceil((most + 1) / (rungs + 1) * eta**rungs)
        brackets.append(_bracket(first, count, steps, eta, rungs))
        first += count
    return brackets


def _bracket(first: int, trials: int, steps: int, eta: int, rungs: int) -> Bracket:
    return Bracket(
        first,
        tuple(max(1, round(steps / eta ** (rungs - rung))) for rung in range(rungs + 1)),
        tuple(max(1, trials // eta**rung) for rung in range(rungs + 1)),
    )


def _log(number: float, base: int) -> float:
    """Return the logarithm, and 3 for log_5(125), which floats make a little less."""
    return math.log(number) / math.log(base) + 1e-9


@dataclass(frozen=True)
class RungDecision:
    """The consequences of the metrics at the rungs so far."""

    train: dict[int, int]
    """Trial -> the rung that it may train to."""
    stopped: list[int]
    """Trials that were not promoted."""


def judge(
    bracket: Bracket, scores: Mapping[int, Mapping[int, float]], failed: Collection[int], minimize: bool
) -> RungDecision:
    """Return which trials of a bracket go on.

    scores: trial -> steps -> metric, of the rungs that it has come to, for each trial that was proposed. failed: trials
    that will come to no further rung.
    """
    train: dict[int, int] = {}
    stopped: list[int] = []
    members: Sequence[int] = bracket.trials
    last = len(bracket.steps) - 1
    for rung, steps in enumerate(bracket.steps):
        here = {number: scores[number][steps] for number in members if steps in scores.get(number, {})}
        train |= {number: rung for number in members if number in scores and number not in failed}
        if rung == last or any(number not in here and number not in failed for number in members):
            break
        members = bracket.promoted(rung, here, minimize)
        stopped += sorted(set(here) - set(members))
    gone = set(stopped)
    at_rung = {n for n, rung in train.items() if bracket.steps[rung] in scores[n]}
    return RungDecision({n: rung for n, rung in train.items() if n not in gone | at_rung}, stopped)
