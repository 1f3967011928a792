"""The conclusions of a run's page: advice by rules that state their evidence, forecast, and alerts.

They are drawn anew only when the folder tells more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from argosy.watch.alerts import Alert, standing
from argosy.watch.facts import RunFacts
from argosy.watch.forecast import Forecast, forecast
from argosy.watch.gather import facts_of
from argosy.watch.reader import RunReader
from argosy.watch.rules import learning, memory, ranks, reliability, times
from argosy.watch.rules.planner import Planner
from argosy.watch.rules.ranks import slow_ranks
from argosy.watch.rules.rule import Advice, Rule

RULES: tuple[Rule, ...] = (
    ranks.straggler,
    ranks.slow_link,
    ranks.throttled_device,
    reliability.lost_ranks,
    learning.bad_steps,
    learning.growing_gradients,
    learning.learning_rate_ended,
    learning.overfits,
    learning.skewed_experts,
    memory.memory_near_limit,
    times.waiting_for_data,
    times.exposed_communication,
    times.pipeline_bubble,
    memory.memory_left_over,
    times.recompiles,
    times.slower_than_planned,
    times.idle_devices,
    times.evaluation_share,
    reliability.checkpoint_stalls,
    reliability.checkpoint_interval,
    reliability.low_goodput,
    times.faster_plan,
)
"""All rules. Of those that name the same better plan, the first says it: it knows why."""


def advise(facts: RunFacts, planner: Planner | None = None, rules: Sequence[Rule] = RULES) -> tuple[Advice, ...]:
    """Return what the rules say, warnings first, and of these what costs most first."""
    planner = planner or Planner(facts)
    said: list[Advice] = []
    for rule in rules:
        advice = rule(facts, planner)
        if advice is not None and not _is_said(advice, said):
            said.append(advice)
    return tuple(sorted(said, key=lambda each: (each.severity != "warning", -(each.gain_share or 0.0))))


def _is_said(advice: Advice, said: Sequence[Advice]) -> bool:
    """Return True if another rule has said the same with its reason."""
    names = {each.rule for each in said}
    if advice.plan and advice.severity == "info":
        return any(each.plan == advice.plan for each in said)
    if advice.rule == "checkpoint_interval":
        return "checkpoint_stalls" in names
    # A slow rank makes the others wait, and makes steps longer than planned.
    return advice.rule in ("exposed_communication", "slower_than_planned") and "straggler" in names


AnswerT = TypeVar("AnswerT")

LATEST_S = 5.0
"""Conclusions of a run that goes on are at most so old; who asks more often gets the same again."""


@dataclass
class _Kept:
    """The conclusions of one reader."""

    version: Hashable
    made_s: float
    facts: RunFacts
    planner: Planner
    answers: dict[str, Any] = field(default_factory=dict)


_KEPT: WeakKeyDictionary[RunReader, _Kept] = WeakKeyDictionary()


def advice_of(reader: RunReader) -> tuple[Advice, ...]:
    """Return advice on the run as of the reader's last `refresh`, the most important first."""
    return _answer(reader, "advice", lambda kept: advise(kept.facts, kept.planner))


def slow_ranks_of(reader: RunReader) -> tuple[dict[int, float], tuple[int, int]]:
    """Return rank -> how many times its peers' time it takes, for ranks that are slow now; and the steps that tell."""

    def conclude(kept: _Kept) -> tuple[dict[int, float], tuple[int, int]]:
        slow, ranks = slow_ranks(kept.facts), kept.facts.ranks
        return slow, (int(ranks.steps[0]), int(ranks.steps[-1])) if slow and ranks is not None else (0, 0)

    return _answer(reader, "slow ranks", conclude)


def forecast_of(reader: RunReader) -> Forecast | None:
    """Return the forecast of the run's end and cost; None if it has ended, or it is too early to tell."""
    return _answer(reader, "forecast", lambda kept: forecast(kept.facts, kept.planner))


def alerts_of(reader: RunReader) -> list[Alert]:
    """Return the alerts that its events tell of, and those that hold now, the newest first."""
    return _answer(reader, "alerts", lambda kept: standing(kept.facts))


def _answer(reader: RunReader, name: str, conclude: Callable[[_Kept], AnswerT]) -> AnswerT:
    kept = _kept(reader)
    if name not in kept.answers:
        kept.answers[name] = conclude(kept)
    answer: AnswerT = kept.answers[name]
    return answer


def _kept(reader: RunReader) -> _Kept:
    """Return what is kept of the reader, or a new beginning if the run has said more since, or time tells more."""
    now_s, kept = time.monotonic(), _KEPT.get(reader)
    version = (len(reader.steps), len(reader.events), reader.alive_s, reader.state, str(reader.plan))
    is_fresh = kept is not None and now_s - kept.made_s < LATEST_S
    is_final = kept is not None and kept.version == version and kept.facts.has_ended
    if kept is None or not (is_fresh or is_final):
        facts = facts_of(reader)
        kept = _KEPT[reader] = _Kept(version, now_s, facts, Planner(facts))
    return kept
