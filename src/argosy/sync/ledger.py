"""Ledgers, `ledger.jsonl`: what the parts of a run agreed on, line by line, checked when it is read.

`RoundLedger`, of sites: for each round, who took part, with which samples, and who is next. Each site has the same
lines. A line holds all that the next one depends on, so that a site that comes back needs no more than the last.
`chain` is a checksum of the line and of all before it: two sites that have gone on without each other differ in it from
the first round on that they disagree about, and a line that is not what was written does not go with it.

`UpdateLedger`, of parameter servers: a line for each update, and for each item that no update is made from, in the
folder of the whole run. A run that goes on from a checkpoint of version v forgets the lines of update v and later ones:
what they were made from is dealt out again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from argosy.config.sync import SITE_NAME
from argosy.data.order import Range
from argosy.errors import StorageError
from argosy.files import append_whole, atomic_write, make_folder, sync
from argosy.processes.connection import DEFERRED, BadMessage, Count, WireRecord, decoded, encoded
from argosy.sync.deal import AppliedUpdate, Shares, deal, merged

LEDGER_FILE = "ledger.jsonl"
SiteName = Annotated[str, Field(pattern=SITE_NAME, max_length=64)]
Chain = Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]
"""Empty: of no line."""
Tokens = Annotated[int, Field(ge=1, lt=2**53)]
Crc = Annotated[int, Field(ge=0, lt=2**32)]
Ranges = list[tuple[Count, Count]]
AnyFloat = Annotated[float, Field(allow_inf_nan=True)]
"""Not finite if a site's weights are not."""


class Line(WireRecord, ser_json_inf_nan="constants"):
    """The agreement of a round."""

    round: Count
    """Counted from 0."""
    by: SiteName
    """The site that decided."""
    tokens: dict[SiteName, Tokens]
    """Tokens that each site that took part trained on in the round: the weight of its change."""
    samples: dict[SiteName, Ranges]
    """The samples of the sites that took part."""
    skipped: dict[SiteName, Ranges]
    """The samples among them that no update was made from, because of bad steps."""
    members: list[SiteName]
    """The sites that the round that this line deals out is dealt out to."""
    dealt: dict[SiteName, Ranges] | None
    """The samples of the next round (`Shares.ahead`: or the one after it); None: each site its own share of it."""
    returned: Ranges
    """Samples that are still to be handed out: sites that did not deliver had them."""
    attempt: Count
    sums: list[Crc]
    """CRC-32 of each slice of the average."""
    chain: Chain = ""
    extra: dict[Literal["norms", "spread", "cosines"], dict[str, AnyFloat]] = {}
    """Measurements, which are no part of the chain."""

    def chained(self, before: str) -> str:
        """Return the chain after this line, given the one before it."""
        record = self.model_dump(mode="json", exclude={"chain", "extra"})
        return hashlib.sha256((before + json.dumps(record, sort_keys=True)).encode()).hexdigest()[:16]


LEDGER_LINE: TypeAdapter[Line] = TypeAdapter(Line)


@dataclass(frozen=True)
class Contribution:
    """A site's part in a round."""

    tokens: int
    skipped: list[Range]


def next_line(
    shares: Shares,
    lines: Sequence[Line],
    by: str,
    delivered: Mapping[str, Contribution],
    present: Collection[str],
    attempt: int,
    sums: Sequence[int],
    extra: Mapping[Literal["norms", "spread", "cosines"], Mapping[str, float]],
) -> Line:
    """Return the line of the round after `lines`, in which the sites of `delivered` took part.

    Samples of members that did not deliver come back. The members of the round that it deals out are those that
    delivered and all that are `present`: connected, and near enough to take part.
    """
    last, number = (lines[-1] if lines else None), len(lines)
    dealt = dealt_in(shares, lines, number)
    samples = {name: dealt[name] for name in shares.names if name in delivered and name in dealt}
    lost = [some for name, ranges in dealt.items() if name not in samples for some in ranges]
    returned = merged([*([] if last is None else last.returned), *lost])
    members = [name for name in shares.names if name in delivered or name in present]
    later, left = deal(shares, number + shares.ahead, members, returned)
    usual, _ = deal(shares, number + shares.ahead, shares.names, [])
    line = Line(
        round=number,
        by=by,
        tokens={name: delivered[name].tokens for name in samples},
        samples=samples,
        skipped={name: delivered[name].skipped for name in samples if delivered[name].skipped},
        members=members,
        dealt=None if later == usual else later,
        returned=left,
        attempt=attempt,
        sums=list(sums),
        extra={key: dict(values) for key, values in extra.items()},
    )
    return line.model_copy(update={"chain": line.chained(chain_of(lines))})


