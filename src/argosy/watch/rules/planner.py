"""The planner's better alternatives, computed from what a run measured.

The machine is the one that the run recorded at its start. The recent steps calibrate it as `argosy plan --learn` does
with a finished run, so that the run's own step is predicted as it was measured; then all plans that keep the numbers of
training are searched. What is left of the model's error is in both predictions: the measured step is scaled by their
ratio. Where the machine's devices are unknown, there is no alternative.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from argosy.config.schema import RunConfig
from argosy.errors import ArgosyWarning, UserError
from argosy.observe.energy import priced
from argosy.plan.calibration import FinishedRun, Reconciled, learn_from, reconcile
from argosy.plan.cost.breakdown import OF_TIME, RUN_STD
from argosy.plan.cost.constants import time_std
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.prediction import Prediction, predict
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.local_machine import DetectedHardware, machine_at_hand, resized
from argosy.plan.plan import NUMERICS, Plan
from argosy.plan.search.replan import (
    LEAST_GAIN,
    REPLAN_S,
    Replanned,
    replan,
    step_with_slow_rank_s,
    with_slow_link,
    worth_migrating,
)
from argosy.plan.search.search import plainest, search_to_run
from argosy.watch.facts import RunFacts

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Alternative:
    """Another plan for the run."""

    plan: Plan
    step_s: Estimate
    """Its step: the measured one, scaled by the ratio of both predictions; nine times of ten within the interval.

    What the model gets wrong in a part of the step that both plans have to the same share errs in neither direction.
    """
    now_s: float
    """The measured step that it is compared with."""
    memory_bytes: float
    """Predicted for the rank that needs most."""
    spares: int = 0
    """Processes that it leaves idle."""

    @property
    def saves(self) -> float:
        return 1 - float(self.step_s.mid) / self.now_s


class Planner:
    """Answers what else could be done with a run, each question once."""

    def __init__(self, facts: RunFacts):
        self._facts = facts

    @cached_property
    def machine(self) -> Cluster | None:
        """The run's machine, calibrated by its recent steps of the whole batch; None if its devices are unknown."""
        facts, plain = self._facts, self._plain
        if plain is None or self._raw is None or facts.plan is None or facts.run is None or not facts.recent_count:
            return plain
        if not facts.has_whole_batch:
            return plain
        name = str((self._hardware or {}).get("device"))
        done = FinishedRun(Path(facts.folder), facts.run, facts.plan, name, "", self._measured(self._raw))
        learned = _quietly(lambda: learn_from([done], plain))
        if learned is None:
            return plain
        # Of memory, a line of metrics does not tell what the process held before it made the model.
        factors = {name: factor for name, factor in learned.factors.items() if name != "memory"}
        before = {name: factor for name, factor in plain.factors.items() if name == "memory"}
        return plain.model_copy(update={"factors": {**before, **factors}})

    @cached_property
    def predicted(self) -> Prediction | None:
        """The prediction for the plan in force, calibrated by the recent steps."""
        return self._predict(self._facts.plan)

    @cached_property
    def usable_bytes(self) -> float | None:
        """Memory of a device that programs may use; None if it is unknown, and on CPUs, where processes share it."""
        if self._plain is None or self._plain.device.kind == "cpu" or "memory_bytes" in self._plain.device.assumed:
            return None
        return self._plain.device.usable_bytes

    @cached_property
    def faster(self) -> Alternative | None:
        """The fastest plan on the same devices, if it is enough faster to be worth a restart.

        It saves a tenth of each step, and over the remaining steps twice what a restart costs, the thresholds by which
        a run migrates (`plan.search.replan`). A run that has ended is judged as one that begins.
        """
        facts = self._facts
        if facts.run is None or facts.plan is None or self.machine is None or not facts.step_s > 0:
            return None
        run, plan, machine = facts.run.model_copy(update={"plan": "auto"}), facts.plan, self.machine
        found = _quietly(lambda: replan(run, plan, machine, plan.world_size))
        if found is None or found.plan == plan:
            return None
        other = self._alternative(found.plan, facts.step_s, found.spares)
        if other is None:
            return None
        left = facts.steps_in_all if facts.has_ended else facts.steps_left
        is_worth = worth_migrating(other.now_s, float(other.step_s.mid), 10**9 if left is None else left, REPLAN_S)
        return other if is_worth and float(other.step_s.high) < other.now_s else None

    def without(self, processes: int, times: float) -> Alternative | None:
        """Return the plan without so many processes, where one of their ranks takes `times` times as long as others.

        None if it would not be faster than waiting for that rank.
        """
        if (known := self._known()) is None:
            return None
        run, plan, machine = known
        left = plan.world_size - processes
        if left < 1:
            return None
        found = _quietly(lambda: replan(run, plan, resized(machine, left), left))
        slow_s = _quietly(lambda: step_with_slow_rank_s(run, plan, machine, times))
        if found is None or slow_s is None:
            return None
        return self._worthwhile(found, slow_s)

    def around_slow_link(self, times: float) -> Alternative | None:
        """Return the plan for links so slow that a step takes `times` times as long; None if none is faster."""
        if (known := self._known()) is None:
            return None
        run, plan, machine = known
        slow = _quietly(lambda: with_slow_link(run, plan, machine, times))
        found = None if slow is None else _quietly(lambda: replan(run, plan, slow, plan.world_size))
        if slow is None or found is None or found.plan == plan:
            return None
        return self._worthwhile(found, float(predict(plan, run, slow).step_s.mid))

    def _known(self) -> tuple[RunConfig, Plan, Cluster] | None:
        """Return the run with its plan left open, the plan, and the machine; None if one is unknown."""
        facts = self._facts
        if facts.run is None or facts.plan is None or self._plain is None or not facts.step_s > 0:
            return None
        return facts.run.model_copy(update={"plan": "auto"}), facts.plan, self._plain

    def _worthwhile(self, found: Replanned, now_s: float) -> Alternative | None:
        """Return a plan, where the present one is predicted to take `now_s` a step; None if it gains too little."""
        step_s = Estimate.exactly(self._facts.step_s * found.step_s / now_s)
        other = Alternative(found.plan, step_s, self._facts.step_s, 0.0, found.spares)
        return other if other.saves >= LEAST_GAIN else None

    def leaner(self, most_share: float, measured_bytes: float) -> Alternative | None:
        """Return the fastest plan that needs at most `most_share` of the device, judged by the measured memory."""
        facts, machine = self._facts, self.machine
        if facts.run is None or facts.plan is None or machine is None or self.usable_bytes is None:
            return None
        now = self._predict(facts.plan)
        if now is None:
            return None
        scale, run, plan = measured_bytes / float(now.memory_bytes.mid), facts.run, facts.plan
        costs = CostModel.of(run, machine).on(run, plan.world_size)
        found = _quietly(lambda: search_to_run(costs, {key: (getattr(plan, key),) for key in NUMERICS}))
        if found is None or not len(found):
            return None
        fits = found.memory_bytes * scale <= most_share * self.usable_bytes
        if not fits.any():
            return None
        rows = np.flatnonzero(fits)
        some = replace(found, plans=found.plans[rows], memory=found.memory.rows(rows), time=found.time.rows(rows))
        return self._alternative(some.plans.plan(plainest(some)), facts.step_s, 0)

    def elsewhere(self, plan: Plan, machine: Cluster) -> Alternative | None:
        """Return `plan` on another number of the run's machines, which `machine` has with the same factors."""
        return self._alternative(plan, self._facts.step_s, 0, machine)

    def _alternative(self, plan: Plan, now_s: float, spares: int, machine: Cluster | None = None) -> Alternative | None:
        old, new = self.predicted, self._predict(plan, machine)
        if old is None or new is None:
            return None
        mid = now_s * float(new.step_s.mid) / float(old.step_s.mid)
        step_s = Estimate.log_normal(mid, self._ratio_std(old, new))
        return Alternative(plan, step_s, now_s, float(new.memory_bytes.mid), spares)

    def _ratio_std(self, old: Prediction, new: Prediction) -> float:
        """Return the standard deviation of the logarithm of the ratio of two predictions.

        Each plan has an error of its own (RUN_STD). The error of a part of the step counts by how much more of the step
        that part is under one plan than under the other.
        """
        assert self.machine is not None and self._facts.run is not None
        unknown = time_std(self.machine, experts=self._facts.run.model.moe.experts > 0)
        errors = [RUN_STD, RUN_STD]
        for category, parts in OF_TIME.items():
            factor = self.machine.factors.get(category)
            std = unknown if factor is None else factor.std / factor.value
            errors += [std * (_share(new, part) - _share(old, part)) for part in parts]
        return math.hypot(*errors)

    def _predict(self, plan: Plan | None, elsewhere: Cluster | None = None) -> Prediction | None:
        run, machine = self._facts.run, elsewhere or self.machine
        if run is None or plan is None or machine is None:
            return None
        return _quietly(lambda: predict(plan, run, machine))

    @cached_property
    def _plain(self) -> Cluster | None:
        """The machine as the run found it; None if nobody described it and the catalogue does not know it."""
        facts = self._facts
        newest = self._hardware
        if newest is None or facts.run is None or facts.plan is None:
            return None
        run, size = facts.run, facts.plan.world_size
        try:
            known = {each.name: newest[each.name] for each in fields(DetectedHardware)}
            found = DetectedHardware(**{**known, "processes": size, "per_node": min(known["per_node"], size)})
        except (KeyError, TypeError):
            return None
        machine = _quietly(lambda: machine_at_hand(run, found))
        # The folder may be read on another machine than the run's, where a description says nothing about it.
        if machine is None or (facts.prediction and facts.prediction.cluster != (machine.name or str(machine.devices))):
            return None
        return priced(machine, run.observe.energy)

    @property
    def _hardware(self) -> dict[str, Any] | None:
        """The hardware that the newest start tells of."""
        told = (start["hardware"] for start in reversed(self._facts.starts) if "hardware" in start)
        return next(told, None)

    @cached_property
    def _raw(self) -> Prediction | None:
        facts, plain = self._facts, self._plain
        if facts.run is None or facts.plan is None or plain is None:
            return None
        run, plan, bare = facts.run, facts.plan, plain.model_copy(update={"factors": {}})
        return _quietly(lambda: predict(plan, run, bare))

    def _measured(self, raw: Prediction) -> Reconciled:
        plan = self._facts.plan
        assert plan is not None
        return reconcile(raw, plan, self._facts.typical, float(raw.memory_bytes.mid), with_reserve=True)


