"""What is concluded from a run's folder: advice, forecast, alerts. Computed anew only when the folder tells more."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from argosy.watch.advice import advise
from argosy.watch.alerts import Alert, standing
from argosy.watch.facts import Facts
from argosy.watch.forecast import Forecast, forecast
from argosy.watch.gather import facts_of
from argosy.watch.reader import RunReader
from argosy.watch.rules.planner import Planner
from argosy.watch.rules.ranks import slow_ranks
from argosy.watch.rules.rule import Advice

AnswerT = TypeVar("AnswerT")

LATEST_S = 5.0
"""Conclusions of a run that goes on are at most so old; who asks more often gets the same again."""


@dataclass
class _Kept:
    """The conclusions of one reader."""

    version: Hashable
    made_s: float
    facts: Facts
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
