"""Print the manual of the installed version, page by page; or write the skill for coding agents.

Examples:
  argosy docs                                    the pages that there are
  argosy docs planning                           one of them
  argosy docs --skill > SKILL.md                 how an agent plans, starts, watches and mends runs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from argosy.cli.documents import answer
from argosy.cli.options import PrintJson, parse


@dataclass(frozen=True)
class Options:
    topic: Annotated[str, tyro.conf.Positional] = ""
    """The page; without it, all are listed."""
    skill: bool = False
    """Print the skill for coding agents."""
    json: PrintJson = False


@dataclass(frozen=True)
class ManualPage:
    """A page of the manual."""

    topic: str
    text: str
    """Markdown."""


@dataclass(frozen=True)
class ManualTopics:
    """The pages of the manual."""

    topics: list[str]


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy docs", Options)
    from argosy.watch import manual

    topic = manual.SKILL if options.skill else options.topic
    if not topic:
        topics = manual.topics()
        answer(options.json, "docs-topics", "\n".join(topics), ManualTopics(topics))
        return
    page = ManualPage(topic, manual.page(topic))
    answer(options.json, "docs", page.text.rstrip(), page)