def _share(prediction: Prediction, part: str) -> float:
    return prediction.seconds.get(part, 0.0) / float(prediction.step_s.mid)


def _quietly(ask: Callable[[], AnswerT]) -> AnswerT | None:
    """Return the planner's answer; None if it has none, as for a run or a machine that it does not know."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ArgosyWarning)
            return ask()
    except (UserError, ValueError, ArithmeticError, LookupError):
        return None


LEAST_STEPS = 20
"""Recent steps that a rule about them wants to see."""


@dataclass(frozen=True)
class Advice:
    """One conclusion about a run."""

    rule: str
    """Name of the rule, as in docs/advice.md."""
    severity: Literal["warning", "info"]
    """warning: something is wrong; info: it could be better."""
    title: str
    """The conclusion in a few words."""
    evidence: str
    """The figures of this run that say so, and over which steps."""
    do: str
    """The remedy."""
    gain: str = ""
    """Gain of the remedy; empty where nobody can tell."""
    gain_share: float | None = None
    """Share of the run's time that it would save, 0 to 1."""
    plan: str = ""
    """The planner's better plan, for `--plan`."""
    steps: tuple[int, int] | None = None
    """First and last step of the evidence."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Numbers behind the sentences, for JSON."""


Rule = Callable[[RunFacts, Planner], Advice | None]
"""Returns None where it has nothing to say."""


def over(facts: RunFacts) -> str:
    """Say which steps were looked at."""
    first, last = facts.over
    return f"steps {first} to {last}"


def is_enough(facts: RunFacts) -> bool:
    """Return True if there are enough recent steps to conclude from."""
    return facts.recent_count >= LEAST_STEPS and facts.step_s > 0
