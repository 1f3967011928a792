"""What a rule says: a conclusion, the figures behind it, what to do, and what that would bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from argosy.watch.facts import RunFacts
from argosy.watch.rules.planner import Planner

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
    """What is so, in a few words."""
    evidence: str
    """The figures of this run that say so, and over which steps."""
    do: str
    """What to do about it."""
    gain: str = ""
    """What that would bring; empty where nobody can tell."""
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
