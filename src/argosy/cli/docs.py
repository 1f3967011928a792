"""Print the manual of the installed version, page by page; or write the skill for coding agents.

Examples:
  argosy docs                                    the pages that there are
  argosy docs planning                           one of them
  argosy docs --skill > SKILL.md                 how an agent plans, starts, watches and mends runs
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from argosy.cli.options import parse


@dataclass(frozen=True)
class Options:
    """Options of `argosy docs`."""

    topic: Annotated[str, tyro.conf.Positional] = ""
    """The page; without it, all are listed."""
    skill: bool = False
    """Print the skill for coding agents."""
    json: bool = False
    """Print JSON."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy docs", Options)
    from argosy.watch import manual

    topic = manual.SKILL if options.skill else options.topic
    found = manual.page(topic) if topic else manual.topics()
    if options.json:
        print(json.dumps({"topic": topic, "text": found} if topic else found))
    else:
        print(found.rstrip() if isinstance(found, str) else "\n".join(found))
