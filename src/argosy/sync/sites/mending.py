"""Mending a ledger with a line that is not what was written: it is taken from another site, which has the same one.

Lines after it are this site's own again, as far as they go with it. A line that another site told is taken only if the
average in this site's folder is the one that it is about: the ranks have gone on from that average, and sites that
decided the round otherwise, without this one, have gone on from theirs. Then their state is taken over (`adoption`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from argosy.observe.events import Events
from argosy.processes.messages import WireRecord
from argosy.sync.sites.average import has_average
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Ledger, Line, chain_of, is_next
from argosy.sync.sites.messages import LineRequest

ASK_S = 1.0
"""How often a line is asked for."""


class Mending:
    """What an exchange does about its own ledger. While it is under way the site takes part in no round."""

    def __init__(self, sites: Sites, ledger: Ledger, events: Events):
        self._sites, self._ledger, self._events = sites, ledger, events
        self._damage = ""
        self._lines: list[Line] = []
        self._own: dict[int, Line] = {}
        self._rounds = 0
        self._is_told = False
        self._began_s = self._asked_s = 0.0
        self._is_said = False
        self._begin()

    @property
    def is_under_way(self) -> bool:
        """True while lines are missing."""
        return bool(self._ledger.damage)

    @property
    def wanted(self) -> int:
        """The round of the next line that is missing."""
        return len(self._lines)

    @property
    def is_of_others(self) -> bool:
        """True if the others made the round without this site and otherwise: their state has to be taken over."""
        is_theirs = self.is_under_way and self._is_whole and self._is_told
        return is_theirs and not has_average(self._sites, self._lines[-1])

    @property
    def _is_whole(self) -> bool:
        return len(self._lines) >= self._rounds

    def look(self) -> None:
        """Read the ledger again if the ranks have found damage in it. What this process has read is written anew."""
        if self.is_under_way or not self._sites.damaged.exists():
            return
        self._sites.damaged.unlink(missing_ok=True)
        lines = list(self._ledger.lines)
        self._ledger.read_again()
        if not self._ledger.damage:
            return
        if len(lines) >= self._ledger.rounds:
            self._events.write("ledger_mended", problem=self._ledger.damage, rounds=len(lines))
            self._ledger.replace(lines)
        else:
            self._begin()

    def tend(self, tell: Callable[[str, WireRecord], None], holder: str | None) -> bool:
        """Ask `holder`, who has it, for the line that is missing. Returns True once the ledger is whole."""
        while (own := self._own.get(self.wanted)) is not None and own.chained(chain_of(self._lines)) == own.chain:
            self._lines.append(own)
            self._is_told = False
        if self._is_whole:
            if self.is_of_others:
                return False
            self._ledger.replace(self._lines)
            self._sites.damaged.unlink(missing_ok=True)
            self._events.write("ledger_mended", problem=self._damage, rounds=len(self._lines))
            print(f"argosy: site {self._sites.me}: {self._ledger.path} is whole again", flush=True)
            return True
        now = time.monotonic()
        if holder is not None and now - self._asked_s > ASK_S:
            self._asked_s = now
            tell(holder, LineRequest(round=self.wanted))
        if not self._is_said and now - self._began_s > self._sites.run.sync.patience_s:
            self._is_said = True
            print(
                f"argosy: site {self._sites.me}: {self._damage}, and no other site that is connected has it. The site "
                "waits for one that has. If there is none, stop this site, and put a copy of the file in its place; or "
                f"move the folder {self._ledger.path.parent} away: the site then takes another one's state.",
                flush=True,
            )
        return False

    def hear(self, line: Line) -> bool:
        """Take a line that another site tells. Returns False if it is of another ledger."""
        if line.round != self.wanted or self._is_whole:
            return True
        if not is_next(self._sites.shares, self._lines, line):
            return False
        self._lines.append(line)
        self._is_told = True
        self._asked_s = 0.0
        return True

    def _begin(self) -> None:
        self._damage, self._own = self._ledger.damage, self._ledger.beyond_damage()
        self._lines = list(self._ledger.lines)
        if not self._damage:
            return
        reached = 0
        with suppress(OSError, ValueError):
            reached = int(self._sites.reached.read_text())
        self._rounds = max(reached, self.wanted + 1, *(number + 1 for number in self._own), 0)
        self._is_told, self._is_said, self._began_s = False, False, time.monotonic()
        self._events.write("ledger_damaged", problem=self._damage)
        print(f"argosy: site {self._sites.me}: {self._damage}; it is taken from another site", flush=True)
