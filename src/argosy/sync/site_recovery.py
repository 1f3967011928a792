"""Recovery of a site that cannot go on from its own files: it takes what it lacks, or has otherwise, from other sites.

It adopts another site's whole state (weights and momentum, with the ledger that led to them) if it was away for longer
than the others keep averages, if its folder was lost, or if it gives way to a site from which it has gone apart. It
asks a site whose ranks then leave their state after the next outer step; once that and the ledger have come, its own
ranks go on from them. Meanwhile it takes part in no round.

A damaged line of its ledger is taken from another site, which has the same one; lines after it are its own again, as
far as they go with it. A line that another site told is taken only if the average in this site's folder is the one that
it is about: the ranks have gone on from that average, and sites that decided the round otherwise, without this one,
have gone on from theirs. Then their state is adopted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from argosy.observe.events import Events
from argosy.processes.connection import BadMessage, WireRecord
from argosy.sync import messages as say
from argosy.sync.assembly import PulledFile, WantedBytes
from argosy.sync.average import has_average
from argosy.sync.layout import AdoptedState, LeftState, Sites, read_record, write_record
from argosy.sync.ledger import Line, RoundLedger, chain_of, checked_line, is_next
from argosy.sync.links import Links, PeerTable
from argosy.sync.messages import (
    BytesMissing,
    FilePiece,
    LineRequest,
    SiteProgress,
    Source,
    StateOffer,
    StateRequest,
    gives_way,
)

LINE_REQUEST_S = 1.0
"""Seconds between two requests for a line."""


Tell = Callable[[str, WireRecord], None]
"""Sends a site a message."""


class Adoption:
    """Adoption of another site's state, and offers of this one's."""

    def __init__(self, sites: Sites, ledger: RoundLedger, tell: Tell):
        self._sites, self._ledger, self._tell = sites, ledger, tell
        self._askers: set[str] = set()
        self._wanted_from: str | None = None
        self._pulls: list[PulledFile] = []
        """The transfer of the state, then that of the ledger."""
        self._checksum = 0

    @property
    def is_under_way(self) -> bool:
        return self._wanted_from is not None

    def begin(self, peer: str) -> None:
        """Ask a site for its state."""
        self._wanted_from = peer
        self._tell(peer, StateRequest())

    def again(self) -> None:
        """Ask again, in case that what was said was lost."""
        if self._wanted_from is not None and not self._pulls:
            self._tell(self._wanted_from, StateRequest())

    def check(self, is_alive: Callable[[str], bool]) -> None:
        if self._wanted_from is not None and not is_alive(self._wanted_from):
            self._drop()
            self._wanted_from = None

    def asked(self, name: str) -> None:
        """Have the ranks leave their state for another site."""
        self._askers.add(name)
        if self._newest() is None:
            self._sites.want_state.touch()

    def offer(self) -> None:
        """Offer a state that is there to the sites that asked."""
        number = self._newest() if self._askers else None
        if number is None:
            return
        about = read_record(self._sites.state_about(number), LeftState)
        size = self._ledger.size_of(number + 1)
        for name in self._askers:
            self._tell(name, StateOffer(round=number, size=about.bytes, sum=about.sum, ledger_size=size))
        self._askers.clear()

    def hear(self, name: str, message: StateOffer | FilePiece | BytesMissing, data: bytes) -> None:
        """Hear of a state that was asked for, or a piece of it or of its ledger."""
        if name != self._wanted_from:
            return
        match message:
            case StateOffer():
                self._drop()
                number, self._checksum = message.round, message.sum
                wanted: dict[Source, int] = {"state": message.size, "ledger": message.ledger_size}
                for what, size in wanted.items():
                    path = self._sites.folder / f"taken-{number:08d}-{self._checksum:08x}-{name}-{what}.bin"
                    self._pulls.append(PulledFile(WantedBytes(what, number, 0, 0, size), name, path))
            case FilePiece():
                for pull in self._pulls:
                    if (pull.wanted.what, pull.wanted.round) == (message.what, message.round):
                        pull.take(message.at, data)
            case BytesMissing():
                self._drop()

    def connected_again(self, name: str) -> None:
        """Ask that site again for what has not come."""
        for pull in self._pulls:
            if pull.peer == name:
                pull.again()

    def tend(self) -> bool:
        """Ask for what is missing. Returns True once the state is taken over, and the ledger with it."""
        for pull in self._pulls:
            pull.ask(partial(self._tell, pull.peer))
        if not self._pulls or not all(pull.is_done for pull in self._pulls):
            return False
        state, ledger = self._pulls
        lines = self._lines_of(ledger.content())
        if state.checksum() != self._checksum or lines is None or len(lines) != state.wanted.round + 1:
            state.forget()
            ledger.forget()
            self._drop()  # what was said of it may be wrong too: it is asked for anew
            return False
        self._take_over(state, lines)
        return True

    def _take_over(self, pull: PulledFile, lines: list[Line]) -> None:
        """Leave the state for the ranks, and take the ledger that led to it for this site's."""
        pull.move(self._sites.adopted)
        write_record(self._sites.adoption, AdoptedState(rounds=len(lines), chain=lines[-1].chain))
        self._ledger.replace(lines)
        self._sites.lost.unlink(missing_ok=True)
        self._drop()
        self._wanted_from = None
        for path in self._sites.folder.glob("taken-*"):
            path.unlink()

    def _lines_of(self, ledger: bytes) -> list[Line] | None:
        """Return the lines of a ledger, None if they are not each the next of the one before."""
        lines: list[Line] = []
        for text in ledger.split(b"\n")[:-1]:
            try:
                line = checked_line(lines, text)
            except BadMessage:
                return None
            if not is_next(self._sites.shares, lines, line):
                return None
            lines.append(line)
        return lines

    def _drop(self) -> None:
        for pull in self._pulls:
            pull.close()
        self._pulls = []

    def _newest(self) -> int | None:
        """Return the round after which the ranks left their state last, if all averages since are here."""
        found: list[int] = []
        for path in self._sites.folder.glob("state-*.json"):
            with suppress(ValueError):
                found.append(int(path.stem.partition("-")[2]))
        rounds, sites = len(self._ledger.lines), self._sites
        fresh = (n for n in found if n == rounds - 1 or (n < rounds and sites.average(n + 1).exists()))
        return max(fresh, default=None)


