"""A split of prepared data in an object store, read through the cache."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.manifest import CHECKSUM_BLOCK_BYTES, Shard, SplitName
from argosy.data.order import I64
from argosy.data.shards import I32, TokenSource, check_ids
from argosy.data.stores.cache import Cache, block_key
from argosy.data.stores.folder import StoreFolder
from argosy.data.stores.store import is_url
from argosy.errors import DataError

FETCHES = 32
"""Requests at once: with 20 ms each and 256 KiB, more than 1 Gbit/s takes."""
WINDOWS_AT_ONCE = 64
"""Windows whose blocks are made sure of before they are read."""


class StoreShard:
    """The tokens of one shard, block by block out of the cache, or out of the store. Stands for a `ShardReader`."""

    def __init__(self, folder: StoreFolder, shard: Shard, held: threading.local):
        self._folder, self.shard, self._held = folder, shard, held
        self._dtype, self._vocab_size = np.dtype(folder.manifest.dtype), folder.manifest.vocab_size
        self._has_marks = folder.manifest.rows is not None
        self._checked: dict[int, int] = {}  # block -> inode of the file that was compared

    def tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens `start` to `stop`. Raises: DataError, Retryable."""
        size = self._dtype.itemsize
        first, last = start * size, stop * size
        parts = []
        while first < last:
            block, offset = divmod(first, CHECKSUM_BLOCK_BYTES)
            length = min(CHECKSUM_BLOCK_BYTES - offset, last - first)
            parts.append(self._read(block, offset, length))
            first += length
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self._dtype)

    @property
    def blocks(self) -> int:
        return -(-self.shard.tokens * self._dtype.itemsize // CHECKSUM_BLOCK_BYTES)

    def has(self, block: int) -> bool:
        return self._key(block) in self._blocks or self._folder.cache.path(self.shard.bin_sha256, block).exists()

    def hold(self, blocks: dict[int, bytes]) -> None:
        """Keep blocks that the cache has no room for, until this thread's next `release`."""
        for block, data in blocks.items():
            self._check_ids(block, data)
            self._blocks[self._key(block)] = data

    @property
    def _blocks(self) -> dict[tuple[str, int], bytes]:
        if not hasattr(self._held, "blocks"):
            self._held.blocks = {}
        blocks: dict[tuple[str, int], bytes] = self._held.blocks
        return blocks

    def _key(self, block: int) -> tuple[str, int]:
        return self.shard.bin_sha256, block

    def _read(self, block: int, offset: int, length: int) -> bytes:
        if (held := self._blocks.get(self._key(block))) is not None:
            return held[offset : offset + length]
        if (data := self._from_cache(block, offset, length)) is not None:
            return data
        self.hold(self._folder.fetch_surely(self.shard, block, block + 1).unstored)
        return self._read(block, offset, length)  # it is held now, or was stored by this process or another

    def _from_cache(self, block: int, offset: int, length: int) -> bytes | None:
        """Return bytes of a block that lies in the cache; None if it does not, or was damaged there."""
        try:
            descriptor = os.open(self._folder.cache.path(self.shard.bin_sha256, block), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            inode = os.fstat(descriptor).st_ino
            if self._checked.get(block) == inode:
                data = os.pread(descriptor, length, offset)
                if len(data) == length:
                    return data
            data = os.pread(descriptor, CHECKSUM_BLOCK_BYTES, 0)
        except OSError:  # of a failing disk
            data = b""
        finally:
            os.close(descriptor)
        if not data or zlib.crc32(data) != int(self._folder.checksums_surely(self.shard)[block]):
            self._folder.news.append(("block_damaged", {"shard": self.shard.name, "block": block, "in": "cache"}))
            self._folder.cache.remove(self.shard.bin_sha256, block)
            return None
        self._check_ids(block, data)
        self._checked[block] = inode
        return data[offset : offset + length]

    def _check_ids(self, block: int, data: bytes) -> None:
        where = f"{self._folder.url}/{self.shard.name}.bin: the block at byte {block * CHECKSUM_BLOCK_BYTES}"
        check_ids(where, np.frombuffer(data, self._dtype), self._vocab_size, self._has_marks)


class StoreSource(TokenSource):
    """A split of the prepared folder at a URL. It reads the same tokens as a `TokenSource` of a copy of the folder."""

    def __init__(self, folder: StoreFolder, split: SplitName = "train"):
        self._open_split(folder.local, folder.url, folder.manifest, split)
        self.store_folder = folder
        self._held = threading.local()
        self._shard = lru_cache(None)(self._open_shard)
        self._itemsize = np.dtype(self.manifest.dtype).itemsize
        counts = [-(-shard.tokens * self._itemsize // CHECKSUM_BLOCK_BYTES) for shard in self._shards]
        self._first_block = np.array([0, *accumulate(counts)], np.int64)
        self._starts_array = np.array(self._starts, np.int64)

    @property
    def blocks(self) -> int:
        return int(self._first_block[-1])

    @cached_property
    def keys(self) -> npt.NDArray[np.uint64]:
        """The key of each shard's block 0 in plans; that of block b is b more."""
        return np.array([block_key(shard.bin_sha256, 0) for shard in self._shards], np.uint64)

    def held_out(self) -> StoreSource:
        """The validation split of the same folder."""
        return StoreSource(self.store_folder, "validation")

    def tokens(self, start: int, stop: int) -> I32:
        """Return tokens `start` to `stop` of the stream. Raises: BadShard, Retryable."""
        if start < (end := min(stop, len(self))):
            self._ensure(np.arange(self._block_at(np.array([start]))[0], self._block_at(np.array([end - 1]))[0] + 1))
        try:
            return super().tokens(start, stop)
        finally:
            self._release()

    def read_windows(self, windows: I64, out: I32) -> None:
        """Copy the windows with these numbers into the rows of `out`. Raises: BadShard, Retryable."""
        for first in range(0, len(windows), WINDOWS_AT_ONCE):
            part = windows[first : first + WINDOWS_AT_ONCE]
            self._ensure(np.unique(self.blocks_of(part, out.shape[1] - 1)))
            try:
                super().read_windows(part, out[first : first + WINDOWS_AT_ONCE])
            finally:
                self._release()

    def blocks_of(self, windows: I64, seq_len: int) -> I64:
        """Return the blocks that these windows and their successors take, in their order; [at least one a window].

        Blocks are numbered through all shards of the split.
        """
        starts = windows * seq_len
        first, last = self._block_at(starts), self._block_at(starts + seq_len)
        columns = [np.minimum(first + extra, last) for extra in range(int((last - first).max(initial=0)) + 1)]
        return np.stack(columns, axis=1).reshape(-1)

    def place(self, block: int) -> tuple[StoreShard, int]:
        shard = int(np.searchsorted(self._first_block, block, side="right")) - 1
        return self._shard(shard), block - int(self._first_block[shard])

    def keys_of(self, blocks: I64) -> npt.NDArray[np.uint64]:
        shards = np.searchsorted(self._first_block, blocks, side="right") - 1
        return self.keys[shards] + (blocks - self._first_block[shards]).astype(np.uint64)

    def present(self) -> npt.NDArray[np.bool_]:
        """Return for each block of the split if it is in the cache."""
        here = np.zeros(self.blocks, bool)
        for shard, first in zip(self._shards, self._first_block.tolist(), strict=False):
            numbers = self.store_folder.cache.present(shard.bin_sha256)
            here[first + numbers[first + numbers < self.blocks]] = True
        return here

    def _block_at(self, tokens: I64) -> I64:
        shards = np.searchsorted(self._starts_array, tokens, side="right") - 1
        shards = np.minimum(shards, len(self._shards) - 1)
        inside = (tokens - self._starts_array[shards]) * self._itemsize // CHECKSUM_BLOCK_BYTES
        blocks: I64 = np.minimum(self._first_block[shards] + inside, self.blocks - 1)
        return blocks

    def _ensure(self, blocks: I64) -> None:
        """Fetch those of `blocks` that are not here, several at once."""
        missing = [(shard, block) for shard, block in map(self.place, blocks.tolist()) if not shard.has(block)]
        self.store_folder.count(hits=len(blocks) - len(missing), misses=len(missing))
        if len(missing) < 2:
            return  # reading it fetches it
        with ThreadPoolExecutor(FETCHES) as pool:
            fetched = [pool.submit(self.store_folder.fetch_surely, shard.shard, b, b + 1) for shard, b in missing]
        for (shard, _), blocks_of_it in zip(missing, fetched, strict=True):
            with suppress(DataError):  # reading it says so, with its place
                shard.hold(blocks_of_it.result().unstored)

    def _release(self) -> None:
        self._held.blocks = {}

    def _tokens(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        return self._shard(shard).tokens(start, stop)

    def _open_shard(self, number: int) -> StoreShard:
        return StoreShard(self.store_folder, self._shards[number], self._held)


def open_source(
    place: str | Path, split: SplitName, check_shards: bool = True, cache: Cache | None = None
) -> TokenSource:
    """Open a split of the prepared data at `place`, a folder or a URL (which needs a cache).

    Raises: as `TokenSource` and `StoreFolder`.
    """
    if not is_url(place):
        return TokenSource(place, split, check_shards)
    if cache is None:
        raise ValueError(f"{place}: a URL without a cache")
    return StoreSource(StoreFolder(str(place), cache, check_shards), split)


def stores_of(sources: Sequence[TokenSource]) -> list[StoreFolder]:
    """Return the folders in stores among those of `sources`."""
    return [source.store_folder for source in sources if isinstance(source, StoreSource)]
