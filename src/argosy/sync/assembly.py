"""Assembly of a round's average at one site: fetch slices of the changes, sum them, fetch the slices of the others.

`PulledFile` fetches a file, or a part of one, from another site: in pieces, several under way, from where it broke off.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from argosy.files import atomic_write, sync
from argosy.processes.connection import WireRecord
from argosy.sync.average import SummedSlice, reduce_slice, slices_of
from argosy.sync.layout import Sites
from argosy.sync.ledger import Line
from argosy.sync.links import Links
from argosy.sync.messages import (
    AHEAD_BYTES,
    MESSAGE_PIECE_BYTES,
    BytesMissing,
    FilePiece,
    FromSite,
    PieceRequest,
    SliceSummed,
    Source,
)

Transfer = tuple[str, int, str]
"""The data to fetch: "sent", a slice of the change of a site, which is named; or "slice", one of the average."""
ASK_AGAIN_S = 0.5
"""Seconds after which a peer that did not have something is asked again."""


@dataclass(frozen=True)
class WantedBytes:
    """Bytes that another site has."""

    what: Source
    round: int
    attempt: int
    start: int
    """First byte within the whole."""
    size: int


class PulledFile:
    """One such transfer. What has come is in a file, which another process of the exchange goes on with."""

    def __init__(self, wanted: WantedBytes, peer: str, path: Path):
        self.wanted, self.peer, self.path = wanted, peer, path
        self._file = path.open("a+b")
        self.received = min(self._file.seek(0, os.SEEK_END), wanted.size)
        self._file.truncate(self.received)
        self._asked = self.received

    @property
    def is_done(self) -> bool:
        """True once all has come."""
        return self.received >= self.wanted.size

    def again(self) -> None:
        """Ask again for what has not come: the connection broke."""
        self._asked = self.received

    @property
    def under_way(self) -> int:
        """Bytes that were asked for and have not come."""
        return self._asked - self.received

    def ask(self, send: Callable[[WireRecord], None], others: int = 0) -> None:
        """Ask for as much as may be under way. others: bytes of other transfers that are."""
        of = self.wanted
        while self._asked < self.wanted.size and self.under_way + others < AHEAD_BYTES:
            size = min(MESSAGE_PIECE_BYTES, self.wanted.size - self._asked)
            send(PieceRequest(
                what=of.what, round=of.round, attempt=of.attempt, start=of.start, at=self._asked, bytes=size
            ))  # fmt: skip
            self._asked += size

    def take(self, at: int, data: bytes) -> None:
        """Keep a piece; one that is not the next is left out."""
        if at == self.received and len(data) <= self.wanted.size - at:
            self._file.write(data)
            self.received += len(data)
            if self.is_done:
                self._file.flush()

    def checksum(self) -> int:
        """Return the CRC-32 of all that came."""
        return zlib.crc32(self.content())

    def content(self) -> bytes:
        self._file.flush()
        return self.path.read_bytes()

    def move(self, path: Path) -> None:
        """Give the file, all of which is on the disk then, another name."""
        sync(self._file)
        self.path.replace(path)

    def close(self) -> None:
        self._file.close()

    def forget(self) -> None:
        """Begin anew: what came was not what was sent."""
        self._file.truncate(0)
        self._file.seek(0)
        self.received = self._asked = 0


def read_piece(path: Path, at: int, size: int) -> bytes | None:
    """Return `size` bytes of a file, from byte `at` on; None if it is not there, or ends before them."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            data = file.read(size)
    except OSError:
        return None
    return data if len(data) == size else None


@dataclass(frozen=True)
class Proposal:
    """The sites that take part in a round, as its leader says; a later attempt replaces an earlier one."""

    attempt: int
    names: tuple[str, ...]