class LedgerRepair:
    """Mending of a site's own ledger. While it is under way the site takes part in no round."""

    def __init__(self, sites: Sites, ledger: RoundLedger, events: Events, tell: Tell):
        self._sites, self._ledger, self._events, self._tell = sites, ledger, events, tell
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

    def tend(self, holder: str | None) -> bool:
        """Ask `holder`, which has it, for the missing line. Returns True once the ledger is whole."""
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
        if holder is not None and now - self._asked_s > LINE_REQUEST_S:
            self._asked_s = now
            self._tell(holder, LineRequest(round=self.wanted))
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
        self._rounds = max(self._sites.reached_round(), self.wanted + 1, *(number + 1 for number in self._own), 0)
        self._is_told, self._is_said, self._began_s = False, False, time.monotonic()
        self._events.write("ledger_damaged", problem=self._damage)
        print(f"argosy: site {self._sites.me}: {self._damage}; it is taken from another site", flush=True)


class SiteRecovery:
    """Recovery of this site's state and ledger, and help for other sites that need a state."""

    def __init__(
        self, sites: Sites, ledger: RoundLedger, events: Events, links: Links[say.FromSite], others: PeerTable
    ):
        self._sites, self._ledger, self._events, self._links, self._others = sites, ledger, events, links, others
        self.adoption = Adoption(sites, ledger, links.tell)
        self._mending = LedgerRepair(sites, ledger, events, links.tell)

    @property
    def is_under_way(self) -> bool:
        """True while this site decides nothing."""
        return self.adoption.is_under_way or self._mending.is_under_way

    def standing(self) -> SiteProgress:
        lines, tokens, reached = self._ledger.lines, self._ledger.tokens, self._sites.reached_round()
        return SiteProgress(
            rounds=len(lines), chain=chain_of(lines), tokens=tokens, reached=reached, adopts=self.is_under_way,
            connected=tuple(self._links.sites),
        )  # fmt: skip

    def tend(self) -> bool:
        """Do what can be done now. Returns True once the ledger is another, or whole again."""
        self._mending.look()
        if not self._mending.is_under_way:
            self.adoption.offer()
        self.adoption.check(self._others.is_alive)
        is_lost = self._sites.lost.exists() or self._mending.is_of_others
        if is_lost and self._links.sites and not self.adoption.is_under_way:
            self.adopt_from(max(self._links.sites, key=lambda name: self._others.standing(name).rounds))
        if self.adoption.is_under_way:
            if not self.adoption.tend():
                return False
            self._events.write("state_taken", rounds=len(self._ledger.lines))
            self._others.apart.clear()
            return True
        return self._mending.is_under_way and self._mending.tend(self._others.holder(self._mending.wanted))

    def hear_line(self, name: str, line: Line) -> None:
        """Hear a line of another site's ledger, for one of this site's that is damaged."""
        if self._mending.is_under_way and not self._mending.hear(line):
            self.went_apart(name)

    def went_apart(self, name: str) -> None:
        """Give way to a site that has gone on without this one and otherwise, or leave that to it."""
        self._others.apart.add(name)
        mine, its = self.standing(), self._others.standing(name)
        if not self.adoption.is_under_way and gives_way(self._sites.me, mine, name, its, self._sites.names):
            self._events.write("site_gives_way", site=name, rounds=mine.rounds, its_rounds=its.rounds)
            self.adopt_from(name)

    def adopt_from(self, name: str) -> None:
        self.adoption.begin(name)
        self._links.tell_all(say.ProgressNotice(standing=self.standing()))
