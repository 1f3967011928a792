"""A rule that plans must keep: when it is broken, for one plan or for columns of plans, and what is said then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from argosy.config.schema import RunConfig
from argosy.plan.plan import Plan

Plans = Any
"""A `Plan` or `Layouts`: both have these columns, as numbers or arrays. mypy cannot type arithmetic on that union."""
Breaks = Callable[[Plans, RunConfig], Any]
"""Returns True, or a mask of plans, where a rule is broken; only arithmetic and & | ~, so that it serves both."""


class Rule:
    """A rule. Called with a plan and a run, it returns None, or an explanation of how the plan breaks the rule."""

    def __init__(self, breaks: Breaks, words: Callable[[Plan, RunConfig], str]):
        self.breaks, self.words, self.__name__ = breaks, words, words.__name__

    def __call__(self, plan: Plan, run: RunConfig) -> str | None:
        return self.words(plan, run) if self.breaks(plan, run) else None


def rule(breaks: Breaks) -> Callable[[Callable[[Plan, RunConfig], str]], Rule]:
    """Make a rule of `breaks` and the decorated function, which explains a plan that breaks it."""
    return lambda words: Rule(breaks, words)
