"""A split of a prepared folder, read as one long stream of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.manifest import Manifest, SplitName
from argosy.data.shards import ShardReader
from argosy.errors import DataError, UserError

I32 = npt.NDArray[np.int32]
Place = tuple[str, int]
"""A shard: its folder, and its number in its split."""

OPEN_SHARDS = 256
"""Memory maps that a source keeps open. Each takes a file descriptor, and a process often has only 1024."""


class BadShard(DataError):
    """A shard is missing, too short, damaged, or made with another vocabulary."""

    def __init__(self, text: str, folder: str, shard: int):
        super().__init__(text)
        self.place: Place = (folder, shard)


class TokenSource:
    """All shards of a split laid end to end. Window w of T tokens is tokens w T to (w + 1) T, and the next one.

    Args:
        folder: a prepared folder.
        split: "train" or "validation".
        check_shards: check all shards now, not each when it is first read.

    Raises: UserError, DataError if the folder is not complete (see `Manifest.load`).
    """

    def __init__(self, folder: Path | str, split: SplitName = "train", check_shards: bool = True):
        self.folder, self.split = Path(folder), split
        self.name = str(self.folder)
        """What the user calls it: the folder, or a URL."""
        self.manifest = Manifest.load(self.folder, check_shards)
        self._shards = [shard for shard in self.manifest.splits.get(split, ()) if shard.tokens]
        self._starts = [0, *accumulate(shard.tokens for shard in self._shards)]
        self._reader = lru_cache(OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        """Tokens in the split, ends of documents included."""
        return self._starts[-1]

    @property
    def text_bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text per token; it turns nats per token into bits per byte."""
        return self.manifest.text_bytes(self.split) / max(len(self), 1)

    def held_out(self) -> TokenSource:
        """The validation split of the same folder."""
        return TokenSource(self.folder, "validation", check_shards=False)  # the check was done, or is not wanted

    def windows(self, seq_len: int) -> int:
        """Count the whole windows of `seq_len` tokens and their successors.

        Raises: UserError if there is none.
        """
        if (windows := (len(self) - 1) // seq_len) > 0:
            return windows
        remedies = [f"seq_len = {len(self) - 1} or less"] if len(self) > 1 else []
        remedies += ["more text"] if self.split == "train" else ["a larger validation_fraction", "more text"]
        raise UserError(
            f"data.seq_len = {seq_len}: the {self.split} split of {self.name} has only {len(self)} tokens, and a "
            f"sample takes seq_len + 1. Try {', or '.join(remedies)}"
        )

    def tokens(self, start: int, stop: int) -> I32:
        """Return tokens `start` to `stop` of the stream.

        Raises: BadShard if a shard is damaged there, or holds an id outside the vocabulary.
        """
        out = np.empty(max(min(stop, len(self)) - start, 0), np.int32)
        self._copy(start, out)
        return out

    def read_windows(self, windows: npt.NDArray[np.int64], out: I32) -> None:
        """Copy the windows with these numbers into the rows of `out` [len(windows), seq_len + 1]. Raises: BadShard."""
        seq_len = out.shape[1] - 1
        for row, window in enumerate(windows.tolist()):
            self._copy(window * seq_len, out[row])

    def in_shards(self, windows: npt.NDArray[np.int64], seq_len: int, shards: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Return True for each window, of `seq_len` tokens and their successors, that overlaps any of `shards`."""
        starts = windows * seq_len
        inside = np.zeros(windows.shape, bool)
        for shard in shards:
            inside |= (starts < self._starts[shard + 1]) & (starts + seq_len >= self._starts[shard])
        return inside

    def _copy(self, start: int, out: I32) -> None:
        done = 0
        while done < len(out):
            shard = bisect_right(self._starts, start + done) - 1
            offset = start + done - self._starts[shard]
            stop = min(offset + len(out) - done, self._starts[shard + 1] - self._starts[shard])
            try:
                out[done : done + stop - offset] = self._tokens(shard, offset, stop)
            except DataError as problem:
                raise BadShard(str(problem), self.name, shard) from None
            done += stop - offset

    def _tokens(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens `start` to `stop` of a shard. Raises: DataError."""
        return self._reader(shard).tokens(start, stop)

    def _open(self, shard: int) -> ShardReader:
        self.manifest.check_sizes(self.folder, self._shards[shard])
        path = self.folder / f"{self._shards[shard].name}.bin"
        return ShardReader(path, np.dtype(self.manifest.dtype), self.manifest.vocab_size)


def spread_windows(source: TokenSource, seq_len: int, max_tokens: int) -> I32:
    """Return windows with `max_tokens` in all (at least one), spread evenly over the split; int32 [n, seq_len + 1].

    The same arguments give the same windows. They are spread to be as varied as the whole split.

    Raises: UserError if the split is shorter than one window.
    """
    windows = source.windows(seq_len)
    n = min(windows, max(max_tokens // seq_len, 1))
    out = np.empty((n, seq_len + 1), np.int32)
    source.read_windows(np.arange(n, dtype=np.int64) * windows // n, out)
    return out
