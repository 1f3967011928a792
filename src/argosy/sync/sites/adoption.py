"""Taking over the whole outer state from another site: weights and momentum, with the ledger that led to them.

A site needs that if it was away for longer than the others keep averages, if its folder was lost, or if it went on by
itself and otherwise than the others (with sync.quorum = 1, or as a leader that died before it told them). It asks a
site whose ranks then leave their state after the next outer step; once that has come, its own ranks go on from it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from argosy.files import atomic_write
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Ledger, Line
from argosy.sync.sites.messages import Message
from argosy.sync.sites.pull import Pull, Wanted

STALE_ROUNDS = 8
"""A state that is older is not offered again: averages since then may be gone."""
Tell = Callable[..., None]


class Adoption:
    """What an exchange does about it, for its own site and for others."""

    def __init__(self, sites: Sites, ledger: Ledger):
        self._sites, self._ledger = sites, ledger
        self._askers: set[str] = set()
        self._wanted_from: str | None = None
        self._pull: Pull | None = None
        self._checksum = 0
        self._lines: list[Line] = []

    @property
    def is_under_way(self) -> bool:
        """True while this site is to take over another's state."""
        return self._wanted_from is not None

    def begin(self, peer: str, tell: Tell) -> None:
        """Ask a site for its state."""
        self._wanted_from = peer
        tell(peer, "want_state")

    def again(self, tell: Tell) -> None:
        """Ask again, in case that what was said was lost."""
        if self._wanted_from is not None and self._pull is None:
            tell(self._wanted_from, "want_state")

    def check(self, is_alive: Callable[[str], bool]) -> None:
        """Give up a site that is gone."""
        if self._wanted_from is not None and not is_alive(self._wanted_from):
            self._drop()
            self._wanted_from = None

    def asked(self, name: str) -> None:
        """Have the ranks leave their state for another site."""
        self._askers.add(name)
        number = self._newest()
        if number is None or number + STALE_ROUNDS < len(self._ledger.lines):
            self._sites.want_state.touch()

    def offer(self, tell: Tell) -> None:
        """Tell those who asked of a state that is there."""
        number = self._newest()
        if not self._askers or number is None or number + STALE_ROUNDS < len(self._ledger.lines):
            return
        about = json.loads(self._sites.state_about(number).read_bytes())
        lines = [line.to_json() for line in self._ledger.lines[: number + 1]]
        for name in self._askers:
            tell(name, "state", round=number, size=about["bytes"], sum=about["sum"], lines=len(lines))
            for line in lines:
                tell(name, "state_line", line=line)
        self._askers.clear()

    def hear(self, name: str, message: Message) -> None:
        """Hear of a state that was asked for, of its ledger, or a piece of it."""
        if name != self._wanted_from:
            return
        if message["kind"] == "state":
            self._drop()
            number, self._checksum, self._lines = int(message["round"]), int(message["sum"]), []
            wanted = Wanted("state", number, 0, 0, int(message["size"]))
            path = self._sites.folder / f"taken-{number:08d}-{self._checksum:08x}.bin"
            self._pull = Pull(wanted, name, path)
        elif message["kind"] == "state_line":
            self._lines.append(Line.from_json(message["line"]))
        elif self._pull is not None and message["kind"] == "data":
            self._pull.take(int(message["at"]), message["data"])
        elif self._pull is not None and message["kind"] == "gone":
            self._drop()
            self._wanted_from = None

    def connected_again(self, name: str) -> None:
        """Ask that site again for what has not come."""
        if self._pull is not None and self._pull.peer == name:
            self._pull.again()

    def tend(self, tell: Tell) -> bool:
        """Ask for what is missing. Returns True once the state is taken over, and the ledger with it."""
        pull = self._pull
        if pull is None:
            return False
        if not pull.is_done:
            pull.ask(partial(tell, pull.peer))
            return False
        number = pull.wanted.round
        if len(self._lines) <= number:
            return False
        if pull.checksum() != self._checksum or not _is_chain(self._lines):
            pull.forget()
            return False
        self._take_over(pull, number)
        return True

    def _take_over(self, pull: Pull, number: int) -> None:
        """Leave the state for the ranks, and take the ledger that led to it for this site's."""
        pull.path.replace(self._sites.adopted)
        with atomic_write(self._sites.adoption) as file:
            file.write(json.dumps({"rounds": number + 1, "chain": self._lines[number].chain}).encode())
        self._ledger.replace(self._lines[: number + 1])
        self._sites.lost.unlink(missing_ok=True)
        self._drop()
        self._wanted_from = None

    def _drop(self) -> None:
        if self._pull is not None:
            self._pull.close()
        self._pull = None

    def _newest(self) -> int | None:
        """Return the round after which the ranks left their state last."""
        found: list[int] = []
        for path in self._sites.folder.glob("state-*.json"):
            with suppress(ValueError):
                found.append(int(path.stem.partition("-")[2]))
        return max(found, default=None)


def fork_of(mine: Sequence[Line], theirs: Sequence[dict[str, Any]]) -> int | None:
    """Return the first round that two ledgers disagree about; None if one begins with the other."""
    return next(
        (number for number, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one.chain != other["chain"]),
        None,
    )


def gives_way(mine: Line, theirs: dict[str, Any], names: Sequence[str]) -> bool:
    """Return True if the site with the line `mine` gives way to the one that has `theirs` of the same round.

    More sites count more; among as many, those with the earliest site of the run file.
    """
    ours, others = list(mine.tokens), list(theirs["names"])
    if len(ours) != len(others):
        return len(ours) < len(others)
    return [names.index(name) for name in sorted(ours, key=names.index)] > [
        names.index(name) for name in sorted(others, key=names.index)
    ]


def summary(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return what `fork_of` and `gives_way` need of a ledger."""
    return [{"chain": line.chain, "names": list(line.tokens)} for line in lines]


def checksum_of(data: bytes) -> int:
    """Return the checksum of a state."""
    return zlib.crc32(data)


def _is_chain(lines: Sequence[Line]) -> bool:
    before = ""
    for number, line in enumerate(lines):
        if line.round != number or line.chained(before) != line.chain:
            return False
        before = line.chain
    return True
