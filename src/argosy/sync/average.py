"""The mean of the sites' changes, slice by slice: a reduce-scatter and an all-gather between the sites' exchanges.

The bytes of a change are cut into slices that the sites take turns in; each site sums its own. So each sends and
receives 2 (n-1)/n of the bytes of one change, as in a ring (Thakur et al. 2005), in two rounds of messages. A site has
several slices, so that one is on the link while another is summed. Sums are in fp32 and in the order of the run file,
so that it does not matter who sums. Averages of past rounds are retained as long as somebody may need them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from argosy.plan.sync import WIRE_BLOCK
from argosy.processes.connection import BadMessage
from argosy.sync.layout import LeftChange, Sites, read_record
from argosy.sync.ledger import Line
from argosy.sync.wire import WireFormat

CHUNK_BLOCKS = 512
"""Blocks that are encoded or summed at once: 512 KiB of numbers a site, which stay in the processor's cache."""
SLICE_BYTES, SLICES_OF_A_SITE = 1 << 20, 8
"""A slice has at least so many bytes, if there are several for a site; and there are at most so many."""


@dataclass(frozen=True)
class Slices:
    """The slices of the bytes of a change, for `sites` sites."""

    blocks: int
    block_bytes: int
    sites: int

    @cached_property
    def parts(self) -> int:
        of_a_site = self.blocks * self.block_bytes // self.sites // SLICE_BYTES
        return self.sites * min(max(of_a_site, 1), SLICES_OF_A_SITE)

    def owner(self, part: int) -> int:
        """Return the place, among the sites that take part, of the one that sums a slice."""
        return part % self.sites

    def of(self, part: int) -> tuple[int, int]:
        """Return the first byte of a slice, and the one after its last."""
        return self._block(part) * self.block_bytes, self._block(part + 1) * self.block_bytes

    def size(self, part: int) -> int:
        first, end = self.of(part)
        return end - first

    def _block(self, part: int) -> int:
        return self.blocks * part // self.parts


def slices_of(sites: Sites, number: int, count: int) -> Slices:
    """Return the slices of a round's change if `count` sites take part."""
    wire = sites.wire_of(number)
    return Slices(wire.blocks(sites.flat(number).elements), wire.block_bytes, count)


def has_average(sites: Sites, line: Line) -> bool:
    """Return True if the average of a round in this site's folder is the one that `line` is about."""
    slices = slices_of(sites, line.round, len(line.tokens))
    try:
        with sites.average(line.round).open("rb") as file:
            sums = [zlib.crc32(file.read(slices.size(part))) for part in range(slices.parts)]
    except OSError:
        return False
    return sums == line.sums


def encode_file(numbers: Path, wire: WireFormat, out: Path) -> None:
    """Write the fp32 numbers of a file as they are sent, under a name that is there once it is whole."""
    partial = out.with_suffix(".partial")
    with numbers.open("rb") as source, partial.open("wb") as file:
        while data := source.read(CHUNK_BLOCKS * WIRE_BLOCK * 4):
            file.write(wire.encode(np.frombuffer(data, np.float32)).data)
    partial.replace(out)


@dataclass(frozen=True)
class SummedSlice:
    """A slice that was summed."""

    checksum: int
    """CRC-32 of its bytes."""
    products: list[list[float]]
    """Inner products of the sites' changes within the slice."""


def reduce_slice(
    parts: Sequence[npt.NDArray[np.uint8]], weights: Sequence[float], wire: WireFormat, out: Path
) -> SummedSlice:
    """Write the weighted mean of the same slice of each site's change. weights: positive, in any unit."""
    shares = np.asarray(weights, np.float64) / sum(weights)
    products = np.zeros((len(parts), len(parts)))
    crc = 0
    chunk = CHUNK_BLOCKS * wire.block_bytes
    with out.open("wb") as file:
        for at in range(0, len(parts[0]), chunk):
            numbers = [wire.decode(part[at : at + chunk]) for part in parts]
            mean = np.zeros_like(numbers[0])
            for share, some in zip(shares, numbers, strict=True):
                mean += some * np.float32(share)
            stacked = np.stack(numbers)
            products += (stacked @ stacked.T).astype(np.float64)
            data = wire.encode(mean).data
            crc = zlib.crc32(data, crc)
            file.write(data)
    return SummedSlice(crc, products.tolist())


def distances(
    names: Sequence[str], products: Sequence[Sequence[float]], weights: Sequence[float]
) -> dict[Literal["norms", "spread", "cosines"], dict[str, float]]:
    """Return how far the sites' weights are from each other, for the inner products of their changes.

    `norms`: of each site's difference to the outer parameters; `cosines`: between those of each pair; `spread`: norm
    of each site's difference to the weighted mean of all.
    """
    inner = np.asarray(products, np.float64)
    shares = np.asarray(weights, np.float64) / sum(weights)
    squares = np.diag(inner) - 2 * inner @ shares + shares @ inner @ shares
    spread = np.sqrt(np.maximum(squares, 0.0))
    norms = {name: max(products[i][i], 0.0) ** 0.5 for i, name in enumerate(names)}
    cosines = {
        f"{one} {other}": products[i][j] / (norms[one] * norms[other])
        for i, one in enumerate(names)
        for j, other in enumerate(names)
        if i < j and norms[one] and norms[other]
    }
    return {
        "norms": {name: float(f"{norm:.6g}") for name, norm in norms.items()},
        "spread": {name: float(f"{norm:.6g}") for name, norm in zip(names, spread, strict=True)},
        "cosines": {pair: round(cosine, 6) for pair, cosine in cosines.items()},
    }


class RetainedAverages:
    """Averages are kept as long as a checkpoint of this site needs them, or another site is reading its way to now."""

    def __init__(self, sites: Sites):
        self._sites = sites
        self._readers: dict[str, tuple[int, float]] = {}

    def read(self, name: str, number: int) -> None:
        """Note that a site reads what is of a past round: it will want all that came after."""
        self._readers[name] = (number, time.monotonic())

    def sweep(self, number: int) -> None:
        """Remove what is of no use any more once the round `number` is in the ledger."""
        averages_from = 0  # a round that this site did not take part in says nothing of its checkpoints
        with suppress(OSError, BadMessage):
            averages_from = read_record(self._sites.about(number), LeftChange).needs_round
        states_from = number
        for first, at_s in self._readers.values():
            if time.monotonic() - at_s < self._sites.run.sync.patience_s:
                averages_from, states_from = min(averages_from, first), min(states_from, first)
        for path in self._sites.folder.iterdir():
            kind, _, rest = path.name.partition("-")
            digits = rest[:8]
            if not digits.isdigit() or kind == "taken":
                continue
            keep_from = {"average": averages_from, "traffic": averages_from, "state": states_from}
            if int(digits) < keep_from.get(kind, number + 1):
                path.unlink(missing_ok=True)
