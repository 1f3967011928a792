"""Taking over the whole outer state from another site: weights and momentum, with the ledger that led to them.

A site needs that if it was away for longer than the others keep averages, if its folder was lost, or if it gives way
to a site from which it has gone apart (`standing`). It asks a site whose ranks then leave their state after the next
outer step; once that and the ledger have come, its own ranks go on from them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from argosy.files import atomic_write
from argosy.processes.messages import BadMessage, WireRecord
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Line, RoundLedger, checked_line, is_next
from argosy.sync.sites.messages import FilePiece, NotThere, Source, StateOffer, StateRequest
from argosy.sync.sites.pull import PulledFile, Wanted

Tell = Callable[[str, WireRecord], None]
"""Sends a site a message."""


class Adoption:
    """What an exchange does about it, for its own site and for others."""

    def __init__(self, sites: Sites, ledger: RoundLedger):
        self._sites, self._ledger = sites, ledger
        self._askers: set[str] = set()
        self._wanted_from: str | None = None
        self._pulls: list[PulledFile] = []
        """The transfer of the state, then that of the ledger."""
        self._checksum = 0

    @property
    def is_under_way(self) -> bool:
        """True while this site is to take over another's state."""
        return self._wanted_from is not None

    def begin(self, peer: str, tell: Tell) -> None:
        """Ask a site for its state."""
        self._wanted_from = peer
        tell(peer, StateRequest())

    def again(self, tell: Tell) -> None:
        """Ask again, in case that what was said was lost."""
        if self._wanted_from is not None and not self._pulls:
            tell(self._wanted_from, StateRequest())

    def check(self, is_alive: Callable[[str], bool]) -> None:
        """Give up a site that is gone."""
        if self._wanted_from is not None and not is_alive(self._wanted_from):
            self._drop()
            self._wanted_from = None

    def asked(self, name: str) -> None:
        """Have the ranks leave their state for another site."""
        self._askers.add(name)
        if self._newest() is None:
            self._sites.want_state.touch()

    def offer(self, tell: Tell) -> None:
        """Tell those who asked of a state that is there."""
        number = self._newest() if self._askers else None
        if number is None:
            return
        about = json.loads(self._sites.state_about(number).read_bytes())
        size = self._ledger.size_of(number + 1)
        for name in self._askers:
            tell(name, StateOffer(round=number, size=about["bytes"], sum=about["sum"], ledger_size=size))
        self._askers.clear()

    def hear(self, name: str, message: StateOffer | FilePiece | NotThere, data: bytes) -> None:
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
                    self._pulls.append(PulledFile(Wanted(what, number, 0, 0, size), name, path))
            case FilePiece():
                for pull in self._pulls:
                    if (pull.wanted.what, pull.wanted.round) == (message.what, message.round):
                        pull.take(message.at, data)
            case NotThere():
                self._drop()

    def connected_again(self, name: str) -> None:
        """Ask that site again for what has not come."""
        for pull in self._pulls:
            if pull.peer == name:
                pull.again()

    def tend(self, tell: Tell) -> bool:
        """Ask for what is missing. Returns True once the state is taken over, and the ledger with it."""
        for pull in self._pulls:
            pull.ask(partial(tell, pull.peer))
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
        with atomic_write(self._sites.adoption) as file:
            file.write(json.dumps({"rounds": len(lines), "chain": lines[-1].chain}).encode())
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


def checksum_of(data: bytes) -> int:
    """Return the checksum of a state."""
    return zlib.crc32(data)
