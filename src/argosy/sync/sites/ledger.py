"""The ledger of a run over several sites: for each round, who took part, with which samples, and who is next.

Each site has the same lines in its `ledger.jsonl`. A line holds all that the next one depends on, so that a site that
comes back needs no more than the last. `chain` is a checksum of the line and of all before it: two sites that have gone
on without each other differ in it from the first round on that they disagree about.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from argosy.data.order import Range
from argosy.files import atomic_write
from argosy.sync.sites.deal import Shares, deal, merged

NAME = "ledger.jsonl"


@dataclass(frozen=True)
class Line:
    """What was agreed on in a round."""

    round: int
    """Counted from 0."""
    by: str
    """The site that decided."""
    tokens: dict[str, int]
    """Tokens that each site that took part trained on in the round: the weight of its change."""
    samples: dict[str, list[Range]]
    """The samples of the sites that took part."""
    skipped: dict[str, list[Range]]
    """Those of them that no update was made from, because of bad steps."""
    members: list[str]
    """The sites that the round that this line deals out is dealt out to."""
    dealt: dict[str, list[Range]] | None
    """The samples of the next round (`Shares.ahead`: or the one after it); None: each site its own share of it."""
    returned: list[Range]
    """Samples that are still to be handed out: sites that did not deliver had them."""
    attempt: int
    sums: list[int]
    """CRC-32 of each slice of the average."""
    chain: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    """What was measured: `norms`, `cosines`; not part of the chain."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Line:
        """Return the line whose `to_json` this is. Raises: KeyError, TypeError, ValueError if it is none."""

        def by_site(value: Mapping[str, Any]) -> dict[str, list[Range]]:
            return {str(name): [(int(a), int(b)) for a, b in ranges] for name, ranges in value.items()}

        return cls(
            round=int(record["round"]),
            by=str(record["by"]),
            tokens={str(name): int(n) for name, n in record["tokens"].items()},
            samples=by_site(record["samples"]),
            skipped=by_site(record["skipped"]),
            members=[str(name) for name in record["members"]],
            dealt=None if record["dealt"] is None else by_site(record["dealt"]),
            returned=[(int(a), int(b)) for a, b in record["returned"]],
            attempt=int(record["attempt"]),
            sums=[int(n) for n in record["sums"]],
            chain=str(record["chain"]),
            extra=dict(record["extra"]),
        )

    def chained(self, before: str) -> str:
        """Return the chain after this line, given the one before it."""
        record = {key: value for key, value in self.to_json().items() if key not in ("chain", "extra")}
        return hashlib.sha256((before + json.dumps(record, sort_keys=True)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Delivery:
    """What a site says of its part in a round."""

    tokens: int
    skipped: list[Range]


def next_line(
    shares: Shares,
    lines: Sequence[Line],
    by: str,
    delivered: Mapping[str, Delivery],
    present: Collection[str],
    attempt: int,
    sums: Sequence[int],
    extra: Mapping[str, Any],
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
        extra=dict(extra),
    )
    return Line(**{**line.__dict__, "chain": line.chained("" if last is None else last.chain)})


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


def _text(line: Line) -> bytes:
    return json.dumps(line.to_json(), separators=(",", ":")).encode() + b"\n"


class Ledger:
    """A site's ledger, in its folder."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self.lines: list[Line] = []
        self.tokens = 0
        """Tokens that it counts, of all sites."""
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
        """The newest line."""
        return self.lines[-1] if self.lines else None

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
        whole = data[: data.rfind(b"\n") + 1]
        for text in whole.splitlines():
            line = Line.from_json(json.loads(text))
            if line.round != len(self.lines):
                break
            self.lines.append(line)
            self.tokens += sum(line.tokens.values())
        self._read_bytes += len(whole)

    def append(self, line: Line) -> None:
        """Add the next line, on the disk when this returns."""
        self.refresh()
        assert line.round == len(self.lines), f"round {line.round} after {len(self.lines)} rounds"
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(self._read_bytes)  # what was cut off
            file.seek(0, os.SEEK_END)
            file.write(_text(line))
            file.flush()
            os.fsync(file.fileno())
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
        with atomic_write(self.path) as file:
            file.write(b"".join(_text(line) for line in lines))
        self._file_id = None
        self.refresh()

    def _forget(self) -> None:
        self.lines, self.tokens, self._read_bytes = [], 0, 0
