"""One round at one site: its own change made ready, its slice summed, the other slices fetched, the average whole."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from argosy.sync.sites.average import Reduced, Slices, reduce_slice
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Line
from argosy.sync.sites.messages import Message
from argosy.sync.sites.pull import Pull, Wanted

AGAIN_S = 0.5
"""How long after a peer did not have something it is asked again."""


@dataclass(frozen=True)
class Proposal:
    """The sites that take part in a round, as its leader says; a later attempt replaces an earlier one."""

    attempt: int
    names: tuple[str, ...]


class Assembly:
    """The average of one proposal, as far as this site has it."""

    def __init__(self, sites: Sites, number: int, proposal: Proposal, weights: Mapping[str, int], pool: Executor):
        """weights: tokens that each site trained on; those of the proposal if this site sums a slice."""
        self.proposal, self._sites, self._number, self._pool = proposal, sites, number, pool
        self.weights = [weights.get(name, 0) for name in proposal.names]
        self._wire = sites.wire_of(number)
        blocks = self._wire.blocks(sites.flat(number).elements)
        self.slices = Slices(blocks, self._wire.block_bytes, len(proposal.names))
        self.reduced: dict[int, Reduced] = {}
        """What is known of slices that were summed."""
        self._here: set[int] = set()
        self._pulls: dict[tuple[str, int | str], Pull] = {}
        self._not_before_s: dict[tuple[str, int | str], float] = {}
        self._work: Future[Reduced] | None = None
        self._not_at_owner: set[int] = set()
        """First bytes of slices that those who summed them have no more."""
        self.received_bytes = 0
        self.is_lost = False
        """True once a site that had the average has it no more: the whole state has to be taken over."""
        self.mine = proposal.names.index(sites.me) if sites.me in proposal.names else None
        """The slice that this site sums."""

    @property
    def is_whole(self) -> bool:
        """True once all slices are here, as they were summed."""
        return len(self._here) == self.slices.parts

    @property
    def products(self) -> list[list[float]]:
        """Inner products of the sites' changes; all slices must be known."""
        slices = [self.reduced[part].products for part in range(self.slices.parts)]
        total: list[list[float]] = np.asarray(slices).sum(axis=0).tolist()
        return total

    def tend(self, tell: Callable[..., None], connected: Callable[[str], bool], reduced: Callable[[int], None]) -> None:
        """Ask for what is missing. tell(site, kind, ...); reduced(part) is called when this site has summed its."""
        if self.mine is not None and self.mine not in self.reduced:
            self._reduce(self.mine, tell, connected, reduced)
        for part, facts in list(self.reduced.items()):
            owner = self.proposal.names[part]
            if part not in self._here and part != self.mine and connected(owner):
                self._fetch_slice(part, "slice", owner, facts.checksum, tell)

    def complete(
        self, line: Line, tell: Callable[..., None], connected: Callable[[str], bool], holder: str | None
    ) -> None:
        """Fetch what is missing of an average that is agreed on: from who summed it, or from `holder`, who has all."""
        for part, checksum in enumerate(line.sums):
            if part in self._here:
                continue
            owner = self.proposal.names[part]
            is_there = holder is None or self.slices.of(part)[0] not in self._not_at_owner
            if part in self.reduced and part != self.mine and connected(owner) and is_there:
                self._fetch_slice(part, "slice", owner, checksum, tell)
            elif holder is not None:
                self._fetch_slice(part, "average", holder, checksum, tell)

    def take(self, what: str, peer: str, start: int, at: int, data: bytes) -> None:
        """Take a piece that came."""
        for key, pull in self._pulls.items():
            if pull.peer == peer and pull.wanted.what == what and pull.wanted.start == start:
                before = pull.received
                pull.take(at, data)
                self.received_bytes += pull.received - before
                self._not_before_s.pop(key, None)
                return

    def gone(self, what: str, peer: str, start: int) -> None:
        """Note that the peer does not have it, or not yet."""
        for key, pull in self._pulls.items():
            if pull.peer == peer and pull.wanted.what == what and pull.wanted.start == start:
                pull.again()
                self.is_lost = self.is_lost or what == "average"
                if what == "slice":
                    self._not_at_owner.add(start)
                self._not_before_s[key] = time.monotonic() + AGAIN_S

    def connected_again(self, peer: str) -> None:
        """Ask that peer again for what has not come."""
        for pull in self._pulls.values():
            if pull.peer == peer:
                pull.again()

    def write(self, out: Path) -> None:
        """Write the whole average, under a name that is there once it is whole."""
        temporary = out.with_suffix(".partial")
        with temporary.open("wb") as file:
            for part in range(self.slices.parts):
                file.write(self._slice(part).read_bytes())
        temporary.replace(out)

    def abandon(self) -> None:
        """Let go of all files; they stay, and a transfer that is begun again goes on from them."""
        for pull in self._pulls.values():
            pull.close()
        self._pulls.clear()

    def hear_reduced(self, name: str, message: Message) -> None:
        """Note that a site has summed its slice."""
        part = int(message["part"])
        if message["attempt"] == self.proposal.attempt and self.proposal.names[part] == name:
            self.reduced[part] = Reduced(int(message["sum"]), [[float(x) for x in row] for row in message["products"]])

    def slice_file(self, attempt: int, start: int) -> tuple[Path, int] | None:
        """Return the file of the slice that this site has summed, if it begins at byte `start`, and that byte."""
        if self.mine is None or self.mine not in self.reduced or self.slices.of(self.mine)[0] != start:
            return None
        if attempt != self.proposal.attempt:
            return None
        return self._slice(self.mine), start

    def _reduce(
        self, mine: int, tell: Callable[..., None], connected: Callable[[str], bool], reduced: Callable[[int], None]
    ) -> None:
        first, _ = self.slices.of(mine)
        size = self.slices.size(mine)
        if self._work is not None:
            if self._work.done():
                self.reduced[mine] = self._work.result()
                self._here.add(mine)
                reduced(mine)
            return
        missing = not self._sites.sent(self._number).exists()  # its folder was lost: the ranks make it again
        paths: list[tuple[Path, int]] = []
        for name in self.proposal.names:
            if name == self._sites.me:
                paths.append((self._sites.sent(self._number), first))
                continue
            pull = self._pull(("sent", name), Wanted("sent", self._number, 0, first, size), name, self._part(name))
            paths.append((pull.path, 0))
            if not pull.is_done:
                missing = True
                if connected(name) and self._may_ask(("sent", name)):
                    pull.ask(partial(tell, name))
        if missing:
            return
        for key in [key for key in self._pulls if key[0] == "sent"]:
            self._pulls.pop(key).close()
        self._work = self._pool.submit(self._reduce_files, paths, size, self._slice(mine))

    def _reduce_files(self, paths: Sequence[tuple[Path, int]], size: int, out: Path) -> Reduced:
        parts = [np.fromfile(path, np.uint8, size, offset=at) for path, at in paths]
        return reduce_slice(parts, self.weights, self._wire, out)

    def _fetch_slice(self, part: int, what: str, peer: str, checksum: int, tell: Callable[..., None]) -> None:
        first, end = self.slices.of(part)
        wanted = Wanted(what, self._number, self.proposal.attempt, first, end - first)
        key = ("slice", part)
        if key in self._pulls and (self._pulls[key].peer, self._pulls[key].wanted.what) != (peer, what):
            self._pulls.pop(key).close()  # what came of it stays in the file
        pull = self._pull(key, wanted, peer, self._slice(part))
        if not pull.is_done:
            if self._may_ask(key):
                pull.ask(partial(tell, peer))
        elif pull.checksum() == checksum:
            self._pulls.pop(key).close()
            self._here.add(part)
        else:
            pull.forget()

    def _pull(self, key: tuple[str, int | str], wanted: Wanted, peer: str, path: Path) -> Pull:
        if key not in self._pulls:
            self._pulls[key] = Pull(wanted, peer, path)
        return self._pulls[key]

    def _may_ask(self, key: tuple[str, int | str]) -> bool:
        return time.monotonic() >= self._not_before_s.get(key, 0.0)

    def _part(self, name: str) -> Path:
        return self._temporary(f"part-{name}")

    def _slice(self, part: int) -> Path:
        return self._temporary(f"slice-{part}")

    def _temporary(self, what: str) -> Path:
        who = zlib.crc32(" ".join(self.proposal.names).encode())
        return self._sites.folder / f"round-{self._number:08d}-{self.proposal.attempt}-{who:08x}-{what}.bin"