def chain_of(lines: Sequence[Line]) -> str:
    return lines[-1].chain if lines else ""


def is_next(shares: Shares, lines: Sequence[Line], line: Line) -> bool:
    """Return True if `line` is what `next_line` returns after `lines` for the sites that it names, one at least."""
    delivered = {name: Contribution(tokens, line.skipped.get(name, [])) for name, tokens in line.tokens.items()}
    facts = delivered, line.members, line.attempt, line.sums, line.extra
    return bool(delivered) and line.by in shares.names and line == next_line(shares, lines, line.by, *facts)


def dealt_in(shares: Shares, lines: Sequence[Line], number: int) -> dict[str, list[Range]]:
    """Return the samples of each member of a round. `lines`: the ledger, up to the line that deals it out."""
    by = number - shares.ahead
    dealt = lines[by].dealt if by >= 0 else None
    return deal(shares, number, shares.names, [])[0] if dealt is None else dealt


def weights_of(lines: Sequence[Line], tokens: Mapping[str, int], rounds: int) -> dict[str, int]:
    """Return the weight of each site's change in the round after `lines`: the tokens that the change comes from.

    tokens: of each site that takes part, in the round. rounds: how many the change is over, if the site took part in
    those before: as many as there are fragments. A site that was left out began anew with the round after.
    """
    weights = dict(tokens)
    for name in tokens:
        for line in reversed(lines[max(0, len(lines) - rounds + 1) :]):
            if name not in line.tokens:
                break
            weights[name] += line.tokens[name]
    return weights


class LedgerFile:
    """The file of a ledger; one process writes it. What writes raises StorageError if the disk does not take it."""

    def __init__(self, folder: Path):
        self.path = folder / LEDGER_FILE

    def sync(self) -> None:
        """Wait until all lines are on the disk: a checkpoint that follows relies on them."""
        if self.path.exists():
            with self._writing(), self.path.open("rb") as file:
                sync(file)

    def _add(self, text: bytes) -> None:
        with self._writing(), self.path.open("ab", buffering=0) as file:
            append_whole(file, text + b"\n")

    def _write(self, texts: Iterable[bytes]) -> None:
        """Have these lines in place of those that are there."""
        with self._writing():
            make_folder(self.path.parent)
            with atomic_write(self.path) as file:
                file.write(b"".join(text + b"\n" for text in texts))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise StorageError(
                f"{self.path} could not be written ({problem}). Free some space, and run the same command again to go "
                "on from the newest checkpoint."
            ) from None