class Assembly:
    """The average of one proposal, as far as this site has it."""

    def __init__(
        self,
        sites: Sites,
        number: int,
        proposal: Proposal,
        weights: Mapping[str, int],
        links: Links[FromSite],
        pool: Executor,
    ):
        """weights: tokens that each site trained on; those of the proposal if this site sums slices."""
        self.proposal, self._sites, self._number = proposal, sites, number
        self._links, self._pool = links, pool
        self.weights = [weights.get(name, 0) for name in proposal.names]
        self._wire = sites.wire_of(number)
        self.slices = slices_of(sites, number, len(proposal.names))
        self.reduced: dict[int, SummedSlice] = {}
        """Facts of the slices that were summed."""
        self._here: set[int] = set()
        self._pulls: dict[Transfer, PulledFile] = {}
        self._not_before_s: dict[Transfer, float] = {}
        self._work: dict[int, Future[SummedSlice]] = {}
        self._not_at_owner: set[int] = set()
        """First bytes of slices that the sites which summed them no longer have."""
        self.received_bytes = 0
        self.is_lost = False
        """True once a site that had the average has it no more: the whole state has to be taken over."""
        self._mine = [part for part in range(self.slices.parts) if self.owner(part) == sites.me]
        """The slices that this site sums."""

    @property
    def summed(self) -> list[int]:
        """The slices that this site has summed."""
        return [part for part in self._mine if part in self.reduced]

    def owner(self, part: int) -> str:
        return self.proposal.names[self.slices.owner(part)]

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

    def tend(self) -> None:
        """Do what can be done now: ask for what is missing, sum what is there."""
        left = [part for part in self._mine if part not in self.reduced]
        if left and self._sites.sent(self._number).exists():  # else the folder was lost: the ranks make it again
            for part in left:
                self._reduce(part)
        for part, facts in list(self.reduced.items()):
            owner = self.owner(part)
            if part not in self._here and part not in self._mine and owner in self._links.sites:
                self._fetch_slice(part, "slice", owner, facts.checksum)

    def complete(self, line: Line, holder: str | None) -> None:
        """Fetch what is missing of an agreed average: from the site that summed it, or from `holder`, which has all."""
        for part, checksum in enumerate(line.sums):
            if part in self._here:
                continue
            owner = self.owner(part)
            is_there = holder is None or self.slices.of(part)[0] not in self._not_at_owner
            if part in self.reduced and part not in self._mine and owner in self._links.sites and is_there:
                self._fetch_slice(part, "slice", owner, checksum)
            elif holder is not None:
                self._fetch_slice(part, "average", holder, checksum)

    def take(self, peer: str, piece: FilePiece, data: bytes) -> None:
        for key, pull in self._pulls.items():
            if pull.peer == peer and pull.wanted.what == piece.what and pull.wanted.start == piece.start:
                before = pull.received
                pull.take(piece.at, data)
                self.received_bytes += pull.received - before
                self._not_before_s.pop(key, None)
                return

    def gone(self, peer: str, message: BytesMissing) -> None:
        """Note that the peer does not have it, or not yet."""
        what, start = message.what, message.start
        for key, pull in self._pulls.items():
            if pull.peer == peer and pull.wanted.what == what and pull.wanted.start == start:
                pull.again()
                self.is_lost = self.is_lost or what == "average"
                if what == "slice":
                    self._not_at_owner.add(start)
                self._not_before_s[key] = time.monotonic() + ASK_AGAIN_S

    def connected_again(self, peer: str) -> None:
        """Ask that peer again for what has not come."""
        for pull in self._pulls.values():
            if pull.peer == peer:
                pull.again()

    def write(self, out: Path) -> None:
        """Write the whole average; it is on the disk then, as the ledger must not have a line without it."""
        with atomic_write(out) as file:
            for part in range(self.slices.parts):
                with self._slice(part).open("rb") as source:
                    shutil.copyfileobj(source, file)

    def abandon(self) -> None:
        """Let go of all files; they stay, and a transfer that is begun again goes on from them."""
        for pull in self._pulls.values():
            pull.close()
        self._pulls.clear()

    def hear_reduced(self, name: str, message: SliceSummed) -> None:
        """Note that a site has summed a slice; of another proposal with the same number it may be another slice."""
        part, sites = message.part, len(self.proposal.names)
        is_its = part < self.slices.parts and self.owner(part) == name
        is_of_as_many = [len(row) for row in message.products] == [sites] * sites
        if message.attempt == self.proposal.attempt and is_its and is_of_as_many:
            self.reduced[part] = SummedSlice(message.sum, message.products)

    def slice_file(self, attempt: int, start: int) -> tuple[Path, int] | None:
        """Return the file of the slice from byte `start` on, if this site has summed it, and that byte."""
        if attempt != self.proposal.attempt:
            return None
        return next(((self._slice(part), start) for part in self.summed if self.slices.of(part)[0] == start), None)

    def summary(self, part: int) -> SliceSummed:
        """Return what the others are told of a slice that this site has summed, as `hear_reduced` reads it."""
        facts, number, attempt = self.reduced[part], self._number, self.proposal.attempt
        return SliceSummed(round=number, attempt=attempt, part=part, sum=facts.checksum, products=facts.products)

    def _reduce(self, part: int) -> None:
        """Go on with a slice that this site sums: fetch the others' changes, sum them, say that it is done."""
        if (work := self._work.get(part)) is None:
            self._begin_sum(part)
        elif work.done():
            self.reduced[part] = work.result()
            self._here.add(part)
            self._links.tell_all(self.summary(part))

    def _begin_sum(self, part: int) -> None:
        """Fetch a slice of each other site's change; once all are here, have them summed."""
        first, size = self.slices.of(part)[0], self.slices.size(part)
        wanted = WantedBytes("sent", self._number, 0, first, size)
        pulls = {name: self._fetch_change(part, wanted, name) for name in self.proposal.names if name != self._sites.me}
        if not all(pull.is_done for pull in pulls.values()):
            return
        for name, pull in pulls.items():
            del self._pulls["sent", part, name]
            pull.close()
        mine = (self._sites.sent(self._number), first)
        files = [(pulls[name].path, 0) if name in pulls else mine for name in self.proposal.names]
        self._work[part] = self._pool.submit(self._reduce_files, files, size, self._slice(part))

    def _reduce_files(self, paths: Sequence[tuple[Path, int]], size: int, out: Path) -> SummedSlice:
        parts = [np.fromfile(path, np.uint8, size, offset=at) for path, at in paths]
        return reduce_slice(parts, self.weights, self._wire, out)

    def _fetch_change(self, part: int, wanted: WantedBytes, name: str) -> PulledFile:
        key = ("sent", part, name)
        pull = self._pull(key, wanted, name, self._temporary(f"part-{part}-{name}"))
        if not pull.is_done and name in self._links.sites:
            self._ask(key)
        return pull

    def _fetch_slice(self, part: int, what: Source, peer: str, checksum: int) -> None:
        wanted = WantedBytes(what, self._number, self.proposal.attempt, self.slices.of(part)[0], self.slices.size(part))
        key = ("slice", part, "")
        if key in self._pulls and (self._pulls[key].peer, self._pulls[key].wanted.what) != (peer, what):
            self._pulls.pop(key).close()  # what came of it stays in the file
        pull = self._pull(key, wanted, peer, self._slice(part))
        if not pull.is_done:
            self._ask(key)
        elif pull.checksum() == checksum:
            self._pulls.pop(key).close()
            self._here.add(part)
        else:
            pull.forget()

    def _pull(self, key: Transfer, wanted: WantedBytes, peer: str, path: Path) -> PulledFile:
        if key not in self._pulls:
            self._pulls[key] = PulledFile(wanted, peer, path)
        return self._pulls[key]

    def _ask(self, key: Transfer) -> None:
        """Ask for more of it. What was begun first is finished first: all transfers from a site share what may be asked
        for before it comes."""
        pull = self._pulls[key]
        if time.monotonic() >= self._not_before_s.get(key, 0.0):
            of_peer = sum(other.under_way for other in self._pulls.values() if other.peer == pull.peer)
            pull.ask(partial(self._links.tell, pull.peer), of_peer - pull.under_way)

    def _slice(self, part: int) -> Path:
        return self._temporary(f"slice-{part}")

    def _temporary(self, what: str) -> Path:
        who = zlib.crc32(" ".join(self.proposal.names).encode())
        return self._sites.folder / f"round-{self._number:08d}-{self.proposal.attempt}-{who:08x}-{what}.bin"
