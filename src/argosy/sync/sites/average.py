"""The mean of the sites' changes, slice by slice: a reduce-scatter and an all-gather between the sites' exchanges.

The bytes of a change are cut into as many slices as sites take part; each site sums one of them. So each sends and
receives 2 (n-1)/n of the bytes of one change, as in a ring (Thakur et al. 2005), in two rounds of messages. Sums are
in fp32 and in the order of the run file, so that it does not matter who sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from argosy.sync.sites.wire import WireFormat

CHUNK_BLOCKS = 4096
"""Blocks that are summed at once: 4 MiB of numbers a site."""


@dataclass(frozen=True)
class Slices:
    """How the bytes of a change are cut up for `parts` sites."""

    blocks: int
    block_bytes: int
    parts: int

    def of(self, part: int) -> tuple[int, int]:
        """Return the first byte of a slice, and the one after its last."""
        return self._block(part) * self.block_bytes, self._block(part + 1) * self.block_bytes

    def size(self, part: int) -> int:
        """Return the bytes of a slice."""
        first, end = self.of(part)
        return end - first

    def _block(self, part: int) -> int:
        return self.blocks * part // self.parts


def encode_file(numbers: Path, wire: WireFormat, out: Path) -> int:
    """Write the numbers of a file as they are sent, under a name that is there once it is whole. Returns CRC-32."""
    vector = np.fromfile(numbers, np.float32)
    data = wire.encode(vector)
    partial = out.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(data.tobytes())
    partial.replace(out)
    return zlib.crc32(data.tobytes())


@dataclass(frozen=True)
class Reduced:
    """A slice that was summed."""

    checksum: int
    """CRC-32 of its bytes."""
    products: list[list[float]]
    """Inner products of the sites' changes within the slice."""


def reduce_slice(
    parts: Sequence[npt.NDArray[np.uint8]], weights: Sequence[float], wire: WireFormat, out: Path
) -> Reduced:
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
            data = wire.encode(mean).tobytes()
            crc = zlib.crc32(data, crc)
            file.write(data)
    return Reduced(crc, products.tolist())


def distances(
    names: Sequence[str], products: Sequence[Sequence[float]], weights: Sequence[float]
) -> dict[str, Mapping[str, float]]:
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