class RoundLedger(LedgerFile):
    """A site's ledger, in its folder."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.lines: list[Line] = []
        """The lines up to the first that is damaged."""
        self.tokens = 0
        """Tokens that it counts, of all sites."""
        self.damage = ""
        """The line of the file that is not what was written, in words; empty if all are."""
        self._rest: list[bytes] = []
        self._read_bytes = 0
        self._file_id: tuple[int, int] | None = None
        self.refresh()

    def size_of(self, rounds: int) -> int:
        """Return the bytes of the lines of the first rounds."""
        self.refresh()
        with self.path.open("rb") as file:
            return sum(len(file.readline()) for _ in range(rounds))

    @property
    def last(self) -> Line | None:
        return self.lines[-1] if self.lines else None

    @property
    def rounds(self) -> int:
        """Rounds that the file has a line of, damaged ones too."""
        return len(self.lines) + len(self._rest)

    def beyond_damage(self) -> dict[int, Line]:
        """Return the lines after the first that is damaged, by the round that they name, as far as they can be read."""
        found: dict[int, Line] = {}
        for text in self._rest[1:]:
            with suppress(BadMessage):
                line = decoded(text, LEDGER_LINE)
                if line.round <= self.rounds:  # else that is what is damaged in it
                    found[line.round] = line
        return found

    def refresh(self) -> None:
        """Read what was written since; a last line that is cut off is left out."""
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                if (about.st_dev, about.st_ino) != self._file_id or about.st_size < self._read_bytes:
                    self._forget()
                    self._file_id = (about.st_dev, about.st_ino)
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            self._forget()
            return
        texts = data.split(b"\n")[:-1]
        self.damage, self._rest = "", []
        for at, text in enumerate(texts):
            try:
                line = checked_line(self.lines, text)
            except BadMessage as problem:
                self.damage = f"line {len(self.lines) + 1} of {self.path} is not what was written ({problem})"
                self._rest = texts[at:]
                return
            self.lines.append(line)
            self.tokens += sum(line.tokens.values())
            self._read_bytes += len(text) + 1

    def read_again(self) -> None:
        """Read the whole file again: what was read of it before may have changed since."""
        self._file_id = None
        self.refresh()

    def append(self, line: Line) -> None:
        """Add the next line, on the disk when this returns."""
        self.refresh()
        assert line.round == len(self.lines), f"round {line.round} after {len(self.lines)} rounds"
        assert not self.damage, self.damage
        if self.path.exists():
            os.truncate(self.path, self._read_bytes)  # a last line that was cut off
        self._add(encoded(line))
        self.sync()
        self.refresh()

    def dealt_by(self, number: int) -> dict[str, list[Range]] | None:
        """Return the samples, by site, that the line of a round deals out; None: each site its own share, or there is
        no such line (yet)."""
        return self.lines[number].dealt if 0 <= number < len(self.lines) else None

    def replace(self, lines: Sequence[Line]) -> None:
        """Have these lines in place of those that are there; if they differ, the old ledger stays beside it."""
        if [line.chain for line in lines[: len(self.lines)]] != [line.chain for line in self.lines]:
            aside = self.path.with_name(f"ledger-discarded-{len(self.lines)}-{self.lines[-1].chain}.jsonl")
            aside.write_bytes(self.path.read_bytes())
        self._write(encoded(line) for line in lines)
        self.read_again()

    def _forget(self) -> None:
        self.lines, self.tokens, self._read_bytes = [], 0, 0
        self.damage, self._rest = "", []


def checked_line(lines: Sequence[Line], text: bytes) -> Line:
    """Return the line that follows `lines` from the text that was written of it. Raises: BadMessage if it is none."""
    line = decoded(text, LEDGER_LINE)
    if line.round != len(lines):
        raise BadMessage(f"it is of round {line.round}")
    if line.chained(chain_of(lines)) != line.chain:
        raise BadMessage("its checksum is another")
    return line


class UpdateLine(WireRecord, extra="ignore"):
    """An update that parameter servers made."""

    update: Count
    item: Count
    samples: Ranges
    site: SiteName
    """The worker that computed its gradient."""
    version: Count
    """Updates that had made the weights that it was computed with."""
    staleness: Count
    loss: float | None = None


class SkippedLine(WireRecord, extra="ignore"):
    """An item that no update is made from."""

    skipped: Count
    version: Count
    """Updates that were made when that was found."""
    site: SiteName
    why: str


UPDATE_LINE: TypeAdapter[UpdateLine | SkippedLine] = TypeAdapter(UpdateLine | SkippedLine, config=DEFERRED)


class UpdateLedger(LedgerFile):
    """The ledger of parameter servers, in the run's folder."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.updates: list[AppliedUpdate] = []
        self.skipped: list[tuple[int, int]] = []
        """Items that no update is made from, and after how many updates that was found."""

    def turn_back(self, version: int) -> int:
        """Read the lines of the first `version` updates, and forget those after them.

        Returns how many updates are forgotten. Raises: ValueError if lines of these are missing, or damaged.
        """
        kept: list[bytes] = []
        self.updates, self.skipped = [], []
        forgotten = 0
        texts = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        for number, text in enumerate(texts):
            try:
                line = decoded(text, UPDATE_LINE)
            except BadMessage as problem:
                raise ValueError(f"{self.path}: line {number + 1} is not what was written ({problem})") from None
            if isinstance(line, SkippedLine):
                if line.version < version:
                    self.skipped.append((line.skipped, line.version))
                    kept.append(text)
            elif line.update < version:
                self.updates.append(AppliedUpdate(line.update, line.item, line.site, line.version))
                kept.append(text)
            else:
                forgotten += 1
        if [update.update for update in self.updates] != list(range(version)):
            raise ValueError(f"{self.path}: it has no line for each of the first {version} updates")
        self._write(kept)
        return forgotten

    def add(self, update: AppliedUpdate, samples: Ranges, loss: float) -> None:
        """Add the line of an update, which was made from these samples."""
        self.updates.append(update)
        line = UpdateLine(
            update=update.update,
            item=update.item,
            samples=samples,
            site=update.site,
            version=update.version,
            staleness=update.staleness,
            loss=loss,
        )
        self._add(encoded(line))

    def skip(self, item: int, site: str, why: str) -> None:
        version = len(self.updates)
        self.skipped.append((item, version))
        self._add(encoded(SkippedLine(skipped=item, version=version, site=site, why=why)))
